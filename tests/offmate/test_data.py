"""Parameters that are given other memory train on from its values, as plainly; what cannot be is one line."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from remat_facade import BadConfig, from_config
from remat_graph import Lane, Start
from remat_offload import OffloadMisuse
from tests.helpers.offmates import offmate

X = torch.randn(64, 48, generator=torch.Generator().manual_seed(5))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(48, 48), nn.ReLU())])


def step(model: Callable[[Tensor], Tensor], optimizer: optim.Optimizer) -> float:
    loss = model(X).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def flat(params: list[nn.Parameter], _: list[Tensor]) -> None:
    vector_to_parameters(parameters_to_vector(params) * 0.5, params)


def halved(params: list[nn.Parameter], _: list[Tensor]) -> None:
    for p in params:
        p.data = p.data * 0.5


def transposed(params: list[nn.Parameter], _: list[Tensor]) -> None:
    for p in params:
        p.data = p.data.t()


def exchanged(params: list[nn.Parameter], averages: list[Tensor]) -> None:
    """As an average is put in the parameters' place, and taken out again."""
    for p, average in zip(params, averages, strict=True):
        p.data, average.data = average.data, p.data


def crossed(params: list[nn.Parameter], _: list[Tensor]) -> None:
    """Two of the model's own."""
    params[0].data, params[2].data = params[2].data, params[0].data


CHANGES = [flat, halved, transposed, exchanged, crossed]


def trained(model: nn.Module, optimizer: optim.Optimizer, change: Callable[..., None]) -> list[Any]:
    """Losses and averages of some steps, with the same change between any two of them."""
    params = list(model.parameters())
    averages = [p.detach().clone() * 0.9 for p in params]
    found: list[Any] = []
    for _ in range(4):
        found.append(step(model, optimizer))
        change(list(model.parameters()), averages)
        found += [a.sum().item() for a in averages]
    return found


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_training_goes_on_from_there(change: Callable[..., None]) -> None:
    """Bit for bit, for parameters at home on either side; and what others hold stays what it is."""
    plain, moved = net(), net()
    optimizer = optim.AdamW(moved.parameters(), lr=1e-2)
    ours = offmate(moved, X, "50%", optimizer=optimizer)
    expected = trained(plain, optim.AdamW(plain.parameters(), lr=1e-2), change)
    lent_nbytes = ours.host.lent_nbytes
    assert expected == trained(ours, optimizer, change)
    ours(X)
    assert lent_nbytes <= ours.host.lent_nbytes <= 2 * lent_nbytes


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_gradients_move_with_their_parameters(device: str) -> None:
    """Gradients that a model on the CPU has when it is built are added to on the device."""
    model = net()
    model(X).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    x = X.to(device)
    ours = offmate(model, x, "100MiB", optimizer=optim.AdamW(model.parameters()))
    assert {x.device} == {p.device for p in model.parameters()}
    ours(x).square().mean().backward()
    after = [p.grad for p in model.parameters() if p.grad is not None]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.cpu(), 2 * old)


def stepped_after(model: nn.Module, optimizer: optim.Optimizer, change: Callable[..., None]) -> list[Any]:
    """Losses of some steps, with a change between each one's backward and the optimizer's step."""
    averages = [p.detach().clone() * 0.9 for p in model.parameters()]
    found: list[Any] = []
    for _ in range(4):
        loss = model(X).square().mean()
        loss.backward()
        change(list(model.parameters()), averages)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), *(a.sum().item() for a in averages)]
    return [*found, *(p.sum().item() for p in model.parameters())]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_step_goes_on_from_there(change: Callable[..., None]) -> None:
    """As weights are put back that were rounded, or moved, for the forward and the backward alone."""
    plain, moved = net(), net()
    optimizer = optim.AdamW(moved.parameters(), lr=1e-2)
    ours = offmate(moved, X, "50%", optimizer=optimizer)
    expected = stepped_after(plain, optim.AdamW(plain.parameters(), lr=1e-2), change)
    assert expected == stepped_after(ours, optimizer, change)


@pytest.mark.parametrize("in_backward", [False, True])
def test_between_a_forward_and_its_backward(in_backward: bool) -> None:
    """Refused: plainly, some operators' backwards would read the old values and others' the new ones."""
    moved = net()
    optimizer = optim.AdamW(moved.parameters())
    ours = offmate(moved, X, "50%", optimizer=optimizer, optimizer_in_backward=in_backward)
    for name, p in list(ours.named_parameters()):
        optimizer.zero_grad()
        loss = ours(X).square().mean()
        p.data = p.data * 0.5
        with pytest.raises(OffloadMisuse, match=f"{name} was given other memory between a forward and its"):
            loss.backward()
        del loss
        loss = ours(X).square().mean()
        with torch.no_grad():
            halved([p], [])
            ours(X)
        with pytest.raises(OffloadMisuse, match=f"{name} was given other memory between a forward and its"):
            loss.backward()
        del loss


