"""The linear layer inside its loss's chunks: errors as eager's, no logits, and nothing of it by default."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import PlannedModule, estimated_graph, step_graph
from remat_executor.ways.linear_head import linear_head, linear_loss
from remat_graph import Roofline, noremat_peak_nbytes, simulate, specialize
from remat_solvers import min_budget
from tests.helpers.models import import_transformers
from tests.helpers.planners import all_switched, save_all
from tests.helpers.rounding_errors import LanguageLoss, errors, results

SMALL = partial(linear_head, least_nbytes=0)


class Head(nn.Module):
    """A layer before a linear layer and its loss."""

    def __init__(self, classes: int, width: int = 24, **options: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)
        self.linear = nn.Linear(width, classes, bias=options.pop("bias", True))
        self.returned = options.pop("returned", False)
        self.options = options

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.linear(self.layer(x))
        wide = logits if logits.dtype is torch.float64 else logits.float()
        weight = self.options.get("weight")
        options = {**self.options, "weight": None if weight is None else weight.to(wide.dtype)}
        loss = F.cross_entropy(wide.flatten(0, -2), target.flatten(), **options)
        return (loss, logits) if self.returned else loss


class Transposed(nn.Module):
    """A weight with a column a class, as of `addmm` or a product of matrices."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, classes) / 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = x @ self.weight
        return F.cross_entropy(logits if logits.dtype is torch.float64 else logits.float(), target)


def inputs(rows: int, classes: int, dtype: torch.dtype, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Rows and targets, some of which are ignored."""
    target = torch.randint(0, classes, (rows,))
    target[::7] = ignored
    return torch.randn(rows, 8).to(dtype), target


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"reduction": "sum"},
        {"ignore_index": 3},
        {"weight": torch.rand(101)},
        {"weight": torch.rand(101), "reduction": "sum", "bias": False},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_eager(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Loss and all gradients against float64, without and with repeats."""
    torch.manual_seed(0)
    model = Head(101, **options)
    model.layer.to(dtype)
    model.linear.to(dtype)
    for seed in (None, 1, 2):
        found = errors(model, inputs(333, 101, dtype, options.get("ignore_index", -100)), [SMALL], seed)
        assert ("linear_head.nll_loss_forward",) == found.module.graph.switches
        found.check()


@pytest.mark.parametrize("frozen", ["weight", "bias", "hidden"])
def test_gradients_that_are_not_wanted_are_not_made(frozen: str) -> None:
    """Of a frozen layer, or of an input."""
    torch.manual_seed(0)
    model = Head(101)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != f"linear.{frozen}" and not (frozen == "hidden" and "layer" in name))
    found = errors(model, inputs(200, 101, torch.float32), [SMALL])
    assert 1 == len(found.module.graph.switches)
    found.check()
    made = {value.name for value in found.module.graph.values if value.name.endswith("_unscaled")}
    assert 2 == len(made)


@pytest.mark.parametrize("classes", [8, 50])
def test_a_weight_with_a_column_a_class(classes: int) -> None:
    """Also a square one, whose shape does not tell its direction."""
    torch.manual_seed(0)
    found = errors(Transposed(classes), inputs(100, classes, torch.float32), [SMALL])
    assert 1 == len(found.module.graph.switches)
    found.check()


@pytest.mark.parametrize(
    "model",
    [
        Head(101, returned=True),
        Head(101, reduction="none"),
        Head(101, label_smoothing=0.1),
        Head(101).half(),
    ],
    ids=["returned", "none", "smoothing", "float16"],
)
def test_where_the_way_does_not_apply_there_is_none(model: nn.Module) -> None:
    """Logits that the caller gets, tangents of rows, another loss, and a dtype of a small range."""
    x = inputs(100, 101, next(model.parameters()).dtype)
    assert not PlannedModule(model, x, {}, save_all, ways=[SMALL]).graph.switches


def test_a_target_that_is_no_class_is_an_error_as_before() -> None:
    """With the words of the original call."""
    target = torch.zeros(32, dtype=torch.int64)
    target[20] = 5
    arguments = (torch.randn(32, 4), torch.randn(4, 5), target)
    with pytest.raises(IndexError) as ours:
        linear_loss(*arguments, (), ("of_hidden",), False, 1, -100, 16, torch.float32)
    with pytest.raises(IndexError) as torchs:
        F.cross_entropy(torch.randn(32, 5), target)
    assert str(ours.value) == str(torchs.value)


def test_all_rows_ignored_is_not_a_number_and_has_no_gradient() -> None:
    """As in eager."""
    model = Head(101)
    x, target = inputs(100, 101, torch.float32)
    target.fill_(-100)
    module = PlannedModule(copy.deepcopy(model), (x, target), {}, all_switched(), ways=[SMALL])
    wanted, found = (results(m, list(m.parameters()), (x, target), 1.0) for m in (model, module))
    assert wanted[0].isnan()
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_language_model(dtype: torch.dtype) -> None:
    """GPT-2, whose weight is that of its embedding too, without its logits."""
    transformers = import_transformers()
    torch.manual_seed(0)
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32, **options)

    model = LanguageLoss(transformers.GPT2LMHeadModel(config).train()).to(dtype)
    ids = torch.randint(0, 64, (8, 24))
    found = errors(model, (ids,), [SMALL])
    assert 1 == len(found.module.graph.switches)
    found.check()


def test_the_floor_is_below_the_logits() -> None:
    """No value of the logits' size exists; the peak is that of the referee."""
    torch.manual_seed(0)
    model = Head(4000, width=16).bfloat16()
    x, target = inputs(2048, 4000, torch.bfloat16)
    graph = PlannedModule(model, (x, target), {}, save_all, ways=[SMALL]).graph
    logits_nbytes = 2048 * 4000 * 2
    found = min_budget(graph)
    assert noremat_peak_nbytes(graph) > 4 * logits_nbytes
    assert found.nbytes < logits_nbytes
    assert simulate(graph, found.schedule).peak_nbytes == found.nbytes
    on = specialize(graph, graph.switches).graph
    made = {v for op in on.ops for run in op.implementations for v in run.outputs}
    assert max(graph.values[v].nbytes for v in made) < logits_nbytes / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workspaces_are_what_the_way_says(dtype: torch.dtype, tmp_path: Path) -> None:
    """Estimated for graphs whose kernels are not measured; within 10 % of what the allocator sees."""
    model, x = Head(1024, width=64).to(dtype), inputs(2048, 1024, dtype)
    platform = Roofline()
    estimated = estimated_graph(model, x, {}, platform, ways=[SMALL])
    measured = step_graph(model, x, platform=platform, ways=[SMALL], cache_dir=tmp_path)
    for one, other in zip(estimated.ops, measured.ops, strict=True):
        if one.target == "aten.nll_loss_forward.default":
            said, seen = (op.implementations[1].workspace_nbytes for op in (one, other))
            assert 0 < seen <= said <= 1.1 * seen
            return
    raise AssertionError("no loss")
