"""Split the backward into segments, each of which delivers its gradients to autograd at its end.

Gradients that wait for the end of their segment need memory, and hooks that step an optimizer or start an
all-reduce are delayed. Each segment costs a few calls of Python and autograd.
"""

from collections.abc import Sequence

from remat_executor.errors import BadInput
from remat_executor.lowering.liveness import handled_steps
from remat_graph import Deliver, Grads, Graph, Schedule, Step, simulate
from remat_graph.errors import shown

_MOST_SEGMENTS = 64
_SEGMENT_S = 25e-6  # cost of a segment in autograd and Python: 20 to 40 us (torch 2.13, 400 segments)
_SHARE = 0.01  # of the step's time


def check_part_nbytes(part_nbytes: int | None) -> None:
    """Check a number of bytes.

    Raises:
        BadInput: it is neither None nor a number of bytes.
    """
    fits = isinstance(part_nbytes, int) and not isinstance(part_nbytes, bool) and part_nbytes >= 0
    if part_nbytes is not None and not fits:
        raise BadInput(
            problem=f"part_nbytes is {shown(part_nbytes)}, not a number of bytes",
            advice="give a whole number from 0 on, such as DDP's bucket size, or None",
        )


def split_backward(graph: Graph, schedule: Schedule, part_nbytes: int | None = None) -> list[list[Step]]:
    """The steps of the backward, split after deliveries.

    Args:
        graph: the training step.
        schedule: valid steps on it.
        part_nbytes: gradient bytes after which a segment ends; None: see `_enough_nbytes`. A segment ends
            earlier if waiting would raise the peak of a step that accumulates into an existing ``.grad``.
    """
    steps = schedule.steps
    nbytes = {g: graph.allocated_nbytes(g) for g in graph.gradients}
    enough = _enough_nbytes(graph, sum(nbytes.values())) if part_nbytes is None else part_nbytes
    alone = simulate(graph, schedule, grads=Grads.ACCUMULATE)
    on_host = {step.value for i in handled_steps(graph, schedule) if isinstance(step := steps[i], Deliver)}
    # Allocated and live bytes can peak at different steps; gradients on the host wait in host memory.
    series = ((alone.during_nbytes, False), (alone.live_nbytes, False), (alone.host_nbytes, True))
    readings = [(_highest_until_delivery(steps, held), max(held), host) for held, host in series]
    segments: list[list[Step]] = [[]]
    if any(graph.values[t].nbytes > 4096 for t in graph.tangents):
        # Autograd holds the arguments of a running function, so an empty segment takes over large tangents.
        segments.append([])
    pending, left = {False: 0, True: 0}, len(nbytes)
    for position in range(schedule.boundary, len(steps) if schedule.end is None else schedule.end):
        step = steps[position]
        segments[-1].append(step)
        if isinstance(step, Deliver):
            pending[step.value in on_host] += nbytes[step.value]
            left -= 1
            raised = any(highest[position] + pending[host] > peak for highest, peak, host in readings)
            if left and (sum(pending.values()) >= enough or raised):
                segments.append([])
                pending = {False: 0, True: 0}
    return segments


def _enough_nbytes(graph: Graph, total_nbytes: int) -> int:
    """Gradient bytes of a segment, for at most 64 segments that together cost a hundredth of the step."""
    most = min(_MOST_SEGMENTS, int(_SHARE * graph.time_s / _SEGMENT_S))
    return max(total_nbytes // max(most, 1), 1 << 16)


def _highest_until_delivery(steps: Sequence[Step], during_nbytes: Sequence[int]) -> list[int]:
    """For each step the highest bytes after it, up to the next delivery."""
    highest, found = [0] * len(steps), 0
    for position in range(len(steps) - 1, -1, -1):
        highest[position] = found
        found = max(found, during_nbytes[position])
        if isinstance(steps[position], Deliver):
            found = during_nbytes[position]
    return highest
