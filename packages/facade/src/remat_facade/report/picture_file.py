"""The formats of pictures, by the suffix of their file; known before anything is drawn."""

import os
from pathlib import Path

from remat_graph import CannotWrite

FORMATS = ("png", "svg", "pdf")


def format_of(path: Path) -> str:
    """The format that a path's suffix names; PNG without a suffix, or for a pipe or a device.

    Raises:
        CannotWrite: the suffix is that of no picture.
    """
    kind = path.suffix.lower().removeprefix(".")
    if not kind or (os.path.exists(path) and not os.path.isfile(path)):  # these raise nothing
        return FORMATS[0]
    if kind not in FORMATS:
        endings = ", ".join(f".{each}" for each in FORMATS)
        raise CannotWrite(path=path, reason=f"the name of a picture ends with one of {endings}")
    return kind
