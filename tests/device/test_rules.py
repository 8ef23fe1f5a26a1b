"""The test device follows torch's rules: blocks, streams, clocks, generators, graphs, choice of kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.device.plugin import Device

pytestmark = pytest.mark.cuda
MIB = 1 << 20


@pytest.fixture
def empty() -> Iterator[None]:
    """No cached blocks, before and after."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def expandable(empty: None) -> Iterator[None]:
    """The setting `expandable_segments:True`."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def block(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def grown(name: str, before: dict[str, int]) -> int:
    """By how much a statistic has grown."""
    return int(torch.cuda.memory_stats()[name] - before[name])


def taken(nbytes: int) -> tuple[int, int, Tensor]:
    """Bytes allocated and reserved for a request, and what keeps them."""
    before = torch.cuda.memory_stats()
    kept = block(nbytes)
    return (
        grown("allocated_bytes.all.current", before),
        grown("reserved_bytes.all.current", before),
        kept,
    )


def test_segments(empty: None) -> None:
    """2 MiB for what is at most 1 MiB, 20 MiB below 10 MiB, then whole multiples of 2 MiB."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # no blocks of other tests
        assert taken(1)[:2] == (512, 2 * MIB)
        assert taken(MIB + 1)[:2] == (MIB + 512, 20 * MIB)
        assert taken(10 * MIB + 1)[:2] == (10 * MIB + 512, 0)  # in the segment before, now free
        *sizes, kept = taken(20 * MIB + 512)
        assert sizes == [20 * MIB + 512, 22 * MIB]
        del kept


def test_large_blocks_are_split_only_above_one_mib(empty: None) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        block(12 * MIB)
        assert taken(11 * MIB)[:2] == (12 * MIB, 0)
        assert taken(11 * MIB - 512)[:2] == (11 * MIB - 512, 0)


def test_expandable_segments_split_every_block(expandable: None) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert taken(11 * MIB)[:2] == (11 * MIB, 20 * MIB)
        *sizes, kept = taken(19 * MIB)
        assert sizes == [19 * MIB, 0]
        assert taken(11 * MIB)[:2] == (11 * MIB, 20 * MIB)
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        assert before - torch.cuda.memory_reserved() >= 20 * MIB
        assert (kept.fill_(3) == 3).all()


def test_a_fraction_of_the_device(empty: None) -> None:
    total_nbytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total_nbytes)
    try:
        kept = [block(30 * MIB)]
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 60.00 MiB.*expandable_segments"):
            block(60 * MIB)
        kept.clear()
        assert block(60 * MIB).numel() == 60 * MIB  # cached blocks are freed for it
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_block_waits_for_the_streams_that_use_it() -> None:
    side = torch.cuda.Stream()
    kept = block(3 * MIB)
    address = kept.data_ptr()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**9)
        kept.add_(1)
    kept.record_stream(side)
    del kept
    assert block(3 * MIB).data_ptr() != address
    torch.cuda.synchronize()
    assert block(3 * MIB).data_ptr() == address


def test_fresh_memory_holds_nan() -> None:
    assert torch.empty(1000, device="cuda").isnan().all()


def test_a_read_that_a_later_kernel_overwrites(test_device: Device) -> None:
    """Without an event it is reported, with one it is not, whichever ran first."""
    x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    for orders in (True, False):
        with torch.cuda.stream(side):
            y = x + 1
        if orders:
            torch.cuda.current_stream().wait_stream(side)
        x.mul_(2)
        races = test_device.take_races()
        expected = "aten::mul_ (cuda:0, stream 0) writes memory that aten::add (cuda:0, stream "
        assert [race.startswith(expected) for race in races] == [] if orders else [True]
        torch.cuda.synchronize()
        del y


def test_a_result_that_is_not_waited_for(test_device: Device) -> None:
    """Its reader finds poison."""
    x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        y = x + 1
    assert (y * 1).isnan().all()
    assert len(test_device.take_races()) > 0
    torch.cuda.synchronize()
    assert (y == 2).all()


