"""On the simulated machine copies move their bytes in a link's time, and released memory is overwritten."""

import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from remat_executor import MemoryMeter
from remat_graph import Lane
from remat_offload import HostPool, LaneFailed, MachineMisuse, SimulatedMachine, measure_links


def laid_out(size: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of numbers whose dimensions have this order in memory."""
    tensor = torch.randint(-100, 100, [size[dim] for dim in order]).to(dtype)
    return tensor.permute([order.index(dim) for dim in range(len(size))])


@pytest.mark.parametrize("nbytes_per_s", [None, 1e4, 1e9])
@pytest.mark.parametrize(
    ("size", "order"),
    [((), ()), ((0, 3), (0, 1)), ((7,), (0,)), ((2, 3, 4), (0, 1, 2)), ((2, 3, 1, 5), (0, 2, 3, 1))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.bfloat16])
def test_copies_carry_the_bytes(
    nbytes_per_s: float | None, size: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype
) -> None:
    """To the host and back, in any dense layout, in one piece or in many."""
    with SimulatedMachine(nbytes_per_s, nbytes_per_s) as machine:
        source = laid_out(size, order, dtype)
        host = torch.empty_strided(size, source.stride(), dtype=dtype)
        back = machine.allocate(size, source.stride(), dtype)
        saved = machine.copy(Lane.TO_HOST, host, source)
        machine.wait_on_compute(machine.copy(Lane.TO_DEVICE, back, host, after=[saved]))
        assert source.stride() == back.stride()
        assert torch.equal(source, host)
        assert torch.equal(source, back)


@attrs.define
class Clock:
    """Seconds that pass only while someone sleeps; `asleep` is called at each sleep, before time goes on."""

    now_s: float = 0.0
    asleep: Callable[[], object] = lambda: None
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.asleep()
        with self.lock:
            self.now_s += seconds


def test_a_queue_keeps_the_rate() -> None:
    """Copies on one lane take their bytes' time together; idle time of a link is lost."""
    nbytes, nbytes_per_s, clock = 20_000, 1e6, Clock()
    source, to = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(3, nbytes, dtype=torch.uint8)
    with SimulatedMachine(to_device_nbytes_per_s=nbytes_per_s, clock=clock, sleep=clock.sleep) as machine:
        for _ in range(2):
            began_s = clock()
            tickets = [machine.copy(Lane.TO_DEVICE, row, source) for row in to]
            for number, ticket in enumerate(tickets, start=1):
                ticket.synchronize()
                assert ticket.ended_s - began_s == pytest.approx(number * nbytes / nbytes_per_s)
            clock.sleep(0.05)
    assert (to == 1).all()


def test_a_copy_begins_after_what_it_waits_for() -> None:
    """The link's time does not run while the copy waits for work."""
    clock = Clock()
    with SimulatedMachine(to_host_nbytes_per_s=1e6, clock=clock, sleep=clock.sleep) as machine:
        waits = machine.work(lambda: clock.sleep(0.05))
        ticket = machine.copy(Lane.TO_HOST, torch.empty(5000), torch.empty(5000), after=[waits])
        ticket.synchronize()
        assert ticket.ended_s == pytest.approx(0.05 + 20_000 / 1e6)


def test_bytes_arrive_late() -> None:
    """A destination that is read before the link's time is over does not have its last byte yet."""
    to, clock, early = torch.zeros(30_000, dtype=torch.uint8), Clock(), []
    clock.asleep = lambda: early.append(int(to[-1]))
    with SimulatedMachine(to_device_nbytes_per_s=1e5, clock=clock, sleep=clock.sleep) as machine:
        ticket = machine.copy(Lane.TO_DEVICE, to, torch.ones_like(to))
        machine.wait_on_compute(ticket)
        assert to[-1] == 1
    assert clock() == pytest.approx(0.3)
    assert {0} == set(early)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_discarded_numbers_are_none(dtype: torch.dtype) -> None:
    """A release overwrites the whole storage, also through a view."""
    with SimulatedMachine() as machine:
        tensor = machine.allocate((4, 6), (6, 1), dtype).zero_()
        machine.release(tensor[1, ::2])
        assert tensor.isnan().all()


def test_discarded_bytes() -> None:
    """Integers and booleans are overwritten as well; an empty tensor is allowed."""
    with SimulatedMachine() as machine:
        numbers = machine.allocate((3,), (1,), torch.int64).zero_()
        machine.release(numbers)
        assert [-1, -1, -1] == numbers.tolist()
        flags = machine.allocate((3,), (1,), torch.bool).zero_()
        machine.release(flags)
        assert [255, 255, 255] == flags.view(torch.uint8).tolist()
        machine.release(machine.allocate((0,), (1,), torch.float32))


def test_the_meter_sees_allocations_alone() -> None:
    """A device tensor counts from its allocation to its last reference; copies do not count."""
    host = torch.ones(1000)
    with SimulatedMachine() as machine, MemoryMeter(host, trace=True) as meter:
        tensor = machine.allocate((1000,), (1,), torch.float32)
        machine.wait_on_compute(machine.copy(Lane.TO_DEVICE, tensor, host))
        machine.wait_on_compute(machine.copy(Lane.TO_HOST, host, tensor))
        machine.release(tensor)
        assert 4000 == meter.live_nbytes == meter.peak_nbytes
        del tensor
        assert meter.live_nbytes == 0
    assert [("aten.empty_strided.default", 4000)] == meter.trace


def test_autograd_takes_no_notice() -> None:
    """A saved tensor whose bytes were swapped out and in is unchanged for autograd; so is a parameter."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    saved = weight.exp()
    expected = saved.detach().clone()
    with SimulatedMachine() as machine:
        for tensor in (saved, weight):
            host = torch.empty(2)
            machine.wait_on_compute(machine.copy(Lane.TO_HOST, host, tensor))
            tensor.detach().view(torch.uint8).numpy()[:] = 0  # past the version counters, as an engine would
            machine.wait_on_compute(machine.copy(Lane.TO_DEVICE, tensor, host))
    saved.sum().backward()
    assert torch.equal(expected, weight.grad)


@pytest.mark.parametrize("nbytes_per_s", [0, -1.0, float("nan")])
def test_links_carry_something(nbytes_per_s: float) -> None:
    """A link without bandwidth is refused, and no thread starts."""
    with pytest.raises(MachineMisuse, match="it must be positive, or None"):
        SimulatedMachine(to_device_nbytes_per_s=nbytes_per_s)


@attrs.define
class Done:
    """A copy that ends at a time of the clock."""

    clock: Clock
    end_s: float

    def query(self) -> bool:
        return self.clock() >= self.end_s

    def synchronize(self) -> None:
        pass


class CountedMachine(SimulatedMachine):
    """Its copies take a time of a clock that only the waiting moves, and its optimizer's steps 5 ms of it."""

    def __init__(self, nbytes_per_s: dict[Lane, float], slowdown: float) -> None:
        super().__init__()
        self.now, self.nbytes_per_s, self.slowdown = Clock(), nbytes_per_s, slowdown
        self.free_s = dict.fromkeys(nbytes_per_s, 0.0)

    def copy(self, lane: Lane, destination: Any, source: Any, after: Any = (), name: str = "") -> Any:
        begin_s = max(self.free_s[lane], self.now())
        self.free_s[lane] = begin_s + destination.numel() / self.nbytes_per_s[lane]
        return Done(self.now, self.free_s[lane])

    def work(self, function: Callable[[], object], after: Any = (), name: str = "") -> Any:
        copies = max(self.free_s.values()) > self.now()
        function()
        self.now.now_s += 5e-3 * (self.slowdown if copies else 1.0)
        return Done(self.now, 0.0)


@pytest.mark.parametrize("slowdown", [1.0, 1.25])
def test_the_links_that_are_measured_are_those_that_were_set(slowdown: float) -> None:
    """Each direction alone and with the other, by a clock of the test; too slow by the last poll at most."""
    expected = {Lane.TO_HOST: 2e7, Lane.TO_DEVICE: 4e7}
    with HostPool(1 << 22) as pool, CountedMachine(expected, slowdown) as machine:
        links = measure_links(machine, pool, clock=machine.now, sleep=machine.now.sleep)
        assert pool.statistics.lent_nbytes == 0
    for lane, measured in (
        (Lane.TO_HOST, links.to_host_nbytes_per_s),
        (Lane.TO_DEVICE, links.to_device_nbytes_per_s),
        (Lane.TO_HOST, links.to_host_duplex_nbytes_per_s),
        (Lane.TO_DEVICE, links.to_device_duplex_nbytes_per_s),
    ):
        assert measured is not None
        assert 0.99 * expected[lane] <= measured <= expected[lane]
    if slowdown == 1.0:
        assert links.host_nbytes_per_s is None
    else:  # copies take a fifth of the host's bandwidth, by what they take from the optimizer
        assert links.host_nbytes_per_s == pytest.approx(max(28 * (1 << 18) / 5e-3, 5 * 6e7), rel=0.02)


def test_links_that_are_measured_are_never_too_fast() -> None:
    """By the machine's own clock, on which other processes can only make copies slower."""
    with HostPool(1 << 22) as pool, SimulatedMachine(2e7, 4e7) as machine:
        links = measure_links(machine, pool)
        assert pool.statistics.lent_nbytes == 0
    assert 0 < links.to_host_nbytes_per_s <= 1.02 * 2e7
    assert 0 < links.to_device_nbytes_per_s <= 1.02 * 4e7


def test_a_link_that_fails_while_it_is_measured() -> None:
    """The error of a failed copy names it."""

    class Broken(SimulatedMachine):
        def copy(self, lane: Any, destination: Any, source: Any, after: Any = (), name: Any = "") -> Any:
            return self.work(lambda: 1 / 0, after, "a broken copy")

    with pytest.raises(LaneFailed, match="a broken copy"), HostPool(1 << 20) as pool, Broken() as machine:
        measure_links(machine, pool)
