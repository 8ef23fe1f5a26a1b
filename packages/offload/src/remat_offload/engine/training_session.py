"""`TrainingSession` trains one model with the user's optimizer, with values placed on the device or the host.

The session extends the captured graph by parameters, states and updates for the planner, moves everything to
the placement that the plan gives, and replaces the optimizer's ``step``, ``zero_grad`` and the other methods
that have to wait for pending updates. The optimizer stays the user's object, with its groups, state and
hooks.
"""

import math
from collections.abc import Callable, Generator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from remat_executor.inspection.tensors import Tensors
from remat_executor.module.planned_step import PlannedStep
from remat_executor.torch_private.optimizers import mark_stepped, replace_step, step_hooks
from remat_executor.torch_private.tensors import past_torch_function, storage_id
from remat_graph import Graph, Placement, Role
from remat_graph.contexts import context
from remat_graph.training import Optimized, training_graph, with_placement
from remat_offload.copy_lanes.machine import Machine
from remat_offload.copy_lanes.optimizer_threads import kernel_threads, optimizer_threads
from remat_offload.deferred_signals import uninterrupted
from remat_offload.engine.engine import Engine
from remat_offload.engine.on_demand_weights import OnDemandWeights
from remat_offload.engine.pending_parameters import drop_gradient
from remat_offload.engine.transfer_steps import Transfers
from remat_offload.engine.weight_loading import WeightReader
from remat_offload.errors import OffloadMisuse
from remat_offload.host_memory.pool import HostPool
from remat_offload.optimizer.states import OptimizerStates
from remat_offload.tensor_memory import Layout, overlapping

_ATTACHED = "_remat_training"
"""The attribute of an optimizer that holds the `TrainingSession` which steps it."""


