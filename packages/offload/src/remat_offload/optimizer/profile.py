"""`profile_optimizer` finds how an optimizer can be stepped, by steps of small parameters.

No class is known by name. A private copy of the user's optimizer, with its settings, steps two small random
parameters together, each alone, and one in chunks. Only bit-identical results count: if parameters stepped
alone differ from those stepped together, the optimizer is refused; if chunks differ from the whole,
parameters are stepped whole. The state after these steps, with its shapes, is what the optimizer will keep.

Imperfect: behaviour that begins after the eighth step, or for parameters of more than about nine thousand
elements, is not found. A step in chunks that then creates other states than the profile stops with an error.
"""

import contextlib
import enum
import inspect
import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch.optim import Optimizer

from remat_graph.errors import text_of
from remat_offload.errors import RefusedOptimizer
from remat_offload.optimizer.private_copy import private_copy, step
from remat_offload.optimizer.trial_steps import Outcome, TrialSteps, generators_kept, same


class Kind(enum.Enum):
    """How an optimizer may be stepped."""

    ELEMENTWISE = "in chunks of a parameter"
    WHOLE = "on whole parameters only"


@attrs.frozen(kw_only=True)
class StateTensor:
    """A tensor that an optimizer keeps for a parameter.

    Attributes:
        name: its key in the parameter's state.
        shape: its sizes.
        dtype: the type of its elements.
        exact: whether the sizes are certain; otherwise they are inferred from a smaller parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool = True

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@attrs.frozen(kw_only=True)
class Profile:
    """The behaviour of an optimizer for parameters of one group, one dtype and one number of dimensions."""

    kind: Kind
    shape: tuple[int, ...]  # of the small parameter
    tensors: tuple[StateTensor, ...]  # its state

    @property
    def placed(self) -> tuple[str, ...]:
        """Names of the states that can be placed: not the small ones that advance once a step."""
        elementwise = self.kind is Kind.ELEMENTWISE
        return tuple(t.name for t in self.tensors if (t.shape == self.shape if elementwise else t.shape))


def profile_optimizer(
    optimizer: Optimizer, group: Mapping[str, Any], param: torch.Tensor, like: torch.Tensor
) -> Profile:
    """Find how tensors like `like` can be stepped with a group's settings; the optimizer is not changed.

    The state of `param` is a pattern for classes that create state in their constructor.

    Raises:
        RefusedOptimizer: parameters cannot be stepped separately.
    """
    device = torch.device("cpu") if like.device.type == "meta" else like.device
    trial = TrialSteps(optimizer=optimizer, group=group, ndim=like.dim(), dtype=like.dtype, device=device)
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    if needed := [a.name for a in arguments if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD]:
        raise trial.refused(f"its step needs a {needed[0]}", "use an optimizer that needs only gradients")
    if group.get("differentiable"):
        raise trial.refused("differentiable=True records its steps", "use differentiable=False")
    trial, together = _first_that_runs(
        trial, attrs.evolve(trial, pattern=optimizer.state.get(param), pattern_shape=param.shape)
    )
    if not same(together, trial.apart()):
        reason = "it couples parameters: a step of one alone differs from a step together with another"
        raise trial.refused(reason, "use an optimizer that does not; clip gradients before its step")
    tensors = tuple(
        StateTensor(name=name, shape=tuple(value.shape), dtype=value.dtype)
        for name, value in (together[0][1] or {}).items()
        if isinstance(value, torch.Tensor)
    )
    kind = Kind.WHOLE
    if like.dim() and not like.is_complex():
        shaped = {each.name: each.dtype for each in tensors if each.shape == trial.shapes[0]}
        with contextlib.suppress(Exception):  # a class that needs matrices raises on flat chunks
            if same(together[0], trial.in_chunks(shaped)):
                kind = Kind.ELEMENTWISE
    return Profile(kind=kind, shape=trial.shapes[0], tensors=tensors)


def layout(
    profile: Profile, optimizer: Optimizer, group: Mapping[str, Any], like: torch.Tensor
) -> tuple[StateTensor, ...]:
    """Return the state tensors of a parameter with the shape and dtype of `like`, without allocating them."""
    if profile.kind is Kind.ELEMENTWISE:
        whole = tuple(like.shape)
        return tuple(
            attrs.evolve(t, shape=whole if t.shape == profile.shape else t.shape) for t in profile.tensors
        )
    param = torch.nn.Parameter(torch.empty_like(like, device="meta"))
    param.grad = torch.empty_like(param)
    replica = private_copy(optimizer, {**group, "params": [param]})
    with contextlib.suppress(Exception), generators_kept(param.device):
        step(replica)  # creates its state before it may fail for missing values
    made = {n: v for n, v in replica.state.get(param, {}).items() if isinstance(v, torch.Tensor)}
    if {t.name: t.dtype for t in profile.tensors} == {name: value.dtype for name, value in made.items()}:
        return tuple(attrs.evolve(t, shape=tuple(made[t.name].shape)) for t in profile.tensors)
    sizes = dict(zip(profile.shape, like.shape, strict=True)) | {1: 1}
    return tuple(
        attrs.evolve(t, shape=tuple(sizes.get(size, size) for size in t.shape), exact=not t.shape)
        for t in profile.tensors
    )


def _first_that_runs(*trials: TrialSteps) -> tuple[TrialSteps, list[Outcome]]:
    """Return the first trial that the class can be stepped in, and its result."""
    error: Exception | None = None
    for trial in trials:
        try:
            return trial, trial.together()
        except RefusedOptimizer:
            raise
        except Exception as raised:  # noqa: BLE001 - whatever a user's class raises
            error = error or raised
    trial = trials[0]
    message = "" if error is None else text_of(error).strip()
    found = (message.splitlines() or [type(error).__name__])[0]
    reason = f"its step fails on a small dense {trial.dtype} parameter on {trial.device.type} ({found})"
    raise trial.refused(reason, "change its settings, or use another optimizer") from error
