"""Plan a model for a row."""

from torch import Tensor, nn

from benchmarks.device_steps import keep
from benchmarks.first_contact.rows import Findings
from remat_facade import Hiremate, InfeasibleBudget, StepOverBudget
from remat_graph import format_nbytes, resolve_budget

_ABOVE_SMALLEST = 1.1  # of the smallest budget with a schedule, where a share is too small


def planned(
    model: nn.Module, sample: Tensor, budget: str, found: Findings, runtime: str = "eager"
) -> tuple[Hiremate, int]:
    """The planned model and its budget in bytes; the measured operators go to the platform of the device.

    A model that cannot keep to its share gets a little more than the smallest budget with a schedule, and one
    whose runtime or allocator needs more gets what the error advises.
    """
    setting = found.setting
    options = {"zoo": False, "time_limit_s": setting.plan_s, "runtime": runtime}
    granted: int | str = budget
    module: Hiremate | None = None
    while module is None:
        before = granted
        try:
            module = Hiremate(model, sample, granted, **options)
        except InfeasibleBudget as error:
            granted = int(_ABOVE_SMALLEST * error.smallest_nbytes)
            found.said.append(f"no schedule fits {before}: given {format_nbytes(granted)}")
            if before != budget:
                raise
        except StepOverBudget as error:
            granted = error.advised_nbytes
            found.said.append(f"{format_nbytes(error.peak_nbytes)} taken: given {format_nbytes(granted)}")
            found.figures.setdefault("refused", []).append(error.budget_nbytes)
            if len(found.figures["refused"]) > 1:
                raise  # what it advises is enough
    keep(setting.platforms, module.measurements(), setting.device)
    return module, resolve_budget(granted, module.graph)
