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
from remat_executor.costs import annotate
from remat_executor.costs.cache import MeasuredCost
from remat_executor.ways.convolutions import (
    ONE_KERNEL,
    convolutions,
    kernel_of,
    transposed_gradient,
    weight_gradient,
)
from remat_graph import noremat_peak_nbytes, specialize, switches_on
from remat_solvers import Problem, get_solver, solve_switches
from tests.helpers.bits import with_special
from tests.helpers.planners import all_switched, save_all
from tests.helpers.ways import assert_exact, assert_same, three_steps, with_channels_last

aten = torch.ops.aten
ANY = partial(convolutions, least_nbytes=0)
SIZES = {1: (13,), 2: (9, 7), 3: (5, 7, 6)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
SUPPORTED = {  # oneDNN has float16 on few processors
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
HERE = [dtype for dtype in ONE_KERNEL if SUPPORTED[dtype]]


def halves(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any, bias: bool) -> tuple[Tensor | None, ...]:
    """The gradients of input (None if there is no way), weight and bias."""
    shape = [gradient.shape[1]]
    kernel = kernel_of(gradient, x, weight, *rest)
    # The result of the call is channels last if the weight is.
    last = kernel is transposed_gradient and weight.ndim > 3 and not weight.is_contiguous()
    laid_out = x.contiguous(memory_format=LAST[x.ndim - 2]) if last else x
    made = (
        None
        if kernel is None
        else kernel(gradient, weight, tuple(x.shape), laid_out.stride(), shape, *rest)[0]
    )
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
            if other is not None:
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
CASES = {  # dimensions, ways in float32 and in bfloat16
    "plain": ([PLAIN, PLAIN], 2, 2, 2),
    "no bias": ([PLAIN | {"bias": False}] * 2, 2, 2, 2),
    "groups": ([PLAIN | {"groups": 2}, PLAIN | {"groups": 6}], 2, 2, 2),
    "dilation": ([PLAIN | {"dilation": 2, "padding": 2}, PLAIN], 2, 2, 2),
    "strides": ([LARGER, LARGER | {"out_channels": 3}], 2, 0, 2),
    "one pixel": ([PLAIN | {"kernel_size": 1, "padding": 0}, PLAIN], 2, 2, 2),
    "transposed": ([PLAIN, PLAIN | {"transposed": True, "stride": 2}], 2, 2, 2),
    "transposed, smaller": ([PLAIN, PLAIN | {"transposed": True, "out_channels": 2}], 2, 1, 1),
    "one dimension": ([PLAIN, PLAIN], 1, 2, 2),
    "one dimension, smaller": ([PLAIN, LARGER], 1, 1, 2),
    "three dimensions": ([PLAIN, LARGER | {"transposed": False}], 3, 1, 2),
}
WIDTHS = {1: (11,), 2: (9, 10), 3: (4, 6, 5)}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_models_of_convolutions(case: str, dtype: torch.dtype, last: bool) -> None:
    """Three steps each; the gradient of the input is wanted too."""
    kinds, dims, *switches = CASES[case]
    torch.manual_seed(0)
    model, x = Net(*kinds, dims=dims).to(dtype), torch.randn(3, 6, *WIDTHS[dims]).to(dtype)
    if last and dims in LAST:
        model, x = with_channels_last(model, x)
    assert_exact(model, (x.requires_grad_(),), [ANY], switches=switches[dtype is torch.bfloat16])


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


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # of the flag, on any CPU
def test_small_inputs_and_other_kernels_have_no_way() -> None:
    """Nor an input that is larger than its gradient, but in the 16-bit types of oneDNN."""
    small, x = Net(PLAIN, PLAIN), torch.randn(3, 6, 9, 10)
    assert not PlannedModule(small, (x,), {}, save_all, ways=[convolutions]).graph.switches
    for dtype, onednn, count in (
        (torch.float64, True, 0),
        (torch.float32, True, 0),
        (torch.float16, True, int(SUPPORTED[torch.float16])),
        (torch.bfloat16, True, int(SUPPORTED[torch.bfloat16])),
        (torch.bfloat16, False, 0),
    ):
        wide = Net(PLAIN, LARGER).to(dtype)
        with torch.backends.mkldnn.flags(enabled=onednn):
            graph = step_graph(wide, (x.to(dtype),), {}, ways=[ANY])
        assert count == len(graph.switches), (dtype, onednn)


@pytest.mark.parametrize(("x_last", "weight_last"), [(False, True), (True, False)])
@pytest.mark.parametrize("dims", [2, 3])
def test_an_input_in_another_layout_than_the_weight(dims: int, x_last: bool, weight_last: bool) -> None:
    """The result has the layout that the call gives it."""
    torch.manual_seed(0)
    x, weight = (t.bfloat16() for t in (torch.randn(2, 8, *SIZES[dims]), torch.randn(4, 8, *[3] * dims)))
    x = x.to(memory_format=LAST[dims]) if x_last else x
    weight = weight.to(memory_format=LAST[dims]) if weight_last else weight
    rest = ([1] * dims, [1] * dims, [1] * dims, False, [0] * dims, 1)
    gradient = torch.randn_like(aten.convolution(x, weight, None, *rest))
    assert kernel_of(gradient, x, weight, *rest) is transposed_gradient
    wanted = aten.convolution_backward(gradient, x, weight, [4], *rest, [True, True, True])
    for one, other in zip(wanted, halves(gradient, x, weight, *rest, bias=True), strict=True):
        assert_same(one, other)


@pytest.mark.skipif(not HERE, reason="oneDNN has no 16-bit types on this processor")
@pytest.mark.parametrize("seed", range(40))
def test_random_transposed_convolutions(seed: int) -> None:
    """In 16-bit types, where the input is larger than the gradient."""
    torch.manual_seed(seed)

    def draw(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), ()))]

    dims, groups, size, dtype = draw(1, 2, 2, 3), draw(1, 2, 8), draw(1, 3, 5), draw(*HERE)
    channels, outs, last = draw(8, 24), draw(8, 16), draw(False, True)
    rest = ([draw(2, 3)] * dims, [draw(0, size // 2)] * dims, [draw(1, 2)] * dims, False, [0] * dims, groups)
    x, weight = (
        torch.randn(draw(1, 3), channels, *[draw(11, 14)] * dims),
        torch.randn(outs, channels // groups, *[size] * dims),
    )
    x, weight = with_special(x, 0.01).to(dtype), weight.to(dtype)
    if last and dims in LAST:
        x, weight = (t.to(memory_format=LAST[dims]) for t in (x, weight))
    gradient = with_special(torch.randn_like(aten.convolution(x, weight, None, *rest)), draw(0.0, 0.01))
    assert kernel_of(gradient, x, weight, *rest) is transposed_gradient
    wanted = aten.convolution_backward(gradient, x, weight, None, *rest, [True, False, False])[0]
    (made,) = transposed_gradient(gradient, weight, tuple(x.shape), x.stride(), None, *rest)
    assert_same(wanted, made)


@pytest.mark.parametrize(("outs", "dtype"), [(32, torch.float32), (8, torch.bfloat16)])
def test_the_peak_is_predicted(outs: int, dtype: torch.dtype) -> None:
    """In the allocator; in float32 it is below that of the call. In bfloat16 oneDNN's own memory is most."""
    torch.manual_seed(0)
    kinds = ({"in_channels": 4, "out_channels": 32}, {"in_channels": 32, "out_channels": outs})
    model, x = Net(*kinds).to(dtype), torch.randn(4, 4, 64, 64).to(dtype)
    peaks = []
    for planner in (save_all, all_switched()):
        module = PlannedModule(copy.deepcopy(model), (x,), {}, planner, ways=[ANY])
        three_steps(module, (x,))
        module.zero_grad()
        record = allocator_peak(lambda module=module: module(x).backward())
        assert record.peak_nbytes == module.plan.peak_nbytes
        peaks.append(record.peak_nbytes)
    if dtype is torch.float32:
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


def test_halves_are_not_taken_to_be_faster_than_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where noise makes their measured times less than the call's; a plan that could use them does not."""

    def noisy(requests: Any, *_: Any, **__: Any) -> dict[str, MeasuredCost]:
        times = {key: 3e-3 if key.startswith("aten.convolution_backward") else 1e-3 for key in requests}
        assert 3e-3 in times.values()
        return {
            key: MeasuredCost(time_s=time_s, workspace_nbytes=0, output_nbytes=0)
            for key, time_s in times.items()
        }

    monkeypatch.setattr(annotate, "measure", noisy)
    model = nn.Sequential(*(nn.Conv2d(count, 4, 3, padding=1) for count in (3, 4, 4, 4, 4)))
    graph = step_graph(model, (torch.randn(2, 3, 12, 12, requires_grad=True),), {}, ways=[ANY])
    assert len(graph.switches) == 5
    off, on = (specialize(graph, each).graph for each in ((), graph.switches))
    assert on.time_s == pytest.approx(off.time_s)
    assert len(on.ops) == len(off.ops) + 5
    found = solve_switches(get_solver("auto", moves=2000), Problem(graph, noremat_peak_nbytes(off)))
    assert found.schedule is not None
    assert switches_on(graph, found.schedule) == frozenset()
