"""A planned module as a config says."""

from typing import Any, Unpack, cast

from torch import nn

from remat_facade.config.types import Config, OffmateConfig
from remat_facade.entrypoints.options import AnyPath, Options
from remat_facade.entrypoints.rockmate import Rockmate
from remat_facade.planning.method import as_config


def from_config(
    model: nn.Module,
    sample: Any,
    budget: int | str,
    config: Config | AnyPath = "auto",
    **options: Unpack[Options],
) -> Rockmate:
    """A planned module as a config says.

    Args:
        model: as for `Rockmate`.
        sample: as for `Rockmate`.
        budget: as for `Rockmate`.
        config: a `Config`, the path of one, or a type's name.
        **options: as for `Rockmate`, or for `Offmate` where the config is of that type.

    Raises:
        BadConfig: no such type, or not a config, or it has no such option.
        BadFile: the path holds no config.
        MethodNotAvailable: the config's method is not in this version.
    """
    if as_config(config).type == OffmateConfig.type:
        from remat_facade.entrypoints.offmate import Offmate, check_options  # which builds on this module

        check_options(options)
        return Offmate(model, sample, budget, config=config, **cast(dict[str, Any], options))
    return Rockmate(model, sample, budget, config=config, **options)
