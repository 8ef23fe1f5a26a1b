"""Random graphs, orders and moving schedules for tests, in one place: same seed, same data.

`random_graph` makes a small training step that has everything the memory rule knows, built as a trace builds
one: a forward, its backward op by op in reverse, gradients summed where a value was read twice.
`random_order` walks it with random forgetting, so that values are computed again, and again from further
back. `random_moves` sends values to the host and back in between. `random_chain` is what methods for chains
assume, `random_training` a step with weights, optimizer states and updates; `random_links` are bandwidths at
which moving is worth a thought, and `streamed` lets weights live on
the host. `graphs()` and `schedules()` wrap the first two for hypothesis, which is only imported there.

Times are multiples of 1/8 s and sums of them exact, so that tests may compare times with ``==``.
"""

import math
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from remat_graph.ir import Graph, Home, Implementation, Op, Role, Value
from remat_graph.links import Links
from remat_graph.schedule import Compute, Free, FreeHost, Lane, Schedule, Start, Step, Transfer, Wait
from remat_graph.training import Optimized, training_graph

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def random_graph(seed: int, forward_ops: int = 8) -> Graph:
    """A small training step.

    It has ops of several outputs, parameters, random ops with the generator's state kept, batch norms that
    write running statistics and repeat without, pairs of implementations tied by a mask, in-place reuses,
    workspaces, outputs that the backward reads, tangents, forward-only ops in the backward, and an
    allocator's rounding.

    Args:
        seed: what to draw from.
        forward_ops: about how many ops the forward has; the backward has about twice as many.
    """
    return _Maker(random.Random(seed), forward_ops).graph(f"random-{seed}-{forward_ops}")


def random_order(graph: Graph, seed: int, *, forget: float = 0.3) -> list[int]:
    """A valid order of the ops with repeats: `Schedule.from_order` makes a valid schedule of it.

    Args:
        graph: a graph that moves nothing.
        seed: what to draw from.
        forget: how likely each value that can be had again is forgotten before each op.
    """
    return _Walk(graph, random.Random(seed), forget).order()


def random_moves(graph: Graph, schedule: Schedule, seed: int, *, moves: int = 3) -> Schedule:
    """The same schedule with some values sent to the host and fetched back before their next use."""
    rng = random.Random(seed)
    steps, boundary = list(schedule.steps), schedule.boundary
    for _ in range(moves):
        gaps = _gaps(graph, steps)
        if not gaps:
            break
        value, start, stop = rng.choice(gaps)
        away, back = Transfer(value, Lane.TO_HOST), Transfer(value, Lane.TO_DEVICE)
        places = sorted(rng.randint(start, stop) for _ in range(4))
        parts: list[list[Step]] = [
            [Start(away)],
            [Wait(away), Free(value)],
            [Start(back)],
            [Wait(back), FreeHost(value)],
        ]
        for place, part in reversed(list(zip(places, parts, strict=True))):
            steps[place:place] = part
            boundary += len(part) if place < boundary else 0
    return Schedule(steps, boundary)


def random_chain(seed: int, stages: int = 6) -> Graph:
    """A chain of unlike stages, one op there and one back.

    A stage makes an activation, which the next one reads, and what only its own backward reads beside the
    activations on both sides.

    Args:
        seed: what to draw from.
        stages: length of the forward.
    """
    rng = random.Random(seed)
    values: list[Value] = []
    ops: list[Op] = []

    def value(word: str, nbytes: int) -> int:
        values.append(Value(name=f"{word}{len(values)}", nbytes=nbytes))
        return len(values) - 1

    def op(inputs: Iterable[int], outputs: Iterable[int], eighths: int, *, backward: bool) -> None:
        way = Implementation(
            inputs=inputs, outputs=outputs, time_s=eighths / 8, workspace_nbytes=rng.choice((0, 0, 64))
        )
        name = f"{'back' if backward else 'stage'}_{len(ops)}"
        ops.append(Op(name=name, target="stage", backward=backward, implementations=[way]))

    made: list[tuple[int, int]] = []
    eighths = [rng.randint(2, 32) for _ in range(stages)]
    for stage in range(stages):
        made.append((value("y", 64 * rng.randint(1, 8)), value("mask", 64 * rng.randint(0, 16))))
        op(made[stage - 1][:1] if stage else (), made[stage], eighths[stage], backward=False)
    grad: list[int] = []
    for stage in reversed(range(stages)):
        before = made[stage - 1][:1] if stage else ()
        reads = (*made[stage], *before, *grad)
        grad = [value("grad", values[before[0]].nbytes if before else 0)]
        op(reads, grad, eighths[stage] * rng.randint(1, 3), backward=True)
    return Graph(name=f"chain-{seed}-{stages}", values=values, ops=ops)


