"""Which ops of a schedule run in another way, layer by layer: what this saves and what it costs."""

from collections import defaultdict
from collections.abc import Iterable

import attrs

from remat_graph.ir import Graph
from remat_graph.layers.names import Patterns, enclosing
from remat_graph.schedule import Compute, Schedule
from remat_graph.simulator.simulate import simulate
from remat_graph.switches.specialize import family_of, specialize, switches_on
from remat_graph.training import with_placement

_size = [attrs.validators.instance_of(int), attrs.validators.ge(0)]


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(str, names))


@attrs.frozen(kw_only=True)
class WayGroup:
    """Switches of one family in layers with one pattern, of which a schedule has some on.

    Attributes:
        family: the family.
        layers: the pattern of the layers that enclose their ops; "" if none does.
        of: number of these switches.
        on: number of those that are on.
        targets: what the ops that change call, without repeats.
        usual_nbytes: peak of the unplanned step between the first and the last op that they change.
        nbytes: the same with them on.
        extra_s: seconds of their ops beyond those of the usual way; negative if they are faster.
    """

    family: str
    layers: str
    of: int = attrs.field(validator=_size)
    on: int = attrs.field(validator=_size)
    targets: tuple[str, ...] = attrs.field(converter=_names)
    usual_nbytes: int = attrs.field(validator=_size)
    nbytes: int = attrs.field(validator=_size)
    extra_s: float

    @property
    def saved_nbytes(self) -> int:
        """How much lower the step peaks there; negative if higher."""
        return self.usual_nbytes - self.nbytes


def way_groups(graph: Graph, schedule: Schedule) -> tuple[WayGroup, ...]:
    """The groups of which a schedule has a switch on, those that save the most bytes first."""
    on = switches_on(graph, schedule)
    if not on:
        return ()
    changed: defaultdict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(graph.ops):
        for other in op.alternatives:
            changed[other.switch].append(i)
    pattern_of = Patterns({op.layer for op in graph.ops})
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for switch, ops in changed.items():
        layer = enclosing([graph.ops[i].layer for i in ops])
        groups[family_of(switch), pattern_of(layer)].append(switch)
    graph = with_placement(graph, ())  # nothing moves in an unplanned step
    usual = _held_nbytes(graph, ())
    found = []
    for (family, layers), switches in groups.items():
        chosen = [switch for switch in switches if switch in on]
        if not chosen:
            continue
        ops = sorted(i for switch in chosen for i in changed[switch])
        span = range(ops[0], ops[-1] + 1)
        held = _held_nbytes(graph, chosen)
        found.append(
            WayGroup(
                family=family,
                layers=layers,
                of=len(switches),
                on=len(chosen),
                targets=tuple(dict.fromkeys(graph.ops[i].target for i in ops)),
                usual_nbytes=max(usual[i] for i in span),
                nbytes=max(held[i] for i in span),
                extra_s=_extra_s(graph, set(chosen)),
            )
        )
    return tuple(sorted(found, key=lambda group: -group.saved_nbytes))


def _held_nbytes(graph: Graph, on: Iterable[str]) -> dict[int, int]:
    """The bytes that an unplanned step holds during each op."""
    decided = specialize(graph, on)
    schedule = decided.restore(Schedule.unplanned(decided.graph))
    during = simulate(graph, schedule).during_nbytes
    return {step.op: n for n, step in zip(during, schedule.steps, strict=True) if isinstance(step, Compute)}


def _extra_s(graph: Graph, on: set[str]) -> float:
    return sum(
        op.implementations[other.first].time_s - op.first.time_s
        for op in graph.ops
        for other in op.alternatives
        if other.switch in on
    )
