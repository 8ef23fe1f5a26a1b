"""Run a scenario three times, twice without the one line, and judge it."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks.integrations.budget_watch import BudgetWatch
from benchmarks.integrations.scenario import Run, Scenario, seed_everything
from remat_executor import RematWarning
from tests.helpers.ranks import Ranks


@attrs.frozen(kw_only=True)
class Outcome:
    """A run, its planned steps and what remat warned of."""

    run: Run
    watch: BudgetWatch
    warned: tuple[str, ...]


def row_of(scenario: Scenario, cache: Path) -> dict[str, Any]:
    """A row of the table. One that fails is a result."""
    began_s = time.perf_counter()
    start: dict[str, Any] = {"tool": scenario.tool, "feature": scenario.feature}
    try:
        if scenario.ranks > 1:
            with Ranks(scenario.ranks) as ranks:
                found = ranks.run(_judged_by_name, scenario.name, cache)
            rest = max(found, key=lambda row: len(row["wrong"]))
        else:
            rest = _judged(scenario, cache)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        rest = {"wrong": [f"{type(error).__name__}: {_first_line(error)}"]}
    return start | rest | {"took_s": time.perf_counter() - began_s}


def _judged_by_name(rank: int, name: str, cache: Path) -> dict[str, Any]:
    from benchmarks.integrations.table import all_scenarios

    return _judged(next(s for s in all_scenarios() if s.name == name), cache)


def _judged(scenario: Scenario, cache: Path) -> dict[str, Any]:
    plain, again, ours = (_outcome(scenario, cache, planned) for planned in (False, False, True))
    repeatable = not list(plain.run.differences(again.run))
    differences = list(plain.run.differences(ours.run))
    counts = {name: sum(runs.get(name, 0) for runs in ours.run.runs) for name in ("planned", "original")}
    steps, plans = len(ours.watch.peaks), ours.watch.plans
    return {
        "repeatable": repeatable,
        "bitwise": not differences,
        "steps": steps,
        "calls": plain.run.calls,
        "peak_share": None if scenario.parts else ours.watch.worst,
        "plans": plans,
        "warned": list(ours.warned),
        "notes": ours.run.notes,
        "wrong": list(_wrong(scenario, plain, ours, differences if repeatable else [], counts)),
    }


def _wrong(
    scenario: Scenario, plain: Outcome, ours: Outcome, differences: list[str], counts: dict[str, int]
) -> Iterator[str]:
    if not plain.run.losses:
        yield "no loss was recorded"
    if differences:
        yield f"{len(differences)} differ: {', '.join(sorted(differences)[:2])}"
    if scenario.unplanned:
        if not ours.warned:
            yield f"{scenario.unplanned}, and no warning said so"
    else:
        steps, original = len(ours.watch.peaks), counts["original"]
        if steps != plain.run.calls or original > plain.run.others:
            unplanned = max(0, original - plain.run.others)
            yield f"planned {steps} of {plain.run.calls} calls, {unplanned} unplanned"
        if ours.run.runs and counts["planned"] != steps:
            yield f"runs counts {counts['planned']} planned calls of {steps}"
    plans = ours.watch.plans
    if plans > scenario.plans:
        yield f"{plans} plans instead of {scenario.plans}"
    if ours.watch.above and not scenario.parts:
        yield ours.watch.above
    for what, held in (*plain.run.checks.items(), *ours.run.checks.items()):
        if not held:
            yield what
    for pattern in scenario.warns:
        if not any(re.search(pattern, text) for text in ours.warned):
            yield f"no warning with {pattern!r}"
    for text in ours.warned:
        if not scenario.unplanned and not any(re.search(pattern, text) for pattern in scenario.warns):
            yield f"warned: {text}"


def _outcome(scenario: Scenario, cache: Path, planned: bool) -> Outcome:
    """Run once, silently."""
    watch = BudgetWatch()
    seed_everything()
    with (
        # A random name must not hold "mpt", from which axolotl concludes what model is in it.
        tempfile.TemporaryDirectory(prefix="run-") as folder,
        warnings.catch_warnings(record=True) as caught,
        quiet(),
        watch.watching(),
    ):
        warnings.simplefilter("always")
        run = Run(planned=planned, folder=Path(folder), cache=cache)
        watch.kept = run.kept_on_device
        scenario.run(run)
        watch.reserve_nbytes = run.reserve_nbytes
        if planned:
            from remat_facade import planned as plan_of

            modules = [plan_of(model) for model in run.models]
            run.runs = [dict(module.runs) for module in modules if module is not None]
            if len(run.runs) < len(run.models):
                run.checks["a model has no plan"] = False
        run.models.clear()
    torch.set_default_dtype(torch.float32)
    gc.collect()
    ours = [str(w.message).splitlines()[0] for w in caught if issubclass(w.category, RematWarning)]
    return Outcome(run=run, watch=watch, warned=tuple(dict.fromkeys(ours)))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let no tool write progress; errors keep their traceback."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1 if type(error).__name__ == "RankError" else 0] if lines else ""
