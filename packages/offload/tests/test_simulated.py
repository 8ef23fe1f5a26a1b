"""On the simulated machine copies move their bytes in a link's time, and released memory is overwritten."""

import time

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


def test_a_queue_keeps_the_rate() -> None:
    """Copies on one lane take their bytes' time together; idle time of a link is lost."""
    nbytes, nbytes_per_s = 20_000, 1e6
    source, to = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(3, nbytes, dtype=torch.uint8)
    with SimulatedMachine(to_device_nbytes_per_s=nbytes_per_s) as machine:
        for _ in range(2):
            began = time.monotonic()
            tickets = [machine.copy(Lane.TO_DEVICE, row, source) for row in to]
            for number, ticket in enumerate(tickets, start=1):
                ticket.synchronize()
                assert time.monotonic() - began >= 0.95 * number * nbytes / nbytes_per_s
            time.sleep(0.05)
    assert (to == 1).all()


def test_a_copy_begins_after_what_it_waits_for() -> None:
    """The link's time does not run while the copy waits for work."""
    with SimulatedMachine(to_host_nbytes_per_s=1e6) as machine:
        began = time.monotonic()
        waits = machine.work(lambda: time.sleep(0.05))
        ticket = machine.copy(Lane.TO_HOST, torch.empty(5000), torch.empty(5000), after=[waits])
        ticket.synchronize()
        assert time.monotonic() - began >= 0.05 + 0.95 * 20_000 / 1e6


def test_bytes_arrive_late() -> None:
    """A destination that is read before the link's time is over does not have its last byte yet."""
    with SimulatedMachine(to_device_nbytes_per_s=1e5) as machine:
        to = torch.zeros(30_000, dtype=torch.uint8)
        began = time.monotonic()
        ticket = machine.copy(Lane.TO_DEVICE, to, torch.ones_like(to))
        early = to[-1].item()
        assert early == 0 or time.monotonic() - began >= 0.95 * 0.3
        machine.wait_on_compute(ticket)
        assert to[-1] == 1


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


def test_the_links_that_are_measured_are_those_that_were_set() -> None:
    """Each direction alone and with the other; a measurement can be too slow, but never too fast."""
    to_host, to_device = 2e7, 4e7
    with HostPool(1 << 22) as pool, SimulatedMachine(to_host, to_device) as machine:
        links = measure_links(machine, pool)
        assert pool.statistics.lent_nbytes == 0
    for expected, measured in (
        (to_host, links.to_host_nbytes_per_s),
        (to_device, links.to_device_nbytes_per_s),
        (to_host, links.to_host_duplex_nbytes_per_s),
        (to_device, links.to_device_duplex_nbytes_per_s),
    ):
        assert measured is not None
        assert 0.7 * expected <= measured <= 1.02 * expected
    # Copies this slow take next to nothing from an optimizer.
    assert links.host_nbytes_per_s is None or links.host_nbytes_per_s > 5 * (to_host + to_device)


def test_a_link_that_fails_while_it_is_measured() -> None:
    """The error of a failed copy names it."""

    class Broken(SimulatedMachine):
        def copy(self, lane, destination, source, after=(), name=""):  # type: ignore[no-untyped-def]
            return self.work(lambda: 1 / 0, after, "a broken copy")

    with pytest.raises(LaneFailed, match="a broken copy"), HostPool(1 << 20) as pool, Broken() as machine:
        measure_links(machine, pool)
