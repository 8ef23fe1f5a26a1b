"""One model in training: its parameters, the user's optimizer, and where each of them is.

It tells the planner what there is to hold, brings everything to the home that a plan gives it, and takes the
place of the optimizer's ``step``, ``zero_grad`` and what else must wait for updates that are under way. The
optimizer stays the user's object, with its groups, its state and its hooks.
"""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
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
from remat_offload.deferred_signals import uninterrupted
from remat_offload.engine.engine import Engine
from remat_offload.engine.on_demand_weights import Lending
from remat_offload.engine.pending_parameters import drop_gradient
from remat_offload.engine.residency import Layout
from remat_offload.engine.transfer_steps import Transfers
from remat_offload.engine.weight_loading import Filler
from remat_offload.errors import OffloadMisuse
from remat_offload.host_memory.pool import HostPool
from remat_offload.machine.base import Machine
from remat_offload.optimizer.chunking import overlapping
from remat_offload.optimizer.states import States

_ATTACHED = "_remat_training"
"""The attribute of an optimizer under which the `Training` is found that steps it."""


class Training:
    """What moves between device and host for one model, and the optimizer that updates it.

    Args:
        machine: the device, the host, and what lies between.
        pool: host memory; its capacity is the host budget.
        optimizer: the user's, over parameters of the model.
        in_backward: whether parameters are updated during the backward.
        master_weights: whether parameters in 16 bits are stepped in 32.
        accumulation: micro-batches to a step that plans are made for.
        filler: gives parameters and buffers their values as they are brought to their homes.

    Attributes:
        on_host: names of what is placed on the host; None until that is settled.
        lent_nbytes: what buffers and inputs of the latest captured call take on the device.

    Raises:
        RefusedOptimizer: its results would not be those of one step.
        OffloadMisuse: it has made states on the meta device already.
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
        filler: Filler | None = None,
    ) -> None:
        states = (value for state in optimizer.state.values() for value in state.values())
        if any(isinstance(value, Tensor) and value.is_meta for value in states):
            raise OffloadMisuse(
                problem=f"{type(optimizer).__name__} was made on the meta device, with states without values",
                advice="give the model its values first, and then make the optimizer",
            )
        self.machine, self.pool, self.optimizer, self.in_backward = machine, pool, optimizer, in_backward
        self.accumulation = accumulation
        self._filler = filler
        self._before: Training | None = getattr(optimizer, _ATTACHED, None)
        if self._before is not None:
            self._before.wait()
        self.states = States(optimizer, machine.device, master_weights=master_weights)
        self.engine = Engine(machine, pool, self.states)
        self.on_host: frozenset[str] | None = None
        self.lent_nbytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Training":
        """Itself: an optimizer that is copied, to be tried out, is stepped by nobody else."""
        return self

    # -- for the planner and the executor: `OffloadBackend`

    def extend_graph(self, graph: Graph, tensors: Tensors) -> Graph:
        """The captured graph with parameters, states and updates; see `OffloadBackend`."""
        self.lent_nbytes = _lent_nbytes(tensors, self.machine.device)
        if self.on_host is None and (pair := overlapping([param for _, param in tensors.parameters])):
            first, second = (tensors.parameters[place][0][0] for place in pair)
            raise OffloadMisuse(
                problem=f"{first} and {second} are two parameters in the same memory",
                advice="give each its own, or tie them by one Parameter",
            )
        known = {id(param): param for param in self._parameters()}
        optimized = []
        for index, (names, param) in enumerate(tensors.parameters):
            if id(param) not in known:
                if param.requires_grad:
                    raise OffloadMisuse(
                        problem=f"{names[0]} requires a gradient, and the optimizer does not have it",
                        advice="give the optimizer all parameters that train, or freeze it",
                    )
                continue
            here, on_cpu = (
                self.states.cost(param, place) for place in (self.machine.device, torch.device("cpu"))
            )
            optimized.append(
                Optimized(
                    param=index,
                    states=tuple((state.name, state.nbytes) for state in self.states.kept(param)),
                    device_time_s=here.s_per_element * param.numel(),
                    cpu_time_s=on_cpu.s_per_element * param.numel(),
                    workspace_nbytes=math.ceil(here.scratch_nbytes_per_element * param.numel()),
                )
            )
        for _, param in tensors.parameters:
            known.pop(id(param), None)
        if known:
            shapes = ", ".join(str(tuple(param.shape)) for param in [*known.values()][:3])
            raise OffloadMisuse(
                problem=f"the optimizer has parameters that the model does not: {len(known)}, of {shapes}",
                advice="give the model all that its optimizer trains, or these an optimizer of their own",
            )
        extended = training_graph(graph, optimized)
        if self.on_host is None:
            return extended
        return with_placement(
            extended, {i for i, value in enumerate(extended.values) if value.name in self.on_host}
        )

    def apply_placement(self, graph: Graph, on_host: frozenset[int], tensors: Tensors) -> Graph:
        """Bring everything to its home; see `OffloadBackend`."""
        settled = with_placement(graph, on_host)
        if self.on_host is not None:
            return settled
        params = [param for _, param in tensors.parameters]
        self.engine.residency.settle(settled, params, [buffer for _, buffer in tensors.buffers], self._filler)
        self._filler = None  # nor the weights that it reads
        for value in settled.values:
            if (
                value.role is Role.OPTIMIZER_STATE
                and value.placement is Placement.HOST
                and value.of is not None
            ):
                owner, param = settled.values[value.of].name, params[value.of]
                name = value.name.removeprefix(f"{owner}.")
                (state,) = (state for state in self.states.kept(param) if state.name == name)
                like = param if state.shape == tuple(param.shape) else torch.empty(state.shape, device="meta")
                layout = Layout(state.shape, like.stride(), 0, state.dtype)
                self.states.house(param, name, self.engine.residency.house(value.name, layout).whole)
        self.states.settle(None if self._before is None else self._before.states)
        self.on_host = frozenset(v.name for v in settled.values if v.placement is Placement.HOST)
        self.engine.added_up = self._with_gradients()
        self._attach()
        return settled

    @context
    def call_context(self) -> Generator[None, None, None]:
        """Within it a call runs; see `OffloadBackend`.

        Raises:
            OffloadMisuse: a parameter has another layout or place now, or a gradient that nothing steps by.
            MachineMisuse: the machine is closed, or this process was forked from its own.
        """
        self.machine.check()
        with self.engine.grounded():
            self.engine.take_back()
            self.check_gradients()
            self.engine.clipping.scale_all()
            yield

    def begin(self, step: PlannedStep, flat: Sequence[Tensor]) -> Transfers:
        """The handler of one call; see `OffloadBackend`.

        Raises:
            OffloadMisuse: one of the model's parameters is another object now.
        """
        self.engine.residency.check_identity(flat)
        if self.in_backward and not self.engine.accumulating:
            mark_stepped(self.optimizer)  # which its backward will do
        return self.engine.begin(step)

    @context
    def original_context(self) -> Generator[None, None, None]:
        """In it the original can run; see `OffloadBackend`."""
        with self.call_context(), Lending(self.engine.residency):
            yield

    # -- in the place of the optimizer's methods

    def wait(self) -> None:
        """Wait until every update is done.

        Raises:
            LaneFailed: one could not be carried out.
        """
        try:
            self.engine.wait()
        finally:
            self.engine.clipping.scale_all()

    def leave(self) -> None:
        """Finish what is under way and leave parameters to whoever else trains them.

        Raises:
            LaneFailed: an update could not be carried out.
        """
        try:
            self.wait()
        finally:
            self.engine.clipping.close()

    def check_gradients(self) -> None:
        """See that no gradient is left, where each backward steps: nothing would step by it, or not in time.

        Zeros are left alone, and so is what `accumulating` added up for the next backward that steps.

        Raises:
            OffloadMisuse: one is.
        """
        if not self.in_backward or self.engine.accumulating:
            return
        with past_torch_function():
            left = self.engine.residency.names_of(
                param
                for param in self._with_gradients() - self.engine.added_up
                if param.grad is not None and param.grad.any()
            )
        if left:
            more = f" and {len(left) - 3} more" if left[3:] else ""
            raise OffloadMisuse(
                problem=f"each backward steps by what its forward's gradients are, and {', '.join(left[:3])}"
                f"{more} got others, which are left in .grad",
                advice="call zero_grad(), and let the loss use only what the model returns; or build with "
                "optimizer_in_backward=False",
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """What ``optimizer.step`` does: updates on the CPU go on when it returns.

        Raises:
            OffloadMisuse: parameters are updated during the backward; or none has a gradient.
            MachineMisuse: the machine is closed, or this process was forked from its own.
        """
        self.machine.check()
        if self.in_backward:
            raise OffloadMisuse(
                problem="step() was called, but each backward steps the optimizer by itself",
                advice="leave step() out, or build the module with optimizer_in_backward=False",
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with past_torch_function():
            without = all(param.grad is None for param in self.engine.residency.params)
        if without:
            raise OffloadMisuse(
                problem="step() was called, but no parameter has a gradient", advice="call backward() before"
            )
        try:
            with step_hooks(self.optimizer), torch.no_grad():
                self.engine.step()
        finally:
            self.engine.clipping.scale_all()  # what is not stepped
        self.engine.clipping.forget()
        if getattr(self.optimizer, "found_inf", None) is not None:
            self.engine.wait()  # a scaler lends its numbers to fused optimizers only until this returns
        return loss

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """What `torch.nn.utils.clip_grad_norm_` does to the model's gradients; see `clipping`.

        Raises:
            OffloadMisuse: each backward steps the optimizer by itself.
            MachineMisuse: the machine is closed, or this process was forked from its own.
            RuntimeError: torch's, for a norm that is not finite.
        """
        self.machine.check()
        if self.in_backward:
            raise OffloadMisuse(
                problem="gradients cannot be clipped together where each is used as soon as it is there",
                advice="build the module with optimizer_in_backward=False",
            )
        params, on_host = self.engine.residency.params, self.engine.residency.at_home_on_host()
        return self.engine.clipping.clip(params, on_host, max_norm, norm_type, error_if_nonfinite, foreach)

    @context
    def accumulating(self) -> Generator[None, None, None]:
        """Within it a backward adds to ``.grad`` and steps nothing, which ordinary training does anyway.

        Raises:
            OffloadMisuse: the plan leaves no room for gradients between backwards.
        """
        if self.in_backward and self.accumulation == 1:
            raise OffloadMisuse(
                problem="gradients are to be added up, but the plan has no room for them: each backward uses "
                "its own",
                advice="build the module with accumulation= as many micro-batches as a step has",
            )
        before = self.engine.accumulating
        self.engine.accumulating = self.in_backward
        try:
            yield
        finally:
            self.engine.accumulating = before
            self.engine.added_up |= self._with_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """What ``optimizer.zero_grad`` does, without waiting for updates where that is safe."""
        self.engine.clipping.forget()
        if set_to_none:
            self.engine.added_up.clear()
        else:
            self.wait()
        for param in self._parameters():
            if set_to_none:
                drop_gradient(param)
            elif param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()

    def _parameters(self) -> Iterable[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _with_gradients(self) -> set[nn.Parameter]:
        with past_torch_function():
            return {param for param in self._parameters() if param.grad is not None}

    def _attach(self) -> None:
        """Take the place of some methods of the user's object; of the object alone, not of its class."""
        original = self.optimizer
        self._kept: dict[str, Callable[..., Any]] = {
            name: getattr(original, name) for name in ("state_dict", "load_state_dict")
        }
        if self._before is not None:  # its methods would bring states to places that are no homes any more
            self._before.engine.clipping.close()
            self._kept, self._before = self._before._kept, None
        kept = self._kept

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        def zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            self.zero_grad(set_to_none)

        def state_dict(_: Optimizer) -> Any:
            self.wait()
            self.check_gradients()
            return self.states.into(kept["state_dict"]())

        def load_state_dict(_: Optimizer, state_dict: Any) -> None:
            self.wait()
            with uninterrupted():  # until all is at home
                kept["load_state_dict"](self.states.without_masters(state_dict))
                self.states.loaded(state_dict)

        def add_param_group(_: Optimizer, group: Any) -> None:
            raise OffloadMisuse(
                problem="a parameter group was added to an optimizer whose states are planned already",
                advice="add it before the module is built",
            )

        setattr(original, _ATTACHED, self)
        replace_step(original, step)
        for function in (zero_grad, state_dict, load_state_dict, add_param_group):
            setattr(original, function.__name__, MethodType(function, original))


def _lent_nbytes(tensors: Tensors, device: torch.device) -> int:
    """Bytes of buffers, which are brought to the device, and of inputs there, each storage once."""
    inputs = (tensor for tensor in tensors.inputs if tensor.device == device)
    found = {
        storage_id(tensor): tensor.untyped_storage().nbytes()
        for tensor in (*(buffer for _, buffer in tensors.buffers), *inputs)
    }
    return sum(found.values())
