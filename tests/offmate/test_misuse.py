"""What cannot be done is said in one line, and training stands where it stood."""

import copy
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from remat_executor import RematWarning, UnplannedUse
from remat_facade import BadModel, NoRoom
from remat_graph import BadBudget, Lane
from remat_offload import (
    BadWeights,
    CannotPin,
    HostPool,
    LaneFailed,
    OffloadMisuse,
    RefusedOptimizer,
    SimulatedMachine,
)
from remat_offload.copy_lanes.threaded import Job
from remat_offload.engine import accumulation
from remat_offload.host_memory.pinned import RegisteredMemory
from tests.helpers.offmates import MODELS, OPTIMIZERS, Run, differences, offmate

MAKE, BATCHES = MODELS["convolutions"]


def fails(kind: type[Exception], call: Callable[..., Any], *words: str) -> str:
    """The one line of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    assert all(word in line for word in words), line
    return line


def run(budget: str = "60%", **options: Any) -> Run:
    """A run that is ready."""
    model = MAKE()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return Run(offmate(model, BATCHES(0), budget, optimizer=optimizer, **options), optimizer, BATCHES)


def test_a_budget_that_nothing_keeps() -> None:
    """Refused before anything moves, with the numbers of what would work; and those work."""
    model = MAKE()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(NoRoom, match="the smallest plan found needs") as caught:
        offmate(model, BATCHES(0), 20_000, optimizer=optimizer)
    assert "\n" not in str(caught.value)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert type(optimizer).step is optimizer.step.__func__  # type: ignore[attr-defined] # the user's, as it was
    fails(NoRoom, lambda: offmate(model, BATCHES(0), "40%", optimizer=optimizer, host_budget=1000))
    assert caught.value.budget_nbytes == 20_000
    works = offmate(model, BATCHES(0), caught.value.least_nbytes, optimizer=optimizer)
    lent = sum(t.nbytes for t in (*model.buffers(), *BATCHES(0).values()))
    assert works.plan.peak_nbytes + lent == caught.value.least_nbytes


def test_another_models_optimizer() -> None:
    """Which would step nothing of this model."""
    optimizer = OPTIMIZERS["adamw"](MAKE().parameters())
    fails(OffloadMisuse, lambda: offmate(MAKE(), BATCHES(0), "60%", optimizer=optimizer), "does not have")


def test_an_optimizer_that_needs_all_at_once() -> None:
    """By name."""
    model = MAKE()
    optimizer = torch.optim.LBFGS(model.parameters())
    fails(RefusedOptimizer, lambda: offmate(model, BATCHES(0), "60%", optimizer=optimizer), "LBFGS")


def test_groups_and_steps_out_of_turn() -> None:
    """A group added later, a step without a backward; then training goes on."""
    ours = run()
    added = nn.Parameter(torch.zeros(3))
    fails(OffloadMisuse, lambda: ours.optimizer.add_param_group({"params": [added]}), "before")
    fails(OffloadMisuse, ours.optimizer.step, "backward")
    ours.train(1)
    fails(OffloadMisuse, ours.optimizer.step, "no parameter has a gradient")
    plain_model = MAKE()
    plain = Run(plain_model, OPTIMIZERS["adamw"](plain_model.parameters()), BATCHES)
    plain.train(3)
    ours.train(2)
    assert [] == differences(plain, ours)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"links": {"to_host_nbytes_per_s": 1e9}}, OffloadMisuse, ("links is of type dict", "Links(...)")),
        ({"machine": "cuda"}, OffloadMisuse, ("machine is of type str", "CudaMachine")),
        ({"pool": 123}, OffloadMisuse, ("pool is of type int", "HostPool")),
        ({"weights": [1]}, BadWeights, ("they are a list", "safetensors", "mapping")),
        ({"host_budget": "50%"}, BadBudget, ("'50%'", 'a size such as "2GiB"')),
    ],
)
def test_arguments_of_another_kind(
    options: dict[str, Any], kind: type[Exception], words: tuple[Any, ...]
) -> None:
    """What came, and what to give."""
    line = fails(kind, lambda: offmate(MAKE(), BATCHES(0), "60%", **options), *words)
    assert "share" not in line


def test_what_is_planned_already() -> None:
    """Refused in the words of the other entry points."""
    ours = run()
    fails(BadModel, lambda: offmate(ours.model, BATCHES(0), "60%"), "planned already", "its `module`")


def test_stepping_what_steps_by_itself() -> None:
    """In the in-backward style `step()` would step twice."""
    ours = run(optimizer_in_backward=True)
    fails(OffloadMisuse, ours.optimizer.step, "each backward steps the optimizer itself")


def test_an_error_in_a_lane_is_told() -> None:
    """Whatever fails there is raised at the next wait, by name and with its cause."""
    ours = run("60%").train(1)
    machine = ours.model._remat_training.machine

    def broken() -> None:
        raise ZeroDivisionError("planted")

    machine.work(broken, name="planted work")
    line = fails(LaneFailed, ours.model.synchronize, "planted work", "ZeroDivisionError")
    assert "cpu_optimizer" in line
    ours.train(1)


def test_what_a_plan_cannot_follow() -> None:
    """A second backward of one forward, a copy, other data types: refused, and never wrong numbers."""
    ours = run("70%")
    loss = ours.model(**BATCHES(0))
    fails(UnplannedUse, lambda: loss.backward(retain_graph=True), "retain_graph")
    fails(OffloadMisuse, lambda: copy.deepcopy(ours.model), "cannot be copied")
    ours.optimizer.zero_grad()
    ours.model.to(torch.float64)
    images = {k: v.double() if v.is_floating_point() else v for k, v in BATCHES(0).items()}
    fails(OffloadMisuse, lambda: ours.model(**images), "torch.float64", "build the module again")
    fails(
        OffloadMisuse,
        lambda: offmate(MAKE(), BATCHES(0), "60%", optimizer="adamw"),
        "is of type str",
        "expected an Optimizer",
    )


def test_data_from_elsewhere_is_brought_home() -> None:
    """Parameters that are given other data between steps train on from there."""
    plain_model = MAKE()
    plain = Run(plain_model, OPTIMIZERS["adamw"](plain_model.parameters()), BATCHES)
    ours = run()
    for each in (plain, ours):
        each.train(1)
        for p in (each.model.module if each is ours else each.model).parameters():
            p.data = p.data * 0.5
        each.train(2)
    assert [] == differences(plain, ours)


class SlowCopies(SimulatedMachine):
    """Copies to the host arrive late."""

    delayed = 0

    def copy(self, lane: Lane, destination: Tensor, source: Tensor, after: Any = (), name: str = "") -> Job:
        """Copy after work that takes a while."""
        if lane is Lane.TO_HOST:
            self.delayed += 1
            after = [*after, self.work(lambda: time.sleep(0.02), (), name="a delay")]
        return super().copy(lane, destination, source, after, name)


@pytest.mark.parametrize("part_nbytes", [None, 0])
def test_several_calls_in_flight(part_nbytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forwards before one backward: two budgets, which is said, and the numbers of plain training.

    Autograd adds the gradients of both before a parameter gets them, so no part waits until they are added,
    and the bytes of both have arrived.
    """
    monkeypatch.setattr(accumulation, "LIMIT_S", 3600.0)  # a wait would not end
    models = [MAKE(), MAKE()]
    optimizer = OPTIMIZERS["adamw"](models[1].parameters())
    machine = SlowCopies()
    options = {} if part_nbytes is None else {"part_nbytes": part_nbytes}
    ours = offmate(models[1], BATCHES(0), "60%", optimizer=optimizer, machine=machine, **options)
    torch.manual_seed(0)
    (models[0](**BATCHES(1)) + models[0](**BATCHES(2))).backward()
    torch.manual_seed(0)
    with pytest.warns(RematWarning, match="needs a budget of its own"):
        (ours(**BATCHES(1)) + ours(**BATCHES(2))).backward()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert machine.delayed


