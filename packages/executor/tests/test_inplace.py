"""In-place forms: the bits of the functional operator, in the storage of an argument."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from remat_executor import allocator_peak
from remat_executor.translation.inplace import InPlace, in_place_forms

aten = torch.ops.aten
SHAPE = (37, 53)
NUMBER = 0.3  # exact in no dtype: a kernel that rounds it to the tensor's dtype gives other bits
SPECIAL = torch.tensor([0.0, -0.0, 6.0, -6.0, 1.0, 1e-40, float("inf"), -float("inf"), float("nan")])


def numbers(dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers and special ones, in a matrix large enough for vectorized kernels."""
    made = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 4
    made.view(-1)[: len(SPECIAL)] = SPECIAL
    return made.to(dtype)


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of the elements, with one NaN for all, and signs of zeros."""
    return tensor.masked_fill(tensor.isnan(), float("nan")).contiguous().view(torch.uint8)


def arguments(operator: Any, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Arguments of each operator that has forms."""
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    rows = torch.tensor([5, 0, 36, 5])
    places = torch.randint(0, SHAPE[0], SHAPE, generator=torch.Generator().manual_seed(2))
    mask = y > 0
    one = torch.tensor(NUMBER, dtype=dtype)
    given: dict[Any, list[tuple[Any, ...]]] = {
        aten.pow.Tensor_Scalar: [(x, power) for power in (3, 2, 1.0, 0.5, -1, -0.5, 2.3, NUMBER)],
        aten.masked_fill.Scalar: [(x, mask, NUMBER)],
        aten.masked_fill.Tensor: [(x, mask, one)],
        aten.masked_scatter.default: [(x, mask, y)],
        aten.index_put.default: [(x, [rows], y[:4], True)],
        aten.index_add.default: [(x, 0, rows, y[:4])],
        aten.index_copy.default: [(x, 0, rows[:3], y[:3])],
        aten.index_fill.int_Scalar: [(x, 0, rows, NUMBER)],
        aten.index_fill.int_Tensor: [(x, 0, rows, one)],
        aten.scatter.src: [(x, 0, places[:1], y)],
        aten.scatter.value: [(x, 0, places, NUMBER)],
        aten.scatter_add.default: [(x, 0, places, y)],
        aten.slice_scatter.default: [(x, y[:, 3:20:2], 1, 3, 20, 2)],
        aten.select_scatter.default: [(x, y[0], 0, 4)],
        aten.copy.default: [(x, y)],
        aten.clamp.default: [(x, -1.1, 2.3), (x, NUMBER)],
        aten.where.self: [(mask, x, y), (mask, x, one), (mask, one, y)],
        aten._softmax.default: [(x, 1, False)],
        aten._log_softmax.default: [(x, 1, False)],
        aten._softmax_backward_data.default: [(x, y, 1, dtype)],
        aten._log_softmax_backward_data.default: [(x, y, 1, dtype)],
        aten.hardtanh.default: [(x, -1.1, 2.3), (x,)],
        aten.hardtanh_backward.default: [(x, y, -1.1, 2.3), (x, y, 0.0, 6.0)],
        aten.leaky_relu.default: [(x, NUMBER), (x,)],
        aten.leaky_relu_backward.default: [(x, y, NUMBER, True), (x, y, NUMBER, False)],
        aten.elu.default: [(x, NUMBER, 1.1, 1.3), (x,)],
        aten.elu_backward.default: [(x, NUMBER, 1.1, 1.3, False, y), (x, 1.0, 1.0, 1.0, True, y)],
        aten.gelu.default: [(x,)],
        aten.gelu_backward.default: [(x, y)],
    }
    if operator in given:
        return given[operator]
    if operator in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        return [(x, y), (x, NUMBER), (x, one), (x, y[:1]), (x[:, :1], y), (one, y)]
    schema = operator._schema.arguments
    needed = [a for a in schema if not a.has_default_value()]
    values = iter((x, y))
    return [tuple(next(values) if str(a.type) == "Tensor" else NUMBER for a in needed)]


FORMS = [(operator, place) for operator, forms in in_place_forms().items() for place in forms]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("operator", "place"), FORMS, ids=lambda given: str(given).replace("aten.", ""))
def test_a_form_gives_the_bits_in_the_argument(operator: Any, place: int, dtype: torch.dtype) -> None:
    form = in_place_forms()[operator][place]
    cases = [args for args in arguments(operator, dtype) if written_whole(args[place])]
    assert cases, "no arguments for this place"
    for args in cases:
        options = {"approximate": "tanh"} if "gelu" in str(operator) else {}
        for given in ({}, options) if options else ({},):
            assert_same(operator, form, place, copy.deepcopy(args), given)


def written_whole(argument: Any) -> bool:
    """Whether a result may take its place: a form is used where shape and layout are those of the result."""
    return isinstance(argument, Tensor) and argument.shape == SHAPE


def assert_same(
    operator: Any, form: InPlace, place: int, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Hold a form against its operator on the same arguments."""
    alone = allocator_peak(lambda: operator(*args, **options))
    expected, written = alone.result, args[place]
    given = options if form.out is None else options | {form.out: written}
    called = allocator_peak(lambda: form.target(*args, **given))
    assert called.result.data_ptr() == written.data_ptr()
    assert bits_of(expected).equal(bits_of(written)), (args[1:], options)
    assert called.peak_nbytes <= alone.peak_nbytes - written.nbytes, "it allocates a second storage"
