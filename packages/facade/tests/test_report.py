"""Pictures and pages show the numbers of the referee, and pages are self-contained."""

import io
from html.parser import HTMLParser
from xml.etree import ElementTree

import attrs
import pytest
from matplotlib.image import imread

from remat_facade.report import picture
from remat_facade.report.html import page
from remat_facade.report.table import (
    Table,
    layers_table,
    plan_table,
    repeats_table,
    rounding_table,
    ways_table,
)
from remat_facade.report.trace import repeated_targets, trace
from remat_graph import (
    Alternative,
    Grads,
    Graph,
    Implementation,
    Op,
    Plan,
    Role,
    Schedule,
    Value,
    simulate,
    specialize,
)

from .overlaps import overlaps


def chain(length: int = 6, name: str = "chain") -> Graph:
    """A chain of `length` forward and backward ops, each backward one making a gradient too."""
    values = [Value(name="x", nbytes=0, external=True)]
    values += [Value(name=f"a{i}", nbytes=2**20) for i in range(length)]
    values.append(Value(name="tangent", nbytes=2**10, role=Role.TANGENT))
    ops = [
        Op(
            name=f"f{i}",
            target="aten.relu.default" if i % 2 else "aten.mm.default",
            implementations=(Implementation(inputs=(i,), outputs=(i + 1,), time_s=1e-3 * (i + 1)),),
        )
        for i in range(length)
    ]
    error = length + 1
    for i in reversed(range(length)):
        made = [Value(name=f"d{i}", nbytes=2**20), Value(name=f"g{i}", nbytes=2**18, role=Role.GRAD)]
        implementation = Implementation(
            inputs=(error, i + 1), outputs=(len(values), len(values) + 1), time_s=2e-3
        )
        ops.append(
            Op(name=f"b{i}", target="aten.mm.default", backward=True, implementations=(implementation,))
        )
        error = len(values)
        values += made
    return Graph(name=name, values=tuple(values), ops=tuple(ops))


def recompute_all(graph: Graph) -> Plan:
    """A plan that keeps the first activation only and recomputes the others one by one."""
    length = len(graph.ops) // 2
    order = list(range(length))
    for i in reversed(range(length)):
        order += [*range(1, i + 1), 2 * length - 1 - i] if i < length - 1 else [2 * length - 1 - i]
    schedule = Schedule.from_order(graph, order)
    peak = simulate(graph, schedule).peak_nbytes
    return Plan.from_schedule(
        graph, schedule, budget_nbytes=peak + 2**16, lower_bound_s=graph.time_s, solver="hand"
    )


@pytest.fixture
def graph() -> Graph:
    """The chain."""
    return chain()


@pytest.fixture
def plan(graph: Graph) -> Plan:
    """A plan of the chain with recomputations."""
    return recompute_all(graph)


def test_the_trace_is_the_referees(graph: Graph, plan: Plan) -> None:
    """Peak, end and repeats equal those of the referee, with and without a plan."""
    for schedule in (plan.schedule, Schedule.unplanned(graph)):
        timeline, shown = simulate(graph, schedule), trace(graph, schedule)
        assert timeline.peak_nbytes == shown.peak_nbytes
        assert timeline.time_s == pytest.approx(shown.end_s)
        assert timeline.recomputed_s == pytest.approx(sum(run.end_s - run.begin_s for run in shown.repeats))
        assert schedule.order == tuple(run.op for run in shown.runs)
        assert all(a <= b for a, b in zip(shown.gradient_nbytes, shown.held_nbytes, strict=True))
    assert sum(graph.allocated_nbytes(v) for v in graph.gradients) == shown.gradient_nbytes[-1]


def test_repeats_add_up(graph: Graph, plan: Plan) -> None:
    """The recomputed kinds of ops account for all repeats and all recomputed seconds."""
    kinds = repeated_targets(graph, plan.schedule)
    assert len(plan.schedule.order) - len(graph.ops) == sum(kind.count for kind in kinds)
    assert plan.recomputed_s == pytest.approx(sum(kind.time_s for kind in kinds))
    assert len(repeats_table(graph, plan, most=1).rows) == 2


