"""Make random orders and schedules of a graph."""

import random

from remat_graph.ir import Graph
from remat_graph.schedule import Compute, Free, FreeHost, Lane, Schedule, Start, Step, Transfer, Wait


def random_order(graph: Graph, seed: int, *, forget: float = 0.3) -> list[int]:
    """A valid order with repeats for a graph without persistent values.

    Before each op, every value that can be recomputed is freed with probability `forget`.
    """
    return _RandomOrder(graph, random.Random(seed), forget).order()


def random_moves(graph: Graph, schedule: Schedule, seed: int, *, moves: int = 3) -> Schedule:
    """The same schedule with some values swapped out to the host and back in before their next use."""
    rng = random.Random(seed)
    steps, boundary = list(schedule.steps), schedule.boundary
    for _ in range(moves):
        intervals = _idle_intervals(graph, steps)
        if not intervals:
            break
        value, start, stop = rng.choice(intervals)
        out, back = Transfer(value, Lane.TO_HOST), Transfer(value, Lane.TO_DEVICE)
        positions = sorted(rng.randint(start, stop) for _ in range(4))
        parts: list[list[Step]] = [
            [Start(out)],
            [Wait(out), Free(value)],
            [Start(back)],
            [Wait(back), FreeHost(value)],
        ]
        for position, part in reversed(list(zip(positions, parts, strict=True))):
            steps[position:position] = part
            boundary += len(part) if position < boundary else 0
    return Schedule(steps, boundary)


class _RandomOrder:
    """Choose ops in a random valid order, and free random values before each of them."""

    def __init__(self, graph: Graph, rng: random.Random, forget: float) -> None:
        self.graph, self.rng, self.forget = graph, rng, forget
        replaced = {value.replaces for value in graph.values}
        self.recomputed_by = {
            value: i
            for i, op in enumerate(graph.ops)
            if op.rerun is not None and not replaced & set(op.implementations[op.rerun].inputs)
            for value in set(op.first.outputs) & set(op.implementations[op.rerun].outputs)
            if not graph.values[value].external and not graph.values[value].pinned
        }
        self.live: set[int] = set()
        self.ran: list[int] = []

    def order(self) -> list[int]:
        for backward in (False, True):
            waiting = [i for i, op in enumerate(self.graph.ops) if op.backward is backward]
            while waiting:
                ready = [i for i in waiting if self.is_ready(i)]
                chosen = self.rng.choice(ready[: self.rng.randint(1, 3)])
                waiting.remove(chosen)
                for value in [v for v in sorted(self.live) if v in self.recomputed_by]:
                    if self.rng.random() < self.forget:
                        self.live.discard(value)
                self.run(chosen, first=True)
        return self.ran

    def is_ready(self, op: int) -> bool:
        """Whether first runs have made the inputs of an op, and have read the values that it overwrites."""
        seen = set(self.ran)
        graph = self.graph
        first = graph.ops[op].first
        overwritten = {graph.values[v].replaces for v in first.outputs} - {None}
        readers = {i for i, other in enumerate(graph.ops) if overwritten & set(other.first.inputs)} - {op}
        made = all(graph.producer[v] is None or graph.producer[v] in seen for v in first.inputs)
        return made and readers <= seen

    def run(self, op: int, *, first: bool) -> None:
        node = self.graph.ops[op]
        chosen = node.first if first or node.rerun is None else node.implementations[node.rerun]
        for value in chosen.inputs:
            if value not in self.live and value in self.recomputed_by:
                self.run(self.recomputed_by[value], first=False)
        self.ran.append(op)
        self.live.update(chosen.outputs)


def _idle_intervals(graph: Graph, steps: list[Step]) -> list[tuple[int, int, int]]:
    """(value, start, stop): positions between two uses of a value that no step between frees or moves."""
    last: dict[int, int] = {}
    intervals = []
    for position, step in enumerate(steps):
        match step:
            case Compute(op, implementation):
                chosen = graph.ops[op].implementations[implementation]
                for value in chosen.inputs:
                    if value in last and position - last[value] > 1:
                        intervals.append((value, last[value] + 1, position))
                for value in (*chosen.inputs, *chosen.outputs):
                    if not graph.values[value].external and not graph.values[value].pinned:
                        last[value] = position
            case Free(value):
                last.pop(value, None)
            case Start(transfer) | Wait(transfer):
                last.pop(transfer.value, None)
    # A step between an op and its frees would keep its outputs from reusing the freed storages.
    return [interval for interval in intervals if not isinstance(steps[interval[1]], Free)]
