"""Fixtures that tests of several folders share."""

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cost cache of this test alone."""
    return tmp_path
