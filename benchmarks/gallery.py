"""Draw the pictures of `docs/gallery/index.md` from the plan that the commands of this page make.

    python benchmarks/gallery.py [--out docs/gallery] [--time-limit SECONDS]

Each picture is an SVG for wide and one for narrow screens, which follows the light or dark mode of the page.
On a busy machine a larger limit than the page's gives the plans that an idle one finds.
"""

import argparse
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gallery_files import draw_blocks, draw_trace
from benchmarks.page_pictures import Draw, written
from remat_facade.cli.app import main as remat
from remat_facade.cli.searches import swept
from remat_facade.report.chrome_trace import chrome_trace
from remat_facade.report.dataflow import draw_dataflow
from remat_facade.report.picture import draw
from remat_facade.report.snapshot import memory_snapshot
from remat_facade.report.sweep import draw_sweep
from remat_graph import Graph, load_graph, load_plan
from remat_solvers import budgets_of

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "gallery"
PAGE = OUT / "index.md"


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
    return {
        "memory": lambda look: draw(graph, plan, look),
        "dataflow": lambda look: draw_dataflow(graph, plan, look),
        "sweep": sweep(graph, text, limit_s),
        "snapshot": lambda look: draw_blocks(plan.graph_name, snapshot, look),
        "trace": lambda look: draw_trace(plan.graph_name, trace, look),
    }


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
                for path in written(out, name, drawn):
                    print(f"wrote {path.name}")
        finally:
            os.chdir(before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
