"""One choice of homes and one order of ops as a whole schedule, with the referee's word on it."""

from collections.abc import Collection, Sequence

import attrs

from remat_graph import Grads, Graph, Links, Schedule, Timeline, simulate
from remat_graph.training import with_placement
from remat_solvers.offload.schedule_writer import hand_over, judged
from remat_solvers.offload.training_problem import Style, ready
from remat_solvers.protocol import Problem
from remat_solvers.transfers.idle_intervals import Gap, Line
from remat_solvers.transfers.placement import WAYS, Way, place_on

PERIODS = 3  # steps of training after each other, of which the last is timed
SMALL = 20_000  # what is smaller than the device's budget by this factor stays where it is


@attrs.frozen(kw_only=True, eq=False)
class Attempt:
    """A schedule and what it takes.

    Attributes:
        graph: the training step, everything at its home.
        on_host: values placed on the host.
        schedule: the steps.
        timeline: the referee's, over several steps of training.
        nbytes: device bytes in the state of ``.grad`` that needs most.
        host_nbytes: host bytes likewise.
        activation_nbytes: what its order was asked to need at most.
        order: the ops, repeats included.
        moves: gaps in which a value may be away.
        stay: gaps in which none is to be.
        way: in which its copies were placed; None if each is waited for on the spot.
        over_nbytes: how far it is above the device's budget; below 0 there is room.
        over_host_nbytes: how far it is above the host's.
    """

    graph: Graph
    on_host: frozenset[int]
    schedule: Schedule
    timeline: Timeline
    nbytes: int
    host_nbytes: int
    activation_nbytes: int
    order: tuple[int, ...]
    moves: frozenset[Gap]
    stay: frozenset[Gap]
    way: Way | None
    over_nbytes: int
    over_host_nbytes: int

    @property
    def fits(self) -> bool:
        """Whether both budgets are kept."""
        return self.over_nbytes <= 0 and self.over_host_nbytes <= 0


def attempt(
    problem: Problem,
    style: Style,
    on_host: frozenset[int],
    order: tuple[int, ...],
    activation_nbytes: int,
    ways: Sequence[Way] = WAYS,
    stay: Collection[Gap] = (),
) -> Attempt:
    """Place the copies of one choice.

    Args:
        problem: the training step and its budgets.
        style: how it is trained.
        on_host: values placed on the host.
        order: op indices, repeats included.
        activation_nbytes: noted with the result.
        ways: in which copies are placed, of which the fastest is taken.
        stay: gaps in which nothing is to be away, though it may be.
    """
    graph = with_placement(problem.graph, on_host)
    links = problem.links or Links()
    stepping = ready(graph, style)
    line = Line(stepping.graph, stepping.with_updates(order))
    values = stepping.graph.values
    moves = []
    if problem.links is not None:
        small = problem.budget_nbytes // SMALL
        moves = [gap for gap, _ in line.gaps if values[gap.value].nbytes > small and gap not in stay]
    placed = place_on(line, moves, problem.budget_nbytes, links, stepping.departing, ways)
    schedule = hand_over(stepping, placed, problem.budget_nbytes, links)
    if style.micro_batches == 1:
        timeline = simulate(graph, schedule, links=links, periods=PERIODS)
        readings = [timeline]
        if style.adds:
            readings.append(judged(stepping, schedule, links))
    else:
        timeline = simulate(
            stepping.whole,
            schedule,
            grads=Grads.ACCUMULATE,
            links=links,
            periods=PERIODS,
            passes=style.micro_batches,
        )
        readings = [timeline]
    nbytes = max(reading.peak_nbytes for reading in readings)
    host_nbytes = max(reading.host_peak_nbytes for reading in readings)
    host_limit = problem.host_budget_nbytes
    return Attempt(
        graph=graph,
        on_host=on_host,
        schedule=schedule,
        timeline=timeline,
        nbytes=nbytes,
        host_nbytes=host_nbytes,
        activation_nbytes=activation_nbytes,
        order=order,
        moves=frozenset(moves),
        stay=frozenset(stay),
        way=placed.way,
        over_nbytes=nbytes - problem.budget_nbytes,
        over_host_nbytes=0 if host_limit is None else host_nbytes - host_limit,
    )
