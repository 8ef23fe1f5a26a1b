"""The loss head by chunks of rows: eager's bits, and a fraction of its memory."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import BadInput, PlannedModule, estimated_graph, step_graph
from remat_executor.costs import measure as measuring
from remat_executor.costs.cache import MeasuredCost
from remat_executor.costs.failures import MeasureError
from remat_executor.ways.chunked_loss import chunked_gradient, chunked_gradient_over, chunked_loss
from remat_executor.ways.loss_head import loss_head
from remat_facade import Hiremate, limit_memory
from remat_graph import Roofline, noremat_peak_nbytes, simulate
from remat_solvers import InfeasibleBudget, min_budget
from tests.helpers.models import import_transformers
from tests.helpers.planners import all_switched, save_all
from tests.helpers.small_llama import small_llama

aten = torch.ops.aten
SMALL = partial(loss_head, least_nbytes=0)
MEAN, SUM, NONE = 1, 2, 0
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor, so that NaN equals NaN and zeros have signs."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def assert_same(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert one.stride() == other.stride()
    assert one.dtype == other.dtype
    assert torch.equal(bits(one), bits(other))


def eager(
    logits: Tensor, target: Tensor, reduction: int, ignored: int, tangent: Tensor, half_to_float: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, total weight and the logits' gradient by the calls that are captured."""
    wide = logits if half_to_float or logits.dtype is torch.float64 else logits.float()
    outputs = aten._log_softmax(wide.view(len(target), logits.shape[-1]), 1, half_to_float)
    loss, total = aten.nll_loss_forward(outputs, target, None, reduction, ignored)
    gradient = aten.nll_loss_backward(tangent, outputs, target, None, reduction, ignored, total)
    dtype = logits.dtype if half_to_float else outputs.dtype
    made = aten._log_softmax_backward_data(gradient, outputs, 1, dtype)
    return loss, total, made.view(logits.shape).to(logits.dtype)


