"""Add random switches to a graph, for tests."""

import random

import attrs

from remat_graph.ir import Alternative, Graph, Implementation, Op, Role, Value

NOTHING = Implementation(inputs=(), outputs=())


def with_random_switches(graph: Graph, seed: int, most: int = 4) -> Graph:
    """The same step with up to `most` switches of four families, and perhaps two on one op.

    ``fused``: an op runs nothing, and all that read its results read its inputs instead and take its time.
    ``other``: an op takes another time and another workspace, and may overwrite nothing.
    ``mask``: an added op makes a small value from a large one, which a backward op then reads instead.
    ``split``: an op makes all but one of its results, and an added op makes that one.
    """
    return _Switches(graph, random.Random(seed)).added(most)


class _Switches:
    """The ops and values so far; an added op comes right after the op in whose list it is."""

    def __init__(self, graph: Graph, rng: random.Random) -> None:
        self.graph, self.rng = graph, rng
        self.ops = list(graph.ops)
        self.added_after: list[list[Op]] = [[] for _ in graph.ops]
        self.values = list(graph.values)
        self.names: set[str] = set()

    def added(self, most: int) -> Graph:
        for i in self.rng.sample(range(len(self.ops)), len(self.ops)):
            if len(self.names) >= most:
                break
            kinds = [self.fuse, self.mask, self.split, self.change]
            for kind in self.rng.sample(kinds, len(kinds)):
                if kind(i):
                    break
        ops = [op for one, more in zip(self.ops, self.added_after, strict=True) for op in (one, *more)]
        return attrs.evolve(self.graph, ops=ops, values=self.values)

    def fuse(self, i: int) -> bool:
        readers = _fusible(self.graph, i)
        if not readers:
            return False
        switch, gone = f"fused.{i}", self.graph.ops[i].first
        self.add(i, NOTHING, switch)
        for reader in readers:
            self.add(reader, _fused(self.graph.ops[reader].first, gone, self.rng), switch)
        return True

    def change(self, i: int) -> bool:
        if not _plain(self.graph, self.graph.ops[i]):
            return False
        self.add(i, self.timed(self.graph.ops[i].first), f"other.{i}")
        return True

    def mask(self, i: int) -> bool:
        """For a result of op i and a backward op that reads it."""
        op = self.graph.ops[i]
        pairs = [
            (v, reader)
            for v in op.first.outputs
            for reader, other in enumerate(self.graph.ops)
            if other.backward and v in other.first.inputs and reader > i and _plain(self.graph, other)
        ]
        if not pairs or not _plain(self.graph, op):
            return False
        v, reader = self.rng.choice(pairs)
        if self.values[v].external:
            return False
        switch = f"mask.{reader}"
        if switch in self.names:
            return False
        small = len(self.values)
        self.values.append(Value(name=f"small_{small}", nbytes=self.values[v].nbytes // 8))
        self.add_op(i, Implementation(inputs=[v], outputs=[small]), switch)
        run = self.graph.ops[reader].first
        inputs = [small if read == v else read for read in run.inputs]
        self.add(reader, self.timed(attrs.evolve(run, inputs=inputs, reuses=())), switch)
        return True

    def split(self, i: int) -> bool:
        """For an op of several results."""
        op = self.graph.ops[i]
        if len(op.first.outputs) < 2 or not _plain(self.graph, op):
            return False
        if any(self.values[v].external for v in op.first.outputs):
            return False
        alone = self.rng.choice(op.first.outputs)
        switch = f"split.{i}"
        others = [v for v in op.first.outputs if v != alone]
        # What it would overwrite is still read by the added op.
        self.add(i, self.timed(attrs.evolve(op.first, outputs=others, reuses=())), switch)
        self.add_op(i, Implementation(inputs=op.first.inputs, outputs=[alone]), switch)
        return True

    def timed(self, run: Implementation) -> Implementation:
        """The same with a random time and workspace, and without overwriting."""
        time_s, workspace = self.rng.randint(0, 32) / 8, self.rng.choice((0, 64, 2000))
        return attrs.evolve(run, time_s=time_s, workspace_nbytes=workspace, reuses=())

    def add_op(self, i: int, run: Implementation, switch: str) -> None:
        """An op after op i that runs only with the switch."""
        op = Op(
            name=f"added_{switch}",
            target="added",
            backward=self.graph.ops[i].backward,
            rerun=self.rng.choice((0, None)),
            implementations=[NOTHING, self.timed(run)],
            alternatives=[Alternative(switch=switch, first=1, again=1)],
        )
        self.added_after[i].append(op)

    def add(self, i: int, run: Implementation, switch: str) -> None:
        """An alternative of op i."""
        self.names.add(switch)
        number = len(self.ops[i].implementations)
        other = Alternative(switch=switch, first=number, again=number)
        self.ops[i] = attrs.evolve(
            self.ops[i],
            implementations=(*self.ops[i].implementations, run),
            alternatives=(*self.ops[i].alternatives, other),
        )


def _plain(graph: Graph, op: Op) -> bool:
    """Whether an op repeats as it first runs, and neither reads nor writes versions of a caller's tensor."""
    versions = {v for v, value in enumerate(graph.values) if value.replaces is not None}
    versions |= {value.replaces for value in graph.values if value.replaces is not None}
    touched = {*op.first.inputs, *op.first.outputs}
    return len(op.implementations) == 1 and op.rerun == 0 and versions.isdisjoint(touched)


def _fusible(graph: Graph, op: int) -> list[int]:
    """The readers of an op that may be left out; none if it may not."""
    made = set(graph.ops[op].first.outputs)
    if not _plain(graph, graph.ops[op]) or any(
        graph.values[v].role is not Role.ACTIVATION or graph.values[v].external for v in made
    ):
        return []
    reading = {
        i
        for i, other in enumerate(graph.ops)
        if any(made.intersection(run.inputs) for run in other.implementations)
    }
    tangents = set(graph.tangents)
    fits = all(_plain(graph, graph.ops[i]) for i in reading) and tangents.isdisjoint(
        graph.ops[op].first.inputs
    )
    return sorted(reading) if fits else []


def _fused(run: Implementation, gone: Implementation, rng: random.Random) -> Implementation:
    inputs = dict.fromkeys((*(v for v in run.inputs if v not in gone.outputs), *gone.inputs))
    return Implementation(
        inputs=inputs,
        outputs=run.outputs,
        time_s=run.time_s + gone.time_s,
        workspace_nbytes=run.workspace_nbytes + rng.choice((0, 64)),
        reuses=[(made, source) for made, source in run.reuses if source in inputs],
    )
