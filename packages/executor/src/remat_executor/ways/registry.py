"""The families that plans may choose from: those of this package, and of others by entry point.

There are two classes. By default plans choose among exact ways only; a way that rounds differently than the
original is offered only where the user asks for such ways.
"""

from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points

import attrs

from remat_executor.capture.captured import Captured
from remat_executor.ways.batch_norms import batch_norms
from remat_executor.ways.chains import chains
from remat_executor.ways.convolutions import convolutions
from remat_executor.ways.fused_gelu import fused_gelu
from remat_executor.ways.linear_head import linear_head
from remat_executor.ways.loss_head import loss_head
from remat_executor.ways.masks import masks
from remat_executor.ways.norm_activations import norm_activations
from remat_executor.ways.pools import pools
from remat_executor.ways.substitution import Family, Substitution

GROUP = "remat.ways"

EXACT: tuple[Family, ...] = (loss_head, masks, pools, chains, convolutions, batch_norms)
ROUNDING: tuple[Family, ...] = (linear_head, fused_gelu, norm_activations)


def families(chosen: Iterable[Family] | None = None) -> tuple[Family, ...]:
    """These families; if None, the exact ways of all families.

    A package adds a family by an entry point of the group ``remat.ways``.
    """
    if chosen is not None:
        return tuple(chosen)
    return tuple(map(ExactOnly, (*EXACT, *_of_others())))


def rounding_families() -> tuple[Family, ...]:
    """All families with all of their ways.

    Those that round are last, so that a plan that was made without them fits this step too.
    """
    return (*EXACT, *_of_others(), *ROUNDING)


def _of_others() -> tuple[Family, ...]:
    return tuple(point.load() for point in entry_points(group=GROUP))


@attrs.frozen
class ExactOnly:
    """The exact ways of a family, whichever it finds."""

    family: Family

    def __call__(self, captured: Captured) -> Iterator[Substitution]:
        """Its exact ways."""
        return (way for way in self.family(captured) if way.exact)
