"""Liveness of a schedule: which steps a handler carries out, and which values live from graph to graph."""

from collections.abc import Iterable, Sequence
from typing import cast

from remat_executor.lowering.step_handler import Action
from remat_executor.translation.recipes import Draw
from remat_executor.translation.translation import Translation
from remat_graph import (
    Compute,
    Deliver,
    Free,
    FreeHost,
    Graph,
    Lane,
    OptimizerStep,
    Schedule,
    Start,
    Step,
    Wait,
)


def handled_steps(graph: Graph, schedule: Schedule) -> frozenset[int]:
    """Positions of the steps that a handler carries out."""
    moved = {step.transfer.value for step in schedule.steps if isinstance(step, Start)}
    gone: set[int] = set()
    taken_over: set[int] = set()
    found = set()
    for position, step in enumerate(schedule.steps):
        match step:
            case Compute(op, implementation):
                run = graph.ops[op].implementations[implementation]
                gone.difference_update(run.outputs)
                taken_over = {source for _, source in run.reuses}
            case Free(value) if value in moved:
                # A storage that an output takes over is lowered with the op.
                if value not in taken_over:
                    found.add(position)
                gone.add(value)
            case Deliver(value) if value in gone:
                found.add(position)
            case Start(transfer):
                gone.discard(transfer.value)
                found.add(position)
            case Wait() | FreeHost() | OptimizerStep():
                found.add(position)
            case _:
                pass
        if not isinstance(step, Compute | Free):
            taken_over = set()
    return frozenset(found)


def group_steps(steps: Sequence[Step], first: int, handled: frozenset[int]) -> list[list[Step] | Action]:
    """Group consecutive steps into lists that become one graph each, separated by a handler's steps.

    The last item is always a list, which may be empty: a segment's results are the results of a graph.
    """
    found: list[list[Step] | Action] = []
    run: list[Step] = []
    for position, step in enumerate(steps, first):
        if position in handled:
            if run:
                found.append(run)
            run = []
            found.append(cast(Action, step))
        else:
            run.append(step)
    return [*found, run]


def needed_later(graph: Graph, segments: Sequence[Sequence[list[Step] | Action]]) -> list[list[set[int]]]:
    """For each item of each segment the values that later items need."""
    needed: set[int] = set()
    found: list[list[set[int]]] = []
    for segment in reversed(segments):
        mine = []
        for run in reversed(segment):
            mine.append(set(needed))
            steps = [s for s in run if isinstance(s, Compute | Deliver)] if isinstance(run, list) else [run]
            needed = needed.union(*(_reads(graph, step) for step in steps))
        found.append(mine[::-1])
    return found[::-1]


def _reads(graph: Graph, step: Step) -> set[int]:
    """Values that a step may need on the device."""
    match step:
        case Compute(op, implementation):
            return set(graph.ops[op].implementations[implementation].inputs)
        case Deliver(value) | Free(value):
            return {value}
        case Start(transfer) | Wait(transfer):
            return {transfer.value}
        case OptimizerStep(value):
            return {update.grad for update in graph.updates if update.param == value}
        case _:
            return set()


def live_after(graph: Graph, step: Action, live: set[int]) -> tuple[set[int], list[int]]:
    """The live values after a handler's step, and the gradients that the step delivers or consumes."""
    match step:
        case Start(transfer) if transfer.lane is Lane.TO_DEVICE:
            return live | {transfer.value}, []
        case Free(value):
            return live - {value}, []
        case Deliver(value):
            return live, [value]
        case OptimizerStep(value):
            return live, [update.grad for update in graph.updates if update.param == value]
        case _:
            return live, []


def repeated_draws(translation: Translation, steps: Iterable[Step]) -> set[int]:
    """Generator states that a repeat needs; the others need not be read."""
    seen: set[int] = set()
    found: set[int] = set()
    for step in steps:
        if isinstance(step, Compute):
            recipe = translation.recipes[step.op]
            if isinstance(recipe, Draw) and step.op in seen:
                found.add(recipe.state)
            seen.add(step.op)
    return found


def freed_next(steps: Sequence[Step], position: int) -> set[int]:
    """Values that are freed right after a step."""
    freed: set[int] = set()
    for step in steps[position + 1 :]:
        if not isinstance(step, Free):
            break
        freed.add(step.value)
    return freed
