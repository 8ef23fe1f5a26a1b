"""What is dangerous is done in one place, which takes care; nobody does it another way."""

import re
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"


@pytest.mark.parametrize(
    ("done", "places"),
    [
        (
            r"os\.(replace|rename)\(|mkstemp|\.write_(text|bytes)\(|open\([^)]*[\"'][wax]b?[\"']",
            {"wholefile.py"},
        ),
        (r"\byaml\.\w*(load|parse|compose|dump)\w*\(", {"yamlfile.py"}),
        (r"\bjson\.load\(", {"guest.py", "cpsat.py"}),  # our own processes, by pipes
        (r"import_module\(", {"target.py", "demo_tasks.py", "torch_private.py", "__init__.py"}),
    ],
    ids=["writing", "yaml", "json", "importing"],
)
def test_nobody_does_it_another_way(done: str, places: set[str]) -> None:
    """Files are written whole, read with suspicion, and what data names is not imported."""
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGES.glob("*/src/**/*.py")}
    found = {path.name for path, text in sources.items() if re.search(done, text)}
    assert found
    assert found <= places
