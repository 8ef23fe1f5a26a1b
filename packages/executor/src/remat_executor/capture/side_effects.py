"""Detect side effects of `forward` during capture: a captured graph would not replay them.

Each side effect is refused where it happens, with advice. Some effects leave no trace (a seed set to its old
value, a replaced `.data`), so comparing the state before and after is not enough.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from remat_executor.capture.collectives import no_collectives
from remat_executor.errors import CaptureError
from remat_executor.inspection.attribute_changes import Changes, restored_attributes
from remat_executor.inspection.tensors import Slot, Tensors
from remat_executor.torch_private.generators import guarded_generators
from remat_graph import RematError
from remat_graph.contexts import context


class SideEffectGuard(nn.Module):
    """Calls the original with substitutes for its tensors, and refuses side effects.

    Attributes:
        original: the user's module.
        substitutes: by name the tensors that replace parameters and buffers; the caller swaps them in.
        in_slots: the tensors that replace those of `Tensors.slots`.
        call: the original's forward, or the function that is planned instead.
        replaced: indices into `Tensors.flat` of tensors in plain attributes that the forward replaced.
        changes: what the forward assigned on its modules; it is restored.
        raised: the forward's error, until `take_error`.
    """

    original: nn.Module
    substitutes: Mapping[str, Tensor]
    in_slots: list[Tensor]
    call: Callable[..., Any]
    replaced: set[int]
    changes: Changes
    raised: Exception | None

    def __init__(
        self,
        original: nn.Module,
        substitutes: Mapping[str, Tensor],
        in_slots: list[Tensor],
        call: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.original = original
        self.__dict__.update(
            substitutes=substitutes,
            in_slots=in_slots,
            call=call,
            replaced=set(),
            changes=Changes(),
            raised=None,
        )

    def forward(self, tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        """Call the original.

        Raises:
            CaptureError: the forward assigns a parameter or buffer, sets a generator or a tensor's `.data`,
                or communicates with other ranks.
        """
        # Torch traces the forward twice; attributes are restored so that both runs find the same module.
        with (
            restored_attributes(self.original) as self.__dict__["changes"],
            self.substituted_slots(tensors.slots),
        ):
            with (
                guarded_generators(_refuse_seeding),
                _NoDataAssignment(),
                no_collectives(),
                direct_checkpoints(),
            ):
                try:
                    output = self.call(*args, **kwargs)
                except Exception as error:
                    self.__dict__["raised"] = error
                    raise
            for name, tensor in self.substitutes.items():
                path, _, attribute = name.rpartition(".")
                if getattr(self.original.get_submodule(path), attribute) is not tensor:
                    raise CaptureError(
                        problem=f"the forward replaces {name!r} by a new tensor",
                        advice=f"write into it instead: self.{attribute}.copy_(...)",
                    )
        return output

    def caused(self, error: Exception) -> bool:
        """Whether the user's error caused this one: torch writes on errors, which a frozen class refuses."""
        if self.raised is None or self.raised is error or isinstance(error, RematError):
            self.__dict__["raised"] = None
            return False
        return True

    def take_error(self) -> Exception:
        """Return the user's error and forget it."""
        error = self.raised
        self.__dict__["raised"] = None
        assert error is not None
        return error

    @context
    def substituted_slots(self, slots: Iterable[Slot]) -> Generator[None, None, None]:
        """Put the substitutes into plain attributes; record which of them the forward replaces."""
        swaps = [
            (slot, slot.holder[slot.key], substitute)
            for slot, substitute in zip(slots, self.in_slots, strict=True)
        ]
        try:
            for slot, _, substitute in swaps:
                slot.holder[slot.key] = substitute
            yield
        finally:
            for slot, tensor, substitute in swaps:
                if _holds(slot.holder, slot.key, substitute):
                    slot.holder[slot.key] = tensor
                else:
                    self.replaced.add(slot.place)


@context
def direct_checkpoints() -> Generator[None, None, None]:
    """Let reentrant checkpoints call their function directly: their backward cannot be traced.

    As in a checkpoint, gradients flow only if a tensor argument requires one.
    """

    def run(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        passed = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(passed and torch.is_grad_enabled()):
            return function(*args)

    before = CheckpointFunction.apply
    try:
        CheckpointFunction.apply = run  # type: ignore[method-assign]
        yield
    finally:
        CheckpointFunction.apply = before  # type: ignore[method-assign]


def _holds(holder: Any, key: Any, tensor: Tensor) -> bool:
    try:
        return holder[key] is tensor
    except (KeyError, IndexError):
        return False


class _NoDataAssignment(TorchFunctionMode):
    """Refuses `tensor.data = ...`, which leaves the tensor the same object and would go unnoticed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise CaptureError(
                problem="the forward assigns a tensor's .data, which a captured graph would not do",
                advice="write into the tensor instead: tensor.copy_(...)",
            )
        return func(*args, **(kwargs or {}))


def _refuse_seeding(what: str) -> None:
    raise CaptureError(
        problem=f"the forward sets torch's random generator ({what}), which a captured graph would not do",
        advice="seed, or set the generator's state, outside of it",
    )