@pytest.mark.parametrize("in_backward", [False, True])
def test_exchanged_between_a_forward_and_its_backward(in_backward: bool) -> None:
    """For an evaluation, and back again: nothing has happened."""
    losses = []
    for planned in (False, True):
        model: Any = net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        averages = [p.detach().clone() * 0.9 for p in model.parameters()]
        if planned:
            model = offmate(model, X, "50%", optimizer=optimizer, optimizer_in_backward=in_backward)
        for _ in range(3):
            loss = model(X).square().mean()
            exchanged(list(model.parameters()), averages)
            with torch.no_grad():
                losses.append(model(X).sum().item())
            exchanged(list(model.parameters()), averages)
            loss.backward()
            if not (planned and in_backward):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:6] == losses[6:]


def test_written_between_a_forward_and_its_backward() -> None:
    """What the backward brings from the host once more would not be what the forward read."""
    moved = net()
    ours = offmate(moved, X, "30%", optimizer=optim.AdamW(moved.parameters()))
    loss = ours(X).square().mean()
    steps = ours.plan.schedule.steps
    brought = [s.transfer.value for s in steps if isinstance(s, Start) and s.transfer.lane is Lane.TO_DEVICE]
    again = [p for i, p in enumerate(moved.parameters()) if brought.count(i) > 1]
    assert again
    with torch.no_grad():
        again[0].mul_(0.5)
    with pytest.raises(OffloadMisuse, match="was written in place between a forward and its backward"):
        loss.backward()


def test_memory_that_two_share() -> None:
    """One's update would be the other's, in whatever order; columns of one matrix share nothing."""
    moved = net()
    optimizer = optim.AdamW(moved.parameters())
    ours = offmate(moved, X, "50%", optimizer=optimizer)
    params = dict(moved.named_parameters())
    whole = torch.ones(48, 96)
    params["0.weight"].data, params["2.weight"].data = whole[:, ::2], whole[:, 1::2]
    ours(X)
    for name in ("2.weight", "8.weight"):
        mine = params[name].data
        params["0.weight"].data = params[name].data
        with pytest.raises(
            OffloadMisuse, match=f"0.weight and {name} share memory|{name} and 0.weight share"
        ):
            ours(X)
        assert params[name].data_ptr() == mine.data_ptr()
        params["0.weight"].data = mine.clone()
        ours(X)
    params["0.weight"].data = params["2.weight"].data
    with pytest.raises(OffloadMisuse, match="are two parameters in the same memory"):
        offmate(moved, X, "50%", optimizer=optimizer)


def test_memory_that_is_larger_goes_home() -> None:
    """The first of a vector's parameters would hold all of it, on the device too."""
    moved = net()
    ours = offmate(moved, X, "80%", optimizer=optim.AdamW(moved.parameters()))
    assert "0.weight" not in ours._remat_training.engine.residency.residents
    expected = [p.untyped_storage().nbytes() for p in moved.parameters()]
    flat(list(moved.parameters()), [])
    ours(X)
    assert expected == [p.untyped_storage().nbytes() for p in moved.parameters()]


def replaced(moved: Any) -> None:
    moved[4].weight = nn.Parameter(torch.zeros(48, 48))


def child_assigned(moved: Any) -> None:
    moved[4].load_state_dict(copy.deepcopy(moved[4].state_dict()), assign=True)


def assigned(moved: Any) -> None:
    moved.load_state_dict(copy.deepcopy(moved.state_dict()), assign=True)


@pytest.mark.parametrize("change", [replaced, child_assigned, assigned], ids=lambda change: change.__name__)
@pytest.mark.parametrize("in_backward", [False, True])
def test_another_parameter(change: Callable[..., None], in_backward: bool) -> None:
    """The optimizer would go on to train the old one: one line says so."""
    moved = net()
    optimizer = optim.AdamW(moved.parameters())
    ours = offmate(moved, X, "50%", optimizer=optimizer, optimizer_in_backward=in_backward)
    change(moved)
    with pytest.raises(OffloadMisuse, match="is another Parameter than the one that was planned"):
        ours(X)


def new_tensors(states: list[dict[str, Tensor]]) -> None:
    for state in states:
        state["exp_avg"] = state["exp_avg"] * 0.5