def chunked(
    logits: Tensor, target: Tensor, reduction: int, ignored: int, tangent: Tensor, *, rows: int, over: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by chunks."""
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    shape = (len(target), logits.shape[-1])
    constants = ((), False, shape, reduction, ignored, dtype, False, rows)
    logits = logits.clone()
    before = logits.clone()
    loss, total = chunked_loss(logits, target, *constants)
    assert_same(before, logits)
    gradient = chunked_gradient_over if over else chunked_gradient
    made = gradient(tangent, logits, target, total, *constants)
    assert (made is logits) == over
    return loss, total, made


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_give_the_bits_of_the_calls(dtype: torch.dtype, reduction: int) -> None:
    """Also where rows are no multiple of a chunk, or there is one row, or none."""
    torch.manual_seed(0)
    for rows, columns, ignored in ((40, 257, -100), (33, 50, 3), (1, 7, -1), (16, 1, -100), (0, 5, -100)):
        logits = (torch.randn(rows, columns) * 5).to(dtype)
        target = torch.randint(0, columns, (rows,))
        target[::3] = ignored
        shape = (rows,) if reduction == NONE else ()
        tangent = torch.randn(shape).to(torch.float64 if dtype is torch.float64 else torch.float32)
        wanted = eager(logits, target, reduction, ignored, tangent, False)
        for size, over in itertools.product((16, 48), (False, True)):
            found = chunked(logits, target, reduction, ignored, tangent, rows=size, over=over)
            for one, other in zip(wanted, found, strict=True):
                assert_same(one, other)


@pytest.mark.parametrize("reduction", [MEAN, SUM])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_and_rows_without_a_class(dtype: torch.dtype, reduction: int) -> None:
    """NaN, infinities, zeros of both signs; all rows ignored, whose mean is NaN."""
    torch.manual_seed(1)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -3e38, 88.0])
    logits = special[torch.randint(0, len(special), (48, 33))]
    logits[::5] = torch.randn(33)
    logits[7] = -float("inf")
    target = torch.randint(0, 33, (48,))
    tangent = torch.ones((), dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    for ignored in (-100, 4):
        for each in (target, torch.full_like(target, ignored)):
            wanted = eager(logits.to(dtype), each, reduction, ignored, tangent, False)
            found = chunked(logits.to(dtype), each, reduction, ignored, tangent, rows=16, over=True)
            for one, other in zip(wanted, found, strict=True):
                assert_same(one, other)


def test_a_target_that_is_no_class_is_an_error_as_before() -> None:
    """With the words of the original call."""
    logits = torch.randn(32, 5)
    for wrong in (5, -1):
        target = torch.zeros(32, dtype=torch.int64)
        target[20] = wrong
        with pytest.raises(IndexError) as ours:
            chunked_loss(logits, target, (), False, (32, 5), MEAN, -100, torch.float32, False, 16)
        with pytest.raises(IndexError) as torchs:
            F.cross_entropy(logits, target)
        assert str(ours.value) == str(torchs.value)


class Head(nn.Module):
    """A linear layer and its loss; `logits` returns the logits too."""

    def __init__(self, classes: int, **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, classes)
        self.logits = options.pop("logits", False)
        self.scale = options.pop("scale", None)
        self.wide = options.pop("wide", False)
        self.options = options

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.linear(x)
        if self.scale:
            logits = torch.tanh(logits / self.scale) * self.scale
        read = logits.float() if self.wide else logits
        loss = F.cross_entropy(read.flatten(0, -2), target.flatten(), **self.options)
        return (loss, logits) if self.logits else loss


def steps(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Losses, gradients and buffers of three steps."""
    found: list[Tensor] = []
    for seed in range(3):
        model.zero_grad()
        torch.manual_seed(seed)
        made = model(*inputs, **kwargs)
        loss = made["loss"] if isinstance(made, dict) else made[0] if isinstance(made, tuple) else made
        loss.backward() if loss.ndim == 0 else loss.sum().backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def assert_exact(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    switches: int,
) -> None:
    """Plans with the ways on, without and with repeats, give eager's bits."""
    wanted = steps(copy.deepcopy(model), inputs, kwargs)
    for planner in (all_switched(), all_switched(1)):
        module = PlannedModule(copy.deepcopy(model), inputs, kwargs, planner, ways=[SMALL])
        assert switches == len(module.graph.switches)
        found = steps(module, inputs, kwargs)
        assert len(wanted) == len(found)
        for one, other in zip(wanted, found, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"ignore_index": 3},
        {"logits": True},
        {"wide": True},
        {"wide": True, "logits": True},
        {"scale": 30.0},
        {"reduction": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_a_linear_layer(dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Head(37, **options).to(dtype)
    x, target = torch.randn(3, 20, 8).to(dtype), torch.randint(0, 37, (3, 20))
    target[0, :5] = options.get("ignore_index", -100)
    assert_exact(model, (x, target), {}, 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smooth", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_classes_and_label_smoothing(
    dtype: torch.dtype, smooth: float, weighted: bool, reduction: str
) -> None:
    """Also where a chunk has one row."""
    torch.manual_seed(0)
    for rows in (60, 49):
        options: dict[str, Any] = {"label_smoothing": smooth, "reduction": reduction, "ignore_index": 3}
        if weighted:
            options["weight"] = torch.rand(37)
        model = Head(37, wide=True, **options)
        model.linear.to(dtype)
        target = torch.randint(0, 37, (rows,))
        target[:5] = 3
        inputs = (torch.randn(rows, 8).to(dtype), target)
        assert_exact(model, inputs, {}, 1)


class Images(nn.Module):
    """A class for each point of an image."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv, self.options = nn.Conv2d(3, 21, 1), options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.conv(x), target, **self.options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "ignore_index": 2},
        {"reduction": "none"},
        {"weight": torch.rand(21)},
        {"weight": torch.rand(21), "reduction": "sum", "label_smoothing": 0.2},
        {"label_smoothing": 0.1},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_images(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Segmentation: chunks of images."""
    torch.manual_seed(0)
    options = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
    for size in ((9, 7), (16, 16), (1, 1)):
        model = Images(**options).to(dtype)
        x, target = torch.randn(18, 3, *size).to(dtype), torch.randint(0, 21, (18, *size))
        assert_exact(model, (x, target), {}, 1)


class ThreeDimensions(nn.Module):
    """A log-softmax over the last of three dimensions, whose rows a loss reads."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.linear, self.detached = nn.Linear(8, 37), detached

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.linear(x)
        found = F.log_softmax((logits.detach() if self.detached else logits).float(), -1)
        loss = F.nll_loss(found.flatten(0, -2), target.flatten())
        return (logits.square().mean(), loss) if self.detached else loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("detached", [False, True])
def test_a_log_softmax_of_three_dimensions_and_a_loss_without_a_gradient(
    dtype: torch.dtype, detached: bool
) -> None:
    """The second loss is only looked at."""
    torch.manual_seed(0)
    model = ThreeDimensions(detached).to(dtype)
    inputs = torch.randn(3, 20, 8).to(dtype), torch.randint(0, 37, (3, 20))
    assert_exact(model, inputs, {}, 1)
    if detached:
        module = PlannedModule(copy.deepcopy(model), inputs, {}, all_switched(), ways=[SMALL])
        assert_same(model(*inputs)[1], module(*inputs)[1])


class ReturnsTheUpcast(nn.Module):
    """Float32 logits of bfloat16 ones, read by the loss and by the caller or a z-loss."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.linear, self.returned = nn.Linear(8, 37), returned

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.linear(x).float()
        loss = F.cross_entropy(logits, target)
        return (loss, logits) if self.returned else loss + logits.logsumexp(1).square().mean()


@pytest.mark.parametrize("returned", [False, True])
def test_the_upcast_stays_where_something_else_reads_it(returned: bool) -> None:
    """The way is on it; float32 logits that the caller holds are not written over."""
    torch.manual_seed(0)
    model = ReturnsTheUpcast(returned).bfloat16()
    inputs = torch.randn(60, 8).bfloat16(), torch.randint(0, 37, (60,))
    assert_exact(model, inputs, {}, 1)


class Twice(nn.Module):
    """Two heads on one layer, and a log-softmax or logits that something else reads."""

    def __init__(self, also: str) -> None:
        super().__init__()
        self.first, self.second, self.also = nn.Linear(8, 40), nn.Linear(8, 23), also

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        wide = self.first(x).float()
        found = F.log_softmax(wide, 1)
        loss = F.nll_loss(found, target) + F.cross_entropy(self.second(x), target % 23)
        if self.also == "log_softmax":
            loss = loss + found.exp().mean()
        if self.also == "logits":
            loss = loss + wide.logsumexp(1).square().mean()  # a z-loss
        return loss


@pytest.mark.parametrize(("also", "switches"), [("", 2), ("log_softmax", 1), ("logits", 2)])
def test_each_head_has_a_switch_unless_its_log_softmax_is_read(also: str, switches: int) -> None:
    torch.manual_seed(0)
    model = Twice(also).to(torch.bfloat16)
    assert_exact(model, (torch.randn(50, 8).bfloat16(), torch.randint(0, 40, (50,))), {}, switches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("t5", marks=pytest.mark.full)])
def test_language_models(name: str, dtype: torch.dtype) -> None:
    """Hugging Face's losses: shifted labels, ignored ones, `num_items_in_batch`."""
    transformers = import_transformers()
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (2, 24))
    labels = ids.masked_fill(ids < 9, -100)
    kwargs: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if name == "llama":
        model = small_llama()
        kwargs["num_items_in_batch"] = torch.tensor(30)
    elif name == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
        model = transformers.GPT2LMHeadModel(config).train()
    else:
        config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64)
        config.decoder_start_token_id = 0
        model = transformers.T5ForConditionalGeneration(config).train()
    assert_exact(model.to(dtype), (), kwargs, 1)


