"""Lanes run in order, concurrently; a failure is reported once, and fails the work that comes after it."""

import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import attrs
import pytest
import torch

from remat_graph import Lane
from remat_offload import LaneFailed, MachineMisuse, SimulatedMachine, Ticket


@pytest.fixture
def machine() -> Iterator[SimulatedMachine]:
    machine = SimulatedMachine()
    yield machine
    machine.close()


@attrs.define
class Gate:
    """Work that waits until the test releases it."""

    begun: threading.Event = attrs.field(factory=threading.Event)
    opened: threading.Event = attrs.field(factory=threading.Event)

    def __call__(self) -> None:
        self.begun.set()
        assert self.opened.wait(60)

    def open(self) -> None:
        self.opened.set()


def fail() -> None:
    raise ValueError("no\nluck")


def lane_threads() -> set[threading.Thread]:
    gc.collect()  # objects of other tests end now, and not in between
    return {thread for thread in threading.enumerate() if thread.name.startswith("remat ")}


def leave_badly(machine: SimulatedMachine) -> None:
    machine.work(fail)
    raise KeyError("mine")


def copy(machine: SimulatedMachine, lane: Lane, *after: Ticket) -> tuple[torch.Tensor, Ticket]:
    """A copy of ones, and its destination."""
    to = torch.zeros(4)
    return to, machine.copy(lane, to, torch.ones(4), after, name=f"ones {lane}")


def test_a_lane_keeps_its_order(machine: SimulatedMachine) -> None:
    """Work submitted first runs first, however long it waits."""
    ran: list[int] = []

    def note(number: int) -> Callable[[], None]:
        return lambda: ran.append(number)

    gate = Gate()
    tickets = [machine.work(gate), *(machine.work(note(number)) for number in range(20))]
    assert not any(ticket.query() for ticket in tickets)
    gate.open()
    machine.drain()
    assert list(range(20)) == ran
    assert all(ticket.query() for ticket in tickets)


def test_lanes_run_beside_each_other(machine: SimulatedMachine) -> None:
    """Copies in both directions are done while the optimizer's lane is busy."""
    gate = Gate()
    busy = machine.work(gate)
    for lane in (Lane.TO_HOST, Lane.TO_DEVICE):
        to, ticket = copy(machine, lane)
        ticket.synchronize()
        assert (to == 1).all()
    assert not busy.query()
    gate.open()
    busy.synchronize()


@pytest.mark.parametrize("lane", [Lane.TO_HOST, Lane.TO_DEVICE])
def test_a_copy_waits_for_work(machine: SimulatedMachine, lane: Lane) -> None:
    """A copy begins after the work it names, and work after the copy it names."""
    gate = Gate()
    to, copied = copy(machine, lane, machine.work(gate))
    seen: list[float] = []
    after = machine.work(lambda: seen.append(to.sum().item()), after=[copied])
    assert not copied.query()
    assert (to == 0).all()
    gate.open()
    after.synchronize()
    assert [4.0] == seen


def test_holding_waits(machine: SimulatedMachine) -> None:
    """After `wait_on_compute`, for a copy or for work, the calling thread sees the result."""
    gate = Gate()
    to, ticket = copy(machine, Lane.TO_DEVICE, machine.work(gate))
    threading.Timer(0.02, gate.open).start()
    machine.wait_on_compute(ticket)
    assert (to == 1).all()
    done: list[int] = []
    machine.wait_on_compute(machine.work(lambda: done.append(1)))
    assert [1] == done


def test_a_failure_is_one_clear_line(machine: SimulatedMachine) -> None:
    """It names lane and work, carries the error, and survives pickling."""
    ticket = machine.work(fail, name="adam of layer 3")
    with pytest.raises(LaneFailed) as caught:
        ticket.synchronize()
    message = (
        "'adam of layer 3' failed on the lane cpu_optimizer: ValueError: no luck; work that depends on it "
        "was not run: fix the error chained to this one, and run the step again"
    )
    assert message == str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert message == str(pickle.loads(pickle.dumps(caught.value)))
    assert ticket.query()


def test_what_comes_after_a_failure_is_not_run(machine: SimulatedMachine) -> None:
    """It fails by the same error, at any distance, while independent work goes on."""
    failed = machine.work(fail, name="adam")
    to, copied = copy(machine, Lane.TO_DEVICE, failed)
    ran: list[str] = []
    late = machine.work(lambda: ran.append("late"), after=[copied])
    machine.work(lambda: ran.append("free")).synchronize()
    for ticket in (copied, late):
        with pytest.raises(LaneFailed, match="'adam' failed") as caught:
            ticket.synchronize()
        assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(LaneFailed, match="'adam' failed"):
        machine.wait_on_compute(copied)
    assert ["free"] == ran
    assert (to == 0).all()


