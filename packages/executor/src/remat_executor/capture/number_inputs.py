"""A Python number as an input of a captured step, so that another value needs no other plan.

`NumberInput` stands for the number while the forward is traced. It takes part in the arithmetic whose results
have the bits that the number itself would give: sums, differences, products and quotients, with numbers and
tensors. Whatever else reads it (a branch, an index, another operator) is refused: then the number is
a constant of the plan.
"""

import operator
from collections.abc import Callable, Collection, Generator
from typing import Any

import torch
from torch import Tensor

from remat_executor.errors import CaptureError, NothingToDifferentiate
from remat_executor.inspection.tensors import MOST_COUNTED, Tensors
from remat_graph.contexts import context
from remat_graph.errors import text_of

_OPERATORS = frozenset(("add", "sub", "mul", "div", "true_divide", "multiply", "subtract", "divide"))
_SYMBOLS = frozenset(("add", "sub", "mul", "truediv", "div"))
_ALLOWED = (
    _OPERATORS
    | {f"{name}_" for name in _OPERATORS}
    | {f"__{place}{name}__" for name in _SYMBOLS for place in ("", "i", "r")}
)


class NumberIsRead(CaptureError):
    """The forward reads a number in a way that an input cannot stand for."""


_MOST_EXACT = 1 << 53
"""Whole numbers up to here are exact as floats, so a quotient rounds once, as Python's does."""


def _refuse(how: str) -> NumberIsRead:
    return NumberIsRead(problem=f"{how} reads a number's value", advice="pass a tensor")


class NumberInput:
    """A number of a call while its step is traced: a tensor without dimensions, float64 or int64.

    Attributes:
        tensor: holds the number.
        most: the largest absolute value that a whole number can have: Python's have no limit.
    """

    __slots__ = ("most", "tensor")

    def __init__(self, tensor: Tensor, most: int = MOST_COUNTED) -> None:
        self.tensor, self.most = tensor, most

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What a forward that asks with `isinstance` takes it for."""
        return float if self.tensor.dtype is torch.float64 else int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on a tensor and this number."""
        name = getattr(func, "__name__", str(func))
        tensors_first = len(args) == 2 and isinstance(args[0], Tensor) and type(args[1]) is NumberInput
        if name not in _ALLOWED or kwargs or not tensors_first:
            raise _refuse(name)
        return func(args[0], args[1].operand_for(args[0]))

    def operand_for(self, other: Tensor) -> Tensor:
        """The tensor that gives an operator with `other` the type and bits that the number gives.

        Raises:
            NumberIsRead: no tensor does.
        """
        mine = self.tensor.dtype
        if other.ndim > 0:  # a tensor without dimensions of the same category does not promote, as a number
            if other.is_floating_point() or (mine is torch.int64 and _is_integer(other.dtype)):
                return self.tensor
        elif other.dtype in (torch.float32, torch.float64):
            return self.tensor.to(other.dtype)
        elif other.dtype is torch.int64 and mine is torch.int64:
            return self.tensor
        raise _refuse(f"arithmetic with a tensor of {other.dtype} and {other.ndim} dimensions")

    def _with(self, other: Any, symbol: str, *, reflected: bool = False) -> Any:
        if isinstance(other, Tensor):  # the number is on the left: the tensor's reflected operator
            return getattr(Tensor, f"__r{symbol}__")(other, self.operand_for(other))
        divisor = self if reflected else other
        if symbol == "truediv" and (type(divisor) is NumberInput or divisor == 0):
            raise _refuse("a division by it")  # Python raises an error for 0
        if type(other) is not NumberInput and type(other) not in (int, float):
            return NotImplemented
        mine, others = self.tensor, other.tensor if type(other) is NumberInput else other
        most = 0
        if isinstance(self, int) and isinstance(other, int) and symbol != "truediv":
            of_other = other.most if type(other) is NumberInput else abs(other)
            most = self.most * of_other if symbol == "mul" else self.most + of_other
            if most > torch.iinfo(torch.int64).max:
                raise _refuse("arithmetic beyond 64 bits")
        else:
            if symbol == "truediv" and self.most > _MOST_EXACT:
                raise _refuse("a quotient of whole numbers beyond 53 bits")
            mine = mine.to(torch.float64)
            others = others.to(torch.float64) if isinstance(others, Tensor) else float(others)
        apply = getattr(operator, symbol)
        return NumberInput(apply(others, mine) if reflected else apply(mine, others), most)

    def __add__(self, other: Any) -> Any:
        return self._with(other, "add")

    def __radd__(self, other: Any) -> Any:
        return self._with(other, "add", reflected=True)

    def __sub__(self, other: Any) -> Any:
        return self._with(other, "sub")

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, "sub", reflected=True)

    def __mul__(self, other: Any) -> Any:
        return self._with(other, "mul")

    def __rmul__(self, other: Any) -> Any:
        return self._with(other, "mul", reflected=True)

    def __truediv__(self, other: Any) -> Any:
        return self._with(other, "truediv")

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(other, "truediv", reflected=True)

    def __neg__(self) -> "NumberInput":
        return NumberInput(-self.tensor, self.most)

    def __pos__(self) -> "NumberInput":
        return self

    # What every object has by default would go unnoticed.

    def __bool__(self) -> bool:
        raise _refuse("a branch")

    def __eq__(self, other: object) -> bool:
        raise _refuse("a comparison")

    def __hash__(self) -> int:
        raise _refuse("a look-up")

    def __str__(self) -> str:
        raise _refuse("a string")

    def __format__(self, spec: str) -> str:
        raise _refuse("a string")


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


@context
def numbers_refused(tensors: Tensors) -> Generator[None, None, None]:
    """Report any error of a capture whose numbers are inputs as theirs: with constants, another may come.

    Raises:
        NumberIsRead: the capture failed.
    """
    try:
        yield
    except (NumberIsRead, NothingToDifferentiate):
        raise
    except Exception as error:
        if not tensors.numbers:
            raise
        raise NumberIsRead(
            problem=f"a number is not taken ({text_of(error)})", advice="pass a tensor"
        ) from error


def same_operators(one: torch.fx.Graph, other: torch.fx.Graph, numbers: Collection[torch.fx.Node]) -> bool:
    """Whether two joint graphs run the same operators, but for the arithmetic on numbers alone.

    Args:
        one: a graph for which all numbers are constants.
        other: the graph in which some are inputs.
        numbers: the placeholders of those.
    """
    alone: set[torch.fx.Node] = set(numbers)
    for node in other.nodes:
        if node.op == "call_function" and node.all_input_nodes and alone.issuperset(node.all_input_nodes):
            alone.add(node)
    return _calls(one, frozenset()) == _calls(other, alone)


def _calls(graph: torch.fx.Graph, left_out: Collection[torch.fx.Node]) -> list[Any]:
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and node not in left_out:
            value = node.meta.get("val")
            layout = (value.shape, value.dtype, value.stride()) if isinstance(value, Tensor) else None
            packet = getattr(node.target, "overloadpacket", node.target)  # rsub.Scalar and rsub.Tensor
            found.append((packet, layout))
    return found
