"""Run a planned step under autograd: a chain of functions that delivers gradients in segments.

The whole forward runs first. Then the functions are applied: function 0 is the last and owns the outputs; the
others only pass an empty token along. Autograd calls their backwards in the order 0, 1, 2, ...; each runs its
segment and returns the gradients of its parameters, which the engine accumulates before it calls the next
one, except for gradients on the host in the backward of a CUDA device: another thread does that, and the
handler waits for it. Live values travel with the token's gradient, so they belong to one backward run.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from remat_executor.errors import UnplannedUse, add_note
from remat_executor.lowering.program import LoweredGraph, LoweredStep, Segment
from remat_executor.lowering.step_handler import StepHandler
from remat_executor.torch_private.autograd import apply_plainly, backward_keeps_graph
from remat_executor.torch_private.tensors import storage_holders, storage_id, tensor_versions
from remat_graph import OptimizerStep, format_nbytes

_SHORTAGE = (
    "the plan needs {} in addition to what is allocated when the step begins: free memory, also that of "
    "other processes, or plan with a smaller budget; after that the module works again"
)


@attrs.define(eq=False)
class BackwardState:
    """What one backward run passes from segment to segment.

    Attributes:
        values: live tensors by value index.
        undefined: indices of the gradients that stay None: no differentiated output depends on them.
        doubtful: indices of the gradients that also depend on an output without a tangent: zeros stand for
            it.
        finite: by device, whether the doubtful gradients so far are finite; read once, since a read waits for
            the device.
    """

    values: dict[int, Tensor]
    undefined: frozenset[int]
    doubtful: frozenset[int]
    finite: dict[torch.device, Tensor] = attrs.field(factory=dict)

    def check_doubtful(self, gradients: Sequence[Tensor | None]) -> None:
        """Take some of the doubtful gradients into account in `finite`."""
        for gradient in gradients:
            if gradient is not None:
                # The sum needs no memory of the gradient's size; in half precision it could overflow.
                dtype = torch.float32 if gradient.dtype.itemsize < 4 else gradient.dtype
                finite = gradient.sum(dtype=dtype).isfinite()
                before = self.finite.get(gradient.device)
                self.finite[gradient.device] = finite if before is None else before & finite

    def raise_if_not_finite(self) -> None:
        """Wait for the doubtful gradients so far.

        Raises:
            UnplannedUse: one of them is not finite.
        """
        # Zeros times infinity may be the cause; eager would not have multiplied them.
        if not all(map(bool, self.finite.values())):
            raise UnplannedUse(
                problem="a gradient is not finite, possibly because an output was not differentiated",
                advice="name the outputs that you differentiate with differentiate=[...]",
            )
        self.finite.clear()


@attrs.frozen(eq=False, kw_only=True)
class Wiring:
    """What all calls of a step have in common.

    Attributes:
        program: the lowered step.
        tangents: per output of function 0 the layout to fill with zeros if autograd gives no tangent; None if
            the plan expects no tangent there.
        tangent_values: per output of function 0 the value index of its tangent.
        reach: per gradient the places of the tangents that it depends on.
        guarded: indices of values that the caller could write to before the backward.
        dropped: (value index, place among the outputs that are not replayed) of each output that the plan
            expects the caller to have dropped when the backward begins.
        differentiable: per output of function 0 its place among the outputs that are not replayed.
        device: where the tokens are.
        peak_nbytes: the peak of the plan.
    """

    program: LoweredStep
    tangents: tuple[Tensor | None, ...]
    tangent_values: tuple[int | None, ...]
    reach: tuple[frozenset[int], ...]
    guarded: frozenset[int]
    dropped: tuple[tuple[int, int], ...]
    differentiable: tuple[int, ...]
    device: torch.device
    peak_nbytes: int


@attrs.define(eq=False, kw_only=True)
class PlannedCall:
    """One call of the module, from its forward to the end of its backward.

    Attributes:
        wiring: shared by all calls of the step.
        externals: the caller's tensors by value index; after the forward, aliases of those that the backward
            reads.
        autocast: whether the caller was under autocast.
        handler: carries out what the schedule does in addition to computing; None if it only computes.
        saved: values that the forward left for the backward, by index; None once the backward took them over.
        guarded: tensors that must not be written before the backward.
        versions: how often each of them had been written.
        others: outputs without gradients, by their place among the outputs that are not replayed.
        returned: weak references to the storages that the caller should drop, by value index.
        on_kept: called with the bytes of those that the caller holds when the backward begins, if any.
    """

    wiring: Wiring
    externals: Sequence[Tensor] | dict[int, Tensor]
    autocast: bool
    handler: StepHandler | None = None
    saved: dict[int, Tensor] | None = None
    guarded: list[Tensor] = attrs.field(factory=list)
    versions: list[int] = attrs.field(factory=list)
    others: dict[int, Tensor] = attrs.field(factory=dict)
    returned: dict[int, "weakref.ref[torch.UntypedStorage]"] = attrs.field(factory=dict)
    on_kept: Callable[[int], None] = lambda nbytes: None

    def run_segment(self, segment: Segment, live: dict[int, Tensor]) -> list[Tensor | None]:
        """Run a segment and return its results; `live` holds the values before and after."""
        results: list[Tensor | None] = []
        try:
            for item in segment.items:
                if isinstance(item, LoweredGraph):
                    results += self._run_graph(item, live)
                else:
                    assert self.handler is not None
                    results += self.handler.carry_out(item, live)
        except torch.OutOfMemoryError as error:
            add_note(error, _SHORTAGE.format(format_nbytes(self.wiring.peak_nbytes)))
            raise
        return results

    def _run_graph(self, item: LoweredGraph, live: dict[int, Tensor]) -> Sequence[Tensor | None]:
        externals = self.externals
        tensors = [externals[i] for i in item.reads]
        tensors.extend(live[value] for value in item.takes)
        for value in item.drops:
            del live[value]
        made = item.run(tensors)
        live.update(zip(item.gives, made[item.results :], strict=True))
        return made[: item.results]

    def run_forward(self) -> tuple[Tensor, ...]:
        """Run the forward, save what the backward needs, and return the differentiable outputs."""
        saved: dict[int, Tensor] = {}
        outputs = cast(list[Tensor], self.run_segment(self.wiring.program.forward, saved))
        shared = [value for value in self.wiring.guarded if value in saved]
        # The caller gets these storages too. An output itself would keep its own autograd graph alive.
        saved.update(zip(shared, [saved[value].detach() for value in shared], strict=True))
        # An alias keeps the storage that the forward read even if `.data` is replaced before the backward.
        again = {i: self.externals[i].detach() for i in self.wiring.program.read_again}
        self.externals = again
        self.guarded = [*(saved[value] for value in shared), *again.values()]
        self.versions = tensor_versions(self.guarded)
        self.saved = saved
        for value, place in self.wiring.dropped:
            self.returned[value] = weakref.ref(outputs[place].untyped_storage())
        if len(outputs) > len(self.wiring.differentiable):
            others = set(range(len(outputs))).difference(self.wiring.differentiable)
            self.others = {i: outputs[i] for i in sorted(others)}
        # Autograd forbids to write to a view that a function returns; eager's views may be written. What is
        # detached is no view, and it shares the count of writes. A tensor that is returned twice stays one.
        chosen = [outputs[i] for i in self.wiring.differentiable]
        detached = {id(output): output.detach() for output in chosen}
        return tuple(detached[id(output)] for output in chosen)

    def begin_backward(self, tangents: Sequence[Tensor | None]) -> BackwardState:
        """Take over the saved values; check that nothing has changed them since the forward.

        Raises:
            UnplannedUse: this backward cannot run as planned.
        """
        self._check_backward()
        assert self.saved is not None
        if self.handler is not None:
            self.handler.begin_backward()
        values = dict(self.saved)
        kept = self._outputs_kept(values)
        if backward_keeps_graph():
            if self.handler is not None:
                raise UnplannedUse(
                    problem="retain_graph=True asks for a second backward, but offloaded values are freed",
                    advice="run the forward again, or sum the losses before backward()",
                )
            # The budget covers one backward: a second one needs copies of what this one overwrites.
            values.update({v: values[v].clone() for v in self.wiring.program.overwritten & values.keys()})
        else:
            self.saved = None
            self.guarded.clear()
            self.versions.clear()
            self.returned.clear()
            # The plan may overwrite what it expects to be its own.
            values.update(
                {v: values[v].clone() for v in self.wiring.program.overwritten & kept & values.keys()}
            )
        missing = set()
        for place, (tangent, like) in enumerate(zip(tangents, self.wiring.tangents, strict=True)):
            value = self.wiring.tangent_values[place]
            if like is None or value is None:
                if tangent is not None:
                    output = self.wiring.differentiable[place]
                    raise UnplannedUse(
                        problem=f"output {output} received a gradient, but the plan differentiates other "
                        "outputs only",
                        advice=f"name the outputs that you differentiate, as in differentiate=[{output}]",
                    )
                continue
            if tangent is None:
                missing.add(place)
                tangent = _empty_as(like, self.wiring.device).zero_()
            elif tangent.stride() != like.stride() and tangent.numel() > 1:
                tangent = _empty_as(like, tangent.device).copy_(tangent)
            values[value] = tangent
        reached = [(i, places) for i, places in enumerate(self.wiring.reach) if places & missing]
        undefined = frozenset(i for i, places in reached if places <= missing)
        doubtful = frozenset(i for i, _ in reached) - undefined
        if doubtful and self.handler is not None:
            self.handler.read_gradients()
        return BackwardState(values, undefined, doubtful)

    def _check_backward(self) -> None:
        """Check that the backward can run as planned."""
        if torch.is_grad_enabled():
            raise UnplannedUse(
                problem="a planned module cannot be differentiated twice (create_graph=True)",
                advice="use the original for that: `.module` of a planned module, or the model after "
                "`release(model)` if it has a memory limit",
            )
        if torch.is_autocast_enabled(self.wiring.device.type) and not self.autocast:
            raise UnplannedUse(
                problem="the backward runs under autocast and the forward did not",
                advice="leave autocast before backward(), as torch advises",
            )
        if self.saved is None:
            raise UnplannedUse(
                problem="the backward of this call has already run and its saved values are freed",
                advice="pass retain_graph=True to the first backward, or run the forward again",
            )
        if tensor_versions(self.guarded) != self.versions:
            raise UnplannedUse(
                problem="a tensor that the backward needs was modified in place after the forward",
                advice="modify a clone of it, or call backward first",
            )

    def _outputs_kept(self, saved: Mapping[int, Tensor]) -> set[int]:
        """Of the outputs that the plan expects to be dropped, those that the caller holds: their values."""
        kept: dict[int, int] = {}
        for value, reference in self.returned.items():
            storage = reference()
            if storage is None:
                continue
            own = saved.get(value)
            # One that the plan saved has two holders: the saved tensor, and Python's object for its storage.
            if own is None or storage_id(own) != storage._cdata or storage_holders(own) > 2:
                kept[value] = storage.nbytes()
        if kept:
            self.on_kept(sum(kept.values()))
        return set(kept)

    def run_backward(self, index: int, live: BackwardState) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run one segment; return the token's gradient (None after the last) and the segment's gradients."""
        segment = self.wiring.program.backward[index]
        if index and self.handler is not None:
            self.handler.begin_segment()
        gradients = self.run_segment(segment, live.values)
        last = index + 1 == len(self.wiring.program.backward)
        if live.undefined or live.doubtful:
            placed = list(zip(segment.gradients, gradients, strict=True))
            live.check_doubtful([made for gradient, made in placed if gradient in live.doubtful])
            gradients = [None if gradient in live.undefined else made for gradient, made in placed]
            if last or any(isinstance(item, OptimizerStep) for item in segment.items):
                live.raise_if_not_finite()  # before further parameters are updated
        if last:
            if self.saved is None:
                self.externals = {}
            return None, gradients
        token = torch.empty(0, device=self.wiring.device)
        token.remat_live = live  # type: ignore[attr-defined]
        return token, gradients


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Autocast off, since the graph contains its casts; creating its context costs more than this check."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _empty_as(like: Tensor, device: torch.device) -> Tensor:
    """A real tensor with the layout of a fake one."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


class _SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: PlannedCall,
        index: int,
        outputs: list[Tensor],
        token: Tensor | None,
        *owners: Tensor,
    ) -> Any:
        ctx.call, ctx.index = call, index
        ctx.set_materialize_grads(False)
        if index == 0:
            found = tuple(outputs)
            outputs.clear()
            return found
        return torch.empty(0, device=call.wiring.device)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        call: PlannedCall = ctx.call
        if ctx.index == 0:
            live = call.begin_backward(tangents)
        else:
            (token,) = tangents
            if token is None or not hasattr(token, "remat_live"):
                raise UnplannedUse(
                    problem="a segment of the backward was called without the previous one",
                    advice="call backward on the outputs of the planned module",
                )
            live = token.remat_live
            del token.remat_live
        with without_autocast(call.wiring.device):
            token, gradients = call.run_backward(ctx.index, live)
        return (None, None, None, token, *gradients)


def run_under_autograd(call: PlannedCall, owners: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the forward under autograd; `owners` are the tensors that get the gradients.

    Returns:
        the differentiable outputs, in the order of `Wiring.differentiable`.
    """
    with torch.no_grad():
        # Before the functions are applied: a device computes meanwhile.
        made = list(call.run_forward())
    token: Tensor | None = None
    segments = call.wiring.program.backward
    outputs: Any = ()
    for index in range(len(segments) - 1, -1, -1):
        mine = [owners[g] for g in segments[index].gradients]
        result = apply_plainly(_SegmentFunction, call, index, made, token, *mine)
        if index == 0:
            outputs = result
        else:
            token = result
    return tuple(outputs)
