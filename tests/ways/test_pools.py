"""Max pooling that keeps bytes: eager's bits, without the indices and without the input."""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule, estimated_graph, step_graph
from remat_executor.ways.chunks import is_dense
from remat_executor.ways.masks import masks
from remat_executor.ways.pools import KINDS, distances, divisor_of, pool_gradient, pool_to_codes, pools
from remat_executor.ways.substitution import Family
from remat_graph import Roofline, specialize
from tests.helpers.bits import same_bits, with_special
from tests.helpers.planners import all_switched, save_all
from tests.ways.fuzz import steps

SMALL = partial(pools, least_nbytes=0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@attrs.frozen(eq=False)
class Case:
    """A pooling of random numbers with many ties and special values."""

    name: str
    window: tuple[Any, ...]
    x: Tensor
    gradient: Tensor


def random_case(rng: random.Random, name: str, dtype: torch.dtype) -> Case | None:
    """None if torch refuses the window, or a window has no element at all."""
    kind = KINDS[name]
    sizes = (1, 2, 3, 8, 17) if kind.dims == 3 else (1, 2, 5, 16, 31, 64, 256, 257)
    size = tuple(rng.choice(sizes) for _ in range(kind.dims))
    kernel = tuple(rng.choice((1, 2, 3, 5)) for _ in size)
    stride = tuple(rng.choice((1, 2, 3)) for _ in size)
    dilation = tuple(rng.choice((1, 1, 2, 3)) for _ in size)
    padding = tuple(rng.randint(0, k // 2) for k in kernel)
    window: tuple[Any, ...] = (kernel, stride, padding, dilation, rng.random() < 0.4)
    if kind.adaptive:
        window = (tuple(rng.randint(1, n) for n in size),)
    shape = (*((rng.choice((1, 2, 3)),) if rng.random() < 0.8 else ()), rng.choice((1, 2, 4)), *size)
    x = with_special(torch.randint(-2, 3, shape).float(), 0.3).to(dtype)
    if rng.random() < 0.1:
        x = x.fill_(rng.choice((float("nan"), -float("inf"))))
    if len(shape) == kind.dims + 2 and rng.random() < 0.4:
        layout = torch.channels_last if kind.dims == 2 else torch.channels_last_3d
        x = x.contiguous(memory_format=layout)
    elif len(shape) == kind.dims + 2 and rng.random() < 0.3:
        x = torch.cat([x, x])[::2]
    try:
        made, indices = kind.call(x, *window)
    except RuntimeError:
        return None
    if indices.amax() >= torch.Size(size).numel():
        return None
    gradient = with_special(torch.randn(made.shape), 0.1).to(dtype)
    if rng.random() < 0.5:
        gradient = torch.empty_like(made).copy_(gradient)
    elif rng.random() < 0.2:
        gradient = gradient.reshape(-1)[0].expand(made.shape)
    return Case(name, window, x, gradient)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(KINDS))
def test_the_kernels_give_the_bits_of_the_calls(name: str, dtype: torch.dtype) -> None:
    """Padding, dilation, ceil_mode, strides, layouts, ties, NaN, windows of minus infinities."""
    rng = random.Random(str((name, dtype)))
    torch.manual_seed(0)
    checked = 0
    for _ in range(150):
        case = random_case(rng, name, dtype)
        checked += case is not None and holds(case)
    assert checked > 30


def holds(case: Case) -> bool:
    """Whether there is a way for a case; its bits are checked."""
    kind, x = KINDS[case.name], case.x
    made, indices = kind.call(x, *case.window)
    rest = () if kind.adaptive else case.window
    wanted = kind.backward(case.gradient, x, *rest, indices)
    size = tuple(x.shape[-kind.dims :])
    divisor = divisor_of(distances(case.name, case.window, size))
    planes = all(each.is_contiguous() for each in (x, made, indices, wanted, case.gradient))
    images = x.ndim == kind.dims + 2 and (kind.dims == 2 or kind.adaptive)
    if divisor is None or not all(map(is_dense, (made, indices, wanted))) or not (planes or images):
        return False
    for step in (1, 2, 100):
        constants = (case.name, case.window, size, divisor, planes, step)
        found, codes = pool_to_codes(x, tuple(made.shape), made.stride(), *constants)
        assert codes.nbytes == made.numel()
        assert same_bits(made, found)
        back = pool_gradient(case.gradient, codes, tuple(wanted.shape), wanted.stride(), *constants)
        assert same_bits(wanted, back)
    return True


def test_a_divisor_tells_all_distances_apart() -> None:
    """For any width; a window of more than 256 elements has none."""
    for width in range(2, 600):
        places = distances("max_pool2d", ((3, 2), (1, 1), (0, 0), (1, 1), False), (9, width))
        divisor = divisor_of(places)
        assert divisor is not None
        assert len({place % divisor for place in places}) == len(places)
    large = distances("max_pool2d", ((17, 17), (1, 1), (0, 0), (1, 1), False), (40, 40))
    assert divisor_of(large) is None


class Net(nn.Module):
    """A pooling between two convolutions."""

    def __init__(self, dims: int, pool: nn.Module) -> None:
        super().__init__()
        convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.pool, self.last = convolution(2, 4, 1), pool, convolution(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self.first(x).tanh()).cos()).square().mean()


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dims", "pool"),
    [
        (1, nn.MaxPool1d(3, 2, 1)),
        (2, nn.MaxPool2d(2)),
        (2, nn.MaxPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True)),
        (2, nn.MaxPool2d(2, 1, dilation=2)),
        (2, nn.AdaptiveMaxPool2d((4, 3))),
        (3, nn.MaxPool3d(2, ceil_mode=True)),
        (3, nn.AdaptiveMaxPool3d(4)),
        (1, nn.AdaptiveMaxPool1d(3)),
    ],
    ids=str,
)
def test_models_have_eagers_bits(dims: int, pool: nn.Module, dtype: torch.dtype, last: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, *(9,) * dims)
    if last and dims == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    model, inputs = Net(dims, pool).to(dtype), (x.to(dtype),)
    wanted = steps(copy.deepcopy(model), inputs)
    for planner in (all_switched(), all_switched(1)):
        module = PlannedModule(copy.deepcopy(model), inputs, {}, planner, ways=[SMALL])
        assert len(module.graph.switches) == 1
        found = steps(module, inputs)
        assert all(same_bits(one, other) for one, other in zip(wanted, found, strict=True))


