"""The commands `remat solve` and `remat min-budget`: plan a saved graph, without torch."""

from remat_facade.cli import options
from remat_facade.cli.terminal import progress


def solve(
    graph: options.GraphArgument,
    budget: options.BudgetOption,
    solver: options.SolverOption = None,
    config: options.ConfigOption = None,
    seed: options.SeedOption = 0,
    time_limit: options.TimeLimitOption = None,
    prove: options.ProveOption = None,
    gradients: options.GradientsOption = None,
    order_out: options.OrderOutOption = None,
    plan_out: options.PlanOutOption = None,
    json: options.JsonOption = False,
) -> None:
    """Plan a saved graph; needs no torch."""
    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.results import deliver
    from remat_facade.cli.searches import EndedEarly
    from remat_facade.planning.method import choose_method
    from remat_graph import Budget, load_graph
    from remat_graph.budget import check_unit_for
    from remat_graph.serialization.outputs import check_paths
    from remat_solvers.running.stopping import interrupted

    check_paths({"--plan-out": plan_out, "--order-out": order_out}, {"GRAPH.json": graph, "--config": config})
    method = choose_method("auto", config, solver, seed, time_limit, gradients=gradients, prove_s=prove)
    Budget.parse(budget)  # before the planner is imported, and numpy with it

    from remat_facade.planning.planner import RecomputePlanner

    planner = RecomputePlanner(budget=budget, method=method, grads=method.grads)
    planner.check()
    with CommandOutput(as_json=json) as output:
        with progress(f"reading {graph}") as update:
            loaded = load_graph(graph)
            check_unit_for(budget, loaded)
            planner.on_progress, planner.live = update, True
            made = planner(loaded)
        deliver(output, made, plan_out, order_out)
    if interrupted(made):
        raise EndedEarly


def smallest_budget(
    graph: options.GraphArgument,
    time_limit: options.TimeLimitOption = None,
    gradients: options.GradientsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Find the smallest budget of a saved graph; needs no torch."""
    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.searches import EndedEarly
    from remat_facade.report.table import smallest_table
    from remat_graph import load_graph
    from remat_solvers import Deadline, min_budget, min_present_budget
    from remat_solvers.facts import min_budget_facts
    from remat_solvers.running.stopping import stopped_by_interrupts

    with CommandOutput(as_json=json) as output:
        with progress(f"reading {graph}") as update:
            loaded = load_graph(graph)
            update(f"searching for the smallest budget of {loaded.name}")
            find = min_present_budget if gradients == "present" else min_budget
            deadline = Deadline(time_limit)
            with stopped_by_interrupts(deadline):
                found = find(loaded, deadline)
        output.facts |= min_budget_facts(loaded, found)
        output.show(smallest_table(loaded, found))
    if deadline.stopped:
        raise EndedEarly("a smaller budget may work too")
