"""Read graphs of the graph corpus: JSON with ops in microseconds and values in bytes.

    {name, loss_value, ops: [{id, name, op, inputs, outputs, is_backward, time_us}],
     values: [{id, op, bytes, is_grad_output, is_fwd_output}]}

Gradients and outputs lie in resident buffers there, so they become pinned values of 0 bytes; parameters and
inputs do not appear. The file has no shapes: the key of an op is its target, the bytes of its inputs and
outputs, and its time, which comes from a roofline and so distinguishes kernels with equal bytes.
"""

from typing import Any

from remat_graph.ir import Graph, Implementation, Op, Role, Value
from remat_graph.serialization.json_reader import Reader

_US = 1e-6


def is_corpus(data: Any) -> bool:
    """Whether data looks like a corpus graph: it has the keys of one and no ``format``."""
    return isinstance(data, dict) and "format" not in data and {"ops", "values"} <= data.keys()


def read_corpus(reader: Reader) -> Graph:
    """Make the graph of corpus data.

    Raises:
        BadFile: the data is not a corpus graph; the message names the place.
    """
    op_readers, value_readers = reader.get("ops").items(), reader.get("values").items()
    for readers in (op_readers, value_readers):
        for position, item in enumerate(readers):
            if item.get("id").size() != position:
                item.fail(f"its id is {item.data['id']}, but ids must count from 0 in order")
    reader.get_or("loss_value", lambda loss: loss.index(len(value_readers), "value"), None)

    nbytes = [item.get("bytes").nbytes() for item in value_readers]
    ops = [_op(item, nbytes) for item in op_readers]
    place_of = {(i, v): place for i, op in enumerate(ops) for place, v in enumerate(op.first.outputs)}
    values = [_value(item, nbytes[i], ops, place_of) for i, item in enumerate(value_readers)]
    return Graph(name=reader.get("name").text(), values=tuple(values), ops=tuple(ops))


def _op(reader: Reader, nbytes: list[int]) -> Op:
    inputs = reader.get("inputs").indices(len(nbytes), "value")
    outputs = reader.get("outputs").indices(len(nbytes), "value")
    time_us = reader.get("time_us").seconds()
    target = reader.get("op").text()
    key = f"{target}({_sizes(inputs, nbytes)})->({_sizes(outputs, nbytes)}) {time_us:.9g}us"
    made = Implementation(inputs=tuple(dict.fromkeys(inputs)), outputs=outputs, time_s=time_us * _US)
    backward = reader.get("is_backward").flag()
    return Op(
        name=reader.get("name").text(), target=target, backward=backward, key=key, implementations=(made,)
    )


def _value(reader: Reader, nbytes: int, ops: list[Op], place_of: dict[tuple[int, int], int]) -> Value:
    maker = reader.get("op").index(len(ops), "op")
    op = ops[maker]
    place = place_of.get((maker, reader.get("id").size()))
    if place is None:
        reader.fail(f"op {op.name} does not have it among its outputs")
    name = op.name if len(op.first.outputs) == 1 else f"{op.name}:{place}"
    if reader.get("is_fwd_output").flag():
        return Value(name=name, nbytes=0, role=Role.OUTPUT)
    if reader.get("is_grad_output").flag():
        return Value(name=name, nbytes=0, role=Role.GRAD)
    return Value(name=name, nbytes=nbytes)


def _sizes(values: tuple[int, ...], nbytes: list[int]) -> str:
    return ",".join(str(nbytes[value]) for value in values)
