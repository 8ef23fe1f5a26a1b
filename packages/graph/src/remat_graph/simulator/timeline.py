"""Hold the result of a simulation: bytes step by step, and times of the lanes."""

from enum import StrEnum

import attrs

from remat_graph.schedule import Lane


class Grads(StrEnum):
    """The state of ``.grad`` when the step begins; decides whether delivered gradients stay counted."""

    NEW = "new"  # None: each delivered gradient stays
    ACCUMULATE = "accumulate"  # a tensor: each delivered gradient is added to it and freed
    PRESENT = "present"  # a tensor for every parameter; the gradients of inputs stay


@attrs.frozen(kw_only=True)
class Timeline:
    """Bytes and times of a valid schedule.

    Attributes:
        peak_nbytes: highest device bytes, with workspaces and the allocator's rounding.
        peak_step: index of the step with the peak.
        live_peak_nbytes: highest device bytes of storages alone.
        live_nbytes: per step, rounded storage bytes held after it.
        during_nbytes: per step, the highest device bytes while it runs; the largest is `peak_nbytes`.
        host_peak_nbytes: highest bytes of host copies.
        host_nbytes: per step, bytes of host copies held after it; within a step they grow before they shrink.
        time_s: seconds until the last lane is done; with several periods, seconds of the last period.
        lane_s: busy seconds per lane, in one period.
        waited_s: seconds that the compute lane waited for each other lane, in one period.
        recomputed_s: seconds on the compute lane spent on repeated runs, in one period.
        issue_s: seconds in which the host issues all runs of ops, in one period. No other time contains it:
            the host issues while the lanes work.
        starting_s: seconds that the compute lane waited for the host to start copies, in one period.
    """

    peak_nbytes: int
    peak_step: int
    live_peak_nbytes: int
    live_nbytes: tuple[int, ...]
    during_nbytes: tuple[int, ...]
    host_peak_nbytes: int
    host_nbytes: tuple[int, ...]
    time_s: float
    lane_s: dict[Lane, float]
    waited_s: dict[Lane, float]
    recomputed_s: float
    issue_s: float
    starting_s: float = 0.0
