"""Make up arguments on which operators are measured.

An operator reads the caller's tensors where its node does, and random numbers elsewhere. Integers that an op
computes are not made up: they are indices, seeds and offsets, on which the time of a kernel depends, or
whether it runs at all. Equal indices would let a scatter wait for its own atomic additions; and attention
returns its seeds on the host although fake tensors say otherwise, where its backward reads them. So the op
that computes them runs once, on arguments made up in the same way.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.recurrent import reads_opaque_bytes
from remat_executor.capture.repeatable_batch_norms import arguments_read, batch_norm_call
from remat_executor.costs.stopwatch import Request, Thunk
from remat_executor.fx_nodes import (
    args_of,
    is_item,
    is_second_name,
    meta_tensors,
    replayed,
    source_of,
    target_of,
)
from remat_executor.generator_state import default_generator, read_state, replay
from remat_executor.torch_private.tensors import is_out_of_memory
from remat_executor.translation.recipes import (
    CallOperator,
    Draw,
    OwnGradient,
    ReadGenerator,
    Recipe,
    RunKernel,
    TrainBatchNorm,
    WriteBack,
    WriteInPlace,
    own_copy,
)
from remat_executor.translation.translation import Translation
from remat_executor.ways.substitution import Change

aten = torch.ops.aten
_DRAWN = 1 << 20
_REFUSALS = (RuntimeError, ValueError, IndexError)


class Arguments:
    """Makes the arguments of a graph's ops.

    Args:
        constants: the module that holds the graph's constants.
        given: the caller's tensors, read but never written, by their nodes.
        translation: the graph's IR.
    """

    def __init__(
        self, constants: torch.nn.Module, given: Mapping[Node, Tensor], translation: Translation
    ) -> None:
        self.constants, self.given, self.translation = constants, given, translation
        changes = [kernel.change for kernel in translation.kernels.values()]
        self.made_in_ways = {node: change for change in changes for node in change.makes or ()}

    def request(self, recipe: Recipe, *, repeat: bool) -> Request:
        """A factory of thunks that run an op, or its repeat, on arguments made when the factory is called."""
        match recipe:
            case CallOperator(node) | WriteInPlace(node):
                return lambda: self.call_or_deep_call(node)
            case Draw(node, device, _):
                return lambda: self.draw(node, device, repeat)
            case ReadGenerator(device):
                return lambda: lambda: read_state(device)
            case TrainBatchNorm(node):
                return lambda: self.batch_norm(node, repeat)
            case WriteBack(target, source):
                return lambda: partial(_copy, *(_random_like(n.meta["val"]) for n in (target, source)))
            case OwnGradient(source, size, stride):
                return lambda: partial(own_copy, _random_like(source.meta["val"]), size, stride)
            case RunKernel(change):
                return lambda: self.kernel(change)

    def call_or_deep_call(self, node: Node) -> Thunk:
        """The call on random arguments; if the kernel refuses those, on the results of their producers."""
        if reads_opaque_bytes(node.target):
            return self.call(node, deep=True)
        thunk: Thunk | None = self.call(node)
        accepted = False

        def run() -> object:
            # The first measured run is also the trial: another one could cost seconds.
            nonlocal thunk, accepted
            assert thunk is not None
            if accepted:
                return thunk()
            try:
                result = thunk()
            except _REFUSALS as error:
                if is_out_of_memory(error):
                    raise
                thunk = None  # frees its arguments
                thunk = self.call(node, deep=True)
                result = thunk()
            accepted = True
            return result

        return run

    def call(self, node: Node, *, deep: bool = False) -> Thunk:
        """The call on random arguments, or on the results of their producers if `deep`."""
        args, kwargs = self.arguments(node, deep, {})
        read, target = arguments_read(node, args), target_of(node)
        return lambda: target(*read, **kwargs)

    def kernel(self, change: Change) -> Thunk:
        """The kernel of another way on random arguments."""
        return self.kernel_with(change, {})

    def kernel_with(self, change: Change, integers: dict[Node, Any]) -> Thunk:
        """The kernel of another way; `integers` keeps what ops have computed for it."""
        assert change.kernel is not None, change.node
        inputs = sorted(change.reads, key=lambda n: not _integer(n.meta.get("val")))
        made = {node: self.tensor(node, False, integers, {}) for node in inputs}
        return partial(change.kernel, *map(made.__getitem__, change.reads), *change.constants)

    def draw(self, node: Node, device: str, repeat: bool) -> Thunk:
        """The call of a random operator, by the generator or from a saved state of it."""
        args, kwargs = self.arguments(node, False, {})
        if not repeat:
            return lambda: target_of(node)(*args, **kwargs)
        state = default_generator(torch.device(device)).get_state()
        return lambda: replay(state, device, target_of(node), *args, **kwargs)

    def batch_norm(self, node: Node, repeat: bool) -> Thunk:
        """The kernel of a batch norm, with running statistics of its own or with none."""
        (x, weight, bias, *_), _ = self.arguments(node, False, {})
        mean, variance = (_random_like(a.meta["val"]) for a in args_of(node)[3:5])
        target, args = batch_norm_call(node, (x, weight, bias), None if repeat else (mean, variance))
        return lambda: target(*args)

    def arguments(self, node: Node, deep: bool, integers: dict[Node, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a call; `integers` keeps what ops have computed for it."""
        # Integers first: the op that computes them may need as much memory as the other arguments.
        inputs = sorted(node.all_input_nodes, key=lambda n: not _integer(n.meta.get("val")))
        shared = self.shared_results(node, integers) if deep else {}
        made = {n: self.tensor(n, deep, integers, shared) for n in inputs}
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
        return args, kwargs

    def shared_results(self, node: Node, integers: dict[Node, Any]) -> dict[Node, Any]:
        """What one run of each op computes that gives a node several arguments; others of its results go."""
        bases = [self.translation.base_of.get(n, n) for n in node.all_input_nodes]
        items = {base for base in bases if is_item(base) and self.callers(base) is None}
        wanted: dict[Node, set[int]] = {}
        for item in items:
            wanted.setdefault(source_of(item), set()).add(args_of(item)[1])
        found = {}
        for op, places in wanted.items():
            if len(places) > 1:
                results = self.results(op, reads_opaque_bytes(op.target), integers)
                found[op] = [result if place in places else None for place, result in enumerate(results)]
        return found

    def tensor(self, node: Node, deep: bool, integers: dict[Node, Any], shared: dict[Node, Any]) -> Any:
        """The argument that a node stands for."""
        base = self.translation.base_of.get(node, node)
        if base.op == "get_attr":
            return self.view(node, base, getattr(self.constants, str(base.target)))
        if (own := self.callers(base)) is not None:
            return self.view(node, base, own)
        value = node.meta["val"]
        maker = None if base in self.translation.base_of else self.made_in_ways.get(base)
        if maker is not None and _integer(value):
            results: Any = self.kernel_with(maker, integers)()
            return results[maker.makes.index(base)] if maker.makes else results
        if base.op == "call_function":
            if _op_of(base) in shared:
                return self.view(node, base, _of_results(base, shared[_op_of(base)]))
            if _integer(value) and _integer(base.meta["val"]):
                return self.view(node, base, self.integer(base, deep, integers))
            if deep:
                op = _op_of(base)
                # A mask may be made of others, and all of them random would let everything through.
                producers = reads_opaque_bytes(op.target) or _mask(value)
                results = self.results(op, producers, integers)
                return self.view(node, base, _of_results(base, results))
        if isinstance(value, Tensor):
            return _random_like(value)
        return [_random_like(v) for v in meta_tensors(value)]

    def callers(self, base: Node) -> Tensor | None:
        """The caller's tensor if it is on the device of the step; integers are copied there."""
        given, like = self.given.get(base), base.meta["val"]
        if given is None or given.device == like.device:
            return None if given is None else given.detach()
        if not _integer(given) or given.is_meta:
            return None
        copied = given.detach().to(like.device)
        return copied if copied.stride() == like.stride() else None

    def integer(self, base: Node, deep: bool, integers: dict[Node, Any]) -> Tensor:
        """Integers that an op computes; zeros if it refuses all arguments."""
        op = _op_of(base)
        if op not in integers:
            opaque = reads_opaque_bytes(op.target)
            # Random arguments may have given what the kernel refused, such as labels out of range that no
            # random mask replaced; then the producers come first.
            tries = (True,) if opaque else (deep, not deep)
            for producers in tries:
                try:
                    results = self.results(op, producers, integers)
                except _REFUSALS as error:
                    if is_out_of_memory(error) or (deep and producers is tries[-1]):
                        raise
                else:
                    # Its other results are not kept: they may be large.
                    integers[op] = _integers_among(results)
                    break
            else:
                return _random_like(base.meta["val"])
        made: Tensor = _of_results(base, integers[op])
        return made

    def results(self, op: Node, deep: bool, integers: dict[Node, Any]) -> Any:
        """Run an op that computes an argument."""
        args, kwargs = self.arguments(op, deep, integers)
        return target_of(op)(*args, **kwargs)

    def view(self, node: Node, base: Node, tensor: Any) -> Any:
        """A view of the storage of `base`, given as `tensor`."""
        twins = source_of(base).users if is_item(base) else ()
        names = (n for n in twins if is_second_name(n, base) and self.translation.base_of.get(n) is base)
        return replayed(node, {base: tensor} | dict.fromkeys(names, tensor))


