"""The pool allocates exact sizes, never holds more than its cap, and reuses blocks."""

import contextlib
import gc
import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat_offload import CannotPin, HostPool, HostPoolExhausted, HostPoolMisuse, LaneFailed
from remat_offload.host_memory.pinned import PlainMemory, RegisteredMemory, clear_cuda_error


@attrs.define
class CountingMemory(PlainMemory):
    """Plain memory with counters."""

    taken: int = 0
    given_back: int = 0

    def take(self, nbytes: int) -> torch.Tensor:
        self.taken += 1
        return super().take(nbytes)

    def give_back(self, block: torch.Tensor) -> None:
        self.given_back += 1


@attrs.define
class FakeRuntime:
    """A fake CUDA runtime: records registrations, refuses more than a limit."""

    limit: int = 2**30
    registered: dict[int, int] = attrs.field(factory=dict)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        assert address % mmap.PAGESIZE == 0
        assert nbytes % mmap.PAGESIZE == 0
        if sum(self.registered.values()) + nbytes > self.limit:
            return 2
        assert address not in self.registered
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self.registered.pop(address, None) else 713


@attrs.define
class Copy:
    """A fake event after a copy."""

    done: bool = False
    waited: bool = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited = self.done = True


def test_pages_are_pinned_on_the_device_of_the_copies() -> None:
    """On another device, the runtime would make a context, which takes memory there."""
    current: list[str] = []

    class Watched(FakeRuntime):
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
            current.append(torch_device[-1])
            return super().cudaHostRegister(address, nbytes, flags)

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            current.append(torch_device[-1])
            return super().cudaHostUnregister(address)

    torch_device = ["cuda:0"]

    @contextlib.contextmanager
    def second() -> Iterator[None]:
        torch_device.append("cuda:1")
        yield
        torch_device.pop()

    memory = RegisteredMemory(Watched(), current=second)
    memory.give_back(memory.take(100))
    assert current == ["cuda:1", "cuda:1"]
    assert torch_device == ["cuda:0"]


def test_tensors_are_as_asked() -> None:
    """Shape, dtype and contiguity are as requested, and allocated tensors do not overlap."""
    with HostPool(4096) as pool:
        tensors = [
            pool.allocate((3, 5), torch.float32),
            pool.allocate(7),
            pool.allocate([2, 2], torch.complex64),
        ]
        assert [tuple(t.shape) for t in tensors] == [(3, 5), (7,), (2, 2)]
        assert [torch.float32, torch.uint8, torch.complex64] == [t.dtype for t in tensors]
        assert all(t.is_contiguous() and t.device.type == "cpu" for t in tensors)
        for value, tensor in enumerate(tensors):
            tensor.fill_(value)
        assert all((tensor == value).all() for value, tensor in enumerate(tensors))
        assert 60 + 7 + 32 == pool.statistics.lent_nbytes == pool.statistics.held_nbytes


def test_the_cap_is_hard() -> None:
    """A request up to the cap fits; one byte more is refused in one line, before anything is allocated."""
    memory = CountingMemory()
    pool = HostPool(1000, memory=memory)
    held = pool.allocate(600)
    with pytest.raises(HostPoolExhausted) as caught:
        pool.allocate(401)
    message = (
        "host pool exhausted: 401 bytes requested, 400 free of 1,000; release blocks or raise the capacity"
    )
    assert message == str(caught.value)
    assert memory.taken == 1
    pool.allocate(400)
    assert pool.statistics.free_nbytes == 0
    pool.release(held)
    assert pool.statistics.free_nbytes == 600


def test_a_lease_comes_back_with_its_copy() -> None:
    """Its block is not reused before the last copy into it has ended."""
    pool = HostPool(100)
    copies = [Copy(done=True)]
    lease = pool.lease(100, copies)
    copies.append(Copy())
    del lease
    assert 0 == pool.statistics.lent_nbytes
    pool.lease(100)
    assert [False, True] == [copy.waited for copy in copies]


def test_idle_blocks_give_way() -> None:
    """Idle blocks are given back, longest idle first, before a request of another size is refused."""
    memory = CountingMemory()
    pool = HostPool(100, memory=memory)
    for tensor in [pool.allocate(30), pool.allocate(31), pool.allocate(32)]:
        pool.release(tensor)
    pool.allocate(40)
    assert (memory.taken, memory.given_back) == (4, 2)  # 30 bytes were too few, 31 enough
    pool.allocate(32)
    assert memory.taken == 4


def test_no_growth_over_many_cycles() -> None:
    """300 steps of the same sizes take from the system once."""
    memory = CountingMemory()
    pool = HostPool(10_000, memory=memory)
    for _ in range(300):
        lent = [pool.allocate(size) for size in (1000, 2000, 1000, 512)]
        for tensor in lent:
            pool.release(tensor)
    assert (memory.taken, memory.given_back) == (4, 0)
    assert 4512 == pool.statistics.held_nbytes == pool.statistics.peak_nbytes


