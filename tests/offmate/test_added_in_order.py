"""Gradients on the host are added before the backward goes on, although another thread adds them on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_graph import Deliver, Placement
from remat_offload.copy_lanes.threaded import Job
from remat_offload.engine import transfer_steps
from remat_offload.engine.accumulation import Accumulation
from remat_offload.engine.transfer_steps import Transfers
from tests.helpers.offmates import offmate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
WIDTH = 32


class Stack(nn.Module):
    """Layers whose parameters are most of the memory, so that a plan keeps them on the host."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Trained:
    """A model whose parameters are on the host, with one gradient in each part of the backward."""

    def __init__(self, device: str) -> None:
        self.x = torch.ones(4, WIDTH, device=device)
        model = Stack().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.module = offmate(model, self.x, "24KiB", optimizer=optimizer, part_nbytes=0)
        values = zip(model.parameters(), self.module.graph.values, strict=False)
        self.on_host = [param for param, value in values if value.placement is Placement.HOST]
        assert len(self.on_host) > 2

    def backward(self) -> None:
        """One forward and backward."""
        self.module(self.x).backward()

    def expected(self) -> list[Tensor]:
        """The gradients of plain training, on the host, of the parameters that are placed there."""
        model = Stack().to(self.x.device)
        model.load_state_dict(self.module.module.state_dict())
        model(self.x).backward()
        on_host = {id(param) for param in self.on_host}
        pairs = zip(self.module.module.parameters(), model.parameters(), strict=True)
        return [p.grad.to("cpu") for ours, p in pairs if id(ours) in on_host and p.grad is not None]

    def are_right(self) -> bool:
        """Whether the gradients on the host are those of plain training."""
        found = [param.grad for param in self.on_host]
        return all(f is not None and torch.equal(e, f) for e, f in zip(self.expected(), found, strict=True))


@pytest.fixture(params=DEVICES)
def trained(request: pytest.FixtureRequest) -> Iterator[Trained]:
    """On each device."""
    found = Trained(request.param)
    yield found
    found.module.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each gradient that was waited for, whether it had been added already."""
    found: list[bool] = []

    def wait(added: threading.Event) -> bool:
        found.append(added.is_set())
        return added.wait(30)

    monkeypatch.setattr(transfer_steps, "Accumulation", lambda: Accumulation(wait))
    return found


def test_each_is_added_before_the_next_step(
    trained: Trained, waits: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread waits in the middle of a hook; that is, one thread at a time uses the engine."""
    goes_on = threading.Event()
    added: list[Tensor] = []
    delivered: list[Tensor] = []  # in earlier parts
    too_early: list[str] = []
    carry_out, finish = Transfers.carry_out, Accumulation.finish

    def watched(self: Transfers, *args: Any) -> Any:
        result = carry_out(self, *args)
        if len(added) < len(delivered):
            too_early.append(type(args[0]).__name__)
            goes_on.set()
        if isinstance(args[0], Deliver):
            delivered.extend(result)
        return result

    def finishing(self: Accumulation) -> None:
        if self._due:
            goes_on.set()
        finish(self)

    def hook(param: Tensor) -> None:
        if trained.x.is_cuda:
            assert goes_on.wait(30)  # the device's thread waits for this hook, or has gone on without it
        added.append(param)

    monkeypatch.setattr(Transfers, "carry_out", watched)
    monkeypatch.setattr(Accumulation, "finish", finishing)
    for param in trained.on_host:
        param.register_post_accumulate_grad_hook(hook)
    trained.backward()
    assert len(added) == len(delivered) == len(trained.on_host)
    assert too_early == []
    assert len(waits) == len(trained.on_host) - 1
    assert trained.x.is_cuda or all(waits)  # the CPU has one thread, which never waits


