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
    """Like `njit_in_place`, for functions that only compiled functions call, inlined there.

    A call would pass all fields of the state's arrays on, some 110 words: walks took half as long again.
    """
    return _compile_once(_compile(no_cpython_wrapper=True, forceinline=True)(function))


def njit_called(function: Kernel) -> Kernel:
    """Like `njit_inner`, but called: for rare work, which would be compiled again wherever it is inlined."""
    return _compile_once(_compile(no_cpython_wrapper=True)(function))


def _compile_once(compiled: Kernel) -> Kernel:
    """Compile once for all integers, where numba would compile another version for each constant argument.

    That would gain nothing where the call is inlined. There is no cache: the callers' holds what they call.
    """
    compile_for = compiled.compile

    def compile_once(signature: tuple[Any, ...]) -> Any:
        return compile_for(tuple(map(numba.types.unliteral, signature)))

    compiled.compile = compile_once
    return compiled
