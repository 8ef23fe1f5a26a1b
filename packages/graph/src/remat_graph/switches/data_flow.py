"""Whether every value is made, once and before it is read, whichever switches are on.

A value may have another producer under another decision: with its switch off, one op makes both results of a
convolution's backward; with it on, the op makes one and an added op the other. Some values exist only under a
switch. So these rules hold for the graph of each decision, and not for all alternatives together. What one
decision changes costs little to check: only its ops, and the readers of the values that other ops make now.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import attrs

from remat_graph.ir import Graph, Implementation, Op, Role

Runs = tuple[Implementation, ...]
"""Implementations of an op, that of the first run first."""


@attrs.frozen
class Broken:
    """A rule that a decision breaks: the op or value, and what is wrong with it."""

    where: str
    problem: str


class _Maker(NamedTuple):
    """An op that makes a value, and whether its first run does."""

    op: int
    value: int
    first: bool


class DataFlow:
    """Who makes and who reads each value with all switches off, and what each switch changes.

    Attributes:
        changes: per switch its ops, and the implementations of each that are in force with it.
        differing: per switch the values of which it changes whether and where they are made.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.runs: list[Runs] = [_base(op) for op in graph.ops]
        self.changes: dict[str, dict[int, Runs]] = {switch: {} for switch in graph.switches}
        for i, op in enumerate(graph.ops):
            for other in op.alternatives:
                self.changes[other.switch][i] = _runs(op, other.first, other.again)
        self.makers: dict[int, list[_Maker]] = {}
        self.readers: dict[int, list[int]] = {}
        for i, runs in enumerate(self.runs):
            for maker in _makers(i, runs):
                self.makers.setdefault(maker.value, []).append(maker)
            for value in _read(runs):
                self.readers.setdefault(value, []).append(i)
        self.produced = {v for op in graph.ops for run in op.implementations for v in run.outputs}
        self.written = {v for runs in self.runs for v in runs[0].outputs if graph.values[v].external}
        self.next_version = {
            value.replaces: v for v, value in enumerate(graph.values) if value.replaces is not None
        }
        self.differing = {switch: self._differing(changed) for switch, changed in self.changes.items()}

    def check(self, on: Iterable[str]) -> Broken | None:
        """What is wrong with the graph in which these switches, which change different ops, are on."""
        changed: dict[int, Runs] = {}
        for switch in on:
            changed |= self.changes[switch]
        if changed:
            values = {v for i, runs in changed.items() for v in (*_made(self.runs[i]), *_made(runs))}
            touched = values | {old for v in values if (old := self.graph.values[v].replaces) is not None}
            readers = sorted({i for v in touched for i in self.readers.get(v, ())} | changed.keys())
        else:
            values, readers = set(range(len(self.graph.values))), list(range(len(self.runs)))
        return _Decision(self, changed, values).check(sorted(values), readers)

    def _differing(self, changed: Mapping[int, Runs]) -> set[int]:
        found: set[int] = set()
        for i, runs in changed.items():
            before = self.runs[i]
            found |= _made(before) ^ _made(runs)
            found |= set(before[0].outputs) ^ set(runs[0].outputs)
        return found


class _Decision:
    """The graph of one decision, as far as it differs from the graph with all switches off."""

    def __init__(self, flow: DataFlow, changed: Mapping[int, Runs], values: Iterable[int]) -> None:
        self.flow, self.changed = flow, changed
        self.makers = {v: [m for m in flow.makers.get(v, ()) if m.op not in changed] for v in values}
        for i, runs in changed.items():
            for maker in _makers(i, runs):
                self.makers[maker.value].append(maker)

    def check(self, values: Iterable[int], readers: Iterable[int]) -> Broken | None:
        ops, stored = self.flow.graph.ops, self.flow.graph.values
        for v in values:
            if len(self.makers[v]) > 1:
                first, second = (ops[maker.op].name for maker in sorted(self.makers[v])[:2])
                return Broken(second, f"makes {stored[v].name}, which {first} makes")
        for i in readers:
            for n, run in enumerate(self.runs(i)):
                for v in run.inputs:
                    if (problem := self.problem_of(i, v, first=n == 0)) is not None:
                        return Broken(ops[i].name, problem)
        for v in values:
            # A caller's tensor that one decision writes must not stay unwritten in another.
            required = v in self.flow.written if stored[v].external else stored[v].pinned
            if required and not ((maker := self.maker(v)) is not None and maker.first):
                return Broken(stored[v].name, "must be made by a first implementation")
        return None

    def runs(self, op: int) -> Runs:
        return self.changed.get(op, self.flow.runs[op])

    def maker(self, value: int) -> "_Maker | None":
        makers = self.makers.get(value, self.flow.makers.get(value, ()))
        return makers[0] if makers else None

    def problem_of(self, op: int, value: int, *, first: bool) -> str | None:
        """Why an op cannot read a value."""
        stored = self.flow.graph.values[value]
        version = self.flow.next_version.get(value)
        writer = None if version is None else self.maker(version)
        if writer is not None and writer.op < op:
            return f"reads {stored.name}, which an earlier op has overwritten"
        maker = self.maker(value)
        if maker is None:
            given = stored.role is Role.TANGENT or stored.placement is not None
            given = given or (stored.external and value not in self.flow.produced)
            return None if given else f"reads {stored.name} before anything makes it"
        if maker.op >= op:
            return f"reads {stored.name} before anything makes it"
        if first and not maker.first:
            return f"reads {stored.name}, which no first implementation makes"
        return None


def _base(op: Op) -> Runs:
    """What runs with all switches off; without alternatives, a first run may use any implementation."""
    return _runs(op, 0, op.rerun) if op.alternatives else op.implementations


def _runs(op: Op, first: int, again: int | None) -> Runs:
    numbers = (first,) if again in (None, first) else (first, again)
    return tuple(op.implementations[n] for n in numbers if n is not None)


def _makers(op: int, runs: Runs) -> list[_Maker]:
    first = frozenset(runs[0].outputs)
    return [_Maker(op, value, value in first) for value in _made(runs)]


def _made(runs: Runs) -> set[int]:
    return {v for run in runs for v in run.outputs}


def _read(runs: Runs) -> set[int]:
    return {v for run in runs for v in run.inputs}
