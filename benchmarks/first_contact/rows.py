"""Rows of the first contact, and the goals that they are judged by."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from remat_graph import format_nbytes

PEAK_OFF = 0.01  # of the predicted peak
STEP_OFF = 0.05  # of the predicted time
FULL_BUDGET_RATIO = 1.015  # of eager's step


@attrs.frozen(kw_only=True)
class Setting:
    """What each row is run with.

    Attributes:
        device: where models train.
        small: whether models are tiny, to test the script: bits and budgets are judged, times and predicted
            peaks are not.
        platforms: the folder of platform files.
        end_s: when, by `time.monotonic`, the section must be done.
    """

    device: torch.device
    small: bool
    platforms: Path
    end_s: float = float("inf")

    @property
    def plan_s(self) -> float:
        """Seconds for a solver."""
        return 4.0

    @property
    def steps(self) -> int:
        """Steps of a median."""
        return 2 if self.small else 9


@attrs.frozen(kw_only=True)
class Row:
    """One check.

    Attributes:
        section, name: which.
        said: the figures for people.
        figures: what was measured: bytes, seconds, ratios.
        wrong: each goal that was missed, with the figure.
        skipped: why nothing was checked.
        cut: whether no time was left to end it; the next run runs it again.
        took_s: seconds of the row.
    """

    section: str
    name: str
    said: str = ""
    figures: Mapping[str, Any] = attrs.field(factory=dict)
    wrong: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    skipped: str = ""
    cut: bool = False
    took_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """Which row it is."""
        return self.section, self.name


@attrs.define
class Findings:
    """What a row collects while it runs."""

    setting: Setting
    said: list[str] = attrs.field(factory=list)
    figures: dict[str, Any] = attrs.field(factory=dict)
    wrong: list[str] = attrs.field(factory=list)
    skipped: str = ""
    cut: bool = False

    def judge_peak(self, peak_nbytes: int, predicted_nbytes: int, budget_nbytes: int) -> None:
        """The budget holds, and the peak is as predicted."""
        off = peak_nbytes / predicted_nbytes - 1
        self.figures |= {
            "peak_nbytes": peak_nbytes,
            "predicted_nbytes": predicted_nbytes,
            "budget_nbytes": budget_nbytes,
        }
        self.said.append(
            f"peak {format_nbytes(peak_nbytes)} of {format_nbytes(budget_nbytes)}, {off:+.2%} of predicted"
        )
        if peak_nbytes > budget_nbytes:
            self.wrong.append(f"peak {peak_nbytes} bytes above the budget of {budget_nbytes}; goal: never")
        if abs(off) > PEAK_OFF and not self.setting.small:
            self.wrong.append(f"peak {off:+.2%} of the predicted one; goal: within {PEAK_OFF:.0%}")

    def judge_step(self, step_s: float, predicted_s: float) -> None:
        """A step takes as long as predicted."""
        off = step_s / predicted_s - 1
        self.figures |= {"step_s": step_s, "predicted_s": predicted_s}
        self.said.append(f"step {1e3 * step_s:.2f} ms, {off:+.1%} of predicted")
        if abs(off) > STEP_OFF and not self.setting.small:
            self.wrong.append(
                f"step {1e3 * step_s:.2f} ms, {off:+.1%} of the predicted one; goal: within {STEP_OFF:.0%}"
            )
