"""``torch.compile(model, backend="remat", options={"budget": "2GiB"})``.

Dynamo hands over each graph that it finds; the graph's training step is planned when it is first called, with
the tensors of that call, and runs as a `Rockmate` does. So a graph with symbolic sizes is planned once for
each size that comes, and a graph that is called without gradients runs as it is.

The budget holds for each graph by itself. A model that Dynamo breaks into several has several graphs in
flight at once, and a warning says so.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from remat_executor.autograd.pending_calls import planned_calls_behind
from remat_executor.errors import NothingToDifferentiate, warn
from remat_facade.entrypoints.rockmate import Rockmate
from remat_facade.errors import BadOption
from remat_graph.errors import shown

_NOT_OPTIONS = frozenset({"model", "sample", "sample_kwargs", "plan"})


def remat(
    graph: GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: a function that runs the graph within a budget.

    Args:
        graph: what Dynamo captured.
        example_inputs: not looked at; the first call's are.
        options: ``budget``, which is required, and what `Rockmate` takes beside model and sample.
        mode: not known here.

    Returns:
        A function of the graph's inputs. What is wrong with the options it raises at its first call: what a
        backend itself raises reaches the user inside an error of Dynamo's.
    """
    return _Planned(graph, options, mode)


class _Planned:
    """A graph, planned at its first call."""

    def __init__(self, graph: GraphModule, options: Mapping[str, Any] | None, mode: str | None) -> None:
        self.numbers = _numbers_as_inputs(graph)
        self.graph, self.options, self.mode = graph, options, mode
        self.module: nn.Module = graph if _owns_tensors(graph) else _Region(graph)
        self.planned: Rockmate | None = None
        self.differentiable = True
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        """Run the graph, by its plan if gradients are wanted."""
        chosen = _checked(self.options, self.mode)
        args = tuple(a.item() if i in self.numbers else a for i, a in enumerate(args))
        tensors = [a for a in (*args, *self.module.parameters()) if isinstance(a, Tensor)]
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return self.graph(*args)
        if self.planned is None and self.differentiable:
            try:
                self.planned = Rockmate(self.module, args, **chosen)
                self.planned._remat.warned.add("compiled")  # Dynamo calls it
            except NothingToDifferentiate:  # a piece between two breaks, an argmax for example
                self.differentiable = False
        if self.planned is None:
            return self.graph(*args)
        self.calls += 1
        # Equal blocks share one graph, so its second call may be the second of a step.
        if self.calls <= 2 and planned_calls_behind(tensors) == 1:
            self.planned._remat.warned.add("pending calls")  # the warning below says it
            warn(
                "the model is compiled into several graphs, and each keeps to the budget by itself: "
                "together they may hold more; fullgraph=True shows where it breaks"
            )
        return self.planned(*args)


class _Region(nn.Module):
    """A graph whose tensors are all inputs, without the graph's own fields, which guards would compare."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.__dict__["_graph"] = graph  # hidden from nn.Module: it has no tensors

    def forward(self, *args: Any) -> Any:
        """What the graph returns."""
        return self.__dict__["_graph"](*args)


def _numbers_as_inputs(graph: GraphModule) -> frozenset[int]:
    """Let a graph take its symbolic floats as numbers, where Dynamo passes tensors for them.

    Returns:
        Which inputs are numbers now: like sizes, they are constants of a plan.
    """
    found = []
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if node.users and all((user.op, user.target) == ("call_method", "item") for user in node.users):
            found.append(index)
            for user in list(node.users):
                user.replace_all_uses_with(node)
                graph.graph.erase_node(user)
    if found:
        graph.recompile()
    return frozenset(found)


def _owns_tensors(graph: GraphModule) -> bool:
    """Whether tensors of the model stayed inside the graph instead of becoming its inputs."""
    return any(True for _ in graph.parameters()) or any(True for _ in graph.buffers())


def _checked(options: Mapping[str, Any] | None, mode: str | None) -> dict[str, Any]:
    """The options, if they are what `Rockmate` takes.

    Raises:
        BadOption: one is unknown or missing.
    """
    known = inspect.signature(Rockmate).parameters.keys() - _NOT_OPTIONS
    given = dict(options or {})
    if mode is not None:
        raise BadOption(option=shown("mode"), problem='is not known; give options={"budget": "2GiB"} instead')
    for name in given:
        if name not in known:
            raise BadOption(option=shown(name), problem=f"is not known; known are {', '.join(sorted(known))}")
    if "budget" not in given:
        raise BadOption(option=shown("budget"), problem='is missing; give options={"budget": "2GiB"}')
    return given
