"""The one place that knows numba: decorators for the compiled inner loops.

Modules whose name starts with ``kernels_`` hold nothing but such functions and are imported when first
needed, so that importing the package stays cheap. Machine code is cached on disk; where no cache folder can
be written the functions still compile, once a process.
"""

from typing import Any

import numba

Kernel = Any  # what numba makes of a function


def _compile(function: Kernel, **options: Any) -> Kernel:
    try:
        compiled: Kernel = numba.njit(cache=True, error_model="numpy", **options)(function)
    except RuntimeError:  # numba found no folder to write to
        compiled = numba.njit(error_model="numpy", **options)(function)
    return compiled


def njit_in_place(function: Kernel) -> Kernel:
    """As `njit`, for functions that allocate nothing and only work on the arrays they are given.

    Without reference counts: handing the state's arrays from function to function would otherwise spend
    nearly all the time on counting references.
    """
    return _compile(function, _nrt=False, no_cfunc_wrapper=True)


def njit_inner(function: Kernel) -> Kernel:
    """As `njit_in_place`, for functions that only compiled functions call: half the compile time.

    Compiled once for all integers: numba would make another version for each constant it is called with, and
    where the call is inlined that gains nothing.
    """
    compiled = _compile(function, _nrt=False, no_cfunc_wrapper=True, no_cpython_wrapper=True)
    compile_for = compiled.compile

    def compile_once(signature: tuple[Any, ...]) -> Any:
        return compile_for(tuple(map(numba.types.unliteral, signature)))

    compiled.compile = compile_once
    return compiled
