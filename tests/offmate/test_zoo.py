"""Plans that move are kept on disk as others are, and found for the same training alone."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from torch import nn

from remat_facade.planning.known_plans import SAVED
from remat_graph import Links, load_plan, save_plan
from remat_solvers.offload.solver import Offload
from tests.helpers.offmates import LINKS, MODELS, OPTIMIZERS, Run, differences, offmate

MAKE, BATCHES = MODELS["convolutions"]


class Solved(Exception):
    """The solver was asked."""


def built(
    folder: Path, budget: str = "60%", kind: Any = "adamw", zoo: Any = True, **options: None
) -> nn.Module:
    """A module and its optimizer, whose plan is looked for in a folder."""
    model = MAKE()
    optimizer = OPTIMIZERS[kind](model.parameters())
    return offmate(model, BATCHES(0), budget, optimizer=optimizer, cache_dir=folder, zoo=zoo, **options)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A folder with the plan of one module, and that module."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, built(folder)


@pytest.fixture
def nobody_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error instead of a plan."""

    def refuse(*_: Any) -> None:
        raise Solved

    monkeypatch.setattr(Offload, "solve", refuse)


def test_the_second_time_nothing_is_planned(
    kept: tuple[Path, nn.Module], nobody_solves: None, tmp_path: Path
) -> None:
    """The same schedule, homes and figures, and the reasons; trained to the bits of plain training."""
    folder, made = kept
    ours = built(folder)
    assert ours.plan.solver_stats[SAVED]
    assert made.plan.schedule == ours.plan.schedule
    assert (made.plan.on_host, made.plan.links) == (ours.plan.on_host, LINKS)
    assert made.plan.peak_nbytes == ours.plan.peak_nbytes
    assert made.plan.host_peak_nbytes == ours.plan.host_peak_nbytes > 0
    assert made.plan.notes == ours.plan.notes
    plain = MAKE()
    runs = [Run(plain, OPTIMIZERS["adamw"](plain.parameters()), BATCHES), Run(ours, ours.optimizer, BATCHES)]
    assert [] == differences(*(run.train(2) for run in runs))
    save_plan(ours.plan, tmp_path / "plan.json")
    assert ours.plan.time_s == load_plan(tmp_path / "plan.json", ours.graph).time_s


@pytest.mark.parametrize(
    "change",
    [
        {"budget": "61%"},
        {"host_budget": "21MiB"},
        {"links": Links(to_host_nbytes_per_s=2e9, to_device_nbytes_per_s=1e9)},
        {"optimizer_in_backward": True},
        {"accumulation": 2},
        {"kind": "sgd"},
        {"zoo": False},
    ],
)
def test_what_a_plan_depends_on(
    kept: tuple[Path, nn.Module], nobody_solves: None, change: dict[str, Any]
) -> None:
    """Another of any of these is planned anew."""
    with pytest.raises(Solved):
        built(kept[0], **change)


def test_bandwidths_that_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan serves where they are about the same, and not where a link has become another."""
    now = [LINKS]
    monkeypatch.setattr("remat_facade.entrypoints.offload_options.measure_links", lambda *_: now[0])
    assert SAVED not in built(tmp_path, links=None).plan.solver_stats
    for factor, found in ((1.1, True), (0.9, True), (1.5, False)):
        now[0] = attrs.evolve(LINKS, to_host_nbytes_per_s=factor * LINKS.to_host_nbytes_per_s)
        plan = built(tmp_path, links=None).plan
        assert found == (SAVED in plan.solver_stats)
    assert now[0] == plan.links  # and the new one takes the old one's place
    assert SAVED in built(tmp_path, links=None).plan.solver_stats


def test_another_shape_is_planned_for_the_homes_that_there_are(kept: tuple[Path, nn.Module]) -> None:
    """Its plan is kept as one for settled homes, and found by the next module in the same place."""
    folder, _ = kept
    batch = {name: value[:2] for name, value in BATCHES(0).items()}
    plans = []
    for _ in range(2):
        ours = built(folder)
        with pytest.warns(UserWarning, match="called in another way"):
            ours(**batch).backward()
        plans.append(ours.plan)
    assert [False, True] == [SAVED in plan.solver_stats for plan in plans]
    assert plans[0].schedule == plans[1].schedule
