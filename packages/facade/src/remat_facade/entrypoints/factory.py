"""Build the module that a config describes."""

from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from torch import nn

from remat_facade.config.types import Config, OffmateConfig
from remat_facade.entrypoints.budgeted_module import BudgetedModule
from remat_facade.entrypoints.keywords import OffmateKeywords, RockmateKeywords, SharedKeywords
from remat_facade.entrypoints.rockmate import Rockmate
from remat_facade.planning.method import as_config
from remat_graph.serialization.fields import AnyPath

if TYPE_CHECKING:
    from remat_facade.entrypoints.offmate import Offmate


@overload
def from_config(
    model: nn.Module,
    sample: Any,
    budget: int | str,
    config: OffmateConfig | Literal["offmate"],
    **options: Unpack[OffmateKeywords],
) -> "Offmate": ...


@overload
def from_config(
    model: nn.Module,
    sample: Any,
    budget: int | str,
    config: Literal[
        "auto", "noremat", "rotor", "checkmate", "monet", "rockmate", "hilp", "hiremate"
    ] = "auto",
    **options: Unpack[RockmateKeywords],
) -> Rockmate: ...


@overload
def from_config(
    model: nn.Module,
    sample: Any,
    budget: int | str,
    config: Config | PathLike[str],
    **options: Unpack[RockmateKeywords],
) -> BudgetedModule: ...


@overload  # a string may be the path of any config, so only the shared keywords are allowed
def from_config(
    model: nn.Module, sample: Any, budget: int | str, config: str, **options: Unpack[SharedKeywords]
) -> BudgetedModule: ...


def from_config(
    model: nn.Module, sample: Any, budget: int | str, config: Config | AnyPath = "auto", **options: Any
) -> BudgetedModule:
    """Build the module that a config describes.

    Args:
        model: as for `Rockmate`.
        sample: as for `Rockmate`.
        budget: as for `Rockmate`.
        config: a `Config`, the path of one, or a type's name.
        **options: as for `Rockmate`, or for `Offmate` if the config is of type offmate.

    Raises:
        BadConfig: the type is unknown, the value is not a config, or its class has no such option.
        BadFile: the path holds no config.
        MethodNotAvailable: the config's method is not available in this version.
    """
    if as_config(config).type == OffmateConfig.type:
        # Imported here, because a `Rockmate` needs no offloading engine.
        from remat_facade.entrypoints.offmate import Offmate, check_options

        check_options(options)
        return Offmate(model, sample, budget, config=config, **options)
    return Rockmate(model, sample, budget, config=config, **options)
