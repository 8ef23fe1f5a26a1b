"""Random orders and schedules of a graph."""

import random

from remat_graph.ir import Graph
from remat_graph.schedule import Compute, Free, FreeHost, Lane, Schedule, Start, Step, Transfer, Wait


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