@pytest.mark.parametrize("again", [False, True])
def test_double_release(again: bool) -> None:
    """A second release is an error, also if the block was reused since; its new tensor stays valid."""
    pool = HostPool(1000)
    first = pool.allocate(10)
    pool.release(first)
    other = pool.allocate(10) if again else None
    with pytest.raises(HostPoolMisuse, match="released"):
        pool.release(first)
    assert (10 if again else 0) == pool.statistics.lent_nbytes
    if other is not None:
        pool.release(other)


def test_foreign_tensors() -> None:
    """A tensor of another origin, another pool's, or a view is refused and changes nothing."""
    pool, other = HostPool(1000), HostPool(1000)
    mine = pool.allocate(10)
    for tensor in (torch.empty(10), other.allocate(10)):
        with pytest.raises(HostPoolMisuse, match="not of this pool"):
            pool.release(tensor)
    with pytest.raises(HostPoolMisuse, match="view"):
        pool.release(mine[:5])
    assert pool.statistics.lent_nbytes == 10
    pool.release(mine)


@pytest.mark.parametrize("shape", [0, -1, (3, 0), (-2, -2), ()])
def test_blocks_have_bytes(shape: int | tuple[int, ...]) -> None:
    """A block without a byte is refused; a scalar has one element."""
    pool = HostPool(10)
    if shape == ():
        assert pool.allocate(shape).dim() == 0
        return
    with pytest.raises(HostPoolMisuse, match="at least one byte"):
        pool.allocate(shape)


@pytest.mark.parametrize("capacity_nbytes", [0, -1])
def test_capacity_is_positive(capacity_nbytes: int) -> None:
    """A pool without capacity is refused."""
    with pytest.raises(HostPoolMisuse, match="positive"):
        HostPool(capacity_nbytes)


def test_a_block_in_a_copy_is_not_lent() -> None:
    """Below the cap another block is taken; at the cap the pool waits for the copy."""
    memory = CountingMemory()
    pool = HostPool(25, memory=memory)
    tensor = pool.allocate(10)
    copy = Copy()
    pool.release(tensor, after=copy)
    second = pool.allocate(10)
    assert (memory.taken, copy.waited) == (2, False)
    third = pool.allocate(10)  # a third block does not fit
    assert (memory.taken, copy.waited) == (2, True)
    assert third.data_ptr() == tensor.data_ptr()
    done = Copy(done=True)
    pool.release(second, after=done)
    pool.allocate(10)
    assert (memory.taken, done.waited) == (2, False)


@pytest.mark.parametrize("size", [10, 9])
def test_an_interrupted_wait_loses_no_block(size: int) -> None:
    """A request at the cap that waits for a copy, to reuse its block or to give it back, can be repeated."""

    class Interrupted(Copy):
        def synchronize(self) -> None:
            if not self.waited:
                self.waited = True
                raise KeyboardInterrupt

    pool = HostPool(10)
    pool.release(pool.allocate(10), after=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(size)
    pool.allocate(size)
    assert size == pool.statistics.held_nbytes


def test_closing() -> None:
    """A closed pool allocates nothing, gives idle blocks back, and lent ones when they are released."""
    memory = CountingMemory()
    pool = HostPool(100, memory=memory)
    lent, idle = pool.allocate(10), pool.allocate(20)
    pool.release(idle)
    pool.close()
    assert (memory.given_back, pool.statistics.held_nbytes) == (1, 10)
    with pytest.raises(HostPoolMisuse, match="closed"):
        pool.allocate(1)
    pool.release(lent)
    assert (memory.given_back, pool.statistics.held_nbytes) == (2, 0)


def test_threads_share_a_pool() -> None:
    """Under contention the cap holds at every moment, no two tensors share bytes, and no block is lost."""
    pool = HostPool(8 * 64)
    start = threading.Barrier(8)

    def work(worker: int) -> None:
        start.wait()
        for step in range(100):
            tensor = pool.allocate(32 + (worker + step) % 33)
            tensor.fill_(worker)
            assert pool.statistics.held_nbytes <= 8 * 64
            assert (tensor == worker).all()
            pool.release(tensor)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert pool.statistics.lent_nbytes == 0
    pool.trim()
    assert pool.statistics.held_nbytes == 0


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=60))
def test_books_balance(steps: list[tuple[bool, int]]) -> None:
    """Lent bytes are always those of allocated tensors, at most the held ones, at most the cap."""
    pool = HostPool(100)
    lent: list[torch.Tensor] = []
    peak = 0
    for allocate, number in steps:
        if allocate:
            fits = sum(t.numel() for t in lent) + number <= 100
            if fits:
                lent.append(pool.allocate(number))
            else:
                with pytest.raises(HostPoolExhausted):
                    pool.allocate(number)
        elif lent:
            pool.release(lent.pop(number % len(lent)))
        now = sum(t.numel() for t in lent)
        peak = max(peak, now)
        books = pool.statistics
        assert now == books.lent_nbytes <= books.held_nbytes <= books.capacity_nbytes
        assert (100 - now, peak) == (books.free_nbytes, books.peak_nbytes)


