"""Say what is wrong with a call of a class that plans: by the name that was called, and what to give instead.

Python names the function that a class inherits: `Hiremate(model, "2GiB")` would read of `Rockmate.__init__`.
"""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from remat_graph.errors import shown

_ORDER = ["model", "sample", "budget"]


def check_call(kind: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a class whose first three are a model, a sample and a budget.

    Raises:
        TypeError: one is missing, unknown or in another's place.
    """
    signature = inspect.signature(kind.__init__)  # type: ignore[misc]
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(_wrong(kind.__name__, str(error), signature, args, kwargs)) from None
    given = [_place(each) for each in args]
    if given != _ORDER and sorted(given) == sorted(_ORDER):
        problem = f"{kind.__name__}({', '.join(given)}): the arguments are in another order"
        raise TypeError(f"{problem}; give {kind.__name__}({', '.join(_ORDER)})")


def _wrong(
    name: str, problem: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """One line: what Python says, and the call that is expected."""
    unknown = next((each for each in kwargs if each not in signature.parameters), None)
    if unknown is not None:
        return f"{name}() {problem}{meant(unknown, signature.parameters)}"
    if len(args) == 2 and "sample" not in kwargs and _place(args[1]) == "budget":
        budget = shown(args[1])
        return (
            f"{name}(model, {budget}): the sample is missing; give {name}(model, sample, {budget}), or "
            f"limit_memory(model, {budget}), which needs none"
        )
    return f"{name}(): {problem}; give {name}({', '.join(_ORDER)}), and every other argument by its name"


def meant(unknown: str, known: Mapping[str, Any]) -> str:
    """The question whether a similar name was meant; empty if there is none."""
    close = difflib.get_close_matches(unknown, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _place(given: object) -> str:
    """Which argument a value can be: a sample is anything that is no model and no budget."""
    if isinstance(given, nn.Module):
        return "model"
    return "budget" if isinstance(given, str | int) else "sample"
