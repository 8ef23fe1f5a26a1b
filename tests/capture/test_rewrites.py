"""Rewrites of the captured graph: fewer ops, fewer bytes, and eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import PlannedModule
from remat_executor.runtime.mutations import written
from remat_graph import noremat_peak_nbytes
from tests.helpers.bits import same_bits, with_special
from tests.helpers.planners import save_all

SPECIAL = [0.0, -0.0, 6.0, -6.0, 1.0, -1.0, 1e-40, -1e-40, 7.0, -7.0, 0.5, float("inf"), -float("inf")]


class Function(nn.Module):
    """A function of a linear layer's result and another input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.function(self.linear(x), other)


def planned(function: Callable[[Tensor, Tensor], Any]) -> PlannedModule:
    """The planned module, once three calls have given eager's bits."""
    torch.manual_seed(0)
    model = Function(function)
    x, other = torch.randn(3, 4), torch.randn(3, 4)
    original = copy.deepcopy(model)
    module = PlannedModule(model, (x, other), {}, save_all)
    for _ in range(3):
        found = []
        for each in (original, module):
            each.zero_grad()
            torch.manual_seed(1)
            outputs = each(x, other)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(o.sum() for o in outputs if o.requires_grad).backward()
            found.append((*outputs, *(p.grad for p in each.parameters())))
        for one, other_one in zip(*found, strict=True):
            assert torch.equal(one.nan_to_num(3.0), other_one.nan_to_num(3.0))
    return module


def targets(module: PlannedModule) -> list[str]:
    return [op.target.removeprefix("aten.").removesuffix(".default") for op in module.graph.ops]


def test_clones_that_change_nothing_are_dropped() -> None:
    module = planned(lambda h, _: (h * 2).clone().t().clone(memory_format=torch.preserve_format).sin().sum())
    assert "clone" not in targets(module)


def test_clones_of_clones_are_dropped() -> None:
    module = planned(
        lambda h, _: (h.tanh().clone().clone().view(-1).clone() * h.exp().clone().view(-1)).sum()
    )
    assert "clone" not in targets(module)


def test_views_of_a_dropped_clone_show_its_source() -> None:
    module = planned(lambda h, o: (h.tanh().clone().view(-1).split(6)[1].unsqueeze(0) * 3 + o[0, 0]).sum())
    assert "clone" not in targets(module)
    assert not {"view", "split", "unsqueeze"} & set(targets(module))


@pytest.mark.parametrize(
    "function",
    [
        lambda h, o: (h.tanh().clone(), h.sum()),  # an output
        lambda h, o: (o.clone() * h).sum(),  # of an input
        lambda h, o: (h.view(2, 6)[1].clone() * 2).sum(),  # of a part
        lambda h, o: (h.t().clone(memory_format=torch.contiguous_format) * 2).sum(),  # another layout
    ],
    ids=["output", "input", "part", "layout"],
)
def test_clones_that_matter_stay(function: Callable[[Tensor, Tensor], Any]) -> None:
    assert "clone" in targets(planned(function))


def test_writes_into_slices_write_in_place() -> None:
    """A buffer that is filled in parts, twice: one storage, as in eager."""

    def filled(h: Tensor, o: Tensor) -> Tensor:
        buffer = torch.zeros(3, 4000)
        for i in range(4):
            buffer[:, i] = h[:, i]
            buffer[:, 10 * i + 10 : 10 * i + 14] = h
        buffer[:, 100:] = 0.0
        buffer[1] = 2.0
        buffer[:, 10:14] = h.double()  # another dtype
        return (buffer[:, :50] * h.sum()).sum()

    module = planned(filled)
    large = [v for v in module.graph.values if v.nbytes >= 3 * 4000 * 4]
    assert len(large) > 8
    assert noremat_peak_nbytes(module.graph) < 3 * 3 * 4000 * 4
    copies = [op for op in module.graph.ops if op.target == "aten.copy.default" and not op.backward]
    assert len(copies) == 1  # from another dtype


def test_equal_calls_are_made_once_where_the_first_lives() -> None:
    def masks(h: Tensor, o: Tensor) -> Tensor:
        for _ in range(3):
            mask = torch.ones(4, 4).tril() * 2 - 1
            h = (h @ mask).tanh()
        return h.sum()

    found = targets(planned(masks))
    assert found.count("tril") == 1
    assert found.count("ones") == 1
    assert found.count("mm") > 3


def test_equal_calls_of_calls_that_nothing_reads_any_more() -> None:
    def calls(h: Tensor, o: Tensor) -> Tensor:
        first = o.exp().t().sin()
        between = o.exp()
        second = between.t().sin()  # equal to the first, so nothing reads this view
        return (h * first.t() * second.t() * between.t().cos().t()).sum()

    found = targets(planned(calls))
    assert (found.count("exp"), found.count("sin")) == (2, 1)

    def calls_of_two(h: Tensor, o: Tensor) -> Tensor:
        first, second = (each * each.sin() for each in (o.exp(), o.exp()))
        other = o.exp()
        return (h * first * second * (other * other.sin())).sum()

    assert targets(planned(calls_of_two)).count("exp") == 1


