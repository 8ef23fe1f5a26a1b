"""The one place that knows numba: decorators for the compiled inner loops.

The other modules of this folder hold nothing but such functions and are imported when first needed, so that
importing the package stays cheap. Machine code is cached on disk; where no cache folder can be written the
functions still compile, once a process. Numba's rewriting of array expressions is left out: the loops have
none, and looking for them is a tenth of the compile time.
"""

from functools import partial
from typing import Any

import numba

Kernel = Any  # what numba makes of a function

# Without reference counts: handing the state's arrays from function to function would otherwise spend nearly
# all the time on counting references.
_compile = partial(numba.njit, error_model="numpy", no_rewrites=True, no_cfunc_wrapper=True, _nrt=False)


def njit_in_place(function: Kernel) -> Kernel:
    """Compile a function that allocates nothing and only works on the arrays it is given."""
    try:
        compiled: Kernel = _compile(cache=True)(function)
    except RuntimeError:  # numba found no folder to write to
        compiled = _compile()(function)
    return compiled


def njit_inner(function: Kernel) -> Kernel:
    """As `njit_in_place`, for functions that only compiled functions call: half the compile time.

    Not cached, since its callers are, with all they call. Compiled once for all integers: numba would make
    another version for each constant it is called with, and where the call is inlined that gains nothing.
    """
    compiled: Kernel = _compile(no_cpython_wrapper=True)(function)
    compile_for = compiled.compile

    def compile_once(signature: tuple[Any, ...]) -> Any:
        return compile_for(tuple(map(numba.types.unliteral, signature)))

    compiled.compile = compile_once
    return compiled
