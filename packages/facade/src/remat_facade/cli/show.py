"""The command `remat show`: a saved plan, layer by layer."""

from pathlib import Path
from typing import Annotated

import typer

from remat_facade.cli import options


def show(
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN", help="A plan, of `remat plan --plan-out`.", callback=options.saved_plan
        ),
    ],
    graph: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Its graph, of `remat plan --graph-out`.", callback=options.saved_graph
        ),
    ] = None,
    png: options.MemoryPictureOption = None,
    matrix: options.MatrixOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the pictures and the tables as one HTML page.")
    ] = None,
    dataflow: options.DataflowOption = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a memory snapshot for torch's viewer, memory_viz."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto and chrome://tracing.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Show a saved plan by layers; with its graph, draw it."""
    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.results import draw
    from remat_facade.report.table import layers_table, plan_table, repeats_table, rounding_table, ways_table
    from remat_facade.report.trace import repeated_targets
    from remat_graph import load_graph, load_plan
    from remat_graph.serialization.outputs import check_paths
    from remat_solvers.facts import plan_facts

    places = {"--png": png, "--matrix": matrix, "--html": html}
    places |= {"--dataflow": dataflow, "--snapshot": snapshot, "--trace": trace}
    check_paths(places, {"PLAN": plan, "--graph": graph})
    if graph is None and any(places.values()):
        advice = "add --graph FILE, which `remat plan --graph-out FILE` writes"
        raise typer.BadParameter(f"a picture needs the graph of the plan: {advice}")
    loaded = load_graph(graph) if graph is not None else None
    made = load_plan(plan, loaded)
    with CommandOutput(as_json=json) as output:
        output.facts["plan"] = plan_facts(made)
        tables = (plan_table(made), layers_table(made), ways_table(made), rounding_table(made))
        output.show(*(table for table in tables if table.rows))
        if loaded is None:
            return
        if made.recomputed_s or len(made.schedule.order) > len(loaded.ops):
            output.facts["recomputed"] = repeated_targets(loaded, made.schedule)
            output.show(repeats_table(loaded, made))
        draw(output, loaded, made, places)