def test_equal_calls_whose_first_result_has_died_stay() -> None:
    def twice(h: Tensor, o: Tensor) -> Tensor:
        first = (o.exp() + 1).sum()
        return (h * first).sum() + (o.exp() + 2).sum()

    assert targets(planned(twice)).count("exp") == 2


def test_a_draw_that_is_overwritten_still_advances_the_generator() -> None:
    def overwritten(h: Tensor, o: Tensor) -> Tensor:
        return (torch.rand(3, 4).copy_(h) * torch.rand(3, 4)).sum()

    found = targets(planned(overwritten))
    assert found.count("rand") == 2
    assert "copy" not in found


def test_a_part_that_is_written_into_another_part_is_copied() -> None:
    """So that the write itself is in place."""

    def shifted(h: Tensor, o: Tensor) -> Tensor:
        whole = h.repeat(1, 1000)
        whole[:, :4] = whole[:, 4:8]
        return whole.sum()

    module = planned(shifted)
    assert "copy" in targets(module)
    assert all(
        op.first.reuses
        for op in module.graph.ops
        if op.target == "aten.slice_scatter.default" and not op.backward
    )


def test_a_tensor_that_a_call_reads_twice_is_not_overwritten() -> None:
    def permuted(h: Tensor, o: Tensor) -> Tensor:
        places = torch.arange(3).flip(0)
        return h[places.index_put((places,), torch.arange(3))].sum(1)

    assert "index_put" in targets(planned(permuted))


def test_copies_into_dying_values_write_to_nothing_of_the_caller() -> None:
    class Copies(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            saved = h.exp()
            ctx.save_for_backward(saved)
            return saved * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (saved,) = ctx.saved_tensors
            return torch.ops.aten.copy.default(saved, gradient.double())

    module = planned(lambda h, o: Copies.apply(h).sum())
    lowered = [graph.module for segment in module._remat.latest.program.backward for graph in segment.graphs]
    assert "copy" in targets(module)
    assert not any(written(each) for each in lowered)


def test_draws_and_outputs_are_not_merged() -> None:
    def draws(h: Tensor, o: Tensor) -> Tensor:
        one, other = F.dropout(h, 0.5), F.dropout(h, 0.5)
        return (one - other).abs().sum()

    assert targets(planned(draws)).count("native_dropout") == 2
    module = planned(lambda h, o: (h.sin().sum(), h.sin().detach(), h.sin().detach()))
    assert targets(module).count("sin") == 3


@pytest.mark.parametrize("x", [SPECIAL, [float("nan"), *SPECIAL[1:]]], ids=["numbers", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        F.relu6,
        F.hardtanh,
        lambda x: F.hardtanh(x, -6.0, 0.5),
        lambda x: F.hardtanh(x, -0.7, 0.7),  # half precision rounds these bounds
        F.leaky_relu,
        lambda x: F.leaky_relu(x, 0.0),
        lambda x: F.leaky_relu(x, -0.5),
        lambda x: F.leaky_relu(x, 1e-30),
    ],
)
def test_backwards_from_results_have_the_bits(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, x: list[float]
) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(x, dtype=dtype))

        def forward(self) -> Tensor:
            h = function(self.weight * 1)
            return h * h

    model = Steps()
    original = copy.deepcopy(model)
    module = PlannedModule(model, (), {}, save_all)
    for each in (original, module):
        each().backward(torch.ones(len(x), dtype=dtype))
    assert original.weight.grad is not None
    assert module.weight.grad is not None
    assert torch.equal(original.weight.grad.nan_to_num(9.0), module.weight.grad.nan_to_num(9.0))


@pytest.mark.parametrize(
    "function",
    [
        F.relu6,
        F.leaky_relu,
        lambda h: F.relu6(h).view(-1),  # a view
        lambda h: (h * 2).t().mul(3).t(),  # a view because of a write in place
        lambda h: [h * 2] * 2,  # one tensor, written twice
    ],
)
def test_a_result_that_the_caller_gets_may_be_written(function: Callable[[Tensor], Tensor]) -> None:
    model = Function(lambda h, _: function(h))
    original = copy.deepcopy(model)
    x = torch.randn(3, 4)
    module = PlannedModule(model, (x, x), {}, save_all)
    for each in (original, module):
        outputs = each(x, x)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        sum(output.mul_(-0.5).sum() for output in outputs).backward()
    assert original.linear.weight.grad is not None
    assert module.linear.weight.grad is not None
    assert torch.equal(original.linear.weight.grad, module.linear.weight.grad)


