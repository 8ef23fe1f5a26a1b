"""Add other ways to run the ops of a translated step: one switch a way."""

from collections.abc import Iterable

import attrs
import torch
from torch.fx import Node

from remat_executor.translation.keys import kernel_key
from remat_executor.translation.recipes import Recipe, RunKernel
from remat_executor.translation.translation import Translation
from remat_executor.ways.substitution import Change, Substitution
from remat_graph import Alternative, Implementation, Op, Role, Value


def with_ways(translation: Translation, ways: Iterable[Substitution]) -> Translation:
    """The translation with an alternative for each change of each way that the graph allows.

    A way is left out if what it does not make is read by an op that it does not change or is delivered, if it
    reads a tensor of the caller that the step overwrites, or if it changes an op that is no plain call.
    """
    adder = _Adder(translation)
    for way in ways:
        adder.add(way)
    return adder.result()


@attrs.frozen(eq=False)
class _Run:
    """What a change runs; `op` is the one that it changes, or that its own op follows."""

    change: Change
    op: int
    implementation: Implementation


class _Adder:
    """Adds ways one by one; the ops that they add get their places, and all ops their numbers, at the end."""

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self.values = list(translation.graph.values)
        self.value_of = dict(translation.value_of)
        self.ops = list(translation.graph.ops)
        self.kernels: dict[tuple[int, int], RunKernel] = dict(translation.kernels)
        self.added: list[list[tuple[Op, Change]]] = [[] for _ in self.ops]  # after each op
        self.overwritten = {value.replaces for value in self.values}
        self.place_of = {
            node: i
            for i, recipe in enumerate(translation.recipes)
            if isinstance(node := getattr(recipe, "node", None), Node)
        }

    def add(self, way: Substitution) -> None:
        """Add a way if the graph allows it."""
        before = len(self.values)
        new = [n for change in way.changes for n in change.makes or () if n not in self.value_of]
        for node in dict.fromkeys(new):
            self.value_of[node] = len(self.values)
            self.values.append(_new_value(node, self.translation.device))
        runs = self.runs_of(way)
        if runs is not None and self.is_sufficient(runs):
            for run in runs:
                self.add_run(way, run)
            return
        del self.values[before:]
        for node in new:
            self.value_of.pop(node, None)

    def runs_of(self, way: Substitution) -> list[_Run] | None:
        """What runs in this way; None if a node is no op, or reads what is no value or is overwritten."""
        found = []
        for change in way.changes:
            op = (self.place_of if change.added else self.translation.op_of).get(change.node)
            reads = [self.value(node) for node in change.reads]
            if op is None or None in reads or not self.overwritten.isdisjoint(reads):
                return None
            found.append(
                _Run(change, op, self.implementation(change, op, [v for v in reads if v is not None]))
            )
        return found

    def implementation(self, change: Change, op: int, reads: list[int]) -> Implementation:
        if change.kernel is None:
            return Implementation(inputs=(), outputs=())
        outputs = self.ops[op].first.outputs
        if change.makes is not None:
            outputs = tuple(self.value_of[node] for node in change.makes)
        reuses: list[tuple[int, int]] = []
        if change.over is not None and outputs:
            source = reads[change.reads.index(change.over)]
            if self.may_overwrite(source, outputs[0]) and reads.count(source) == 1:
                reuses.append((outputs[0], source))
        return Implementation(
            inputs=tuple(dict.fromkeys(reads)),
            outputs=outputs,
            reuses=reuses,
            workspace_nbytes=change.workspace_nbytes,
        )

    def value(self, node: Node) -> int | None:
        """The value whose storage a node shows."""
        return self.value_of.get(self.translation.base_of.get(node, node))

    def may_overwrite(self, source: int, output: int) -> bool:
        # A tangent belongs to autograd, which may pass it on, so it is never written.
        stored = self.values[source]
        foreign = stored.external or stored.role is Role.TANGENT
        return not foreign and stored.nbytes == self.values[output].nbytes

    def is_sufficient(self, runs: list[_Run]) -> bool:
        """Whether all values that these changes leave unmade are read by nothing and not delivered."""
        runs_at: dict[int, list[Implementation]] = {}
        for run in runs:
            if not run.change.added:
                first = [self.ops[run.op].first] if run.change.on_repeat else []
                runs_at[run.op] = [*first, run.implementation]
        now = [runs_at.get(i) or _own(op) for i, op in enumerate(self.ops)]
        now += [[run.implementation] for run in runs if run.change.added]
        made = {v for each in now for v in each[0].outputs}
        gone = {v for i in runs_at for v in self.ops[i].first.outputs} - made
        if any(self.values[v].pinned or self.values[v].external for v in gone):
            return False
        return not any(not gone.isdisjoint(run.inputs) for each in now for run in each)

    def add_run(self, way: Substitution, run: _Run) -> None:
        change, base = run.change, self.ops[run.op]
        # A way of an op whose kernel may vary is not repeated either.
        once = base.rerun is None and change.kernel is not None
        if change.added:
            empty = _empty_op(change, len(self.added[run.op]), base, self.translation.device)
            self.added[run.op].append((_with(empty, way, [run.implementation], once=once), change))
            return
        first = [base.first] if change.on_repeat else []
        self.kernels[run.op, len(base.implementations) + len(first)] = RunKernel(change)
        self.ops[run.op] = _with(base, way, [*first, run.implementation], once=once)

    def result(self) -> Translation:
        """The translation with all ways, and with each added op after the one that it follows."""
        old = self.translation
        ops: list[Op] = []
        recipes: list[Recipe] = []
        in_place, made_by, number, added = [], [], [], {}
        for i, op in enumerate(self.ops):
            number.append(len(ops))
            ops.append(op)
            recipes.append(old.recipes[i])
            in_place.append(old.in_place[i])
            made_by.append(old.made_by[i])
            for other, change in self.added[i]:
                added[len(ops), 1] = RunKernel(change)
                ops.append(other)
                recipes.append(RunKernel(Change(node=change.node)))
                in_place.append({})
                made_by.append(())
        return attrs.evolve(
            old,
            graph=attrs.evolve(old.graph, ops=ops, values=self.values),
            recipes=tuple(recipes),
            in_place=tuple(in_place),
            made_by=tuple(made_by),
            value_of=self.value_of,
            kernels={(number[i], k): kernel for (i, k), kernel in self.kernels.items()} | added,
        )


