"""JSON files that are read with suspicion and written whole or not at all.

`read_json` turns every way in which a file can be unreadable into one `BadFile`; `Reader` walks the data and
names the place of the first thing that is not what was wanted. Whatever drives a loop or an allocation is
bounded: the length of the file, the members of a list, bytes, seconds, rates.

Caches hold what nobody can judge by looking at it, such as what an operator took. So `write_sealed` adds a
checksum, and `read_sealed` refuses a file that was edited or damaged.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NoReturn, TypeVar, final

from remat_graph.errors import BadFile, shown
from remat_graph.ir import MOST_NBYTES
from remat_graph.serialization import pipes
from remat_graph.serialization.whole_file import write_whole

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

MOST_FILE_NBYTES = 64 * 2**20  # a plan of a million ops; parsed, a file takes some twenty times its bytes
MOST_ITEMS = 4_000_000  # of one list: as many runs of ops as such a file can name
_LARGEST = 2**63 - 1  # indices go into 64-bit arrays
_LEAST_RATE = 1e-3  # of a link, bytes a second: towards 0 the seconds of a copy become infinite
_SEAL = "sha256"


def read_json(path: str | os.PathLike[str]) -> Any:
    """Parse a JSON file.

    Raises:
        BadFile: missing, unreadable, too long, not UTF-8, not JSON, or cut off.
    """
    name = os.fspath(path)
    try:
        text = read_text(path, MOST_FILE_NBYTES)
    except FileNotFoundError:
        raise BadFile(path=name, problem="no such file; check the path") from None
    except UnicodeDecodeError:
        raise BadFile(path=name, problem="is not text; a JSON file was wanted") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadFile(path=name, problem=f"cannot be read: {reason}") from None
    if not text.strip():
        raise BadFile(path=name, problem="is empty; a JSON file was wanted")
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        problem = f"is not valid JSON at line {error.lineno}: {error.msg}; it may be cut off, save it again"
        raise BadFile(path=name, problem=problem) from None
    except RecursionError:
        raise BadFile(path=name, problem="is nested too deeply to be one of our files") from None
    except ValueError as error:
        # Python's own words for the latter tell to change a setting of Python's.
        problem = "a number of thousands of digits" if "digits" in str(error) else str(error)
        raise BadFile(path=name, problem=f"holds what cannot be used: {problem}") from None


def read_text(path: str | os.PathLike[str], most_nbytes: int) -> str:
    """Read a file of text that holds no more than so many bytes.

    Raises:
        OSError: it cannot be read, or is a pipe into which nobody writes.
        UnicodeDecodeError: it is not UTF-8.
        ValueError: it is larger, or endless as some devices are.
    """
    if pipes.is_pipe(path):
        data = b""
        for chunk in pipes.chunks(path):
            data += chunk
            if len(data) > most_nbytes:
                break
    else:
        with open(path, "rb") as file:
            data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise ValueError(f"it is longer than {most_nbytes // 1024:,} KiB, so none of our files")
    return data.decode("utf-8-sig")  # some editors begin a text with a mark


def write_json(data: Any, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write a JSON file in one step (`remat_graph.serialization.whole_file`).

    Args:
        data: what goes into it.
        path: the file.
        private: whether nobody but the user may read it.

    Raises:
        OSError: the folder is missing or read-only; an existing file is left as it was.
        ValueError: the data holds NaN, an infinity or something that is not JSON.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"
    write_whole(path, text, private=private)


def write_sealed(data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a cache's file: an object with a checksum, for nobody but the user; errors as of `write_json`."""
    write_json({**data, _SEAL: _checksum(data)}, path, private=True)


def read_sealed(path: str | os.PathLike[str], kind: str, version: int) -> "Reader":
    """Read what `write_sealed` wrote.

    Args:
        path: the file.
        kind: what it must say that its format is.
        version: the only one that is known.

    Raises:
        BadFile: it is missing, unreadable, of another format, or not as it was written.
    """
    name = os.fspath(path)
    if not os.path.isfile(path):  # a pipe would have us wait
        raise BadFile(path=name, problem="is not a file")
    reader = Reader(read_json(path), name)
    if (reader.get("format").data, reader.get("version").data) != (kind, version):
        reader.fail(f"is not version {version} of {kind}")
    data = dict(reader.mapping())
    seal = data.pop(_SEAL, None)
    try:
        unchanged = seal == _checksum(data)
    except (ValueError, RecursionError):  # infinite numbers, too many brackets
        unchanged = False
    if not unchanged:
        reader.fail("was edited or damaged: its checksum is of another content")
    return reader


