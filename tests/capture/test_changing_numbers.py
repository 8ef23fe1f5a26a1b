"""Python numbers among the arguments become inputs of the plan once they change, where the bits allow it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from remat_executor import PlannedModule, allocator_peak
from tests.helpers.planners import save_all

pytestmark = pytest.mark.filterwarnings("ignore:called in another way:remat_executor.RematWarning")

VALUES = (0.1, 0.37, 3.0, -0.0, 1e-9)
COUNTS = (1, 7, -3, 0, 2**31 - 1)


class Scale(torch.autograd.Function):
    """Scales gradients, with a number that the backward reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -grad * ctx.by, None


class Steps(nn.Module):
    """Calls a function of a hidden layer and a number."""

    def __init__(self, function: Callable[[Tensor, Any], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6, dtype=dtype), nn.Linear(6, 3, dtype=dtype)
        self.function = function

    def forward(self, x: Tensor, number: Any) -> Tensor:
        return self.last(self.function(torch.tanh(self.first(x)), number)).square().sum()


class Weighted(Steps):
    """Calls a function of the loss and a number."""

    def forward(self, x: Tensor, number: Any) -> Tensor:
        return self.function(self.last(torch.tanh(self.first(x))).square().sum(), number)


def in_place(h: Tensor, t: Any) -> Tensor:
    h = h + 1
    h *= t
    h -= t
    h.add_(t).sub_(t)
    return h


ARITHMETIC: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "product": lambda h, t: h * t,
    "on the left": lambda h, t: t * h + (t + h) - (t - h),
    "sum": lambda h, t: h + t,
    "difference": lambda h, t: (h - t) * (t - h),
    "quotient": lambda h, t: h * 3 / (t * t + 1),
    "number first": lambda h, t: (t + 2) / (h + 3),
    "of numbers": lambda h, t: (1 - t) * h + h * (t * 0.3 - 2 * t + t / 7) * -t,
    "functions": lambda h, t: torch.add(torch.mul(h, t), t).sub(t) - torch.true_divide(h, 1 + t * t),
    "in place": in_place,
    "autograd function": lambda h, t: Scale.apply(h, t) * t,
    "unread": lambda h, t: h * 2,
}


def planned(model: nn.Module, *sample: Any) -> PlannedModule:
    return PlannedModule(model, sample, {}, save_all)


def equal_steps(model: nn.Module, calls: Sequence[tuple[Any, ...]]) -> PlannedModule:
    """The module planned at the first call, once all calls have given the original's bits."""
    original = copy.deepcopy(model)
    module = planned(model, *calls[0])
    for call in calls:
        results = []
        for each in (original, module):
            each.zero_grad()
            torch.manual_seed(1)
            loss = each(*call)
            loss.backward()
            results.append((loss.detach(), *(p.grad for p in each.parameters())))
        for one, other in zip(*results, strict=True):
            assert one is not None
            assert other is not None
            assert one.dtype == other.dtype
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    return module


