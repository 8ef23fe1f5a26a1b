"""Memory as pinned blocks have it: shared with forks, in huge pages where they cost nothing, touched."""

import mmap
import os
from typing import Any

import pytest
import torch

from remat_offload import HostPool
from remat_offload.host_memory.pinned import RegisteredMemory, mapped


def test_memory_to_measure_on_is_not_of_the_pool() -> None:
    """Nor pinned, nor within its capacity."""
    without_runtime: Any = None  # which would register
    for pool in (HostPool(10, memory=RegisteredMemory(without_runtime)), HostPool(10)):
        for nbytes in (0, 1, 5 << 20):
            block = pool.unpinned(nbytes)
            assert (nbytes, torch.uint8) == (len(block), block.dtype)
            block.fill_(1)
        assert 0 == pool.statistics.held_nbytes


@pytest.mark.parametrize(("nbytes", "advised"), [(1 << 20, []), (2 << 20, [2 << 20]), (5 << 20, [4 << 20])])
def test_huge_pages_end_with_the_block(
    nbytes: int, advised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at its end would take memory that nobody counts; a kernel without huge pages is no error."""
    found: list[int] = []

    class Watched(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            found.append(length)
            raise OSError("no such advice")

    monkeypatch.setattr(mmap, "mmap", Watched)
    assert torch.equal(torch.zeros(nbytes, dtype=torch.uint8), mapped(nbytes))
    assert found == (advised if hasattr(mmap, "MADV_HUGEPAGE") else [])


def test_a_fork_sees_what_its_parent_writes() -> None:
    """Pages are shared: a private page would be another one after a fork, while a device used the old one."""
    block = mapped(1 << 22)
    block.fill_(1)
    begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(begun[0], 1)
        os._exit(int(block[-1]))
    block[-1] = 7  # in the parent, after the fork
    os.write(begun[1], b"!")
    _, status = os.waitpid(child, 0)
    for end in begun:
        os.close(end)
    assert os.waitstatus_to_exitcode(status) == 7
