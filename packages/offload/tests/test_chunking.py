"""Chunks cover a tensor, and a kernel on a chunk ends ranges only where one on the whole does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat_offload.optimizer.chunking import flat_view, memory_order, overlapping, share_order, split_elements

GRAIN = 32768


def dealt(numel: int, threads: int) -> list[int]:
    """The ends of threads' ranges, as at::parallel_for distributes a kernel's range."""
    share = -(-numel // min(threads, -(-numel // GRAIN)))
    return [*range(0, numel, share), numel]


@given(
    numel=st.integers(0, 40 * GRAIN),
    rounds=st.one_of(st.integers(1, 40), st.integers(1, 20 * GRAIN // 64)),
    threads=st.integers(1, 16),
)
def test_cuts(numel: int, rounds: int, threads: int) -> None:
    """Chunks are contiguous, within the limit, and split at whole vectors of a thread's range."""
    limit = max(64 * rounds, numel // 1000 // 64 * 64)
    cut = split_elements(numel, limit, threads)
    assert [0, *(piece.stop for piece in cut)] == [*(piece.start for piece in cut), numel]
    assert all(piece.stop - piece.start <= limit for piece in cut)
    if len(cut) == 1:
        return
    ends = dealt(numel, threads)
    assert set(ends) <= {0, *(piece.stop for piece in cut)}
    for piece in cut:
        begin = max(end for end in ends if end <= piece.start)
        inner = dealt(piece.stop - piece.start, threads)[:-1]
        assert all((piece.start - begin + each) % 64 == 0 for each in inner)


def test_memory_order() -> None:
    """Tensors without gaps have an order, unaffected by sizes of one; others have none."""
    x = torch.zeros(2, 3, 4, 5)
    assert memory_order(x) == (60, 20, 5, 1)
    assert memory_order(x.to(memory_format=torch.channels_last)) == (60, 1, 15, 3)
    assert memory_order(x.permute(3, 1, 0, 2)) == (1, 20, 60, 5)
    assert memory_order(torch.zeros(3, 1, 2).as_strided((3, 1, 2), (2, 77, 1))) == (2, 0, 1)
    assert memory_order(torch.tensor(1.0)) == ()
    for holes in (x[..., ::2], x[:, :2], torch.zeros(1, 3).expand(2, 3), torch.eye(3).to_sparse()):
        assert memory_order(holes) is None


def test_sharing_an_order() -> None:
    """Tensors of one shape and one order share it; others do not."""
    x = torch.zeros(2, 3, 4, 5)
    y = x.to(memory_format=torch.channels_last)
    assert share_order(x, x.clone(), x.half())
    assert share_order(y, y.clone())
    assert not share_order(x, y)
    assert not share_order(x, x.view(-1))
    assert not share_order(x[:, :2], x[:, :2])


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last])
def test_flat_is_a_view(format_: torch.memory_format) -> None:
    """Writing to the flat view writes to the tensor, at any storage offset."""
    x = torch.zeros(5, 2, 3, 4).to(memory_format=format_)[2:4]
    flat_view(x).copy_(torch.arange(48))
    assert x.sum() == 47 * 24
    assert x.data_ptr() == flat_view(x).data_ptr()


def test_overlapping() -> None:
    """Shared elements count, not spans; the result is the positions of the two tensors."""
    whole = torch.zeros(12, 8)
    apart = [whole[:, :4], torch.zeros(3), whole[:, 4:6], whole[:6, 6:], whole[6:, 6:], torch.zeros(0)]
    assert overlapping(apart) is None
    assert overlapping([*apart, *(torch.empty(3, device="meta") for _ in range(2))]) is None
    assert overlapping([*apart, whole[5, 7]]) == (3, 6)
    assert overlapping([*apart, whole.view(torch.int16)[11, 15]]) == (4, 6)
    assert overlapping([*apart, apart[1][2:]]) == (1, 6)
