"""The plans that come with the package: those of a few known models, and what each of them is for.

Each is a plan file, and `manifest.json` says of each the model, the input, the budget and the device. All are
computed by data sheets of devices; nothing was measured. ``hatch run make-zoo`` makes them.

A plan fits its own graph only, with the sizes, the type and the kernels that it was made for. A model of the
same structure, at another size or on another device, gets it carried over, as a saved plan is
(`planning.zoo`): repaired, simulated on the present graph, and dropped if it is far from the bound.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import attrs

from remat_graph import Plan, load_plan

SHIPPED = Path(__file__).parent / "shipped"
"""The folder in the package."""

MANIFEST = "manifest.json"


@attrs.frozen(kw_only=True)
class ShippedPlan:
    """What one plan of the package is for, and what it promises there.

    Attributes:
        name: of the plan, and of its file.
        model: a function or class by its full name.
        inputs: names and shapes of what the model is called with.
        dtype: of its parameters.
        loss: a function of the model's output and a target, or empty if the model returns its loss.
        budget: as it was asked for.
        budget_nbytes: the same in bytes.
        peak_nbytes: of the plan.
        unplanned_nbytes: the peak without a plan.
        overhead: extra time, as a share of the unplanned step.
        lower_bound_overhead: no schedule has less.
        platform: the device, and that its times are computed from rates.
        structure: of the graph, by `remat_graph.structure`.
        versions: of the packages that made it.
    """

    name: str
    model: str
    inputs: str
    dtype: str
    loss: str
    budget: str
    budget_nbytes: int
    peak_nbytes: int
    unplanned_nbytes: int
    overhead: float
    lower_bound_overhead: float
    platform: str
    structure: str
    versions: Mapping[str, str]

    def load(self, folder: Path = SHIPPED) -> Plan:
        """Read the plan."""
        return load_plan(folder / f"{self.name}.json")


def shipped_plans(folder: Path = SHIPPED) -> tuple[ShippedPlan, ...]:
    """What plans there are, by name; none without a manifest."""
    path = folder / MANIFEST
    entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return tuple(ShippedPlan(**entry) for entry in entries)


def shipped_of(structure: str, folder: Path = SHIPPED) -> list[Plan]:
    """The plans for graphs of a structure."""
    return [each.load(folder) for each in shipped_plans(folder) if each.structure == structure]
