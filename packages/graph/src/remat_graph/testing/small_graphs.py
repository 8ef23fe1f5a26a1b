"""Small graphs by hand, for tests: each op has one implementation, given by what it reads and makes."""

from collections.abc import Iterable, Sequence

from remat_graph.ir import Graph, Implementation, Op, Update, Value

ReadsAndMakes = tuple[Iterable[int], Iterable[int]]


def small_graph(
    name: str,
    values: Iterable[Value],
    ops: Sequence[ReadsAndMakes],
    *,
    names: Sequence[str] = (),
    forward: int | None = None,
    time_s: float = 0.0,
    rounding_nbytes: int = 1,
    updates: Iterable[Update] = (),
) -> Graph:
    """Build a graph from its values and from the indices of those that each op reads and makes.

    Args:
        name: of the graph.
        values: all of them.
        ops: what each op reads and makes.
        names: of the ops; f0, f1, ... by default.
        forward: how many ops belong to the forward; all of them by default.
        time_s: of each op.
        rounding_nbytes: to which the allocator rounds.
        updates: of the optimizer.
    """
    made = [
        Op(
            name=names[i] if names else f"f{i}",
            target="f",
            backward=forward is not None and i >= forward,
            implementations=(Implementation(inputs=reads, outputs=makes, time_s=time_s),),
        )
        for i, (reads, makes) in enumerate(ops)
    ]
    return Graph(name=name, values=values, ops=made, rounding_nbytes=rounding_nbytes, updates=updates)
