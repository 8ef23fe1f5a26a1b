"""Chains of elementwise calls in one pass: the backward keeps what a chain reads, not what lies between.

As captured, ``0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))`` is eight calls, of which the backward reads
five results. In this way the forward of a chain is one kernel, and its backward another one that computes
what it needs of the forward again. Both run the captured calls on a chunk of elements before the next chunk,
so what is between calls stays in a cache.

A chain grows from its last call to all calls whose results only the chain and one group of elementwise calls
of the backward read. Its calls are those whose results do not depend on where in a tensor an element lies:
torch computes the last elements of a thread's share by other code than vectors, which for sigmoid or gelu
rounds differently. (The signs of NaN may differ there.)
"""

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.fx_nodes import target_of
from remat_executor.ways.chunks import chunk_numel, in_memory_order, is_dense
from remat_executor.ways.substitution import Change, Substitution
from remat_executor.ways.uses import Uses

aten = torch.ops.aten

LEAST_CHUNKS = 4  # with fewer, the results within a chunk need as much as the chain saves

_CALLS = {
    *(getattr(aten, name).default for name in ("tanh", "neg", "abs", "exp", "log", "sqrt", "sin", "cos")),
    *(getattr(aten, name).default for name in ("reciprocal", "relu", "tanh_backward", "sigmoid_backward")),
    *(getattr(aten, name).default for name in ("threshold_backward", "leaky_relu", "leaky_relu_backward")),
    *(getattr(aten, name).Tensor for name in ("mul", "add", "sub", "div")),
    *(getattr(aten, name).Scalar for name in ("mul", "add", "sub", "div", "rsub")),
    aten.pow.Tensor_Scalar,
}
_SQUARE_AND_CUBE = (2, 3)  # other exponents round differently by place


_Call = tuple[str, tuple[Any, ...]]  # an overload, and its arguments: ("#", number of a tensor) or a number
_Result = tuple[int, tuple[int, ...], tuple[int, ...]]  # number, shape, stride
_Program = tuple[tuple[_Call, ...], tuple[_Result, ...]]


def chains(captured: Captured, least_chunks: float = LEAST_CHUNKS) -> Iterator[Substitution]:
    """A way for each chain of which the backward reads results between its calls.

    Args:
        captured: the step.
        least_chunks: chains whose results have fewer chunks of elements are left alone.
    """
    finder = _Finder(captured)
    for chain in finder.chains():
        made = chain.calls[-1].meta["val"]
        if made.numel() >= least_chunks * chunk_numel(made.device):
            yield _way(chain, finder.uses)


@attrs.frozen(kw_only=True, eq=False)
class _Chain:
    """A chain, in the order of its calls.

    Attributes:
        calls: of the forward.
        again: those that the backward runs again.
        backward: the calls of the backward.
        results: those of the backward's results that others read; its kernel runs in place of the first.
    """

    calls: tuple[Node, ...]
    again: tuple[Node, ...]
    backward: tuple[Node, ...]
    results: tuple[Node, ...]


