"""Captures that calls share which differ in nothing but sizes.

The first calls are captured one by one. A capture for any size (``remat_executor.capture.any_size``) takes as
long as about four of them, and spares three quarters of each later one, so it is made once as many sizes have
come. Before it is used it has to give every one of the steps that were captured so far: the same operators
and values in the same order, the same constants and outputs. Sizes for which it may not hold are captured by
themselves, and so is everything if it cannot be made.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from remat_executor.capture.any_size import AnySize
from remat_executor.capture.captured import Captured
from remat_executor.guards.signature import Signature
from remat_executor.inspection.attribute_keys import exact_key
from remat_executor.inspection.reads import Reads
from remat_executor.inspection.tensors import Tensors
from remat_executor.module.plan_cache import LRUCache
from remat_executor.torch_private.fake_tensors import fake_tensors
from remat_executor.torch_private.symbolic_sizes import LEAST, Place
from remat_executor.translation.translation import Translation
from remat_graph import fingerprint

FEWEST_ALONE = 5
"""Sizes that are captured by themselves before a capture for any size is tried."""

MOST_TRIES = 2

FEWEST_EXAMPLES = 2
"""Examples that a capture for any size has to give at least; one with a size below 2 says nothing."""

Shapes = tuple[tuple[int, ...], ...]
"""Of the arguments of a call."""


def kind_of(signature: Signature, tensors: Tensors) -> Any:
    """What calls share that differ in nothing but the sizes of their arguments; None: sizes decide more."""
    count = len(tensors.arguments)
    alone = all(place == -1 - i for i, place in enumerate(signature.sharing[:count]))
    if tensors.numbers or not alone or not all(map(_is_plain, tensors.arguments)):
        return None
    leaves, slots, *inputs = signature.inputs
    apart = [(t.dtype, t.ndim, t.device, t.requires_grad) for t in tensors.arguments]
    return attrs.evolve(signature, inputs=(leaves, slots, *apart, *inputs[count:]))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has the strides that its shape gives a new one, also where a size is 1."""
    expected, step = [], 1
    for size in reversed(tensor.shape):
        expected.append(step)
        step *= max(size, 1)
    new = tensor.stride() == tuple(reversed(expected)) and tensor.storage_offset() == 0
    return type(tensor) is Tensor and new and not tensor.is_conj() and not tensor.is_neg()


@attrs.frozen(kw_only=True, eq=False)
class Example:
    """A step that was captured by itself.

    Attributes:
        shapes: of the call's arguments.
        step: what a capture for any size has to give for them.
        names: of the nodes that make the values and call the operators, by their places in the graph; to some
            of them plans refer.
        constants: of the trace.
        as_if_compiling: see `Captured`.
    """

    shapes: Shapes
    step: tuple[Any, ...]
    names: Mapping[tuple[str, int], str]
    constants: tuple[Tensor, ...]
    as_if_compiling: bool

    @classmethod
    def of(cls, tensors: Tensors, captured: Captured, translation: Translation) -> "Example":
        """The example that a call gives."""
        places = {node: i for i, node in enumerate(captured.externals)}
        return cls(
            shapes=shapes_of(tensors),
            step=(
                fingerprint(translation.graph),
                captured.output_leaves,
                tuple(map(exact_key, captured.output_constants)),
                str(captured.out_spec),
                tuple((each.requires_grad, each.replayed, each.tangent is None) for each in captured.outputs),
                tuple(places[node] for node, _ in captured.mutations),
                tuple(places[node] for node, _ in captured.gradients),
            ),
            names=_names(translation),
            constants=_constants(captured),
            as_if_compiling=captured.as_if_compiling,
        )

    def equals(self, other: "Example") -> bool:
        """Whether two captures of one call are the same."""
        return self.step == other.step and _equal(self.constants, other.constants)


def _names(translation: Translation) -> dict[tuple[str, int], str]:
    values = {("value", place): node.name for node, place in translation.value_of.items()}
    called = {
        ("op", place): getattr(recipe, "node", None) for place, recipe in enumerate(translation.recipes)
    }
    return values | {at: node.name for at, node in called.items() if node is not None}


