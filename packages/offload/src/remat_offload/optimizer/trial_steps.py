"""`TrialSteps` steps private copies of an optimizer on small parameters: together, alone, and in chunks.

Eight steps, because RAdam takes another path from its sixth step; gradients of different magnitudes, so that
limits on norms take effect; weights over six decades, so that half precision shows small steps. The learning
rate is replaced by a fixed one: a warm-up that begins at zero would hide all differences.
"""

import random
from collections.abc import Callable, Generator, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch.optim import Optimizer

from remat_executor.generator_state import default_generator, preserved_generators
from remat_graph.contexts import context
from remat_offload.errors import RefusedOptimizer
from remat_offload.optimizer.chunked_step import ChunkedStep
from remat_offload.optimizer.private_copy import State, private_copy, state_like, step, step_tensor
from remat_offload.tensor_memory import flat_view

Outcome = tuple[torch.Tensor, State | None]  # a parameter after all steps, and its state

_MAGNITUDES = (1.0, 30.0, 1e-3, 1.0, 0.3, 3.0, 1.0, 1.0)  # of the gradients, step by step
_LR = 2.0**-6
_SHAPES = ((3, 5, 7, 89), (7, 11, 119), (61, 151), (9211,), ())  # odd, and all different
_COMPANIONS = ((2, 3, 5, 7), (3, 5, 7), (13, 29), (377,), ())
_CHUNKS = (slice(0, 64), slice(64, 4160), slice(4160, None))


