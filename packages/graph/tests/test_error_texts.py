"""The text of an error is one readable line, however long the quoted values are."""

import attrs
import pytest

from remat_graph import BadBudget, RematError, get_platform, parse_nbytes
from remat_graph.errors import cut, shown
from remat_graph.serialization.json_reader import Reader


class Long:
    """An object with a long `repr` of many lines."""

    def __repr__(self):
        return "long\n" * 100_000


def nested(levels):
    """Lists nested to that many levels."""
    made = "x"
    for _ in range(levels):
        made = [made] * 9
    return made


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        10**100_000,
        list(range(10**6)),
        {"a" * 10**5: "b" * 10**5},
        Long(),
        nested(40),
        b"x" * 10**6,
    ],
    ids=["text", "number", "list", "mapping", "object", "nested", "bytes"],
)
def test_a_value_is_shown_in_one_short_line(value):
    """The full `repr` is not even made."""
    text = shown(value)
    assert 0 < len(text) <= 160
    assert "\n" not in text


@pytest.mark.parametrize("value", [1, -1.5, "text", None, True, [1, 2], {"a": (1, 2)}])
def test_a_short_value_is_shown_as_it_is(value):
    """Its text is Python's `repr`."""
    assert repr(value) == shown(value)


def test_a_text_is_cut_in_the_middle():
    """The problem stands at the beginning, the advice at the end."""
    text = cut("what came " + "x" * 10**6 + " what to do", 100)
    assert len(text) == 100
    assert text.startswith("what came")
    assert text.endswith("what to do")
    assert "short" == cut("short", 5)


def test_no_error_is_longer():
    """This holds for classes that define only `__str__`, too."""

    @attrs.frozen(kw_only=True, str=False)
    class Mine(RematError):
        name: str

        def __str__(self) -> str:
            return f"{self.name}: correct it"

    error = Mine(name="x" * 10**6)
    assert len(str(error)) == 2000
    assert str(error).endswith(": correct it")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: get_platform("x" * 10**6),
        lambda: parse_nbytes("x" * 10**6),
        lambda: parse_nbytes("1" + "x" * 10**6),
        lambda: parse_nbytes(10**100_000),
        lambda: Reader({"x" * 10**6: 1}, "file").known(frozenset()),
        lambda: Reader(10**10_000, "file").size(),
    ],
)
def test_wrong_values_of_any_length_are_told_briefly(wrong):
    """The errors are ours, and say what to do."""
    with pytest.raises(RematError) as caught:
        wrong()
    assert len(str(caught.value)) < 400


def test_what_an_error_holds_is_whole():
    """Only the text is shortened, not the fields."""
    error = BadBudget(budget="x" * 10**4, problem="is none")
    assert 10**4 == len(error.budget)
    assert 2000 == len(str(error))
