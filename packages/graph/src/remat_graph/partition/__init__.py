"""Partition a graph into groups, each a graph with a way back, and find repeated blocks.

Each pass takes a graph and returns a `Partition`: `at_articulations`, `at_repetitions`, `at_narrow_places`,
`grouped`, or `cut` at given positions.
"""

from remat_graph.partition.articulation import articulation_places, at_articulations
from remat_graph.partition.bottom_up import grouped
from remat_graph.partition.groups import Partition, Subgraph, cut, forward_ops, repeatable
from remat_graph.partition.repeated_blocks import Block, Repetition, at_repetitions, repeated_blocks
from remat_graph.partition.windows import at_narrow_places

__all__ = [
    "Block",
    "Partition",
    "Repetition",
    "Subgraph",
    "articulation_places",
    "at_articulations",
    "at_narrow_places",
    "at_repetitions",
    "cut",
    "forward_ops",
    "grouped",
    "repeatable",
    "repeated_blocks",
]
