"""Private names of fx modules whose Python code is written late."""

import contextlib

import torch

from remat_executor.torch_private.lookup import private_name


def without_code() -> contextlib.AbstractContextManager[None]:
    """Let torch write a graph's Python code when it is first read, which is never while graphs are made."""
    lazy: contextlib.AbstractContextManager[None] = private_name(
        "torch.fx._lazy_graph_module", "_use_lazy_graph_module"
    )(True)
    return lazy


def read_later(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """An fx module that writes its Python code when that is first read or called."""
    module: torch.fx.GraphModule = private_name("torch.fx._lazy_graph_module", "_LazyGraphModule")({}, graph)
    return module
