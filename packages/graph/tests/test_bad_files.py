"""For every content of a file, its reader returns a graph, plan or order, or raises one clear error."""

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remat_graph import (
    BadFile,
    ForeignPlan,
    OverBudget,
    Plan,
    RematError,
    Schedule,
    load_graph,
    load_order,
    load_plan,
    simulate,
)
from remat_graph.serialization.graphs import graph_from_data, graph_to_data
from remat_graph.serialization.plans import plan_from_data, plan_to_data
from remat_graph.testing.random_graphs import random_graph

HangLimit = Callable[[int], AbstractContextManager[None]]
GRAPH = random_graph(4)
SCHEDULE = Schedule.from_order(GRAPH, range(len(GRAPH.ops)))
PLAN = Plan.from_schedule(
    GRAPH,
    SCHEDULE,
    budget_nbytes=simulate(GRAPH, SCHEDULE).peak_nbytes,
    lower_bound_s=GRAPH.time_s,
    solver="noremat",
)
CORPUS = {
    "name": "tiny",
    "loss_value": 1,
    "ops": [
        {"id": 0, "name": "f", "op": "mm", "inputs": [], "outputs": [0], "is_backward": False, "time_us": 1},
        {"id": 1, "name": "b", "op": "mm", "inputs": [0], "outputs": [1], "is_backward": True, "time_us": 2},
    ],
    "values": [
        {"id": 0, "op": 0, "bytes": 8, "is_grad_output": False, "is_fwd_output": False},
        {"id": 1, "op": 1, "bytes": 8, "is_grad_output": True, "is_fwd_output": False},
    ],
}
READERS = {"graph": load_graph, "plan": load_plan, "order": load_order}
GOOD: dict[str, Any] = {"graph": graph_to_data(GRAPH), "plan": plan_to_data(PLAN), "order": [0, 1, 0]}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"\x80\x04\x95pickle", "is not text"),
        (b"{", "not valid JSON at line 1"),
        (b"[1,\n2,", "not valid JSON at line 2"),
        (b'{"format": NaN}', "NaN is not a number"),
        (b"[Infinity]", "Infinity is not a number"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" + b"9" * 10_000 + b"]", "contains invalid data"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path: Path, kind: str, content: bytes | None, problem: str) -> None:
    """Missing, empty, binary and truncated files, and constants that only Python accepts."""
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadFile, match=problem) as caught:
        READERS[kind](path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """The reason of the operating system is part of the message."""
    with pytest.raises(BadFile, match="cannot be read"):
        load_graph(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    """The file has no read permission."""
    path = tmp_path / "secret.json"
    path.write_text("[]")
    path.chmod(0)
    with pytest.raises(BadFile, match="cannot be read"):
        load_order(path)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("length", [1, 0.2, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, kind: str, length: float) -> None:
    """At every length."""
    text = json.dumps(GOOD[kind])
    path = tmp_path / "file.json"
    path.write_text(text[: max(1, int(length * len(text)) - 1)])
    with pytest.raises(BadFile, match="cut off"):
        READERS[kind](path)


@pytest.mark.parametrize("kind", ["graph", "plan"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "version 2, newer than our 1"),
        ({"version": 0}, "versions count from 1"),
        ({"version": "1"}, "version: a whole number"),
        ({"format": "pickle"}, "its format is 'pickle'"),
        ({"surprise": 1}, "unknown key 'surprise'"),
    ],
)
def test_another_version_or_kind_is_refused(
    tmp_path: Path, kind: str, change: dict[str, Any], problem: str
) -> None:
    """The message for a newer file names both versions."""
    path = tmp_path / "file.json"
    path.write_text(json.dumps(GOOD[kind] | change))
    with pytest.raises(BadFile, match=problem):
        READERS[kind](path)


def test_kinds_are_not_mixed_up(tmp_path: Path) -> None:
    """A plan is not a graph, a graph is not an order."""
    for kind in READERS:
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(GOOD[kind]))
        for other, read in READERS.items():
            if other != kind:
                with pytest.raises(BadFile):
                    read(path)


def put(data: dict[str, Any], place: list[Any] | tuple[Any, ...], content: Any) -> dict[str, Any]:
    """A deep copy of data with new content at a place, or with the place removed."""
    data = copy.deepcopy(data)
    *way, last = place
    spot = data
    for key in way:
        spot = spot[key]
    if content is ...:
        del spot[last]
    else:
        spot[last] = content
    return data


@pytest.mark.parametrize(
    ("place", "content", "problem"),
    [
        (["name"], ..., "'name' is missing"),
        (["name"], 3, "name: text was wanted, but it is int 3"),
        (["values"], {}, "values: a list was wanted"),
        (["values", 0], [], r"values\[0\]: an object was wanted"),
        (["values", 0, "nbytes"], -1, r"values\[0\].nbytes: a whole number from 0 to 2"),
        (["values", 0, "nbytes"], 1.5, "a whole number"),
        (["values", 0, "nbytes"], True, "a whole number"),
        (["values", 0, "nbytes"], 2**63, "a whole number"),
        (["values", 0, "nbytes"], 2**53 + 1, r"at most 9,007,199,254,740,992 bytes were wanted"),
        (["values", 0, "nbytes"], None, "it is null"),
        (["values", 0, "role"], "lunch", "'lunch' is not one of activation"),
        (["values", 0, "of"], 10_000, "there is no value 10000"),
        (["values", 0, "external"], 1, "true or false was wanted"),
        (["values", 0, "home"], "away", "'away' is not one of device, host"),
        (["values", 0, "shape"], [1], "unknown key 'shape'"),
        (["values", 1, "name"], "input0", "two values have this name"),
        (["ops", 0, "name"], ..., "'name' is missing"),
        (["ops", 0, "rerun"], 5, "there is no implementation 5"),
        (["ops", 0, "implementations"], [], "it has no implementation"),
        (["ops", 0, "backward"], True, "forward op after backward op"),
        (["ops", 0, "implementations", 0, "inputs"], [99_999], "there is no value 99999"),
        (["ops", 0, "implementations", 0, "inputs"], [-1], "a whole number from 0 to 2"),
        (["ops", 0, "implementations", 0, "outputs"], "12", "a list was wanted"),
        (["ops", 0, "implementations", 0, "time_s"], -0.5, "a finite number from 0 to"),
        (["ops", 0, "implementations", 0, "time_s"], "1", "a number was wanted"),
        (["ops", 0, "implementations", 0, "time_s"], float("inf"), "a finite number"),
        (["ops", 0, "implementations", 0, "time_s"], float("nan"), "a finite number"),
        (["ops", 0, "implementations", 0, "time_s"], 1e308, "a finite number"),
        (["ops", 0, "implementations", 0, "workspace_nbytes"], 0.5, "a whole number"),
        (["ops", 0, "implementations", 0, "workspace_nbytes"], 2**60, "bytes were wanted"),
        (["rounding_nbytes"], 2**62, "bytes in all; at most"),
        (["ops", 0, "implementations", 0, "reuses"], [[1]], "two values"),
        (["rounding_nbytes"], 0, "must be at least 1"),
        (["conditions"], [["mode"]], "two strings"),
        (["updates"], [{"param": 0}], "'grad' is missing"),
        (["updates"], [{"param": 0, "grad": 0}], "is not a gradient"),
    ],
)
def test_wrong_graph_content_is_named_with_its_place(place: list[Any], content: Any, problem: str) -> None:
    """Wrong types, ranges and references."""
    with pytest.raises(BadFile, match=problem) as caught:
        graph_from_data(put(GOOD["graph"], place, content), source="g.json")
    assert str(caught.value).startswith("g.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "content", "problem"),
    [
        (["ops", 0, "id"], 1, r"ops\[0\]: its id is 1"),
        (["ops", 0, "inputs"], [1], "before anything makes it"),
        (["ops", 0, "time_us"], -1, "a finite number from 0 to"),
        (["ops", 1, "time_us"], ..., "'time_us' is missing"),
        (["ops", 1, "name"], "f", "two ops have this name|two values have this name"),
        (["values", 0, "op"], 7, "there is no op 7"),
        (["values", 0, "op"], 1, "op b does not have it among its outputs"),
        (["values", 0, "bytes"], "8", "a whole number"),
        (["loss_value"], 2, "there is no value 2"),
        (["ops"], [], "there is no value|there is no op"),
    ],
)
def test_wrong_corpus_content_is_named_with_its_place(place: list[Any], content: Any, problem: str) -> None:
    """The corpus format is checked in the same way."""
    graph_from_data(CORPUS)
    with pytest.raises(BadFile, match=problem):
        graph_from_data(put(CORPUS, place, content))


@pytest.mark.parametrize(
    ("place", "content", "problem"),
    [
        (["peak_nbytes"], ..., "'peak_nbytes' is missing"),
        (["peak_nbytes"], -5, "a whole number"),
        (["peak_nbytes"], 2**40, "above its own budget"),
        (["time_s"], None, "a number was wanted"),
        (["solver_stats"], [], "an object was wanted"),
        (["periods"], 0, "periods: a whole number from 1 to 16 was wanted"),
        (["periods"], 10**9, "periods: a whole number from 1 to 16 was wanted, but it is 1,000,000,000"),
        (["links"], {"to_host_nbytes_per_s": 0}, "at least 0.001 bytes a second were wanted, but it is 0"),
        (["links"], {"to_device_nbytes_per_s": 1e-320}, "at least 0.001 bytes a second"),
        (["links"], {"host_nbytes_per_s": float("nan")}, "a finite number"),
        (["links"], {"to_moon": 1}, "unknown key 'to_moon'"),
        (["versions"], {"torch": 2}, "versions.torch: text was wanted"),
        (["deadline_hit"], 0, "true or false"),
        (["schedule", "boundary"], 10**6, "there is no boundary"),
        (["schedule", "steps"], [["fly", 1]], "is not a step"),
        (["schedule", "steps"], [["compute"]], "is not a step"),
        (["schedule", "steps"], [[]], "is not a step"),
        (["schedule", "steps"], [["free", -1]], "a whole number"),
        (["schedule", "steps"], [["start", 0, "compute"]], "start cannot be on lane compute"),
        (["schedule", "steps"], [["optimizer_step", 0, "to_host"]], "cannot be on lane to_host"),
    ],
)
def test_wrong_plan_content_is_named_with_its_place(place: list[str], content: Any, problem: str) -> None:
    """Checked without a graph."""
    with pytest.raises(BadFile, match=problem):
        plan_from_data(put(GOOD["plan"], place, content))


def test_statistics_may_not_be_nested_without_end(tmp_path: Path) -> None:
    """The limit is ours: Python's own is raised by other tools, torch's compiler among them."""
    path = tmp_path / "plan.json"
    plan = {name: part for name, part in GOOD["plan"].items() if name != "solver_stats"}
    path.write_text(json.dumps(plan)[:-1] + ', "solver_stats": {"a": ' + "[" * 900 + "]" * 900 + "}}")
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(usual + 2000)
    try:
        with pytest.raises(BadFile, match="solver_stats: nested too deeply: at most 64 levels"):
            load_plan(path)
    finally:
        sys.setrecursionlimit(usual)


@pytest.mark.parametrize("kind", READERS)
def test_a_file_is_not_read_beyond_what_ours_can_hold(
    tmp_path: Path, kind: str, hang_limit: HangLimit
) -> None:
    """A sparse file of 40 GiB and an endless device are refused before they fill the memory."""
    path = tmp_path / "file.json"
    with open(path, "wb") as file:
        file.truncate(40 * 2**30)
    for place in (path, "/dev/zero"):
        with (
            hang_limit(20),
            pytest.raises(BadFile, match="is longer than 65,536 KiB, the limit for such files"),
        ):
            READERS[kind](place)


def test_a_list_is_no_longer_than_ours_can_be() -> None:
    """Each item takes a hundred times its two bytes while it is read."""
    with pytest.raises(BadFile, match="values: a list of at most 4,000,000 was wanted, but it has 4,000,001"):
        graph_from_data(GOOD["graph"] | {"values": [0] * 4_000_001})


def test_sums_of_sizes_stay_exact() -> None:
    """Each size is valid, but their sum is not exact in 64-bit arrays and floats."""
    values = [value | {"nbytes": 2**52} for value in GOOD["graph"]["values"]]
    with pytest.raises(BadFile, match="bytes in all; at most 9,007,199,254,740,992 can be counted"):
        graph_from_data(GOOD["graph"] | {"values": values, "updates": []})


def many_values(count: Any) -> Any:
    """Data of that many values of one byte."""
    return [{"name": f"v{i}", "nbytes": 1, "external": True} for i in range(count)]


LONG = 100_000
WIDE = {"name": "o", "target": "t"} | {
    "implementations": [
        {
            "inputs": list(range(LONG)),
            "outputs": list(range(LONG, 2 * LONG)),
            "reuses": [[LONG + i, i] for i in range(LONG)],
        }
    ]
}
LONG_FILES = {
    "two of many values have one name": (
        GOOD["graph"] | {"values": [*many_values(LONG), many_values(LONG)[-1]], "ops": [], "updates": []}
    ),
    "an op that reuses many storages": (
        GOOD["graph"] | {"values": many_values(2 * LONG), "ops": [WIDE], "updates": []}
    ),
    "a corpus op that makes many values": CORPUS
    | {
        "ops": [CORPUS["ops"][0] | {"outputs": list(range(LONG))}],
        "values": [CORPUS["values"][0] | {"id": i} for i in range(LONG)],
    },
}


@pytest.mark.parametrize("case", LONG_FILES)
def test_reading_takes_no_time_that_grows_with_the_square(case: str, hang_limit: HangLimit) -> None:
    """A quadratic reader would need minutes for a hundred thousand items."""
    with hang_limit(20):
        try:
            graph_from_data(LONG_FILES[case])
        except BadFile as error:
            message = str(error)
        else:
            message = ""
    assert ("two values have this name" in message) == (case == "two of many values have one name")


def test_a_foreign_plan_is_refused() -> None:
    """The error names both graphs."""
    with pytest.raises(ForeignPlan, match=r"random-4-8.*random-5-8.*plan again"):
        plan_from_data(GOOD["plan"], graph=random_graph(5))


@pytest.mark.parametrize(
    ("place", "content", "problem"),
    [
        (["schedule", "steps", 0], ["compute", 999], "there is no op 999"),
        (["schedule", "steps", 0], ["compute", 0, 7], "there is no implementation 7"),
        (["schedule", "steps", 0], ["free", 0], "its schedule cannot be carried out: .* step 0"),
        (["schedule", "boundary"], 0, "its schedule cannot be carried out"),
    ],
)
def test_a_plan_that_does_not_run_is_refused(
    place: list[Any], content: int | list[int | str], problem: str
) -> None:
    """With a graph, its schedule is simulated."""
    with pytest.raises(BadFile, match=problem):
        plan_from_data(put(GOOD["plan"], place, content), graph=GRAPH)


def test_a_plan_that_understates_its_peak_is_corrected_or_refused() -> None:
    """The peak in the file is not trusted."""
    peak = PLAN.peak_nbytes
    assert PLAN == plan_from_data(put(GOOD["plan"], ["peak_nbytes"], peak - 1), graph=GRAPH)
    lying = GOOD["plan"] | {"peak_nbytes": 0, "budget_nbytes": peak - 1}
    with pytest.raises(OverBudget, match=f"{peak:,} bytes"):
        plan_from_data(lying, graph=GRAPH)


@pytest.mark.parametrize("content", [{}, [[0]], [0.5], ["0"], [-1], [True], [None], 3, "order"])
def test_an_order_is_a_list_of_indices(tmp_path: Path, content: Any) -> None:
    """Other data is refused; with a graph, indices must lie within it."""
    path = tmp_path / "order.json"
    path.write_text(json.dumps(content))
    with pytest.raises(BadFile):
        load_order(path)


def test_an_order_for_a_larger_graph_is_refused(tmp_path: Path) -> None:
    """With a graph, its ops are counted."""
    path = tmp_path / "order.json"
    path.write_text("[0, 1000]")
    assert (0, 1000) == load_order(path)
    with pytest.raises(BadFile, match="no op 1000"):
        load_order(path, GRAPH)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places(data: Any, way: Any = ()) -> Iterator[Any]:
    """Every place in nested data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, content in items:
        yield (*way, key)
        yield from places(content, (*way, key))


PLACES = {
    "graph": (GOOD["graph"], list(places(GOOD["graph"])), graph_from_data),
    "plan": (GOOD["plan"], list(places(GOOD["plan"])), lambda data: plan_from_data(data, graph=GRAPH)),
    "corpus": (CORPUS, list(places(CORPUS)), graph_from_data),
}


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(PLACES)), st.data(), JUNK | st.just(...))
def test_junk_anywhere_gives_our_error_or_none(kind: str, data: st.DataObject, junk: Any) -> None:
    """Never a KeyError, a TypeError or an endless loop."""
    good, spots, read = PLACES[kind]
    broken = put(good, data.draw(st.sampled_from(spots)), junk)
    message = ""
    try:
        read(broken)
    except RematError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"format": "x", "format": "y"}', "contains invalid data: 'format' twice in one object"),
        ('{"format": ' + "1" * 5000 + "}", "contains invalid data: a number of thousands of digits"),
    ],
)
def test_what_would_be_read_otherwise_than_written_is_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    """The message does not repeat Python's advice to change its settings."""
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(BadFile) as caught:
        load_graph(path)
    assert f"{path}: {problem}" == str(caught.value)


def test_a_mark_before_the_text_is_passed_over(tmp_path: Path) -> None:
    """Some editors write a byte order mark."""
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph_to_data(GRAPH)), encoding="utf-8-sig")
    assert graph_to_data(GRAPH) == graph_to_data(load_graph(path))


def test_half_a_letter_is_no_text() -> None:
    """JSON can express half a surrogate pair, but no output can write it."""
    with pytest.raises(BadFile, match="name: text that can be written was wanted"):
        graph_from_data({**graph_to_data(GRAPH), "name": "\ud800"})


def test_a_plan_that_claims_a_false_bound_is_refused() -> None:
    """The message names the file and says what to do."""
    data = copy.deepcopy(GOOD["plan"]) | {"lower_bound_s": 9e18}
    with pytest.raises(
        BadFile, match=r"^plan.json: its lower bound of 9e\+18 s is above its compute time of .*: solve again"
    ):
        plan_from_data(data, graph=GRAPH, source="plan.json")
