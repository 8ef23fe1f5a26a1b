"""Configs: the planning method and its options; one attrs class per type, saved and loaded as YAML.

A file has a `type` and any fields of that type; omitted fields keep their defaults. `save_config` explains
every field in a comment and ends the file with YAML's end mark, which reveals a truncated file.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import attrs

from remat_facade.config import fields as check
from remat_facade.config.fields import did_you_mean, option, quoted, whole_number
from remat_facade.errors import BadConfig
from remat_graph.errors import shown
from remat_solvers.protocol import MOST_PARTS, MOST_PASSES, MOST_SLOTS

_natural, _several = whole_number(0), whole_number(2)
_parts, _several_parts = whole_number(1, MOST_PARTS), whole_number(2, MOST_PARTS)
_slots, _passes = whole_number(2, MOST_SLOTS), whole_number(1, MOST_PASSES)

_BACKEND = "The mixed-integer solver, by its name in cvxpy; HIGHS comes with remat."
_SLOTS = "Memory levels of the dynamic program: more are finer and slower."
_LEVELS = "Budgets at which each distinct block is planned: more give more options per block."


def _number(default: float | None, doc: str, valid: check.Check = check.seconds_or_none) -> Any:
    return option(default, doc, valid, check.read_plain_number)


@attrs.frozen(kw_only=True)
class Config:
    """Options that every method has; the text of each `option` documents the field."""

    type: ClassVar[str] = ""
    about: ClassVar[str] = ""

    seed: int = option(0, "Seeds every random choice of the solver: same seed, same plan.", _natural)
    time_limit_s: float | None = _number(
        None,
        "Seconds after which the solver returns its best plan so far; null for 20 s up to 1,000 ops and 60 s "
        "at 10,000, but for no limit with offmate.",
        check.time_limit_or_none,
    )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Make a config from names and values.

        Raises:
            BadConfig: a field is unknown, or a value has the wrong type or size.
        """
        known = [field.name for field in attrs.fields(cls)]
        for name in fields:
            if name not in known:
                raise BadConfig(
                    field=quoted(name), problem=f"{cls.type} has no such field{did_you_mean(name, known)}"
                )
        return cls(**fields)

    def with_(self, **changes: Any) -> Self:
        """A copy with other values; None keeps the present value."""
        return attrs.evolve(self, **{name: value for name, value in changes.items() if value is not None})


@attrs.frozen(kw_only=True)
class StepConfig(Config):
    """Options of the methods that plan one forward and backward."""

    ways: str = option(
        "exact",
        "Other ways to run ops that a plan may choose: exact (the same bits), rounding (also those that may "
        "differ in the last bits) or none.",
        check.ways,
    )
    outputs: Literal["kept", "dropped"] = option(
        "kept",
        "Whether the caller keeps the outputs that are not differentiated until the backward ends: kept, or "
        "dropped before it.",
        check.outputs,
    )
    gradients: Literal["auto", "new", "present"] = option(
        "auto",
        "What calls find in .grad: new (nothing), present (a gradient for every parameter) or auto (planned "
        "like new at first).",
        check.gradients,
    )
    prove_s: float = _number(
        0.0,
        "Seconds for raising the lower bound of a plan that was found; within time_limit_s if that is given.",
        check.seconds_or_zero,
    )


@attrs.frozen(kw_only=True)
class AutoConfig(StepConfig):
    """The portfolio: several methods, the best valid plan wins."""

    type: ClassVar[str] = "auto"
    about: ClassVar[str] = "several methods, the best valid plan wins"

    gap: float = _number(
        0.001, "Stop at this distance from the lower bound, as a share of the step's time.", check.fraction
    )


class NorematConfig(StepConfig):
    """No recomputation: the unplanned step, for comparison."""

    type = "noremat"
    about = "no recomputation, for comparison"


@attrs.frozen(kw_only=True)
class RotorConfig(StepConfig):
    """Dynamic programming over a chain of blocks (rotor)."""

    type: ClassVar[str] = "rotor"
    about: ClassVar[str] = "dynamic programming over a chain of blocks"

    stages: int = option(64, "Most stages of the chain; beyond it, adjacent ones are joined.", _parts)
    slots: int = option(500, _SLOTS, _slots)


@attrs.frozen(kw_only=True)
class CheckmateConfig(StepConfig):
    """One integer linear program over the whole graph (Checkmate)."""

    type: ClassVar[str] = "checkmate"
    about: ClassVar[str] = "one integer linear program over the whole graph"

    backend: str = option("HIGHS", _BACKEND, check.plain_name)
    accounting: str = option(
        "referee",
        "How the program counts: referee, or paper to compare with the paper; the referee judges both.",
        check.accounting,
    )


@attrs.frozen(kw_only=True)
class MonetConfig(StepConfig):
    """One integer linear program over the whole graph and the ways to run its ops (MONeT)."""

    type: ClassVar[str] = "monet"
    about: ClassVar[str] = "one integer linear program over the whole graph and the ways to run its ops"

    backend: str = option("HIGHS", _BACKEND, check.plain_name)
    without: tuple[str, ...] = option(
        (),
        "Families of ways that the plan may not choose, such as [masks, pools]: the ablations of the paper.",
        check.family_names,
        check.read_list,
    )


