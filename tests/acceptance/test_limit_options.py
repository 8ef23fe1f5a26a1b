"""An invalid option is refused where it is written, before a model or a first step is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from remat_executor import BadInput
from remat_facade import BadModel, Hiremate, UnknownOptimizer, limit_memory, planned
from remat_graph import BadBudget, BadFile, RematError
from tests.helpers.models import import_transformers

INVALID: list[tuple[dict[str, Any], type[RematError], str]] = [
    ({"runtime": "inductr"}, BadInput, "runtime is 'inductr', not one of 'eager', 'inductor', 'cudagraph'"),
    ({"runtime": 3}, BadInput, "runtime is 3"),
    ({"ways": "all"}, BadInput, "ways is 'all'"),
    ({"outputs": "gone"}, BadInput, "outputs is 'gone', not one of 'kept', 'dropped'"),
    ({"gradients": "old"}, BadInput, "gradients is 'old', not one of 'auto', 'new', 'present'"),
    (
        {"reserve_nbytes": "1MiB"},
        BadBudget,
        "reserve_nbytes '1MiB': .*; give whole bytes such as 2147483648$",
    ),
    ({"reserve_nbytes": 1 << 40}, BadBudget, "leaves nothing of the budget"),
    ({"zoo": "no"}, BadInput, "zoo is 'no', not True or False; give False to search again"),
    ({"cache_dir": 3}, BadInput, "cache_dir is 3, not a path"),
    ({"platform": "h200-spec"}, BadInput, "the platform is 'h200-spec'"),
    ({"on_progress": True}, BadInput, "on_progress is True, not a function"),
    ({"differentiate": ["loss"]}, BadInput, r"differentiate is \['loss'\], not a list of output indices"),
    ({"max_plans": 0}, BadInput, "max_plans is 0, not a number of plans"),
    ({"buckets": 64}, BadInput, "buckets is 64, not Buckets; give lengths and paddings"),
    ({"part_nbytes": "1MiB"}, BadInput, "part_nbytes is '1MiB', not a number of bytes"),
    ({"plan": "missing.json"}, BadFile, "missing.json: no such file"),
    ({"plan": 3}, BadInput, "plan is 3, neither a plan nor a path"),
    ({"ranks": "all"}, BadInput, "ranks='all' is invalid"),
    ({"ranks": 0}, BadInput, "ranks=0 is invalid"),
    ({"optimizer": 3}, UnknownOptimizer, "optimizer 'int' is unknown: name one of"),
]


@pytest.mark.parametrize(("option", "error", "message"), INVALID, ids=lambda each: str(each)[:30])
def test_refused_where_it_is_written(option: dict[str, Any], error: type[RematError], message: str) -> None:
    """By a limit without a sample, by a callback before there is a trainer, and by a constructor."""
    import_transformers()
    from remat_facade.integrations.transformers import RematCallback

    model = nn.Linear(4, 1)
    with pytest.raises(error, match=message):
        limit_memory(model, "1MiB", **option)
    assert type(model) is nn.Linear
    with pytest.raises(error, match=message):
        RematCallback("1MiB", **option)
    with pytest.raises(error, match=message):
        Hiremate(model, torch.randn(2, 4), "1MiB", **option)


def test_indices_that_can_be_read_once_are_left_to_the_plan() -> None:
    """Checking them where they are written would leave none."""
    model = limit_memory(nn.Linear(4, 1), "1MiB", differentiate=iter([0]), zoo=False)
    model(torch.randn(2, 4)).sum().backward()
    found = planned(model)
    assert found is not None
    assert found.runs["planned"] == 1


def test_the_name_of_a_module_is_text() -> None:
    import_transformers()
    from remat_facade.integrations.transformers import RematCallback

    with pytest.raises(BadModel, match="module is 3; expected the name of a submodule"):
        RematCallback("60%", module=3)


def test_the_plan_of_what_is_no_module() -> None:
    """A trainer has a model; a class and a list have none."""
    trainer = SimpleNamespace(model=nn.Linear(4, 1))
    with pytest.raises(BadModel, match=r"is of type SimpleNamespace; .* give its `model`"):
        planned(trainer)
    for wrong in (nn.Linear, [nn.Linear(4, 1)], None):
        with pytest.raises(BadModel, match=r"is .*; expected an nn\.Module"):
            planned(wrong)


def test_a_budget_that_needs_the_optimizers_states() -> None:
    """Its name must be known; for other budgets it is for a sum in the report."""
    with pytest.raises(UnknownOptimizer, match="optimizer 'adamww' is unknown"):
        limit_memory(nn.Linear(4, 1), "auto", optimizer="adamww")
