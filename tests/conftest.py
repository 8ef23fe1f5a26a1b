"""Fixtures that tests of several folders share."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat_executor import RematWarning


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cost cache of this test alone."""
    return tmp_path


@pytest.fixture
def only_our_warnings_count() -> Iterator[None]:
    """What trainers and their libraries warn of among themselves is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RematWarning)
        yield
