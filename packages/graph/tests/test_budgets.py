"""Budgets resolve to bytes of a graph."""

import numpy as np
import pytest
from hypothesis import given, settings

from remat_graph import (
    BadBudget,
    Budget,
    Graph,
    Role,
    Schedule,
    Value,
    noremat_peak_nbytes,
    parse_nbytes,
    percent_of,
    resolve_budget,
    simulate,
)
from remat_graph.budget import gradient_nbytes
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.small_graphs import small_graph
from remat_graph.testing.strategies import graphs


def step(rounding: int = 1) -> Graph:
    """The unplanned peak P is 1400: 600 and 400 of activations, and a gradient of 400, which is G."""
    values = [
        Value(name="a", nbytes=600),
        Value(name="b", nbytes=400),
        Value(name="g", nbytes=400, role=Role.GRAD),
    ]
    ops = [((), (0,)), ((0,), (1,)), ((0, 1), (2,))]
    return small_graph("step", values, ops, rounding_nbytes=rounding)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("40%", 400 + 400),
        ("100%", 1400),
        ("100 %", 1400),
        ("12.35%", 400 + 123),
        ("0.001%", 400),
        ("150%", 400 + 1500),
        ("1KiB", 1024),
        (77, 77),
        (np.int32(77), 77),
        (77.0, 77),
    ],
)
def test_a_percentage_leaves_the_gradients_alone(budget: float | np.int32 | str, expected: int) -> None:
    """It means G + 0.40 (P - G); sizes need no graph."""
    assert expected == resolve_budget(budget, step())


def test_a_budget_is_parsed_before_there_is_a_graph() -> None:
    """Sizes are known then; a percentage needs its graph."""
    size, share = Budget.parse("1KiB"), Budget.parse("40%")
    assert (1024, False) == (size.nbytes, size.is_percentage)
    assert (None, True) == (share.nbytes, share.is_percentage)
    assert (1024, 800) == (size.resolve(step()), share.resolve(step()))


def test_gradients_count_as_they_are_allocated() -> None:
    """Both G and P include the allocator's rounding."""
    graph = step(512)
    assert (512, 1024 + 512 + 512) == (gradient_nbytes(graph), noremat_peak_nbytes(graph))
    assert 512 + 768 == resolve_budget("50%", graph)


@settings(deadline=None, max_examples=50)
@given(graphs())
def test_the_whole_is_the_unplanned_peak(graph: Graph) -> None:
    """100 % is the peak of the unplanned step."""
    peak = simulate(graph, Schedule.unplanned(graph)).peak_nbytes
    if peak:
        assert peak == resolve_budget("100%", graph)


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        (0, "is zero"),
        ("0", "is zero"),
        ("0%", "is zero"),
        ("0GiB", "is zero"),
        (-5, "is negative"),
        ("-40%", "is negative"),
        ("2 bananas", "'bananas' is not a unit"),
        ("", "neither a size nor a percentage"),
        ("%", "neither a size nor a percentage"),
        ("40%%", "is not a unit"),
        (True, "is a bool"),
        (2.5, "not a whole number"),
        ("2.5", "not a whole number"),
        (float("nan"), "not a finite number"),
        ("1e99GiB", "more than any machine has"),
        (2**63, "more than any machine has"),
        ("0.1B", "less than one byte"),
        (None, "is a NoneType"),
    ],
)
def test_a_bad_budget_is_one_clear_line(budget: bool | float | str | None, problem: str) -> None:
    """The message says what came, what is wrong, and what to give instead."""
    with pytest.raises(BadBudget, match=problem) as caught:
        resolve_budget(budget, step())
    assert str(caught.value).startswith(f"budget {budget!r}: ")
    assert '"40%"' in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("came", "as_budget", "as_size"),
    [
        (0.4, '"40%"', ""),
        ("0.4", '"40%"', ""),
        (".125", '"12.5%"', ""),
        (1.5, "", ""),
        ("2G", '"2GiB"', '"2GiB"'),
        ("1.5 m", '"1.5MiB"', '"1.5MiB"'),
        ("2E", "", ""),
        ("-2G", "", ""),
        ("0.0G", "", ""),
    ],
)
def test_what_is_meant(came: float | str, as_budget: str, as_size: str) -> None:
    """A number below 1 is a share, where one is taken; a unit without its B is one of memory."""
    for parse, meant in ((Budget.parse, as_budget), (parse_nbytes, as_size)):
        with pytest.raises(BadBudget) as caught:
            parse(came)
        assert caught.value.meant == meant
        assert str(caught.value).endswith(f"did you mean {meant}?") == bool(meant)


@pytest.mark.parametrize("seed", range(20))
def test_a_percentage_of_bytes_comes_to_them(seed: int) -> None:
    """The least whole one: one less comes to fewer."""
    graph = random_graph(seed)
    peak = resolve_budget("100%", graph)
    for nbytes in (1, peak // 3, peak // 2, peak - 1, peak):
        percent = percent_of(nbytes, graph)
        if resolve_budget("1%", graph) == peak:  # all of it is gradients
            assert percent is None
            continue
        assert percent is not None
        assert resolve_budget(f"{percent}%", graph) >= nbytes
        assert percent == 1 or resolve_budget(f"{percent - 1}%", graph) < nbytes
