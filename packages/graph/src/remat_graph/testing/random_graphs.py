"""Random training steps for tests: same seed, same graph.

`random_graph` makes a small step that has everything the memory rule knows, built as a trace builds one: a
forward, its backward op by op in reverse, gradients summed where a value was read twice. `random_chain` is
what methods for chains assume.

Times are multiples of 1/8 s and sums of them exact, so that tests may compare times with ``==``.
"""

import random
from collections.abc import Iterable

import attrs

from remat_graph.ir import Graph, Implementation, Op, Role, Value


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
