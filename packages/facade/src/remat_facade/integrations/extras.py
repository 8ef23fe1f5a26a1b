"""Say which extra of this package installs a library that an integration imports."""

from collections.abc import Generator

from remat_graph.contexts import context


@context
def from_extra(library: str) -> Generator[None, None, None]:
    """A context that imports a library of the extra of the same name.

    Raises:
        ModuleNotFoundError: the library is not installed. A library that misses a part of its own raises its
            own error.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        advice = f'pip install "remat-facade[{library}]"'
        message = f"remat_facade.integrations.{library} needs {library}: {advice}"
        raise ModuleNotFoundError(message, name=library) from error
