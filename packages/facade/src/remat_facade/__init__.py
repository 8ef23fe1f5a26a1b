"""Train any PyTorch model inside a memory budget given in bytes.

Names are loaded when first used: `import remat_facade` is quick, and planning a saved graph needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat_executor import Buckets as Buckets
    from remat_facade.config import Config as Config
    from remat_facade.config import generate_config as generate_config
    from remat_facade.config import load_config as load_config
    from remat_facade.config import save_config as save_config
    from remat_facade.entrypoints import Hiremate as Hiremate
    from remat_facade.entrypoints import PureCheckmate as PureCheckmate
    from remat_facade.entrypoints import PureHiremate as PureHiremate
    from remat_facade.entrypoints import PureRockmate as PureRockmate
    from remat_facade.entrypoints import PureRotor as PureRotor
    from remat_facade.entrypoints import Rockmate as Rockmate
    from remat_facade.factory import from_config as from_config
    from remat_facade.offmate import Offmate as Offmate

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


def __getattr__(name: str) -> Any:
    """Load a public name from the module that holds it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    torch_free = ("Config", "generate_config", "load_config", "save_config")
    places = dict.fromkeys(torch_free, "config") | {"Offmate": "offmate", "from_config": "factory"}
    module = import_module(f"{__name__}.{places.get(name, 'entrypoints')}")
    return getattr(module, name)  # `entrypoints` has `Buckets` too


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
