"""Ctrl-C in a step leaves each parameter updated or as it was, and in a wait leaves what is waited for."""

import copy
import gc
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from remat_graph import Lane, OptimizerStep, Start
from remat_offload import MachineMisuse, OffloadMisuse
from remat_offload.copy_lanes import threaded
from remat_offload.copy_lanes.threaded import Job
from remat_offload.deferred_signals import uninterrupted
from remat_offload.engine import transfer_steps
from remat_offload.host_memory import pool as pool_module
from tests.helpers.interrupts import Interrupt
from tests.helpers.offmates import offmate

Kept = list[list[Tensor]]


def plainly() -> tuple[nn.Module, optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(48, 48), nn.ReLU())])
    return net, optim.AdamW(net.parameters(), lr=1e-2), torch.randn(64, 48)


def made(**options: Any) -> tuple[Any, optim.Optimizer, Tensor]:
    net, optimizer, x = plainly()
    return offmate(net, x, "50%", optimizer=optimizer, **options), optimizer, x


def kept(model: Any, optimizer: optim.Optimizer) -> Kept:
    """Each parameter with all that the optimizer keeps for it."""
    model.synchronize()
    states = optimizer.state_dict()["state"]
    params = enumerate(model.module.parameters())
    return [[p.detach().clone(), *(v.clone() for v in states[i].values())] for i, p in params]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_updates_are_whole() -> None:
    """Wherever in a step it comes."""
    model, optimizer, x = made()
    lanes = {s.lane for s in model._remat.latest.program.tail if isinstance(s, OptimizerStep)}
    assert {Lane.COMPUTE, Lane.CPU_OPTIMIZER} == lanes

    def backward() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    backward()
    optimizer.step()
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    before = kept(model, optimizer)
    backward()
    optimizer.step()
    after = kept(model, optimizer)
    interrupted, line = 0, 1
    while line < 6000:
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(states))
        backward()
        interrupt = Interrupt(line)
        interrupted += interrupt.during(optimizer.step)
        for now, old, new in zip(kept(model, optimizer), before, after, strict=True):
            assert same(now, old) or same(now, new), line
        if interrupt.left > 0:
            break
        line += 149
    assert interrupted > 20


def test_a_forward_that_ends_early_leaves_nothing_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in its copies it comes: what it had taken for activations is returned when it is dropped."""
    model, _, x = made()
    lanes = [s.transfer.lane for s in model._remat.latest.program.forward.items if isinstance(s, Start)]
    assert {*lanes} == {Lane.TO_HOST, Lane.TO_DEVICE}
    pool = model._remat_training.engine.residency.pool
    failures: list[object] = []

    def note(raised: Any) -> None:
        if raised.exc_type is not KeyboardInterrupt:  # Python prints it where it comes in a finalizer
            failures.append(raised.exc_value)

    monkeypatch.setattr(sys, "unraisablehook", note)
    model(x)
    gc.collect()
    before = pool._lent_nbytes
    interrupted, line = 0, 1
    while line < 2000:
        interrupt = Interrupt(line, (transfer_steps.__file__, pool_module.__file__))
        interrupted += interrupt.during(lambda: model(x))
        gc.collect()
        assert pool._lent_nbytes == before, line
        assert not failures, line
        if interrupt.left > 0:
            break
        line += 11
    assert interrupted > 20


def test_loaded_states_are_at_home() -> None:
    """Wherever in loading them it comes: those that are stepped are those that the optimizer shows."""
    model, optimizer, x = made()
    model(x).square().mean().backward()
    optimizer.step()
    file = copy.deepcopy(optimizer.state_dict())
    homes = [(p, name) for p, state in optimizer.state.items() for name, v in state.items() if v.dim()]
    expected = [optimizer.state[p][name].data_ptr() for p, name in homes]
    interrupted, line = 0, 1
    while line < 6000:
        interrupt = Interrupt(line)
        interrupted += interrupt.during(lambda: optimizer.load_state_dict(file))
        found = [optimizer.state[p][name].data_ptr() for p, name in homes]
        places = model._remat_training.states._blocks
        held = [(p, name) in places for p, name in homes]
        assert [e for e, h in zip(expected, held, strict=True) if h] == [
            f for f, h in zip(found, held, strict=True) if h
        ], line
        if interrupt.left > 0:
            break
        line += 149
    assert interrupted > 5


def test_what_is_left_on_the_device_comes_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of updated states that could not be begun is made before anybody looks."""
    # A slow optimizer, wherever it steps: the device steps states that come from the host and go back.
    plain, ours = plainly(), made(zoo=False, update_s=1e-6)
    for model, optimizer, x in (plain, ours):
        model(x).square().mean().backward()
        if model is plain[0]:
            optimizer.step()
    residency = ours[0]._remat_training.engine.residency
    copy_to_host = residency.copy_to_host
    failed: list[Any] = []

    def fails_once(name: str, newer: Tensor) -> Any:
        if not failed:
            failed.append(name)
            raise KeyboardInterrupt
        return copy_to_host(name, newer)

    monkeypatch.setattr(residency, "copy_to_host", fails_once)
    with pytest.raises(KeyboardInterrupt):
        ours[1].step()
    assert failed
    left = {r.newer.data_ptr() for r in residency.residents.values() if r.newer is not None}
    released: set[int] = set()
    monkeypatch.setattr(
        residency.machine, "release_after_copies", lambda tensor: released.add(tensor.data_ptr())
    )
    ours[0].synchronize()
    assert left <= released  # a device's allocator reuses their memory only after the copies
    assert left
    states = ours[1].state_dict()["state"]
    for old, new in ((plain[1].state_dict()["state"][i], state) for i, state in states.items()):
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_handlers_come_back() -> None:
    """What comes meanwhile is handled at the end, once, by the handler that was there."""
    came: list[int] = []

    def handler(number: int, frame: Any) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert [] == came
        assert [signal.SIGINT] == came
        assert handler is signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


