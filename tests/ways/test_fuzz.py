"""Random small models with all ways of a family on; `benchmarks/fuzz_ways.py` checks 300 for each family."""

from __future__ import annotations

import warnings

import pytest

from tests.ways.fuzz import FAMILIES, cases_with_ways

COUNT = 5


@pytest.mark.parametrize("name", list(FAMILIES))
def test_random_models_have_eagers_bits(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models that draw nothing, or whose blocks have one element
        found = list(cases_with_ways(FAMILIES[name], COUNT))
    assert COUNT == len(found)
    assert all(ways > 0 for _, ways in found)