def test_pinned_blocks_are_whole_pages() -> None:
    """A pinned block is charged as whole pages, registered once, unregistered when given back."""
    runtime = FakeRuntime()
    page = mmap.PAGESIZE
    pool = HostPool(4 * page, memory=RegisteredMemory(runtime))
    first = pool.allocate(page + 1)
    first.fill_(7)
    second = pool.allocate((2, 3), torch.float64)
    assert [2 * page, page] == list(runtime.registered.values())
    assert 3 * page == pool.statistics.lent_nbytes
    pool.release(first)
    assert len(runtime.registered) == 2  # kept, still pinned
    pool.allocate(3 * page)
    assert {second.data_ptr(): page} == {a: n for a, n in runtime.registered.items() if n == page}
    del pool
    gc.collect()
    assert runtime.registered == {}


def test_pinning_that_fails() -> None:
    """A refusal of the runtime is one clear error, and the pool's numbers are unchanged."""
    page = mmap.PAGESIZE
    cleared: list[None] = []
    memory = RegisteredMemory(FakeRuntime(limit=page), lambda: cleared.append(None))
    pool = HostPool(4 * page, memory=memory)
    tensor = pool.allocate(1)
    with pytest.raises(CannotPin, match=r"error 2 for .* bytes; lower the capacity"):
        pool.allocate(2 * page)
    assert page == pool.statistics.lent_nbytes == pool.statistics.held_nbytes
    assert len(cleared) == 1  # or the next kernel launch would report the error
    pool.release(tensor)


def test_pinning_wants_cuda() -> None:
    """A request for pinned memory for a CPU is refused with advice."""
    with pytest.raises(CannotPin, match="use pin=None or pin=False"):
        HostPool(100, pin=True)
    with HostPool(100, device="meta") as pool:
        assert not pool.allocate(10).is_pinned()


@pytest.mark.cuda
def test_a_refusal_on_cuda_is_forgotten() -> None:
    """CUDA keeps the error until it is asked for, which torch does after each launch."""

    class PinsTwice:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.cuda.cudart(), name)

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
            first = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, flags))
            second = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, flags))
            torch.cuda.cudart().cudaHostUnregister(address)
            return first or second

    memory = RegisteredMemory(PinsTwice(), partial(clear_cuda_error, torch.device("cuda")))
    with pytest.raises(CannotPin, match="cudaHostRegister"):
        memory.take(100)
    assert torch.ones(2, device="cuda").add(1).tolist() == [2.0, 2.0]


@pytest.mark.cuda
def test_on_cuda() -> None:
    """Blocks are pinned at their exact size, and copies both ways carry the bytes."""
    with HostPool(2**24, device="cuda") as pool:
        block = pool.allocate((3, 1000), torch.float32)
        assert block.is_pinned()
        x = torch.randn(3, 1000, device="cuda")
        block.copy_(x, non_blocking=True)
        copied = torch.cuda.current_stream().record_event()
        copied.synchronize()
        assert torch.equal(x, block.to("cuda", non_blocking=True))
        pool.release(block, after=copied)
        again = pool.allocate((3, 1000), torch.float32)
        assert again.data_ptr() == block.data_ptr()


def test_a_lease_comes_back_with_its_last_tensor() -> None:
    """A leased block is in use while any view exists, also in autograd; then it can be reused."""
    pool = HostPool(1000)
    lease = pool.lease(400)
    parameter = torch.nn.Parameter(torch.zeros(10, 10))
    parameter.grad = lease.view(torch.float32).view(10, 10)
    del lease
    flat = parameter.grad.add_(1.0).view(-1)
    parameter.grad = None
    assert pool.statistics.lent_nbytes == 400
    del flat
    assert pool.statistics.lent_nbytes == 0
    with pytest.raises(HostPoolExhausted):
        pool.lease(1001)


def test_a_lease_may_come_back_while_another_is_taken() -> None:
    """The garbage collector may run at any time, also inside the pool."""

    class Memory(PlainMemory):
        def take(self, nbytes: Any) -> Any:
            gc.collect()
            return super().take(nbytes)

    pool = HostPool(1000, memory=Memory())
    circle = [pool.lease(300)]
    circle.append(circle)
    del circle
    gc.disable()
    try:
        block = pool.allocate(200)
    finally:
        gc.enable()
    assert pool.statistics.lent_nbytes == block.numel()


def test_a_block_whose_copy_failed_is_lent_again() -> None:
    """A failed copy is reported where it is waited for; its block can be reused."""

    class Failed:
        def query(self) -> Any:
            return False

        def synchronize(self) -> None:
            raise LaneFailed(lane="to_host", work="a copy", problem="planted")

    pool = HostPool(100)
    pool.release(pool.allocate(100), after=Failed())
    again = pool.allocate(100)
    pool.release(again, after=Failed())
    pool.trim()
    assert pool.statistics.held_nbytes == 0
