"""Bytes and seconds as text, and parsed from text."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import BadBudget, format_nbytes, format_seconds, parse_nbytes
from remat_graph.units import format_change, in_brackets


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024**2 - 1, "10.0 MiB"),
        (1536, "1.50 KiB"),
        (10 * 1024**2, "10.0 MiB"),
        (1024**3 - 1, "1.00 GiB"),
        (int(1.43 * 1024**3), "1.43 GiB"),
        (800 * 1024**3, "800 GiB"),
        (1023 * 1024**3, "1023 GiB"),
        (5000 * 1024**5, "5000 PiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_for_people(nbytes: int, expected: str) -> None:
    """Three digits and a binary unit; never 1024 of a unit."""
    assert expected == format_nbytes(nbytes)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0 s"),
        (1.5e-9, "1.50 ns"),
        (2.5e-6, "2.50 us"),
        (0.004, "4.00 ms"),
        (0.00414, "4.14 ms"),
        (0.0123, "12.3 ms"),
        (-0.0123, "-12.3 ms"),
        (0.0009997, "1.00 ms"),
        (0.009996, "10.0 ms"),
        (1.0, "1.00 s"),
        (119.0, "119 s"),
        (200.4, "3 min 20 s"),
        (-200.0, "-3 min 20 s"),
        (math.inf, "inf"),
    ],
)
def test_seconds_for_people(seconds: float, expected: str) -> None:
    """Three digits and a unit, also where the last are zeros: 4 ms next to 4.14 ms looks less exact."""
    assert expected == format_seconds(seconds)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.0174, "+1.74%"), (-0.2, "-20.00%"), (0.00006, "+0.01%"), (0.00004, ""), (-0.00004, ""), (0.0, "")],
)
def test_a_change_that_rounds_to_nothing_is_not_shown(ratio: float, expected: str) -> None:
    """Neither as a gain nor in brackets after a figure."""
    assert expected == format_change(ratio)
    assert (f" ({expected})" if expected else "") == in_brackets(ratio)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * 1024**3),
        ("800MiB", 800 * 1024**2),
        ("2GB", 2 * 10**9),
        ("800MB", 800 * 10**6),
        (" 1.5 gib ", 3 * 2**29),
        ("1e9", 10**9),
        ("1.5e9", 1_500_000_000),
        ("51_380_224", 51_380_224),
        ("51380224", 51_380_224),
        ("12 B", 12),
        ("+3kB", 3000),
        (".5KiB", 512),
        ("0.3MB", 300_000),
        ("9007199254740993", 2**53 + 1),
        (7, 7),
        (0, 0),
        (2e9, 2_000_000_000),
        (np.int64(5), 5),
    ],
)
def test_sizes_are_read(text: float | np.int64 | str, expected: int) -> None:
    """Binary and decimal units, in any case, exactly."""
    assert expected == parse_nbytes(text)


NO_TEXT: tuple[Any, ...] = (True, None, 1.5, math.nan, math.inf, -1, [], b"2GB", 2 + 0j, 2**63)
NO_SIZE = (
    "",
    "GiB",
    "2 bananas",
    "2 GiBs",
    "1,5GiB",
    "0x10",
    "--1",
    "1__0",
    "1.5",
    "nan",
    "inf",
    "2 3",
    "40%",
)


@pytest.mark.parametrize("text", [*NO_SIZE, *NO_TEXT, "-1", "\u00b2GB", "1e99GB"])
def test_what_is_no_size_is_refused(text: Any) -> None:
    """The message shows what came and what is accepted."""
    with pytest.raises(BadBudget) as caught:
        parse_nbytes(text)
    assert repr(text) in str(caught.value)
    assert '"2GiB"' in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.integers(0, 2**60))
def test_a_formatted_size_is_near(nbytes: int) -> None:
    """Parsing a formatted size loses less than one percent."""
    assert parse_nbytes(format_nbytes(nbytes)) == pytest.approx(nbytes, rel=0.006)


@given(st.integers(0, 10**6), st.sampled_from(["B", "KiB", "MiB", "GiB", "kB", "MB", "GB"]))
def test_whole_amounts_are_exact(amount: int, unit: str) -> None:
    """At any size."""
    base = 1024 if "i" in unit else 1000
    assert amount * base ** "bkmg".index(unit[0].lower()) == parse_nbytes(f"{amount}{unit}")


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_an_error(text: str) -> None:
    """No other exception is raised."""
    try:
        size = parse_nbytes(text)
    except BadBudget:
        size = 0
    assert size >= 0
