"""``torch.compile(model, backend="remat", options={"budget": "2GiB"})``, or ``mode="2GiB"``.

Programs that let their users choose a backend and its mode, but no options, reach it by the second form.

Dynamo passes each captured graph to the backend. The first call of a graph plans its training step for the
tensors of that call, and the graph then runs as a `Rockmate`. So a graph with symbolic sizes is planned once
per size, and a graph that is called without gradients runs unchanged.

The budget applies to each graph separately. If Dynamo breaks a model into several graphs, calls of several of
them are pending at once, and a warning is given.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.fx.traceback import has_preserved_node_meta

from remat_executor.autograd.pending_calls import planned_calls_behind
from remat_executor.errors import NothingToDifferentiate, warn
from remat_facade.entrypoints.limit_memory import BUDGET
from remat_facade.entrypoints.model_budget import check_model_budget
from remat_facade.entrypoints.rockmate import Rockmate
from remat_facade.errors import BadOption
from remat_graph import BadBudget

_NOT_OPTIONS = frozenset({"model", "sample", "sample_kwargs", "plan"})


def remat(
    graph: GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: return a function that runs the graph within a budget.

    Args:
        graph: the graph that Dynamo captured.
        example_inputs: ignored; the inputs of the first call are used.
        options: ``budget`` and any argument of `Rockmate` except model and sample.
        mode: the budget, if the options have none. Without either, the environment variable
            ``REMAT_BUDGET`` has it.

    Returns:
        A function of the graph's inputs. It raises errors of the options at its first call, because Dynamo
        wraps errors that the backend itself raises.
    """
    return _Planned(graph, options, mode)


class _Planned:
    """A graph that is planned at its first call."""

    def __init__(self, graph: GraphModule, options: Mapping[str, Any] | None, mode: str | None) -> None:
        self.numbers = _numbers_as_inputs(graph)
        self.graph, self.options, self.mode = graph, options, mode
        self.module: nn.Module = graph if _owns_tensors(graph) else _Region(graph)
        self.planned: Rockmate | None = None
        self.differentiable = True
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        """Run the graph; use its plan if a gradient is required."""
        chosen = _checked(self.options, self.mode)
        args = tuple(a.item() if i in self.numbers else a for i, a in enumerate(args))
        tensors = [a for a in (*args, *self.module.parameters()) if isinstance(a, Tensor)]
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return self.graph(*args)
        if self.planned is None and self.differentiable:
            if chosen.get("gradients") == "present" and isinstance(self.module, _Region):
                problem = (
                    '"present" does nothing here: Dynamo passes parameters as inputs, whose gradients a plan '
                    "holds to the end; leave it out, or limit the model with limit_memory instead"
                )
                raise BadOption(option="gradients", problem=problem)
            try:
                self.planned = Rockmate(self.module, args, **chosen)
                self.planned._remat.warned.add("compiled")  # this warning is for modules that a user compiles
            except NothingToDifferentiate:  # for example an argmax between two graph breaks
                self.differentiable = False
        if self.planned is None:
            return self.graph(*args)
        self.calls += 1
        # Equal blocks share one graph, so its second call may be the second one of a step.
        if self.calls <= 2 and planned_calls_behind(tensors) == 1:
            self.planned._remat.warned.add("pending calls")  # the next line warns instead
            warn(
                "the model is compiled into several graphs, and each keeps to the budget separately, so "
                "together they may exceed it; pass fullgraph=True to see where the graph breaks"
            )
        return self.planned(*args)


class _Region(nn.Module):
    """A graph whose tensors are all inputs; it hides the graph's own fields from guards."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.__dict__["_graph"] = graph  # hidden from nn.Module: it has no tensors

    def forward(self, *args: Any) -> Any:
        """Call the graph; for a trace node by node, so that it learns which layer each node comes from."""
        graph: GraphModule = self.__dict__["_graph"]
        return Interpreter(graph).run(*args) if has_preserved_node_meta() else graph(*args)


def _numbers_as_inputs(graph: GraphModule) -> frozenset[int]:
    """Change inputs for symbolic floats, which Dynamo passes as tensors, into Python numbers.

    Returns:
        Indices of these inputs. Like sizes, they are constants of a plan.
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
    """Whether the graph owns parameters or buffers, which otherwise are its inputs."""
    return any(True for _ in graph.parameters()) or any(True for _ in graph.buffers())


def _checked(options: Mapping[str, Any] | None, mode: str | None) -> dict[str, Any]:
    """The options, checked to be arguments of `Rockmate`.

    Raises:
        BadOption: an option is unknown, or the budget is missing, given twice, or no budget.
    """
    known = inspect.signature(Rockmate).parameters.keys() - _NOT_OPTIONS
    given = dict(options or {})
    for name in given:
        if name not in known:
            raise BadOption(option=name, problem=f"is not known; known are {', '.join(sorted(known))}")
    if mode is not None:
        if "budget" in given:
            raise BadOption(option="mode", problem="is a budget, and the options have one: give either")
        try:
            check_model_budget(mode)
        except BadBudget as error:
            raise BadOption(option="mode", problem=f'is the budget, as in mode="2GiB": {error}') from error
    budget = given.pop("budget", mode) or os.environ.get(BUDGET)
    if budget is None:
        problem = f'is missing; give options={{"budget": "2GiB"}} or mode="2GiB", or set {BUDGET}'
        raise BadOption(option="budget", problem=problem)
    return given | {"budget": budget}