def _checksum(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number here")


def _without_repeats(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of an object; of two with one name the second would hide the first."""
    found = dict(members)
    if len(found) < len(members):
        seen: set[str] = set()
        for key, _ in members:
            if key in seen:
                raise ValueError(f"{shown(key)} twice in one object")
            seen.add(key)
    return found


@final
class Reader:
    """A piece of JSON data and its place in the file; every getter checks, or raises `BadFile`."""

    def __init__(self, data: Any, source: str, place: str = "") -> None:
        self.data, self.source, self.place = data, source, place

    def fail(self, problem: str) -> NoReturn:
        """Raise a `BadFile` for this place."""
        raise BadFile(path=self.source, problem=f"{self.place}: {problem}" if self.place else problem)

    def _wanted(self, wanted: str) -> NoReturn:
        came = "null" if self.data is None else f"{type(self.data).__name__} {shown(self.data)}"
        self.fail(f"{wanted} was wanted, but it is {came}")

    def get(self, key: str) -> "Reader":
        """The member of an object; it must be there."""
        found = self.find(key)
        return self.fail(f"{key!r} is missing") if found is None else found

    def find(self, key: str) -> "Reader | None":
        """The member of an object, or None if there is none."""
        self.mapping()
        place = f"{self.place}.{key}" if self.place else key
        return Reader(self.data[key], self.source, place) if key in self.data else None

    def maybe(self, key: str, read: "Callable[[Reader], T]") -> T | None:
        """The member of an object as `read` sees it, or None if there is none."""
        found = self.find(key)
        return None if found is None else read(found)

    def get_or(self, key: str, read: "Callable[[Reader], T]", default: T) -> T:
        """The member of an object as `read` sees it, or `default` if there is none."""
        found = self.find(key)
        return default if found is None else read(found)

    def items(self) -> list["Reader"]:
        """The members of a list."""
        if not isinstance(self.data, list):
            self._wanted("a list")
        if len(self.data) > MOST_ITEMS:
            self.fail(f"a list of at most {MOST_ITEMS:,} was wanted, but it has {len(self.data):,}")
        return [Reader(data, self.source, f"{self.place}[{i}]") for i, data in enumerate(self.data)]

    def mapping(self) -> Mapping[str, Any]:
        """An object."""
        if not isinstance(self.data, dict):
            self._wanted("an object")
        return self.data

    def known(self, keys: frozenset[str]) -> None:
        """An object without any key that the reader would ignore, which would lose what the writer meant."""
        if unknown := sorted(set(self.mapping()) - keys):
            self.fail(f"unknown key {shown(unknown[0])}; it wants one of {', '.join(sorted(keys))}")

    def header(self, kind: str, newest: int, word: str) -> None:
        """An object that begins as our files do: with its format, and a version that we know."""
        if not isinstance(self.data, dict) or "format" not in self.data:
            self.fail(f"is not a {word} file of remat: it names no format; check the path")
        found = str(self.get("format").data)[:40]
        if found != kind:
            self.fail(f"is not a {word} file: its format is {found!r}, {kind!r} was wanted; check the path")
        version = self.get("version").size()
        if version > newest:
            advice = "upgrade remat-graph, or save it again"
            self.fail(f"has version {version}, newer than our {newest}: {advice}")
        if version < 1:
            self.fail(f"has version {version}; versions count from 1")

    def text(self) -> str:
        """A string."""
        if not isinstance(self.data, str):
            self._wanted("text")
        if not self.data.isascii() and any("\ud800" <= letter <= "\udfff" for letter in self.data):
            self._wanted("text that can be written")
        return self.data

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.data, bool):
            self._wanted("true or false")
        return self.data

    def size(self) -> int:
        """A whole number from 0 on."""
        if isinstance(self.data, bool) or not isinstance(self.data, int) or not 0 <= self.data <= _LARGEST:
            self._wanted("a whole number from 0 on, up to 2**63 - 1,")
        return self.data

    def nbytes(self) -> int:
        """A size in bytes."""
        if self.size() > MOST_NBYTES:
            self.fail(f"at most {MOST_NBYTES:,} bytes were wanted, but it is {self.data:,}")
        return self.size()

    def rate(self) -> float:
        """Bytes a second of a link."""
        rate = self.seconds()
        if rate < _LEAST_RATE:
            self.fail(f"at least {_LEAST_RATE:g} bytes a second were wanted, but it is {rate:g}")
        return rate

    def seconds(self) -> float:
        """A finite number from 0 on."""
        number = self.data
        if isinstance(number, bool) or not isinstance(number, int | float):
            self._wanted("a number")
        if not (0 <= number <= _LARGEST and math.isfinite(number)):
            self._wanted(f"a finite number from 0 on, up to {_LARGEST:.2g},")
        return float(number)

    def index(self, count: int, kind: str) -> int:
        """An index into `count` things."""
        number = self.size()
        if number >= count:
            self.fail(f"there is no {kind} {number}, only {count}")
        return number

    def indices(self, count: int, kind: str) -> tuple[int, ...]:
        """A list of indices into `count` things."""
        return tuple(item.index(count, kind) for item in self.items())

    def choice(self, kinds: type[E]) -> E:
        """A member of an enumeration, by its text."""
        word = self.text()
        try:
            return kinds(word)
        except ValueError:
            self.fail(f"{shown(word)} is none of {', '.join(kinds)}")
