"""A substitution: what a family changes in one place of a captured graph, to run it in another way."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import attrs
from torch.fx import Node

from remat_executor.capture.captured import Captured

Kernel = Callable[..., Any]


@attrs.frozen(kw_only=True, eq=False)
class Change:
    """What one call of the captured graph becomes.

    Attributes:
        node: the call. Its results keep their shapes, strides and dtypes.
        kernel: called with the tensors of `reads`, then `constants`; returns what the call returns, in new
            storages. A function of a module, so that generated code can name it. None: nothing runs here and
            the results of the call do not exist.
        reads: the nodes whose tensors the kernel gets; views of storages too.
        constants: further arguments of the kernel.
        over: the node among `reads` over which the result may be written.
        over_kernel: like `kernel`; writes the result over `over` and returns it.
        counts_as: the captured calls whose FLOPs and bytes the kernel takes, for times by a platform.
        workspace_nbytes: bytes held while the kernel runs, in addition to its results, for graphs whose
            kernels are not measured.
    """

    node: Node
    kernel: Kernel | None = None
    reads: tuple[Node, ...] = ()
    constants: tuple[Any, ...] = ()
    over: Node | None = None
    over_kernel: Kernel | None = None
    counts_as: tuple[Node, ...] = ()
    workspace_nbytes: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Substitution:
    """Changes that are made together.

    Attributes:
        family: the family's name.
        changes: one for each call that changes; the first names the way.
        exact: whether all results are equal to the original's in every bit.
    """

    family: str
    changes: tuple[Change, ...]
    exact: bool = True

    @property
    def name(self) -> str:
        """Unique in a graph: the family and the first call that changes."""
        return f"{self.family}.{self.changes[0].node.name}"


class Family(Protocol):
    """Finds the ways of one family."""

    def __call__(self, captured: Captured) -> Iterable[Substitution]:
        """The places of a captured graph where this family applies."""
