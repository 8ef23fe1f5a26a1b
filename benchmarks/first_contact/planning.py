"""Plan a model for a row."""

from torch import Tensor, nn

from benchmarks.device_steps import keep
from benchmarks.first_contact.rows import Findings
from remat_facade import Hiremate, InfeasibleBudget
from remat_graph import format_nbytes, resolve_budget

_ABOVE_SMALLEST = 1.1  # of the smallest budget with a schedule, where a share is too small


def planned(
    model: nn.Module, sample: Tensor, budget: str, found: Findings, runtime: str = "eager"
) -> tuple[Hiremate, int]:
    """The planned model and its budget in bytes; the measured operators go to the platform of the device.

    A model that cannot keep to its share gets a little more than the smallest budget with a schedule.
    """
    setting = found.setting
    options = {"zoo": False, "time_limit_s": setting.plan_s, "runtime": runtime}
    granted: int | str = budget
    try:
        module = Hiremate(model, sample, granted, **options)
    except InfeasibleBudget as error:
        granted = int(_ABOVE_SMALLEST * error.smallest_nbytes)
        found.said.append(f"no schedule fits {budget}: given {format_nbytes(granted)}")
        module = Hiremate(model, sample, granted, **options)
    keep(setting.platforms, module.measurements(), setting.device)
    return module, resolve_budget(granted, module.graph)
