"""Configs: which method plans, and how; one attrs class per type, saved and loaded as YAML.

A file says its `type` and any of that type's fields; what it leaves out keeps its default. What `save_config`
writes explains every field in a comment and ends with YAML's end mark, so that a file cut short is noticed.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs

from remat_facade.config.fields import (
    accounting,
    budget_or_none,
    class_or_none,
    did_you_mean,
    flag,
    flag_or_none,
    fraction,
    link_rates,
    option,
    option_mapping,
    path_or_none,
    plain_name,
    quoted,
    read_options,
    read_plain_number,
    seconds_or_none,
    whole_number,
)
from remat_facade.errors import BadConfig
from remat_graph.errors import shown
from remat_solvers.protocol import MOST_PARTS, MOST_PASSES, MOST_SLOTS

_natural, _several = whole_number(0), whole_number(2)
_parts, _several_parts = whole_number(1, MOST_PARTS), whole_number(2, MOST_PARTS)
_slots, _passes = whole_number(2, MOST_SLOTS), whole_number(1, MOST_PASSES)


_BACKEND = "The mixed-integer solver, by the name cvxpy has for it; HIGHS comes with remat."
_SLOTS = "Memory levels of the dynamic program: more are finer and slower."
_LEVELS = "Budgets for what each distinct block keeps: more give a longer menu."


@attrs.frozen(kw_only=True)
class Config:
    """Options that every method has.

    Attributes:
        seed: seeds every random choice of the solver.
        time_limit_s: wall-clock seconds for the solver, or None.
    """

    type: ClassVar[str] = ""
    about: ClassVar[str] = ""

    seed: int = option(0, "Seeds every random choice of the solver: same seed, same plan.", _natural)
    time_limit_s: float | None = option(
        None,
        "Seconds after which the solver returns its best plan so far; null lets it do all of its work.",
        seconds_or_none,
        read_plain_number,
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
                    field=quoted(name), problem=f"{cls.type} has no such field{did_you_mean(name, known)}"
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

    gap: float = option(
        0.001,
        "How near to the bound is near enough, as a share of the step; measured times are no more exact.",
        fraction,
        read_plain_number,
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

    stages: int = option(64, "Most stages of the chain; neighbours are joined beyond.", _parts)
    slots: int = option(500, _SLOTS, _slots)


@attrs.frozen(kw_only=True)
class CheckmateConfig(Config):
    """One integer linear program over the whole graph (Checkmate).

    Attributes:
        backend: the mixed-integer solver.
        accounting: how the program counts memory and time.
    """

    type: ClassVar[str] = "checkmate"
    about: ClassVar[str] = "one integer linear program over the whole graph"

    backend: str = option("HIGHS", _BACKEND, plain_name)
    accounting: str = option(
        "referee",
        "How the program counts: referee, or paper, to compare with the paper; the referee judges either.",
        accounting,
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

    stages: int = option(32, "Most blocks; neighbours are joined beyond.", _parts)
    slots: int = option(500, _SLOTS, _slots)
    levels: int = option(6, _LEVELS, _parts)
    exact: int = option(60, "A block of at most so many ops is given to the integer program.", _natural)
    block_seconds: float | None = option(
        1.0, "Seconds for one block at one budget; null for no limit.", seconds_or_none, read_plain_number
    )
    backend: str = option("HIGHS", _BACKEND, plain_name)


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

    segments: int = option(8, "Most segments that one level is cut into.", _several_parts)
    leaf: int = option(40, "A subgraph of at most so many ops is solved as it is.", _several)
    levels: int = option(4, _LEVELS, _parts)
    options: int = option(4, "Most options of a segment that the program on top sees.", _parts)
    leaf_seconds: float | None = option(
        1.0, "Seconds for one leaf at one budget; null for no limit.", seconds_or_none, read_plain_number
    )
    top_seconds: float | None = option(
        30.0, "Seconds for the program on top; null for no limit.", seconds_or_none, read_plain_number
    )
    backend: str = option("HIGHS", _BACKEND, plain_name)


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

    segments: int = option(16, "Most segments that one level is cut into.", _several_parts)
    leaf: int = option(80, "A subgraph of at most so many ops is not cut any more.", _several)
    exact: int = option(
        40, "A subgraph of at most so many ops is given to the integer program too.", _natural
    )
    slots: int = option(400, _SLOTS, _slots)
    levels: int = option(6, _LEVELS, _parts)
    leaf_seconds: float | None = option(
        1.0,
        "Seconds for the integer program of one leaf at one budget; null for no limit.",
        seconds_or_none,
        read_plain_number,
    )
    moves: int = option(20_000, "Changes that the search may try in one leaf.", _natural)
    backend: str = option("HIGHS", _BACKEND, plain_name)


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

    host_budget: int | str | None = option(
        None,
        'Most host memory for what moves: bytes or a text such as "64GiB"; null for 80 % of what is free.',
        budget_or_none,
    )
    optimizer: str | None = option(
        None,
        'A class of torch.optim, or "module:Class" of a module imported before; null: Adam in the backward.',
        class_or_none,
    )
    optimizer_options: Mapping[str, Any] = option(
        {}, "Keyword arguments of that class, such as {lr: 1e-5}.", option_mapping, read_options
    )
    optimizer_in_backward: bool | None = option(
        None,
        "Whether each backward steps by itself; null: only where no optimizer is named or given.",
        flag_or_none,
    )
    master_weights: bool = option(
        False, "Whether parameters in 16 bits are stepped in 32: a master of each is kept.", flag
    )
    weights: str | None = option(
        None,
        "A safetensors file with the values of the model, which may be on the meta device; null for none.",
        path_or_none,
    )
    accumulation: int = option(
        1, "Micro-batches to a step, which the plan is made for; any other number works too.", _passes
    )
    links: Mapping[str, float | str | None] | None = option(
        None,
        'Bytes a second by name, such as {to_host_nbytes_per_s: "55GB"}; null to measure them.',
        link_rates,
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
    return class_of(type)()


def class_of(type: object) -> type[Config]:
    """The class of configs of a type, by its name."""
    types = config_types()
    if not isinstance(type, str) or type not in types:
        hint = did_you_mean(type, list(types))
        raise BadConfig(
            field="type", problem=f"there is no type {shown(type)}{hint}; there are {', '.join(types)}"
        )
    return types[type]
