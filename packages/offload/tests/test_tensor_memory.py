"""Tensors in memory: their order, flat views and shared elements."""

import pytest
import torch

from remat_offload.tensor_memory import flat_view, memory_order, overlapping, share_order


def test_memory_order() -> None:
    """Tensors without gaps have an order, unaffected by sizes of one; others have none."""
    x = torch.zeros(2, 3, 4, 5)
    assert memory_order(x) == (60, 20, 5, 1)
    assert memory_order(x.to(memory_format=torch.channels_last)) == (60, 1, 15, 3)
    assert memory_order(x.permute(3, 1, 0, 2)) == (1, 20, 60, 5)
    assert memory_order(torch.zeros(3, 1, 2).as_strided((3, 1, 2), (2, 77, 1))) == (2, 0, 1)
    assert memory_order(torch.tensor(1.0)) == ()
    assert memory_order(torch.zeros(3, 0)) == (1, 0)
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
