"""What a graph's structure gives away: where it repeats itself."""

from remat_graph.partition.repeated import Block, Repetition, repeated_blocks

__all__ = ["Block", "Repetition", "repeated_blocks"]
