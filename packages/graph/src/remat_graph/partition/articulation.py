"""Cut the forward at articulation points: positions that exactly one value crosses.

Every path from the inputs to the loss runs through such a value. So the ops between two of them are a stage
of a chain, as rotor (Beaumont et al. 2019) plans it, or a block of Rockmate (Zhao et al. 2023). O(ops).
"""

from remat_graph.ir import Graph
from remat_graph.partition.groups import Partition, crossing_values, cut


def articulation_places(graph: Graph) -> list[int]:
    """Positions in the list of forward ops that exactly one value crosses."""
    crossing = crossing_values(graph)
    return [place for place in range(1, len(crossing) - 1) if crossing[place] == 1]


def at_articulations(graph: Graph, most: int) -> Partition:
    """Cut at articulation points, evenly thinned out to at most `most` groups; `most` is at least 1.

    A method for chains holds the value that crosses a cut until the backward has passed the cut. So values
    that the backward reads are preferred to those that only the next op reads.
    """
    places = articulation_places(graph)
    read = {v for op in graph.ops if op.backward for v in op.first.inputs}
    crossing = cut(graph, places).crossing[1:]
    useful = [place for place, values in zip(places, crossing, strict=True) if values & read]
    places = useful or places
    if len(places) >= most:
        places = [places[i * len(places) // (most - 1)] for i in range(most - 1)] if most > 1 else []
    return cut(graph, places)
