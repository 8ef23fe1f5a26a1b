"""Chunks cover a tensor, and a kernel on a chunk ends ranges only where one on the whole does."""

from hypothesis import given
from hypothesis import strategies as st

from remat_offload.optimizer.chunking import split_elements

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
