"""The identity of a tensor's memory, by which calls are told apart that share tensors."""

import numpy as np
import torch
from torch import Tensor

from remat_executor.torch_private.tensors import memory_id


def moved_away(size: int) -> Tensor:
    """A parameter whose memory was given up, as one that is on the host."""
    tensor = torch.ones(size)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_views_share_and_others_do_not() -> None:
    whole = torch.ones(8)
    assert memory_id(whole[4:]) == memory_id(whole) == memory_id(whole.detach())
    assert memory_id(whole.clone()) != memory_id(whole)
    values = np.ones(4)
    assert memory_id(torch.from_numpy(values)) == memory_id(torch.from_numpy(values))


def test_without_memory_nothing_is_shared() -> None:
    """The storage of such a tensor may be replaced without a change of its address, and its id be reused."""
    assert memory_id(moved_away(4)) is None
    assert memory_id(torch.ones(0)) is None


def test_tensors_without_values_are_told_apart() -> None:
    one, other = torch.ones(4, device="meta"), torch.ones(4, device="meta")
    assert memory_id(one) == memory_id(one[1:])
    assert memory_id(one) != memory_id(other)