@attrs.frozen(kw_only=True)
class RockmateConfig(StepConfig):
    """An integer linear program inside each block, rotor over the blocks (Rockmate)."""

    type: ClassVar[str] = "rockmate"
    about: ClassVar[str] = "an integer linear program in each block, rotor over the blocks"

    stages: int = option(32, "Most blocks; beyond it, adjacent ones are joined.", _parts)
    slots: int = option(500, _SLOTS, _slots)
    levels: int = option(6, _LEVELS, _parts)
    exact: int = option(60, "Largest block, in ops, that the integer program solves.", _natural)
    block_seconds: float | None = _number(1.0, "Seconds for one block at one budget; null for no limit.")
    backend: str = option("HIGHS", _BACKEND, check.plain_name)


@attrs.frozen(kw_only=True)
class HilpConfig(StepConfig):
    """Integer linear programs over a hierarchy of subgraphs (H-ILP)."""

    type: ClassVar[str] = "hilp"
    about: ClassVar[str] = "integer linear programs over a hierarchy of subgraphs"

    segments: int = option(8, "Most segments of one level of the hierarchy.", _several_parts)
    leaf: int = option(40, "Largest subgraph, in ops, that is solved without being divided.", _several)
    levels: int = option(4, _LEVELS, _parts)
    options: int = option(4, "Most options of a segment in the program of the level above.", _parts)
    leaf_seconds: float | None = _number(1.0, "Seconds for one leaf at one budget; null for no limit.")
    top_seconds: float | None = _number(30.0, "Seconds for the program of the top level; null for no limit.")
    backend: str = option("HIGHS", _BACKEND, check.plain_name)


@attrs.frozen(kw_only=True)
class HiremateConfig(StepConfig):
    """A hierarchy of subgraphs, each planned by the method that suits it (HiRemate)."""

    type: ClassVar[str] = "hiremate"
    about: ClassVar[str] = "a hierarchy of subgraphs, each planned by the method that suits it"

    segments: int = option(16, "Most segments of one level of the hierarchy.", _several_parts)
    leaf: int = option(80, "Largest subgraph, in ops, that is not divided.", _several)
    exact: int = option(40, "Largest subgraph, in ops, that the integer program solves too.", _natural)
    slots: int = option(400, _SLOTS, _slots)
    levels: int = option(6, _LEVELS, _parts)
    leaf_seconds: float | None = _number(
        1.0, "Seconds of the integer program for one leaf at one budget; null for no limit."
    )
    moves: int = option(20_000, "Most changes that the local search tries in one leaf.", _natural)
    backend: str = option("HIGHS", _BACKEND, check.plain_name)


@attrs.frozen(kw_only=True)
class OffmateConfig(Config):
    """Recomputation and offloading to the host in one plan (OffMate)."""

    type: ClassVar[str] = "offmate"
    about: ClassVar[str] = "recomputation and offloading to the host in one plan"

    host_budget: int | str | None = option(
        None,
        'Most host memory for moved values: bytes or a size such as "64GiB"; null for 80 % of what is free.',
        check.budget_or_none,
    )
    optimizer: str | None = option(
        None,
        'A class of torch.optim, or "module:Class" of an imported module; null for Adam in the backward.',
        check.class_or_none,
    )
    optimizer_options: Mapping[str, Any] = option(
        {}, "Keyword arguments of that class, such as {lr: 1e-5}.", check.option_mapping, check.read_options
    )
    optimizer_in_backward: bool | None = option(
        None,
        "Whether each backward steps the optimizer; null: only if no optimizer is named or given.",
        check.flag_or_none,
    )
    master_weights: bool = option(
        False, "Whether the optimizer keeps and steps a 32-bit master of each 16-bit parameter.", check.flag
    )
    weights: str | None = option(
        None,
        "A safetensors file with the values of the model, which may be on the meta device; null for none.",
        check.path_or_none,
    )
    accumulation: int = option(
        1, "Micro-batches of a step that the plan is made for; any other number also works.", _passes
    )
    links: Mapping[str, float | str | None] | None = option(
        None,
        'Bytes per second by name, such as {to_host_nbytes_per_s: "55GB"}, and start_s, the seconds in which '
        "the host starts a copy; null to measure them.",
        check.link_rates,
    )


def config_types() -> dict[str, type[Config]]:
    """The config class of each type's name."""
    classes: tuple[type[Config], ...] = (
        AutoConfig,
        RotorConfig,
        RockmateConfig,
        CheckmateConfig,
        MonetConfig,
        HilpConfig,
        HiremateConfig,
        OffmateConfig,
        NorematConfig,
    )
    return {cls.type: cls for cls in classes}


def generate_config(type: str = "auto") -> Config:
    """The default config of one type.

    Args:
        type: auto, rotor, rockmate, checkmate, monet, hilp, hiremate, offmate or noremat.

    Raises:
        BadConfig: the type is unknown.
    """
    return class_of(type)()


def class_of(type: object) -> type[Config]:
    """The config class of a type's name.

    Raises:
        BadConfig: the type is unknown.
    """
    types = config_types()
    if not isinstance(type, str) or type not in types:
        hint = did_you_mean(type, list(types))
        raise BadConfig(
            field="type", problem=f"unknown type {shown(type)}{hint}; expected one of {', '.join(types)}"
        )
    return types[type]