def test_times_are_the_devices() -> None:
    """An idle device waits for the host's launches; a busy one does not, and the clock is repeatable."""

    def time_ms(busy: bool) -> float:
        x, (begin, end) = torch.ones(8, device="cuda"), (torch.cuda.Event(enable_timing=True) for _ in "ab")
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(10**7)
        begin.record()
        for _ in range(10):
            x.mul_(2)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    assert time_ms(True) == pytest.approx(10 * 2e-3, rel=0.01)
    assert time_ms(False) == pytest.approx(10 * 5e-3 + 2e-3, rel=0.01)


def test_counts(test_device: Device) -> None:
    x = torch.ones(8, device="cuda")
    test_device.reset_counts()
    (x * 2).sum().item()
    assert test_device.launches() == {"aten::mul": 1, "aten::sum": 1, "aten::_local_scalar_dense": 1}
    assert test_device.syncs() == {"aten::_local_scalar_dense": 1}


def test_workspaces_of_threads_and_streams(empty: None) -> None:
    x, stream = torch.ones(8, 8, device="cuda"), torch.cuda.Stream()
    torch.mm(x, x)
    before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.mm(x, x)
        torch.mm(x, x)
    assert torch.cuda.memory_allocated() - before == 32 * MIB
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() < before


def test_a_graph_draws_other_numbers_at_each_replay() -> None:
    given, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        drawn = torch.rand(4, device="cuda") + given
        given.add_(1)
    assert (given == 0).all()
    torch.cuda.manual_seed(5)
    expected = [torch.rand(4, device="cuda") + step for step in range(3)]
    torch.cuda.manual_seed(5)
    for step in range(3):
        graph.replay()
        assert torch.equal(drawn, expected[step])
    assert (given == 3).all()


def test_what_a_graph_cannot_record() -> None:
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    other = torch.Generator("cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            x.sum().item()
        with pytest.raises(RuntimeError, match="not registered with the CUDA graph"):
            torch.rand(4, device="cuda", generator=other)
        with pytest.raises(RuntimeError, match="during CUDA graph capture"):
            torch.cuda.get_rng_state()


def test_memory_of_a_graph_stays_reserved(empty: None) -> None:
    pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()

    def reserved() -> int:
        return sum(
            s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == tuple(pool)
        )

    with torch.cuda.graph(graph, pool=pool):
        kept = torch.ones(3 * MIB, device="cuda") + 1
    graph.replay()
    assert (kept == 2).all()
    del kept
    torch.cuda.empty_cache()
    assert reserved() == 24 * MIB
    graph.reset()
    torch.cuda.empty_cache()
    assert reserved() == 0


@pytest.mark.parametrize(
    ("dtype", "backend", "name"),
    [
        (torch.bfloat16, None, "cudnn"),
        (torch.bfloat16, SDPBackend.FLASH_ATTENTION, "flash"),
        (torch.bfloat16, SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (torch.float32, None, "efficient"),
    ],
)
def test_attention(test_device: Device, dtype: torch.dtype, backend: SDPBackend | None, name: str) -> None:
    """The kernel that torch selects on Hopper, close to the sum written out, with the same dropout twice."""
    torch.manual_seed(0)
    x = [torch.randn(2, 4, 16, 8, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    test_device.reset_counts()

    def run(dropout: float = 0.0) -> tuple[Tensor, ...]:
        torch.cuda.manual_seed(1)
        made = F.scaled_dot_product_attention(*x, dropout_p=dropout, is_causal=True)
        return made, *torch.autograd.grad(made.float().square().sum(), x)

    with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
        fused, once, twice = run(), run(0.3), run(0.3)
    assert any(f"product_{name}_attention" in kernel for kernel in test_device.launches())
    with sdpa_kernel(SDPBackend.MATH):
        for expected, found in zip(run(), fused, strict=True):
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert all(map(torch.equal, once, twice))
    assert not torch.equal(once[0], fused[0])
