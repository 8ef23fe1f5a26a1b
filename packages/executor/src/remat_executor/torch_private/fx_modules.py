"""Private names of fx modules that generate their Python code late."""

import contextlib
from collections.abc import Mapping

import torch

from remat_executor.torch_private.lookup import private_name


def without_code() -> contextlib.AbstractContextManager[None]:
    """A context in which graphs generate their Python code at its first use, which capture never needs."""
    lazy: contextlib.AbstractContextManager[None] = private_name(
        "torch.fx._lazy_graph_module", "_use_lazy_graph_module"
    )(True)
    return lazy


def read_later(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor] | None = None
) -> torch.fx.GraphModule:
    """An fx module with constants by their names that generates its Python code at its first use."""
    made = private_name("torch.fx._lazy_graph_module", "_LazyGraphModule")
    module: torch.fx.GraphModule = made(dict(constants or {}), graph)
    return module
