"""Errors of one rank arrive on the others with their class, if they are a `RematError` with plain fields."""

from typing import Any

import attrs
import pytest

from remat_executor import RankFailed
from remat_executor.module import shared_plan
from remat_graph import RematError


class Refused(RematError):
    """Has fields once attrs has made another class of it."""

    nbytes: int


BEFORE_ATTRS = Refused  # lives on among the subclasses until it is collected: here for good
Refused = attrs.frozen(kw_only=True)(Refused)


@attrs.frozen(kw_only=True)
class Carrying(RematError):
    """Has a field that no text can carry."""

    thing: object


def error_of(rank: int, error: BaseException) -> list[dict[str, Any]]:
    return [{"graph": 0}, {"error": shared_plan._error_data(error) | {"rank": rank}}]


def test_an_error_with_plain_fields_arrives_as_itself() -> None:
    """Whichever class of its name came first."""
    assert BEFORE_ATTRS in RematError.__subclasses__()
    with pytest.raises(Refused) as caught:
        shared_plan._raise_first(error_of(1, Refused(nbytes=3)))  # type: ignore[call-arg]
    assert caught.value.nbytes == 3
    assert isinstance(caught.value.__cause__, RankFailed)


@pytest.mark.parametrize("error", [KeyError("x"), Carrying(thing=[1])])
def test_any_other_is_told_in_words(error: Exception) -> None:
    """With its rank."""
    with pytest.raises(RankFailed, match=f"rank 1.*{type(error).__name__}"):
        shared_plan._raise_first(error_of(1, error))


def test_no_error_raises_nothing() -> None:
    """Reports alone."""
    shared_plan._raise_first([{"graph": 0}, {"graph": 1}])
