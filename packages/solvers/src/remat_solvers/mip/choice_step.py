"""Write a graph with switches for the program of stages: one alternative for each way to run an op."""

from collections.abc import Collection, Sequence

import attrs

from remat_graph import Graph, Implementation
from remat_graph.switches.conflicts import conflicts
from remat_graph.switches.specialize import family_of, runs_nothing
from remat_solvers.mip.stage_program import Choice, StagedStep, staged_step


@attrs.frozen(kw_only=True, eq=False)
class ChoiceStep:
    """The step with all ways to run its ops.

    Attributes:
        work: for the program; ops are ways.
        switch_of: per way the switch that has it in force; empty for the way with all switches off.
    """

    work: StagedStep
    switch_of: tuple[str, ...]

    def chosen(self, frontiers: Collection[int]) -> frozenset[str]:
        """The switches that are on where these ways are frontiers."""
        return frozenset(self.switch_of[way] for way in frontiers if self.switch_of[way])


def choice_step(graph: Graph, without: Collection[str] = ()) -> ChoiceStep:
    """A graph with one op a stage, in any of its ways; families in `without` stay off."""
    values = graph.values
    first: list[Implementation] = []
    again: list[Implementation] = []
    switch_of: list[str] = []
    repeats: set[int] = set()
    groups: list[tuple[int, ...]] = []
    replaced = {value.replaces for value in values if value.replaces is not None}
    for op in graph.ops:
        others = [other for other in op.alternatives if family_of(other.switch) not in without]
        ways = [("", 0, op.rerun), *((other.switch, other.first, other.again) for other in others)]
        groups.append(tuple(range(len(first), len(first) + len(ways))))
        for switch, one, more in ways:
            repeat = op.implementations[one if more is None else more]
            written = any(values[v].external for v in repeat.outputs)
            if more is not None and not (
                runs_nothing(repeat) or written or replaced.intersection(repeat.inputs)
            ):
                repeats.add(len(first))
            first.append(op.implementations[one])
            again.append(repeat)
            switch_of.append(switch)
    plain = staged_step(graph)
    made = {v for run in first for v in run.outputs if not values[v].external}
    known = made | plain.arriving
    makes = tuple(tuple(v for v in run.outputs if v in made) for run in first)
    pinned = {v for v in made if values[v].pinned}
    moving = {v for v in pinned if _moves(v, groups, makes)}
    ways_of: dict[str, list[int]] = {}
    for way, switch in enumerate(switch_of):
        if switch:
            ways_of.setdefault(switch, []).append(way)
    found = conflicts(graph)
    pairs = [(a, b) for a in ways_of for b in found[a] if b in ways_of and a < b]
    work = attrs.evolve(
        plain,
        groups=tuple(groups),
        reads=tuple(
            tuple(sorted({v for run in pair for v in run.inputs if v in known}))
            for pair in zip(first, again, strict=True)
        ),
        makes=makes,
        time_s=tuple(run.time_s for run in again),
        first_s=tuple(run.time_s for run in first),
        workspace=tuple(max(run.workspace_nbytes for run in pair) for pair in zip(first, again, strict=True)),
        repeats=frozenset(repeats),
        size={v: graph.allocated_nbytes(v) for v in sorted(known)},
        pinned=frozenset(pinned - moving),
        choice=Choice(
            together=tuple(tuple(ways) for ways in ways_of.values()),
            exclusive=tuple((ways_of[a][0], ways_of[b][0]) for a, b in pairs),
            void=frozenset(way for way, run in enumerate(first) if runs_nothing(run)),
            moving=frozenset(moving),
        ),
    )
    return ChoiceStep(work=work, switch_of=tuple(switch_of))


def _moves(value: int, groups: Sequence[tuple[int, ...]], makes: Sequence[tuple[int, ...]]) -> bool:
    """Whether not every way of one op makes a value."""
    return not any(all(value in makes[way] for way in ways) for ways in groups)
