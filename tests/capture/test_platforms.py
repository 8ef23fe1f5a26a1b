"""A device is measured in one place and planned for in another."""

from pathlib import Path

import attrs
import pytest
import torch
from torch import nn

from remat_executor import PlannedModule, UnplannedUse, step_graph
from remat_executor.translation.keys import anywhere
from remat_graph import Measured, OpCost, load_platform, save_platform
from remat_graph.platforms.data_sheets import h200
from tests.helpers.planners import save_all


def network() -> nn.Module:
    """Products, a norm, dropout and activations."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 4))


def test_a_measured_device_is_planned_for_without_measuring(tmp_path: Path) -> None:
    """From its file: the very graph, and nothing is run."""
    sample = (torch.randn(8, 16),)
    planned = PlannedModule(network(), sample, {}, save_all, cache_dir=tmp_path)
    device = Measured(device="this one", date="2026-11-22", measurements=planned.measurements())
    save_platform(device, tmp_path / "platform.json")
    platform = load_platform(tmp_path / "platform.json")
    progress: list[tuple[str, int, int]] = []
    graph = step_graph(
        network(),
        sample,
        platform=platform,
        cache_dir=tmp_path / "elsewhere",
        on_progress=lambda *done: progress.append(done),
    )
    assert {total for what, _, total in progress if what == "measure"} == {0}
    assert graph.ops == planned.graph.ops


def test_what_was_not_measured_there_is_fitted(tmp_path: Path) -> None:
    """Another batch size: other keys, times of the same order, workspaces of here."""
    planned = PlannedModule(network(), (torch.randn(8, 16),), {}, save_all, cache_dir=tmp_path)
    measurements = [attrs.evolve(m, time_s=1.0) for m in planned.measurements()]
    platform = Measured(device="a slow one", date="2026-11-22", measurements=measurements)
    graph = step_graph(network(), (torch.randn(9, 16),), platform=platform, cache_dir=tmp_path)
    assert all(0.5 < op.first.time_s < 2.0 for op in graph.ops)


def test_times_of_a_platform_are_no_measurements(tmp_path: Path) -> None:
    """They would be passed on as if they were."""
    planned = PlannedModule(
        network(), (torch.randn(8, 16),), {}, save_all, platform=h200(), cache_dir=tmp_path
    )
    with pytest.raises(UnplannedUse, match=r"h200-spec .*, not measured; plan without platform="):
        planned.measurements()


class Asked:
    """A platform that notes what products are computed in."""

    name = "asked"

    def __init__(self) -> None:
        self.arithmetic: dict[str, set[str]] = {}

    def time_s(self, cost: OpCost) -> float:
        """A second."""
        if cost.flops:
            kind = "conv" if "convolution" in cost.key else "matmul"
            self.arithmetic.setdefault(kind, set()).add(cost.arithmetic)
        return 1.0


@pytest.mark.parametrize(
    ("dtype", "allowed", "expected"),
    [
        (torch.float32, False, {"conv": {"float32"}, "matmul": {"float32"}}),
        (torch.float32, True, {"conv": {"tf32"}, "matmul": {"tf32"}}),
        (torch.bfloat16, True, {"conv": {"bfloat16"}, "matmul": {"bfloat16"}}),
        (torch.float64, True, {"conv": {"float64"}, "matmul": {"float64"}}),
    ],
)
def test_platforms_hear_what_products_are_computed_in(
    tmp_path: Path, dtype: torch.dtype, allowed: bool, expected: dict[str, set[str]]
) -> None:
    """The dtype, and TF32 where torch's flags allow it for float32."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).to(dtype)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    platform = Asked()
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
        step_graph(model, (torch.randn(2, 3, 8, 8, dtype=dtype),), platform=platform, cache_dir=tmp_path)
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    assert expected == platform.arithmetic


def test_keys_forget_their_device() -> None:
    """Tensors, arguments and the call itself."""
    here = "aten.add.Tensor(float32[2, 3][3, 1]@cuda, 1, device=cuda) on cuda"
    assert anywhere(here) == anywhere(here.replace("cuda", "cpu"))
    assert anywhere("write 12") == "write 12"
