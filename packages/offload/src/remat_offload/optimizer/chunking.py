"""Split flat memory into chunks that do not change a bit of an elementwise result.

Vectorized kernels process the end of their range one element at a time, and a compiler may round there
differently than in the vectors: seen on a CPU with AVX512 for the fused kernels in every dtype, and for
``add`` with a factor in the half dtypes. So chunks begin at multiples of 64 elements, and only the last chunk
ends like the whole.

A CPU distributes a large tensor over threads. The fused kernels distribute cache lines, which changes
nothing. All others distribute equal shares, whose ends may be anywhere. Chunks for these kernels never cross
the end of a share, and no chunk is so large that it would itself be distributed unevenly.
"""

CHUNK_NUMEL = 1 << 22
"""The most elements of a chunk, unless a caller asks for another number."""

ALIGNMENT = 64  # elements: two vectors of the smallest dtype, the unrolled loop of the kernels
_GRAIN = 32768  # elements: below it a CPU kernel stays on one thread (at::internal::GRAIN_SIZE)


def split_elements(numel: int, chunk_numel: int, threads: int) -> list[slice]:
    """Split flat memory so that an elementwise kernel gives the same bits on the chunks as on the whole.

    A chunk has at most `chunk_numel` elements, a multiple of ``ALIGNMENT``. Kernels distribute equal shares
    to `threads` threads; 1 if they do not. There is at least one chunk.
    """
    if numel <= chunk_numel:
        return [slice(0, numel)]
    share = -(-numel // min(threads, -(-numel // _GRAIN)))
    chunks = []
    for begin in range(0, numel, share):
        end = min(begin + share, numel)
        while begin < end:
            size = _aligned_size(end - begin, chunk_numel, threads)
            chunks.append(slice(begin, begin + size))
            begin += size
    return chunks


def _aligned_size(left: int, chunk_numel: int, threads: int) -> int:
    """Return the most elements that several threads would share out in multiples of ``ALIGNMENT``."""
    most = min(left, chunk_numel)
    if threads == 1 or most < _GRAIN:
        return most
    return most // (_GRAIN * threads) * (_GRAIN * threads) or most // _GRAIN * _GRAIN
