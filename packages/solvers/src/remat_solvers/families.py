"""Random graphs of several families for the solvers' tests: plain data, seeded."""

import random

from remat_graph import Graph, Implementation, Op, Role, Value


def random_graph(seed: int, ops: int = 6, *, fancy: bool = True) -> Graph:
    """A small DAG with its backward; `fancy` adds everything the memory rule knows."""
    rng = random.Random(seed)
    values: list[Value] = []
    nodes: list[Op] = []

    def value(prefix: str, nbytes: int, **kwargs: object) -> int:
        values.append(Value(name=f"{prefix}{len(values)}", nbytes=nbytes, **kwargs))  # type: ignore[arg-type]
        return len(values) - 1

    def size() -> int:
        return rng.choice([0, 1, 2, 3, 5, 8, 8, 13, 600]) if fancy else rng.randint(1, 9)

    forward_count = max(1, ops // 2)
    external = value("x", 7, external=True)
    made: list[int] = []
    buffer = value("running", 3, external=True, role=Role.BUFFER) if fancy else None
    for i in range(forward_count):
        pool = [external, *made]
        inputs = sorted({rng.choice(pool[-3:]), rng.choice(pool)}) if i else [external]
        last = i == forward_count - 1
        outputs = [
            value(
                "a", size(), role=Role.OUTPUT if last or (fancy and rng.random() < 0.1) else Role.ACTIVATION
            )
        ]
        if fancy and rng.random() < 0.25:
            outputs.append(value("b", size()))
        reuses = []
        if fancy and rng.random() < 0.4:
            reuses = [
                (o, s)
                for o in outputs
                for s in inputs
                if s != external and values[o].nbytes == values[s].nbytes
            ]
        first = Implementation(
            inputs=inputs,
            outputs=outputs,
            time_s=rng.randint(0, 9),
            reuses=tuple(reuses),
            workspace_nbytes=rng.choice([0, 0, 4]) if fancy else 0,
        )
        implementations, rerun = [first], 0
        if buffer is not None and rng.random() < 0.15:
            newer = value("running", 3, external=True, role=Role.BUFFER, replaces=buffer)
            implementations[0] = Implementation(
                inputs=[*inputs, buffer],
                outputs=[*outputs, newer],
                time_s=first.time_s,
                workspace_nbytes=first.workspace_nbytes,
            )
            implementations.append(Implementation(inputs=inputs, outputs=outputs, time_s=first.time_s + 1))
            buffer, rerun = newer, rng.choice([0, 1])
        elif fancy and rng.random() < 0.2:
            implementations.append(
                Implementation(inputs=inputs, outputs=outputs[:1], time_s=first.time_s + 1)
            )
            rerun = rng.choice([1, None])
        nodes.append(Op(name=f"f{i}", target="f", rerun=rerun, implementations=implementations))
        made += outputs
    tangents = [
        value("t", size(), role=Role.TANGENT, of=v)
        for v in range(len(values))
        if values[v].role is Role.OUTPUT
    ]
    back = list(tangents)
    for i in range(ops - forward_count):
        inputs = {rng.choice(back[-2:]) if back else external, rng.choice(made)}
        if rng.random() < 0.5:
            inputs.add(rng.choice(made))
        if fancy and rng.random() < 0.1:
            inputs = {rng.choice(made)}
        pinned = rng.random() < (0.4 if i < ops - forward_count - 1 else 1.0)
        outputs = [
            value("g", size(), role=Role.GRAD if pinned else Role.ACTIVATION, of=external if pinned else None)
        ]
        implementation = Implementation(
            inputs=sorted(inputs),
            outputs=outputs,
            time_s=rng.randint(0, 9),
            reuses=tuple(
                (o, s)
                for o in outputs
                for s in sorted(inputs)
                if fancy and s != external and values[o].nbytes == values[s].nbytes
            ),
        )
        nodes.append(Op(name=f"b{i}", target="b", backward=True, implementations=[implementation]))
        back += outputs
    return Graph(
        name=f"random{seed}",
        values=values,
        ops=nodes,
        rounding_nbytes=rng.choice([1, 4, 512]) if fancy else 1,
    )