def test_neither_the_indices_nor_the_input_are_kept() -> None:
    model, inputs = Net(2, nn.MaxPool2d(2)), (torch.randn(2, 2, 16, 16),)
    graph = step_graph(model, inputs, platform=Roofline(), ways=[SMALL])
    index = next(i for i, op in enumerate(graph.ops) if "max_pool2d_with_indices.default" in op.target)
    (x,), (made, indices) = graph.ops[index].first.inputs, graph.ops[index].first.outputs
    (codes,) = (v for v, value in enumerate(graph.values) if value.name.endswith("_codes"))
    assert graph.values[indices].nbytes == 8 * graph.values[codes].nbytes
    decided = specialize(graph, graph.switches).graph
    assert (made, codes) == decided.ops[index].first.outputs
    backward = next(op for op in decided.ops if "max_pool2d_with_indices_backward" in op.target)
    assert {x, indices}.isdisjoint(backward.first.inputs)
    assert codes in backward.first.inputs


def test_windows_of_minus_infinities_with_channels_last_in_three_dimensions() -> None:
    """Torch gives them an index outside of the window, which no byte could say."""
    x = torch.randn(2, 3, 8, 8, 8, requires_grad=True)
    for layout, switches in ((torch.contiguous_format, 1), (torch.channels_last_3d, 0)):

        class Pooled(nn.Module):
            def forward(self, x: Tensor, layout: torch.memory_format = layout) -> Tensor:
                return nn.functional.max_pool3d(x.contiguous(memory_format=layout), 2).square().sum()

        found = PlannedModule(Pooled(), (x,), {}, save_all, ways=[SMALL])
        assert switches == len(found.graph.switches)


class AfterOnePixel(nn.Module):
    """Pools to one pixel an image, and from there to more; dropout draws in the order of its layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 2, 1),
            nn.MaxPool2d(1, stride=3, ceil_mode=True),
            nn.Tanh(),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(5),
            nn.Dropout(0.5),
            nn.Conv2d(2, 2, 1),
        )

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """A scalar."""
        y: Tensor = self.layers(x)
        return (y * scale).sum()


@pytest.mark.parametrize("family", [SMALL, partial(masks, least_nbytes=0)], ids=["pools", "masks"])
def test_images_of_one_pixel_have_no_layout_of_their_own(family: Family) -> None:
    """Which of two layouts later operators take depends on strides that no element needs."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, 2).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    inputs = (x, torch.randn(2, 2, 5, 5).to(torch.bfloat16))
    model = AfterOnePixel().to(torch.bfloat16)
    wanted = steps(copy.deepcopy(model), inputs)
    module = PlannedModule(copy.deepcopy(model), inputs, {}, all_switched(), ways=[family])
    assert module.graph.switches
    assert all(map(same_bits, wanted, steps(module, inputs)))


class Unpool(nn.Module):
    """Something else reads the indices."""

    def forward(self, x: Tensor) -> Tensor:
        made, indices = nn.functional.max_pool2d(x, 2, return_indices=True)
        return nn.functional.max_unpool2d(made, indices, 2)


def test_indices_that_are_read_are_kept() -> None:
    model, inputs = Net(2, Unpool()), (torch.randn(2, 2, 16, 16),)
    assert not PlannedModule(model, inputs, {}, save_all, ways=[SMALL]).graph.switches


def test_small_poolings_have_no_way() -> None:
    model, inputs = Net(2, nn.MaxPool2d(2)), (torch.randn(2, 2, 16, 16),)
    assert not PlannedModule(model, inputs, {}, save_all).graph.switches


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_the_workspaces_are_what_the_way_says(last: bool, tmp_path: Path) -> None:
    """Estimated for graphs whose kernels are not measured; within 5 % of what the allocator sees."""
    layout = torch.channels_last if last else torch.contiguous_format
    model = Net(2, nn.MaxPool2d(3, 2, 1))
    inputs = (torch.randn(16, 2, 128, 128).contiguous(memory_format=layout),)
    estimated = estimated_graph(model, inputs, {}, Roofline(), ways=[SMALL])
    measured = step_graph(model, inputs, platform=Roofline(), ways=[SMALL], cache_dir=tmp_path)
    pairs = [(one, other) for one, other in zip(estimated.ops, measured.ops, strict=True) if one.alternatives]
    assert len(pairs) == 2
    for one, other in pairs:
        (way,) = one.alternatives
        said, seen = (op.implementations[way.first].workspace_nbytes for op in (one, other))
        assert seen <= said <= 1.05 * seen