def test_tables_have_a_cell_for_every_column(graph: Graph, plan: Plan) -> None:
    """No row is shorter or longer than the head."""
    named = recompute_all(with_layers(graph))
    tables = [plan_table(plan), repeats_table(graph, plan), layers_table(named), layers_table(named, most=1)]
    for table in (*tables, ways_table(switched()), ways_table(switched(), most=0)):
        assert table.rows
        assert {len(table.columns)} == {len(row) for row in table.rows}
    assert not layers_table(plan).rows
    assert not ways_table(plan).rows


@pytest.mark.parametrize(("gap", "said"), [(0.2, "more time may save up to 20.00% of the step"), (3e-5, "")])
def test_what_rounds_to_nothing_is_not_shown(gap: float, said: str) -> None:
    """Neither a gain of more time, nor the cost of repeats and of other ways; zeros of the digits are."""
    base_s = 0.00414
    plan = attrs.evolve(
        switched(),
        time_s=0.004,
        noremat_time_s=base_s,
        recomputed_s=gap * base_s,
        switched_s=-1e-9,
        lower_bound_s=base_s,
        deadline_hit=True,
    )
    table = plan_table(plan)
    assert ("more time" in table.note) == bool(said)
    assert said in table.note
    assert "the time limit ended the search" in table.note
    shown = " ".join(
        cell for each in (table, ways_table(plan), layers_table(plan)) for row in each.rows for cell in row
    )
    assert "4.00 ms" in shown
    assert "(+0.00%)" not in shown
    assert "-0.00%" not in shown + plan.summary()
    assert "other ways +" not in plan.summary()


def with_layers(graph: Graph) -> Graph:
    """Each op in a block of its own; names with characters that HTML escapes."""
    ops = [attrs.evolve(op, layer=f"<h>.{op.name[1:]}.mlp") for op in graph.ops]
    return attrs.evolve(graph, ops=ops)


def switched(*, exact: bool = True) -> Plan:
    """A plan of a chain whose ops 1 and 2 run in another way, which makes no tensor between them."""
    graph = with_layers(chain())
    ops = list(graph.ops)
    for i, inputs, outputs in ((1, (), ()), (2, (1,), (3,))):
        other = Implementation(inputs=inputs, outputs=outputs, time_s=4e-3)
        way = Alternative(switch="fused.f1", first=1, exact=exact)
        ops[i] = attrs.evolve(ops[i], implementations=(ops[i].first, other), alternatives=[way])
    for i, op in enumerate(ops):  # nothing else reads the tensor
        if op.backward and 2 in op.first.inputs:
            without = attrs.evolve(op.first, inputs=[v for v in op.first.inputs if v != 2])
            ops[i] = attrs.evolve(op, implementations=[without])
    graph = attrs.evolve(graph, ops=ops)
    decided = specialize(graph, graph.switches)
    schedule = decided.restore(Schedule.unplanned(decided.graph))
    return Plan.from_schedule(graph, schedule, budget_nbytes=2**30, lower_bound_s=0.0, solver="hand")


def test_layers_are_told_with_what_they_cost_and_save(graph: Graph) -> None:
    """Blocks are one row; the kinds of ops name their layers."""
    graph = with_layers(graph)
    plan = recompute_all(graph)
    (row,) = layers_table(plan).rows
    assert ("<h>.*.mlp", "4 of 6", "10", f"{plan.recomputed_overhead:+.2%}", "2.00 MiB", "4.00 MiB") == row
    kinds = [row[0] for row in repeats_table(graph, plan).rows]
    assert ["relu in <h>.*.mlp", "mm in <h>.*.mlp"] == sorted(kinds, reverse=True)
    shown = page(graph, plan)
    assert "&lt;h&gt;.*.mlp" in shown
    assert "<h>" not in shown


def test_other_ways_are_told_with_what_they_cost_and_save() -> None:
    """One row a family and pattern of layers: the ops, the time, and the bytes."""
    plan = switched()
    (row,) = ways_table(plan).rows
    assert ("fused in <h>", "1 of 1", "relu, mm") == row[:3]
    assert f"{3e-3 / plan.noremat_time_s:+.2%}" == row[3]
    assert "1.00 MiB" == row[5]


