"""Private names of Dynamo for the versions of dicts: whether one was written, without a look at its items."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from remat_executor.errors import UnsupportedTorch
from remat_executor.torch_private.lookup import private_name


def has_version(thing: dict[Any, Any]) -> bool:
    """Whether `dict_versions` notices every change of a dict.

    The order of an `OrderedDict` changes without a write. From Python 3.12 on, an empty dict that takes over
    another one whole is not noticed. A torch without versions notices none.
    """
    return type(thing) is dict and bool(thing) and _reader() is not None


def dict_versions(dicts: Iterable[dict[Any, Any]]) -> list[int]:
    """For each dict a number, which a write replaces by one that no dict has had.

    Python 3.11 keeps it in the dict; from 3.12 on torch watches the dict from its first call here.
    """
    read = _reader()
    assert read is not None, "ask `has_version` first"
    return list(map(read, dicts))


@functools.cache
def _reader() -> Callable[[dict[Any, Any]], int] | None:
    try:
        found: Callable[[dict[Any, Any]], int] = private_name("torch._C._dynamo.guards", "dict_version")
    except UnsupportedTorch:
        return None
    return found