def _new_value(node: Node, device: torch.device) -> Value:
    tensor = node.meta["val"]
    nbytes = tensor.untyped_storage().nbytes() if tensor.device.type == device.type else 0
    return Value(name=node.name, nbytes=nbytes)


def _empty_op(change: Change, before: int, followed: Op, device: torch.device) -> Op:
    """An op that runs nothing."""
    target = getattr(change.kernel, "__name__", "kernel")
    return Op(
        name=f"{target}_{followed.name}_{before}",
        target=target,
        backward=followed.backward,
        key=f"added {kernel_key(change, device)}",
        implementations=(Implementation(inputs=(), outputs=()),),
        layer=followed.layer,
    )


def _with(op: Op, way: Substitution, runs: list[Implementation], *, once: bool) -> Op:
    """The op with an alternative: its first run, and its repeat where that is another one."""
    first = len(op.implementations)
    again = None if once else first + len(runs) - 1
    other = Alternative(switch=way.name, first=first, again=again, exact=way.exact)
    return attrs.evolve(
        op, implementations=(*op.implementations, *runs), alternatives=(*op.alternatives, other)
    )


def _own(op: Op) -> list[Implementation]:
    """The implementations of an op that no alternative uses."""
    return [op.first] if op.rerun is None else [op.first, op.implementations[op.rerun]]
