"""The result of lowering: the segments of a step, ready to run."""

import attrs
from torch.fx import GraphModule

from remat_executor.lowering.runtime_protocol import GraphFunction
from remat_executor.lowering.step_handler import Action
from remat_graph import Step


@attrs.frozen(kw_only=True, eq=False)
class LoweredGraph:
    """One graph of a lowered step.

    Attributes:
        run: takes a list of tensors (first the externals of `reads`, then the values of `takes`), empties it,
            and returns a list: first the `results`, then the values of `gives`.
        reads: indices of the externals.
        takes: indices of the live values that it reads.
        drops: indices of the values that die in it; the list must hold their only references.
        gives: indices of the values that it leaves live for later graphs.
        results: how many tensors come first: outputs of the forward, gradients of the backward.
        module: the fx module behind `run`, for reading.
    """

    run: GraphFunction
    reads: tuple[int, ...]
    takes: tuple[int, ...]
    drops: tuple[int, ...]
    gives: tuple[int, ...]
    results: int
    module: GraphModule


@attrs.frozen(kw_only=True, eq=False)
class Segment:
    """The forward, or what the backward runs between two deliveries of gradients to autograd.

    Attributes:
        items: graphs, and the steps that a handler carries out before, between and after them.
        gives: indices of the values that it leaves live.
        gradients: for the backward, indices into `Translation.gradients` of its results, in their order.
    """

    items: tuple[LoweredGraph | Action, ...]
    gives: frozenset[int]
    gradients: tuple[int, ...] = ()

    @property
    def graphs(self) -> tuple[LoweredGraph, ...]:
        """Its graphs without the handler's steps."""
        return tuple(item for item in self.items if isinstance(item, LoweredGraph))


@attrs.frozen(kw_only=True, eq=False)
class LoweredStep:
    """A lowered schedule.

    Attributes:
        forward: makes the outputs that are not replayed, then what the backward needs.
        backward: the segments of the backward in order; the last one delivers at least one gradient.
        overwritten: values that the forward saves and the backward overwrites.
        read_again: indices of the externals that the backward reads.
        tail: what follows the backward: the optimizer's step.
    """

    forward: Segment
    backward: tuple[Segment, ...]
    overwritten: frozenset[int]
    read_again: tuple[int, ...]
    tail: tuple[Step, ...] = ()