def test_forwards_without_a_backward_give_back_what_they_sent() -> None:
    """The host holds no more after ten of them than before."""
    ours = run()
    before = ours.model.host.lent_nbytes
    for i in range(10):
        ours.model(**BATCHES(i))
    assert before == ours.model.host.lent_nbytes


class Leaving(SimulatedMachine):
    """Notes which copies nobody holds, and which tensors it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.free: dict[Any, Any] = {}
        self.left: set[Any] = set()

    def copy(self, lane: Lane, destination: Tensor, source: Tensor, after: Any = (), name: str = "") -> Job:
        """Copy, and note what of it is on the device."""
        ticket = super().copy(lane, destination, source, after, name)
        self.free[ticket] = (source if lane is Lane.TO_HOST else destination).data_ptr()
        return ticket

    def wait_on_compute(self, ticket: Job) -> None:
        """Hold; nobody else need know of that copy."""
        super().wait_on_compute(ticket)
        self.free.pop(ticket, None)

    def release_after_copies(self, tensor: Tensor) -> None:
        """Note it."""
        self.left.add(tensor.data_ptr())


def test_copies_that_nobody_holds_are_told_of() -> None:
    """A forward whose backward never runs has fetched what that would have read."""
    machine = Leaving()
    ours = run("60%", machine=machine)
    machine.free.clear()
    ours.model(**BATCHES(0))
    unheld = set(machine.free.values())
    gc.collect()
    assert unheld
    assert unheld <= machine.left
    machine.left.clear()
    ours.train(2)
    gc.collect()
    assert machine.left == set()


class Failing(SimulatedMachine):
    """Fails the first copy that it is given once it is told to."""

    armed = False

    def copy(self, lane: Lane, destination: Tensor, source: Tensor, after: Any = (), name: str = "") -> Job:
        """Copy, or fail in the same way as a copy that fails in its lane."""
        if self.armed:
            self.armed = False
            return self.work(lambda: 1 / 0, after, name)
        return super().copy(lane, destination, source, after, name)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_copy_that_fails_leaves_training_as_it_was(half: str) -> None:
    """Told by name, and the step can be taken again."""
    plain_model, machine = MAKE(), Failing()
    plain = Run(plain_model, OPTIMIZERS["adamw"](plain_model.parameters()), BATCHES)
    ours = run("50%", machine=machine)

    def halves() -> None:
        machine.armed = half == "forward"
        loss = ours.model(**BATCHES(0))
        machine.armed = half == "backward"
        loss.backward()
        ours.model.synchronize()

    with pytest.raises(LaneFailed, match="ZeroDivisionError"):
        halves()
    ours.optimizer.zero_grad()
    ours.model.module.load_state_dict({**plain.model.state_dict()})  # batch norm has counted once more
    for each in (plain, ours):
        each.train(2)
    assert [] == differences(plain, ours)


class FailingUpdate(SimulatedMachine):
    """Fails the first update that it is given once it is told to."""

    armed = False

    def work(self, function: Callable[..., Any], after: list[Any] = (), name: str = "") -> Job:
        """Work, or fail as an optimizer that raises in its lane."""
        if self.armed and name.startswith("the update of"):
            self.armed = False
            return super().work(lambda: 1 / 0, after, name)
        return super().work(function, after, name)


def test_an_update_that_fails_and_a_checkpoint() -> None:
    """Told at the next wait; a checkpoint that is loaded then is gone on from, bit for bit."""
    plain_model, machine = MAKE(), FailingUpdate()
    plain = Run(plain_model, OPTIMIZERS["adamw"](plain_model.parameters()), BATCHES)
    ours = run("60%", machine=machine)
    for each in (plain, ours):
        each.train(1)
    saved = copy.deepcopy((ours.model.state_dict(), ours.optimizer.state_dict()))
    machine.armed = True
    with pytest.raises(LaneFailed, match=r"the update of .*ZeroDivisionError"):
        ours.train(2)
    assert not machine.armed
    ours.optimizer.zero_grad()
    ours.model.load_state_dict(saved[0])
    ours.optimizer.load_state_dict(saved[1])
    ours.scheduler.load_state_dict(plain.scheduler.state_dict())
    ours.step, ours.losses = plain.step, [*plain.losses]
    for each in (plain, ours):
        each.train(2)
    assert [] == differences(plain, ours)


@attrs.define
class Runtime:
    """Stands for a CUDA runtime that refuses to pin once so many blocks are."""

    left: float

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        """Zero is success; two is what it says where the limit of locked memory is reached."""
        self.left -= 1
        return 2 if self.left < 0 else 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Always well."""
        return 0


