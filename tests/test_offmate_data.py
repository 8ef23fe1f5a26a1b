"""Parameters that are given other memory train on from its values, as plainly; what cannot be is one line."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from remat_facade import from_config
from remat_facade.errors import BadConfig
from remat_offload.errors import OffloadMisuse
from tests.offmates import offmate

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
        ours = offmate(moved, X, "50%", optimizer=optim.AdamW(moved.parameters()))
        change(moved)
        with pytest.raises(OffloadMisuse, match=words) as caught:
            ours(X)
        assert "cpu" not in str(caught.value)


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
