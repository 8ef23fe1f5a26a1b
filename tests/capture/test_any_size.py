"""One capture for all sizes: it gives the step that a capture of each size gives, or says that it may not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule
from remat_executor.capture.any_size import AnySize, capture_any_size
from remat_executor.capture.joint_graph import capture
from remat_executor.capture.traced_step import always_standard
from remat_executor.inspection.tensors import collect
from remat_executor.module import pipeline
from remat_executor.module.shared_captures import FEWEST_ALONE, Example
from remat_executor.torch_private.symbolic_sizes import SizeNotCovered
from remat_executor.translation.translate import translate
from remat_graph import Roofline
from tests.helpers.models import get_case
from tests.helpers.steps import assert_planned_step, pair

pytestmark = pytest.mark.filterwarnings("ignore:called in ")

WIDTH = 16
OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Torch 2.11 traces batched products for one size, and poolings for even or for odd ones."""


class Attention(nn.Module):
    """With a mask as long as the input, positions, dropout, and a mean over all places but one."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Embedding(512, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = x + self.places(torch.arange(length, device=x.device))
        q, k, v = self.mix(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) * 0.25
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e4)
        x = x + self.out(torch.softmax(scores, -1) @ v)[:, 0:length]
        return nn.functional.dropout(nn.functional.gelu(x), 0.1).square().sum() / (length - 1)


class Branches(nn.Module):
    """Another layer from 24 on."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.short if x.shape[1] < 24 else self.long
        return layer(x).tanh().square().mean()


class Constant(nn.Module):
    """The length becomes data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() * torch.tensor(float(int(x.shape[1])))).mean()


class Pooled(nn.Module):
    """Images: a batch norm with running statistics, pooling, and a size that is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.convolve(x))), 2)
        x = x[:, :, : x.shape[2] // 2, 1:]
        return x.flatten(1).square().mean()


def sequences(length: int) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size + 4, generator=torch.Generator().manual_seed(size))


def traced(module: nn.Module, x: Tensor, free: set[tuple[int, int]]) -> AnySize:
    return capture_any_size(
        module,
        collect(module, (x,), {}),
        free,
        differentiate=None,
        call=module.forward,
        is_standard=always_standard,
        as_if_compiling=False,
    )


def captured(module: nn.Module, x: Tensor, any_size: AnySize | None = None) -> Example:
    """A step, by a capture of its own or by one for any size."""
    tensors = collect(module, (x,), {})
    found = capture(module, tensors) if any_size is None else any_size.captured(tensors)
    return Example.of(tensors, found, translate(found, tensors, name="test"))


def holds(any_size: AnySize, x: Tensor, free: set[tuple[int, int]]) -> bool:
    """Whether a capture covers the sizes of an input."""
    try:
        any_size.sizes.check({(i, d): x.shape[d] for i, d in free})
    except SizeNotCovered:
        return False
    return True


SIZED: dict[str, tuple[type[nn.Module], Callable[[int], Tensor], set[tuple[int, int]]]] = {
    "attention": (Attention, sequences, {(0, 1)}),
    "images": (Pooled, images, {(0, 2), (0, 3)}),
}


@pytest.mark.parametrize("name", SIZED)
def test_the_same_step_at_each_size(name: str) -> None:
    """Operators, values, constants and outputs, in the same order."""
    make, sample, free = SIZED[name]
    module = make()
    any_size = traced(module, sample(20), free)
    sizes = (20, 12, 33, 64)
    covered = [size for size in sizes if holds(any_size, sample(size), free)]
    assert covered == list(sizes) or (OLD_TORCH and 20 in covered)
    for size in covered:
        assert captured(module, sample(size), any_size).equals(captured(module, sample(size))), size


@pytest.mark.parametrize("name", ["bert", "resnet18", "fft", "weight_norm", "alias_outputs"])
def test_the_same_step_at_each_batch(name: str) -> None:
    """The tests' models, of another batch size."""
    case = get_case(name)
    module = case.build()
    args, kwargs = case.sample(0)
    batch = next(len(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor))

    def resized(x: Any, more: int) -> Any:
        whole = isinstance(x, Tensor) and x.ndim and len(x) == batch
        return torch.cat([x, x[:more]]) if whole else x

    def tensors(more: int) -> Any:
        return collect(
            module,
            tuple(resized(x, more) for x in args),
            {key: resized(x, more) for key, x in kwargs.items()},
        )

    def example(found: Any, more: int) -> Example:
        return Example.of(tensors(more), found, translate(found, tensors(more), name="test"))

    first, second = tensors(1), tensors(2)
    direct = capture(module, first)
    free = {
        (i, d)
        for i, (one, other) in enumerate(zip(first.inputs, second.inputs, strict=True))
        for d in range(one.ndim)
        if one.shape[d] != other.shape[d]
    }
    any_size = capture_any_size(
        module,
        second,
        free,
        differentiate=None,
        call=module.forward,
        is_standard=always_standard,
        as_if_compiling=direct.as_if_compiling,
    )
    assert example(any_size.captured(first), 1).equals(example(direct, 1))


