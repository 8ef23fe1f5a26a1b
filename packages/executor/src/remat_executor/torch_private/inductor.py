"""Private names of Inductor."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

from remat_executor.torch_private.lookup import private_name


def missing_for_inductor(device_type: str) -> str | None:
    """What Inductor needs on a device and this machine does not have; None if nothing is missing."""
    if device_type != "cpu":
        return None if private_name("torch.utils._triton", "has_triton")() else "Triton"
    try:
        private_name("torch._inductor.cpp_builder", "get_cpp_compiler")()
    except RuntimeError:
        return "a C++ compiler"
    return None


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions, without those of random operators."""
    importlib.import_module("torch._inductor.lowering")  # for max pooling, which does not import it
    with private_name("torch._inductor.config", "patch")(fallback_random=True):
        table: dict[Any, Callable[..., Any]] = private_name(
            "torch._inductor.decomposition", "select_decomp_table"
        )()
    return table


def compile_by_inductor(traced: torch.fx.GraphModule) -> Callable[[list[torch.Tensor]], Any]:
    """Compile a flat graph of functional ATen operators on fake tensors, in its order.

    Returns:
        a function that takes a list of tensors, empties it and frees each after its last use.
    """
    compile_inner = private_name("torch._inductor.compile_fx", "compile_fx_inner")
    examples = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
    as_given = {
        "fallback_random": True,
        "reorder_for_peak_memory": False,
        "reorder_for_locality": False,
        "layout_optimization": False,
        "comprehensive_padding": False,
        "triton.cudagraphs": False,
    }
    context = contextlib.nullcontext()
    if examples:  # Inductor's disk cache needs a shape environment
        fake_mode = examples[0].fake_mode
        fake_mode.shape_env = (
            fake_mode.shape_env or private_name("torch.fx.experimental.symbolic_shapes", "ShapeEnv")()
        )
        context = private_name("torch._guards", "tracing")(
            private_name("torch._guards", "TracingContext")(fake_mode)
        )
    with context, private_name("torch._inductor.config", "patch")(as_given), torch.no_grad():
        compiled: Callable[[list[torch.Tensor]], Any] = compile_inner(traced, examples)
    return compiled