def test_whole_pages_are_counted_before_anything_moves() -> None:
    """A pinned block takes whole pages: what its bytes would fit in is refused, and not found out later."""

    def build(nbytes: Any) -> Any:
        model = MAKE()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        pool = HostPool(nbytes, memory=RegisteredMemory(Runtime(left=float("inf"))))
        return Run(offmate(model, BATCHES(0), "60%", optimizer=optimizer, pool=pool), optimizer, BATCHES)

    ours = build(4 << 20).train(2)
    planned_nbytes = ours.model.plan.host_peak_nbytes
    assert 0 < planned_nbytes < ours.model.host.peak_nbytes <= 4 << 20
    fails(NoRoom, lambda: build(planned_nbytes), "on the host")


def test_a_host_that_cannot_be_pinned() -> None:
    """While it is built, or when gradients leave: one line, and training stands where it stood."""
    plain_model, model = MAKE(), MAKE()
    plain = Run(plain_model, OPTIMIZERS["adamw"](plain_model.parameters()), BATCHES)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    runtime = Runtime(left=5)
    pool = HostPool(20 << 20, memory=RegisteredMemory(runtime))
    build = partial(offmate, model, BATCHES(0), "50%", optimizer=optimizer, pool=pool)
    fails(CannotPin, build, "cudaHostRegister returned error 2", "raise the limit of locked memory")
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert pool.statistics.lent_nbytes == 0
    assert type(optimizer).step is optimizer.step.__func__  # type: ignore[attr-defined] # the user's, as it was
    runtime.left = float("inf")
    ours = Run(build(), optimizer, BATCHES)
    for left in (0, 6):
        pool.trim()
        runtime.left = left
        with pytest.raises(CannotPin, match="cudaHostRegister"):
            ours.train(1)
        optimizer.zero_grad()
    runtime.left = float("inf")
    ours.losses.clear()
    ours.model.module.load_state_dict({**plain.model.state_dict()})  # batch norm has counted more
    for each in (plain, ours):
        each.train(2)
    assert [] == differences(plain, ours)
