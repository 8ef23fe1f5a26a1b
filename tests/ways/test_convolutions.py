"""The backward of a convolution in two ops: the bits of the one call, and its memory."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule, allocator_peak, step_graph
from remat_executor.torch_private.convolutions import onednn_takes
from remat_executor.ways.convolutions import convolutions, input_gradient, weight_gradient
from tests.helpers.bits import with_special
from tests.helpers.planners import all_switched, save_all
from tests.helpers.ways import assert_exact, assert_same, three_steps, with_channels_last

aten = torch.ops.aten
ANY = partial(convolutions, least_nbytes=0)
SIZES = {1: (13,), 2: (9, 7), 3: (5, 7, 6)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def halves(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any, bias: bool) -> tuple[Tensor, ...]:
    shape = [gradient.shape[1]]
    (made,) = input_gradient(gradient, weight, tuple(x.shape), x.stride(), shape, *rest)
    return made, *weight_gradient(gradient, x, weight, shape, *rest, (False, True, bias))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_halves_give_the_bits_of_the_call(dtype: torch.dtype, dims: int, threads: int) -> None:
    """Strides, paddings, dilations, groups, transposed; images, channels last; batches, none; no bias."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    shapes = [
        (1, 1, 1, 1, 1, 16),
        (3, 2, 1, 1, 1, 16),
        (3, 1, 0, 2, 8, 8),
        (3, 2, 1, 1, 2, 24),
        (2, 2, 0, 1, 1, 4),
    ]
    for (size, stride, padding, dilation, groups, outs), transposed, last, rows, bias in itertools.product(
        shapes, (False, True), (False, True), (0, 2), (False, True)
    ):
        x = with_special(torch.randn(rows, 8, *SIZES[dims]).to(dtype), 0.02)
        around = (8, outs // groups) if transposed else (outs, 8 // groups)
        weight = torch.randn(*around, *[size] * dims).to(dtype)
        if last and dims in LAST:
            x, weight = (t.to(memory_format=LAST[dims]) for t in (x, weight))
        rest = ([stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups)
        gradient = with_special(torch.randn_like(aten.convolution(x, weight, None, *rest)), 0.02)
        wanted = aten.convolution_backward(gradient, x, weight, [outs], *rest, [True, True, bias])
        found = halves(gradient, x, weight, *rest, bias=bias)
        assert len(found) == 2 + bias
        for one, other in zip(wanted, found, strict=False):
            assert_same(one, other)
    torch.set_num_threads(before)


class Net(nn.Module):
    """A convolution of each kind that `kinds` names, and a head."""

    def __init__(self, *kinds: dict[str, Any], dims: int = 2) -> None:
        super().__init__()
        plain = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        back = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
        made = [
            (back if kind.pop("transposed", False) else plain)(**{"kernel_size": 3, "padding": 1} | kind)
            for kind in (dict(kind) for kind in kinds)
        ]
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


PLAIN = {"in_channels": 6, "out_channels": 6}
LARGER = {"in_channels": 6, "out_channels": 6, "stride": 2}  # the input is larger than the gradient
CASES = {
    "plain": ([PLAIN, PLAIN], 2, 2),
    "no bias": ([PLAIN | {"bias": False}] * 2, 2, 2),
    "groups": ([PLAIN | {"groups": 2}, PLAIN | {"groups": 6}], 2, 2),
    "dilation": ([PLAIN | {"dilation": 2, "padding": 2}, PLAIN], 2, 2),
    "strides": ([LARGER, LARGER | {"out_channels": 3}], 2, 2),
    "one pixel": ([PLAIN | {"kernel_size": 1, "padding": 0}, PLAIN], 2, 2),
    "transposed": ([PLAIN, PLAIN | {"transposed": True, "stride": 2}], 2, 2),
    "transposed, smaller": ([PLAIN, PLAIN | {"transposed": True, "out_channels": 2}], 2, 1),
    "one dimension": ([PLAIN, PLAIN], 1, 2),
    "one dimension, smaller": ([PLAIN, LARGER], 1, 2),
    "three dimensions": ([PLAIN, LARGER | {"transposed": False}], 3, 2),
}
WIDTHS = {1: (11,), 2: (9, 10), 3: (4, 6, 5)}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_models_of_convolutions(case: str, dtype: torch.dtype, last: bool) -> None:
    """Three steps each; the gradient of the input is wanted too."""
    kinds, dims, switches = CASES[case]
    torch.manual_seed(0)
    model, x = Net(*kinds, dims=dims).to(dtype), torch.randn(3, 6, *WIDTHS[dims]).to(dtype)
    if last and dims in LAST:
        model, x = with_channels_last(model, x)
    assert_exact(model, (x.requires_grad_(),), [ANY], switches=switches)


def test_what_no_gradient_needs_is_not_made() -> None:
    """The first input needs no gradient: one half. A frozen weight: one half too, which reads no input."""
    torch.manual_seed(0)
    x = torch.randn(3, 6, 9, 10)
    for frozen, switches in ([], 2), ([2], 2), ([1, 2], 2), ([0], 2):
        model = Net(PLAIN, PLAIN, PLAIN)
        for i in frozen:
            model.layers[i].requires_grad_(False)
        assert_exact(model, (x,), [ANY], switches=switches - (0 in frozen))
    model = Net(PLAIN, PLAIN)
    model.layers[1].requires_grad_(False)
    graph = step_graph(model, (x,), {}, ways=[ANY])
    (changed,) = [op for op in graph.ops if op.alternatives]
    one, other = (len(run.inputs) for run in changed.implementations)
    assert one == other + 1


def test_an_empty_batch() -> None:
    torch.manual_seed(0)
    assert_exact(Net(PLAIN, LARGER), (torch.randn(0, 6, 9, 10).requires_grad_(),), [ANY], switches=2)


def test_small_inputs_and_other_libraries_have_no_way() -> None:
    """A wide double convolution whose input is larger than its gradient does not run in oneDNN."""
    small, x = Net(PLAIN, PLAIN), torch.randn(3, 6, 9, 10)
    assert not PlannedModule(small, (x,), {}, save_all, ways=[convolutions]).graph.switches
    wide, x = Net(PLAIN, LARGER).double(), torch.randn(3, 6, 9, 10).double()
    assert not PlannedModule(wide, (x,), {}, save_all, ways=[ANY]).graph.switches
    weight = wide.layers[1].weight
    arguments = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    assert not onednn_takes(x, weight, [6], *arguments)
    assert onednn_takes(x.float(), weight.float(), [6], *arguments)


@pytest.mark.parametrize(("x_last", "weight_last"), [(False, True), (True, False)])
@pytest.mark.parametrize("dims", [2, 3])
def test_an_input_in_another_layout_than_the_weight(dims: int, x_last: bool, weight_last: bool) -> None:
    """The call copies such an input, so that nothing without memory may stand in for it."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, *SIZES[dims]), torch.randn(4, 8, *[3] * dims)
    x = x.to(memory_format=LAST[dims]) if x_last else x
    weight = weight.to(memory_format=LAST[dims]) if weight_last else weight
    rest = ([1] * dims, [1] * dims, [1] * dims, False, [0] * dims, 1)
    assert onednn_takes(x, weight, [4], *rest) == x_last
    gradient = torch.randn_like(aten.convolution(x, weight, None, *rest))
    wanted = aten.convolution_backward(gradient, x, weight, [4], *rest, [True, True, True])
    for one, other in zip(wanted, halves(gradient, x, weight, *rest, bias=True), strict=True):
        assert_same(one, other)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # of the flag, on any CPU
def test_a_flag_set_after_planning_is_seen_at_run_time() -> None:
    """Without oneDNN another kernel reads the input's memory: then it exists."""
    torch.manual_seed(0)
    gradient, weight = torch.randn(3, 6, 5, 5), torch.randn(6, 6, 3, 3)
    rest = ((2, 2), (1, 1), (1, 1), False, (0, 0), 1)
    x = torch.randn(3, 6, 9, 10)
    with torch.backends.mkldnn.flags(enabled=False):
        wanted = aten.convolution_backward(gradient, x, weight, [6], *rest, [True, False, False])[0]
        (made,) = input_gradient(gradient, weight, tuple(x.shape), x.stride(), [6], *rest)
    assert_same(wanted, made)


@pytest.mark.parametrize("outs", [32, 8])
def test_the_peak_is_predicted_and_below_that_of_the_call(outs: int) -> None:
    """In the allocator; with few outputs, what stands in for the input had memory before the result has."""
    torch.manual_seed(0)
    kinds = ({"in_channels": 4, "out_channels": 32}, {"in_channels": 32, "out_channels": outs})
    model, x = Net(*kinds), torch.randn(4, 4, 64, 64)
    peaks = []
    for planner in (save_all, all_switched()):
        module = PlannedModule(copy.deepcopy(model), (x,), {}, planner, ways=[ANY])
        three_steps(module, (x,))
        module.zero_grad()
        record = allocator_peak(lambda module=module: module(x).backward())
        assert record.peak_nbytes == module.plan.peak_nbytes
        peaks.append(record.peak_nbytes)
    assert peaks[1] <= peaks[0] - 4 * x.nbytes


@pytest.mark.parametrize("seed", range(24))
def test_random_convolutions(seed: int) -> None:
    torch.manual_seed(seed)

    def draw(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), ()))]

    dims, channels, kinds = draw(1, 2, 2, 3), draw(4, 8, 12), []
    for _ in range(3):
        made, groups, size = draw(4, 8, 16), draw(1, 2, 4), draw(1, 3)
        kind = {"in_channels": channels, "out_channels": made, "groups": groups, "kernel_size": size}
        kind |= {"stride": draw(1, 1, 2), "padding": size // 2, "bias": draw(True, False)}
        kinds.append(kind | {"transposed": draw(False, False, True)})
        channels = made
    dtype = draw(torch.float32, torch.bfloat16, torch.float16, torch.float64)
    model = Net(*kinds, dims=dims).to(dtype)
    x = torch.randn(draw(1, 3), kinds[0]["in_channels"], *[draw(9, 12) for _ in range(dims)]).to(dtype)
    if dims in LAST and draw(True, False):
        model, x = with_channels_last(model, x)
    x = with_special(x, draw(0.0, 0.0, 0.01)).requires_grad_(draw(True, False))
    found = PlannedModule(copy.deepcopy(model), (x,), {}, save_all, ways=[ANY]).graph.switches
    assert_exact(model, (x,), [ANY], switches=len(found))
