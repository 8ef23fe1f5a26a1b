"""Cuts at articulation points: places in the forward that one value alone crosses.

Every path from the inputs to the loss runs through such a value, so what lies between two of them is a stage
of a chain: the form that rotor (Beaumont et al. 2019) plans, and Rockmate's blocks (Zhao et al. 2023).
O(ops).
"""

from remat_graph.ir import Graph
from remat_graph.partition.groups import Partition, crossing_values, cut


def articulation_places(graph: Graph) -> list[int]:
    """Places in the list of forward ops that one value alone crosses."""
    crossing = crossing_values(graph)
    return [place for place in range(1, len(crossing) - 1) if crossing[place] == 1]


def at_articulations(graph: Graph, most: int) -> Partition:
    """Cut at articulation points, evenly thinned out to at most so many groups.

    A value that only the next op reads is a poor place to cut: whoever plans a chain holds what crosses a cut
    until the backward is past it. So the backward must read it too, where there are such places.

    Args:
        graph: the graph.
        most: groups, at least 1.
    """
    places = articulation_places(graph)
    read = {v for op in graph.ops if op.backward for v in op.first.inputs}
    crossing = cut(graph, places).crossing[1:]
    useful = [place for place, values in zip(places, crossing, strict=True) if values & read]
    places = useful or places
    if len(places) >= most:
        places = [places[i * len(places) // (most - 1)] for i in range(most - 1)] if most > 1 else []
    return cut(graph, places)
