"""Configs: which method plans, and how; one attrs class per type, saved and loaded as YAML.

A file says its `type` and any of that type's fields; what it leaves out keeps its default. What `save_config`
writes explains every field in a comment and ends with YAML's end mark, so that a file cut short is noticed.
"""

import difflib
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Self

import attrs
import yaml

from remat_facade import yamlfile
from remat_facade.errors import BadConfig
from remat_facade.files import write_whole
from remat_graph import BadFile, Links
from remat_graph.budget import parse_nbytes
from remat_graph.errors import BadBudget, cut, shown
from remat_graph.jsonfile import read_text
from remat_solvers.protocol import MOST_PARTS, MOST_PASSES, MOST_SLOTS

FORMAT = 1
_MARK = "remat_config"


def _option(
    default: Any, doc: str, check: Callable[[Any], str | None], read: Callable[[Any], Any] | None = None
) -> Any:
    """A documented field; `check` returns what is wrong with a value, or None, and `read` makes the value."""

    def validate(_: "Config", field: "attrs.Attribute[Any]", value: object) -> None:
        problem = check(value)
        if problem:
            raise BadConfig(field=field.name, problem=f"{problem}, got {shown(value)}")

    return attrs.field(default=default, validator=validate, converter=read, metadata={"doc": doc})


_MOST = 2**63 - 1  # of what nothing is done for each: numbers go into 64-bit ones
LONGEST_S = 1e9  # what may be waited for; clocks cannot count for ever


def _whole(least: int, most: int = _MOST) -> Callable[[object], str | None]:
    wanted = (
        f"wants a whole number, {least} or more"
        if most == _MOST
        else f"wants a whole number, {least} to {most:,}"
    )

    def check(value: object) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return None if good else wanted

    return check


_natural, _several = _whole(0), _whole(2)
_parts, _several_parts = _whole(1, MOST_PARTS), _whole(2, MOST_PARTS)
_slots, _passes = _whole(2, MOST_SLOTS), _whole(1, MOST_PASSES)


def _positive_or_none(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_S:
        return None
    return f"wants seconds above 0, up to {LONGEST_S:.0e}, or null for none"


def _share(value: object) -> str | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
    return None if good else "wants a number from 0 to below 1"


def _accounting(value: object) -> str | None:
    return None if value in ("referee", "paper") else 'wants "referee" or "paper"'


def _name(value: object) -> str | None:
    return None if isinstance(value, str) and value else "wants the name of a solver that cvxpy has"


_BACKEND = "The mixed-integer solver, by the name cvxpy has for it; HIGHS comes with remat."
_SLOTS = "Memory levels of the dynamic program: more are finer and slower."
_LEVELS = "Budgets for what each distinct block keeps: more give a longer menu."


def _budget_or_none(value: object) -> str | None:
    good = value is None or (isinstance(value, int | str) and not isinstance(value, bool))
    return None if good else 'wants bytes, a text such as "64GiB", or null'


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "wants true or false"


def _flag_or_none(value: object) -> str | None:
    return None if value is None or isinstance(value, bool) else "wants true, false, or null"


def _class_or_none(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value and all(value.split(":"))):
        return None
    return 'wants a class of torch.optim such as "AdamW", "module:Class", or null'


def _path_or_none(value: object) -> str | None:
    return None if value is None or (isinstance(value, str) and value) else "wants a path, or null"


def _options(value: object) -> str | None:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return "wants names with values, such as {lr: 0.001}"
    endless = [name for name, option in value.items() if isinstance(option, float) and not isfinite(option)]
    return f"wants a finite {cut(endless[0], 80)}" if endless else None


def _read_options(value: Any) -> Any:
    """Keyword arguments as Python has them: YAML takes 1e-5 for a text, and knows no tuples."""
    if not isinstance(value, Mapping):
        return value
    return {name: _number(option) for name, option in value.items()}


def _number(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_number, value))
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _plain_number(value: Any) -> Any:
    """The same for one number."""
    return _number(value) if isinstance(value, str) else value


