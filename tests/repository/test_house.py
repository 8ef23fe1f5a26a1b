"""The sources keep to the limits of the house."""

import pytest

from tests.repository.house import MOST, main, numbers


def test_every_number_is_within_its_limit() -> None:
    """Circles, contracts, long files and functions, duplicates."""
    assert {} == {name: found for name, found in numbers().items() if len(found) > MOST[name]}


def test_the_numbers_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, and the exit status of a house in order."""
    assert 0 == main()
    out = capsys.readouterr().out
    assert all(name in out for name in MOST)
