"""Make random training steps: parameters, optimizer states, updates, and links to a host."""

import math
import random
from collections.abc import Iterable

import attrs

from remat_graph.ir import Graph, Implementation, Op, Placement, Role
from remat_graph.links import Links
from remat_graph.testing.random_graphs import new_values
from remat_graph.training import Optimized, training_graph


def random_training(seed: int, layers: int) -> Graph:
    """A training step of different layers: each has a weight, a gradient, an update and up to two states.

    The forward of a layer reads its weight and the output of the layer before; its backward reads both again.
    Some weights are frozen, and some are read by two layers.
    """
    rng = random.Random(seed)
    values, value = new_values()
    ops: list[Op] = []

    def op(inputs: Iterable[int], outputs: Iterable[int], eighths: int, *, backward: bool) -> None:
        only = Implementation(inputs=inputs, outputs=outputs, time_s=eighths / 8)
        ops.append(Op(name=f"op{len(ops)}", target="layer", backward=backward, implementations=[only]))

    weights = [value("w", 64 * rng.randint(1, 8), role=Role.PARAM, external=True) for _ in range(layers)]
    used = [weights[i - 1] if i and rng.random() < 0.15 else w for i, w in enumerate(weights)]
    frozen = {w for w in weights if rng.random() < 0.2}
    made = [value("y", 64 * rng.randint(1, 8)) for _ in range(layers)]
    eighths = [rng.randint(2, 32) for _ in range(layers)]
    for i in range(layers):
        op((used[i], *made[i - 1 : i]), (made[i],), eighths[i], backward=False)
    parts: dict[int, list[int]] = {}
    above: list[int] = []
    for i in reversed(range(layers)):
        w, outputs = used[i], [value("dy", values[made[i - 1]].nbytes if i else 0)]
        if w not in frozen:
            last = w not in used[:i]
            fields = {"role": Role.GRAD, "of": w} if last and w not in parts else {}
            outputs.append(value("dw", values[w].nbytes, **fields))
            parts.setdefault(w, []).append(outputs[-1])
        op((w, made[i], *made[i - 1 : i], *above), outputs, 2 * eighths[i], backward=True)
        above = outputs[:1]
        if w in parts and len(parts[w]) > 1:
            op(parts[w], (value("dw", values[w].nbytes, role=Role.GRAD, of=w),), 1, backward=True)
    graph = Graph(name=f"training-{seed}-{layers}", values=values, ops=ops)
    optimized = []
    for w in sorted(set(used) - frozen):
        states = tuple((f"m{k}", 2 * values[w].nbytes) for k in range(rng.randint(0, 2)))
        work = values[w].nbytes / 64 / 8
        optimized.append(Optimized(param=w, states=states, device_time_s=work / 4, cpu_time_s=2 * work))
    return training_graph(graph, optimized)


def random_links(graph: Graph, seed: int) -> Links:
    """Bandwidths, powers of 2, at which moving all activations takes 1/8 to 4 times the compute time."""
    rng = random.Random(seed)
    nbytes = sum(value.nbytes for value in graph.values if value.role is Role.ACTIVATION)
    rates = [nbytes / max(graph.time_s, 1.0) * 2 ** rng.uniform(-2, 3) for _ in range(2)]
    to_host, to_device = (2.0 ** round(math.log2(max(rate, 1.0))) for rate in rates)
    return Links(to_host_nbytes_per_s=to_host, to_device_nbytes_per_s=to_device)


def streamed(graph: Graph, seed: int) -> Graph:
    """The same step with about 60 % of its parameters counted and placed on the host."""
    rng = random.Random(seed)
    values = [
        attrs.evolve(value, external=False, placement=Placement.HOST, nbytes=max(value.nbytes, 64))
        if value.role is Role.PARAM and rng.random() < 0.6
        else value
        for value in graph.values
    ]
    return attrs.evolve(graph, values=values)
