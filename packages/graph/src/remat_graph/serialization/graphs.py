"""Read and write graphs as versioned JSON; reading runs no code and checks everything.

A file is an object with ``format`` and ``version``; a newer version is refused with a message. Fields with
their default are left out. `load_graph` reads the corpus format too (see `corpus`).
"""

import os
from typing import Any

from remat_graph.errors import BadFile, InvalidGraph
from remat_graph.ir import Alternative, Graph, Implementation, Op, Placement, Role, Update, Value
from remat_graph.serialization.corpus import is_corpus, read_corpus
from remat_graph.serialization.fields import VERSION, AnyPath, keys_of, sparse
from remat_graph.serialization.json_reader import Reader, read_json, write_json
from remat_graph.verify import verify

GRAPH_FORMAT = "remat-graph"


def save_graph(graph: Graph, path: AnyPath) -> None:
    """Write a graph; an existing file is replaced atomically."""
    write_json(graph_to_data(graph), path)


def load_graph(path: AnyPath) -> Graph:
    """Read a graph in our format or in that of the corpus, and verify it.

    Raises:
        BadFile: the file is missing, corrupt, cut off, too new, of another kind, or not a valid graph.
    """
    return graph_from_data(read_json(path), source=os.fspath(path))


def graph_to_data(graph: Graph) -> dict[str, Any]:
    """A graph as JSON data."""
    return {
        "format": GRAPH_FORMAT,
        "version": VERSION,
        "name": graph.name,
        "rounding_nbytes": graph.rounding_nbytes,
        "conditions": [list(pair) for pair in graph.conditions],
        "values": [sparse(value) for value in graph.values],
        "ops": [
            sparse(op)
            | {"implementations": [sparse(i) for i in op.implementations]}
            | ({"alternatives": [sparse(a) for a in op.alternatives]} if op.alternatives else {})
            for op in graph.ops
        ],
        "updates": [sparse(update) for update in graph.updates],
    }


def graph_from_data(data: Any, *, source: str = "graph data") -> Graph:
    """The graph of data by `graph_to_data` or of the corpus, verified; errors call the data `source`.

    Raises:
        BadFile: the data is something else, too new, or not a valid graph.
    """
    reader = Reader(data, source)
    if is_corpus(data):
        graph = read_corpus(reader)
    else:
        reader.header(GRAPH_FORMAT, VERSION, "graph")
        graph = _read_graph(reader)
    try:
        verify(graph)
    except InvalidGraph as error:
        raise BadFile(path=source, problem=str(error)) from error
    return graph


def _read_graph(reader: Reader) -> Graph:
    reader.known(keys_of(Graph) | {"format", "version"})
    value_readers = reader.get("values").items()
    count = len(value_readers)
    rounding = reader.get("rounding_nbytes")
    if rounding.size() < 1:
        rounding.fail("must be at least 1")
    return Graph(
        name=reader.get("name").text(),
        values=tuple(_read_value(item, count) for item in value_readers),
        ops=tuple(_read_op(item, count) for item in reader.get("ops").items()),
        updates=tuple(_read_update(item, count) for item in reader.get("updates").items()),
        rounding_nbytes=rounding.size(),
        conditions=tuple(_read_pair(item) for item in reader.get("conditions").items()),
    )


def _read_pair(reader: Reader) -> tuple[str, str]:
    items = reader.items()
    if len(items) != 2:
        reader.fail("two strings were wanted")
    return items[0].text(), items[1].text()


def _read_value(reader: Reader, count: int) -> Value:
    reader.known(keys_of(Value))

    def value(found: Reader) -> int:
        return found.index(count, "value")

    return Value(
        name=reader.get("name").text(),
        nbytes=reader.get("nbytes").nbytes(),
        role=reader.get_or("role", lambda r: r.choice(Role), Role.ACTIVATION),
        external=reader.get_or("external", Reader.flag, False),
        of=reader.get_or("of", value, None),
        replaces=reader.get_or("replaces", value, None),
        chunk_of=reader.get_or("chunk_of", Reader.text, None),
        placement=reader.get_or("home", lambda r: r.choice(Placement), None),
    )


def _read_op(reader: Reader, count: int) -> Op:
    reader.known(keys_of(Op))
    implementations = reader.get("implementations").items()
    if not implementations:
        reader.fail("it has no implementation; at least one was wanted")

    def rerun(found: Reader) -> int | None:
        return None if found.data is None else found.index(len(implementations), "implementation")

    def alternatives(found: Reader) -> tuple[Alternative, ...]:
        return tuple(_read_alternative(item, len(implementations)) for item in found.items())

    return Op(
        name=reader.get("name").text(),
        target=reader.get("target").text(),
        backward=reader.get_or("backward", Reader.flag, False),
        key=reader.get_or("key", Reader.text, ""),
        rerun=reader.get_or("rerun", rerun, None) if "rerun" in reader.mapping() else 0,
        implementations=tuple(_read_implementation(item, count) for item in implementations),
        alternatives=reader.get_or("alternatives", alternatives, ()),
        layer=reader.get_or("layer", Reader.text, ""),
    )


def _read_alternative(reader: Reader, implementations: int) -> Alternative:
    reader.known(keys_of(Alternative))

    def run(found: Reader) -> int:
        return found.index(implementations, "implementation")

    return Alternative(
        switch=reader.get("switch").text(),
        first=run(reader.get("first")),
        again=reader.get_or("again", run, None),
        exact=reader.get_or("exact", Reader.flag, True),
    )


def _read_implementation(reader: Reader, count: int) -> Implementation:
    reader.known(keys_of(Implementation))

    def pairs(found: Reader) -> tuple[tuple[int, int], ...]:
        read = []
        for item in found.items():
            pair = item.indices(count, "value")
            if len(pair) != 2:
                item.fail("two values were wanted")
            read.append((pair[0], pair[1]))
        return tuple(read)

    return Implementation(
        inputs=reader.get("inputs").indices(count, "value"),
        outputs=reader.get("outputs").indices(count, "value"),
        time_s=reader.get_or("time_s", Reader.seconds, 0.0),
        issue_s=reader.get_or("issue_s", Reader.seconds, 0.0),
        workspace_nbytes=reader.get_or("workspace_nbytes", Reader.nbytes, 0),
        reuses=reader.get_or("reuses", pairs, ()),
    )


def _read_update(reader: Reader, count: int) -> Update:
    reader.known(keys_of(Update))
    return Update(
        param=reader.get("param").index(count, "value"),
        grad=reader.get("grad").index(count, "value"),
        states=reader.get_or("states", lambda r: r.indices(count, "value"), ()),
        device_time_s=reader.get_or("device_time_s", Reader.seconds, 0.0),
        cpu_time_s=reader.get_or("cpu_time_s", Reader.seconds, 0.0),
        workspace_nbytes=reader.get_or("workspace_nbytes", Reader.nbytes, 0),
    )
