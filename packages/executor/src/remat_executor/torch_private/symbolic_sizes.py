"""Private names of traces whose sizes are symbols, and of what such a trace assumes of them."""

import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from remat_executor.torch_private.lookup import private_name
from remat_graph.contexts import context

Place = tuple[int, int]
"""Index of an input, and one of its dimensions."""

LEAST = 2
"""Torch traces sizes of 0 and 1 as constants."""


_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__")
_ROUNDINGS = ("__int__", "__ceil__", "__floor__", "__trunc__", "__round__", "__floordiv__", "__mod__")
_TEXTS = ("__str__", "__repr__", "__format__")
_OF_FRACTIONS = (*_COMPARISONS, *_ROUNDINGS, *_TEXTS)


class SizeNotCovered(Exception):
    """A trace does not hold for these sizes, or says nothing of them."""


@attrs.frozen(kw_only=True, eq=False)
class SymbolicSizes:
    """Sizes that stand for any number from 2 on.

    Attributes:
        environment: torch's record of the symbols and of what a trace assumes of them.
        mode: makes fake tensors of such sizes.
        symbols: the symbol of each place.
    """

    environment: Any
    mode: Any
    symbols: Mapping[Place, Any]

    @classmethod
    def of(
        cls, inputs: Sequence[Tensor], free: Iterable[Place]
    ) -> tuple["SymbolicSizes", tuple[Tensor, ...]]:
        """The sizes at these places as symbols, and fake inputs that have them."""
        shapes = "torch.fx.experimental.symbolic_shapes"
        dynamic = private_name(shapes, "DimDynamic")
        context = private_name(shapes, "StatelessSymbolicContext")
        source = private_name("torch._dynamo.source", "ConstantSource")
        environment = private_name(shapes, "ShapeEnv")()
        mode = private_name("torch._subclasses.fake_tensor", "FakeTensorMode")(
            shape_env=environment, static_shapes=False, allow_non_fake_inputs=True
        )
        mode.cache_enabled = False  # with symbols, torch's cache of results takes longer than it saves
        free = frozenset(free)
        fakes: list[Tensor] = []
        symbols: dict[Place, Any] = {}
        for i, tensor in enumerate(inputs):
            kinds = [dynamic.DYNAMIC if (i, d) in free else dynamic.STATIC for d in range(tensor.ndim)]
            fake = mode.from_tensor(
                tensor,
                static_shapes=False,
                source=source(f"input{i}"),
                symbolic_context=context(dynamic_sizes=kinds),
            )
            fakes.append(fake)
            symbols |= {(i, d): fake.shape[d].node.expr for d in range(tensor.ndim) if (i, d) in free}
        return cls(environment=environment, mode=mode, symbols=symbols), tuple(fakes)

    def check(self, sizes: Mapping[Place, int]) -> None:
        """Check that a trace took the branches that it takes at these sizes.

        Raises:
            SizeNotCovered: it may not have.
        """
        values = self._values(sizes)
        for symbol, size in values.items():
            bounds = self.environment.var_to_range[symbol]
            if size < LEAST or not bounds.lower <= size <= bounds.upper:
                raise SizeNotCovered(f"{symbol} is {size}")
        for guard in self.environment.guards:
            if guard.expr.subs(values) != True:  # noqa: E712 - an object of sympy
                raise SizeNotCovered(str(guard.expr))
        if self.environment.deferred_runtime_asserts:
            raise SizeNotCovered("a size depends on data")

    def value(self, number: Any, sizes: Mapping[Place, int]) -> Any:
        """The value of a whole number that a trace has computed from the sizes.

        Raises:
            SizeNotCovered: it depends on something else.
        """
        if not is_symbolic(number):
            return number
        found = number.node.expr.subs(self._values(sizes))
        if not found.is_Integer:
            raise SizeNotCovered(str(found))
        return int(found)

    def _values(self, sizes: Mapping[Place, int]) -> dict[Any, int]:
        return {symbol: sizes[place] for place, symbol in self.symbols.items()}


@context
def watched_symbols() -> Generator[None, None, None]:
    """A context in which sizes that become text count as compared, and comparisons of fractions are refused.

    In this thread. Torch writes no record where a size becomes text. It simplifies fractions as if they were
    exact, and decides comparisons by that which Python's rounding decides otherwise.
    """
    me = threading.get_ident()
    replaced: list[tuple[type, str, Any]] = []

    def as_text(kind: type, name: str) -> None:
        before = getattr(kind, name)

        def text(value: Any, *rest: Any) -> str:
            if threading.get_ident() != me:
                return str(before(value, *rest))
            plain = bool(value) if kind is torch.SymBool else int(value)
            return str(getattr(plain, name)(*rest))

        replace(kind, name, text)

    def refused(name: str) -> None:
        before = getattr(torch.SymFloat, name)

        def refuse(value: Any, *rest: Any) -> Any:
            if threading.get_ident() != me:
                return before(value, *rest)
            raise SizeNotCovered(f"a fraction is compared or rounded ({name})")

        replace(torch.SymFloat, name, refuse)

    def replace(kind: type, name: str, function: Any) -> None:
        replaced.append((kind, name, vars(kind).get(name)))
        setattr(kind, name, function)

    try:
        for kind in (torch.SymInt, torch.SymBool):
            for name in _TEXTS:
                as_text(kind, name)
        for name in _OF_FRACTIONS:
            if hasattr(torch.SymFloat, name):
                refused(name)
        yield
    finally:
        for kind, name, function in reversed(replaced):
            if function is None:
                delattr(kind, name)
            else:
                setattr(kind, name, function)


def is_symbolic(value: object) -> bool:
    """Whether a value is a number that a trace has computed from symbols."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def fixed_fakes() -> Any:
    """A mode of fake tensors whose sizes are numbers."""
    return private_name("torch._subclasses.fake_tensor", "FakeTensorMode")(allow_non_fake_inputs=True)
