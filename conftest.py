"""Settings of every test: repeatable examples, one thread, since the models are small, and its watchers.

The sdist of each package holds this file too; the watchers and torch are not there for all of them.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator

import hypothesis
import pytest

hypothesis.settings.register_profile("remat", deadline=None, derandomize=True)
hypothesis.settings.load_profile("remat")

with contextlib.suppress(ImportError):  # the tests of graph and solvers need no torch
    import torch

    torch.set_num_threads(1)

Watch = Callable[[], contextlib.AbstractContextManager[list[str] | None]]
watch: Watch = contextlib.nullcontext
with contextlib.suppress(ImportError):
    from tests.helpers.generators import lanes_watched

    watch = lanes_watched


@pytest.fixture(autouse=True)
def draws_in_lanes() -> Iterator[list[str] | None]:
    """What lanes did to the process' random generators, which the model draws from: a test fails by it."""
    with watch() as found:
        yield found
    assert not found


@pytest.fixture
def hang_limit() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A context that raises after some seconds: what never ends fails its test."""

    @contextlib.contextmanager
    def within(seconds: int) -> Iterator[None]:
        def stop(*_: object) -> None:
            raise TimeoutError(f"not done after {seconds} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(seconds)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return within
