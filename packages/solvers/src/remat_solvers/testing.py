"""Families of synthetic graphs to test solvers on: seeded plain data, with sizes and times of no real device.

`random_graph` uses every feature of the memory rule (workspaces, in-place outputs, pinned values, ops that
run only once, overwritten buffers); the others have the shapes of networks, each with a backward in which an
op reads the gradient of its output, its input and its output.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from remat_graph import Graph, Implementation, Op, Role, Value
from remat_graph.testing.random_graphs import new_values


class _NetworkBuilder:
    """A forward under construction; `build` adds the backward."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[Value] = [Value(name="x", nbytes=0, external=True)]
        self.nodes: list[tuple[list[int], int, float, bool]] = []

    def add(self, inputs: Sequence[int], nbytes: int, time_s: float, *, heavy: bool = False) -> int:
        """Add an op; a heavy one has a parameter gradient and reads its inputs in the backward."""
        self.values.append(Value(name=f"a{len(self.values)}", nbytes=nbytes))
        self.nodes.append((list(inputs), len(self.values) - 1, time_s, heavy))
        return len(self.values) - 1

    def build(self) -> Graph:
        """The joint graph; gradients of values that are read several times are summed."""
        values = list(self.values)
        ops = [
            Op(
                name=f"f{out}",
                target="forward",
                implementations=[Implementation(inputs=inputs, outputs=[out], time_s=time_s)],
            )
            for inputs, out, time_s, _ in self.nodes
        ]
        grads: dict[int, int] = {}

        def back(
            name: str, inputs: set[int], nbytes: int, time_s: float, role: Role = Role.ACTIVATION
        ) -> int:
            values.append(Value(name=name, nbytes=nbytes, role=role))
            implementation = Implementation(inputs=sorted(inputs), outputs=[len(values) - 1], time_s=time_s)
            ops.append(
                Op(name=f"b.{name}", target="backward", backward=True, implementations=[implementation])
            )
            return len(values) - 1

        for inputs, out, time_s, heavy in reversed(self.nodes):
            upstream = {grads[out]} if out in grads else set()
            for source in inputs:
                if source == 0:
                    continue
                saved = {source} if heavy else {out}
                made = back(f"g{source}.{out}", upstream | saved, values[source].nbytes, time_s)
                if source in grads:
                    made = back(
                        f"s{source}.{out}", {made, grads[source]}, values[source].nbytes, 0.2 * time_s
                    )
                grads[source] = made
            if heavy:
                back(f"w{out}", upstream | set(inputs), 0, time_s, Role.GRAD)
        return Graph(name=self.name, values=values, ops=ops)


def chain(length: int, *, seed: int = 0, skips: int = 0) -> Graph:
    """Convolution-like and pointwise ops in a row; residual additions every `skips` ops if that is not 0."""
    rng = random.Random(seed)
    net = _NetworkBuilder(f"chain{length}" + (f"skip{skips}" if skips else ""))
    x = skip = net.add([0], rng.randint(20, 40), 5.0, heavy=True)
    for i in range(1, length):
        heavy = i % 2 == 0
        x = net.add([x], rng.randint(20, 40), 5.0 if heavy else 1.0, heavy=heavy)
        if skips and i % skips == 0:
            x = skip = net.add([x, skip], rng.randint(20, 40), 1.0)
    return net.build()