@pytest.mark.parametrize(
    ("function", "read"),
    [
        (lambda h: (F.relu6(h) * 2).sum(), "hardtanh"),  # one of the two lives
        (lambda h: (F.relu6(h) + h.sin()).sum(), "addmm"),  # the input does
    ],
)
def test_a_backward_reads_what_costs_no_bytes(function: Callable[[Tensor], Tensor], read: str) -> None:
    graph = planned(lambda h, _: function(h)).graph
    (backward,) = (op for op in graph.ops if op.target == "aten.hardtanh_backward.default")
    assert read in {graph.values[value].name for value in backward.first.inputs}


def test_a_result_that_is_kept_anyway_is_kept_alone() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(64, 64), nn.ReLU6(inplace=True)) for _ in range(8))
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).sum()

    module = PlannedModule(Network(), (torch.randn(512, 64),), {}, save_all)
    result_nbytes = 512 * 64 * 4
    assert noremat_peak_nbytes(module.graph) < 12 * result_nbytes  # 8 results, and not 8 inputs too
    assert "clone" not in targets(module)


class Pooled(nn.Module):
    """Convolutions, functions and poolings, one after the other."""

    def __init__(self, dims: int, *layers: nn.Module) -> None:
        super().__init__()
        convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.layers, self.last = (
            convolution(2, 4, 1),
            nn.Sequential(*layers),
            convolution(4, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x))).square().sum()


def masks_of(model: nn.Module, x: Tensor) -> list[int]:
    """Elements of what relu's backwards make; three steps have eager's bits."""
    original = copy.deepcopy(model)
    module = PlannedModule(model, (x,), {}, save_all, ways=())
    for _ in range(3):
        for each in (original, module):
            each.zero_grad()
            each(x).backward()
        for one, other in zip(original.parameters(), module.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert same_bits(one.grad, other.grad)
    ops = [op for op in module.graph.ops if op.target == "aten.threshold_backward.default"]
    return [module.graph.values[op.first.outputs[0]].nbytes // x.element_size() for op in ops]


@pytest.mark.parametrize("special", [0.0, 0.2], ids=["normal", "special"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dims", "pool", "count"),
    [
        (2, nn.MaxPool2d(2), 2 * 4 * 5 * 5),
        (2, nn.MaxPool2d(3, 2, 1), 2 * 4 * 5 * 5),
        (2, nn.MaxPool2d(3, 1, ceil_mode=True), 2 * 4 * 8 * 8),  # windows share maxima
        (2, nn.AdaptiveMaxPool2d(3), 2 * 4 * 3 * 3),
        (1, nn.MaxPool1d(2), 2 * 4 * 5),
        (3, nn.MaxPool3d(2), 2 * 4 * 5 * 5 * 5),
    ],
    ids=str,
)
def test_gradients_are_masked_before_pooling(
    dims: int, pool: nn.Module, count: int, dtype: torch.dtype, special: float
) -> None:
    torch.manual_seed(0)
    x = with_special(torch.randn(2, 2, *(10,) * dims), special).to(dtype)
    for layout in (torch.contiguous_format, *((torch.channels_last,) if dims == 2 else ())):
        model = Pooled(dims, nn.ReLU(), pool).to(dtype)
        assert [count] == masks_of(model, x.contiguous(memory_format=layout))


@pytest.mark.parametrize(
    "layers",
    [
        [nn.ReLU(), nn.AvgPool2d(2)],
        [nn.MaxPool2d(2), nn.ReLU()],
        [nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.0), nn.Identity()],
    ],
    ids=["average", "before", "convolution"],
)
def test_gradients_of_other_poolings_are_masked_as_before(layers: list[nn.Module]) -> None:
    """An average has no maxima; a relu of maxima is small; the last one is masked before pooling."""
    torch.manual_seed(0)
    (count,) = masks_of(Pooled(2, *layers), torch.randn(2, 2, 10, 10))
    assert count == (2 * 4 * 10 * 10 if isinstance(layers[1], nn.AvgPool2d) else 2 * 4 * 5 * 5)


def test_maxima_that_nothing_else_reads_are_not_kept_for_a_mask() -> None:
    """Here the relu's result is kept anyway."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Conv2d(2, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(torch.relu(self.linear(x)), 2).sum()

    torch.manual_seed(0)
    assert masks_of(Summed(), torch.randn(2, 2, 10, 10)) == [2 * 4 * 10 * 10]


def test_a_relu_with_another_reader_is_masked_as_a_whole() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            made = torch.relu(self.first(x))
            return self.second(F.max_pool2d(made, 2)).square().sum() + made.sin().sum()

    torch.manual_seed(0)
    assert masks_of(Skip(), torch.randn(2, 2, 10, 10)) == [2 * 4 * 10 * 10]
