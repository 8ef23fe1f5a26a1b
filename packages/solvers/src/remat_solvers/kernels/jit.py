"""The one module that uses numba: decorators for the compiled inner loops.

The other modules of this folder contain only such functions and are imported when first needed, so that
importing the package stays cheap. Machine code is cached on disk; if no cache folder is writable the
functions still compile, once per process. Numba's rewriting of array expressions is off: the loops have none,
and the search for them is a tenth of the compile time.
"""

from functools import partial
from typing import Any

import numba

Kernel = Any  # numba's dispatcher

# Without reference counts, which would take nearly all the time when functions pass the state's arrays on,
# and without Python's lock, so that walks run side by side.
_compile = partial(
    numba.njit, error_model="numpy", no_rewrites=True, no_cfunc_wrapper=True, _nrt=False, nogil=True
)


def njit_in_place(function: Kernel) -> Kernel:
    """Compile a function that allocates nothing and only works on its array arguments."""
    try:
        compiled: Kernel = _compile(cache=True)(function)
    except RuntimeError:  # no writable cache folder
        compiled = _compile()(function)
    return compiled


def njit_inner(function: Kernel) -> Kernel:
    """Like `njit_in_place`, for functions that only compiled functions call: half the compile time.

    Not cached, since its callers are, with everything they call. Compiled once for all integers: numba would
    compile another version for each constant argument, which gains nothing where the call is inlined.
    """
    compiled: Kernel = _compile(no_cpython_wrapper=True)(function)
    compile_for = compiled.compile

    def compile_once(signature: tuple[Any, ...]) -> Any:
        return compile_for(tuple(map(numba.types.unliteral, signature)))

    compiled.compile = compile_once
    return compiled
