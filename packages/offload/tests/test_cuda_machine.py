"""The CUDA machine orders streams by events: with a fake that records calls, and on a device."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import attrs
import pytest
import torch

from remat_graph import Lane
from remat_offload import CudaMachine, HostPool, LaneFailed, measure_links
from remat_offload.copy_lanes import threaded
from remat_offload.copy_lanes.optimizer_threads import kernel_threads, optimizer_threads


@attrs.define(eq=False)
class FakeEvent:
    name: str
    happened: bool = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


@attrs.define(eq=False)
class FakeStream:
    name: str
    log: list[str]
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    numbers: Iterator[int] = attrs.field(factory=itertools.count)

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> FakeEvent:
        event = FakeEvent(f"{self.name}/{next(self.numbers)}")
        self.log.append(f"{self.name} records {event.name}")
        return event

    def synchronize(self) -> None:
        self.log.append(f"{self.name} is waited for")


class FakeCuda:
    """A fake `torch.cuda` with the CPU as its device; copies are done when issued."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names = iter(["to_host", "to_device"])
        self.compute = FakeStream("compute", self.log)
        self.entered = threading.local()

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream(next(self.names), self.log)

    def current_stream(self, device: torch.device) -> FakeStream:
        return getattr(self.entered, "stream", self.compute)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.entered.stream = stream
        yield
        del self.entered.stream


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def machine(cuda: FakeCuda) -> Iterator[CudaMachine]:
    with CudaMachine("cpu", cuda=cuda) as machine:
        yield machine


@pytest.fixture
def sixteen_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(16)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("sixteen_threads")
@pytest.mark.parametrize(("threads", "used"), [(16, 12), (8, 6), (4, 2), (2, 1), (1, 1)])
def test_updates_leave_cores(threads: int, used: int) -> None:
    """To the threads that issue work to a device; where the CPU is the device there are none."""
    torch.set_num_threads(threads)
    assert optimizer_threads(torch.device("cuda")) == used
    assert optimizer_threads(torch.device("cpu")) == threads


