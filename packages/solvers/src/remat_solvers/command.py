"""What the script `remat` does where remat-facade is not installed: plan saved graphs, without torch."""

import json
import sys
import warnings
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from remat_command import INTERRUPTED, UNREAD, USER_ERROR, give_up_output, printable, versions
from remat_graph import (
    Budget,
    Plan,
    RematError,
    format_nbytes,
    load_graph,
    noremat_peak_nbytes,
    resolve_budget,
    save_plan,
)
from remat_graph.budget import check_unit_for, in_one_word
from remat_graph.errors import cut
from remat_graph.serialization.inputs import check_saved
from remat_graph.serialization.outputs import check_paths, save_to
from remat_solvers.facts import min_budget_facts, plain, plan_facts
from remat_solvers.protocol import Deadline
from remat_solvers.registry import about_solver, get_solver, solver_names
from remat_solvers.running.stopping import INTERRUPTED as CUT_SHORT
from remat_solvers.running.stopping import default_limit_s, stopped_by_interrupts
from remat_solvers.solve import solve

Output = tuple[str, Mapping[str, Any], str]
"""What a command prints, the same for ``--json``, and one line if Ctrl-C ended its search, else nothing."""


def main(words: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _complain(f"warning: {message}")
        return _run(list(words) or ["--help"])


def _run(words: list[str]) -> int:
    """Run the command; report every error that is expected in one line."""
    try:
        code = _ended(words)
        sys.stdout.flush()  # here, where an output that cannot be written is one line
    except KeyboardInterrupt:
        _complain("interrupted; files of earlier runs are unchanged")
        return INTERRUPTED
    except RematError as error:
        _complain(str(error))
        return USER_ERROR
    except BrokenPipeError:
        give_up_output()
        return UNREAD
    except OSError as error:  # errors of files have their own class: it is the output
        give_up_output()
        _complain(f"system error: {error.strerror or error}; check the output and the disk")
        return USER_ERROR
    return code


def _ended(words: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options, more = _parser().parse_known_args(words)
        if more:
            amount = in_one_word(words)
            advice = f": write {amount} without a space" if amount else ""
            _Parser(prog=f"remat {options.verb}").error(f"unrecognized arguments: {' '.join(more)}{advice}")
    except SystemExit as ended:  # it has printed help or one line
        return ended.code if isinstance(ended.code, int) else USER_ERROR
    text, facts, interrupted = options.run(options)
    if options.json:
        text = json.dumps(plain(facts), allow_nan=False)
    sys.stdout.write(printable(text, sys.stdout.encoding) + "\n")
    if interrupted:
        _complain(f"interrupted: {interrupted}")
        return INTERRUPTED
    return 0


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with one line, which names the facade if the command itself is unknown."""
        more = "" if " " in self.prog else "; commands for models: pip install remat-facade"
        _complain(f"{message}; see `{self.prog} --help`{more}")
        raise SystemExit(USER_ERROR)


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="remat",
        formatter_class=RawDescriptionHelpFormatter,  # it keeps the lines of the versions
        description="Plan saved graphs inside a memory budget. Commands for models: pip install remat-facade",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=versions("remat-solvers", "remat-graph"),
        help="show the versions",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    plan = verbs.add_parser("solve", help="plan a saved graph")
    smallest = verbs.add_parser("min-budget", help="find the smallest budget of a saved graph")
    listing = verbs.add_parser("solvers", help="list the solvers")
    listing.set_defaults(run=_solvers)
    for verb in (plan, smallest, listing):
        verb.add_argument("--json", action="store_true", help="print one JSON object")
    for verb in (plan, smallest):
        verb.add_argument("graph", metavar="GRAPH.json", type=_graph, help="a graph, saved or of the corpus")
        verb.add_argument(
            "--time-limit",
            metavar="SECONDS",
            type=_seconds,
            help="stop then, with the best result so far",
        )
    plan.add_argument("--budget", required=True, help='bytes, "2GiB", "800MB", or a share such as "40%%"')
    plan.add_argument("--solver", default="auto", help="the method; `remat solvers` lists all")
    plan.add_argument("--plan-out", "--out", metavar="FILE", type=Path, help="write the plan to this file")
    plan.set_defaults(run=_solve)
    smallest.set_defaults(run=_min_budget)
    return parser


def _graph(word: str) -> Path:
    check_saved(word, "graph")
    return Path(word)


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ArgumentTypeError(f"expected seconds above 0, got {word!r}")
    return seconds


def _solve(options: Namespace) -> Output:
    """Plan a saved graph; the summary of the plan."""
    get_solver(options.solver)  # raises for an unknown name, before the long work
    Budget.parse(options.budget)
    check_paths({"--plan-out": options.plan_out}, {"GRAPH.json": options.graph})
    graph = load_graph(options.graph)
    check_unit_for(options.budget, graph)
    budget_nbytes = resolve_budget(options.budget, graph)
    if budget_nbytes < noremat_peak_nbytes(graph):
        from remat_solvers.switching import compile_first

        compile_first(_complain)
    deadline = Deadline(options.time_limit or default_limit_s(len(graph.ops)))
    with stopped_by_interrupts(deadline):
        solution = solve(graph, budget_nbytes, options.solver, deadline)
    assert solution.schedule is not None  # `solve` raises where there is none
    plan = Plan.from_schedule(
        graph,
        solution.schedule,
        budget_nbytes=budget_nbytes,
        lower_bound_s=solution.lower_bound_s,
        solver=options.solver,
        solver_stats={**solution.stats, **({CUT_SHORT: True} if deadline.stopped else {})},
        versions={name: version(name) for name in ("remat-graph", "remat-solvers")},
        deadline_hit=deadline.hit,
    )
    lines = [plan.summary()]
    facts: dict[str, Any] = {"plan": plan_facts(plan)}
    if options.plan_out is not None:
        written = save_to(options.plan_out, partial(save_plan, plan))
        facts["wrote"] = [written]
        lines.append(f"wrote {written}")
    return "\n".join(lines), facts, "a faster plan may exist" if deadline.stopped else ""


def _min_budget(options: Namespace) -> Output:
    """Find the smallest budget of a saved graph; it and the floor below which none exists."""
    from remat_solvers.queries import min_budget
    from remat_solvers.switching import compile_first

    graph = load_graph(options.graph)
    compile_first(_complain)
    deadline = Deadline(options.time_limit)
    with stopped_by_interrupts(deadline):
        found = min_budget(graph, deadline)
    lines = [
        f"smallest budget with a schedule: {format_nbytes(found.nbytes)} ({found.nbytes} bytes)",
        f"no schedule exists below: {format_nbytes(found.proven_nbytes)} ({found.proven_nbytes} bytes)",
        f"needed by {found.floor_place} alone: {format_nbytes(found.floor_op_nbytes)}",
        found.floor_reason,
        *(["time was up before smaller budgets were tried"] if found.cut_short else []),
    ]
    facts = min_budget_facts(graph, found)
    return "\n".join(lines), facts, "a smaller budget may work too" if deadline.stopped else ""


def _solvers(_: Namespace) -> Output:
    """Every solver and what it does."""
    found = {name: about_solver(name) for name in solver_names()}
    width = max(map(len, found), default=0)
    lines = [f"{name:{width}}  {about}" for name, about in found.items()]
    return "\n".join(lines), {"solvers": found}, ""


def _complain(line: str) -> None:
    sys.stderr.write(printable(f"remat: {cut(' '.join(line.split()))}\n", sys.stderr.encoding))
