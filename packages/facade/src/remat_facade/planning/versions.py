"""The versions of the packages that a plan depends on."""

import sys
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Versions of the packages that a plan depends on, by name."""
    found = {name: version(name) for name in ("remat-graph", "remat-solvers", "remat-facade")}
    if "torch" in sys.modules:  # a plan of a saved graph does not depend on torch
        found["torch"] = version("torch")
    return found
