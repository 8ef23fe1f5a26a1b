"""Settings and fixtures of every test: repeatable examples, and one thread, since the models are small.

The sdist of each package holds this file too. Some of them have no torch, and none has `tests.helpers`.
"""

import contextlib
import gc
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


@pytest.fixture(autouse=True, scope="module")
def quick_collection() -> None:
    """What is there before a file's tests, libraries above all, is searched for garbage once."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def draws_in_lanes() -> Iterator[list[str] | None]:
    """A test fails if a lane touches a global random generator, from which the model draws."""
    with watch() as found:
        yield found
    assert not found


@pytest.fixture
def hang_limit() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A context that raises after some seconds, so that code that never ends fails its test.

    It raises once more at its end if the code inside has caught the error, as a portfolio of solvers does.
    """

    @contextlib.contextmanager
    def within(seconds: int) -> Iterator[None]:
        late = False

        def stop(*_: object) -> None:
            nonlocal late
            late = True
            raise TimeoutError(f"not done after {seconds} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(seconds)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        if late:
            raise TimeoutError(f"not done after {seconds} s, and the error was caught")

    return within
