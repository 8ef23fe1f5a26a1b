"""Private names of the flags that set the precision of computations."""

import contextlib

from remat_executor.torch_private.lookup import private_name

_PRECISIONS = (
    ("generic", "all"),
    *(("cuda", kind) for kind in ("matmul", "conv", "rnn")),
    *(("mkldnn", kind) for kind in ("matmul", "conv", "rnn")),
)


def float32_precisions() -> dict[str, str]:
    """The float32 precision of each library: ``ieee``, ``tf32`` or ``bf16``.

    Torch's public getters fail if a user has set one library by itself.
    """
    read = private_name("torch._C", "_get_fp32_precision_getter")
    found = {f"{library}.{kind}": str(read(library, kind)) for library, kind in _PRECISIONS}
    return {where: "ieee" if precision == "none" else precision for where, precision in found.items()}


def attention_order() -> str:
    """The order in which attention's kernels are considered."""
    return str(private_name("torch._C", "_get_sdp_priority_order")())


def without_any_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast off on every device."""
    guard: contextlib.AbstractContextManager[None] = private_name("torch._C", "_DisableAutocast")()
    return guard
