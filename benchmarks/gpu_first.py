"""First contact with a device: in one command of minutes, what is wrong before anything else is measured.

    python benchmarks/gpu_first.py [--time-limit 480] [--out FOLDER] [--sections NAME ...] [--small] [--again]

For a fresh machine with torch 2.11 or newer: nothing is downloaded, models are in plain torch, and cvxpy,
highspy, transformers and torchvision may be absent. The sections, in their order:

* environment: versions, flags, and whether the allocator counts blocks as plans assume;
* tests: those marked `cuda`, where pytest is installed;
* exact: six models within 100, 60 and 40 % of their memory: losses, gradients and buffers of three steps have
  the bits of eager, or are as close to it as eager is to itself where eager varies from run to run;
* full budget: a plan that recomputes nothing beside eager, and where the host's time lies;
* timing: predicted against measured steps, and by operator against the profiler;
* runtimes: Inductor and CUDA graphs;
* language model: a billion parameters beside eager, a checkpoint around each block, and torch's own budget;
* offmate: a billion parameters within 40 % of all bytes of plain training.

Goals: budgets hold in every row by `max_memory_allocated`; the peak is predicted within 1 %, a step within
5 %; with nothing recomputed a step takes at most 1.015 of eager's; at 61 % the language model is faster than
with a checkpoint around each block; with Inductor at 40 % a step takes at most eager's; bits are equal.

`<out>/<device>-first.json` is written after every row, and what operators were measured to take into
`platforms/<device>.json`. Rows that ended are skipped: run it again for the rest. Each section runs in a
process of its own within its share of the time; a row that aborts, or does not end, costs no other row. On a
large machine (12 cores, a device of 64 GiB) tests and exactness, which time nothing, run at the same time.
The report lists what is wrong first; the exit status is 1 if anything is.

`--small` runs all of it on tiny models, on the CPU too, to test the script; times and predicted peaks are
not judged then, and there is no limit of time.
"""

import argparse
import functools
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record, report
from benchmarks.device_steps import current_device, device_name, first_line, release
from benchmarks.first_contact.processes import Group, announce, interpreter, on_the_test_device, rows_of
from benchmarks.first_contact.rows import Findings, Row, Setting
from benchmarks.first_contact.sections import SECTIONS, Section

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_NO_LIMIT_S = 86_400.0
# What processes at the same time need: six with tests and three with models.
_ENOUGH_NBYTES = 64 << 30
_ENOUGH_CORES = 12


Part = tuple[Section, list[str]]
"""A section, with rows of it that one process runs."""


def run_rows(section: Section, names: Sequence[str], setting: Setting) -> None:
    """Run rows in this process and announce each."""
    for name in names:
        announce(begin=name)
        began_s = time.perf_counter()
        try:
            found = section.module.run(name, setting)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other rows are run
            found = Findings(setting, wrong=[first_line(error)])
        row = Row(
            section=section.name,
            name=name,
            said="; ".join(found.said),
            figures=found.figures,
            wrong=found.wrong,
            skipped=found.skipped,
            cut=found.cut,
            took_s=time.perf_counter() - began_s,
        )
        del found
        announce(name=name, row=attrs.asdict(row))
        gc.collect()
        release(setting.device)


def sections_left(options: argparse.Namespace, rows: Sequence[Row]) -> list[Part]:
    """The sections that are wanted, with the names of their rows that are not there; none without such."""
    done = {row.key for row in rows}
    wanted = [section for section in SECTIONS if section.name in (options.sections or [section.name])]
    found = [
        (section, [name for name in section.names(small=options.small) if (section.name, name) not in done])
        for section in wanted
    ]
    return [(section, names) for section, names in found if names]


