"""Placements that differ from a known one in up to three parameters.

The program of `placement_lp` divides parameters as if they were continuous. Where there are few of them, or
their sizes differ, whole parameters are far from its shares, and which of them move matters more than how
many. There only trying helps. O(parameters^3) placements.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from remat_solvers.offload.parameter_groups import Param

OnHost = frozenset[int]

MOST = 3  # parameters that change together


def host_choices(param: Param) -> list[OnHost]:
    """Which values of a parameter may be placed on the host: none, all, or its states alone."""
    found = [OnHost(), OnHost((param.index, *param.states))]
    if param.update is not None and param.states_nbytes:
        found.append(OnHost(param.states))
    return found


def placement_neighbors(params: Sequence[Param], on_host: OnHost) -> Iterator[OnHost]:
    """Placements that differ in one parameter, then those that differ in two, then in three."""
    changes: list[tuple[OnHost, OnHost]] = []  # all values of a parameter, and those on the host
    for param in params:
        whole = OnHost((param.index, *param.states))
        changes += [(whole, option) for option in host_choices(param) if option != on_host & whole]
    for count in range(1, MOST + 1):
        for chosen in combinations(changes, count):
            wholes, host_parts = zip(*chosen, strict=True)
            if len(set(wholes)) == count:
                yield on_host.difference(*wholes).union(*host_parts)
