"""Lower a schedule to fx graphs: the forward, and a chain of segments for the backward.

Each graph takes its tensors in one list, which it empties. Since fx's generated code drops every name after
its last use, a storage is freed exactly where the schedule frees it. A segment of the backward delivers its
gradients at its end and passes on the values that later segments need. Where a schedule moves values or steps
the optimizer, a segment consists of several graphs with those steps between them. Views are rebuilt from
their base where they are read, once per graph while the base lives.
"""

from collections.abc import Sequence
from operator import getitem
from typing import Any

import attrs
import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.capture.dropout_rounding import noise_dropout, replay_noise_dropout
from remat_executor.capture.repeatable_batch_norms import arguments_read, batch_norm_call
from remat_executor.fx_nodes import WRITES_FIRST, args_of, is_item, is_second_name, source_of, target_of
from remat_executor.generator_state import read_state, replay
from remat_executor.lowering.gradient_segments import split_backward
from remat_executor.lowering.liveness import (
    freed_next,
    group_steps,
    handled_steps,
    live_after,
    needed_later,
    repeated_draws,
)
from remat_executor.lowering.program import LoweredGraph, LoweredStep, Segment
from remat_executor.lowering.runtime_protocol import GraphInterface, Runtime
from remat_executor.lowering.step_handler import Action
from remat_executor.torch_private.fx_modules import read_later
from remat_executor.translation.inplace import InPlace
from remat_executor.translation.recipes import (
    CallOperator,
    Draw,
    OwnGradient,
    ReadGenerator,
    Recipe,
    RunKernel,
    TrainBatchNorm,
    WriteBack,
    WriteInPlace,
    own_copy,
)
from remat_executor.translation.translation import Translation
from remat_executor.ways.substitution import Change, Kernel
from remat_graph import Compute, Deliver, Free, Graph, Placement, Role, Schedule, Step

aten = torch.ops.aten


def lower(
    captured: Captured,
    translation: Translation,
    schedule: Schedule,
    *,
    runtime: Runtime,
    part_nbytes: int | None,
) -> LoweredStep:
    """Turn a schedule into graphs that `runtime` makes runnable; `part_nbytes` as for `split_backward`."""
    graph = translation.graph
    handled = handled_steps(graph, schedule)
    groups = [group_steps(schedule.steps[: schedule.boundary], 0, handled)]
    first = schedule.boundary
    for steps in split_backward(graph, schedule, part_nbytes):
        groups.append(group_steps(steps, first, handled))
        first += len(steps)
    shared = _StepLowering(translation, repeated_draws(translation, schedule.steps), runtime)
    outputs = [o.node for o in captured.outputs if not o.replayed]
    needed = needed_later(graph, groups)
    for later in needed[0][:-1]:
        later.update(translation.value_of[translation.base_of[node]] for node in outputs)
    segments: list[Segment] = []
    live: set[int] = set()
    overwritten: set[int] = set()
    for i, group in enumerate(groups):
        items: list[LoweredGraph | Action] = []
        gradients: list[int] = []
        for item, later in zip(group, needed[i], strict=True):
            if not isinstance(item, list):
                live, owned = live_after(graph, item, live)
                gradients += [shared.gradient_of[value] for value in owned]
                items.append(item)
                continue
            lowering = _GraphLowering(shared, live)
            lowering.follow(item if i else [step for step in item if not _returns(graph, step)])
            last_of_forward = i == 0 and item is group[-1]
            results = [lowering.resolve(node) for node in outputs] if last_of_forward else []
            results += [lowering.gradient(g) for g in lowering.delivered]
            lowered = lowering.finish(results, later)
            gradients += lowering.delivered
            items.append(lowered)
            if i > 0:
                overwritten |= lowering.overwritten & segments[0].gives
            live = live - set(lowered.drops) | set(lowered.gives)
        segments.append(Segment(items=tuple(items), gives=frozenset(live), gradients=tuple(gradients)))
        if i == 0:
            live |= set(graph.tangents)
    forward, *backward = segments
    return LoweredStep(
        forward=forward,
        backward=tuple(backward),
        overwritten=frozenset(overwritten),
        read_again=tuple(sorted({v for segment in backward for g in segment.graphs for v in g.reads})),
        tail=() if schedule.end is None else schedule.steps[schedule.end :],
    )


def _returns(graph: Graph, step: Step) -> bool:
    """Whether a step of the forward frees an output for the caller to drop: its results hold it."""
    return isinstance(step, Free) and graph.values[step.value].role is Role.DROPPED