def test_a_branch_on_the_size() -> None:
    """A capture holds on its side of the branch."""
    module = Branches()
    any_size = traced(module, sequences(10), {(0, 1)})
    assert captured(module, sequences(23), any_size).equals(captured(module, sequences(23)))
    with pytest.raises(SizeNotCovered):
        captured(module, sequences(24), any_size)


class Keyed(nn.Module):
    """Another layer for one length, found by a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"16": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        name = f"{x.shape[1]}"
        return self.layers[name if name in self.layers else "other"](x).tanh().square().mean()


class Rounded(nn.Module):
    """A comparison that is false without rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        more = length * 0.1 * 10 > length
        return (self.layer(x) * (2 if more else 1)).tanh().square().mean()


class Strided(nn.Module):
    """It reads a stride, which for a dimension of size 1 may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * x.stride(1)).tanh().square().mean()


def test_a_size_that_becomes_data() -> None:
    """A capture holds for that size alone."""
    module = Constant()
    any_size = traced(module, sequences(10), {(0, 1)})
    assert captured(module, sequences(10), any_size).equals(captured(module, sequences(10)))
    with pytest.raises(SizeNotCovered):
        captured(module, sequences(11), any_size)


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_that_torch_takes_as_constants(size: int) -> None:
    """They are captured by themselves."""
    module = Branches()
    any_size = traced(module, sequences(10), {(0, 1)})
    with pytest.raises(SizeNotCovered):
        captured(module, sequences(size), any_size)


def test_a_forward_that_changes_its_module() -> None:
    """It is not shared: each capture has to see the change."""

    class Counts(Branches):
        seen: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.shape
            return super().forward(x)

    with pytest.raises(SizeNotCovered, match="changes its module"):
        traced(Counts(), sequences(10), {(0, 1)})


def test_names_are_those_of_the_examples() -> None:
    """Plans refer to operators by names."""
    module = Attention()
    any_size = traced(module, sequences(20), {(0, 1)})
    mine, theirs = captured(module, sequences(20), any_size).names, captured(module, sequences(20)).names
    assert mine.keys() == theirs.keys()
    assert mine != theirs  # sizes took names of the trace
    names = {name: theirs[place] for place, name in mine.items()}
    renamed = AnySize(joint=any_size.joint, result=any_size.result, sizes=any_size.sizes, names=names)
    assert captured(module, sequences(33), renamed).names == theirs


# -- planned modules


def steps(planned: PlannedModule, original: nn.Module, inputs: list[Tensor]) -> None:
    """The same output, gradients and buffers at each input, by a plan."""
    for x in inputs:
        assert_planned_step(original, planned, x)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each size that is captured by itself."""
    found: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return capture(*args, **kwargs)

    monkeypatch.setattr(pipeline, "capture", counted)
    return found


