"""A substitution: what a family changes in one place of a captured graph, to run it in another way."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import attrs
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import Node

from remat_executor.capture.captured import Captured

Kernel = Callable[..., Any]


def new_tensor(name: str, value: Tensor) -> Node:
    """A tensor that only a way makes, for `Change.makes` and `Change.reads`.

    Args:
        name: begins with the name of a call, so that it is unique in a graph.
        value: a fake tensor with a storage of its own, such as ``node.meta["val"].new_empty(...)``.
    """
    node = FxGraph().placeholder(name)
    node.meta["val"] = value
    return node


@attrs.frozen(kw_only=True, eq=False)
class Change:
    """What one call of the captured graph becomes, or an op that a way adds after a call.

    Attributes:
        node: the call. Its results keep their shapes, strides and dtypes.
        added: whether the kernel runs as an op of its own right after the call, which itself stays. Without
            the way nothing runs there.
        on_repeat: whether the call itself runs first, and the kernel where it is repeated.
        kernel: called with the tensors of `reads`, then `constants`; returns new storages, see `makes`. A
            function of a module, so that generated code can name it. None: nothing runs here and the results
            of the call do not exist.
        reads: the nodes whose tensors the kernel gets; views of storages and tensors of the way, too.
        constants: further arguments of the kernel.
        makes: None if the kernel returns what the call returns. Otherwise it returns a tuple, with a tensor
            for each of these nodes: results of calls that do not make them in this way, and new tensors.
        over: the node among `reads` over which the result, of several the first, may be written.
        over_kernel: like `kernel`; writes that result over `over` and returns it, with the others.
        counts_as: the captured calls whose FLOPs and bytes the kernel takes, for times by a platform. None:
            `flops`, and the bytes of the storages that it reads and makes.
        flops: see `counts_as`.
        more_nbytes: bytes that the kernel reads and writes in addition to those.
        part: whether the kernel is a part of what the call runs. All parts together take at least the time of
            the call: measurements that say less are noise, and a choice among many ways would pick those.
        workspace_nbytes: bytes held while the kernel runs, in addition to its results, for graphs whose
            kernels are not measured.
    """

    node: Node
    added: bool = False
    on_repeat: bool = False
    kernel: Kernel | None = None
    reads: tuple[Node, ...] = ()
    constants: tuple[Any, ...] = ()
    makes: tuple[Node, ...] | None = None
    over: Node | None = None
    over_kernel: Kernel | None = None
    counts_as: tuple[Node, ...] | None = None
    flops: int = 0
    more_nbytes: int = 0
    part: bool = False
    workspace_nbytes: int = 0

    def __attrs_post_init__(self) -> None:
        if self.added and (self.makes is None or self.kernel is None or self.on_repeat):
            raise ValueError(f"an op added after {self.node.name} needs a kernel and what it makes")


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
