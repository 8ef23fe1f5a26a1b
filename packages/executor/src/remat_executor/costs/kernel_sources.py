"""Distinguish versions of a way's kernel: its measured costs are kept on disk, and its code may change."""

import functools
import inspect
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


@functools.cache
def source_hash(kernel: Callable[..., Any]) -> str:
    """A hash of the sources of a kernel's module and of those in its folder, on which it may rely.

    Empty where there is no source, as for a function that was typed in.
    """
    module = inspect.getmodule(kernel)
    file = None if module is None else getattr(module, "__file__", None)
    if module is None or file is None:
        return ""
    path = Path(file)
    files = sorted(path.parent.glob("*.py")) if module.__package__ else [path]
    try:
        return f"{functools.reduce(lambda found, each: zlib.crc32(each.read_bytes(), found), files, 0):08x}"
    except OSError:
        return ""
