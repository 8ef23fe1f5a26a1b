"""FLOPs of attention by torch's rules; the operators themselves need a GPU, and the rules only shapes."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from remat_executor.torch_private.flop_rules import flop_rule

aten = torch.ops.aten
QUERIES, KEYS, VALUES = (2, 8, 5, 16), (2, 8, 7, 16), (2, 8, 7, 12)
GRADIENT = (2, 8, 5, 12)
FORWARD = 2 * (2 * 8) * 5 * 7 * (16 + 12)


def given(heads: int, *more: tuple[int, ...]) -> list[torch.Tensor]:
    """Gradient if any, queries, keys and values, the latter of so many heads."""
    shared = [(2, heads, *shape[2:]) for shape in (KEYS, VALUES)]
    return [torch.empty(shape, device="meta") for shape in (*more, QUERIES, *shared)]


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_heads_that_queries_share_count_for_each(kind: str, heads: int) -> None:
    """The scores are computed for each head of the queries; the backward computes them and four products."""
    packet: Any = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    backward: Any = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")
    assert flop_rule(packet)(*given(heads), out_val=None) == FORWARD
    scores = 2 * (2 * 8) * 5 * 7 * 16
    assert flop_rule(backward)(*given(heads, GRADIENT), out_val=None) == 2 * FORWARD + scores


def test_other_operators_have_torchs_rule() -> None:
    assert flop_rule(aten.mm) is flop_registry[aten.mm]
    assert flop_rule(aten.relu) is None
    assert flop_rule(None) is None
