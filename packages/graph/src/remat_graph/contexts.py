"""Make context managers from generators that let every exception pass unchanged.

`contextlib` sets an attribute of an exception that passes. A class with frozen objects (a frozen dataclass,
for example) refuses that, and the user would see the refusal instead of the error.
"""

from collections.abc import Callable, Generator
from functools import wraps
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar, final

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


def context(function: Callable[P, Generator[T, None, None]]) -> "Callable[P, Context[T]]":
    """Like `contextlib.contextmanager`: the result is a context manager or decorates a function."""

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Context[T]:
        return Context(lambda: function(*args, **kwargs))

    return made


@final
class Context(Generic[T]):
    """Enter by running a generator to its one `yield`; exit by running the generator to its end."""

    def __init__(self, make: Callable[[], Generator[T, None, None]]) -> None:
        self._make, self._generator = make, make()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that each call runs in a new context."""

        @wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            with Context(self._make):
                return function(*args, **kwargs)

        return within

    def __enter__(self) -> T:
        return next(self._generator)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            if error is None:
                next(self._generator)
            else:
                self._generator.throw(error)
        except StopIteration as ended:
            return ended is not error
        except BaseException as raised:
            # Python turns a StopIteration that passes through a generator into another error.
            caused = isinstance(error, StopIteration) and raised.__cause__ is error
            if error is None or not (raised is error or caused):
                raise
            BaseException.with_traceback(error, traceback)  # without the generator's frames
            return False
        raise RuntimeError("a context yields once")
