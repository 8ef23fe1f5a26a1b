"""One model in training: its parameters, the user's optimizer, and where each of them is.

It tells the planner what there is to hold, brings everything to the home that a plan gives it, and takes the
place of the optimizer's ``step``, ``zero_grad`` and what else must wait for updates that are under way. The
optimizer stays the user's object, with its groups, its state and its hooks.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from remat_executor import torch_private
from remat_executor.step import PlannedStep
from remat_executor.tensors import Tensors
from remat_graph import Graph, Home, Role
from remat_graph.training import Optimized, at_home, training_graph
from remat_offload.engine import Engine, Layout, Transfers
from remat_offload.errors import OffloadMisuse
from remat_offload.inflight import drop_gradient
from remat_offload.lanes import Machine
from remat_offload.pool import HostPool
from remat_offload.probe import StateTensor
from remat_offload.rates import UpdateCost, update_cost
from remat_offload.stepper import Stepper


class Training:
    """What moves between device and host for one model, and the optimizer that updates it.

    Args:
        machine: the device, the host, and what lies between.
        pool: host memory; its capacity is the host budget.
        optimizer: the user's, over parameters of the model.
        in_backward: whether parameters are updated during the backward.

    Raises:
        RefusedOptimizer: its results would not be those of one step.
    """

    def __init__(self, machine: Machine, pool: HostPool, optimizer: Optimizer, *, in_backward: bool) -> None:
        self.machine, self.pool, self.optimizer, self.in_backward = machine, pool, optimizer, in_backward
        self.engine = Engine(machine, pool, self)
        self.stepper = Stepper(optimizer)
        self.homes: frozenset[str] | None = None  # names of what is at home on the host, once settled
        self._places: dict[tuple[Tensor, str], Tensor] = {}
        self._costs: dict[Any, UpdateCost] = {}
        self._attached = False

    # -- for the planner and the executor: `Handlers`

    def extended(self, graph: Graph, tensors: Tensors) -> Graph:
        """The captured graph with parameters, states and updates; see `Handlers`."""
        known = {param: group for group in self.optimizer.param_groups for param in group["params"]}
        optimized = []
        for index, (names, param) in enumerate(tensors.parameters):
            if param not in known:
                if param.requires_grad:
                    raise OffloadMisuse(
                        problem=f"{names[0]} requires a gradient, and the optimizer does not have it",
                        advice="give the optimizer all parameters that train, or freeze it",
                    )
                continue
            states = self.stepper.layout(param)
            kept = tuple((state.name, state.nbytes) for state in states if state.shape)
            here, on_cpu = (
                self._cost(known[param], param, device)
                for device in (self.machine.device, torch.device("cpu"))
            )
            optimized.append(
                Optimized(
                    param=index,
                    states=kept,
                    device_time_s=here.s_per_element * param.numel(),
                    cpu_time_s=on_cpu.s_per_element * param.numel(),
                    workspace_nbytes=math.ceil(here.scratch_nbytes_per_element * param.numel()),
                )
            )
        extended = training_graph(graph, optimized)
        if self.homes is None:
            return extended
        return at_home(extended, {i for i, value in enumerate(extended.values) if value.name in self.homes})

    def settle(self, graph: Graph, on_host: frozenset[int], tensors: Tensors) -> Graph:
        """Bring everything to its home; see `Handlers`."""
        settled = at_home(graph, on_host)
        if self.homes is not None:
            return settled
        params = [param for _, param in tensors.parameters]
        self.engine.settle(settled, params)
        for value in settled.values:
            if value.role is Role.OPTIMIZER_STATE and value.home is Home.HOST and value.of is not None:
                owner, param = settled.values[value.of].name, params[value.of]
                name = value.name.removeprefix(f"{owner}.")
                (state,) = (state for state in self.stepper.layout(param) if state.name == name)
                alike = state.shape == tuple(param.shape)
                like = param if alike else torch.empty(state.shape, device="meta")
                layout = Layout(state.shape, like.stride(), 0, state.dtype)
                self._places[param, name] = self.engine.house(value.name, value.nbytes, layout).whole
        self.stepper = Stepper(self.optimizer, memory=self._memory)
        self.homes = frozenset(v.name for v in settled.values if v.home is Home.HOST)
        self._attach()
        return settled

    def enter(self) -> None:
        """A call begins; see `Handlers`."""
        self.engine.land()

    def begin(self, step: PlannedStep) -> Transfers:
        """The handler of one call; see `Handlers`."""
        return self.engine.begin(step)

    def _memory(self, param: Tensor, state: StateTensor) -> Tensor:
        whole = self._places.get((param, state.name))
        if whole is None:
            return torch.empty(state.shape, dtype=state.dtype, device=self.machine.device)
        return whole.view(state.dtype)

    def _cost(self, group: dict[str, Any], param: nn.Parameter, device: torch.device) -> UpdateCost:
        key = (id(group), param.dtype, str(device))
        if key not in self._costs:
            self._costs[key] = update_cost(self.optimizer, group, param.dtype, device)
        return self._costs[key]

    # -- for the engine: `Updates`

    def on_device(self, param: nn.Parameter, grad: Tensor, states: Mapping[str, Tensor]) -> None:
        """Update one whose data and gradient are on the device; `states` were brought there for it."""
        torch_private.mark_stepped(self.optimizer)
        with torch.no_grad():
            if not states:
                self.stepper.step([param], [grad])
                return
            walk = self.stepper.begin(param)
            walk.step(param.data, grad, states)
            walk.finish()

    def on_host(self, param: nn.Parameter, data: Tensor, grad: Tensor) -> Callable[[], None]:
        """The update of one whose data, gradient and states are on the host, by the settings of now."""
        torch_private.mark_stepped(self.optimizer)
        return self.stepper.prepared(param, data, grad)

    # -- in the place of the optimizer's methods

    def wait(self) -> None:
        """Wait until every update is done.

        Raises:
            LaneFailed: one could not be carried out.
        """
        self.engine.wait()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """What ``optimizer.step`` does: updates on the CPU go on when it returns.

        Raises:
            OffloadMisuse: parameters are updated during the backward; or none has a gradient.
        """
        if self.in_backward:
            raise OffloadMisuse(
                problem="step() was called, but each backward steps the optimizer by itself",
                advice="leave step() out, or build the module with optimizer_in_backward=False",
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not any(param.grad is not None for param in self.engine.params):
            raise OffloadMisuse(
                problem="step() was called, but no parameter has a gradient", advice="call backward() before"
            )
        with torch_private.step_hooks(self.optimizer), torch.no_grad():
            self.engine.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """What ``optimizer.zero_grad`` does, without waiting for updates where that is safe."""
        if not set_to_none:
            self.wait()
        for param in self._parameters():
            if set_to_none:
                drop_gradient(param)
            elif param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()

    def _parameters(self) -> Iterable[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _attach(self) -> None:
        """Take the place of some methods of the user's object; of the object alone, not of its class."""
        original = self.optimizer
        kept = {name: getattr(original, name) for name in ("state_dict", "load_state_dict")}

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        def zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            self.zero_grad(set_to_none)

        def state_dict(_: Optimizer) -> Any:
            self.wait()
            return kept["state_dict"]()

        def load_state_dict(_: Optimizer, state_dict: Any) -> None:
            self.wait()
            kept["load_state_dict"](state_dict)
            for param in self._parameters():
                self.stepper.adopt(param)

        def add_param_group(_: Optimizer, group: Any) -> None:
            raise OffloadMisuse(
                problem="a parameter group was added to an optimizer whose states are planned already",
                advice="add it before the module is built",
            )

        torch_private.replace_step(original, step)
        for function in (zero_grad, state_dict, load_state_dict, add_param_group):
            setattr(original, function.__name__, MethodType(function, original))
