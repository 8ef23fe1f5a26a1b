"""Paths that a user names for input: what was meant where a model stands instead of a saved file."""

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


def check_saved(path: str | os.PathLike[str], word: str) -> None:
    """Refuse the name of a model where a saved file is read.

    Args:
        path: as the user wrote it.
        word: what the file holds, such as ``graph``.

    Raises:
        BadFile: the path has the form of a model's name, and is no file, or a file of Python.
    """
    name = os.fspath(path)
    if not _MODEL.fullmatch(name) or name.endswith(".json"):
        return
    if os.path.exists(name) and not name.endswith(".py"):
        return
    made = WRITTEN_BY[word].replace("MODEL", name) if ":" in name else WRITTEN_BY[word]
    raise BadFile(path=name, problem=f"is a model, and a saved {word} was wanted: {made}")
