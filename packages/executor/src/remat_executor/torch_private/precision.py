"""Private names of the flags that say how numbers are computed."""

import contextlib

from remat_executor.torch_private.lookup import private_name

_PRECISIONS = (
    ("generic", "all"),
    *(("cuda", kind) for kind in ("matmul", "conv", "rnn")),
    *(("mkldnn", kind) for kind in ("matmul", "conv", "rnn")),
)


def float32_precisions() -> dict[str, str]:
    """How each library computes in float32: ``ieee``, ``tf32`` or ``bf16``.

    The public ways to ask fail where a user has set one library by itself.
    """
    read = private_name("torch._C", "_get_fp32_precision_getter")
    found = {f"{library}.{kind}": str(read(library, kind)) for library, kind in _PRECISIONS}
    return {where: "ieee" if precision == "none" else precision for where, precision in found.items()}


def attention_order() -> str:
    """In which order attention's kernels are considered."""
    return str(private_name("torch._C", "_get_sdp_priority_order")())


def without_any_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast off on every device."""
    guard: contextlib.AbstractContextManager[None] = private_name("torch._C", "_DisableAutocast")()
    return guard
