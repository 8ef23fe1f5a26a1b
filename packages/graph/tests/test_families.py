"""A graph without some families of switches is the graph that was captured without them."""

from itertools import chain, combinations

import pytest

from remat_graph import specialize, verify
from remat_graph.errors import UnknownFamily
from remat_graph.serialization.graphs import graph_to_data
from remat_graph.switches.conflicts import compatible, conflicts
from remat_graph.switches.families import families_in, without_families
from remat_graph.switches.specialize import family_of
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_switches import with_random_switches


@pytest.mark.parametrize("seed", range(60))
def test_the_other_switches_decide_the_same_graphs(seed: int) -> None:
    """Whatever the other families have on, ops, times and values are those of the whole graph."""
    graph = with_random_switches(random_graph(seed, seed % 8 + 3), seed)
    every = families_in(graph)
    for names in chain.from_iterable(combinations(every, n) for n in range(len(every) + 1)):
        left = without_families(graph, names)
        verify(left)
        assert set(every) - set(names) == set(families_in(left))
        clashes = conflicts(left)
        switches = [switch for switch in graph.switches if family_of(switch) not in names]
        for on in chain.from_iterable(combinations(switches, n) for n in range(len(switches) + 1)):
            if compatible(clashes, on) == set(on):
                wanted, found = specialize(graph, on).graph, specialize(left, on).graph
                assert graph_to_data(wanted) == graph_to_data(found)


@pytest.mark.parametrize("seed", range(60))
def test_without_any_family_it_is_the_graph_before(seed: int) -> None:
    """Before the switches were added; with every family it is the graph itself."""
    before = random_graph(seed, seed % 8 + 3)
    graph = with_random_switches(before, seed)
    assert graph_to_data(before) == graph_to_data(without_families(graph, families_in(graph)))
    assert graph_to_data(graph) == graph_to_data(without_families(graph, ()))


def test_a_family_that_the_graph_lacks_is_refused() -> None:
    """In one line with what there is."""
    graph = with_random_switches(random_graph(5, 8), 5)
    with pytest.raises(UnknownFamily, match=r"family 'othre' \(did you mean other\?\): it has .*other"):
        without_families(graph, ["othre"])
    with pytest.raises(UnknownFamily, match="family 'mask': it has no other ways to run ops"):
        without_families(random_graph(5, 8), ["mask"])