def test_ops_that_round_are_told_by_layer() -> None:
    """One row a family and pattern; a plan that knows no layers has one for each op."""
    plan = switched(exact=False)
    assert (("fused", "<h>.*.mlp", "1", "mm"),) == rounding_table(plan).rows
    (name, _), *_ = plan.rounding
    assert (("fused", "", "1", name),) == rounding_table(attrs.evolve(plan, rounding_layers=())).rows
    assert not rounding_table(switched()).rows


def test_the_png_is_one_and_always_the_same(graph: Graph, plan: Plan) -> None:
    """Drawing twice gives the same bytes."""
    first = picture.png(picture.draw(graph, plan))
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    assert first == picture.png(picture.draw(graph, plan))


def test_the_svg_takes_its_colours_from_the_page(graph: Graph, plan: Plan) -> None:
    """The SVG parses, and every colour of the palette is a variable; this plan moves nothing."""
    svg = picture.svg(picture.draw(graph, plan))
    ElementTree.fromstring(svg)
    for name, colour in attrs.asdict(picture.Palette()).items():
        assert colour not in svg
        assert (f"var(--{name})" in svg) is (name != "moved")


def without_times(graph: Graph) -> Graph:
    """The same graph without times."""
    ops = [
        attrs.evolve(op, implementations=[attrs.evolve(i, time_s=0.0) for i in op.implementations])
        for op in graph.ops
    ]
    return attrs.evolve(graph, ops=ops)


@pytest.mark.parametrize(
    "graph", [chain(1), chain(40), without_times(chain())], ids=["one op", "many ops", "no times"]
)
def test_odd_graphs_can_be_drawn(graph: Graph) -> None:
    """No repeats, many ops, or a graph without times."""
    page(graph, recompute_all(graph))


class Tags(HTMLParser):
    """Collects the links of a page, and the open tags."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag and its links."""
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close a tag; pages nest properly."""
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(graph: Graph, plan: Plan) -> None:
    """No script, style sheet, image or font from elsewhere; only links within the page."""
    text = page(graph, plan, [Table(title="measured", columns=("a", "b"), rows=(("1", "2"),))])
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert [] == [link for link in tags.links if not link.startswith("#")]
    assert "@import" not in text
    assert "url(http" not in text
    assert "prefers-color-scheme: dark" in text
    assert "measured" in text


def test_names_cannot_break_the_page() -> None:
    """The name of a graph is escaped."""
    graph = chain(name="<script>alert('$x$ & more')</script>")
    text = page(graph, recompute_all(graph))
    assert "<script>" not in text


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize("length", [2, 6, 40])
def test_no_label_covers_a_curve(length: int, narrow: bool) -> None:
    """The names of budget, forward and backward cover neither a curve nor another text."""
    graph = chain(length)
    figure = picture.draw(graph, recompute_all(graph), picture.Look(narrow=narrow))
    assert [] == overlaps(figure)


def test_a_dark_picture_has_no_colour_of_the_light_one(graph: Graph, plan: Plan) -> None:
    """Each colour is that of the palette; the width in pixels is the one that was asked for."""
    figure = picture.draw(graph, plan, picture.Look(palette=picture.DARK))
    out = io.StringIO()
    figure.savefig(out, format="svg")
    assert not any(colour in out.getvalue() for colour in attrs.asdict(picture.LIGHT).values())
    assert 400 == imread(io.BytesIO(picture.png(figure, 400))).shape[1]


def test_gradients_that_are_freed_leave_the_picture(graph: Graph) -> None:
    """Where a step finds a .grad, its memory is that of the plan for such steps."""
    schedule = Schedule.unplanned(graph)
    owned = [attrs.evolve(value, of=0) if value.role is Role.GRAD else value for value in graph.values]
    owned[0] = attrs.evolve(owned[0], role=Role.PARAM)
    graph = attrs.evolve(graph, values=owned)
    shown = trace(graph, schedule, Grads.PRESENT)
    assert simulate(graph, schedule, grads=Grads.PRESENT).peak_nbytes == shown.peak_nbytes
    assert shown.gradient_nbytes[-1] < trace(graph, schedule).gradient_nbytes[-1]
