"""Paths that a user names for output: checked before long work, then written atomically."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from remat_graph.errors import CannotWrite
from remat_graph.serialization import atomic_write

_NEVER_REPLACED = (".py", ".ipynb", ".toml", ".yaml", ".yml", ".safetensors", ".pt")


def check_paths(
    writes: Mapping[str, Path | None], reads: Mapping[str, str | Path | None] | None = None
) -> None:
    """Check before long work that every output can be written and that no two paths are the same file.

    Args:
        writes: output paths, by the option that names them.
        reads: input paths, which no output may overwrite.

    Raises:
        CannotWrite: a folder cannot be created or written, a path is a folder or a file of a kind that
            is never replaced, or two options name the same file, possibly by different spellings.
    """
    outputs = {option: path for option, path in writes.items() if path is not None}
    for path in outputs.values():
        _check_path(path)
    # An input that is not a file is not read: it may be the name of a config type.
    others = {name: Path(path) for name, path in (reads or {}).items() if path and os.path.isfile(path)}
    for option, path in outputs.items():
        for other, other_path in others.items():
            if _same_file(path, other_path):
                raise CannotWrite(path=path, reason=f"{option} names the same file as {other}")
        others[option] = path
    for path in outputs.values():
        if path.suffix.lower() in _NEVER_REPLACED and path.is_file():  # named by mistake
            raise CannotWrite(path=path, reason=f"a {path.suffix} file may be your code, settings or weights")


def _check_path(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise CannotWrite(path=path, reason="it is a folder")
    except OSError as error:
        raise CannotWrite(path=path, reason=_reason(error)) from error
    if not os.access(path if _is_special(path) else path.parent, os.W_OK):
        raise CannotWrite(path=path, reason="it or its folder is read-only")


def _is_special(path: Path) -> bool:
    """Whether the path is a pipe or a device, to which several outputs may be written."""
    return path.exists() and not path.is_file()


def _same_file(one: Path, two: Path) -> bool:
    """Whether both paths are one file (links, hard links, spelling), even if it does not exist yet."""
    try:
        if one.exists() and two.exists():
            return one.is_file() and one.samefile(two)
        one, two = Path(os.path.realpath(one)), Path(os.path.realpath(two))
        return one == two or (one.name == two.name and one.parent.samefile(two.parent))
    except OSError:  # a missing or invalid path
        return False


def save_to(path: Path, save: Callable[[Path], None]) -> Path:
    """Create the folder of `path` if needed and call `save`, which must write atomically.

    Raises:
        CannotWrite: the folder or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path)
    except OSError as error:
        raise CannotWrite(path=path, reason=_reason(error)) from error
    return path


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a file atomically; create its folder if needed.

    Args:
        path: the file.
        content: bytes, or text to encode as UTF-8.

    Raises:
        CannotWrite: the folder or the file cannot be written.
    """
    return save_to(Path(path), lambda path: atomic_write.write_whole(path, content))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
