"""The command `remat doctor`: where planning time goes, and what binds memory."""

from typing import TYPE_CHECKING

from remat_facade.cli import options
from remat_facade.cli.terminal import progress

if TYPE_CHECKING:  # help imports nothing heavy
    from remat_facade.cli.saved_or_model import SavedOrModel
    from remat_facade.planning.planner import Progress
    from remat_facade.report.doctor import Stopwatch
    from remat_graph import Graph


def doctor(
    target: options.StepArgument,
    budget: options.BudgetOption = "40%",
    input: options.InputOption = None,
    batch: options.BatchOption = None,
    dtype: options.DtypeOption = None,
    solver: options.SolverOption = None,
    config: options.ConfigOption = None,
    seed: options.SeedOption = 0,
    time_limit: options.TimeLimitOption = None,
    platform: options.PlatformOption = None,
    ways: options.WaysOption = None,
    outputs: options.OutputsOption = None,
    gradients: options.GradientsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Explain what binds memory and where planning time goes."""
    import attrs

    from remat_facade.cli.checks import check_budget, check_method
    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.results import table_facts
    from remat_facade.cli.saved_or_model import SavedOrModel, is_saved
    from remat_facade.planning.method import choose_method
    from remat_graph import Budget
    from remat_graph.budget import check_unit_for
    from remat_solvers.facts import plan_facts

    Budget.parse(budget)
    if not is_saved(target, input):
        check_budget(budget)
    step = SavedOrModel.parse(
        target, platform=platform, ways=ways, outputs=outputs, input=input, batch=batch, dtype=dtype
    )
    method = choose_method(
        "auto", config, solver, seed, time_limit, ways, outputs=outputs, gradients=gradients
    )
    check_method(method)
    with CommandOutput(as_json=json) as output:
        with progress(f"reading {target}") as update:
            from remat_facade.report.doctor import Stopwatch, diagnose
            from remat_facade.report.doctor_page import advice, doctor_tables

            watch = Stopwatch()
            step = attrs.evolve(step, ways=method.ways, outputs=method.outputs)
            graph, measured = _watched(step, watch, update)
            check_unit_for(budget, graph)
            found = diagnose(graph, budget, method, watch=watch, measured=measured, on_progress=update)
        tables, lines = doctor_tables(found), advice(found)
        output.facts |= {
            "plan": plan_facts(found.plan),
            "asked_nbytes": found.asked_nbytes,
            "smallest_nbytes": found.smallest.nbytes,
            "floor_nbytes": found.floor.nbytes,
            "proven_nbytes": found.smallest.proven_nbytes,
            "tables": [table_facts(table) for table in tables],
            "advice": lines,
        }
        output.show(*tables)
        for line in lines:
            output.say(f"- {line}")


def _watched(
    step: "SavedOrModel", watch: "Stopwatch", update: "Progress"
) -> "tuple[Graph, tuple[int, int] | None]":
    """The graph; how many kinds of a model's ops were measured now, and how many it has."""
    known: list[tuple[int, int]] = []  # kinds whose costs were known, and all

    def stage(what: str, done: int, total: int) -> None:
        update(f"{what} {done} of {total}" if total > 1 else what)
        if what == "measure" and not known:
            watch.end("translation")
            known.append((done, total))
        elif what == "capture" and done == total:
            watch.end("capture")

    watch.skip()
    graph = step.load(update, stage)
    if step.saved:
        watch.skip()
        return graph, None
    watch.end("measuring" if known else "estimating")
    return graph, (known[0][1] - known[0][0], known[0][1]) if known else None
