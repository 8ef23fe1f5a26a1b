"""Where the test data lies: in `tests/data` of the repository, or of this package's sdist."""

from pathlib import Path

FOLDERS = [parent / "tests" / "data" for parent in Path(__file__).resolve().parents]
DATA = next(folder for folder in FOLDERS if folder.is_dir())
GRAPHS = DATA / "graphs"
