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
    granted: int | str = budget

    def plan() -> Hiremate:
        options = {"zoo": False, "time_limit_s": setting.plan_s, "runtime": runtime}
        return Hiremate(model, sample, granted, **options)

    try:
        try:
            module = plan()
        except InfeasibleBudget as error:
            granted = int(_ABOVE_SMALLEST * error.smallest_nbytes)
            found.said.append(f"no schedule fits {budget}: given {format_nbytes(granted)}")
            module = plan()
    except StepOverBudget as error:
        granted = error.advised_nbytes
        found.said.append(f"{format_nbytes(error.peak_nbytes)} taken: given {format_nbytes(granted)}")
        if not setting.small:  # of tiny models, the blocks of the allocator are a large part
            found.wrong.append(f"{budget} refused: {error}; goal: a plan within it")
        module = plan()
    keep(setting.platforms, module.measurements(), setting.device)
    return module, resolve_budget(granted, module.graph)
