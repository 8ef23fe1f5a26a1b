"""The data flow by layer: what is kept, recomputed and moved, and a picture that can be read."""

from pathlib import Path

import attrs
import pytest

from remat_facade.report.dataflow import draw_dataflow, write_dataflow
from remat_facade.report.flows import MOST_ROWS, layer_flows
from remat_facade.report.picture import DARK, LIGHT, Look
from remat_graph import (
    Compute,
    Deliver,
    Free,
    FreeHost,
    Graph,
    Lane,
    Plan,
    Role,
    Schedule,
    Start,
    Transfer,
    Value,
    Wait,
    simulate,
)
from remat_graph.testing.small_graphs import small_graph

from .overlaps import overlaps

OUT, BACK = Transfer(2, Lane.TO_HOST), Transfer(2, Lane.TO_DEVICE)


def step(layers: tuple[str, ...] = ("h.0.attn", "h.0.mlp", "h.1.mlp", "head")) -> Graph:
    """Four forward ops, each in a layer, and one backward op that reads all that they make."""
    values = [
        Value(name="x", nbytes=100, external=True),
        *(Value(name=f"a{i}", nbytes=2**i * 1024) for i in range(1, 5)),
        Value(name="g", nbytes=8, role=Role.GRAD, of=0),
    ]
    ops = [*(((i,), (i + 1,)) for i in range(4)), ((1, 2, 3, 4), (5,))]
    graph = small_graph("step", values, ops, forward=4, time_s=1.0)
    named = [attrs.evolve(op, layer=layer) for op, layer in zip(graph.ops, (*layers, ""), strict=True)]
    return attrs.evolve(graph, ops=named)


def plan_of(graph: Graph) -> Plan:
    """a1 is recomputed, a2 moved, a3 and a4 are kept."""
    steps = [
        Compute(0),
        Compute(1),
        Free(1),
        Start(OUT),
        Compute(2),
        Wait(OUT),
        Free(2),
        Compute(3),
        Start(BACK),
        Compute(0),
        Wait(BACK),
        Compute(4),
        *(Free(v) for v in (1, 2, 3, 4)),
        FreeHost(2),
        Deliver(5),
    ]
    schedule = Schedule(steps, 8)
    peak = simulate(graph, schedule).peak_nbytes
    return Plan.from_schedule(graph, schedule, budget_nbytes=peak, lower_bound_s=0.0, solver="hand")


def test_each_value_counts_once() -> None:
    """Rows are in the order of the forward; each has what happens to the values of its layers."""
    graph = step()
    rows = {row.layers: row for row in layer_flows(graph, plan_of(graph))}
    assert ["h.*.attn", "h.*.mlp", "head"] == list(rows)
    attn, mlp, head = rows.values()
    assert (0, 2048, 0) == (attn.kept_nbytes, attn.recomputed_nbytes, attn.moved_nbytes)
    assert (8192, 0, 4096) == (mlp.kept_nbytes, mlp.recomputed_nbytes, mlp.moved_nbytes)
    assert (16384, 0, 0) == (head.kept_nbytes, head.recomputed_nbytes, head.moved_nbytes)
    assert [1, 2, 1] == [row.of for row in rows.values()]
    assert [1.0, 0.0, 0.0] == [row.repeats_s for row in rows.values()]
    assert [2048, 8192] == [attn.onward_nbytes, mlp.onward_nbytes]


def test_many_groups_are_summed_up() -> None:
    """The rows are limited, and no byte is lost."""
    count = MOST_ROWS + 4
    values = [Value(name="x", nbytes=1, external=True)]
    values += [Value(name=f"a{i}", nbytes=i + 1) for i in range(count)]
    values.append(Value(name="g", nbytes=8, role=Role.GRAD, of=0))
    ops = [*(((i,), (i + 1,)) for i in range(count)), (tuple(range(1, count + 1)), (count + 1,))]
    graph = small_graph("many", values, ops, forward=count, time_s=1.0)
    graph = attrs.evolve(graph, ops=[attrs.evolve(op, target=op.name) for op in graph.ops])
    schedule = Schedule.unplanned(graph)
    plan = Plan.from_schedule(graph, schedule, budget_nbytes=10**6, lower_bound_s=0.0, solver="hand")
    rows = layer_flows(graph, plan)
    assert (MOST_ROWS + 1, "4 more") == (len(rows), rows[-1].layers)
    assert sum(range(1, count + 1)) == sum(row.kept_nbytes for row in rows)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_the_picture_can_be_read(palette: object, narrow: bool) -> None:
    """Every layer and all bytes are written, and no text covers another."""
    graph = step()
    figure = draw_dataflow(graph, plan_of(graph), Look(palette=palette, narrow=narrow))
    written = [text.get_text() for text in figure.axes[0].texts]
    for wanted in ("h.*.attn", "h.*.mlp  \u00d72", "recomputed 2.00 KiB", "moved 4.00 KiB", "kept 16.0 KiB"):
        assert wanted in written
    assert [] == overlaps(figure)


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_long_names_are_cut(narrow: bool) -> None:
    """A long name shows its end and covers nothing."""
    name = "network.encoder.transformer.layers.0.self_attention.projection"
    graph = step((name, name.replace("0", "1"), "classification_network.with_names.of_many_letters", "head"))
    figure = draw_dataflow(graph, plan_of(graph), Look(narrow=narrow))
    assert any(text.get_text().startswith("\u2026") for text in figure.axes[0].texts)
    assert [] == overlaps(figure)


def test_the_file_is_a_png(tmp_path: Path) -> None:
    """The written file is a picture."""
    graph = step()
    assert write_dataflow(tmp_path / "flow.png", graph, plan_of(graph)).read_bytes().startswith(b"\x89PNG")
