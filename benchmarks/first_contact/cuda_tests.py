"""The tests marked `cuda`, by pytest in processes of its own."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from benchmarks.first_contact.processes import on_the_test_device
from benchmarks.first_contact.rows import Findings, Setting

SECTION = "tests"
_ROOT = Path(__file__).resolve().parents[2]
_SPARE_S = 3.0  # of the section's time, to count what ran
_MOST_PROCESSES = 6  # each holds libraries on the device
_OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
_SUMMARY = re.compile(r"(?:FAILED|ERROR) (\S+) - (.*)")
_REASON = 200  # characters of it
_MISSING = re.compile(r"No module named '([\w.]+)'")


def names(*, small: bool) -> tuple[str, ...]:
    """The rows."""
    return ("cuda",)


def run(name: str, setting: Setting) -> Findings:
    """Run pytest; what it prints until it ends, or no time is left, is counted."""
    found = Findings(setting)
    missing = [each for each in ("pytest", "hypothesis") if importlib.util.find_spec(each) is None]
    if setting.device.type != "cuda" or missing:
        found.skipped = f"{missing[0]} is not installed" if missing else "there is no CUDA device"
        return found
    options = ["-m", "cuda", "-p", "no:cacheprovider", "-v", "--tb=line", "--continue-on-collection-errors"]
    if importlib.util.find_spec("xdist") is not None:
        cores = os.cpu_count() or 1
        # The kernels of the test device need no more than the cores; a device's need its memory.
        processes = cores if on_the_test_device() else max(1, min(_MOST_PROCESSES, cores // 2))
        options += ["-n", str(processes), "--dist", "load"]
    if on_the_test_device():
        options += ["-p", "tests.device.plugin"]
    command = [sys.executable, "-m", "pytest", *options, "tests", "packages"]
    environment = {**os.environ, "COLUMNS": "400"}  # else pytest shortens the reasons of failures
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    limit_s = setting.end_s - time.monotonic() - _SPARE_S
    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), process.kill)
    timer.start()
    lines = [line.rstrip() for line in process.stdout]
    status = process.wait()
    timer.cancel()
    _read(found, lines)
    if status == -signal.SIGKILL:
        found.wrong.insert(0, f"not all tests ran in {limit_s:.0f} s")
        found.cut = True
    elif status not in (0, 1, 5) and not found.wrong:
        found.wrong.append(f"pytest ended with status {status}: {lines[-1] if lines else ''}"[:300])
    return found


def _read(found: Findings, lines: list[str]) -> None:
    outcomes: dict[str, str] = {}
    for line in lines:
        outcome = _OUTCOME.search(line)
        test = next((word for word in line.split() if "::" in word or word.endswith(".py")), None)
        if outcome is not None and test is not None:
            outcomes[test] = outcome[1].lower()
    absent = sorted({name.partition(".")[0] for line in lines for name in _MISSING.findall(line)})
    unable = {test for test, outcome in outcomes.items() if outcome == "error" and "::" not in test}
    unable |= {line.split()[1] for line in lines if line.startswith("FAILED ") and _MISSING.search(line)}
    failed = [test for test, outcome in outcomes.items() if outcome in ("failed", "error")]
    summary = (_SUMMARY.match(line) for line in lines)
    reasons = {one[1]: one[2] for one in summary if one is not None}
    counts = Counter(outcomes.values())
    found.figures = {"counts": dict(counts), "failed": failed, "not_installed": absent}
    found.said = [
        ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "no tests"
    ]
    if absent:  # files that need packages of the project's own environment
        found.said.append(f"{len(unable)} files or tests need {', '.join(absent)}")
        failed = [test for test in failed if test not in unable]
    for test in failed:
        reason = reasons.get(test, "no reason was printed")[:_REASON]
        found.wrong.append(f"{test} {outcomes[test]}: {reason}; goal: all pass")
