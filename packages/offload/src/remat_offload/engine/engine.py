"""The engine: carries out what a schedule does beside computing, for one model.

It begins calls, steps the optimizer, and waits for updates that are under way on the CPU. `Residency` knows
where values live; `Transfers` carries out the steps of one call.
"""

from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import cast

from torch import Tensor, nn

from remat_executor.lowering.step_handler import Action
from remat_executor.module.planned_step import PlannedStep
from remat_graph import Lane, OptimizerStep, Placement, Role, Update
from remat_graph.contexts import context
from remat_offload.deferred_signals import uninterrupted
from remat_offload.engine.pending_parameters import clear_pending, mark_pending
from remat_offload.engine.residency import Residency
from remat_offload.engine.transfer_steps import Transfers, Updates
from remat_offload.errors import LaneFailed, OffloadMisuse
from remat_offload.host_memory.pool import Event, HostPool
from remat_offload.machine.base import Machine
from remat_offload.optimizer.clipping import Clipping


class Engine:
    """Makes the handler of each call, and holds what lasts between calls.

    Args:
        machine: the device, the host, and what lies between.
        pool: host memory.
        updates: how parameters are updated.

    Attributes:
        residency: where values live.
        clipping: norms and scales of gradients.
        accumulating: whether updates within a backward add their gradients up instead.
        added_up: parameters with gradients that the next backward that steps shall step by.
        owner: gives what must not go while a call is under way, the module; the engine does not keep it.
    """

    def __init__(self, machine: Machine, pool: HostPool, updates: Updates) -> None:
        self.machine, self.updates = machine, updates
        self.residency = Residency(machine, pool)
        self._pending: dict[nn.Parameter, Event] = {}
        self.clipping = Clipping(machine, self.mark_pending)
        self.accumulating = False
        self.added_up: set[nn.Parameter] = set()
        self._latest: PlannedStep | None = None
        self.owner: Callable[[], object] = int

    def begin(self, step: PlannedStep) -> Transfers:
        """The handler of one call."""
        self.residency.write_back_newer()
        self._latest = step
        return Transfers(self, step)

    def restore_placement(self) -> None:
        """Bring home what was given other memory meanwhile, by ``.data = ...`` or ``load``, say.

        Values go on from there, as in plain training. Who else holds a home, after values have been
        swapped, keeps what is in it: the parameter gets another.

        Raises:
            OffloadMisuse: a parameter has another shape, type or device now, or shares memory with another:
                its plan is none any more. Nothing was moved.
            HostPoolExhausted: there is no room for another home.
        """
        displaced, states = self.residency.displaced(), self.updates.displaced()
        if not displaced and not states:
            return
        self.residency.check(displaced)
        self.wait()
        self.residency.restore_placement(displaced)
        for owner in states:
            self.updates.restore_placement(owner)

    @context
    def no_pending_parameters(self) -> Generator[None, None, None]:
        """Within it parameters are ordinary, and who reads one waits for its update himself, as a call does.

        Those whose updates are under way at its end, however it ends, are in flight again.
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
            LaneFailed: one could not be carried out. Its parameter is as it was: load a checkpoint, or go on.
        """
        self.residency.write_back_newer()
        try:
            self.machine.drain()
        except LaneFailed:
            self._clear_all_pending()
            raise
        self._clear_all_pending()

    def _clear_all_pending(self) -> None:
        """Nothing is under way, and what failed has been told: let all parameters be ordinary."""
        for param in self._pending:
            clear_pending(param)
        self._pending.clear()
        self.residency.forget_tickets()

    def mark_pending(self, param: nn.Parameter, work: Event) -> None:
        """Let whoever reads a parameter, or asks for its gradient, wait first."""
        self._pending[param] = work
        mark_pending(param, work)

    def step(self) -> None:
        """Carry out what the schedule of the latest call has after its backward: the optimizer's step.

        Updates on the CPU are under way when this returns.

        Raises:
            OffloadMisuse: no forward has run.
            LaneFailed: an update of the step before could not be carried out.
        """
        step = self._latest
        if step is None:
            raise OffloadMisuse(
                problem="the optimizer is to step and no forward has run",
                advice="call the model and backward()",
            )
        self.wait()
        self.restore_placement()
        without = {p for p, param in enumerate(self.residency.params) if param.grad is None}
        live = {
            update.grad: grad
            for update in step.graph.updates
            if (grad := self.residency.params[update.param].grad) is not None
        }
        handler = Transfers(self, step)
        for item in step.program.tail:
            if isinstance(item, OptimizerStep) and item.value in without:
                continue
            with uninterrupted() if isinstance(item, OptimizerStep) else nullcontext():
                handler.carry_out(cast(Action, item), live)
                if isinstance(item, OptimizerStep) and item.lane is Lane.CPU_OPTIMIZER:
                    self._mark_update_pending(
                        step.graph.values[item.value].name, self.residency.params[item.value]
                    )
        for update in self._left_out(step):
            live[update.grad] = cast(Tensor, self.residency.params[update.param].grad)
            with uninterrupted():
                handler.update_unplanned(update, live)
                if step.graph.values[update.param].placement is Placement.HOST:
                    self._mark_update_pending(
                        step.graph.values[update.param].name, self.residency.params[update.param]
                    )

    def _left_out(self, step: PlannedStep) -> list[Update]:
        """Updates that the plan of a call does not know.

        Their gradients are of another forward, frozen since, or of something outside of the model.
        """
        found = []
        for place, param in enumerate(self.residency.params):
            if place not in step.updates and param.grad is not None and self.updates.has(param):
                values = enumerate(step.graph.values)
                states = [i for i, v in values if v.role is Role.OPTIMIZER_STATE and v.of == place]
                found.append(Update(param=place, grad=len(step.graph.values) + place, states=states))
        return found

    def _mark_update_pending(self, name: str, param: nn.Parameter) -> None:
        ticket = self.residency.residents[name].written
        if ticket is not None:
            self.mark_pending(param, ticket)