def random_training(seed: int, layers: int = 5) -> Graph:
    """A step of training unlike layers: each has a weight, a gradient, an update and up to two states.

    A layer's forward reads its weight and what the layer before it made; its backward reads both again. Some
    weights are frozen, and some are read by two layers.

    Args:
        seed: what to draw from.
        layers: length of the forward.
    """
    rng = random.Random(seed)
    values: list[Value] = []
    ops: list[Op] = []

    def value(word: str, nbytes: int, **more: Any) -> int:
        values.append(Value(name=f"{word}{len(values)}", nbytes=nbytes, **more))
        return len(values) - 1

    def op(inputs: Iterable[int], outputs: Iterable[int], eighths: int, *, backward: bool) -> None:
        way = Implementation(inputs=inputs, outputs=outputs, time_s=eighths / 8)
        ops.append(Op(name=f"op{len(ops)}", target="layer", backward=backward, implementations=[way]))

    weights = [value("w", 64 * rng.randint(1, 8), role=Role.PARAM, external=True) for _ in range(layers)]
    used = [weights[i - 1] if i and rng.random() < 0.15 else w for i, w in enumerate(weights)]
    frozen = {w for w in weights if rng.random() < 0.2}
    made = [value("y", 64 * rng.randint(1, 8)) for _ in range(layers)]
    eighths = [rng.randint(2, 32) for _ in range(layers)]
    for i in range(layers):
        op((used[i], *made[i - 1 : i]), (made[i],), eighths[i], backward=False)
    parts: dict[int, list[int]] = {}
    above: list[int] = []
    for i in reversed(range(layers)):
        w, outputs = used[i], [value("dy", values[made[i - 1]].nbytes if i else 0)]
        if w not in frozen:
            last = w not in used[:i]
            role = Role.GRAD if last and w not in parts else Role.ACTIVATION
            parts.setdefault(w, []).append(
                value("dw", values[w].nbytes, role=role, of=w if role is Role.GRAD else None)
            )
            outputs.append(parts[w][-1])
        op((w, made[i], *made[i - 1 : i], *above), outputs, 2 * eighths[i], backward=True)
        above = outputs[:1]
        if w in parts and len(parts[w]) > 1:
            op(parts[w], (value("dw", values[w].nbytes, role=Role.GRAD, of=w),), 1, backward=True)
    graph = Graph(name=f"training-{seed}-{layers}", values=values, ops=ops)
    optimized = []
    for w in sorted(set(used) - frozen):
        states = tuple((f"m{k}", 2 * values[w].nbytes) for k in range(rng.randint(0, 2)))
        work = values[w].nbytes / 64 / 8
        optimized.append(Optimized(param=w, states=states, device_time_s=work / 4, cpu_time_s=2 * work))
    return training_graph(graph, optimized)


def random_links(graph: Graph, seed: int) -> Links:
    """Bandwidths, powers of 2, at which moving all activations takes about 1/8 to 4 times the compute."""
    rng = random.Random(seed)
    nbytes = sum(value.nbytes for value in graph.values if value.role is Role.ACTIVATION)
    rates = [nbytes / max(graph.time_s, 1.0) * 2 ** rng.uniform(-2, 3) for _ in range(2)]
    to_host, to_device = (2.0 ** round(math.log2(max(rate, 1.0))) for rate in rates)
    return Links(to_host_nbytes_per_s=to_host, to_device_nbytes_per_s=to_device)


def streamed(graph: Graph, seed: int, *, share: float = 0.6) -> Graph:
    """The same step with some of its parameters charged and at home on the host."""
    rng = random.Random(seed)
    values = [
        attrs.evolve(value, external=False, home=Home.HOST, nbytes=max(value.nbytes, 64))
        if value.role is Role.PARAM and rng.random() < share
        else value
        for value in graph.values
    ]
    return attrs.evolve(graph, values=values)


def graphs(max_forward_ops: int = 12) -> "SearchStrategy[Graph]":
    """Strategy of `random_graph`; shrinks towards few ops."""
    from hypothesis import strategies as st

    return st.builds(random_graph, st.integers(0, 2**32 - 1), st.integers(1, max_forward_ops))


def schedules(max_forward_ops: int = 12) -> "SearchStrategy[tuple[Graph, Schedule]]":
    """Strategy of graphs with a schedule that computes values again."""
    from hypothesis import strategies as st

    def with_order(graph: Graph, seed: int, forget: float) -> tuple[Graph, Schedule]:
        return graph, Schedule.from_order(graph, random_order(graph, seed, forget=forget))

    forget = st.sampled_from((0.0, 0.1, 0.3, 0.6))
    return st.builds(with_order, graphs(max_forward_ops), st.integers(0, 2**32 - 1), forget)


