"""`OptimizerStates`: the states of the user's optimizer, their placement, and the steps that change them.

The optimizer object keeps the states, so that its state dict is that of plain training. With master weights,
a parameter in 16 bits has one more state: its value in 32 bits, which is stepped, and from which the
parameter is rounded. `OptimizerStates` keeps the masters and adds them to state dicts.
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
from remat_offload.optimizer.step_cost import HostBytes, UpdateCost, ordinary, update_cost

MASTER = "master"
"""The name of the state that holds a parameter's master."""

_WIDE = torch.float32
_MOST = 1 << 24  # elements that are stepped to measure the cost of a step: with states, more than caches hold


class OptimizerStates:
    """The states of an optimizer, on the device and on the host.

    Args:
        optimizer: the user's optimizer.
        device: the device that computes.
        master_weights: whether parameters in 16 bits have masters.
        host_memory: bytes of the kind that states on the host are in, to measure on.

    Raises:
        RefusedOptimizer: steps in parts would not give the results of one plain step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        *,
        master_weights: bool = False,
        host_memory: HostBytes = ordinary,
    ) -> None:
        self.optimizer, self.device, self.master_weights = optimizer, device, master_weights
        self._host_memory = host_memory
        self._stepper = Stepper(optimizer)
        self._masters: dict[Tensor, Tensor] = {}
        self._blocks: dict[tuple[Tensor, str], Tensor] = {}
        self._costs: dict[Any, UpdateCost] = {}

    def parameters(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters, in the order of its groups."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    # -- which states are kept

    def kept(self, param: nn.Parameter) -> tuple[StateTensor, ...]:
        """Return the states of a parameter that have dimensions, its master last."""
        layout = self._stepper.layout(param, self._stepped(param))
        kept = tuple(state for state in layout if state.shape)
        if not self._has_master(param):
            return kept
        return (*kept, StateTensor(name=MASTER, shape=tuple(param.shape), dtype=_WIDE))

    def scalars(self, param: nn.Parameter) -> int:
        """Return the number of a parameter's states without dimensions, which are on either side."""
        return sum(not state.shape for state in self._stepper.layout(param, self._stepped(param)))

    def cost(self, param: nn.Parameter, device: torch.device) -> UpdateCost:
        """Return the cost of a step on a device, per element of a parameter."""
        group = next(g for g in self.optimizer.param_groups if any(p is param for p in g["params"]))
        dtype = _WIDE if self._has_master(param) else param.dtype
        if self._stepper.kind(param, self._stepped(param)) is Kind.WHOLE:
            shape = _within(param.shape, _MOST)
        else:
            shape = (min(sum(p.numel() for p in self.parameters()), _MOST),)
        key = (id(group), param.dtype, str(device), shape)
        if key not in self._costs:
            narrow = param.dtype if self._has_master(param) else None
            self._costs[key] = update_cost(
                self.optimizer, group, dtype, device, shape, narrow, self._host_memory
            )
        cost = self._costs[key]
        widened = _WIDE.itemsize if self._has_master(param) else 0
        return attrs.evolve(cost, workspace_nbytes_per_element=cost.workspace_nbytes_per_element + widened)

    def _has_master(self, param: Tensor) -> bool:
        return self.master_weights and param.is_floating_point() and param.itemsize < _WIDE.itemsize

    def _stepped(self, param: Tensor) -> Tensor:
        """Return a tensor like the one that is stepped for a parameter."""
        return torch.empty_like(param, dtype=_WIDE, device="meta") if self._has_master(param) else param

    # -- where they are placed

    def displaced(self) -> list[Tensor]:
        """Return the parameters with a state that is not in its block on the host."""
        found: dict[Tensor, None] = {}
        for (param, name), whole in self._blocks.items():
            state = self.optimizer.state.get(param, {}).get(name)
            if isinstance(state, Tensor) and state.data_ptr() != whole.data_ptr():
                found[param] = None
        return list(found)

    def restore_placement(self, param: Tensor) -> None:
        """Move states that were given other memory to their blocks."""
        self._stepper.adopt(param)

    def reserve_on_host(self, param: nn.Parameter, name: str, whole: Tensor) -> None:
        """Set a state's block on the host; before `apply_placement`."""
        self._blocks[param, name] = whole

    def apply_placement(self, before: "OptimizerStates | None" = None) -> None:
        """Move existing states to their places, once every state placed on the host has a block.

        Args:
            before: the previous owner of the same optimizer's states; its masters are copied.
        """
        self._stepper = Stepper(self.optimizer, memory=self._memory)
        for param in self.parameters():
            if self._has_master(param):
                like = StateTensor(name=MASTER, shape=tuple(param.shape), dtype=_WIDE)
                whole = self._memory(param, like).view(-1)
                self._masters[param] = whole.as_strided(param.shape, param.stride())
                self._read(param, None if before is None else before._masters.get(param))
                self._stepper.kind(param, self._masters[param])  # profiled now, not in the first step

    def _memory(self, param: Tensor, state: StateTensor) -> Tensor:
        whole = self._blocks.get((param, state.name))
        if whole is None:
            return torch.empty(state.shape, dtype=state.dtype, device=self.device)
        return whole.view(state.dtype)

    def _read(self, param: Tensor, master: Tensor | None = None) -> None:
        """Copy the parameter, or a previous master of it, to its master."""
        with torch.no_grad():
            self._masters[param].copy_(param if master is None else master)

    # -- stepping

    def has(self, param: nn.Parameter) -> bool:
        """Whether the optimizer has a parameter."""
        return any(param is each for each in self.parameters())

    def on_device(self, param: nn.Parameter, grad: Tensor, states: Mapping[str, Tensor]) -> None:
        """Update a parameter on the device, with the states that were copied there for it."""
        master = self._masters.get(param)
        with torch.no_grad(), without_draws(self.optimizer):
            if not states and master is None:
                self._stepper.step([param], [grad])
                return
            master = states.get(MASTER, master)
            chunked = self._stepper.begin(param, master)
            places = {name: states[name] if name in states else chunked.place(name) for name in chunked.names}
            chunked.step(param.data, grad, places, master=master)
            chunked.finish()

    def on_host(
        self, param: nn.Parameter, data: Tensor, grad: Tensor, scale: Tensor | None
    ) -> Callable[[], None]:
        """Begin an update on the host with the current settings; return a function for a lane's thread."""
        take = self._stepper.prepared(param, data, grad, master=self._masters.get(param), scale=scale)

        def update() -> None:
            with without_draws(self.optimizer):
                take()

        return update

    # -- state dicts

    def with_masters(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the masters of parameters that have been stepped."""
        for index, param in enumerate(self.parameters()):
            if param in self._masters and index in state_dict["state"]:
                state_dict["state"][index] = {**state_dict["state"][index], MASTER: self._masters[param]}
        return state_dict

    def without_masters(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict without masters, for the optimizer's class."""
        states = state_dict["state"].items()
        bare = {i: {name: v for name, v in state.items() if name != MASTER} for i, state in states}
        return {**state_dict, "state": bare}

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Move loaded states to their places, in the dtype in which they were saved.

        Raises:
            OffloadMisuse: states were saved in another dtype than they are kept in.
        """
        for index, param in enumerate(self.parameters()):
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
                            advice="load a state dict that was saved with master weights",
                        )
                    # Torch rounds loaded states to the dtype of their parameter.
                    self.optimizer.state[param][name] = saved[name].clone()
            self._stepper.adopt(param)


def _within(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """Halve the largest sizes of a shape until it has no more than `numel` elements."""
    sizes = list(shape)
    while math.prod(sizes) > numel:
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
    return tuple(sizes)