@attrs.frozen(eq=False)
class _StepLowering:
    """What the lowerings of all graphs of a step share.

    Attributes:
        replays: generator states that a repeat needs.
        node_of: per value the captured node that makes it.
        gradient_of: per value that is a gradient its index into `Translation.gradients`.
    """

    translation: Translation
    replays: set[int]
    runtime: Runtime
    node_of: dict[int, Node] = attrs.field(init=False)
    gradient_of: dict[int, int] = attrs.field(init=False)

    @node_of.default
    def _nodes(self) -> dict[int, Node]:
        return {value: node for node, value in self.translation.value_of.items()}

    @gradient_of.default
    def _gradients(self) -> dict[int, int]:
        return {value: i for i, (_, _, value) in enumerate(self.translation.gradients)}


class _GraphLowering:
    """Emits one graph; `nodes_of` maps live values, `views` the views rebuilt so far."""

    def __init__(self, shared: _StepLowering, live: set[int]) -> None:
        self.shared, self.translation = shared, shared.translation
        self.before = live
        self.untouched = set(live)
        self.fx = FxGraph()
        self.argument = self.fx.placeholder("tensors")
        self.head = self.argument
        self.nodes_of: dict[int, Node] = {}
        self.views: dict[Node, Node] = {}
        self.views_on: dict[int, list[Node]] = {}
        self.reads: dict[int, Node] = {}
        self.delivered: list[int] = []
        self.takes: dict[int, Node] = {}
        self.overwritten: set[int] = set()

    def unpack(self, name: str, value: int) -> Node:
        """A node for one tensor of the list; `finish` sets its index."""
        with self.fx.inserting_after(self.head):
            self.head = self.fx.create_node("call_function", getitem, (self.argument, 0), name=name)
        captured = self.shared.node_of.get(value)
        return self.head if captured is None else _like(self.head, captured)

    # -- following steps

    def follow(self, steps: Sequence[Step]) -> None:
        for position, step in enumerate(steps):
            if isinstance(step, Compute):
                self.compute(step, freed_next(steps, position))
            elif isinstance(step, Free):
                self.drop(step.value)
            elif isinstance(step, Deliver):
                self.delivered.append(self.shared.gradient_of[step.value])

    def drop(self, value: int) -> None:
        self.nodes_of.pop(value, None)
        self.untouched.discard(value)
        for view in self.views_on.pop(value, []):
            self.views.pop(view, None)

    def compute(self, step: Compute, dying: set[int]) -> None:
        op = self.translation.graph.ops[step.op]
        recipe = self.translation.recipe(step.op, step.implementation)
        implementation = op.implementations[step.implementation]
        repeat = step.implementation != 0
        if isinstance(recipe, ReadGenerator):
            state = implementation.outputs[0]
            if state in self.shared.replays:
                self.nodes_of[state] = self.fx.call_function(read_state, (recipe.device,))
            return
        if isinstance(recipe, RunKernel) and recipe.change.kernel is None:
            return
        made = self.translation.defined(step.op, step.implementation)
        over = next((source for _, source in implementation.reuses if source in dying), None)
        if over is not None and not any(self.is_live(v) for _, v in made):
            self.overwritten.add(over)
            if isinstance(recipe, RunKernel):
                result = self.emit_kernel(recipe.change, recipe.change.over_kernel)
            else:
                assert isinstance(recipe, CallOperator)
                result = self.emit_in_place(recipe.node, *self.translation.in_place[step.op][over])
        else:
            result = self.emit(recipe, repeat)
        if isinstance(recipe, OwnGradient):
            self.define(implementation.outputs[0], result)
            return
        several = isinstance(recipe, RunKernel) and recipe.change.makes is not None
        for i, (node, value) in enumerate(made):
            if value in dying and value in implementation.outputs:
                continue
            place = i if several else node.args[1] if is_item(node) else None
            made_node = result if place is None else self.fx.call_function(getitem, (result, place))
            self.define(value, _like(made_node, node))

    def define(self, value: int, node: Node) -> None:
        """Bind a value; a second copy of an output or gradient, made by a repeat, is dropped."""
        if self.is_live(value) and self.translation.graph.values[value].pinned:
            return
        self.drop(value)
        self.nodes_of[value] = node

    def is_live(self, value: int) -> bool:
        return value in self.nodes_of or value in self.untouched

    # -- emitting

    def emit(self, recipe: Recipe, repeat: bool) -> Node:
        call = self.fx.call_function
        match recipe:
            case CallOperator(node):
                return call(target_of(node), *self.call_arguments(node))
            case Draw(node, device, state):
                args, kwargs = self.call_arguments(node)
                if not repeat:
                    return call(target_of(node), args, kwargs)
                if node.target is noise_dropout:
                    # fx cannot print a function of this package as an argument, only as a target.
                    return call(replay_noise_dropout, (self.value_node(state), device, *args), kwargs)
                return call(replay, (self.value_node(state), device, target_of(node), *args), kwargs)
            case TrainBatchNorm(node, mean, variance):
                tensors = torch.fx.node.map_arg(args_of(node)[:3], self.resolve)
                statistics = None if repeat else (self.resolve(mean), self.resolve(variance))
                return call(*batch_norm_call(node, tensors, statistics))
            case WriteBack(target, source):
                return call(aten.copy_.default, (self.resolve(target), self.resolve(source)))
            case WriteInPlace(node, form):
                made = self.emit_in_place(node, 0, form)
                made.meta[WRITES_FIRST] = True
                return made
            case OwnGradient(source, size, stride):
                return call(own_copy, (self.resolve(source), size, stride))
            case ReadGenerator(device):
                return call(read_state, (device,))
            case RunKernel(change):
                return self.emit_kernel(change, change.kernel)

    def emit_kernel(self, change: Change, kernel: Kernel | None) -> Node:
        assert kernel is not None, change.node
        return self.fx.call_function(kernel, (*map(self.resolve, change.reads), *change.constants))

    def emit_in_place(self, node: Node, place: int, form: InPlace) -> Node:
        args, kwargs = self.call_arguments(node)
        if form.out is not None:
            kwargs = {**kwargs, form.out: args[place]}
        return self.fx.call_function(form.target, args, kwargs)

    def call_arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = arguments_read(node, node.args)
        return (torch.fx.node.map_arg(args, self.resolve), torch.fx.node.map_arg(node.kwargs, self.resolve))

    def resolve(self, node: Node) -> Node:
        """The lowered node for an original one: a value, or a view rebuilt from its base."""
        base = self.translation.base_of.get(node, node)  # the tensors of ways are no part of the graph
        value = self.translation.value_of[base]
        if node is base or is_second_name(node, base):
            return self.value_node(value)
        if node not in self.views:
            source, rest = source_of(node), node.args[1:]
            if is_item(node):
                made = self.fx.call_function(getitem, (self.resolve(source), *rest))
            else:
                made = self.fx.call_function(target_of(node), *self.call_arguments(node))
            self.views[node] = _like(made, node)
            self.views_on.setdefault(value, []).append(node)
        return self.views[node]

    def value_node(self, value: int) -> Node:
        if value in self.untouched:
            self.takes[value] = self.nodes_of[value] = self.unpack(f"v{value}", value)
            self.untouched.discard(value)
        elif value not in self.nodes_of:
            assert self.is_persistent(value), self.translation.graph.values[value].name
            self.reads[value] = self.nodes_of[value] = self.unpack(f"x{value}", value)
        return self.nodes_of[value]

    def gradient(self, index: int) -> Node:
        _, node, value = self.translation.gradients[index]
        base = self.translation.base_of.get(node, node)
        if self.translation.value_of.get(base) == value:
            return self.resolve(node)
        return self.value_node(value)

    def is_persistent(self, value: int) -> bool:
        """Whether it exists in every call: a caller's tensor, or an optimizer state on the device."""
        stored = self.translation.graph.values[value]
        return stored.external or stored.placement is Placement.DEVICE

    def is_stable(self, value: int) -> bool:
        """Whether a caller's tensor keeps its address from call to call, unlike an input."""
        return self.translation.graph.values[value].role in (Role.PARAM, Role.BUFFER)

    def finish(self, results: Sequence[Node], needed: set[int]) -> LoweredGraph:
        """Number the list's entries, empty the list after reading it, and compile."""
        # Tensors that keep their address come first.
        self.reads = dict(sorted(self.reads.items(), key=lambda read: not self.is_stable(read[0])))
        reads, takes = tuple(self.reads), tuple(self.takes)
        for i, node in enumerate((*self.reads.values(), *self.takes.values())):
            node.args = (self.argument, i)
        with self.fx.inserting_after(self.head):
            self.fx.call_method("clear", (self.argument,))
        kept = {v for v in takes if self.nodes_of.get(v) is self.takes[v] and v in needed}
        made = {v for v in self.nodes_of if not self.is_persistent(v) and v not in kept}
        gives = tuple(sorted(made & needed))
        self.fx.output([*results, *(self.nodes_of[v] for v in gives)])
        module = read_later(self.fx)  # a runtime generates its own code
        interface = GraphInterface(stable_inputs=sum(map(self.is_stable, reads)), results=len(results))
        return LoweredGraph(
            run=self.shared.runtime(module, interface),
            reads=reads,
            takes=takes,
            drops=tuple(sorted(self.before - kept - (self.untouched & needed))),
            gives=gives,
            results=len(results),
            module=module,
        )


def _like(lowered: Node, captured: Node) -> Node:
    """Copy the fake tensor of a captured node to a lowered one, for the runtimes."""
    if "val" in captured.meta:
        lowered.meta["val"] = captured.meta["val"]
    return lowered
