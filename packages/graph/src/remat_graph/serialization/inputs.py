"""Paths that a user names for input: what was meant where a model stands instead of a saved file."""

import importlib.util
import os
import re
from collections.abc import Mapping

from remat_graph.errors import BadFile

WRITTEN_BY: Mapping[str, str] = {
    "graph": "`remat plan MODEL --budget 100% --graph-out FILE` writes one",
    "plan": "`remat plan MODEL --budget 40% --plan-out FILE` writes one",
}
"""How a user gets a file, by what it holds."""

_MODEL = re.compile(
    r".+:[^\W\d]\w*|.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)+"
)  # MODULE:FACTORY, a file, a dotted name


def _is_package(name: str) -> bool:
    """Whether a module or package of this name is installed or in this folder."""
    if os.path.isfile(f"{name}.py") or os.path.isfile(os.path.join(name, "__init__.py")):
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def check_saved(path: str | os.PathLike[str], word: str) -> None:
    """Refuse the name of a model where a saved file is read, and a file that is not there and may be either.

    Args:
        path: as the user wrote it.
        word: what the file holds, such as ``graph``.

    Raises:
        BadFile: the path has the form of a model's name, and is no file, or a file of Python. If a name with
            dots is not that of a package here, it is that of a missing file.
    """
    name = os.fspath(path)
    if not _MODEL.fullmatch(name) or name.endswith(".json"):
        return
    if os.path.exists(name) and not name.endswith(".py"):
        return
    if ":" not in name and not name.endswith(".py") and not _is_package(name.partition(".")[0]):
        problem = f"no such file; check the path; a saved {word} was wanted: {WRITTEN_BY[word]}"
        raise BadFile(path=name, problem=problem)
    made = WRITTEN_BY[word].replace("MODEL", name) if ":" in name else WRITTEN_BY[word]
    raise BadFile(path=name, problem=f"is a model, and a saved {word} was wanted: {made}")