def _constants(captured: Captured) -> tuple[Tensor, ...]:
    module = captured.graph_module
    values = [getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")]
    return tuple(value for value in values if isinstance(value, Tensor))


def _equal(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return len(some) == len(others) and all(
        one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(some, others, strict=True)
    )


def shapes_of(tensors: Tensors) -> Shapes:
    """The shapes of a call's arguments."""
    return tuple(tuple(t.shape) for t in tensors.arguments)


def _resized(tensors: Tensors, shapes: Shapes) -> Tensors:
    """The tensors of a call whose arguments have other shapes, without memory."""
    pairs = zip(tensors.arguments, shapes, strict=True)
    with fake_tensors() as fake:
        arguments = tuple(
            fake(torch.empty(shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad), t.device)
            for t, shape in pairs
        )
    first = len(tensors.owned.registered)
    flat = (*tensors.flat[:first], *arguments, *tensors.held)
    return attrs.evolve(tensors, arguments=arguments, flat=flat)


@attrs.frozen(kw_only=True, eq=False)
class KeptCapture:
    """A capture for any size that holds.

    Attributes:
        any_size: the capture.
        fixed: the sizes that it takes as given.
        reads: the attributes that it read.
    """

    any_size: AnySize
    fixed: Mapping[Place, int]
    reads: Reads


@attrs.define(kw_only=True, eq=False)
class KindCaptures:
    """The captures of one kind of calls.

    Attributes:
        examples: those that were captured by themselves, since the last try.
        tries: captures for any size so far.
        found: those that hold.
        learned: the one that the present call has added.
    """

    examples: list[Example] = attrs.field(factory=list)
    tries: int = 0
    found: list[KeptCapture] = attrs.field(factory=list)
    learned: KeptCapture | None = None

    def add(self, example: Example) -> None:
        """Remember a step that was captured by itself."""
        if self.tries < MOST_TRIES:
            self.examples.append(example)

    def begun_again(self) -> "KindCaptures":
        """What the present call has given alone."""
        found = [] if self.learned is None else [self.learned]
        return KindCaptures(examples=self.examples[-1:], tries=len(found), found=found)

    def captured(self, tensors: Tensors) -> tuple[Captured, Reads] | None:
        """The step of a call, and what its capture read; None if it has to be captured by itself."""
        shapes = shapes_of(tensors)
        for each in reversed(self.found):
            if all(shapes[i][d] == size for (i, d), size in each.fixed.items()):
                try:
                    return each.any_size.captured(tensors), each.reads
                except Exception:  # noqa: BLE001, S112 - an operator may refuse sizes; eager words that better
                    continue
        return None

    def free(self, tensors: Tensors) -> frozenset[Place] | None:
        """The sizes that a capture for any size should leave open; None if it should not be tried now."""
        if len(self.examples) < FEWEST_ALONE or self.tries == MOST_TRIES:
            return None
        here = shapes_of(tensors)
        places = {(i, d): size for i, shape in enumerate(here) for d, size in enumerate(shape)}
        free = {
            (i, d): size
            for (i, d), size in places.items()
            if any(each.shapes[i][d] != size for each in self.examples)
        }
        return None if any(size < LEAST for size in free.values()) else frozenset(free)

    def learn(
        self,
        trace: Callable[[bool], AnySize],
        free: Collection[Place],
        tensors: Tensors,
        translated: Callable[[Tensors, Captured], Translation],
        reads: Callable[[], Reads],
    ) -> None:
        """Capture for any size, and keep that if it gives every example.

        Args:
            trace: captures, with the branches for compilers or with eager's.
            free: the sizes that are left open.
            tensors: the module's and the call's.
            translated: translates a captured step.
            reads: what the capture has read.
        """
        examples, self.examples = self.examples, []
        self.tries += 1

        def example_of(found: AnySize, like: Example) -> Example:
            resized = _resized(tensors, like.shapes)
            captured = found.captured(resized)
            return Example.of(resized, captured, translated(resized, captured))

        (as_if_compiling, *others) = {each.as_if_compiling for each in examples}
        usable = [each for each in examples if all(each.shapes[i][d] >= LEAST for i, d in free)]
        if others or len(usable) < FEWEST_EXAMPLES:
            return
        try:
            found = trace(as_if_compiling)
            theirs = usable[0].names
            names = {name: theirs.get(at, name) for at, name in example_of(found, usable[0]).names.items()}
            found = attrs.evolve(found, names=names)
            if not all(example_of(found, each).equals(each) for each in usable):
                return
        except Exception:  # noqa: BLE001 - the forward runs on symbols, which user code may refuse in any way
            return
        here = shapes_of(tensors)
        places = {(i, d) for i, shape in enumerate(here) for d in range(len(shape))}
        fixed = {(i, d): here[i][d] for i, d in places.difference(free)}
        self.learned = KeptCapture(any_size=found, fixed=fixed, reads=reads())
        self.found.append(self.learned)


@attrs.define(kw_only=True, eq=False)
class SharedCaptures:
    """The captures of one module, by kind of calls.

    Attributes:
        kinds: the most recent ones.
    """

    kinds: LRUCache[Any, KindCaptures] = attrs.field(factory=LRUCache)

    def of(self, kind: Any) -> KindCaptures | None:
        """The captures of a kind; None for calls that share nothing."""
        return None if kind is None else self.kinds.get(kind) or KindCaptures()

    def keep(self, kind: Any, sharing: KindCaptures | None, before: Any) -> None:
        """Keep what calls of a kind share.

        Args:
            kind: of the call, with all that captures have read by now. What earlier calls gave may have been
                captured in another state of what is read since.
            sharing: what the call was given.
            before: the kind that it was looked up by.
        """
        if kind is None or sharing is None:
            return
        self.kinds[kind] = sharing if kind == before else sharing.begun_again()
        sharing.learned = None