class PartOfTheUpcast(nn.Module):
    """A loss of some rows of upcast logits; where the batch is one, shifted rows are a view."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(8, 37), part

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.linear(x).float()
        if self.part == "shifted":
            logits, target = logits[:, :-1].contiguous(), target[:, 1:].contiguous()
        rows, classes = logits.flatten(0, -2), target.flatten()
        if (
            self.part == "all"
        ):  # the backward of this slice is no view, so the gradient's dtype changes after it
            rows = rows[:]
        if self.part == "first":
            rows, classes = rows[:20], classes[:20]
        return F.cross_entropy(rows, classes)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("part", ["shifted", "all", "first"])
def test_a_loss_of_a_part_of_the_upcast(part: str, batch: int) -> None:
    torch.manual_seed(0)
    model = PartOfTheUpcast(part).bfloat16()
    assert_exact(model, (torch.randn(batch, 20, 8).bfloat16(), torch.randint(0, 37, (batch, 20))), {}, 1)


@pytest.mark.parametrize("wide", [True, False])
def test_the_workspaces_are_what_the_way_says(wide: bool) -> None:
    """Estimated for graphs whose kernels are not measured; within 5 % of what the allocator sees."""
    model = Head(1024, wide=wide).to(torch.bfloat16 if wide else torch.float32)
    x = torch.randn(3, 160, 8).to(model.linear.weight.dtype)
    inputs = (x, torch.randint(0, 1024, (3, 160)))
    platform = Roofline()
    estimated = estimated_graph(model, inputs, {}, platform, ways=[SMALL])
    measured = step_graph(model, inputs, platform=platform, ways=[SMALL])
    found = [(one, other) for one, other in zip(estimated.ops, measured.ops, strict=True) if one.alternatives]
    assert found
    for one, other in found:
        for way in one.alternatives:
            said, seen = (op.implementations[way.first].workspace_nbytes for op in (one, other))
            assert seen <= said <= 1.05 * seen


def test_small_losses_have_no_way() -> None:
    """Those of one chunk of the usual size."""
    model = Head(37)
    inputs = (torch.randn(3, 20, 8), torch.randint(0, 37, (3, 20)))
    assert not PlannedModule(model, inputs, {}, save_all).graph.switches


def test_the_floor_of_a_loss_is_its_logits() -> None:
    """The search finds the switch, and the budget falls below what the original needs."""
    torch.manual_seed(0)
    model = Head(4000, wide=True).to(torch.bfloat16)
    inputs = (torch.randn(2, 512, 8).bfloat16(), torch.randint(0, 4000, (2, 512)))
    graph = PlannedModule(model, inputs, {}, save_all).graph
    logits_nbytes = 2 * 512 * 4000 * 2
    found = min_budget(graph)
    assert noremat_peak_nbytes(graph) > 4 * logits_nbytes
    assert found.nbytes < 1.5 * logits_nbytes
    assert simulate(graph, found.schedule).peak_nbytes == found.nbytes


def test_the_caller_keeps_returned_logits() -> None:
    """They are not written over, also where the caller changes them before the backward."""
    torch.manual_seed(0)
    model = Head(37, logits=True)
    inputs = (torch.randn(3, 20, 8), torch.randint(0, 37, (3, 20)))
    module = PlannedModule(copy.deepcopy(model), inputs, {}, all_switched(), ways=[SMALL])
    (loss, logits), (wanted, same) = module(*inputs), model(*inputs)
    before = logits.detach().clone()
    loss.backward()
    wanted.backward()
    assert_same(before, logits)
    assert_same(logits, same)
    for one, other in zip(module.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert_same(one.grad, other.grad)


def test_the_option_of_the_entry_points(tmp_path: Path) -> None:
    """`ways="none"` needs a larger budget; without it, the summary names the family; others are refused."""
    torch.manual_seed(0)
    model = Head(4000, wide=True).to(torch.bfloat16)
    inputs = (torch.randn(2, 512, 8).bfloat16(), torch.randint(0, 4000, (2, 512)))
    options: dict[str, Any] = {"cache_dir": tmp_path, "platform": Roofline()}
    planned = Hiremate(model, inputs, "16MiB", **options)
    assert "other ways to run ops: loss_head (1)" in planned.plan.summary()
    assert planned.plan.peak_nbytes <= 16 << 20
    with pytest.raises(InfeasibleBudget):
        Hiremate(model, inputs, "16MiB", ways="none", **options)
    for refused in (
        lambda: Hiremate(model, inputs, "16MiB", ways="all"),
        lambda: limit_memory(model, ways=["exact"]),
    ):
        with pytest.raises(
            BadInput, match=r"ways is .*, not one of 'exact', 'rounding', 'none'; leave it out"
        ):
            refused()


class LinearWithLoss(nn.Module):
    """A linear layer and its mean cross entropy."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.linear(x), labels)


