"""Which graphs may share a plan: a hash of what makes a schedule valid and its bytes what they are.

It covers the ops (target, key, direction, whether they repeat, what each implementation reads, makes and
reuses), the values (bytes, role, who lends them, aliasing links, chunks, home), the optimizer's updates and
the conditions. It leaves out what another measurement of the same step changes (times, workspaces, the
allocator's rounding) and names, which say nothing. Whoever loads a plan asks the referee again, so those
changes are seen.
"""

import hashlib
import json
from typing import Any

from remat_graph.ir import Graph, Implementation, Op, Value

PREFIX = "remat1:"
"""Version of the scheme; plans of another scheme never match."""


def fingerprint(graph: Graph) -> str:
    """Hash of a graph's structure: `PREFIX` and a sha256 in hex. Equal on every machine."""
    chunks: dict[str, int] = {}
    content = [
        [_value(value, chunks) for value in graph.values],
        [_op(op) for op in graph.ops],
        [[u.param, u.grad, list(u.states)] for u in graph.updates],
        sorted([key, condition] for key, condition in graph.conditions),
    ]
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
    return PREFIX + hashlib.sha256(text.encode("ascii")).hexdigest()


def _value(value: Value, chunks: dict[str, int]) -> list[Any]:
    chunk = None if value.chunk_of is None else chunks.setdefault(value.chunk_of, len(chunks))
    home = None if value.placement is None else value.placement.value
    return [value.nbytes, value.role.value, value.external, value.of, value.replaces, chunk, home]


def _op(op: Op) -> list[Any]:
    return [op.target, op.key, op.backward, op.rerun, [_implementation(i) for i in op.implementations]]


def _implementation(implementation: Implementation) -> list[Any]:
    reuses = [list(pair) for pair in implementation.reuses]
    return [list(implementation.inputs), list(implementation.outputs), reuses]
