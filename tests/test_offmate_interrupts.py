"""Ctrl-C in the optimizer's step: each parameter is updated, weight and states, or it is as it was."""

import copy
import signal
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from remat_graph import Lane, OptimizerStep
from remat_offload.interrupts import uninterrupted
from tests.offmates import offmate

Kept = list[list[Tensor]]


def made() -> tuple[Any, optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(48, 48), nn.ReLU())])
    optimizer = optim.AdamW(net.parameters(), lr=1e-2)
    x = torch.randn(64, 48)
    return offmate(net, x, "50%", optimizer=optimizer), optimizer, x


def kept(model: Any, optimizer: optim.Optimizer) -> Kept:
    """Each parameter with all that the optimizer keeps for it."""
    model.synchronize()
    states = optimizer.state_dict()["state"]
    params = enumerate(model.module.parameters())
    return [[p.detach().clone(), *(v.clone() for v in states[i].values())] for i, p in params]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


class Interrupt:
    """Raises SIGINT at the k-th line of Python that a step runs in this thread."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self if self.left > 0 else None

    def during(self, step: Any) -> bool:
        """Whether the step was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            step()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            torch.set_grad_enabled(True)  # which torch's own no_grad may not have come to
        return False


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
        places = model._remat_training.states._places
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
    plain, ours = made(), made()
    for model, optimizer, x in (plain, ours):
        model(x).square().mean().backward()
        if model is plain[0]:
            optimizer.step()
    engine = ours[0]._remat_training.engine
    send_home, failed = engine.send_home, []

    def fails_once(name: str, newer: Tensor) -> Any:
        if not failed:
            failed.append(name)
            raise KeyboardInterrupt
        return send_home(name, newer)

    monkeypatch.setattr(engine, "send_home", fails_once)
    with pytest.raises(KeyboardInterrupt):
        ours[1].step()
    assert failed
    ours[0].synchronize()
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
