"""A mean cross entropy with class weights, label smoothing and ignored labels has eager's bits."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from remat_executor import PlannedModule, allocator_peak
from remat_executor.capture.smoothed_loss import sum_of_weights, traceable_sum_of_weights
from remat_executor.runtime.opaque_ops import Opaque
from tests.helpers.bits import same_bits
from tests.helpers.planners import save_all

CLASSES, IGNORED = 37, -100


class Smoothed(nn.Module):
    """A linear layer, or a convolution of images, and the loss."""

    def __init__(self, scores: nn.Module) -> None:
        super().__init__()
        self.scores = scores
        self.register_buffer("weight", torch.rand(CLASSES))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            self.scores(x), labels, weight=self.weight, label_smoothing=0.1, ignore_index=IGNORED
        )


def batch(shape: tuple[int, ...], share: float, seed: int) -> Tensor:
    """Labels of which about a share is ignored."""
    torch.manual_seed(seed)
    labels = torch.randint(0, CLASSES, shape)
    return labels.masked_fill(torch.rand(shape) < share, IGNORED)


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_eager(dtype: torch.dtype, images: bool) -> None:
    """Also for batches of which other shares are ignored than of the sample, or all."""
    torch.manual_seed(0)
    scores: nn.Module = nn.Conv2d(8, CLASSES, 1) if images else nn.Linear(8, CLASSES)
    model = Smoothed(scores).to(dtype)
    shape = (3, 9, 7) if images else (301,)
    x = torch.randn(3, 8, 9, 7).to(dtype) if images else torch.randn(301, 8).to(dtype)
    planned = PlannedModule(copy.deepcopy(model), (x, batch(shape, 0.3, 1)), {}, save_all)
    for seed, share in enumerate((0.3, 0.0, 0.9, 1.0)):
        labels = batch(shape, share, seed)
        found = []
        for each in (model, planned):
            each.zero_grad()
            loss = each(x, labels)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in each.parameters())])
        assert all(map(same_bits, *found)), f"{share:.0%} ignored"
    assert planned.runs == {"planned": 4}


def test_other_shares_need_no_more_than_what_is_measured() -> None:
    """A random mask leaves out no label, whatever the sample's labels are."""
    weight, labels = torch.rand(CLASSES), batch((4000,), 0.5, 0)
    masks = {share: batch((4000,), share, 1) == IGNORED for share in (0.0, 0.3, 1.0)}
    peaks = {
        share: allocator_peak(lambda mask=mask: sum_of_weights(weight, labels, mask)).peak_nbytes
        for share, mask in masks.items()
    }
    assert peaks[0.0] == max(peaks.values())
    for mask in masks.values():
        one, other = (f(weight, labels, mask) for f in (sum_of_weights, traceable_sum_of_weights))
        torch.testing.assert_close(one, other)


def test_another_sum_of_weights_is_left_alone() -> None:
    """A loss of the user's own adds zeros, if that is what it says."""

    class Own(Smoothed):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            ignored = labels == IGNORED
            weights = self.weight.gather(0, labels.masked_fill(ignored, 0)).masked_fill(ignored, 0)
            return self.scores(x).square().sum() / weights.sum()

    torch.manual_seed(0)
    model, x, labels = Own(nn.Linear(8, CLASSES)), torch.randn(1000, 8), batch((1000,), 0.5, 1)
    planned = PlannedModule(copy.deepcopy(model), (x, labels), {}, save_all)
    assert torch.equal(model(x, labels), planned(x, labels))
    assert not any("sum_of_weights" in op.name for op in planned.graph.ops)


def test_a_compiler_gets_calls_that_it_can_trace() -> None:
    """The size of what is selected depends on data."""
    graph = torch.fx.Graph()
    tensors = graph.placeholder("tensors")
    given = tuple(graph.call_function(operator.getitem, (tensors, place)) for place in range(3))
    graph.output([graph.call_function(sum_of_weights, given)])
    opaque = Opaque(torch.fx.GraphModule({}, graph))
    labels = batch((40,), 0.5, 0)
    sample = (torch.rand(CLASSES), labels, labels == IGNORED)
    with FakeTensorMode() as mode:
        (made,) = opaque.flat(*map(mode.from_tensor, sample))
    assert made.shape == ()
