"""Read JSON files with checks, and write them atomically.

`read_json` raises one `BadFile` for every way in which a file can be unreadable. `Reader` checks the data and
names the place of the first mistake. Every number that drives a loop or an allocation is bounded: the length
of the file, the items of a list, bytes, seconds, rates.

The content of a cache, such as a measured time, cannot be checked for plausibility. So `write_sealed` adds a
checksum, and `read_sealed` refuses a file that was edited or damaged.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import chain
from typing import Any, NoReturn, TypeVar, final

from remat_graph.errors import BadFile, shown
from remat_graph.ir import MOST_NBYTES
from remat_graph.serialization import pipes
from remat_graph.serialization.atomic_write import write_whole
from remat_graph.serialization.inputs import WRITTEN_BY

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

MOST_FILE_NBYTES = 64 * 2**20  # a plan of a million ops; parsed, a file needs about twenty times its bytes
MOST_ITEMS = 4_000_000  # of one list: as many op runs as a file of that size can hold
_MOST_DEPTH = 64  # of content without a schema; Python's own limit is another one in each process
_LARGEST = 2**63 - 1  # indices go into 64-bit arrays
_LEAST_RATE = 1e-3  # of a link, bytes per second: towards 0 the seconds of a copy become infinite
_SEAL = "sha256"


def read_json(path: str | os.PathLike[str]) -> Any:
    """Parse a JSON file.

    Raises:
        BadFile: the file is missing, unreadable, too long, not UTF-8, not JSON, or cut off.
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
        raise BadFile(path=name, problem=f"cannot be read ({reason}): check the path") from None
    if not text.strip():
        raise BadFile(path=name, problem="is empty; a JSON file was wanted")
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        problem = f"is not valid JSON at line {error.lineno}: {error.msg}; it may be cut off, save it again"
        raise BadFile(path=name, problem=problem) from None
    except RecursionError:
        raise BadFile(path=name, problem="is nested too deeply for a file of remat") from None
    except ValueError as error:
        # For a number with too many digits, Python's own message asks for a change of a Python setting.
        problem = "a number of thousands of digits" if "digits" in str(error) else str(error)
        raise BadFile(path=name, problem=f"contains invalid data: {problem}") from None


def read_text(path: str | os.PathLike[str], most_nbytes: int) -> str:
    """Read a UTF-8 file of at most `most_nbytes` bytes.

    Raises:
        OSError: the file cannot be read, or is a pipe into which no process writes.
        UnicodeDecodeError: the file is not UTF-8.
        ValueError: the file is larger, or endless as some devices are.
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
        raise ValueError(f"it is longer than {most_nbytes // 1024:,} KiB, the limit for such files")
    return data.decode("utf-8-sig")  # some editors write a byte order mark


def write_json(data: Any, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write a JSON file atomically, with `private` for the user alone (see `atomic_write.write_whole`).

    Raises:
        OSError: the folder is missing or read-only; an existing file stays unchanged.
        ValueError: the data contains NaN, an infinity or something that is not JSON.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"
    write_whole(path, text, private=private)


def write_sealed(data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a cache file: an object with a checksum, for the user alone; errors as in `write_json`."""
    write_json({**data, _SEAL: _checksum(data)}, path, private=True)


def read_sealed(path: str | os.PathLike[str], kind: str, version: int) -> "Reader":
    """Read a file of `write_sealed` whose format must be `kind` and whose version must be `version`.

    Raises:
        BadFile: the file is missing, unreadable, of another format, or changed since it was written.
    """
    name = os.fspath(path)
    if not os.path.isfile(path):  # reading a pipe would block
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
        reader.fail("was edited or damaged: its checksum does not match its content")
    return reader


def _checksum(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number here")


def _without_repeats(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of an object; a key that comes twice is refused, because one would hide the other."""
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
    """A piece of JSON data with its place in the file; every getter checks the data or raises `BadFile`."""

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

    def get_or(self, key: str, read: "Callable[[Reader], T]", default: T) -> T:
        """The member of an object, read by `read`, or `default` if there is none."""
        found = self.find(key)
        return default if found is None else read(found)

    def items(self) -> list["Reader"]:
        """The items of a list."""
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

    def free_form(self) -> Mapping[str, Any]:
        """An object with any content, which is not nested deeper than a recursion over it can go."""
        level: list[Any] = [self.mapping()]
        for _ in range(_MOST_DEPTH):
            members = chain.from_iterable(part.values() if isinstance(part, dict) else part for part in level)
            level = [member for member in members if isinstance(member, dict | list | tuple)]
        if level:
            self.fail(f"nested too deeply: at most {_MOST_DEPTH} levels were wanted")
        return self.mapping()

    def known(self, keys: frozenset[str]) -> None:
        """Refuse an object with any other key, because the reader would ignore what the writer meant."""
        if unknown := sorted(set(self.mapping()) - keys):
            self.fail(f"unknown key {shown(unknown[0])}; the keys are {', '.join(sorted(keys))}")

    def header(self, kind: str, newest: int, word: str) -> None:
        """Check that the object names this format and a version that is known."""
        advice = WRITTEN_BY.get(word, "check the path")
        if not isinstance(self.data, dict) or "format" not in self.data:
            self.fail(f"is not a {word} file of remat: it names no format; {advice}")
        found = str(self.get("format").data)[:40]
        if found != kind:
            self.fail(f"is not a {word} file: its format is {found!r}, {kind!r} was wanted; {advice}")
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
        """A whole number of at least 0."""
        if isinstance(self.data, bool) or not isinstance(self.data, int) or not 0 <= self.data <= _LARGEST:
            self._wanted("a whole number from 0 to 2**63 - 1")
        return self.data

    def nbytes(self) -> int:
        """A size in bytes."""
        if self.size() > MOST_NBYTES:
            self.fail(f"at most {MOST_NBYTES:,} bytes were wanted, but it is {self.data:,}")
        return self.size()

    def rate(self) -> float:
        """Bytes per second of a link."""
        rate = self.seconds()
        if rate < _LEAST_RATE:
            self.fail(f"at least {_LEAST_RATE:g} bytes a second were wanted, but it is {rate:g}")
        return rate

    def seconds(self) -> float:
        """A finite number of at least 0."""
        return self._number(0.0)

    def signed_seconds(self) -> float:
        """A finite number."""
        return self._number(-_LARGEST)

    def _number(self, least: float) -> float:
        number = self.data
        if isinstance(number, bool) or not isinstance(number, int | float):
            self._wanted("a number")
        if not (least <= number <= _LARGEST and math.isfinite(number)):
            self._wanted(f"a finite number from {least:.2g} to {_LARGEST:.2g}")
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
            self.fail(f"{shown(word)} is not one of {', '.join(kinds)}")