class _Maker:
    """Values and ops so far, and which value holds the gradient of which."""

    def __init__(self, rng: random.Random, forward_ops: int) -> None:
        self.rng, self.forward_ops = rng, forward_ops
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.grads: dict[int, int] = {}

    def graph(self, name: str) -> Graph:
        pool = [self.value("input", external=True)]
        while len(self.ops) < self.forward_ops:
            pool += self.forward_op(pool)
        forward = list(self.ops)
        made = [v for v in pool if not self.values[v].external]
        for v in {made[-1], self.rng.choice(made)}:
            self.values[v] = attrs.evolve(self.values[v], role=Role.OUTPUT)
            self.grads[v] = self.value("tangent", self.values[v].nbytes, role=Role.TANGENT, of=v)
        for op in reversed(forward):
            self.backward_op(op)
        rounding = self.rng.choice((1, 512))
        return Graph(name=name, values=self.values, ops=self.ops, rounding_nbytes=rounding)

    def value(
        self,
        word: str,
        nbytes: int | None = None,
        *,
        role: Role = Role.ACTIVATION,
        external: bool = False,
        of: int | None = None,
        replaces: int | None = None,
    ) -> int:
        size = self.rng.choice((0, 1, 64, 500, 512, 513, 1000, 1000, 4000)) if nbytes is None else nbytes
        name = f"{word}{len(self.values)}"
        self.values.append(
            Value(name=name, nbytes=size, role=role, external=external, of=of, replaces=replaces)
        )
        return len(self.values) - 1

    def op(self, target: str, ways: list[Implementation], *, backward: bool, rerun: int | None = 0) -> None:
        name = f"{target}_{len(self.ops)}"
        key = f"{target} {[self.values[v].nbytes for way in ways for v in way.outputs]}"
        made = Op(name=name, target=target, backward=backward, key=key, rerun=rerun, implementations=ways)
        self.ops.append(made)

    def way(self, inputs: Iterable[int], outputs: Iterable[int], *, in_place: bool = False) -> Implementation:
        inputs, outputs = tuple(dict.fromkeys(inputs)), tuple(outputs)
        reuses = [
            (o, i)
            for o in outputs
            for i in inputs
            if in_place and self.values[o].nbytes == self.values[i].nbytes and not self.values[i].external
        ]
        workspace = self.rng.choice((0, 0, 0, 100, 3000))
        time_s = self.rng.randint(0, 32) / 8
        return Implementation(
            inputs=inputs, outputs=outputs, time_s=time_s, workspace_nbytes=workspace, reuses=tuple(reuses)
        )

    def forward_op(self, pool: list[int]) -> list[int]:
        x = self.rng.choice(pool[-3:])
        match self.rng.choice(("linear", "relu", "add", "split", "dropout", "norm", "masked")):
            case "linear":
                y = self.value("y")
                ways = [self.way((x, self.value("weight", external=True, role=Role.PARAM)), (y,))]
                self.op("linear", ways, backward=False)
                return [y]
            case "relu":
                y = self.value("y", self.values[x].nbytes)
                self.op("relu", [self.way((x,), (y,), in_place=True)], backward=False)
                return [y]
            case "add":
                y = self.value("y", self.values[x].nbytes)
                ways = [self.way((x, self.rng.choice(pool)), (y,), in_place=self.rng.random() < 0.5)]
                self.op("add", ways, backward=False)
                return [y]
            case "split":
                parts = [self.value("part") for _ in range(self.rng.randint(2, 3))]
                self.op("split", [self.way((x,), parts)], backward=False)
                return parts[: self.rng.randint(1, len(parts))]  # what is left out is read by nothing
            case "dropout":
                state, y = self.value("state", 16, role=Role.RNG), self.value("y")
                self.op("snapshot", [self.way((), (state,))], backward=False, rerun=None)
                self.op("dropout", [self.way((x, state), (y,))], backward=False)
                return [y]
            case "norm":
                old = self.value("running", external=True, role=Role.BUFFER)
                y, stat = self.value("y"), self.value("stat", 8)
                new = self.value("running", external=True, role=Role.BUFFER, replaces=old)
                ways = [self.way((x, old), (y, stat, new)), self.way((x,), (y, stat))]
                self.op("norm", ways, backward=False, rerun=1)
                return [y]
            case _:
                y, mask = self.value("y"), self.value("mask")
                ways = [self.way((x,), (y,)), self.way((x,), (y, mask))]
                self.op("masked", ways, backward=False, rerun=self.rng.choice((0, 1)))
                return [y]

    def backward_op(self, op: Op) -> None:
        """Gradients of what a forward op read, from those of what it made and from what it saved."""
        upstream = [self.grads[v] for v in op.first.outputs if v in self.grads]
        if not upstream:
            return
        around = [v for v in (*op.first.inputs, *op.first.outputs) if self.is_storage(v)]
        saved = [v for v in around if self.rng.random() < 0.6]
        if saved and self.rng.random() < 0.15:
            # It sits in the backward but depends on the forward alone.
            kept = self.value("again")
            self.op("cast", [self.way(saved, (kept,))], backward=True)
            saved = [kept]
        fresh = {}
        for v in op.first.inputs:
            stored = self.values[v]
            if not stored.external:
                fresh[v] = self.value("grad", stored.nbytes)
            elif stored.role is Role.PARAM:
                fresh[v] = self.value("gradient", stored.nbytes, role=Role.GRAD, of=v)
        ways = [self.way((*upstream, *saved), fresh.values(), in_place=self.rng.random() < 0.5)]
        masks = [v for way in op.implementations[1:] for v in way.outputs if v not in op.first.outputs]
        if masks:
            ways.append(self.way((*upstream, *masks), fresh.values()))
        if fresh:
            self.op(f"{op.target}_backward", ways, backward=True)
        for v, grad in fresh.items():
            if v in self.grads:
                total = self.value("sum", self.values[grad].nbytes)
                self.op("sum", [self.way((self.grads[v], grad), (total,), in_place=True)], backward=True)
                grad = total
            if not self.values[v].external:
                self.grads[v] = grad

    def is_storage(self, value: int) -> bool:
        return not self.values[value].external or self.values[value].role is Role.PARAM


