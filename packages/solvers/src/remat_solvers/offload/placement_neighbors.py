"""Choices of homes next to one that is known: those that differ in the fate of one parameter, or of two.

The program of `placement_lp` shares parameters out as if they could be cut at will. Where there are few of
them, or unlike ones, whole parameters are far from its shares, and which of them leave matters more than
how many. Trying is what helps there. O(parameters^2) choices.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from remat_solvers.offload.parameter_groups import Param

Homes = frozenset[int]

MOST = 3  # parameters that change their fates together


def fates(param: Param) -> list[Homes]:
    """What may be placed on the host of a parameter: nothing, all it has, or its states alone."""
    found = [Homes(), Homes((param.index, *param.states))]
    if param.update is not None and param.states_nbytes:
        found.append(Homes(param.states))
    return found


def neighbours(params: Sequence[Param], on_host: Homes) -> Iterator[Homes]:
    """Choices of homes that differ in one parameter, then those that differ in two.

    Args:
        params: all parameters that can move.
        on_host: values placed on the host.
    """
    changes: list[tuple[Homes, Homes]] = []  # all values of a parameter, and what of them is on the host
    for param in params:
        whole = Homes((param.index, *param.states))
        changes += [(whole, fate) for fate in fates(param) if fate != on_host & whole]
    for count in range(1, MOST + 1):
        for chosen in combinations(changes, count):
            wholes, fates_then = zip(*chosen, strict=True)
            if len(set(wholes)) == count:
                yield on_host.difference(*wholes).union(*fates_then)