def new_memory(states: list[dict[str, Tensor]]) -> None:
    for state in states:
        state["exp_avg"].data = state["exp_avg"].data * 0.5


@pytest.mark.parametrize("change", [new_tensors, new_memory], ids=lambda change: change.__name__)
@pytest.mark.parametrize("in_backward", [False, True])
def test_states_go_on_from_there(change: Callable[..., None], in_backward: bool) -> None:
    """Bit for bit, wherever they are at home and are stepped; and what was placed on the host is again."""
    found: list[Any] = []
    for planned in (False, True):
        model: Any = net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        params = list(model.parameters())
        if planned:
            model = offmate(model, X, "50%", optimizer=optimizer, optimizer_in_backward=in_backward)
        for _ in range(4):
            model(X).square().mean().backward()
            if not (planned and in_backward):
                optimizer.step()
            optimizer.zero_grad()
            if planned:
                model.synchronize()
            change([optimizer.state[p] for p in params])
        found.append([p.detach() for p in params] + [optimizer.state[p]["exp_avg"] for p in params])
    assert all(map(torch.equal, *found))
    model(X)
    residency = model._remat_training.engine.residency
    names = [f"{name}.exp_avg" for name, _ in model.module.named_parameters()]
    homes = [
        (residency.residents[name], p)
        for name, p in zip(names, params, strict=True)
        if name in residency.residents
    ]
    assert homes
    assert all(home.whole.data_ptr() == optimizer.state[p]["exp_avg"].data_ptr() for home, p in homes)


def test_homes_that_were_left_are_given_back() -> None:
    """Once nobody holds them."""
    moved = net()
    ours = offmate(moved, X, "50%", optimizer=optim.AdamW(moved.parameters()))
    before = ours.host.lent_nbytes
    held = [p.data for p in ours.parameters()]
    halved(list(ours.parameters()), [])
    ours(X)
    assert ours.host.lent_nbytes > before
    del held
    halved(list(ours.parameters()), [])
    ours(X)
    assert before == ours.host.lent_nbytes


def scaled(params: list[nn.Parameter], _: list[Tensor]) -> None:
    for p in params:
        p.data.mul_(0.5)


@pytest.mark.parametrize("change", [flat, halved, scaled], ids=lambda change: change.__name__)
def test_masters_go_on_from_there(change: Callable[..., None]) -> None:
    """What is assigned, or written by way of `.data`, counts for parameters in 16 bits, on either side."""
    moved = net().to(torch.bfloat16)
    optimizer = optim.SGD(moved.parameters(), lr=0.0, momentum=0.5)
    ours = offmate(moved, X.bfloat16(), "50%", optimizer=optimizer, master_weights=True)
    before = [p.detach().clone() for p in ours.parameters()]
    for _ in range(2):
        step(lambda x: ours(x.bfloat16()), optimizer)
        change(list(ours.parameters()), [])
    step(lambda x: ours(x.bfloat16()), optimizer)
    assert all(torch.equal(p * 0.25, q) for p, q in zip(before, ours.parameters(), strict=True))


def test_other_types_and_shapes() -> None:
    """The message names what differs, and nothing else."""
    for change, words in (
        (lambda m: m.half(), "is torch.float16 now, and was planned as torch.float32"),
        (lambda m: setattr(m[0].weight, "data", torch.ones(3, 4)), r"has the shape \(3, 4\) now"),
    ):
        moved = net()
        optimizer = optim.AdamW(moved.parameters())
        ours = offmate(moved, X, "50%", optimizer=optimizer)
        ours(X).square().mean().backward()
        change(moved)
        with pytest.raises(OffloadMisuse, match=words) as caught:
            ours(X)
        assert "cpu" not in str(caught.value)
        with pytest.raises(OffloadMisuse, match=words):
            optimizer.step()


def test_assigning_a_state_dict() -> None:
    """It would part the model from its optimizer."""
    moved = net()
    ours = offmate(moved, X, "50%", optimizer=optim.AdamW(moved.parameters()))
    with pytest.raises(OffloadMisuse, match="assign=True"):
        ours.load_state_dict(copy.deepcopy(ours.state_dict()), assign=True)


@pytest.mark.parametrize("option", [{"ranks": "together"}, {"runtime": "inductor"}, {"plan": None}])
def test_options_that_it_lacks(option: dict[str, Any]) -> None:
    """They are named, in one line."""
    with pytest.raises(BadConfig, match=f"offmate has no option {next(iter(option))}") as caught:
        from_config(net(), X, "50%", "offmate", **option)
    assert "\n" not in str(caught.value)