class Stop(Exception):
    """What a handler raises."""


def test_handlers_that_raise_keep_no_other_from_running() -> None:
    """Of all signals that came, real-time ones too, each is handled, and every handler is back."""
    numbers = [signal.SIGUSR1, signal.SIGINT, signal.SIGPROF, signal.SIGRTMIN + 1]
    came: list[int] = []

    def handler(number: int, frame: Any) -> None:
        came.append(number)
        raise Stop

    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        with pytest.raises(Stop), uninterrupted():
            assert [None] * 4 == list(map(signal.raise_signal, numbers))
        assert numbers == came
        assert {handler} == {signal.getsignal(number) for number in numbers}
    finally:
        for number, old in before.items():
            signal.signal(number, old)


Pair = tuple[Any, optim.Optimizer, Any, optim.Optimizer, Tensor, threading.Event]


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Plain training and ours after a step, whose first update on the CPU waits for an event."""
    (plain, plainly_steps, x), (ours, steps, _), gate = plainly(), made(), threading.Event()
    machine = ours._remat_training.machine
    work = machine.work

    def held_back(function: Callable[[], object], *args: Any, **options: Any) -> Any:
        monkeypatch.delattr(machine, "work")
        work(gate.wait)
        return work(function, *args, **options)

    for model in (plain, ours):
        model(x).square().mean().backward()
    plainly_steps.step()
    monkeypatch.setattr(machine, "work", held_back, raising=False)
    steps.step()
    return plain, plainly_steps, ours, steps, x, gate


def goes_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The updates go on once somebody waits for them; then see that ours is where plain training is."""
    plain, plainly_steps, ours, steps, x, gate = pair
    wait = Job.wait

    def lets_go(job: Job) -> None:
        gate.set()
        wait(job)

    monkeypatch.setattr(Job, "wait", lets_go)
    try:
        assert all(map(torch.equal, plain.parameters(), ours.module.parameters()))
        losses = []
        for model, optimizer in ((plain, plainly_steps), (ours, steps)):
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
        assert losses[:2] == losses[2:]
    finally:
        gate.set()


WAITS: dict[str, Callable[[Pair], object]] = {
    "synchronize": lambda pair: pair[2].synchronize(),
    "state_dict": lambda pair: pair[3].state_dict(),
    "read": lambda pair: [p.sum() for p in pair[2].module.parameters()],
    "forward": lambda pair: pair[2](pair[4]),
    "step": lambda pair: pair[3].step(),
}


@pytest.mark.parametrize("name", WAITS)
def test_an_interrupted_wait_forgets_nothing(
    under_way: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for updates and is interrupted leaves them awaited by whoever comes next."""
    wait = Job.wait

    def interrupted(job: Job) -> None:
        if threading.current_thread() is threading.main_thread() and not job.has_run():
            raise KeyboardInterrupt
        wait(job)

    with monkeypatch.context() as patched:
        patched.setattr(Job, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            WAITS[name](under_way)
    goes_on(under_way, monkeypatch)


def test_a_call_that_is_refused_waits_for_nothing(under_way: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that fails at what it was given, or in a hook of the user's, leaves updates awaited."""
    _, _, ours, _, x, _ = under_way
    homes = ours._remat_training.engine.residency.residents
    param = next(p for name, p in ours.module.named_parameters() if name not in homes)
    values, param.data = param.data, torch.ones(3, 4)
    with pytest.raises(OffloadMisuse, match="has the shape"):
        ours(x)
    param.data = values

    def bad(module: nn.Module, args: Any) -> None:
        raise ValueError("a bad batch")

    hook = ours.module[0].register_forward_pre_hook(bad)
    with pytest.warns(match="has hooks"), pytest.raises(ValueError, match="a bad batch"):
        ours(x)
    hook.remove()
    goes_on(under_way, monkeypatch)


def test_closing_goes_on_where_it_was_interrupted(under_way: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often: updates are carried out, and then lanes end and the host's memory is given back."""
    plain, _, ours, _, x, gate = under_way

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Job, "wait", interrupted)
        patched.setattr(threaded, "_join", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                ours.close()
    gate.set()
    ours.close()
    assert 0 == ours.host.held_nbytes
    assert all(map(torch.equal, plain.parameters(), ours.module.parameters()))
    with pytest.raises(MachineMisuse, match="it was closed"):
        ours(x)