class _Walk:
    """Runs ops in a random valid order, and forgets values on the way."""

    def __init__(self, graph: Graph, rng: random.Random, forget: float) -> None:
        self.graph, self.rng, self.forget = graph, rng, forget
        replaced = {value.replaces for value in graph.values}
        self.again = {
            value: i
            for i, op in enumerate(graph.ops)
            if op.rerun is not None and not replaced & set(op.implementations[op.rerun].inputs)
            for value in set(op.first.outputs) & set(op.implementations[op.rerun].outputs)
            if not graph.values[value].external and not graph.values[value].pinned
        }
        self.there: set[int] = set()
        self.ran: list[int] = []

    def order(self) -> list[int]:
        for backward in (False, True):
            waiting = [i for i, op in enumerate(self.graph.ops) if op.backward is backward]
            while waiting:
                ready = [i for i in waiting if self.is_ready(i)]
                chosen = self.rng.choice(ready[: self.rng.randint(1, 3)])
                waiting.remove(chosen)
                for value in [v for v in sorted(self.there) if v in self.again]:
                    if self.rng.random() < self.forget:
                        self.there.discard(value)
                self.run(chosen, first=True)
        return self.ran

    def is_ready(self, op: int) -> bool:
        """Whether first runs have made what it reads, and read what it overwrites."""
        seen = set(self.ran)
        graph = self.graph
        first = graph.ops[op].first
        overwritten = {graph.values[v].replaces for v in first.outputs} - {None}
        readers = {i for i, other in enumerate(graph.ops) if overwritten & set(other.first.inputs)} - {op}
        made = all(graph.producer[v] is None or graph.producer[v] in seen for v in first.inputs)
        return made and readers <= seen

    def run(self, op: int, *, first: bool) -> None:
        node = self.graph.ops[op]
        way = node.first if first or node.rerun is None else node.implementations[node.rerun]
        for value in way.inputs:
            if value not in self.there and value in self.again:
                self.run(self.again[value], first=False)
        self.ran.append(op)
        self.there.update(way.outputs)


def _gaps(graph: Graph, steps: list[Step]) -> list[tuple[int, int, int]]:
    """(value, start, stop): positions between two uses of a value that neither frees nor moves it."""
    last: dict[int, int] = {}
    gaps = []
    for position, step in enumerate(steps):
        match step:
            case Compute(op, implementation):
                way = graph.ops[op].implementations[implementation]
                for value in way.inputs:
                    if value in last and position - last[value] > 1:
                        gaps.append((value, last[value] + 1, position))
                for value in (*way.inputs, *way.outputs):
                    if not graph.values[value].external and not graph.values[value].pinned:
                        last[value] = position
            case Free(value):
                last.pop(value, None)
            case Start(transfer) | Wait(transfer):
                last.pop(transfer.value, None)
    # Moving between an op and its frees would keep outputs from taking over what dies there.
    return [gap for gap in gaps if not isinstance(steps[gap[1]], Free)]
