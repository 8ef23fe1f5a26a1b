"""The backward of batch norm by chunks of channels: the bits of the one call, where it has a way."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule, allocator_peak, estimated_graph, step_graph
from remat_executor.ways.batch_norms import (
    VECTORS,
    batch_norms,
    chunked_gradient,
    chunked_gradient_over,
    parts_of,
)
from remat_graph import Roofline
from tests.helpers.bits import with_special
from tests.helpers.planners import all_switched, save_all
from tests.helpers.ways import assert_exact, assert_same, three_steps, with_channels_last

aten = torch.ops.aten
ANY = partial(batch_norms, least_nbytes=0, least_parts=2)
ROWS = torch.contiguous_format
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float64, torch.float64),
]
# With and without a remainder of vectors, in pixels and in channels; one image; little but one pixel.
SHAPES = [(8, 24, 16, 16), (4, 131, 7, 7), (1, 200, 3, 3), (2, 130, 2, 1), (3, 70, 13), (2, 129, 3, 4, 5)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("special", [0.0, 0.002])
@pytest.mark.parametrize(("dtype", "parameters"), DTYPES)
def test_the_kernels_give_the_bits_of_the_call(
    dtype: torch.dtype, parameters: torch.dtype, special: float, threads: int
) -> None:
    """Both layouts, train and eval mode, without weights, with some results only."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for shape, last in itertools.product(SHAPES, (False, True)):
        layout = LAST.get(len(shape), ROWS) if last else ROWS
        x, gradient = (torch.randn(shape).to(dtype) * 2 + 1 for _ in range(2))
        x, gradient = (with_special(t, special) for t in (x, gradient))
        x, gradient = (t.to(memory_format=layout) for t in (x, gradient))
        weight, bias, mean, variance = (torch.rand(shape[1]).to(parameters) + 0.5 for _ in range(4))
        saved = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)[1:]
        trained, evaluated = (None, None, *saved), (mean, variance, *(s.new_empty(0) for s in saved))
        for (train, vectors), mask in itertools.product(
            ((True, (weight, *trained)), (True, (None, *trained)), (False, (weight, *evaluated))),
            ([True, True, True], [True, False, False], [True, True, False]),
        ):
            if vectors[0] is None and mask[1]:
                continue
            wanted = aten.native_batch_norm_backward(gradient, x, *vectors, train, 1e-5, mask)
            for least_nbytes, kernel in itertools.product((0, 5 * x.nbytes // shape[1]), KERNELS):
                parts = parts_of(x, layout, least_nbytes)
                assert shape[1] == parts[-1][1]
                given = [each for each in vectors if each is not None]
                there = tuple(each is not None for each in vectors)
                written = gradient.clone()
                found = kernel(written, x, *given, there, parts, layout, train, 1e-5, tuple(mask))
                assert (found[0] is written) == (kernel is chunked_gradient_over)
                for one, other in zip(wanted, found, strict=True):
                    assert (one is None) == (other is None)
                    if one is not None:
                        assert_same(one, other)
    torch.set_num_threads(before)


KERNELS = (chunked_gradient, chunked_gradient_over)


def test_chunks_of_channels_last_end_between_vectors() -> None:
    """All but the last, which has the remainder of the whole."""
    for channels, least_nbytes in itertools.product((64, 100, 128, 191, 200, 1000), (0, 1 << 14)):
        x = torch.empty(2, channels, 8, 8).to(memory_format=torch.channels_last)
        parts = parts_of(x, torch.channels_last, least_nbytes)
        assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
        assert all((end - start) % VECTORS == 0 for start, end in parts[:-1])
        least = min(channels, max(VECTORS, least_nbytes // (x.nbytes // channels)))
        assert all(end - start >= least for start, end in parts)


class Net(nn.Module):
    """Convolutions with batch norms between them, and a residual."""

    def __init__(self, dims: int, channels: int, **options: Any) -> None:
        super().__init__()
        convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
        self.first = convolution(3, channels, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                norm(channels, **options), nn.ReLU(inplace=True), convolution(channels, channels, 1)
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def made(dims: int, dtype: torch.dtype, *, last: bool, **options: Any) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    model = Net(dims, 2 * VECTORS + 2 if last else 5, **options).to(dtype)
    x = torch.randn(2, 3, *((7, 5, 4)[:dims])).to(dtype)
    if last:
        model, x = with_channels_last(model, x)
    return model, x


@pytest.mark.parametrize(
    ("dtype", "mixed"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize(("dims", "last"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_models(dims: int, last: bool, dtype: torch.dtype, mixed: bool) -> None:
    """Three steps, running statistics included; 32-bit norms in 16-bit models too."""
    model, x = made(dims, dtype, last=last)
    if mixed:
        for layer in model.layers:
            layer[0].float()
    assert_exact(model, (x,), [ANY], switches=2)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=str)
def test_norms_without_weights_or_running_statistics(options: dict[str, bool]) -> None:
    model, x = made(2, torch.float32, last=False, **options)
    assert_exact(model, (x,), [ANY], switches=2)


def test_norms_in_eval_mode() -> None:
    """They read running statistics; those of a frozen backbone, for example."""
    model, x = made(2, torch.float32, last=False)
    for layer in model.layers:
        layer[0].eval()
    assert_exact(model, (x,), [ANY], switches=2)


@pytest.mark.parametrize("last", [False, True])
def test_a_repeat_without_weights_rounds_as_the_first_run_did(last: bool) -> None:
    """With 32-bit running statistics of 16-bit inputs, which choose the kernel; the ways are off and on."""
    model, x = made(2, torch.bfloat16, last=last, affine=False)
    for layer in model.layers:
        layer[0].float()
    for family, switches in ([], 0), ([ANY], 2):
        assert_exact(model, (x,), family, switches=switches, seeds=(None, 1, 2))


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1), (6, 5, 1, 1)])
def test_what_has_both_layouts_is_left_alone(shape: tuple[int, ...]) -> None:
    """One pixel an image, and no pixels at all."""
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](5)
    model = nn.Sequential(norm, Mean())
    x = torch.randn(shape).requires_grad_()
    assert_exact(model, (x,), [ANY], switches=0)


class Mean(nn.Module):
    """The mean of squares."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Turned(nn.Module):
    """The gradient of the norm's result has channels last, unlike its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.BatchNorm2d(5), nn.Parameter(torch.rand(80))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x).permute(0, 2, 3, 1).flatten(1) * self.weight).square().sum()


def test_a_gradient_in_another_layout_is_left_alone() -> None:
    assert_exact(Turned(), (torch.randn(3, 5, 4, 4).requires_grad_(),), [ANY], switches=0)


def test_small_norms_have_no_way() -> None:
    model, x = made(2, torch.float32, last=False)
    assert not PlannedModule(model, (x,), {}, save_all, ways=[batch_norms]).graph.switches


def test_the_workspaces_are_what_the_way_says() -> None:
    """Estimated for graphs whose kernels are not measured; within 5 % of what the allocator sees."""
    torch.manual_seed(0)
    model, x = Net(2, 32), torch.randn(8, 3, 64, 64)
    platform = Roofline()
    family = [partial(batch_norms, least_nbytes=1 << 18, least_parts=2)]
    graphs = [
        estimated_graph(model, (x,), {}, platform, ways=family),
        step_graph(model, (x,), platform=platform, ways=family),
    ]
    pairs = [pair for pair in zip(*(graph.ops for graph in graphs), strict=True) if pair[0].alternatives]
    assert len(pairs) == 2
    for pair in pairs:
        said, seen = (op.implementations[op.alternatives[0].first].workspace_nbytes for op in pair)
        assert seen <= said <= 1.05 * seen


def test_the_peak_is_predicted_and_below_that_of_the_call() -> None:
    """The allocator's, with the result written over the gradient."""
    torch.manual_seed(0)
    model, x = Net(2, 16), torch.randn(8, 3, 64, 64)
    peaks = []
    for planner in (save_all, all_switched()):
        module = PlannedModule(
            copy.deepcopy(model), (x,), {}, planner, ways=[partial(ANY, least_nbytes=1 << 17)]
        )
        three_steps(module, (x,))
        module.zero_grad()
        record = allocator_peak(lambda module=module: module(x).backward())
        assert record.peak_nbytes == module.plan.peak_nbytes
        peaks.append(record.peak_nbytes)
    assert peaks[1] <= peaks[0] - 2 * x.nbytes


@pytest.mark.parametrize("seed", range(12))
def test_random_norms(seed: int) -> None:
    torch.manual_seed(seed)

    def draw(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), ()))]

    dims, last = draw(1, 2, 3), draw(True, False)
    last = last and dims > 1
    channels = draw(64, 128, 150, 193) if last else draw(1, 2, 7, 16)
    dtype = draw(torch.float32, torch.bfloat16, torch.float16, torch.float64)
    options = {"affine": draw(True, True, False), "track_running_stats": draw(True, True, False)}
    model = Net(dims, channels, **options).to(dtype)
    if dtype.itemsize == 2 and draw(True, False):
        for layer in model.layers:
            layer[0].float()
    x = torch.randn(draw(1, 2, 5), 3, *[draw(1, 2, 5, 8) for _ in range(dims)]).to(dtype)
    if x.numel() == 3:  # one number a channel is refused
        x = torch.cat([x, x])
    if last:
        model, x = with_channels_last(model, x)
    x = with_special(x, draw(0.0, 0.0, 0.01))
    found = PlannedModule(copy.deepcopy(model), (x,), {}, save_all, ways=[ANY]).graph.switches
    assert_exact(model, (x,), [ANY], switches=len(found))
