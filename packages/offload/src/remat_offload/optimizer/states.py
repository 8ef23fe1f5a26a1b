"""The states of the user's optimizer: what is kept for each parameter, where it lies, and how it is stepped.

The optimizer's object keeps them, so that its state dict is what plain training would have. With master
weights, a parameter in 16 bits has one state more: its value in 32 bits, which is what is stepped, and from
which the parameter is rounded. Masters lie beside the object, and are put into its state dicts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from remat_offload.errors import OffloadMisuse
from remat_offload.optimizer.draw_guard import without_draws
from remat_offload.optimizer.partial_step import Stepper
from remat_offload.optimizer.profile import Kind, StateTensor
from remat_offload.optimizer.step_cost import UpdateCost, update_cost

MASTER = "master"
"""The name of the state that is a parameter's master."""

_WIDE = torch.float32
_MOST = 1 << 22  # elements that are stepped to learn what stepping takes


class OptimizerStates:
    """What an optimizer keeps, wherever it is.

    Args:
        optimizer: the user's.
        device: the device that computes.
        master_weights: whether parameters in 16 bits have masters.

    Raises:
        RefusedOptimizer: its results would not be those of one step.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, *, master_weights: bool = False) -> None:
        self.optimizer, self.device, self.master_weights = optimizer, device, master_weights
        self._stepper = Stepper(optimizer)
        self._masters: dict[Tensor, Tensor] = {}
        self._places: dict[tuple[Tensor, str], Tensor] = {}
        self._costs: dict[Any, UpdateCost] = {}

    # -- what is kept

    def kept(self, param: nn.Parameter) -> tuple[StateTensor, ...]:
        """The tensors with dimensions that are kept for a parameter, its master the last."""
        layout = self._stepper.layout(param, self._stepped(param))
        kept = tuple(state for state in layout if state.shape)
        if not self._has_master(param):
            return kept
        return (*kept, StateTensor(name=MASTER, shape=tuple(param.shape), dtype=_WIDE))

    def cost(self, param: nn.Parameter, device: torch.device) -> UpdateCost:
        """What an element of a parameter takes to be stepped on a device."""
        group = next(g for g in self.optimizer.param_groups if any(p is param for p in g["params"]))
        dtype = _WIDE if self._has_master(param) else param.dtype
        if self._stepper.kind(param, self._stepped(param)) is Kind.WHOLE:
            shape = _within(param.shape, _MOST)
        else:  # as many as there are, up to what no cache holds
            shape = (min(sum(p.numel() for g in self.optimizer.param_groups for p in g["params"]), _MOST),)
        key = (id(group), dtype, str(device), shape)
        if key not in self._costs:
            self._costs[key] = update_cost(self.optimizer, group, dtype, device, shape)
        cost = self._costs[key]
        widened = _WIDE.itemsize if self._has_master(param) else 0
        return attrs.evolve(cost, workspace_nbytes_per_element=cost.workspace_nbytes_per_element + widened)

    def _has_master(self, param: Tensor) -> bool:
        return self.master_weights and param.is_floating_point() and param.itemsize < _WIDE.itemsize

    def _stepped(self, param: Tensor) -> Tensor:
        """A tensor like what is stepped for a parameter."""
        return torch.empty_like(param, dtype=_WIDE, device="meta") if self._has_master(param) else param

    # -- where it lies

    def displaced(self) -> list[Tensor]:
        """Parameters of which a state lies in other memory than its home on the host."""
        found: dict[Tensor, None] = {}
        for (param, name), whole in self._places.items():
            state = self.optimizer.state.get(param, {}).get(name)
            if isinstance(state, Tensor) and state.data_ptr() != whole.data_ptr():
                found[param] = None
        return list(found)

    def restore_placement(self, param: Tensor) -> None:
        """Bring states home that were given other memory."""
        self._stepper.adopt(param)

    def reserve_on_host(self, param: nn.Parameter, name: str, whole: Tensor) -> None:
        """Give a state its bytes on the host; before `settle`."""
        self._places[param, name] = whole

    def settle(self, before: "OptimizerStates | None" = None) -> None:
        """Bring what there is to its place, once every state that is placed on the host has one.

        Args:
            before: what kept the same optimizer's states until now; its masters are gone on from.
        """
        self._stepper = Stepper(self.optimizer, memory=self._memory)
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if self._has_master(param):
                    like = StateTensor(name=MASTER, shape=tuple(param.shape), dtype=_WIDE)
                    self._masters[param] = (
                        self._memory(param, like).view(-1).as_strided(param.shape, param.stride())
                    )
                    old = None if before is None else before._masters.get(param)
                    self._read(param, old)
                    self._stepper.kind(param, self._masters[param])  # tried out now, not in the first step

    def _memory(self, param: Tensor, state: StateTensor) -> Tensor:
        whole = self._places.get((param, state.name))
        if whole is None:
            return torch.empty(state.shape, dtype=state.dtype, device=self.device)
        return whole.view(state.dtype)

    def _read(self, param: Tensor, master: Tensor | None = None) -> None:
        """Let the master be what the parameter is, or what another master of it is."""
        with torch.no_grad():
            self._masters[param].copy_(param if master is None else master)

    # -- stepping: `Updates`

    def has(self, param: nn.Parameter) -> bool:
        """Whether a parameter is the optimizer's."""
        return any(param is each for group in self.optimizer.param_groups for each in group["params"])

    def on_device(self, param: nn.Parameter, grad: Tensor, states: Mapping[str, Tensor]) -> None:
        """Update one whose data and gradient are on the device; `states` were brought there for it."""
        master = self._masters.get(param)
        with torch.no_grad(), without_draws(self.optimizer):
            if not states and master is None:
                self._stepper.step([param], [grad])
                return
            master = states.get(MASTER, master)
            chunked = self._stepper.begin(param, master)
            there = {name: states[name] if name in states else chunked.place(name) for name in chunked.names}
            chunked.step(param.data, grad, there, master=master)
            chunked.finish()

    def on_host(
        self, param: nn.Parameter, data: Tensor, grad: Tensor, scale: Tensor | None
    ) -> Callable[[], None]:
        """The update of one whose data, gradient and states are on the host, by the settings of now."""
        take = self._stepper.prepared(param, data, grad, master=self._masters.get(param), scale=scale)

        def update() -> None:
            with without_draws(self.optimizer):
                take()

        return update

    # -- state dicts

    def into(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the masters of parameters that have been stepped."""
        for index, param in enumerate(self._in_order()):
            if param in self._masters and index in state_dict["state"]:
                state_dict["state"][index] = {**state_dict["state"][index], MASTER: self._masters[param]}
        return state_dict

    def without_masters(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict as the optimizer's class knows it."""
        states = state_dict["state"].items()
        bare = {i: {name: v for name, v in state.items() if name != MASTER} for i, state in states}
        return {**state_dict, "state": bare}

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Bring what the optimizer has loaded to its place, in the width in which it was saved.

        Raises:
            OffloadMisuse: states were saved in another width than they are kept in.
        """
        for index, param in enumerate(self._in_order()):
            saved = state_dict["state"].get(index, {})
            if param in self._masters:
                if MASTER in saved:
                    self._masters[param].copy_(saved[MASTER])
                else:
                    self._read(param)
                wide = {state.name: state.dtype for state in self.kept(param)}
                for name, value in self.optimizer.state.get(param, {}).items():
                    if name not in wide or not isinstance(value, Tensor):
                        continue
                    if saved[name].dtype != wide[name]:
                        raise OffloadMisuse(
                            problem=f"the state {name} was saved as {saved[name].dtype}, not {wide[name]}",
                            advice="load what was saved with master weights",
                        )
                    # Torch rounds loaded states to the dtype of their parameter.
                    self.optimizer.state[param][name] = saved[name].clone()
            self._stepper.adopt(param)

    def _in_order(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]


def _within(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """A shape of as many dimensions, its largest ones halved until it has no more elements than `numel`."""
    sizes = list(shape)
    while math.prod(sizes) > numel:
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
    return tuple(sizes)
