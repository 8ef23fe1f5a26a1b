"""Draw the pictures of `docs/gallery/index.md` from the plan that the commands of this page make.

    python benchmarks/gallery.py [--out docs/gallery] [--time-limit SECONDS]

Each picture is an SVG for wide and one for narrow screens, which follows the light or dark mode of the page.
On a busy machine a larger limit than the page's gives the plans that an idle one finds.
"""

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gallery_files import draw_blocks, draw_trace
from benchmarks.growth import Row, draw_growth
from remat_facade.cli.app import main as remat
from remat_facade.cli.searches import swept
from remat_facade.report.chrome_trace import chrome_trace
from remat_facade.report.dataflow import draw_dataflow
from remat_facade.report.picture import DARK, LIGHT, Look, draw, svg
from remat_facade.report.snapshot import memory_snapshot
from remat_facade.report.sweep import SERIES, draw_sweep
from remat_graph import Graph, load_graph, load_plan
from remat_graph.serialization.outputs import write_whole
from remat_solvers import budgets_of

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "gallery"
PAGE = OUT / "index.md"
ROWS = ROOT / "benchmarks" / "results" / "growth.json"

Draw = Callable[[Look], Figure]


def run_page(text: str, limit_s: float | None) -> None:
    """Write the files of the page to this folder, and run its commands that plan."""
    for name, content in re.findall(r'^```python title="([^"]+)"\n(.*?)^```', text, re.DOTALL | re.MULTILINE):
        Path(name).write_text(content, encoding="utf-8")
    for line in re.findall(r"^remat plan .*$", text, re.MULTILINE):
        if code := remat([*shlex.split(line)[1:], *(("--time-limit", str(limit_s)) if limit_s else ())]):
            raise SystemExit(code)


def sweep(graph: Graph, text: str, limit_s: float | None) -> Draw:
    """The sweep by the methods that the page names."""
    found = re.search(r"--solvers (\S+) --points (\d+)", text)
    assert found is not None, "the page has no sweep"
    sizes = budgets_of(graph, int(found[2]))
    curves = swept({"": graph}, found[1].split(","), sizes, limit_s, lambda stage: None)
    return lambda look: draw_sweep(graph, curves.curves, curves.bounds, look)


def pictures(text: str, limit_s: float | None) -> dict[str, Draw]:
    """How each picture is drawn, by its name."""
    graph = load_graph("graph.json")
    plan = load_plan("plan.json", graph)
    snapshot, trace = memory_snapshot(graph, plan), chrome_trace(graph, plan)
    rows = [Row(**row) for row in json.loads(ROWS.read_text(encoding="utf-8"))["rows"]]
    return {
        "memory": lambda look: draw(graph, plan, look),
        "dataflow": lambda look: draw_dataflow(graph, plan, look),
        "sweep": sweep(graph, text, limit_s),
        "snapshot": lambda look: draw_blocks(plan.graph_name, snapshot, look),
        "trace": lambda look: draw_trace(plan.graph_name, trace, look),
        "growth": lambda look: draw_growth(rows, look),
    }


def both_modes(figure: Figure, name: str) -> str:
    """The figure as the text of a file, with the colours of both modes."""
    text = svg(figure, name)
    light, dark = attrs.asdict(LIGHT), attrs.asdict(DARK)
    for number, (bright, dim) in enumerate(zip(*SERIES, strict=True)):
        if bright not in light.values():
            light[f"series-{number}"], dark[f"series-{number}"] = bright, dim
            text = text.replace(bright, f"var(--series-{number})")
    modes = (" ".join(f"--{each}: {colour};" for each, colour in mode.items()) for mode in (light, dark))
    style = "svg {{ {} }} @media (prefers-color-scheme: dark) {{ svg {{ {} }} }}".format(*modes)
    return text.replace(">", f">\n <style>{style}</style>", 1)


def main() -> int:
    """Run the page, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--time-limit", type=float, help="seconds of each search")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    text = PAGE.read_text(encoding="utf-8")
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            run_page(text, options.time_limit)
            for name, drawn in pictures(text, options.time_limit).items():
                for kind in ("", "-narrow"):
                    figure = drawn(Look(narrow=bool(kind)))
                    write_whole(out / f"{name}{kind}.svg", both_modes(figure, name + kind))
                    print(f"wrote {name}{kind}.svg")
        finally:
            os.chdir(before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
