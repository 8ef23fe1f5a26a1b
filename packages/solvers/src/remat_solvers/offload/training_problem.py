"""A training step as a graph whose copies can be placed: updates on the device become ops of the backward.

Of each gradient it is decided here what becomes of it once nothing reads it: it stays to the end of the
step, as a gradient of the graph does, or it goes, as an activation does, because an update on the device
has read it, because it is added to one that is there, or because it leaves for the host. `schedule_writer`
writes the steps for that. An update within the backward is an op that reads the gradient and what of its
states is placed on the host, so that `transfers.place` fetches states as it fetches weights. O(ops).
"""

from collections.abc import Iterable, Sequence

import attrs

from remat_graph import Graph, Implementation, Op, Placement, Role, Update
from remat_graph.training import accumulating


@attrs.frozen(kw_only=True)
class Style:
    """How a step is trained.

    Attributes:
        in_backward: whether each parameter is updated as soon as its gradient is there.
        accumulate: whether a plan must hold where every parameter has a ``.grad`` already.
        micro_batches: forwards and backwards to one step of the optimizer.
    """

    in_backward: bool = False
    accumulate: bool = True
    micro_batches: int = 1

    @property
    def adds(self) -> bool:
        """Whether gradients are added to others, in the worst case that a plan must hold in."""
        return self.micro_batches > 1 or (self.accumulate and not self.in_backward)


@attrs.frozen(kw_only=True, eq=False)
class Stepping:
    """A training step made ready for placing.

    Attributes:
        whole: the training step, with the gradients that are there before it.
        graph: the same without gradients that go and without updates; those on the device within the
            backward are its last ops.
        leaving: gradients that go to the host.
        going: gradients on the device that go as soon as nothing reads them.
        stepped: updates on the device within the backward, in the order of their ops.
        style: how it is trained.
    """

    whole: Graph
    graph: Graph
    leaving: frozenset[int]
    going: frozenset[int]
    stepped: tuple[Update, ...]
    style: Style

    @property
    def departing(self) -> frozenset[int]:
        """Values that are copied to the host as soon as nothing reads them."""
        return self.leaving | {v for update in self.stepped for v in streamed(self.whole, update)}

    def with_updates(self, order: Iterable[int]) -> list[int]:
        """An order of the step's ops, with each update behind the last run that reads what it changes."""
        runs = list(order)
        last: dict[int, int] = {}
        for position, op in enumerate(runs):
            for way in self.graph.ops[op].implementations:
                last.update(dict.fromkeys((*way.inputs, *way.outputs), position))
        first = len(self.graph.ops) - len(self.stepped)
        behind: dict[int, list[int]] = {}
        for number, update in enumerate(self.stepped, first):
            behind.setdefault(max(last[update.grad], last.get(update.param, 0)), []).append(number)
        return [each for position, op in enumerate(runs) for each in (op, *behind.get(position, ()))]


def ready(graph: Graph, style: Style) -> Stepping:
    """Make a training step ready.

    Args:
        graph: the step, with everything at its home.
        style: how it is trained.
    """
    values = graph.values
    stepped = tuple(
        u for u in graph.updates if values[u.param].placement is Placement.DEVICE and style.in_backward
    )
    homes = {grad: values[of].placement for grad in graph.gradients if (of := values[grad].of) is not None}
    leaving = frozenset(grad for grad, home in homes.items() if home is Placement.HOST)
    going = {grad for grad, home in homes.items() if home is Placement.DEVICE and style.adds}
    going |= {update.grad for update in stepped}
    whole = accumulating(graph) if style.adds else graph
    kept = [
        attrs.evolve(v, role=Role.ACTIVATION, of=None) if i in leaving or i in going else v
        for i, v in enumerate(whole.values)
    ]
    ops = [*graph.ops, *(_op(graph, update) for update in stepped)]
    return Stepping(
        whole=whole,
        graph=attrs.evolve(whole, values=tuple(kept), ops=tuple(ops), updates=()),
        leaving=leaving,
        going=frozenset(going),
        stepped=stepped,
        style=style,
    )


def streamed(graph: Graph, update: Update) -> tuple[int, ...]:
    """States of an update on the device that are placed on the host."""
    return tuple(v for v in update.states if graph.values[v].placement is Placement.HOST)


def first_reads(graph: Graph) -> dict[int, int]:
    """For each value the first op, in trace order, that reads it."""
    first: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        for value in op.first.inputs:
            first.setdefault(value, position)
    return first


def by_forward(graph: Graph, updates: Iterable[Update]) -> Sequence[Update]:
    """Updates in the order in which the next forward reads their parameters."""
    first = first_reads(graph)
    return sorted(updates, key=lambda update: (first.get(update.param, len(graph.ops)), update.param))


def _op(graph: Graph, update: Update) -> Op:
    way = Implementation(
        inputs=(update.grad, *streamed(graph, update)),
        outputs=(),
        time_s=update.device_time_s,
        workspace_nbytes=update.workspace_nbytes,
    )
    name = f"update of {graph.values[update.param].name}"
    return Op(name=name, target="update", backward=True, rerun=None, implementations=(way,))