@attrs.frozen(kw_only=True)
class TrialSteps:
    """Runs of the same steps from the same values, each with its own private copy of the optimizer."""

    optimizer: Optimizer  # the user's, which is not changed
    group: Mapping[str, Any]  # whose settings are used
    ndim: int  # of the two parameters; the first one is larger
    dtype: torch.dtype
    device: torch.device
    pattern: State | None = None  # of one of the group's parameters; initial states are made from it
    pattern_shape: tuple[int, ...] = ()  # of that parameter

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of its parameters."""
        ones, at = (1,) * (self.ndim - 4), max(0, 4 - self.ndim)
        return ones + _SHAPES[at], ones + _COMPANIONS[at]

    def together(self) -> list[Outcome]:
        """Step both parameters as a plain step does.

        Raises:
            RefusedOptimizer: the class keeps or changes values outside its parameters' state.
        """

        def both(replica: Optimizer, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            step(replica)

        replica, params = self._run(both)
        if set(replica.state) - set(params):
            raise self.refused("its state has entries that belong to no parameter", "use another optimizer")
        if changed := self._changed(replica):
            reason = f"its step changes {', '.join(changed)}, which all parameters share"
            raise self.refused(reason, "use an optimizer that keeps everything in its parameters' state")
        if all(same(p, data) for p, (data, _) in zip(params, self._numbers(), strict=True)):
            raise self.refused("its step does not move its parameters", "give the optimizer that moves them")
        return [(param, replica.state.get(param)) for param in params]

    def apart(self) -> list[Outcome]:
        """Step each parameter alone, the last one first."""

        def each(replica: Optimizer, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
            for param, grad in zip(reversed(params), reversed(grads), strict=True):
                after = step_tensor(replica, replica.param_groups[0], param, grad, replica.state.get(param))
                if after is not None:
                    replica.state[param] = after

        replica, params = self._run(each)
        return [(param, replica.state.get(param)) for param in params]

    def in_chunks(self, shaped: Mapping[str, torch.dtype]) -> Outcome:
        """Step the first parameter alone, in flat chunks; `shaped` are its states of its own shape."""

        def by_chunks(replica: Optimizer, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
            param, grad = params[0], grads[0]

            def reserve(name: str) -> torch.Tensor:
                return torch.empty_like(param, dtype=shaped[name]).detach()

            chunked = ChunkedStep(
                replica, param, replica.param_groups[0], tuple(shaped), reserve, param.numel()
            )
            for chunk in _CHUNKS:
                states = {name: flat_view(chunked.place(name))[chunk] for name in shaped}
                chunked.step(flat_view(param)[chunk], flat_view(grad)[chunk], states)
            chunked.finish()

        replica, params = self._run(by_chunks)
        return params[0], replica.state.get(params[0])

    def refused(self, problem: str, advice: str) -> RefusedOptimizer:
        """Return the error to raise for this optimizer."""
        return RefusedOptimizer(optimizer=type(self.optimizer).__name__, problem=problem, advice=advice)

    def _run(
        self, take: Callable[[Optimizer, list[torch.Tensor], list[torch.Tensor]], None]
    ) -> tuple[Optimizer, list[torch.Tensor]]:
        numbers = self._numbers()
        params: list[torch.Tensor] = [torch.nn.Parameter(data) for data, _ in numbers]
        replica = self._copy(params)
        with generators_kept(self.device) as drawn_from:
            for magnitude in _MAGNITUDES:
                take(replica, params, [grad * magnitude for _, grad in numbers])
            if drawn := drawn_from():
                # Plain training draws between the masks of two dropouts; a lane would draw concurrently.
                reason = f"its step draws random numbers from {drawn[0]}, which the model draws from, too"
                raise self.refused(reason, "use an optimizer that does not, or whose rounding does not")
        return replica, params

    def _copy(self, params: list[torch.Tensor]) -> Optimizer:
        group = {**self.group, "params": params}
        if "param_names" in group:
            group["param_names"] = [f"parameter{index}" for index in range(len(params))]
        if "lr" in group:
            lr = group["lr"]
            group["lr"] = torch.full_like(lr, _LR) if isinstance(lr, torch.Tensor) else _LR
        replica = private_copy(self.optimizer, group)
        if any(getattr(replica, name) is not vars(replica)[name] for name in ("state", "param_groups")):
            raise self.refused("it holds another optimizer", "give the one that holds the parameters")
        if self.pattern is not None:
            for param in params:
                replica.state[param] = state_like(self.pattern, self.pattern_shape, param)
        return replica

    def _numbers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters before the first step, and their gradients."""
        generator = torch.Generator().manual_seed(7)
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        made = []
        for scale, shape in zip((1.0, 3.0), self.shapes, strict=True):
            decades = -6 * torch.rand(shape, generator=generator, dtype=torch.float64)
            data = scale * torch.randn(shape, generator=generator, dtype=wide) * 10**decades
            grad = torch.randn(shape, generator=generator, dtype=wide)
            made.append((data.to(self.device, self.dtype), grad.to(self.device, self.dtype)))
        return made

    def _changed(self, replica: Optimizer) -> list[str]:
        """Return the names of settings and numeric attributes that the steps have changed."""
        fresh = self._copy([])
        before, after = fresh.param_groups[0], replica.param_groups[0]
        names = [name for name in after if name not in ("params", "param_names")]
        settings = [name for name in names if not same(before.get(name), after[name])]
        numbers = {n: v for n, v in vars(replica).items() if type(v) in (int, float, torch.Tensor)}
        return settings + [name for name, v in numbers.items() if not same(vars(fresh).get(name), v)]


def same(a: Any, b: Any) -> bool:
    """Whether two values have the same bits; opaque objects are compared by type."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        return alike and torch.equal(_bits(a), _bits(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, int | float | complex | str | bytes):
        return bool(a == b or (a != a and b != b))
    return True


@context
def generators_kept(device: torch.device) -> Generator[Callable[[], list[str]], None, None]:
    """Restore the random generators at the end, so that every run draws the same numbers.

    The generators are those of the whole process, so only the thread that runs the user's step may use this:
    in a lane's thread it would undo concurrent draws of the model.

    They are those of the device, the CPU, numpy and Python. Yields a function that returns the names of the
    generators that were drawn from.
    """
    before = (random.getstate(), np.random.get_state())
    with preserved_generators([device]):
        states = _torch_states(device)

        def drawn_from() -> list[str]:
            now = {
                "torch's generator": same(states, _torch_states(device)),
                "Python's random": before[0] == random.getstate(),
                "numpy.random": same(_arrays(before[1]), _arrays(np.random.get_state())),
            }
            return [name for name, unchanged in now.items() if not unchanged]

        try:
            yield drawn_from
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _torch_states(device: torch.device) -> list[torch.Tensor]:
    devices = dict.fromkeys([torch.device("cpu"), *([] if device.type == "meta" else [device])])
    return [default_generator(each).get_state() for each in devices]


def _arrays(state: Any) -> list[Any]:
    return [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in state]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