def _op_of(base: Node) -> Node:
    return source_of(base) if is_item(base) else base


def _of_results(base: Node, results: Any) -> Any:
    return results[args_of(base)[1]] if is_item(base) else results


def _integer(value: object) -> bool:
    """Whether a value is a tensor of integers; masks are not."""
    if not isinstance(value, Tensor) or value.dtype is torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())


def _mask(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.bool


def _integers_among(results: Any) -> Any:
    if isinstance(results, Tensor):
        return results
    return [r if _integer(r) else None for r in results]


def _copy(written: Tensor, read: Tensor) -> None:
    written.copy_(read)


def _random_like(like: Tensor) -> Tensor:
    """A real tensor with the layout and storage of a fake one: numbers between 0 and 1, or zeros.

    Such numbers are valid probabilities, and their logarithms and roots are finite.
    """
    elements = like.untyped_storage().nbytes() // like.element_size()
    storage = torch.zeros(elements, dtype=like.dtype, device=like.device)
    if storage.is_complex() or storage.is_floating_point():
        # Drawing all numbers of a large tensor would take longer than most kernels, so they repeat.
        drawn = storage[:_DRAWN]
        drawn = drawn.normal_() if storage.is_complex() else drawn.uniform_()
        for remainder in storage[_DRAWN:].split(_DRAWN):
            remainder.copy_(drawn[: len(remainder)])
    tensor = storage.as_strided(like.shape, like.stride(), like.storage_offset())
    return tensor.conj() if like.is_conj() else tensor
