"""The one place that knows numba: a decorator for the compiled inner loops.

Modules whose name starts with ``kernels_`` hold nothing but such functions and are imported when first needed, so
that importing the package stays cheap. Machine code is cached on disk; where no cache folder can be written the
functions still compile, once a process.
"""

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def njit(function: F) -> F:
    """Compile on first call, cached on disk where that is possible."""
    try:
        compiled: F = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba found no folder to write to
        compiled = numba.njit(error_model="numpy")(function)
    return compiled
