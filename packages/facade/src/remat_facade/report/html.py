"""Write the report of a plan as one self-contained HTML file: inline SVG pictures, tables, light and dark."""

from collections.abc import Callable, Sequence
from html import escape

import attrs
from matplotlib.figure import Figure

from remat_facade.report.dataflow import draw_dataflow
from remat_facade.report.matrix import draw_matrix
from remat_facade.report.picture import DARK, LIGHT, Look, Palette, draw, svg
from remat_facade.report.table import (
    Table,
    layers_table,
    plan_table,
    repeats_table,
    rounding_table,
    ways_table,
)
from remat_graph import Graph, Plan

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
body {{ margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 68rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }}
svg {{ width: 100%; height: auto; }}
.tables {{ display: flex; flex-wrap: wrap; gap: 2.5rem; margin: 1.5rem 0; }}
.tables div {{ max-width: 100%; overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; font-weight: 600; padding-bottom: .4rem; }}
th {{ font-weight: 500; color: var(--muted); text-align: right; }}
th, td {{ padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--grid); }}
td {{ text-align: right; white-space: nowrap; }}
td:first-child, th:first-child {{ text-align: left; }}
/* As wide as its table, whose width a long note does not change. */
p {{ color: var(--muted); margin: .5rem 0 0; font-size: .9rem; width: 0; min-width: 100%; }}
.narrow {{ display: none; }}
@media (max-width: 45rem) {{
  body {{ padding: .5rem; }}
  .wide {{ display: none; }}
  .narrow {{ display: block; }}
  table, p {{ font-size: .75rem; }}
  th, td {{ padding-right: .5rem; }}
}}
</style>
</head>
<body>
<main>
{picture}
<div class="tables">
{tables}
</div>
{dataflow}
{matrix}
</main>
</body>
</html>
"""


def page(graph: Graph, plan: Plan, measured: Sequence[Table] = ()) -> str:
    """The report of a plan.

    Args:
        graph: the graph of the plan.
        plan: the plan.
        measured: tables to show before the tables of the plan.
    """
    tables = [*measured, plan_table(plan), layers_table(plan), ways_table(plan)]
    tables += [repeats_table(graph, plan), rounding_table(plan)]
    return _PAGE.format(
        title=escape(f"{plan.graph_name} · remat"),
        light=_variables(LIGHT),
        dark=_variables(DARK),
        picture=_both("memory", lambda look: draw(graph, plan, look)),
        tables="\n".join(_table(table) for table in tables if table.rows),
        dataflow=_both("dataflow", lambda look: draw_dataflow(graph, plan, look)),
        matrix=_both("matrix", lambda look: draw_matrix(graph, plan, look)),
    )


def _both(name: str, draw_figure: Callable[[Look], Figure]) -> str:
    """A figure for wide and one for narrow screens; the style sheet shows one of them."""
    return "\n".join(
        f'<div class="{kind}">{svg(draw_figure(Look(narrow=kind == "narrow")), f"{name}-{kind}")}</div>'
        for kind in ("wide", "narrow")
    )


def _variables(palette: Palette) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in attrs.asdict(palette).items())


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return (
        f"<div><table><caption>{escape(table.title)}</caption>\n<tr>{head}</tr>\n{body}\n</table>{note}</div>"
    )