def test_a_head_whose_calls_do_not_fit_is_planned_by_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original's operators are estimated where there is no room to measure them."""

    def short_of_memory(key: str, *rest: Any) -> MeasuredCost:
        if key.startswith("aten._log_softmax"):
            problem = "OutOfMemoryError: tried to allocate 8 GiB"
            raise MeasureError(key=key, problem=problem, advice="", out_of_memory=True)
        return measure_one(key, *rest)

    measure_one = measuring._measure_one
    monkeypatch.setattr(measuring, "_measure_one", short_of_memory)
    torch.manual_seed(0)
    tokens, words = 128, 8192
    model = LinearWithLoss(32, words)
    x, labels = torch.randn(tokens, 32), torch.randint(words, (tokens,))
    before = [t.clone() for t in gradients_of(model, x, labels)]
    module = Hiremate(model, (x, labels), int(1.5 * 4 * tokens * words), cache_dir=tmp_path)
    assert module.plan.ways
    softmaxes = [op.first.time_s for op in module.graph.ops if op.key.startswith("aten._log_softmax")]
    assert len(softmaxes) == 2
    assert min(softmaxes) > 0
    assert all(map(torch.equal, before, gradients_of(module, x, labels)))
    with pytest.raises(MeasureError, match="tried to allocate"):
        Hiremate(model, (x, labels), "100%", cache_dir=tmp_path, ways="none", zoo=False)


def gradients_of(model: nn.Module, x: Tensor, labels: Tensor) -> list[Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad()
    loss = model(x, labels)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
