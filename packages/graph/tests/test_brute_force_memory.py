"""A second simulator without running totals: before each step it determines again which values are live."""

from hypothesis import given, settings

from remat_graph import Compute, Free, Graph, Schedule, simulate
from remat_graph.testing.strategies import schedules


def brute_force_peak(graph: Graph, schedule: Schedule) -> int:
    """The largest sum of live bytes: a value is live from a run that makes it to the free that follows."""
    steps = schedule.steps

    def taken_over(position: int, live: set[int]) -> dict[int, int]:
        stop = position + 1
        while stop < len(steps) and isinstance(steps[stop], Free):
            stop += 1
        dying = {free.value for free in steps[position + 1 : stop]}
        way = graph.ops[steps[position].op].implementations[steps[position].implementation]
        taken: dict[int, int] = {}
        for value in way.outputs:
            for made, source in way.reuses:
                if (
                    made == value
                    and source in dying - set(taken.values())
                    and value not in live | taken.keys()
                ):
                    taken[value] = source
        return taken

    def live_before(stop: int) -> set[int]:
        live: set[int] = set()
        for position, step in enumerate(steps[:stop]):
            live |= set(graph.tangents) if position == schedule.boundary else set()
            if isinstance(step, Compute):
                gone = taken_over(position, live).values()
                made = graph.ops[step.op].implementations[step.implementation].outputs
                live = (live | {v for v in made if not graph.values[v].external}) - set(gone)
            elif isinstance(step, Free):
                live -= {step.value}
            # With `.grad` None a delivered gradient stays.
        return live | (set(graph.tangents) if stop == schedule.boundary else set())

    highest = 0
    for position, step in enumerate(steps):
        live = live_before(position)
        total = sum(map(graph.allocated_nbytes, live))
        if isinstance(step, Compute):
            way = graph.ops[step.op].implementations[step.implementation]
            fresh = set(way.outputs) - taken_over(position, live).keys()
            total += sum(map(graph.allocated_nbytes, fresh)) + way.workspace_nbytes
        highest = max(highest, total)
    return max(highest, sum(map(graph.allocated_nbytes, live_before(len(steps)))))


@settings(deadline=None, max_examples=150)
@given(schedules())
def test_the_referee_agrees_with_a_brute_force_simulator(case):
    """Peaks are equal on random graphs and schedules."""
    graph, schedule = case
    assert brute_force_peak(graph, schedule) == simulate(graph, schedule).peak_nbytes


@settings(deadline=None)
@given(schedules())
def test_the_peak_is_the_largest_moment(case):
    """The peak is the largest of the bytes per step."""
    graph, schedule = case
    timeline = simulate(graph, schedule)
    pinned = {*graph.outputs, *graph.gradients}
    unread = {v for v in graph.tangents if not any(v in op.first.inputs for op in graph.ops)}
    kept_nbytes = sum(map(graph.allocated_nbytes, pinned | unread))
    if schedule.boundary == len(schedule.steps):
        return  # no backward: the tangents come after the last step
    assert timeline.peak_nbytes == max(timeline.during_nbytes)
    assert timeline.peak_nbytes == timeline.during_nbytes[timeline.peak_step]
    assert kept_nbytes == timeline.live_nbytes[-1]
