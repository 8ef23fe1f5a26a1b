"""Show on a terminal how far planning is: one line on stderr, erased when planning ends.

A first training step plans for seconds or minutes, and without this line its user would see nothing. In a
pipe, a file or a notebook, and on all ranks but the first, nothing is written.
"""

import os
import shutil
import sys
from contextlib import suppress

import torch.distributed as dist

_ERASE = "\r\x1b[K"  # to the beginning of the line, which may hold a progress bar, and clear it


def show_stage(stage: str) -> None:
    """Write a stage in place of the last one; an empty one leaves the line empty."""
    columns = shutil.get_terminal_size().columns
    line = f"remat: {stage}" if stage else ""
    _write(_ERASE + line[: columns - 1])


def erase_stage() -> None:
    """Leave an empty line for what comes next."""
    _write(_ERASE)


def _write(text: str) -> None:
    stream = sys.stderr
    # Python has no stderr in some windowed programs, and a closed one raises ValueError.
    with suppress(OSError, ValueError, AttributeError):
        if stream.isatty() and os.environ.get("TERM") != "dumb" and _is_first_rank():
            stream.write(text)
            stream.flush()


def _is_first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