def test_draining_tells_what_was_not_told(machine: SimulatedMachine) -> None:
    """Each failure is reported once, the first one first; dependent work is no failure of its own."""
    reported, first, second = (machine.work(fail, name=name) for name in ("reported", "first", "second"))
    copy(machine, Lane.TO_HOST, first)
    with pytest.raises(LaneFailed, match="'reported'"):
        reported.synchronize()
    with pytest.raises(LaneFailed, match="'first'"):
        machine.drain()
    with pytest.raises(LaneFailed, match="'second'"):
        machine.drain()
    machine.drain()
    assert second.query()


def test_leaving_drains() -> None:
    """A `with` statement raises a failure in it, unless it ends with another error."""
    with pytest.raises(LaneFailed, match="'adam'"), SimulatedMachine() as machine:
        machine.work(fail, name="adam")
    with pytest.raises(KeyError, match="mine"), SimulatedMachine() as machine:
        leave_badly(machine)


def test_closing_finishes() -> None:
    """Submitted work is done, the threads end, a second close does nothing, and more work is refused."""
    before = lane_threads()
    machine = SimulatedMachine()
    to, ticket = copy(machine, Lane.TO_HOST, machine.work(lambda: None))
    machine.close()
    machine.close()
    assert before == lane_threads()
    assert ticket.query()
    assert (to == 1).all()
    machine.drain()
    with pytest.raises(MachineMisuse, match="'late' was given after it was closed"):
        machine.work(lambda: None, name="late")


def test_a_dropped_machine_leaves_no_thread() -> None:
    """Threads do not keep their machine alive; they end with it."""
    before = lane_threads()
    machine = SimulatedMachine()
    machine.work(lambda: None).synchronize()
    gone = weakref.ref(machine)
    del machine
    gc.collect()
    assert gone() is None
    assert before == lane_threads()


def test_a_dropped_machine_fails_what_is_left() -> None:
    """A ticket of a dropped machine does not block for ever: work that had not begun fails."""
    machine = SimulatedMachine()
    gate = Gate()
    begun, left = machine.work(gate), machine.work(lambda: None)
    gate.begun.wait()
    del machine
    gc.collect()
    gate.open()
    begun.synchronize()
    with pytest.raises(LaneFailed, match="unclosed"):
        left.synchronize()


def test_nothing_is_kept(machine: SimulatedMachine) -> None:
    """When a ticket is done, the machine has no reference to its tensors and earlier tickets."""
    to, source = torch.empty(4), torch.ones(4)
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in (to, source)]
    first = machine.copy(Lane.TO_HOST, to, source)
    reference = weakref.ref(first)
    second = machine.work(lambda: None, after=[first])
    first.synchronize()
    del to, source, first
    second.synchronize()
    copy(machine, Lane.TO_HOST)[1].synchronize()
    assert [None, None] == [storage() for storage in storages]
    assert reference() is None


def test_only_its_own_tickets(machine: SimulatedMachine) -> None:
    """An object that is not a ticket is refused before anything is put on a lane."""
    other = torch.Event()
    with pytest.raises(MachineMisuse, match="Event was given as a ticket"):
        machine.work(fail, after=[other])  # type: ignore[list-item]
    machine.drain()


@pytest.mark.parametrize(
    ("lane", "to", "of", "wanted"),
    [
        (Lane.COMPUTE, torch.empty(2), torch.empty(2), "on the lane compute; use to_host or to_device"),
        (Lane.TO_HOST, torch.empty(2), torch.empty(2, device="meta"), "it must go from cpu to cpu"),
        (Lane.TO_HOST, torch.empty(2), torch.empty(3), "same dtype, sizes and strides"),
        (Lane.TO_HOST, torch.empty(2), torch.empty(2, dtype=torch.int32), "same dtype, sizes and strides"),
        (Lane.TO_HOST, torch.empty(2, 3), torch.empty(3, 2).t(), "same dtype, sizes and strides"),
        (Lane.TO_HOST, torch.empty(4)[::2], torch.empty(4)[::2], "no gaps"),
        (Lane.TO_HOST, torch.empty(1).expand(3), torch.empty(1).expand(3), "no gaps"),
    ],
)
def test_copies_move_bytes_as_they_lie(
    machine: SimulatedMachine, lane: Lane, to: torch.Tensor, of: torch.Tensor, wanted: str
) -> None:
    """A copy that would convert, or not change sides, is refused."""
    with pytest.raises(MachineMisuse, match=wanted):
        machine.copy(lane, to, of)


@pytest.mark.parametrize(
    "job",
    [
        "machine.work(threading.Event().wait)",
        "machine.copy(Lane.TO_HOST, torch.empty(10**6), torch.empty(10**6))",
        "machine.work(lambda: None).synchronize()",
    ],
)
def test_the_interpreter_ends(job: str) -> None:
    """An unclosed machine, idle, copying or blocked, does not block or crash the end of the interpreter."""
    lines = [
        "import threading, torch",
        "from remat_graph import Lane",
        "from remat_offload import SimulatedMachine",
        "machine = SimulatedMachine(to_host_nbytes_per_s=1e6)",
        job,
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, timeout=300)
    assert (0, b"") == (done.returncode, done.stderr)