class TrainingSession:
    """Moves the values of one model between device and host, and steps the optimizer that updates it.

    Args:
        machine: the device, the host, and the lanes between them.
        pool: host memory; its capacity is the host budget.
        optimizer: the user's optimizer, over parameters of the model.
        in_backward: whether parameters are updated during the backward.
        master_weights: whether parameters in 16 bits are stepped in 32 bits.
        accumulation: the number of micro-batches in a step that plans are made for.
        reader: reads values of parameters and buffers directly into their placement.

    Attributes:
        on_host: names of the values placed on the host; None before the first plan.
        external_nbytes: bytes on the device of buffers, of inputs there, and of states without dimensions, in
            the latest captured call, as the allocator rounds them.

    Raises:
        RefusedOptimizer: steps in parts would not give the results of one plain step.
        OffloadMisuse: the optimizer has states on the meta device.
    """

    def __init__(
        self,
        machine: Machine,
        pool: HostPool,
        optimizer: Optimizer,
        *,
        in_backward: bool,
        master_weights: bool = False,
        accumulation: int = 1,
        reader: WeightReader | None = None,
    ) -> None:
        states = (value for state in optimizer.state.values() for value in state.values())
        if any(isinstance(value, Tensor) and value.is_meta for value in states):
            raise OffloadMisuse(
                problem=f"{type(optimizer).__name__} was made on the meta device, with states without values",
                advice="load the model's values first, then create the optimizer",
            )
        self.machine, self.pool, self.optimizer, self.in_backward = machine, pool, optimizer, in_backward
        self.accumulation = accumulation
        self._reader = reader
        self._before: TrainingSession | None = getattr(optimizer, _ATTACHED, None)
        if self._before is not None:
            self._before.wait()
        self.states = OptimizerStates(
            optimizer, machine.device, master_weights=master_weights, host_memory=pool.unpinned
        )
        self.engine = Engine(machine, pool, self.states)
        self.on_host: frozenset[str] | None = None
        self.external_nbytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainingSession":
        """Return the session itself: a private copy of the optimizer refers to it, and does not step it."""
        return self

    # -- the executor's protocol: `OffloadBackend`

    def extend_graph(self, graph: Graph, tensors: Tensors) -> Graph:
        """Add parameters, states and updates to the captured graph; see `OffloadBackend`."""
        self.external_nbytes = _external_nbytes(tensors, self.machine.device, graph.rounding_nbytes)
        if self.on_host is None and (pair := overlapping([param for _, param in tensors.parameters])):
            first, second = (tensors.parameters[place][0][0] for place in pair)
            raise OffloadMisuse(
                problem=f"{first} and {second} are two parameters in the same memory",
                advice="give each its own memory, or tie them by one Parameter",
            )
        known = {id(param): param for param in self.states.parameters()}
        optimized = []
        for index, (names, param) in enumerate(tensors.parameters):
            if id(param) not in known:
                if param.requires_grad:
                    raise OffloadMisuse(
                        problem=f"{names[0]} requires a gradient, but the optimizer does not have it",
                        advice="give the optimizer all parameters that train, or freeze this one",
                    )
                continue
            if self.machine.device.type != "cpu":
                self.external_nbytes += self.states.scalars(param) * graph.rounding_nbytes
            here = self.states.cost(param, self.machine.device)
            with kernel_threads(optimizer_threads(self.machine.device)):  # as in its lane
                on_cpu = self.states.cost(param, torch.device("cpu"))
            optimized.append(
                Optimized(
                    param=index,
                    states=tuple((state.name, state.nbytes) for state in self.states.kept(param)),
                    # After the backward the device is done with all else, and waits for the host.
                    device_time_s=(
                        here.s_per_element * param.numel()
                        if self.in_backward
                        else here.alone_s(param.numel())
                    ),
                    cpu_time_s=on_cpu.alone_s(param.numel()),
                    workspace_nbytes=math.ceil(here.workspace_nbytes_per_element * param.numel()),
                )
            )
        for _, param in tensors.parameters:
            known.pop(id(param), None)
        if known:
            shapes = ", ".join(str(tuple(param.shape)) for param in [*known.values()][:3])
            raise OffloadMisuse(
                problem=f"the optimizer has parameters that the model does not: {len(known)}, of {shapes}",
                advice="add them to the model, or train them with another optimizer",
            )
        training = training_graph(graph, optimized)
        if self.on_host is None:
            return training
        return with_placement(
            training, {i for i, value in enumerate(training.values) if value.name in self.on_host}
        )

    def apply_placement(self, graph: Graph, on_host: frozenset[int], tensors: Tensors) -> Graph:
        """Move all persistent values to their placement; see `OffloadBackend`."""
        placed = with_placement(graph, on_host)
        if self.on_host is not None:
            return placed
        params = [param for _, param in tensors.parameters]
        self.engine.residency.apply_placement(
            placed, params, [buffer for _, buffer in tensors.buffers], self._reader
        )
        self._reader = None  # frees the weights that it reads
        for value in placed.values:
            if (
                value.role is Role.OPTIMIZER_STATE
                and value.placement is Placement.HOST
                and value.of is not None
            ):
                owner, param = placed.values[value.of].name, params[value.of]
                name = value.name.removeprefix(f"{owner}.")
                (state,) = (state for state in self.states.kept(param) if state.name == name)
                like = param if state.shape == tuple(param.shape) else torch.empty(state.shape, device="meta")
                layout = Layout(state.shape, like.stride(), 0, state.dtype)
                self.states.reserve_on_host(
                    param, name, self.engine.residency.reserve_on_host(value.name, layout).whole
                )
        self.states.apply_placement(None if self._before is None else self._before.states)
        self.on_host = frozenset(v.name for v in placed.values if v.placement is Placement.HOST)
        self.engine.accumulated = self._with_gradients()
        self._attach()
        return placed

    @context
    def call_context(self) -> Generator[None, None, None]:
        """Prepare for one call, which runs inside the context; see `OffloadBackend`.

        Raises:
            OffloadMisuse: a parameter cannot be restored to its placement, or a gradient would be ignored.
            MachineMisuse: the machine is closed, or was made by the process that this one was forked from.
        """
        self.machine.check()
        with self.engine.no_pending_parameters():
            self.engine.restore_placement()
            self.check_gradients()
            self.engine.clipping.scale_all()
            yield

    def begin(self, step: PlannedStep, flat: Sequence[Tensor]) -> Transfers:
        """Return the handler of one call; raise `OffloadMisuse` if a parameter is another object."""
        self.engine.residency.check_identity(flat)
        if self.in_backward and not self.engine.accumulating:
            mark_stepped(self.optimizer)  # its backward will step
        return self.engine.begin(step)

    @context
    def original_context(self) -> Generator[None, None, None]:
        """Let the original module run inside the context; see `OffloadBackend`."""
        with self.call_context(), OnDemandWeights(self.engine.residency):
            yield

    # -- replacements of the optimizer's methods

    def wait(self) -> None:
        """Wait until every update is done; raise `LaneFailed` if one failed."""
        try:
            self.engine.wait()
        finally:
            self.engine.clipping.scale_all()

    def close(self) -> None:
        """Finish pending updates and stop watching parameters; raise `LaneFailed` if an update failed."""
        try:
            self.wait()
        finally:
            self.engine.clipping.close()

    def check_gradients(self) -> None:
        """Check that no gradient is left if each backward updates: it would be ignored, or used too late.

        Gradients of zeros are allowed, and so are those that `accumulating` has added up for the next update.

        Raises:
            OffloadMisuse: a gradient is left.
        """
        if not self.in_backward or self.engine.accumulating:
            return
        with past_torch_function():
            left = self.engine.residency.names_of(
                param
                for param in self._with_gradients() - self.engine.accumulated
                if param.grad is not None and param.grad.any()
            )
        if left:
            more = f" and {len(left) - 3} more" if left[3:] else ""
            raise OffloadMisuse(
                problem="each backward updates by the gradients of its own forward, but "
                f"{', '.join(left[:3])}{more} got others, which are left in .grad",
                advice="call zero_grad(), and compute the loss from outputs of the model only; or build with "
                "optimizer_in_backward=False",
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do what ``optimizer.step`` does; updates on the CPU are still pending when this returns.

        Raises:
            OffloadMisuse: parameters are updated during the backward, or none has a gradient.
            MachineMisuse: the machine is closed, or was made by the process that this one was forked from.
        """
        self.machine.check()
        if self.in_backward:
            raise OffloadMisuse(
                problem="step() was called, but each backward steps the optimizer itself",
                advice="remove the call of step(), or build the module with optimizer_in_backward=False",
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with past_torch_function():
            without = all(param.grad is None for param in self.engine.residency.params)
        if without:
            raise OffloadMisuse(
                problem="step() was called, but no parameter has a gradient", advice="call backward() first"
            )
        try:
            with step_hooks(self.optimizer), torch.no_grad():
                self.engine.step()
        finally:
            self.engine.clipping.scale_all()  # gradients that were not used
        self.engine.clipping.forget()
        if getattr(self.optimizer, "found_inf", None) is not None:
            self.engine.wait()  # a GradScaler sets found_inf only until this returns
        return loss

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Do what `torch.nn.utils.clip_grad_norm_` does, for the model's gradients; see `clipping`.

        Raises:
            OffloadMisuse: each backward steps the optimizer itself.
            MachineMisuse: the machine is closed, or was made by the process that this one was forked from.
            RuntimeError: torch's error for a norm that is not finite.
        """
        self.machine.check()
        if self.in_backward:
            raise OffloadMisuse(
                problem="gradients cannot be clipped together: each one is used as soon as it is computed",
                advice="build the module with optimizer_in_backward=False",
            )
        params, on_host = self.engine.residency.params, self.engine.residency.params_on_host()
        return self.engine.clipping.clip(params, on_host, max_norm, norm_type, error_if_nonfinite, foreach)

    @context
    def accumulating(self) -> Generator[None, None, None]:
        """Inside the context a backward adds to ``.grad`` and updates nothing, as in plain training.

        Raises:
            OffloadMisuse: the plan has no memory for gradients between backwards.
        """
        if self.in_backward and self.accumulation == 1:
            raise OffloadMisuse(
                problem="gradients cannot be added up: the plan has no memory for them between backwards",
                advice="build the module with accumulation= the number of micro-batches in a step",
            )
        before = self.engine.accumulating
        try:
            self.engine.accumulating = self.in_backward
            yield
        finally:
            self.engine.accumulating = before
            self.engine.accumulated |= self._with_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do what ``optimizer.zero_grad`` does, without waiting for updates where that is safe."""
        self.engine.clipping.forget()
        if set_to_none:
            self.engine.accumulated.clear()
        else:
            self.wait()
        for param in self.states.parameters():
            if set_to_none:
                drop_gradient(param)
            elif param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()

    def _with_gradients(self) -> set[nn.Parameter]:
        with past_torch_function():
            return {param for param in self.states.parameters() if param.grad is not None}

    def _attach(self) -> None:
        """Replace some methods of the user's object, not of its class."""
        optimizer = self.optimizer
        self._originals: dict[str, Callable[..., Any]] = {
            name: getattr(optimizer, name) for name in ("state_dict", "load_state_dict")
        }
        if self._before is not None:  # its methods would move states to blocks of its own plan
            self._before.engine.clipping.close()
            self._originals, self._before = self._before._originals, None
        originals = self._originals

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        def zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            self.zero_grad(set_to_none)

        def state_dict(_: Optimizer) -> Any:
            self.wait()
            self.check_gradients()
            return self.states.with_masters(originals["state_dict"]())

        def load_state_dict(_: Optimizer, state_dict: Any) -> None:
            self.wait()
            with uninterrupted():  # until all states are in their places
                originals["load_state_dict"](self.states.without_masters(state_dict))
                self.states.loaded(state_dict)

        def add_param_group(_: Optimizer, group: Any) -> None:
            raise OffloadMisuse(
                problem="a parameter group was added to an optimizer whose states are planned already",
                advice="add the group before building the module",
            )

        setattr(optimizer, _ATTACHED, self)
        replace_step(optimizer, step)
        for function in (zero_grad, state_dict, load_state_dict, add_param_group):
            setattr(optimizer, function.__name__, MethodType(function, optimizer))


def _external_nbytes(tensors: Tensors, device: torch.device, rounding_nbytes: int) -> int:
    """Return the bytes of buffers, which are moved to the device, and of inputs there, each storage once."""
    inputs = (tensor for tensor in tensors.inputs if tensor.device == device)
    found = {
        storage_id(tensor): tensor.untyped_storage().nbytes()
        for tensor in (*(buffer for _, buffer in tensors.buffers), *inputs)
    }
    return sum(-(-nbytes // rounding_nbytes) * rounding_nbytes for nbytes in found.values())