def _rates(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return 'wants bytes a second by name, such as {to_host_nbytes_per_s: "55GB"}, or null'
    known = [field.name for field in attrs.fields(Links)]
    for name in value:
        if name not in known:
            return f"there is no rate {_told(name)}{_suggest(name, known)}; there are {', '.join(known)}"
    try:
        links_from(value)
    except (BadBudget, OverflowError, TypeError, ValueError):
        return 'wants bytes a second above 0, as numbers or texts such as "55GB"'
    return None


def links_from(rates: Mapping[str, Any]) -> Links:
    """The links of bytes a second by name, as numbers or texts such as "55GB"; null is as if left out.

    Raises:
        BadBudget: a text is no amount of bytes.
        ValueError: a rate is none.
    """
    if not all(type(rate) in (int, float, str, type(None)) for rate in rates.values()):
        raise ValueError("a rate is a number of bytes a second, or a text that says one")
    given = {name: _number(rate) for name, rate in rates.items() if rate is not None}
    return Links(**{n: float(parse_nbytes(r) if isinstance(r, str) else r) for n, r in given.items()})


@attrs.frozen(kw_only=True)
class Config:
    """Options that every method has.

    Attributes:
        seed: seeds every random choice of the solver.
        time_limit_s: wall-clock seconds for the solver, or None.
    """

    type: ClassVar[str] = ""
    about: ClassVar[str] = ""

    seed: int = _option(0, "Seeds every random choice of the solver: same seed, same plan.", _natural)
    time_limit_s: float | None = _option(
        None,
        "Seconds after which the solver returns its best plan so far; null lets it do all of its work.",
        _positive_or_none,
        _plain_number,
    )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Make a config from names and values.

        Raises:
            BadConfig: there is no such field, or a value is of the wrong type or size.
        """
        known = [field.name for field in attrs.fields(cls)]
        for name in fields:
            if name not in known:
                raise BadConfig(
                    field=_told(name), problem=f"{cls.type} has no such field{_suggest(name, known)}"
                )
        return cls(**fields)

    def with_(self, **changes: Any) -> Self:
        """A copy with other values; those that are None stay as they are."""
        return attrs.evolve(self, **{name: value for name, value in changes.items() if value is not None})


@attrs.frozen(kw_only=True)
class AutoConfig(Config):
    """The portfolio: several methods, the best valid plan wins.

    Attributes:
        gap: how near to the lower bound is near enough, as a ratio of the step's time.
    """

    type: ClassVar[str] = "auto"
    about: ClassVar[str] = "several methods, the best valid plan wins"

    gap: float = _option(
        0.001,
        "How near to the bound is near enough, as a share of the step; measured times are no more exact.",
        _share,
        _plain_number,
    )


class NorematConfig(Config):
    """Nothing is recomputed: the unplanned step, as the thing to compare with."""

    type = "noremat"
    about = "nothing is recomputed: what to compare with"


@attrs.frozen(kw_only=True)
class RotorConfig(Config):
    """Dynamic programming over a chain of blocks (rotor).

    Attributes:
        stages: most stages of the chain.
        slots: memory levels.
    """

    type: ClassVar[str] = "rotor"
    about: ClassVar[str] = "dynamic programming over a chain of blocks"

    stages: int = _option(64, "Most stages of the chain; neighbours are joined beyond.", _parts)
    slots: int = _option(500, _SLOTS, _slots)


@attrs.frozen(kw_only=True)
class CheckmateConfig(Config):
    """One integer linear program over the whole graph (Checkmate).

    Attributes:
        backend: the mixed-integer solver.
        accounting: how the program counts memory and time.
    """

    type: ClassVar[str] = "checkmate"
    about: ClassVar[str] = "one integer linear program over the whole graph"

    backend: str = _option("HIGHS", _BACKEND, _name)
    accounting: str = _option(
        "referee",
        "How the program counts: referee, or paper, to compare with the paper; the referee judges either.",
        _accounting,
    )


@attrs.frozen(kw_only=True)
class RockmateConfig(Config):
    """An integer linear program inside each block, rotor over the blocks (Rockmate).

    Attributes:
        stages: most blocks.
        slots: memory levels.
        levels: budgets for what each distinct block keeps.
        exact: a block of at most so many ops is given to the integer program.
        block_seconds: limit by the clock for one block at one budget.
        backend: the mixed-integer solver.
    """

    type: ClassVar[str] = "rockmate"
    about: ClassVar[str] = "an integer linear program in each block, rotor over the blocks"

    stages: int = _option(32, "Most blocks; neighbours are joined beyond.", _parts)
    slots: int = _option(500, _SLOTS, _slots)
    levels: int = _option(6, _LEVELS, _parts)
    exact: int = _option(60, "A block of at most so many ops is given to the integer program.", _natural)
    block_seconds: float | None = _option(
        1.0, "Seconds for one block at one budget; null for no limit.", _positive_or_none, _plain_number
    )
    backend: str = _option("HIGHS", _BACKEND, _name)


@attrs.frozen(kw_only=True)
class HilpConfig(Config):
    """Integer linear programs over a hierarchy of subgraphs (H-ILP).

    Attributes:
        segments: most segments of one level.
        leaf: a graph of at most so many ops is solved as it is.
        levels: budgets for what each distinct segment keeps.
        options: most options of a segment that the program on top sees.
        leaf_seconds: limit by the clock for one leaf at one budget.
        top_seconds: limit by the clock for the program on top.
        backend: the mixed-integer solver.
    """

    type: ClassVar[str] = "hilp"
    about: ClassVar[str] = "integer linear programs over a hierarchy of subgraphs"

    segments: int = _option(8, "Most segments that one level is cut into.", _several_parts)
    leaf: int = _option(40, "A subgraph of at most so many ops is solved as it is.", _several)
    levels: int = _option(4, _LEVELS, _parts)
    options: int = _option(4, "Most options of a segment that the program on top sees.", _parts)
    leaf_seconds: float | None = _option(
        1.0, "Seconds for one leaf at one budget; null for no limit.", _positive_or_none, _plain_number
    )
    top_seconds: float | None = _option(
        30.0, "Seconds for the program on top; null for no limit.", _positive_or_none, _plain_number
    )
    backend: str = _option("HIGHS", _BACKEND, _name)


@attrs.frozen(kw_only=True)
class HiremateConfig(Config):
    """A hierarchy of subgraphs, each planned by the method that suits it (HiRemate).

    Attributes:
        segments: most segments of one level.
        leaf: a graph of at most so many ops is not cut.
        exact: a graph of at most so many ops is also given to the integer program.
        slots: memory levels.
        levels: budgets for what each distinct segment keeps.
        leaf_seconds: limit by the clock for the integer program of one leaf at one budget.
        moves: changes that the search may try in one leaf.
        backend: the mixed-integer solver.
    """

    type: ClassVar[str] = "hiremate"
    about: ClassVar[str] = "a hierarchy of subgraphs, each planned by the method that suits it"

    segments: int = _option(16, "Most segments that one level is cut into.", _several_parts)
    leaf: int = _option(80, "A subgraph of at most so many ops is not cut any more.", _several)
    exact: int = _option(
        40, "A subgraph of at most so many ops is given to the integer program too.", _natural
    )
    slots: int = _option(400, _SLOTS, _slots)
    levels: int = _option(6, _LEVELS, _parts)
    leaf_seconds: float | None = _option(
        1.0,
        "Seconds for the integer program of one leaf at one budget; null for no limit.",
        _positive_or_none,
        _plain_number,
    )
    moves: int = _option(20_000, "Changes that the search may try in one leaf.", _natural)
    backend: str = _option("HIGHS", _BACKEND, _name)


@attrs.frozen(kw_only=True)
class OffmateConfig(Config):
    """Recomputing and moving to the host in one plan (OffMate).

    Attributes:
        host_budget: most host memory that moved values may take.
        optimizer: the optimizer's class, by name.
        optimizer_options: its keyword arguments.
        optimizer_in_backward: whether it steps during the backward.
        master_weights: whether parameters in 16 bits are stepped in 32.
        weights: the path of a safetensors file with the model's values.
        accumulation: micro-batches to a step.
        links: bandwidths by the names of `remat_graph.Links`, instead of measuring them.
    """

    type: ClassVar[str] = "offmate"
    about: ClassVar[str] = "recomputing and moving to the host in one plan"

    host_budget: int | str | None = _option(
        None,
        'Most host memory for what moves: bytes or a text such as "64GiB"; null for 80 % of what is free.',
        _budget_or_none,
    )
    optimizer: str | None = _option(
        None,
        'A class of torch.optim, or "module:Class" of a module imported before; null: Adam in the backward.',
        _class_or_none,
    )
    optimizer_options: Mapping[str, Any] = _option(
        {}, "Keyword arguments of that class, such as {lr: 1e-5}.", _options, _read_options
    )
    optimizer_in_backward: bool | None = _option(
        None,
        "Whether each backward steps by itself; null: only where no optimizer is named or given.",
        _flag_or_none,
    )
    master_weights: bool = _option(
        False, "Whether parameters in 16 bits are stepped in 32: a master of each is kept.", _flag
    )
    weights: str | None = _option(
        None,
        "A safetensors file with the values of the model, which may be on the meta device; null for none.",
        _path_or_none,
    )
    accumulation: int = _option(
        1, "Micro-batches to a step, which the plan is made for; any other number works too.", _passes
    )
    links: Mapping[str, float | str | None] | None = _option(
        None,
        'Bytes a second by name, such as {to_host_nbytes_per_s: "55GB"}; null to measure them.',
        _rates,
    )


def config_types() -> dict[str, type[Config]]:
    """The config class of each type's name."""
    classes: tuple[type[Config], ...] = (
        AutoConfig,
        RotorConfig,
        RockmateConfig,
        CheckmateConfig,
        HilpConfig,
        HiremateConfig,
        OffmateConfig,
        NorematConfig,
    )
    return {cls.type: cls for cls in classes}


def generate_config(type: str = "auto") -> Config:
    """The defaults of one type.

    Args:
        type: auto, rotor, rockmate, checkmate, hilp, hiremate, offmate or noremat.

    Raises:
        BadConfig: there is no such type.
    """
    return _class_of(type)()


def config_text(config: Config) -> str:
    """The YAML of a config, every field explained."""
    lines = [f"# remat config: {config.about}", "---", f"{_MARK}: {FORMAT}", f"type: {config.type}"]
    for field in attrs.fields(config.__class__):
        value = yamlfile.text_of({field.name: getattr(config, field.name)})
        lines += ["", f"# {field.metadata['doc']}", value]
    return "\n".join([*lines, "...", ""])


def save_config(config: Config, path: str | Path) -> Path:
    """Write a config as YAML, whole or not at all.

    Raises:
        CannotWrite: the file cannot be written.
    """
    return write_whole(path, config_text(config))


def load_config(path: str | Path) -> Config:
    """Read what `save_config` wrote, or a shorter file by hand.

    Raises:
        BadFile: the file is missing, cut short, newer, not a config, or holds what a config cannot.
    """
    name = str(path)
    try:
        text = read_text(path, yamlfile.MOST_NBYTES)
    except UnicodeDecodeError as error:
        raise BadFile(path=name, problem=f"is not text, so no config: {_HINT}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadFile(path=name, problem=f"cannot be read ({reason}): check the path") from error
    try:
        return _from_text(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}" if mark else ""
        if isinstance(error, yamlfile.Refused):
            problem = f"{line} {error.problem}"
        else:
            problem = "is not valid YAML" + (f" at {line}" if line else "")
        raise BadFile(path=name, problem=f"{problem}: correct it, or {_HINT}") from error
    except BadConfig as error:
        raise BadFile(path=name, problem=f"{error.field}: {error.problem}") from error


_HINT = "write one with `remat config TYPE --out FILE`"


def _from_text(text: str) -> Config:
    lines = [line.strip() for line in text.splitlines()]
    if "---" in lines and "..." not in lines:
        raise BadConfig(
            field="end", problem=f"the file is cut short (it starts with --- but never ends): {_HINT}"
        )
    content = yamlfile.parse(text)
    if not isinstance(content, dict) or "type" not in content:
        raise BadConfig(field="type", problem=f"missing, so this is not a remat config: {_HINT}")
    version = content.pop(_MARK, FORMAT)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BadConfig(field=_MARK, problem=f"wants a version such as {FORMAT}, got {shown(version)}")
    if version > FORMAT:
        raise BadConfig(
            field=_MARK,
            problem=f"format {version} is newer than this remat reads ({FORMAT}): upgrade remat-facade",
        )
    return _class_of(content.pop("type")).from_fields(content)


def _class_of(type: object) -> type[Config]:
    types = config_types()
    if not isinstance(type, str) or type not in types:
        hint = _suggest(type, list(types))
        raise BadConfig(
            field="type", problem=f"there is no type {shown(type)}{hint}; there are {', '.join(types)}"
        )
    return types[type]


def _suggest(name: object, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else ()
    return f": did you mean {close[0]}?" if close else ""


def _told(name: object) -> str:
    return cut(name, 80) if isinstance(name, str) else shown(name)