def unet(depth: int) -> Graph:
    """An encoder and a decoder with a skip at each of `depth` resolutions."""
    rng = random.Random(0)
    net = _NetworkBuilder(f"unet{depth}")
    x, skips = 0, []
    for level in range(depth):
        size = 1024 >> level
        x = net.add([x], size, 8.0 + rng.random(), heavy=True)
        x = net.add([x], size, 1.0)
        skips.append(x)
        x = net.add([x], size // 4, 0.5)
    for level in reversed(range(depth)):
        size = 1024 >> level
        x = net.add([x, skips[level]], 2 * size, 1.5)
        x = net.add([x], size, 10.0 + rng.random(), heavy=True)
        x = net.add([x], size, 1.0)
    return net.build()


def dense(blocks: int, *, layers: int = 6) -> Graph:
    """Dense connections: each layer of a block reads all before it."""
    rng = random.Random(0)
    net = _NetworkBuilder(f"dense{blocks}")
    x = net.add([0], 64, 4.0, heavy=True)
    for _ in range(blocks):
        before = [x]
        for _ in range(layers):
            joined = net.add(before, 16 * len(before), 0.5)
            normal = net.add([joined], 16 * len(before), 1.0)
            before.append(net.add([normal], 16, 3.0 + rng.random(), heavy=True))
        x = net.add([before[-1]], 32, 1.0)
    return net.build()


def mobile(blocks: int) -> Graph:
    """Inverted bottlenecks with wide early layers, as in mobile networks."""
    rng = random.Random(0)
    net = _NetworkBuilder(f"mobile{blocks}")
    x = net.add([0], 400, 3.0, heavy=True)
    for block in range(blocks):
        size = max(8, 400 // (1 + block))
        wide = net.add([x], 6 * size, 2.0, heavy=True)
        for _ in range(2):
            wide = net.add([wide], 6 * size, 0.6)
        deep = net.add([wide], 6 * size, 1.5 + rng.random(), heavy=True)
        thin = net.add([net.add([deep], 6 * size, 0.6)], size, 2.0, heavy=True)
        x = net.add([x, thin], size, 0.3) if block % 3 else thin
    return net.build()


def transformer(layers: int) -> Graph:
    """Equal decoder layers of some 115 ops, backward included: norms, rotary attention, gated MLP.

    There are 2,048 tokens of width 1,024. Scores are tokens by tokens for each of ``width / 64`` heads; the
    MLP is 2.75 times as wide as the residual stream.
    """
    tokens, width = 2048, 1024
    stream, scores, wide = 2 * tokens * width, 2 * tokens**2 * (width // 64), 2 * tokens * width * 11 // 4
    net = _NetworkBuilder(f"transformer{layers}")

    def light(inputs: Sequence[int], nbytes: int) -> int:
        """An op that moves bytes, at 3 TB/s."""
        return net.add(inputs, nbytes, (len(inputs) + 1) * nbytes / 3e12)

    def product(inputs: Sequence[int], nbytes: int, *, inner: int, heavy: bool = True) -> int:
        """A matrix product of 2 * inner operations for each two-byte number it makes, at 400 TFLOP/s."""
        return net.add(inputs, nbytes, nbytes * inner / 400e12, heavy=heavy)

    def norm(x: int) -> int:
        scale = light([light([light([x], 2 * stream)], 4 * tokens)], 4 * tokens)
        return net.add(
            [light([light([x], 2 * stream), scale], 2 * stream)], stream, stream / 1e12, heavy=True
        )

    def rotary(x: int) -> int:
        turned = light([light([x], stream // 2), light([x], stream // 2)], stream)
        return light([light([x], stream), light([turned], stream)], stream)

    x = net.add([0], stream, stream / 1e12, heavy=True)
    for _ in range(layers):
        y = norm(x)
        q, k, v = (product([y], stream, inner=width) for _ in range(3))
        weights = light([product([rotary(q), rotary(k)], scores, inner=64, heavy=False)], scores)
        weights = light([light([light([weights], 2 * scores)], 2 * scores)], scores)
        mixed = light([product([weights, v], stream, inner=tokens, heavy=False)], stream)
        x = light([x, product([mixed], stream, inner=width)], stream)
        y = norm(x)
        gate, up = (product([y], wide, inner=width) for _ in range(2))
        x = light(
            [x, product([light([light([gate], wide), up], wide)], stream, inner=width * 11 // 4)], stream
        )
    return net.build()


def random_graph(seed: int, ops: int = 6, *, fancy: bool = True) -> Graph:
    """A small DAG with its backward; `fancy` adds every feature of the memory rule."""
    made = _RandomGraph(seed, fancy=fancy)
    forward_count = max(1, ops // 2)
    for i in range(forward_count):
        made.add_forward(i, last=i == forward_count - 1)
    made.add_tangents()
    backward_count = ops - forward_count
    for i in range(backward_count):
        made.add_backward(i, last=i == backward_count - 1)
    rounding_nbytes = made.rng.choice([1, 4, 512]) if fancy else 1
    return Graph(name=f"random{seed}", values=made.values, ops=made.ops, rounding_nbytes=rounding_nbytes)


class _RandomGraph:
    """A random graph under construction. The order of random draws defines the graph of a seed."""

    def __init__(self, seed: int, *, fancy: bool) -> None:
        self.rng, self.fancy = random.Random(seed), fancy
        self.values, self.value = new_values()
        self.ops: list[Op] = []
        self.made: list[int] = []  # values of the forward
        self.back: list[int] = []  # tangents, and values of the backward
        self.external = self.value("x", 7, external=True)
        self.buffer: int | None = None
        if fancy:
            self.buffer = self.value("running", 3, external=True, role=Role.BUFFER)

    def size(self) -> int:
        """Draw the bytes of a value."""
        return self.rng.choice([0, 1, 2, 3, 5, 8, 8, 13, 600]) if self.fancy else self.rng.randint(1, 9)

    def happens(self, share: float) -> bool:
        """Draw whether a fancy feature occurs, with probability `share`."""
        return self.fancy and self.rng.random() < share

    def reuses(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Pairs of outputs and inputs of equal size, whose storage may be reused."""
        return tuple(
            (output, source)
            for output in outputs
            for source in inputs
            if source != self.external and self.values[output].nbytes == self.values[source].nbytes
        )

    def add_forward(self, index: int, *, last: bool) -> None:
        """Add an op of the forward, with one or two implementations; it may write the buffer."""
        rng, pool = self.rng, [self.external, *self.made]
        inputs = sorted({rng.choice(pool[-3:]), rng.choice(pool)}) if index else [self.external]
        size = self.size()
        outputs = [self.value("a", size, role=Role.OUTPUT if last or self.happens(0.1) else Role.ACTIVATION)]
        if self.happens(0.25):
            outputs.append(self.value("b", self.size()))
        reuses = self.reuses(inputs, outputs) if self.happens(0.4) else ()
        time_s, workspace_nbytes = rng.randint(0, 9), rng.choice([0, 0, 4]) if self.fancy else 0
        first = Implementation(
            inputs=inputs, outputs=outputs, time_s=time_s, reuses=reuses, workspace_nbytes=workspace_nbytes
        )
        implementations = [first]
        rerun: int | None = 0
        if self.buffer is not None and rng.random() < 0.15:
            implementations, rerun = self.writing_the_buffer(first), rng.choice([0, 1])
        elif self.happens(0.2):
            implementations.append(Implementation(inputs=inputs, outputs=outputs[:1], time_s=time_s + 1))
            rerun = rng.choice([1, None])
        self.ops.append(Op(name=f"f{index}", target="f", rerun=rerun, implementations=implementations))
        self.made += outputs

    def writing_the_buffer(self, first: Implementation) -> list[Implementation]:
        """An implementation that also writes the buffer, and one that does not."""
        assert self.buffer is not None
        inputs, outputs, older = first.inputs, first.outputs, self.buffer
        newer = self.buffer = self.value("running", 3, external=True, role=Role.BUFFER, replaces=older)
        writes = Implementation(
            inputs=[*inputs, older],
            outputs=[*outputs, newer],
            time_s=first.time_s,
            workspace_nbytes=first.workspace_nbytes,
        )
        return [writes, Implementation(inputs=inputs, outputs=outputs, time_s=first.time_s + 1)]

    def add_tangents(self) -> None:
        """A tangent for each output."""
        outputs = [place for place, value in enumerate(self.values) if value.role is Role.OUTPUT]
        self.back += [self.value("t", self.size(), role=Role.TANGENT, of=output) for output in outputs]

    def add_backward(self, index: int, *, last: bool) -> None:
        """Add an op of the backward, which computes a gradient or an intermediate value."""
        rng = self.rng
        read = {rng.choice(self.back[-2:]) if self.back else self.external, rng.choice(self.made)}
        if rng.random() < 0.5:
            read.add(rng.choice(self.made))
        if self.happens(0.1):
            read = {rng.choice(self.made)}
        inputs, pinned = sorted(read), rng.random() < (1.0 if last else 0.4)
        role, of = (Role.GRAD, self.external) if pinned else (Role.ACTIVATION, None)
        outputs = [self.value("g", self.size(), role=role, of=of)]
        implementation = Implementation(
            inputs=inputs,
            outputs=outputs,
            time_s=rng.randint(0, 9),
            reuses=self.reuses(inputs, outputs) if self.fancy else (),
        )
        self.ops.append(Op(name=f"b{index}", target="b", backward=True, implementations=[implementation]))
        self.back += outputs


def layer_graph(content: Mapping[str, Any]) -> Graph:
    """A layer-level graph as in Checkmate's paper: each node computes one value, edges name the readers.

    Args:
        content: ``name``, ``nodes`` with ``id``, ``name``, ``kind`` (fwd, loss or bwd), ``time`` and
            ``bytes``, in topological order, and ``edges`` as pairs of ids.
    """
    inputs: dict[int, list[int]] = {node["id"]: [] for node in content["nodes"]}
    for source, target in content["edges"]:
        inputs[target].append(source)
    ops = [
        Op(
            name=node["name"],
            target=node["kind"],
            backward=node["kind"] == "bwd",
            implementations=[
                Implementation(inputs=inputs[node["id"]], outputs=[node["id"]], time_s=node["time"])
            ],
        )
        for node in content["nodes"]
    ]
    values = [Value(name=node["name"], nbytes=node["bytes"]) for node in content["nodes"]]
    return Graph(name=content["name"], values=values, ops=ops)
