"""`Engine` carries out the steps of a schedule other than compute, for one model.

The engine begins calls, steps the optimizer, and waits for pending updates on the CPU. `Residency` knows
where values are placed; `Transfers` carries out the steps of one call.
"""

import weakref
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import cast

from torch import Tensor, nn

from remat_executor.lowering.step_handler import Action
from remat_executor.module.planned_step import PlannedStep
from remat_graph import Lane, OptimizerStep, Placement, Role, Update
from remat_graph.contexts import context
from remat_offload.copy_lanes.machine import Machine
from remat_offload.deferred_signals import uninterrupted
from remat_offload.engine.pending_parameters import clear_pending, mark_pending
from remat_offload.engine.residency import Residency
from remat_offload.engine.transfer_steps import Transfers
from remat_offload.errors import LaneFailed, OffloadMisuse
from remat_offload.host_memory.pool import Event, HostPool
from remat_offload.optimizer.clipping import Clipping
from remat_offload.optimizer.states import OptimizerStates


class Engine:
    """Makes the handler of each call and keeps the state that lasts between calls."""

    def __init__(self, machine: Machine, pool: HostPool, states: OptimizerStates) -> None:
        self.machine, self.states = machine, states
        self.residency = Residency(machine, pool)
        self._pending: dict[nn.Parameter, Event] = {}
        self.clipping = Clipping(machine, self.mark_pending)
        self.accumulating = False  # whether a backward adds to the gradients instead of updating
        self.accumulated: set[nn.Parameter] = set()  # whose gradients await the next backward that updates
        self._latest: PlannedStep | None = None
        self._calls: weakref.WeakSet[Transfers] = weakref.WeakSet()
        self.owner: Callable[[], object] = lambda: None  # returns the module, which must live during a call

    def begin(self, step: PlannedStep) -> Transfers:
        """Return the handler of one call."""
        self.residency.write_back_newer()
        self._latest = step
        call = Transfers(self, step)
        for other in self._calls:
            if other.undelivered:  # one backward may run both
                other.overlaps = call.overlaps = True
        self._calls.add(call)
        return call

    def restore_placement(self) -> None:
        """Restore values that were given other memory, by ``.data = ...`` for example, to their placement.

        The new values are kept, as in plain training. If someone else still uses a parameter's block on the
        host, the block keeps its content and the parameter gets another block.

        Raises:
            OffloadMisuse: a parameter has another shape, type or device, or shares memory with another, so
                that its plan is no longer valid. Nothing was moved.
            HostPoolExhausted: another block does not fit into the pool.
        """
        displaced, owners = self.residency.displaced(), self.states.displaced()
        if not displaced and not owners:
            return
        self.residency.check(displaced)
        self.wait()
        self.residency.restore_placement(displaced)
        for param in owners:
            self.states.restore_placement(param)

    @context
    def no_pending_parameters(self) -> Generator[None, None, None]:
        """Make all parameters ordinary inside the context: a reader there waits for updates itself.

        Parameters whose updates are unfinished when the context ends, however it ends, are pending again.
        """
        try:
            for param in self._pending:
                clear_pending(param)
            yield
        finally:
            with uninterrupted() if self._pending else nullcontext():
                self._pending = {param: work for param, work in self._pending.items() if not work.query()}
                for param, work in self._pending.items():
                    mark_pending(param, work)

    def wait(self) -> None:
        """Wait until every update is done.

        Raises:
            LaneFailed: an update failed. Its parameter is unchanged: load a checkpoint, or continue.
        """
        self.residency.write_back_newer()
        try:
            self.machine.drain()
        except LaneFailed:
            self._clear_all_pending()
            raise
        self._clear_all_pending()

    def _clear_all_pending(self) -> None:
        """Make all parameters ordinary; no update is pending, and every failure has been reported."""
        for param in self._pending:
            clear_pending(param)
        self._pending.clear()
        self.residency.forget_tickets()

    def mark_pending(self, param: nn.Parameter, work: Event) -> None:
        """Make every reader of a parameter or of its gradient wait for the work first."""
        self._pending[param] = work
        mark_pending(param, work)

    def step(self) -> None:
        """Carry out the steps that the schedule of the latest call has after its backward: the updates.

        Updates on the CPU are still pending when this returns.

        Raises:
            OffloadMisuse: no forward has run.
            LaneFailed: an update of the previous step failed.
        """
        step = self._latest
        if step is None:
            raise OffloadMisuse(
                problem="the optimizer cannot step before a forward has run",
                advice="call the model and backward() first",
            )
        self.wait()
        self.restore_placement()
        params, values = self.residency.params, step.graph.values
        without = {p for p, param in enumerate(params) if param.grad is None}
        grads = ((update.grad, params[update.param].grad) for update in step.graph.updates)
        live = {value: grad for value, grad in grads if grad is not None}
        handler = Transfers(self, step)
        for item in step.program.tail:
            if isinstance(item, OptimizerStep) and item.value in without:
                continue
            with uninterrupted() if isinstance(item, OptimizerStep) else nullcontext():
                handler.carry_out(cast(Action, item), live)
                if isinstance(item, OptimizerStep) and item.lane is Lane.CPU_OPTIMIZER:
                    self._mark_update_pending(values[item.value].name, params[item.value])
        for update in self._unplanned_updates(step):
            live[update.grad] = cast(Tensor, params[update.param].grad)
            with uninterrupted():
                handler.update_unplanned(update, live)
                if values[update.param].placement is Placement.HOST:
                    self._mark_update_pending(values[update.param].name, params[update.param])

    def _unplanned_updates(self, step: PlannedStep) -> list[Update]:
        """Return updates that are missing in the plan of the latest call.

        Their gradients come from another forward, from parameters frozen since, or from outside of the model.
        """
        found = []
        for place, param in enumerate(self.residency.params):
            if place not in step.updates and param.grad is not None and self.states.has(param):
                values = enumerate(step.graph.values)
                states = [i for i, v in values if v.role is Role.OPTIMIZER_STATE and v.of == place]
                found.append(Update(param=place, grad=len(step.graph.values) + place, states=states))
        return found

    def _mark_update_pending(self, name: str, param: nn.Parameter) -> None:
        ticket = self.residency.residents[name].written
        if ticket is not None:
            self.mark_pending(param, ticket)