class Dropped(nn.Module):
    """Masks that may be kept in bits, and chains: ways that plans name by operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(nn.functional.dropout(layer(x) * x.shape[1], 0.2))
            x = 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x.pow(3))))
        return x.square().mean()


def planned_as(module: nn.Module, x: Tensor, folder: Path) -> PlannedModule:
    _, planned = pair(copy.deepcopy(module), folder, x, platform=Roofline(), share_captures=True)
    return planned


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("name", SIZED)
def test_later_sizes_are_not_captured(name: str, device: str, tmp_path: Path, alone: list[int]) -> None:
    """With the bits of the original at each."""
    torch.manual_seed(0)
    make, sample, _ = SIZED[name]
    module = make().to(device)
    planned = planned_as(module, sample(40).to(device), tmp_path)
    sizes = [40, 36, 52, 44, 60, 48, 33, 72, 57]
    steps(planned, module, [sample(size).to(device) for size in sizes])
    assert len(alone) == FEWEST_ALONE or (OLD_TORCH and FEWEST_ALONE < len(alone) <= len(sizes))
    before = len(alone)
    again = [sample(size)[:1].to(device) for size in (40, 36)]  # another batch, of which nothing is known
    steps(planned, module, again)
    assert len(alone) == before + len(again)


def test_later_sizes_have_the_same_switches(tmp_path: Path, alone: list[int]) -> None:
    """By name, as plans refer to them."""
    torch.manual_seed(0)
    module = Dropped()
    inputs = [torch.randn(8, size, 256) for size in (128, 160, 140, 136, 144, 130, 150)]
    planned = planned_as(module, inputs[0], tmp_path)
    found = []
    for x in inputs:
        steps(planned, module, [x])
        found.append(planned.graph.switches)
    assert len(alone) == FEWEST_ALONE
    assert len(found[0]) > 1
    assert len(set(found)) == 1


@pytest.mark.parametrize("module", [Keyed(), Rounded()])
def test_what_torch_does_not_record_is_not_shared(
    module: nn.Module, tmp_path: Path, alone: list[int]
) -> None:
    """A size as text, and a fraction: each size is captured."""
    planned = planned_as(module, sequences(10), tmp_path)
    sizes = [10, 11, 13, 15, 17, 18, 16, 12, 24, 23, 14]
    steps(planned, module, [sequences(size) for size in sizes])
    assert len(alone) == len(sizes)


def test_strides_of_a_size_of_one(tmp_path: Path) -> None:
    """Two inputs of one shape may differ in them, and a forward may read them."""
    module = Strided()
    usual = [torch.randn(2, 1, size, WIDTH) for size in (10, 11, 12, 13, 14, 15, 16)]
    other = torch.randn(2, 20, 1, WIDTH).transpose(1, 2)
    assert other.is_contiguous()
    assert other.stride() != torch.empty(other.shape).stride()
    for inputs in ([*usual, other], [other, *usual]):
        steps(planned_as(module, inputs[0], tmp_path), module, inputs)


def test_an_attribute_that_only_another_branch_reads(tmp_path: Path, alone: list[int]) -> None:
    """A capture that read it is not used once it has changed."""

    class Scaled(Branches):
        factor = 2.0

        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            return result if x.shape[1] < 24 else result * self.factor

    module = Scaled()
    planned = planned_as(module, sequences(30), tmp_path)
    steps(planned, module, [sequences(size) for size in (30, 31, 32, 33, 34, 35, 36, 10, 10)])
    planned.factor = module.factor = 3.0
    steps(planned, module, [sequences(size) for size in (40, 11, 41, 42, 12, 43, 44, 45, 46)])


def test_a_capture_stays_when_another_size_changes_too(tmp_path: Path, alone: list[int]) -> None:
    """Lengths of one batch, then of another: both are shared."""
    module = Attention()
    planned = planned_as(module, sequences(20), tmp_path)
    lengths = (20, 21, 22, 23, 24, 25, 26)
    batches: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, lambda x: torch.cat([x, x[:1]]))
    for number, batch in enumerate(batches, 1):
        steps(planned, module, [batch(sequences(length)) for length in lengths])
        assert len(alone) == number * FEWEST_ALONE
    steps(planned, module, [batch(sequences(40)) for batch in batches])
    assert len(alone) == 2 * FEWEST_ALONE


def test_a_size_of_one_costs_no_try(tmp_path: Path, alone: list[int]) -> None:
    """It is captured alone, and the next size brings the capture for all."""
    module = Branches()
    planned = planned_as(module, sequences(10), tmp_path)
    steps(planned, module, [sequences(size) for size in (10, 11, 12, 13, 14, 1, 15, 16, 17)])
    assert len(alone) == FEWEST_ALONE + 1


def test_sizes_with_other_branches_are_captured(tmp_path: Path, alone: list[int]) -> None:
    """Both layers get their gradients."""
    torch.manual_seed(0)
    module = Branches()
    planned = planned_as(module, sequences(10), tmp_path)
    steps(planned, module, [sequences(size) for size in (10, 11, 12, 13, 14, 15, 30, 16, 31)])
    assert len(alone) == FEWEST_ALONE + 2


def test_a_change_of_the_module_is_noticed(tmp_path: Path, alone: list[int]) -> None:
    """What a shared capture has read is guarded as by any other."""
    torch.manual_seed(0)

    class Scaled(Branches):
        factor = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    module = Scaled()
    planned = planned_as(module, sequences(10), tmp_path)
    steps(planned, module, [sequences(size) for size in (10, 11, 12, 13, 14, 15, 16)])
    assert len(alone) == FEWEST_ALONE
    planned.factor = module.factor = 3.0
    steps(planned, module, [sequences(size) for size in (15, 16, 17)])


@pytest.mark.parametrize("module", [nn.LSTM(WIDTH, WIDTH, batch_first=True), Constant()])
def test_what_cannot_be_shared_is_captured(module: nn.Module, tmp_path: Path, alone: list[int]) -> None:
    """A recurrent layer, whose kernel knows no symbols, and a size that becomes data."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = module

        def forward(self, x: Tensor) -> Tensor:
            found = self.layer(x)
            return (found[0] if isinstance(found, tuple) else found).square().mean()

    torch.manual_seed(0)
    original = Wrapped()
    planned = planned_as(original, sequences(10), tmp_path)
    sizes = (10, 11, 12, 13, 14, 15, 16)
    steps(planned, original, [sequences(size) for size in sizes])
    assert len(alone) == len(sizes)
