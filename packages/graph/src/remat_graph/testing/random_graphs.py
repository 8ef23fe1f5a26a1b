"""Make random training steps for tests; equal seeds give equal graphs.

`random_graph` makes a small step with every case of the memory rule, built as a trace builds one: a forward,
its backward op by op in reverse, and gradients summed where a value is read twice. `random_chain` makes the
chains that methods for chains assume.

Times are multiples of 1/8 s, so their sums are exact and tests may compare times with ``==``.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from remat_graph.ir import Graph, Implementation, Op, Role, Value
from remat_graph.training import with_dropped


def random_graph(seed: int, forward_ops: int = 8, *, dropped: bool = False) -> Graph:
    """A small training step of about `forward_ops` forward ops and twice as many backward ops.

    It has ops of several outputs, parameters, random ops that read a saved generator state, batch norms that
    write running statistics only on their first run, pairs of implementations tied by a mask, in-place
    reuses, workspaces, outputs that the backward reads, tangents, ops in the backward that read forward
    values alone, and an allocator's rounding. With `dropped`, the caller drops some outputs.
    """
    return _Maker(random.Random(seed), forward_ops).graph(f"random-{seed}-{forward_ops}", dropped)


def random_chain(seed: int, stages: int) -> Graph:
    """A chain of different stages, each one forward op and one backward op.

    A stage makes an activation, which the next stage reads, and a mask. Its backward reads both, and the
    activation of the stage before.
    """
    rng = random.Random(seed)
    values, value = new_values()
    ops: list[Op] = []

    def op(inputs: Iterable[int], outputs: Iterable[int], eighths: int, *, backward: bool) -> None:
        only = Implementation(
            inputs=inputs, outputs=outputs, time_s=eighths / 8, workspace_nbytes=rng.choice((0, 0, 64))
        )
        name = f"{'back' if backward else 'stage'}_{len(ops)}"
        ops.append(Op(name=name, target="stage", backward=backward, implementations=[only]))

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


def new_values() -> tuple[list[Value], Callable[..., int]]:
    """A list of values and a function (word, nbytes, fields) that appends one and returns its index."""
    values: list[Value] = []

    def value(word: str, nbytes: int, **fields: Any) -> int:
        values.append(Value(name=f"{word}{len(values)}", nbytes=nbytes, **fields))
        return len(values) - 1

    return values, value


class _Maker:
    """The values and ops made so far, and the gradient of each value."""

    def __init__(self, rng: random.Random, forward_ops: int) -> None:
        self.rng, self.forward_ops = rng, forward_ops
        self.values, self.append = new_values()
        self.ops: list[Op] = []
        self.grads: dict[int, int] = {}

    def graph(self, name: str, dropped: bool) -> Graph:
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
        graph = Graph(name=name, values=self.values, ops=self.ops, rounding_nbytes=rounding)
        others = [v for v in made if v not in graph.outputs] if dropped else []
        return with_dropped(graph, self.rng.sample(others, min(len(others), 2))) if others else graph

    def value(self, word: str, nbytes: int | None = None, **fields: Any) -> int:
        size = self.rng.choice((0, 1, 64, 500, 512, 513, 1000, 1000, 4000)) if nbytes is None else nbytes
        return self.append(word, size, **fields)

    def op(self, kind: str, variants: list[Implementation], *, backward: bool, rerun: int | None = 0) -> None:
        name = f"{kind}_{len(self.ops)}"
        key = f"{kind} {[self.values[v].nbytes for variant in variants for v in variant.outputs]}"
        made = Op(name=name, target=kind, backward=backward, key=key, rerun=rerun, implementations=variants)
        self.ops.append(made)

    def variant(
        self, inputs: Iterable[int], outputs: Iterable[int], *, in_place: bool = False
    ) -> Implementation:
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
                variants = [self.variant((x, self.value("weight", external=True, role=Role.PARAM)), (y,))]
                self.op("linear", variants, backward=False)
                return [y]
            case "relu":
                y = self.value("y", self.values[x].nbytes)
                self.op("relu", [self.variant((x,), (y,), in_place=True)], backward=False)
                return [y]
            case "add":
                y = self.value("y", self.values[x].nbytes)
                variants = [self.variant((x, self.rng.choice(pool)), (y,), in_place=self.rng.random() < 0.5)]
                self.op("add", variants, backward=False)
                return [y]
            case "split":
                parts = [self.value("part") for _ in range(self.rng.randint(2, 3))]
                self.op("split", [self.variant((x,), parts)], backward=False)
                return parts[: self.rng.randint(1, len(parts))]  # no op reads the others
            case "dropout":
                state, y = self.value("state", 16, role=Role.RNG), self.value("y")
                self.op("snapshot", [self.variant((), (state,))], backward=False, rerun=None)
                self.op("dropout", [self.variant((x, state), (y,))], backward=False)
                return [y]
            case "norm":
                old = self.value("running", external=True, role=Role.BUFFER)
                y, stat = self.value("y"), self.value("stat", 8)
                new = self.value("running", external=True, role=Role.BUFFER, replaces=old)
                variants = [self.variant((x, old), (y, stat, new)), self.variant((x,), (y, stat))]
                self.op("norm", variants, backward=False, rerun=1)
                return [y]
            case _:
                y, mask = self.value("y"), self.value("mask")
                variants = [self.variant((x,), (y,)), self.variant((x,), (y, mask))]
                self.op("masked", variants, backward=False, rerun=self.rng.choice((0, 1)))
                return [y]

    def backward_op(self, op: Op) -> None:
        """Make the gradients of the inputs of a forward op from those of its outputs and saved values."""
        upstream = [self.grads[v] for v in op.first.outputs if v in self.grads]
        if not upstream:
            return
        around = [v for v in (*op.first.inputs, *op.first.outputs) if self.is_storage(v)]
        saved = [v for v in around if self.rng.random() < 0.6]
        if saved and self.rng.random() < 0.15:
            # This op of the backward reads forward values alone.
            kept = self.value("again")
            self.op("cast", [self.variant(saved, (kept,))], backward=True)
            saved = [kept]
        fresh = {}
        for v in op.first.inputs:
            stored = self.values[v]
            if not stored.external:
                fresh[v] = self.value("grad", stored.nbytes)
            elif stored.role is Role.PARAM:
                fresh[v] = self.value("gradient", stored.nbytes, role=Role.GRAD, of=v)
        variants = [self.variant((*upstream, *saved), fresh.values(), in_place=self.rng.random() < 0.5)]
        masks = [
            v for variant in op.implementations[1:] for v in variant.outputs if v not in op.first.outputs
        ]
        if masks:
            variants.append(self.variant((*upstream, *masks), fresh.values()))
        if fresh:
            self.op(f"{op.target}_backward", variants, backward=True)
        for v, grad in fresh.items():
            if v in self.grads:
                total = self.value("sum", self.values[grad].nbytes)
                self.op("sum", [self.variant((self.grads[v], grad), (total,), in_place=True)], backward=True)
                grad = total
            if not self.values[v].external:
                self.grads[v] = grad

    def is_storage(self, value: int) -> bool:
        return not self.values[value].external or self.values[value].role is Role.PARAM
