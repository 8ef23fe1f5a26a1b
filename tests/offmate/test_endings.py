"""A module that nobody holds any more, or that is closed, leaves no thread and no pinned memory behind."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from remat_executor import RematWarning
from remat_facade import Offmate
from remat_graph import Lane
from remat_offload import HostPool, MachineMisuse, SimulatedMachine
from tests.helpers.offmates import Mapped, offmate


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """References alone end things here."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def lanes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("remat ")]


def made(**options: Any) -> tuple[Offmate, optim.Optimizer, nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.ReLU())])
    optimizer = optim.AdamW(net.parameters())
    x = torch.randn(64, 64)
    return offmate(net, x, "40%", optimizer=optimizer, **options), optimizer, net, x


def test_threads_end_with_the_last_reference() -> None:
    """The optimizer and the original, which others hold, keep none of them."""
    before = lanes()
    model, optimizer, net, x = made()
    model(x).sum().backward()
    optimizer.step()
    assert len(before) + 3 == len(lanes())
    del model
    assert before == lanes()
    assert optimizer.state_dict()["state"]
    assert net(x).isfinite().all()


def test_updates_under_way_are_finished() -> None:
    """What the optimizer was told to do is done when the module goes."""
    one, optimizer, net, x = made()
    one(x).sum().backward()
    optimizer.step()
    one.synchronize()
    expected = [p.clone() for p in net.parameters()]
    other, optimizer, again, x = made()
    other(x).sum().backward()
    optimizer.step()
    del other
    assert all(map(torch.equal, expected, again.parameters()))


def test_a_backward_keeps_its_module() -> None:
    """What is under way needs the lanes, though nobody holds the module."""
    before = lanes()
    model, _, net, x = made()
    loss = model(x).sum()
    del model
    loss.backward()
    assert all(p.grad is not None for p in net.parameters())
    del loss
    assert before == lanes()


def test_closing() -> None:
    """A closed module runs no more, in one line; what it left are ordinary tensors."""
    before = lanes()
    model, optimizer, net, x = made()
    model(x).sum().backward()
    optimizer.step()
    model.close()
    model.close()
    assert before == lanes()
    with pytest.raises(MachineMisuse, match="it was closed") as caught:
        model(x)
    assert "\n" not in str(caught.value)
    assert model.state_dict().keys() == net.state_dict().keys()


def test_a_backward_comes_before_closing() -> None:
    """One that comes after is refused, and told what ended its machine and what to do."""
    model, _, _, x = made()
    loss = model(x).sum()
    model.close()
    with pytest.raises(
        MachineMisuse, match=r"by close\(\) of the module .* backward\(\) .* before"
    ) as caught:
        loss.backward()
    assert "\n" not in str(caught.value)


def test_a_failure_of_the_last_updates_is_told() -> None:
    """By a warning: nobody called what could raise it."""
    model, optimizer, _, x = made()
    model(x).sum().backward()
    optimizer.step()
    model._remat_training.machine.work(lambda: 1 / 0, name="one more update")
    with pytest.warns(RematWarning, match="'one more update' failed on the lane cpu_optimizer") as told:
        del model
    assert [__file__] == [each.filename for each in told]


def test_a_module_that_goes_in_its_own_lane() -> None:
    """Garbage may be collected there, while another lane waits for that one."""
    before = lanes()
    model, _, _, x = made()
    model(x).sum().backward()
    machine, gate, gone = model._remat_training.machine, threading.Event(), weakref.ref(model)
    machine.work(lambda: (gate.wait(), gc.collect()))
    ticket = machine.work(int)
    machine.copy(Lane.TO_DEVICE, torch.zeros(8), torch.zeros(8), [ticket])
    circle: list[Any] = [model]
    circle.append(circle)
    del model, machine, ticket, circle
    gate.set()
    limit_s = time.monotonic() + 30
    while before != lanes() and time.monotonic() < limit_s:
        time.sleep(0.01)
    assert gone() is None
    assert before == lanes()


def test_what_was_given_is_left() -> None:
    """A machine and a pool of the caller's outlive the module."""
    memory = Mapped()
    with SimulatedMachine() as machine, HostPool(20 << 20, memory=memory) as pool:
        model, _, net, _ = made(machine=machine, pool=pool)
        taken = memory.now_nbytes
        del model
        machine.work(int).synchronize()
        assert taken == memory.now_nbytes > 0
        del net


def test_memory_is_given_up() -> None:
    """All blocks go back to where they came from; tensors in them, and leases, do not mind."""
    memory = Mapped()
    pool = HostPool(1 << 20, memory=memory)
    block, lease, idle = pool.allocate(1000), pool.lease(500), pool.allocate(200)
    pool.release(idle)
    block.fill_(7)
    pool.give_up()
    assert 0 == memory.now_nbytes
    assert 7000 == int(block.sum())
    del lease
    pool.release(block)  # as what held it may do when it goes
    assert 0 == pool.statistics.lent_nbytes


def test_a_module_that_cannot_be_built_leaves_nothing() -> None:
    """Nor does one whose plan keeps no budget."""
    before = lanes()
    with pytest.raises(Exception, match="budget"):
        made(host_budget="1KiB")
    assert before == lanes()
