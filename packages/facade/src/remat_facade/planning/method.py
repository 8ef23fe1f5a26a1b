"""Choose the planning method from a config, a type's name or a solver's name; imports no torch."""

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import attrs

from remat_facade.config.types import Config, OffmateConfig, StepConfig, config_types, generate_config
from remat_facade.errors import BadConfig, MethodNotAvailable
from remat_graph import Grads
from remat_graph.errors import shown
from remat_graph.serialization.fields import AnyPath
from remat_solvers import solver_names, solver_parameters
from remat_solvers.running.stopping import default_limit_s

_COMMON = frozenset(field.name for field in attrs.fields(StepConfig))
_OF_STEP = _COMMON.difference(field.name for field in attrs.fields(Config))


@attrs.frozen(kw_only=True)
class Method:
    """A solver and its arguments."""

    solver: str = "auto"  # the registered name of the solver
    time_limit_s: float | None = None  # wall-clock seconds, or None
    parameters: Mapping[str, Any] = attrs.field(factory=dict)  # parameters of the solver, including the seed
    ways: str = "exact"  # which other ways to run ops a plan may choose, as for `Rockmate`

    outputs: Literal["kept", "dropped"] = "kept"  # whether the caller keeps them, as for `Rockmate`
    gradients: Literal["auto", "new", "present"] = "auto"  # what calls find, as for `Rockmate`
    prove_s: float = 0.0  # seconds for raising the bound of the plan

    def limit_s(self, ops: int) -> float:
        """The limit by the clock for planning a graph of n ops, in seconds."""
        return default_limit_s(ops) if self.time_limit_s is None else self.time_limit_s

    def proving_s(self, planned_s: float) -> float:
        """The seconds for raising the bound of a plan that took `planned_s`: within a limit that is given."""
        left_s = float("inf") if self.time_limit_s is None else self.time_limit_s - planned_s
        return min(self.prove_s, left_s)

    @property
    def grads(self) -> Grads:
        """The state of ``.grad`` that a step's first plan is for."""
        return Grads.PRESENT if self.gradients == "present" else Grads.NEW

    @classmethod
    def from_config(cls, config: Config) -> "Method":
        """The method of a config.

        Raises:
            MethodNotAvailable: the method is not available in this version.
            BadConfig: the config is of type offmate, which plans an optimizer too.
        """
        if isinstance(config, OffmateConfig):
            raise BadConfig(field="type", problem="offmate plans the optimizer too: use Offmate")
        if config.type not in solver_names():
            raise MethodNotAvailable(method=config.type)
        own = {
            f.name: getattr(config, f.name) for f in attrs.fields(config.__class__) if f.name not in _COMMON
        }
        # A solver is loaded only for a seed: it may import numpy.
        seeded = config.seed and "seed" in solver_parameters(config.type)
        parameters = own | (_seeded(config.seed) if seeded else {})
        step = {name: getattr(config, name) for name in _OF_STEP} if isinstance(config, StepConfig) else {}
        return cls(
            solver=config.type,
            time_limit_s=config.time_limit_s,
            parameters=parameters,
            **({"ways": "none"} | step),
        )


def choose_method(
    default: str,
    config: Config | AnyPath | None,
    solver: str | None,
    seed: int,
    time_limit_s: float | None,
    ways: str | None = None,
    *,
    outputs: str | None = None,
    gradients: str | None = None,
    prove_s: float | None = None,
) -> Method:
    """The method that a user's arguments name.

    Args:
        default: the method of the entry point; only "auto" can be replaced.
        config: replaces the default.
        solver: replaces the default by a registered solver; a name that is also a config type means that
            config.
        seed: replaces the config's seed unless it is 0.
        time_limit_s: replaces the config's limit unless it is None.
        ways: replaces the config's ways unless it is None.
        outputs: replaces the config's unless it is None.
        gradients: replaces the config's unless it is None.
        prove_s: replaces the config's unless it is None.

    Raises:
        BadConfig: the arguments contradict each other.
        MethodNotAvailable: the method is not available in this version.
    """
    if not isinstance(solver, str | None):
        raise BadConfig(field="solver", problem=f"expected the name of a solver, got {shown(solver)}")
    if default != "auto" and (config is not None or solver is not None):
        named = as_config(config).type if config is not None else solver
        if named != default:
            raise BadConfig(
                field="type", problem=f"this class runs {default} only, not {named}: use Hiremate"
            )
    if solver is not None and config is not None:
        raise BadConfig(
            field="solver", problem="the config names the method already: give either solver or config"
        )
    if config is None:
        config = solver if solver in config_types() else default
    chosen = as_config(config).with_(seed=seed or None, time_limit_s=time_limit_s)
    if solver is not None and solver not in config_types():
        method = Method(solver=solver, time_limit_s=chosen.time_limit_s, parameters=_seeded(chosen.seed))
    else:
        method = Method.from_config(chosen)
    given: dict[str, Any] = {"ways": ways, "outputs": outputs, "gradients": gradients, "prove_s": prove_s}
    return attrs.evolve(method, **{name: value for name, value in given.items() if value is not None})


def as_config(config: Config | AnyPath) -> Config:
    """The config of a type's name or a path; a `Config` unchanged.

    Raises:
        BadConfig: the value is neither a config, nor a type's name, nor a path.
        BadFile: the path holds no config.
    """
    if isinstance(config, Config):
        return config
    if not isinstance(config, str | PathLike):
        problem = f"expected a Config, a path or a type's name, got a {type(config).__name__}"
        raise BadConfig(field="config", problem=problem)
    looks_like_path = isinstance(config, PathLike) or Path(config).suffix or os.path.exists(config)
    if looks_like_path and config not in config_types():
        from remat_facade.config.yaml_io import load_config  # imports yaml

        return load_config(Path(config))
    return generate_config(str(config))


def _seeded(seed: int) -> dict[str, Any]:
    """Solver parameters of a seed; none for 0, the default of every solver with random choices."""
    return {"seed": seed} if seed else {}