@pytest.mark.usefixtures("sixteen_threads")
def test_lanes_keep_their_threads(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that run kernels later, and the one that made the machine, use as many as before."""
    monkeypatch.setattr(threaded, "optimizer_threads", lambda device: 5)
    seen: list[int] = []
    with CudaMachine("cpu", cuda=cuda) as machine:
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join(60)
        machine.work(lambda: seen.append(torch.get_num_threads())).synchronize()
    assert seen == [16, 5]
    assert torch.get_num_threads() == 16


@pytest.mark.usefixtures("sixteen_threads")
def test_kernels_with_fewer_threads() -> None:
    with kernel_threads(3):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 16
    with kernel_threads(16):
        assert torch.get_num_threads() == 16


def test_a_copy_waits_for_compute_and_copies(machine: CudaMachine, cuda: FakeCuda) -> None:
    """Its stream waits for earlier compute and for copies it names; the host waits for neither."""
    x, host, y = torch.ones(3), torch.zeros(3), torch.zeros(3)
    saved = machine.copy(Lane.TO_HOST, host, x)
    saved.issued()
    back = machine.copy(Lane.TO_DEVICE, y, host, after=[saved])
    back.issued()
    expected = [
        "compute records compute/0",
        "to_host waits for compute/0",
        "to_host records to_host/0",
        "compute records compute/1",
        "to_device waits for compute/1",
        "to_device waits for to_host/0",
        "to_device records to_device/0",
    ]
    assert expected == cuda.log
    assert torch.equal(x, y)
    assert not saved.event.happened


def test_a_ticket_is_issued_before_it_is_done(machine: CudaMachine) -> None:
    """A copy whose event has not happened is issued, and not done."""
    ticket = machine.copy(Lane.TO_HOST, torch.empty(1), torch.empty(1))
    event = ticket.issued()
    assert not ticket.query()
    ticket.synchronize()
    assert event.happened
    assert ticket.query()


def test_a_copy_is_issued_at_once_where_that_is_in_order(machine: CudaMachine, cuda: FakeCuda) -> None:
    """Not before what it waits for on the host, nor before an earlier copy of its lane."""
    machine.copy(Lane.TO_HOST, torch.empty(1), torch.empty(1))
    assert "to_host records to_host/0" == cuda.log[-1]
    gate = threading.Event()
    work = machine.work(lambda: gate.wait(60))
    first = machine.copy(Lane.TO_HOST, torch.empty(1), torch.empty(1), after=[work])
    second = machine.copy(Lane.TO_HOST, torch.empty(1), torch.empty(1))
    machine.copy(Lane.TO_DEVICE, torch.empty(1), torch.empty(1))
    assert not first.has_run()
    assert not second.has_run()
    assert "to_device records to_device/0" == cuda.log[-1]
    gate.set()
    second.issued()
    assert ["to_host records to_host/1", "to_host waits for compute/2"] == cuda.log[-3:-1]


def test_compute_waits_for_a_copy(machine: CudaMachine, cuda: FakeCuda) -> None:
    """The compute stream waits for the copy's event, the host only until the event exists."""
    gate = threading.Event()
    work = machine.work(lambda: gate.wait(60))
    ticket = machine.copy(Lane.TO_DEVICE, torch.empty(1), torch.empty(1), after=[work])
    assert ["compute records compute/0"] == cuda.log  # the copy waits for the work on the host
    threading.Timer(0.02, gate.set).start()
    machine.wait_on_compute(ticket)
    assert "compute waits for to_device/0" == cuda.log[-1]
    assert not ticket.query()


def test_holding_work(machine: CudaMachine, cuda: FakeCuda) -> None:
    """The host waits for work on the CPU, and work waits on the host for the copies it names."""
    ticket = machine.copy(Lane.TO_HOST, torch.empty(1), torch.empty(1))
    done: list[bool] = []
    machine.wait_on_compute(machine.work(lambda: done.append(ticket.query()), after=[ticket]))
    assert [True] == done
    assert "to_host records to_host/0" == cuda.log[-1]


def test_a_copy_that_cannot_be_issued(machine: CudaMachine, cuda: FakeCuda) -> None:
    """An error while a copy is issued fails the ticket and waits for it; later copies are issued."""
    to, of = torch.empty(4), torch.empty(4)
    gate = threading.Event()
    work = machine.work(lambda: gate.wait(60))
    ticket = machine.copy(Lane.TO_HOST, to, of, after=[work], name="x")
    of.resize_(0)
    gate.set()
    with pytest.raises(LaneFailed, match="'x' failed on the lane to_host"):
        machine.wait_on_compute(ticket)
    machine.copy(Lane.TO_HOST, torch.empty(1), torch.empty(1)).issued()
    assert "to_host records to_host/0" == cuda.log[-1]


def test_draining_waits_for_the_streams(machine: CudaMachine, cuda: FakeCuda) -> None:
    """For the streams of the lanes, after their threads, and never for the whole device."""
    machine.copy(Lane.TO_HOST, torch.empty(1), torch.empty(1))
    machine.drain()
    assert ["to_host is waited for", "to_device is waited for"] == cuda.log[-2:]


@pytest.mark.cuda
def test_measured_links_leave_nothing_in_flight() -> None:
    """Blocks of the pool may be dropped at once, and copies have ended."""
    with HostPool(1 << 26, device="cuda") as pool, CudaMachine() as machine:
        links = measure_links(machine, pool)
        assert links.start_s > 0.0
        pool.release(pool.allocate((1 << 26) - (1 << 16)))
        machine.drain()


def test_what_is_left_is_the_allocators(machine: CudaMachine) -> None:
    """It asks the streams of both directions before the memory is reused."""
    asked = []

    class Left:
        def record_stream(self, stream: FakeStream) -> None:
            asked.append(stream.name)

    machine.release_after_copies(Left())
    assert ["to_host", "to_device"] == asked


@pytest.mark.cuda
def test_on_cuda() -> None:
    """To the host and back through pinned memory, with work in between, while the device memory is reused."""
    with HostPool(2**26, device="cuda") as pool, CudaMachine() as machine:
        for step in range(20):
            x = machine.allocate((1024, 1024), (1024, 1), torch.float32).fill_(step)
            host = pool.allocate((1024, 1024), torch.float32)
            saved = machine.copy(Lane.TO_HOST, host, x)
            machine.wait_on_compute(saved)
            machine.release(x)
            del x
            noise = torch.full((1024, 1024), -1.0, device="cuda")  # in the memory that x had
            doubled = machine.work(lambda host=host: host.mul_(2), after=[saved])
            y = machine.allocate((1024, 1024), (1024, 1), torch.float32)
            back = machine.copy(Lane.TO_DEVICE, y, host, after=[doubled])
            pool.release(host, after=back)
            machine.wait_on_compute(back)
            assert (y == 2 * step).all()
            assert (noise == -1).all()


@pytest.mark.cuda
def test_failures_on_cuda() -> None:
    """Work that fails on the CPU fails the copy that waits for it, and the next one runs."""
    with HostPool(2**20, device="cuda") as pool, CudaMachine() as machine:
        host, x = pool.allocate(1000), machine.allocate((1000,), (1,), torch.uint8)
        failed = machine.work(lambda: 1 / 0, name="adam")
        with pytest.raises(LaneFailed, match="'adam'"):
            machine.wait_on_compute(machine.copy(Lane.TO_DEVICE, x, host, after=[failed]))
        host.fill_(7)
        machine.wait_on_compute(machine.copy(Lane.TO_DEVICE, x, host))
        assert (x == 7).all()
