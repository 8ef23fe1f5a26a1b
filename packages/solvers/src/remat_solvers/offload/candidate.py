"""Evaluate one choice of placement and order: write the whole schedule and simulate it."""

from collections.abc import Sequence

import attrs

from remat_graph import Grads, Graph, Links, Schedule, Timeline, simulate
from remat_graph.training import with_placement
from remat_solvers.offload.schedule_writer import simulate_accumulating, write_schedule
from remat_solvers.offload.training_problem import TrainingProblem, UpdateMode
from remat_solvers.protocol import Problem
from remat_solvers.transfers.idle_intervals import IdleInterval, OrderTimeline
from remat_solvers.transfers.placement import TransferPolicy, fastest_transfers

PERIODS = 3  # consecutive training steps, of which the last is timed
SMALL_FRACTION = 20_000  # values smaller than the device budget divided by this stay where they are


@attrs.frozen(kw_only=True, eq=False)
class Candidate:
    """A schedule with its cost."""

    graph: Graph  # the training step with the placement of all values
    on_host: frozenset[int]  # values placed on the host
    schedule: Schedule  # the steps
    timeline: Timeline  # the referee's simulation of several consecutive training steps
    nbytes: int  # device bytes in the state of ``.grad`` that needs most
    host_nbytes: int  # host bytes likewise
    activation_nbytes: int  # the activation memory for which the order was requested
    order: tuple[int, ...]  # the ops, repeats included
    moves: frozenset[IdleInterval]  # idle intervals in which a value may be on the host
    pinned_intervals: frozenset[IdleInterval]  # idle intervals in which the value must stay on the device
    policy: TransferPolicy | None  # how its copies were scheduled; None if each is waited for on the spot
    over_nbytes: int  # device bytes above the budget; negative if some are free
    over_host_nbytes: int  # host bytes likewise

    @property
    def fits(self) -> bool:
        """Whether both budgets are kept."""
        return self.over_nbytes <= 0 and self.over_host_nbytes <= 0


def evaluate_candidate(
    problem: Problem,
    mode: UpdateMode,
    on_host: frozenset[int],
    order: tuple[int, ...],
    activation_nbytes: int,
    policies: Sequence[TransferPolicy],
    pinned_intervals: frozenset[IdleInterval],
) -> Candidate:
    """Schedule the transfers of one placement and order with the best policy, and simulate the result.

    In pinned intervals the value stays on the device; `activation_nbytes` is noted with the result.
    """
    graph = with_placement(problem.graph, on_host)
    links = problem.links or Links()
    training = TrainingProblem.prepare(graph, mode)
    order_timeline = OrderTimeline(training.graph, training.with_updates(order))
    values = training.graph.values
    moves = []
    if problem.links is not None:
        small = problem.budget_nbytes // SMALL_FRACTION
        moves = [
            interval
            for interval, _ in order_timeline.idle_intervals
            if values[interval.value].nbytes > small and interval not in pinned_intervals
        ]
    placed = fastest_transfers(
        order_timeline, moves, problem.budget_nbytes, links, training.copied_when_freed, policies
    )
    schedule = write_schedule(training, placed, problem.budget_nbytes, links)
    if mode.micro_batches == 1:
        timeline = simulate(graph, schedule, links=links, periods=PERIODS)
        readings = [timeline]
        if mode.adds_gradients:
            readings.append(simulate_accumulating(training, schedule, links))
    else:
        timeline = simulate(
            training.full_graph,
            schedule,
            grads=Grads.ACCUMULATE,
            links=links,
            periods=PERIODS,
            passes=mode.micro_batches,
        )
        readings = [timeline]
    nbytes = max(reading.peak_nbytes for reading in readings)
    host_nbytes = max(reading.host_peak_nbytes for reading in readings)
    host_limit = problem.host_budget_nbytes
    return Candidate(
        graph=graph,
        on_host=on_host,
        schedule=schedule,
        timeline=timeline,
        nbytes=nbytes,
        host_nbytes=host_nbytes,
        activation_nbytes=activation_nbytes,
        order=order,
        moves=frozenset(moves),
        pinned_intervals=pinned_intervals,
        policy=placed.policy,
        over_nbytes=nbytes - problem.budget_nbytes,
        over_host_nbytes=0 if host_limit is None else host_nbytes - host_limit,
    )