def test_gradients_that_are_not_added(trained: Trained, waits: list[bool]) -> None:
    """Those that `torch.autograd.grad` returns, and those of other inputs: nothing waits for them."""
    first, *others = trained.on_host
    found = torch.autograd.grad(trained.module(trained.x), trained.on_host)
    assert waits == []
    trained.module(trained.x).backward(inputs=[first])
    assert len(waits) <= 1
    assert torch.equal(first.grad, found[0])
    assert all(param.grad is None for param in others)


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the copies that the delivery of a gradient waited for."""
    found: list[str] = []
    delivering: list[int] = []
    synchronize, deliver = Job.synchronize, Transfers.deliver

    def noting(self: Job) -> None:
        if delivering:
            found.append(self.name)
        synchronize(self)

    def watched(self: Transfers, value: int) -> Tensor:
        delivering.append(value)
        try:
            return deliver(self, value)
        finally:
            delivering.clear()

    monkeypatch.setattr(Job, "synchronize", noting)
    monkeypatch.setattr(Transfers, "deliver", watched)
    return found


def test_no_wait_for_a_copy_that_nothing_reads(trained: Trained, synchronized: list[str]) -> None:
    """A new gradient becomes ``.grad`` while its bytes arrive; who reads it waits. Others are added to it."""
    trained.backward()
    assert synchronized == []
    assert trained.are_right()
    trained.backward()
    assert len(synchronized) == len(trained.on_host)
    for param in trained.on_host:
        assert param.grad is not None
        param.grad.div_(2)
    assert trained.are_right()
    trained.module.zero_grad()
    trained.module.clip_grad_norm_(1e9)
    trained.backward()
    trained.module.zero_grad()  # the copies may be on their way
    trained.module.synchronize()
    synchronized.clear()
    for _ in range(2):
        trained.backward()
        trained.module.clip_grad_norm_(1e9)
        assert trained.are_right()
        trained.module.zero_grad()
    assert synchronized == []


@pytest.mark.parametrize("reader", ["hook", "grad", "anomaly"])
def test_readers_get_whole_gradients(trained: Trained, synchronized: list[str], reader: str) -> None:
    """A hook of the tensor, `torch.autograd.grad`, and autograd's search for NaN."""
    found: list[Tensor] = []
    if reader == "hook":
        for param in reversed(trained.on_host):
            param.register_hook(lambda gradient: found.insert(0, gradient.clone()))
        trained.backward()
    elif reader == "grad":
        found += [g.clone() for g in torch.autograd.grad(trained.module(trained.x), trained.on_host)]
    else:
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
            trained.backward()
        found += [param.grad.clone() for param in trained.on_host if param.grad is not None]
    assert len(synchronized) == len(trained.on_host)
    assert all(map(torch.equal, trained.expected(), found))
    assert len(found) == len(trained.on_host)


def test_a_gradient_that_autograd_copies() -> None:
    """Not in the parameter's layout, it is cloned; the bytes that arrive later are then copied, too."""
    param = nn.Parameter(torch.zeros(2, 3))
    bytes_of = torch.zeros(3, 2)
    accumulation = Accumulation()

    class Copy:
        done = False

        def query(self) -> bool:
            return self.done

        def synchronize(self) -> None:
            bytes_of.fill_(7.0)
            self.done = True

    class Delivering(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            assert accumulation.expect(param, Copy())
            return bytes_of.T

    Delivering.apply(param).backward()
    assert param.grad is not None
    assert param.grad.data_ptr() != bytes_of.data_ptr()
    assert torch.equal(param.grad, torch.full((2, 3), 7.0))


class Done:
    """A copy that has ended."""

    def query(self) -> bool:
        """It has."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


def test_waiting_ends() -> None:
    """When the hooks of the parameter have run in the other thread; or at the limit, with a warning."""
    param = nn.Parameter(torch.ones(3))
    waiting, order = threading.Event(), []

    def wait(added: threading.Event) -> bool:
        waiting.set()
        return added.wait(30)

    accumulation = Accumulation(wait)

    class Delivering(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            accumulation.expect(param, Done())
            accumulation.finish()  # not in this part, at whose end autograd gets it
            accumulation.begin_part()
            thread.start()
            return torch.ones(3)

    def other() -> None:
        accumulation.finish()
        order.append("continued")

    def hook(_: Tensor) -> None:
        assert waiting.wait(30)
        order.append("added")

    thread = threading.Thread(target=other)
    param.register_post_accumulate_grad_hook(hook)
    Delivering.apply(param).backward()
    thread.join(30)
    assert order == ["added", "continued"]
    late = Accumulation(lambda added: False)
    accumulation = late
    thread = threading.Thread(target=list)
    Delivering.apply(param).backward()
    with pytest.warns(UserWarning, match="was not added within 10 s"):
        late.finish()
    late.finish()  # once
