"""The command `remat zoo`: the plans that come with remat."""

from typing import TYPE_CHECKING, Annotated

import typer

from remat_facade.cli import completion, options

if TYPE_CHECKING:
    from remat_facade.planning.shipped_plans import ShippedPlan
    from remat_facade.report.table import Table


def zoo(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One of the plans.", autocompletion=completion.shipped),
    ] = None,
    plan_out: options.PlanOutOption = None,
    json: options.JsonOption = False,
) -> None:
    """List the plans that come with remat, or show and write one; all are estimates by data sheets."""
    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.results import deliver
    from remat_facade.planning.shipped_plans import shipped_plans
    from remat_graph.serialization.outputs import check_paths

    plans = {each.name: each for each in shipped_plans()}
    if name is None and plan_out is not None:
        raise typer.BadParameter("--plan-out writes one plan: give its name too")
    if name is not None and name not in plans:
        raise typer.BadParameter(f"no plan {name!r:.60}: there are {', '.join(plans)}")
    check_paths({"--plan-out": plan_out}, {})
    with CommandOutput(as_json=json) as shown:
        if name is None:
            shown.facts["plans"] = list(plans.values())
            shown.show(_table(list(plans.values())))
        else:
            shown.facts["entry"] = plans[name]
            deliver(shown, plans[name].load(), plan_out)


def _table(plans: "list[ShippedPlan]") -> "Table":
    from remat_facade.report.table import Table
    from remat_graph import format_nbytes

    rows = tuple(
        (
            each.name,
            f"{each.inputs}, {each.dtype}",
            format_nbytes(each.budget_nbytes),
            format_nbytes(each.unplanned_nbytes),
            f"{each.overhead:+z.1%}",
            f"{each.lower_bound_overhead:+z.1%}",
        )
        for each in plans
    )
    columns = ("model, device, %", "inputs", "budget", "unplanned", "extra time", "bound")
    note = "computed from the rates of each device's data sheet (a roofline); nothing was measured"
    return Table(title="plans that come with remat", columns=columns, rows=rows, note=note, prose=True)