class _Finder:
    """Finds the chains of a step."""

    def __init__(self, captured: Captured) -> None:
        self.uses = Uses(captured)
        self.forward, self.backward = self.uses.flow.order()
        self.place = {node: i for i, node in enumerate((*self.forward, *self.backward))}
        self.in_backward = set(self.backward)
        self.elementwise = {node for node in self.place if _is_elementwise(node)}
        self.taken: set[Node] = set()
        self.group_of: dict[Node, set[Node]] = {}
        for node in reversed(self.backward):
            if node in self.elementwise and node not in self.group_of:
                group = self.grown(node, self.in_backward)
                self.group_of.update(dict.fromkeys(group, group))

    def chains(self) -> Iterator[_Chain]:
        """The chains, the last one first."""
        forward = set(self.forward)
        for last in reversed(self.forward):
            if last in self.elementwise and last not in self.taken:
                found = self.chain(last, self.grown(last, forward))
                if found is not None:
                    self.taken |= {*found.calls, *found.backward}
                    yield found

    def grown(self, last: Node, among: set[Node]) -> set[Node]:
        """A call, and the elementwise calls before it that only those found and the backward's read."""
        found, waiting = {last}, [last]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                base = self.uses.base(source)
                if base in found or not self.may_join(base, last, among):
                    continue
                if all(
                    r in found or (r not in among and r in self.elementwise) for r in self.uses.readers(base)
                ):
                    found.add(base)
                    waiting = [*found]  # what a member reads may have had this one as its last reader
        return found

    def may_join(self, node: Node, last: Node, among: set[Node]) -> bool:
        if node not in among or node not in self.elementwise or node in self.taken | self.uses.returned:
            return False
        return bool(node.meta["val"].numel() == last.meta["val"].numel())

    def chain(self, last: Node, calls: set[Node]) -> _Chain | None:
        """The chain of these calls, if the backward reads results between them and can be one kernel."""
        readers = [r for call in calls - {last} for r in self.uses.readers(call) if r in self.in_backward]
        group = set().union(*(self.group_of[reader] for reader in readers))
        sizes = {call.meta["val"].numel() for call in (last, *group)}
        if not readers or not self.taken.isdisjoint(group) or len(sizes) > 1:
            return None
        after = [r for r in self.uses.readers(last) if r in self.in_backward]
        known = calls if after and group.issuperset(after) else calls - {last}
        again: set[Node] = set()
        waiting = list(group)
        for node in waiting:  # grows meanwhile
            read = {self.uses.base(source) for source in node.all_input_nodes} & known - again
            again |= read
            waiting += read
        results = [n for n in group if n in self.uses.returned or not group.issuperset(self.uses.readers(n))]
        found = _Chain(
            calls=self.ordered(calls),
            again=self.ordered(again),
            backward=self.ordered(group),
            results=self.ordered(results),
        )
        inputs = {self.uses.base(source) for call in group for source in call.all_input_nodes} - group - known
        ready = max((self.place.get(self.uses.flow.maker(base), -1) for base in inputs), default=-1)
        return found if ready < self.place[found.results[0]] else None

    def ordered(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        return tuple(sorted(nodes, key=self.place.__getitem__))


def _is_elementwise(node: Node) -> bool:
    """Whether a call makes each element from those at the same place in memory."""
    target, made = target_of(node), node.meta.get("val")
    if target not in _CALLS or node.kwargs or not isinstance(made, Tensor):
        return False
    if target is aten.pow.Tensor_Scalar and node.args[1] not in _SQUARE_AND_CUBE:
        return False
    tensors = [made, *(source.meta["val"] for source in node.all_input_nodes)]
    same = all(
        t.shape == made.shape and t.stride() == made.stride() and t.device == made.device for t in tensors
    )
    return (
        same and is_dense(made) and made.storage_offset() == 0 and all(t.is_floating_point() for t in tensors)
    )


def _way(chain: _Chain, uses: Uses) -> Substitution:
    last, host = chain.calls[-1], chain.results[0]
    forward, reads = _program(chain.calls, (last,), uses)
    again = (*chain.again, *chain.backward)
    backward, again_reads = _program(again, chain.results, uses)
    given = [
        n
        for n in again_reads
        if uses.base(n) in uses.gradients and n.meta["val"].dtype == host.meta["val"].dtype
    ]
    over = given[0] if given and len(chain.results) == 1 else None
    size = chunk_numel(last.meta["val"].device)
    return Substitution(
        family="chains",
        changes=(
            Change(
                node=last,
                kernel=run_chain,
                reads=reads,
                constants=(*forward, 0, size),
                makes=(last,),
                counts_as=chain.calls,
                workspace_nbytes=_workspace(chain.calls, forward, len(reads), size),
            ),
            *(Change(node=call) for call in chain.calls[:-1]),
            Change(
                node=host,
                kernel=run_chain,
                over_kernel=run_chain_over,
                over=over,
                reads=again_reads,
                constants=(*backward, again_reads.index(over) if over is not None else 0, size),
                makes=chain.results,
                counts_as=again,
                workspace_nbytes=_workspace(again, backward, len(again_reads), size),
            ),
            *(Change(node=call) for call in chain.backward if call is not host),
        ),
    )


def _program(
    calls: tuple[Node, ...], results: tuple[Node, ...], uses: Uses
) -> tuple[_Program, tuple[Node, ...]]:
    """The calls with numbers for tensors, and the nodes that they read: these have the first numbers."""
    own = set(calls)
    reads: dict[Node, Node] = {}
    for call in calls:
        for source in call.all_input_nodes:
            if uses.base(source) not in own:
                reads.setdefault(uses.base(source), source)
    number = {base: i for i, base in enumerate((*reads, *calls))}

    def argument(value: Any) -> Any:
        return ("#", number[uses.base(value)]) if isinstance(value, Node) else value

    listed = tuple((str(call.target), tuple(map(argument, call.args))) for call in calls)
    fakes = [(number[node], node.meta["val"]) for node in results]
    made = tuple((i, tuple(fake.shape), fake.stride()) for i, fake in fakes)
    return (listed, made), tuple(reads.values())


def _workspace(calls: tuple[Node, ...], program: _Program, inputs: int, size: int) -> int:
    """Bytes of the results of a chunk, each from its call to the last one that reads it."""
    fakes = [call.meta["val"] for call in calls]
    nbytes = [0] * inputs + [min(size, fake.numel()) * fake.element_size() for fake in fakes]
    live, most = 0, 0
    for i, dying in enumerate(_dying(*program)):
        live += nbytes[inputs + i]
        most = max(most, live)
        live -= sum(nbytes[number] for number in dying)
    return most + 64  # scalars


def _dying(calls: Iterable[_Call], results: Iterable[_Result]) -> list[set[int]]:
    """For each call the numbers of tensors that are read there for the last time, without the results."""
    reads = [{arg[1] for arg in args if isinstance(arg, tuple | list)} for _, args in calls]
    last = {number: i for i, numbers in enumerate(reads) for number in numbers}
    kept = {number for number, _, _ in results}
    return [{n for n in numbers if last[n] == i} - kept for i, numbers in enumerate(reads)]


def run_chain(*arguments: Any) -> tuple[Tensor, ...]:
    """Elementwise calls, all of them on a chunk before the next chunk.

    Args:
        *arguments: tensors with their elements at the same places in memory; the calls, as `_program` writes
            them; their results: number, shape, stride; the number of the tensor over which `run_chain_over`
            writes; elements of a chunk.
    """
    *tensors, _, results, _, _ = arguments
    return _run([tensors[0].new_empty_strided(shape, stride) for _, shape, stride in results], arguments)


def run_chain_over(*arguments: Any) -> tuple[Tensor, ...]:
    """`run_chain` with one result, written over one of the tensors."""
    *tensors, _, results, over, _ = arguments
    return _run([tensors[over].as_strided(*results[0][1:])], arguments)


def _run(made: list[Tensor], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    *tensors, calls, results, _, size = arguments
    operators = [_operator(name) for name, _ in calls]
    dying = _dying(calls, results)
    flat, written = [in_memory_order(t) for t in tensors], [in_memory_order(t) for t in made]
    for start in range(0, len(flat[0]), size):
        live: dict[int, Tensor] = {i: t[start : start + size] for i, t in enumerate(flat)}
        for i, (operator, (_, args)) in enumerate(zip(operators, calls, strict=True)):
            live[len(tensors) + i] = operator(
                *(live[a[1]] if isinstance(a, tuple | list) else a for a in args)
            )
            for number in dying[i]:
                del live[number]
        for (number, _, _), out in zip(results, written, strict=True):
            out[start : start + size].copy_(live[number])
    return tuple(made)


def _operator(name: str) -> Any:
    """An overload by its name, such as ``aten.mul.Tensor``."""
    _, packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)
