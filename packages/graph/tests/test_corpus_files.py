"""Corpus graphs can be saved, read back and fingerprinted like any graph, and their layers are found."""

from pathlib import Path

import pytest

from remat_graph import Role, fingerprint, load_graph, resolve_budget, save_graph
from remat_graph.partition import repeated_blocks
from remat_graph.serialization.graphs import graph_to_data

FOLDER = Path(__file__).resolve().parents[3] / "tests" / "data" / "graphs"


@pytest.fixture(scope="module", params=sorted(path.stem for path in FOLDER.glob("*.json")))
def graph(request):
    return load_graph(FOLDER / f"{request.param}.json")


def test_resident_values_cost_nothing(graph):
    """Outputs and gradients lie in buffers of the caller."""
    pinned = [value for value in graph.values if value.pinned]
    assert {Role.OUTPUT, Role.GRAD} == {value.role for value in pinned}
    assert {0} == {value.nbytes for value in pinned}


def test_it_comes_back_from_our_format(graph, tmp_path):
    """Every field is equal."""
    save_graph(graph, tmp_path / "graph.json")
    again = load_graph(tmp_path / "graph.json")
    assert graph_to_data(graph) == graph_to_data(again)
    assert fingerprint(graph) == fingerprint(again)


def test_a_percentage_is_one_of_the_save_all_peak(graph):
    """The corpus has no gradient bytes."""
    assert resolve_budget("100%", graph) // 2 == resolve_budget("50%", graph)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", {(12, 17), (12, 29)}),
        ("gpt2_nohead", {(12, 17), (12, 29)}),
        ("llama24_nohead", {(24, 38), (24, 74)}),
    ],
)
def test_the_layers_of_transformers_are_found(name, expected):
    """Once in the forward, once in the backward."""
    found = repeated_blocks(load_graph(FOLDER / f"{name}.json"))
    assert expected == {(len(repetition.blocks), repetition.length) for repetition in found}