def is_large(device: torch.device) -> bool:
    """Whether processes that are not timed may share the machine: each has its models on the device."""
    if device.type == "cpu" or on_the_test_device():
        return False
    _, memory_nbytes = torch.accelerator.get_memory_info(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return memory_nbytes >= _ENOUGH_NBYTES and cores >= _ENOUGH_CORES


def turns(left: Sequence[Part], *, at_once: bool) -> list[list[Part]]:
    """What runs at the same time, in order: each section alone, or those that are not timed together."""
    untimed = [pair for pair in left if pair[0].processes and at_once]
    found: list[list[Part]] = []
    for pair in left:
        if pair not in untimed:
            found.append([pair])
        elif pair is untimed[0]:
            found.append([(section, part) for section, names in untimed for part in section.portions(names)])
    return found


def measure(
    options: argparse.Namespace, rows: list[Row], path: Path, device: torch.device, limit_s: float
) -> None:
    """Add the rows that are not there; each turn may take the share of its longest section in what is left.

    What operators take is not kept of rows that run at the same time as others, which disturb them.
    """
    end_s = time.time() + limit_s  # processes begin at different times
    order = turns(sections_left(options, rows), at_once=is_large(device))
    shares = [max(section.share for section, _ in turn) for turn in order]
    lock, group = threading.Lock(), Group()

    def run(part: Part, share_s: float, folder: str, *, keeps: bool) -> None:
        section, names = part
        words = ["--out", str(options.out), *(["--small"] if options.small else [])]
        words += [] if keeps else ["--platforms", folder]
        words += ["--worker", section.name, "--until", str(time.time() + share_s), "--rows"]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "REMAT_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(paths)}
        command = functools.partial(_command, words)
        found = rows_of(command, names, limit_s=share_s, environment=environment, group=group)
        for name, given in found:
            with lock:
                rows.append(Row(**{"section": section.name, "name": name, **given}))
                record.write(
                    path, list(map(attrs.asdict, rows)), packages=["torch"], device=device_name(device)
                )
                print(line(rows[-1]), flush=True)

    # Measured afresh, and once for all rows that are timed.
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as disturbed:
        for place, turn in enumerate(order):
            share_s = shares[place] / sum(shares[place:]) * (end_s - time.time())
            if len(turn) == 1:
                run(turn[0], share_s, alone, keeps=True)
                continue
            with ThreadPoolExecutor(len(turn)) as pool:
                together = functools.partial(run, share_s=share_s, folder=disturbed, keeps=False)
                try:
                    list(pool.map(together, turn))
                except BaseException:  # Ctrl-C too: nothing may run on
                    group.end()
                    raise


def _command(words: Sequence[str], names: Sequence[str]) -> list[str]:
    return [*interpreter(), __file__, *words, *names]


def line(row: Row) -> str:
    """One row for people."""
    state = "WRONG" if row.wrong else "skipped" if row.skipped else "ok"
    said = "; ".join(filter(None, (*row.wrong, row.skipped, row.said)))
    return f"{row.section:15} {row.name:14} {state:7} {row.took_s:5.1f} s  {said}"


def print_report(rows: Sequence[Row], missing: Sequence[tuple[str, str]]) -> None:
    """What is wrong first."""
    wrong = [row for row in rows if row.wrong]
    print(f"\n{len(wrong) or 'none'} of {len(rows)} rows wrong")
    for row in wrong:
        for goal in row.wrong:
            print(f"  {row.section}, {row.name}: {goal}")
    for row in rows:
        if row.skipped:
            print(f"  skipped: {row.section}, {row.name}: {row.skipped}")
    if missing:
        print("not run; run it again: " + "; ".join(f"{section}, {name}" for section, name in missing))


def main() -> int:
    """Measure what is not there yet, write after each row, report; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--time-limit", type=float, help="seconds (default: 480; with --small, no limit)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--sections", nargs="+", metavar="NAME", choices=[each.name for each in SECTIONS])
    parser.add_argument("--small", action="store_true", help="tiny models, to test the script")
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--platforms", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = current_device()
    platforms = options.platforms or (options.out if options.small else ROOT) / "platforms"
    if options.worker is not None:
        (section,) = (each for each in SECTIONS if each.name == options.worker)
        setting = Setting(
            device=device,
            small=options.small,
            platforms=platforms,
            end_s=time.monotonic() + options.until - time.time(),
        )
        run_rows(section, options.rows, setting)
        return 0
    if device.type == "cpu" and not options.small:
        parser.error("there is no accelerator; --small tests the script without one")
    path = options.out / f"{device_name(device)}-first{'-small' if options.small else ''}.json"
    rows: list[Row] = []
    if path.exists() and not options.again:
        rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
        rows = [row for row in rows if not row.cut]
    limit_s = options.time_limit
    if limit_s is None:
        limit_s = _NO_LIMIT_S if options.small else 480.0
    measure(options, rows, path, device, limit_s)
    every = [(each.name, name) for each in SECTIONS for name in each.names(small=options.small)]
    missing = [key for key in every if key not in {row.key for row in rows}]
    if options.sections:
        missing = [key for key in missing if key[0] in options.sections]
    if options.out == RESULTS:
        report.main()
    print_report(rows, missing)
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
