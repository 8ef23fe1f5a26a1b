"""Hash the structure of a graph: graphs with equal hashes may share a plan.

The hash covers the ops (target, key, direction, rerun, the inputs, outputs and reuses of each implementation,
and alternatives), the values (bytes, role, external, links, chunks, placement), the optimizer's updates and
the conditions. It leaves out names (of ops, values and layers), and what another measurement of the same step
changes (times, workspaces, the allocator's rounding): a plan that is loaded for a graph is simulated again,
which takes those into account.
"""

import hashlib
import json
from typing import Any

from remat_graph.ir import Graph, Op, Value

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


def structure(graph: Graph) -> str:
    """Hash of what graphs of one model at several sizes share: a sha256 in hex.

    The ops (target, direction, rerun, the inputs and outputs of each implementation, alternatives) and the
    values (role, external, links), by index. Bytes, times, keys and conditions are left out.
    """
    content = [
        [[value.role.value, value.external, value.of, value.replaces] for value in graph.values],
        [
            [
                *(op.target, op.backward, op.rerun),
                [[list(each.inputs), list(each.outputs)] for each in op.implementations],
                [[each.switch, each.first, each.again] for each in op.alternatives],
            ]
            for op in graph.ops
        ],
    ]
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _value(value: Value, chunks: dict[str, int]) -> list[Any]:
    chunk = None if value.chunk_of is None else chunks.setdefault(value.chunk_of, len(chunks))
    placement = None if value.placement is None else value.placement.value
    return [value.nbytes, value.role.value, value.external, value.of, value.replaces, chunk, placement]


def _op(op: Op) -> list[Any]:
    implementations = [
        [list(i.inputs), list(i.outputs), [list(pair) for pair in i.reuses]] for i in op.implementations
    ]
    found = [op.target, op.key, op.backward, op.rerun, implementations]
    if op.alternatives:  # graphs without any keep the hash that they always had
        found.append([[a.switch, a.first, a.again, a.exact] for a in op.alternatives])
    return found
