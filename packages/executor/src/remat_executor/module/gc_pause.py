"""Raise the GC threshold during capture and lowering.

Both create several hundred thousand objects that stay. Scanning them again and again costs a sixth of the
time to plan a GPT-2 of 12 layers from saved costs and a saved plan.
"""

import gc
from collections.abc import Generator

from remat_graph.contexts import context

_OBJECTS = 200_000  # between two young collections; the garbage is a few hundred MiB at most


@context
def raised_gc_threshold() -> Generator[None, None, None]:
    """Collect less often, unless the caller collects manually or even less often."""
    before = gc.get_threshold()
    try:
        if 0 < before[0] < _OBJECTS:
            gc.set_threshold(_OBJECTS, *before[1:])
        yield
    finally:
        gc.set_threshold(*before)