@pytest.mark.parametrize("values", [VALUES, COUNTS], ids=["floats", "whole numbers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_plans_once_more(name: str, dtype: torch.dtype, values: Sequence[float]) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=dtype)
    module = equal_steps(Steps(ARITHMETIC[name], dtype), [(x, value) for value in values])
    assert module.runs["replanned"] == 1
    assert module.runs["original"] == 0


@pytest.mark.parametrize("values", [VALUES, COUNTS], ids=["floats", "whole numbers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_of_a_loss_keeps_its_dtype(dtype: torch.dtype, values: Sequence[float]) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=dtype)
    module = equal_steps(Weighted(lambda loss, t: loss * t + t, dtype), [(x, value) for value in values])
    assert module.runs["replanned"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_that_a_tensor_would_round_stays_constant(dtype: torch.dtype) -> None:
    x = torch.randn(5, 4, dtype=dtype)
    calls = [(x, value) for value in (0.1, 0.3, 0.7)]
    module = equal_steps(Weighted(lambda loss, t: loss * t, dtype), calls)
    assert module.runs["replanned"] == 2


@pytest.mark.cuda
@pytest.mark.parametrize("values", [VALUES, COUNTS], ids=["floats", "whole numbers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_on_a_device(dtype: torch.dtype, values: Sequence[float]) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=dtype, device="cuda")
    for name in ("of numbers", "in place", "quotient"):
        module = equal_steps(Steps(ARITHMETIC[name], dtype).cuda(), [(x, value) for value in values])
        assert module.runs["replanned"] == 1
    equal_steps(Weighted(lambda loss, t: loss * t, dtype).cuda(), [(x, value) for value in values])


def raises_inside(h: Tensor, t: Any) -> Tensor:
    try:
        return h * float(t)
    except Exception:  # noqa: BLE001 - as careless forwards have it
        return h


READS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "branch": lambda h, t: h * 2 if t > 0.5 else h,
    "truth": lambda h, t: h * t if t else h,
    "equality": lambda h, t: h * t if t == 3.0 else -h,
    "type": lambda h, t: h * t if type(t) in (int, float) else h,
    "caught": raises_inside,
    "text": lambda h, t: h * len(f"{t}"),
    "str": lambda h, t: h * len(str(t)),
    "look-up": lambda h, t: h * {0.1: 2, 0.37: 3, 3.0: 4, 1: 5, 7: 6}.get(t, 1),
    "power": lambda h, t: h.abs() ** t,
    "clamp": lambda h, t: h.clamp(max=t),
    "dropout": lambda h, t: nn.functional.dropout(h, abs(t) / 8),
    "full": lambda h, t: h * torch.full((6,), t),
    "alpha": lambda h, t: torch.add(h, h, alpha=t),
    "divisor": lambda h, t: h * (1 / (t + 5)),
    "rounded": lambda h, t: h * round(t),
    "floor": lambda h, t: torch.div(h, t + 5, rounding_mode="floor") + h,
    "whole tensor": lambda h, t: h * (torch.ones(6, dtype=torch.int64) * t),
    "truth of a tensor": lambda h, t: h * ((h > 0) * t),
}


@pytest.mark.parametrize("values", [(0.1, 0.37, 3.0, 0.37), (1, 7, 3, 7)], ids=["floats", "whole numbers"])
@pytest.mark.parametrize("name", READS)
def test_a_number_that_is_read_gives_each_value_its_plan(name: str, values: Sequence[float]) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    module = equal_steps(Steps(READS[name]), [(x, value) for value in values])
    if not (name == "whole tensor" and type(values[0]) is int):  # int64 times a whole number is exact
        assert module.runs["replanned"] == 2


@pytest.mark.parametrize("name", ["slice", "loop", "list", "many bits", "quotient of many bits"])
def test_whole_numbers_that_select_or_grow_stay_constants(name: str) -> None:
    table = [2.0, 2.0, 2.0, 5.0]
    functions: dict[str, Callable[[Tensor, Any], Tensor]] = {
        "slice": lambda h, n: h * h[:n].sum(),
        "loop": lambda h, n: sum((h for _ in range(n)), h),
        "list": lambda h, n: h * table[n],
        "many bits": lambda h, n: h * (n * n * n),
        "quotient of many bits": lambda h, n: h * (n * (2**24 + 1) / 3),
    }
    x = torch.randn(5, 4)
    module = equal_steps(Steps(functions[name]), [(x, n) for n in (1, 2, 3)])
    assert module.runs["replanned"] == 2
    assert module.runs["original"] == 0


def test_a_tensor_in_the_place_of_a_number_is_another_call() -> None:
    x = torch.randn(5, 4)
    values: list[Any] = [0.1, 0.3, torch.tensor(0.7, dtype=torch.float64), 0.9, torch.tensor(0.2)]
    module = equal_steps(Weighted(lambda loss, t: loss * t), [(x, value) for value in values])
    assert module.runs["replanned"] == 3


def test_another_kind_of_number_is_another_plan() -> None:
    x = torch.randn(5, 4)
    equal_steps(Steps(ARITHMETIC["of numbers"]), [(x, value) for value in (0.5, 2, 0.25, 3, 2**63, True, 4)])


def test_other_shapes_and_modes_keep_the_inputs() -> None:
    model = Steps(lambda h, t: nn.functional.dropout(h, 0.0, training=True) * t)
    short, long = torch.randn(5, 4), torch.randn(9, 4)
    module = equal_steps(model, [(short, 0.1), (short, 0.2), (long, 0.3), (long, 0.4), (short, 0.5)])
    assert module.runs["replanned"] == 2


def test_a_number_that_another_mode_reads_becomes_constant_there() -> None:
    class Modes(Steps):
        def forward(self, x: Tensor, number: Any) -> Tensor:
            h = super().forward(x, number)
            return h if self.training or number > 0.25 else 2 * h

    x = torch.randn(5, 4)
    model = Modes(ARITHMETIC["product"])
    original = copy.deepcopy(model)
    module = planned(model, x, 0.1)
    for training, number in ((True, 0.1), (True, 0.2), (False, 0.2), (False, 0.3), (True, 0.4)):
        module.train(training)
        original.train(training)
        assert torch.equal(module(x, number), original(x, number))


def test_copies_keep_their_own_record() -> None:
    x = torch.randn(5, 4)
    module = equal_steps(Steps(ARITHMETIC["product"]), [(x, 0.1), (x, 0.2)])
    copied = copy.deepcopy(module)
    for number in (0.3, 0.4):
        assert torch.equal(copied(x, number), module(x, number))
    assert copied.runs["replanned"] == 0


def test_calls_that_are_pending_keep_their_numbers() -> None:
    x = torch.randn(5, 4)
    model = Steps(ARITHMETIC["of numbers"])
    module = equal_steps(model, [(x, 0.1), (x, 0.2)])
    alone = []
    for number in (0.3, 0.7):
        module.zero_grad()
        module(x, number).backward()
        alone.append([p.grad for p in module.parameters()])
    module.zero_grad()
    with pytest.warns(UserWarning, match="before the backward"):
        losses = [module(x, number) for number in (0.3, 0.7)]
    for loss, expected in zip(losses, alone, strict=True):
        module.zero_grad()
        loss.backward()
        for p, grad in zip(module.parameters(), expected, strict=True):
            assert grad is not None
            assert p.grad is not None
            assert torch.equal(p.grad, grad)


def test_the_peak_is_the_predicted_one() -> None:
    x = torch.randn(64, 4)
    module = equal_steps(Steps(ARITHMETIC["of numbers"]), [(x, 0.1), (x, 0.2)])
    module.zero_grad()
    peak = allocator_peak(lambda: module(x, 0.3).backward(), "cpu")
    assert peak.peak_nbytes == module.plan.peak_nbytes


def test_what_changed_is_reported_once() -> None:
    x = torch.randn(5, 4)
    module = planned(Steps(ARITHMETIC["product"]), x, 0.1)
    with pytest.warns(UserWarning, match=r"argument 1: 0.1 -> 0.2.*takes numbers there as inputs"):
        module(x, 0.2)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(width=64) | st.integers(-(2**33), 2**33), min_size=3, max_size=4), st.data())
def test_any_numbers_and_any_arithmetic(numbers: list[float], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(ARITHMETIC)), min_size=1, max_size=3))

    def composed(h: Tensor, t: Any) -> Tensor:
        for name in names:
            h = ARITHMETIC[name](h, t)
        return h

    torch.manual_seed(0)
    x = torch.randn(3, 4)
    equal_steps(Steps(composed), [(x, number) for number in numbers])
