"""In-place forms: the bits of the functional operator, in the storage of an argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from remat_executor import allocator_peak
from remat_executor.translation.inplace import in_place_forms

aten = torch.ops.aten
SHAPE = (37, 53)
SPECIAL = torch.tensor([0.0, -0.0, 6.0, -6.0, 1.0, 1e-40, float("inf"), -float("inf"), float("nan")])


def numbers(dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers and special ones, in a matrix large enough for vectorized kernels."""
    made = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 4
    made.view(-1)[: len(SPECIAL)] = SPECIAL
    return made.to(dtype)


def arguments(operator: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of each operator that has forms."""
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    rows = torch.tensor([5, 0, 36, 5])
    places = torch.randint(0, SHAPE[0], SHAPE, generator=torch.Generator().manual_seed(2))
    mask = y > 0
    given: dict[Any, tuple[Any, ...]] = {
        aten.pow.Tensor_Scalar: (x, 3),
        aten.masked_fill.Scalar: (x, mask, 2.0),
        aten.masked_fill.Tensor: (x, mask, torch.tensor(2.0, dtype=dtype)),
        aten.masked_scatter.default: (x, mask, y),
        aten.index_put.default: (x, [rows], y[:4], True),
        aten.index_add.default: (x, 0, rows, y[:4]),
        aten.index_copy.default: (x, 0, rows[:3], y[:3]),
        aten.index_fill.int_Scalar: (x, 0, rows, 3.0),
        aten.index_fill.int_Tensor: (x, 0, rows, torch.tensor(3.0, dtype=dtype)),
        aten.scatter.src: (x, 0, places[:1], y),
        aten.scatter.value: (x, 0, places, 2.0),
        aten.scatter_add.default: (x, 0, places, y),
        aten.slice_scatter.default: (x, y[:, 3:20:2], 1, 3, 20, 2),
        aten.select_scatter.default: (x, y[0], 0, 4),
        aten.copy.default: (x, y),
        aten.clamp.default: (x, -1.0, 2.0),
        aten.clamp_min.default: (x, -1.0),
        aten.clamp_max.default: (x, 1.0),
        aten.where.self: (mask, x, y),
        aten._softmax.default: (x, 1, False),
        aten._log_softmax.default: (x, 1, False),
        aten._softmax_backward_data.default: (x, y, 1, dtype),
        aten._log_softmax_backward_data.default: (x, y, 1, dtype),
        aten.threshold_backward.default: (x, y, 0),
        aten.hardtanh_backward.default: (x, y, 0.0, 6.0),
        aten.leaky_relu_backward.default: (x, y, 0.01, True),
        aten.elu_backward.default: (x, 1.0, 1.0, 1.0, True, y),
    }
    if operator in given:
        return given[operator]
    schema = operator._schema.arguments
    needed = [a for a in schema if not a.has_default_value()]
    values = iter((x, y))
    return tuple(next(values) if str(a.type) == "Tensor" else 0.5 for a in needed)


FORMS = [(operator, place) for operator, forms in in_place_forms().items() for place in forms]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("operator", "place"), FORMS, ids=lambda given: str(given).replace("aten.", ""))
def test_a_form_gives_the_bits_in_the_argument(operator: Any, place: int, dtype: torch.dtype) -> None:
    form = in_place_forms()[operator][place]
    args = arguments(operator, dtype)
    alone = allocator_peak(lambda: operator(*args))
    expected = alone.result
    written = args[place]
    given = {} if form.out is None else {form.out: written}
    called = allocator_peak(lambda: form.target(*args, **given))
    assert called.result.data_ptr() == written.data_ptr()
    assert torch.equal(expected.nan_to_num(9.0), written.nan_to_num(9.0))
    assert torch.equal(expected.isnan(), written.isnan())
    assert torch.equal(expected.signbit(), written.signbit()) or expected.isnan().any()
    assert called.peak_nbytes <= alone.peak_nbytes - written.nbytes, "it allocates a second storage"
