"""Train any PyTorch model inside a memory budget given in bytes.

Names are loaded when first used: `import remat_facade` is quick, and planning a saved graph needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat_executor import Buckets as Buckets
    from remat_facade.config.types import Config as Config
    from remat_facade.config.types import generate_config as generate_config
    from remat_facade.config.yaml_io import load_config as load_config
    from remat_facade.config.yaml_io import save_config as save_config
    from remat_facade.entrypoints.factory import from_config as from_config
    from remat_facade.entrypoints.offmate import Offmate as Offmate
    from remat_facade.entrypoints.rockmate import Hiremate as Hiremate
    from remat_facade.entrypoints.rockmate import PureCheckmate as PureCheckmate
    from remat_facade.entrypoints.rockmate import PureHiremate as PureHiremate
    from remat_facade.entrypoints.rockmate import PureRockmate as PureRockmate
    from remat_facade.entrypoints.rockmate import PureRotor as PureRotor
    from remat_facade.entrypoints.rockmate import Rockmate as Rockmate

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "Config",
    "Hiremate",
    "Offmate",
    "PureCheckmate",
    "PureHiremate",
    "PureRockmate",
    "PureRotor",
    "Rockmate",
    "from_config",
    "generate_config",
    "load_config",
    "save_config",
]


_PLACES = {
    "Buckets": "entrypoints.options",
    "Config": "config.types",
    "Offmate": "entrypoints.offmate",
    "from_config": "entrypoints.factory",
    "generate_config": "config.types",
    "load_config": "config.yaml_io",
    "save_config": "config.yaml_io",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that holds it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES.get(name, 'entrypoints.rockmate')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
