"""Where the backward is cut into parts, each of which hands over its gradients to autograd when it ends.

Gradients that wait for their part's end take memory, and whoever listens for them, an optimizer in a hook or
an all-reduce, waits with them; each part costs a few calls of Python and autograd.
"""

from collections.abc import Sequence

from remat_executor.errors import BadInput
from remat_executor.lowering.step_handler import handled_steps
from remat_graph import Deliver, Grads, Graph, Schedule, Step, simulate
from remat_graph.errors import shown

_MOST_PARTS = 64
_PART_S = 25e-6  # what autograd and Python take for one: 20 to 40 us (torch 2.13, a perceptron of 400 parts)
_PARTS_SHARE = 0.01


def check_part_nbytes(part_nbytes: int | None) -> None:
    """Refuse what is no number of bytes.

    Raises:
        BadInput: it is none.
    """
    fits = isinstance(part_nbytes, int) and not isinstance(part_nbytes, bool) and part_nbytes >= 0
    if part_nbytes is not None and not fits:
        raise BadInput(
            problem=f"part_nbytes is {shown(part_nbytes)}, not a number of bytes",
            advice="give a whole number from 0 on, such as DDP's bucket size, or None",
        )


def split_backward(graph: Graph, schedule: Schedule, part_nbytes: int | None = None) -> list[list[Step]]:
    """The steps of the backward, cut after deliveries.

    Args:
        graph: the training step.
        schedule: valid steps on it.
        part_nbytes: gradient bytes after which a part ends at the latest; None: see `_enough_nbytes`. A part
            ends earlier where waiting would raise the peak of a step whose ``.grad`` is there already.
    """
    steps = schedule.steps
    nbytes = {g: graph.allocated_nbytes(g) for g in graph.gradients}
    enough = _enough_nbytes(graph, sum(nbytes.values())) if part_nbytes is None else part_nbytes
    alone = simulate(graph, schedule, grads=Grads.ACCUMULATE)
    on_host = {step.value for i in handled_steps(graph, schedule) if isinstance(step := steps[i], Deliver)}
    # By the allocator and by live bytes, which can peak at different steps; and what waits on the host there.
    series = ((alone.during_nbytes, False), (alone.live_nbytes, False), (alone.host_nbytes, True))
    readings = [(_highest_until_delivery(steps, held), max(held), host) for held, host in series]
    segments: list[list[Step]] = [[]]
    if any(graph.values[t].nbytes > 4096 for t in graph.tangents):
        # While autograd calls a function it holds what it passes to it: an empty part takes large tangents
        # over.
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
    """Gradient bytes that are worth a part: of 64 parts at most, which take a hundredth of the step."""
    most = min(_MOST_PARTS, int(_PARTS_SHARE * graph.time_s / _PART_S))
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
