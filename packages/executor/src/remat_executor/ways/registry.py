"""The families that plans may choose from: those of this package, and of others by entry point."""

from collections.abc import Iterable
from importlib.metadata import entry_points

from remat_executor.ways.chains import chains
from remat_executor.ways.loss_head import loss_head
from remat_executor.ways.masks import masks
from remat_executor.ways.pools import pools
from remat_executor.ways.substitution import Family

GROUP = "remat.ways"


def families(chosen: Iterable[Family] | None = None) -> tuple[Family, ...]:
    """These families; all if None. A package adds one by an entry point of the group ``remat.ways``."""
    if chosen is not None:
        return tuple(chosen)
    return (loss_head, masks, pools, chains, *(point.load() for point in entry_points(group=GROUP)))
