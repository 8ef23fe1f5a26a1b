"""Trainers with one line changed, beside the same training without it.

    python -m benchmarks.integrations [WORD ...] [--json FILE] [--markdown FILE] [--join FILE ...] [--list]

A scenario is one feature of one tool, trained for a few steps on a tiny model: twice without a plan, which
shows whether the tool itself is repeatable, and once with the one line. Losses, parameters and evaluations
must then be equal in every bit, each planned step must keep its budget by the meter, a checkpoint must load
in the plain library, each call in training must run by a plan, and one plan must be made. Whatever else
happens must be said by a warning. Words select the scenarios whose names hold one of them. The exit status
is 1 if a row has something wrong.
"""

import argparse
import datetime
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.integrations.judge import row_of
from benchmarks.integrations.table import (
    OWN_ENVIRONMENT,
    Joined,
    absent_tools,
    all_scenarios,
    line,
    tool_versions,
    write_markdown,
)
from benchmarks.integrations.tiny import import_companions

LEAST = 45


def main() -> int:
    """Run the scenarios and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="parts of names; all scenarios by default")
    parser.add_argument("--json", type=Path, help="write the rows here, after each")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument(
        "--join", type=Path, nargs="+", default=[], help="add the rows of other environments from their JSON"
    )
    parser.add_argument("--list", action="store_true", help="print the names and end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Nothing leaves the machine; without network, axolotl waits for its telemetry forever when it ends.
    os.environ |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import_companions()
    scenarios = [s for s in all_scenarios() if not options.words or any(w in s.name for w in options.words)]
    if options.list:
        print("\n".join(scenario.name for scenario in scenarios))
        return 0
    joined = Joined.read(options.join)
    versions = tool_versions(scenarios) | joined.versions
    absent = [] if options.words else [name for name in absent_tools() if name not in OWN_ENVIRONMENT]
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for scenario in scenarios:
            rows.append(row_of(scenario, Path(cache)))
            print(line(rows[-1]), flush=True)
            if options.json:
                write_json(options.json, rows, versions, absent)
    rows += joined.rows
    print(*map(line, joined.rows), sep="\n", flush=True)
    if options.json:
        write_json(options.json, rows, versions, absent)
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    if options.markdown:
        about = f"Made by `hatch run integrations` on {today}, on the CPU, with {used}."
        write_markdown(
            options.markdown, rows, about + (f" Not installed: {', '.join(absent)}." if absent else "")
        )
    bad = [row for row in rows if row["wrong"]]
    print(f"\n{len(rows)} scenarios with {used}; {len(bad)} with something wrong")
    if absent:
        print(f"not installed: {', '.join(absent)}")
    few = not options.words and not absent and len(rows) < LEAST
    return int(bool(bad) or few or not rows)


def write_json(path: Path, rows: list[dict[str, Any]], versions: dict[str, str], absent: list[str]) -> None:
    """Write rows with the versions of their tools, which may be those of other environments."""
    record.write(path, rows, packages=("torch",), tools=versions, absent=absent)


if __name__ == "__main__":
    sys.exit(main())
