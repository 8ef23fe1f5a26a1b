"""A training step as a graph whose copies can be scheduled; device updates become ops of the backward.

This module decides for each gradient what happens when no op reads it any more. It stays to the end of the
step like every gradient of the graph, or it is freed like an activation: because a device update has read it,
because it is added to an existing gradient, or because it is copied to the host. `schedule_writer` writes the
steps for that. An update during the backward is an op that reads the gradient and the states placed on the
host, so that states are fetched as weights are. O(ops).
"""

from collections.abc import Iterable, Sequence

import attrs

from remat_graph import Graph, Implementation, Op, Placement, Role, Update
from remat_graph.training import accumulating


@attrs.frozen(kw_only=True)
class UpdateMode:
    """How a step is trained."""

    in_backward: bool = False  # whether each parameter is updated as soon as its gradient is computed
    accumulate: bool = True  # whether a plan must hold where every parameter has a ``.grad`` already
    micro_batches: int = 1  # forwards and backwards per optimizer step

    @property
    def adds_gradients(self) -> bool:
        """Whether gradients are added to existing ones in the worst case that a plan must hold in."""
        return self.micro_batches > 1 or (self.accumulate and not self.in_backward)


@attrs.frozen(kw_only=True, eq=False)
class TrainingProblem:
    """A training step prepared for scheduling."""

    full_graph: Graph  # the training step, with the gradients that exist before it
    # the same without freed gradients and without updates; device updates during the backward are its last
    # ops
    graph: Graph
    host_grads: frozenset[int]  # gradients that are copied to the host
    freed_grads: frozenset[int]  # gradients on the device that are freed when no op reads them any more
    device_updates: tuple[Update, ...]  # updates on the device during the backward, in the order of their ops
    mode: UpdateMode  # how the step is trained

    @classmethod
    def prepare(cls, graph: Graph, mode: UpdateMode) -> "TrainingProblem":
        """Prepare a training step whose values have their placement."""
        values = graph.values
        device_updates = tuple(
            u for u in graph.updates if values[u.param].placement is Placement.DEVICE and mode.in_backward
        )
        placement = {
            grad: values[of].placement for grad in graph.gradients if (of := values[grad].of) is not None
        }
        host_grads = frozenset(grad for grad, place in placement.items() if place is Placement.HOST)
        freed_grads = {
            grad for grad, place in placement.items() if place is Placement.DEVICE and mode.adds_gradients
        }
        freed_grads |= {update.grad for update in device_updates}
        whole = accumulating(graph) if mode.adds_gradients else graph
        kept = [
            attrs.evolve(v, role=Role.ACTIVATION, of=None) if i in host_grads or i in freed_grads else v
            for i, v in enumerate(whole.values)
        ]
        ops = [*graph.ops, *(_op(graph, update) for update in device_updates)]
        return cls(
            full_graph=whole,
            graph=attrs.evolve(whole, values=tuple(kept), ops=tuple(ops), updates=()),
            host_grads=host_grads,
            freed_grads=frozenset(freed_grads),
            device_updates=device_updates,
            mode=mode,
        )

    @property
    def copied_when_freed(self) -> frozenset[int]:
        """Values that are copied to the host as soon as no op reads them."""
        return self.host_grads | {
            v for update in self.device_updates for v in streamed_states(self.full_graph, update)
        }

    def with_updates(self, order: Iterable[int]) -> list[int]:
        """An order with each update after the last run that uses its gradient or parameter."""
        runs = list(order)
        last: dict[int, int] = {}
        for position, op in enumerate(runs):
            for implementation in self.graph.ops[op].implementations:
                last.update(dict.fromkeys((*implementation.inputs, *implementation.outputs), position))
        first = len(self.graph.ops) - len(self.device_updates)
        behind: dict[int, list[int]] = {}
        for number, update in enumerate(self.device_updates, first):
            behind.setdefault(max(last[update.grad], last.get(update.param, 0)), []).append(number)
        return [each for position, op in enumerate(runs) for each in (op, *behind.get(position, ()))]


def streamed_states(graph: Graph, update: Update) -> tuple[int, ...]:
    """States that are placed on the host, of an update on the device."""
    return tuple(v for v in update.states if graph.values[v].placement is Placement.HOST)


def first_reads(graph: Graph) -> dict[int, int]:
    """For each value the first op, in trace order, that reads it."""
    first: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        for value in op.first.inputs:
            first.setdefault(value, position)
    return first


def in_forward_order(graph: Graph, updates: Iterable[Update]) -> Sequence[Update]:
    """Updates in the order in which the next forward reads their parameters."""
    first = first_reads(graph)
    return sorted(updates, key=lambda update: (first.get(update.param, len(graph.ops)), update.param))


def _op(graph: Graph, update: Update) -> Op:
    implementation = Implementation(
        inputs=(update.grad, *streamed_states(graph, update)),
        outputs=(),
        time_s=update.device_time_s,
        workspace_nbytes=update.workspace_nbytes,
    )
    name = f"update of {graph.values[update.param].name}"
    return Op(name=name, target="update", backward=True, rerun=None, implementations=(implementation,))
