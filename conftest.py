"""Settings of every test: repeatable examples, one thread, since the models are small, and its watchers."""

import contextlib
from collections.abc import Iterator

import hypothesis
import pytest

hypothesis.settings.register_profile("remat", deadline=None, derandomize=True)
hypothesis.settings.load_profile("remat")

try:  # the tests of graph and solvers need no torch
    import torch

    from tests.helpers.generators import lanes_watched
except ImportError:
    lanes_watched = contextlib.nullcontext  # type: ignore[assignment, misc]
else:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def draws_in_lanes() -> Iterator[list[str]]:
    """What lanes did to the process' random generators, which the model draws from: a test fails by it."""
    with lanes_watched() as found:
        yield found
    assert not found
