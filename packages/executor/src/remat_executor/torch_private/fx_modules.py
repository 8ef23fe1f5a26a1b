"""Private names of fx modules that generate their Python code late."""

import contextlib

import torch

from remat_executor.torch_private.lookup import private_name


def without_code() -> contextlib.AbstractContextManager[None]:
    """A context in which graphs generate their Python code at its first use, which capture never needs."""
    lazy: contextlib.AbstractContextManager[None] = private_name(
        "torch.fx._lazy_graph_module", "_use_lazy_graph_module"
    )(True)
    return lazy


def read_later(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """An fx module that generates its Python code at its first use."""
    module: torch.fx.GraphModule = private_name("torch.fx._lazy_graph_module", "_LazyGraphModule")({}, graph)
    return module
