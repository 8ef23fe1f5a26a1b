"""Clipping beside the backward and the step has the bits of `torch.nn.utils.clip_grad_norm_`."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from remat_graph import Placement
from remat_offload.copy_lanes.optimizer_threads import kept_threads
from tests.helpers.offmates import MODELS, Run, differences, offmate

INF = float("inf")
MAKE, BATCHES = MODELS["llama"]


@pytest.fixture(scope="module")
def pair() -> list[Run]:
    """Plain training and ours with the same groups, in another order than the model's parameters."""
    runs = []
    for ours in (False, True):
        model = MAKE()
        parameters = list(model.parameters())
        groups = [{"params": parameters[5:], "weight_decay": 0.0}, {"params": parameters[:5]}]
        optimizer = AdamW(groups, lr=1e-2)
        called = offmate(model, BATCHES(0), "35%", optimizer=optimizer) if ours else model
        runs.append(Run(called, optimizer, BATCHES))
    return runs


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Elements of the tensors whose norms are taken in the calling thread, call by call."""
    calls, take = [], torch.nn.utils.get_total_norm

    def watched(tensors: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            calls.append(sum(tensor.numel() for tensor in tensors))
        return take(tensors, *args, **options)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", watched)
    return calls


def clipping(run: Run, found: list[float], *terms: tuple[Any, ...], **options: bool) -> Callable[..., Any]:
    """Each clips in its own way and notes the norm."""

    def clip(parameters: Any, most: Any) -> None:
        for each in terms:
            if hasattr(run.model, "plan"):
                norm = run.model.clip_grad_norm_(*each, **options)
            else:
                norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), *each, **options)
            found.append(norm.item())

    return clip


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_bits_of_torch(pair: list[Run], asked: list[Any], accumulation: int) -> None:
    """Other norms and limits from step to step, none, two at once; and steps that nobody clips."""
    plan = [[(1.0,)], [(1.0,)], [(0.5, INF)], [(0.5, "inf")], [], [(0.3, 1)], [(1.0,), (0.5, 3.0)], [(2, 0)]]
    norms = []
    for run in pair:
        found: list[Any] = []
        run.accumulation, run.clip = accumulation, None
        run.losses.clear()
        for terms in plan:
            run.clip = clipping(run, found, *terms)
            run.train(1)
        norms.append(found)
    assert norms[0] == norms[1]
    assert [] == differences(*pair)
    assert max(norms[0]) > 1.0, "nothing was clipped"


@pytest.mark.parametrize("lane_threads", [1, 3])
def test_norms_are_taken_beside_the_backward(pair: list[Run], asked: list[Any], lane_threads: int) -> None:
    """Once it is known that they are wanted: the caller only puts them together.

    Also where updates use another number of threads than the caller.
    """
    ours = pair[1]
    with kept_threads():
        ours.model._remat_training.machine.work(lambda: torch.set_num_threads(lane_threads)).synchronize()
    ours.accumulation, ours.clip = 2, lambda parameters, most: ours.model.clip_grad_norm_(most)
    ours.train(4)
    values = dict(zip(ours.model.module.parameters(), ours.model.graph.values, strict=False))
    on_host = sum(value.placement is Placement.HOST for value in values.values())
    resident = sum(p.numel() for p, value in values.items() if value.placement is Placement.DEVICE)
    assert on_host > 1
    assert asked[-1] == resident + on_host
    _even(pair)


def _even(pair: list[Run]) -> None:
    """Let the plain run be where ours is."""
    plain, ours = pair
    plain.model.load_state_dict(ours.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    plain.step, plain.losses, ours.losses = ours.step, [], []


def backward(pair: list[Run], step: int) -> None:
    """One backward each, of the same batch."""
    for run in pair:
        torch.manual_seed(step)
        run.model(**BATCHES(step)).loss.backward()


def gradients(run: Run) -> list[Tensor]:
    """The gradients as a user reads them, without waiting for anything else."""
    model = run.model.module if hasattr(run.model, "plan") else run.model
    return [p.grad.clone() for p in model.parameters()]


def same(pair: list[Run]) -> bool:
    """Whether both have the same gradients."""
    return all(torch.equal(a, b) for a, b in zip(*map(gradients, pair), strict=True))


def test_gradients_read_after_clipping_are_clipped(pair: list[Run]) -> None:
    """Before the step, and added to by another backward instead of a step."""
    for order in ("read", "add", "step"):
        backward(pair, 1)
        found: list[Any] = []
        for run in pair:
            clipping(run, found, (0.1,))(None, 1.0)
        assert found[0] == found[1]
        if order == "read":
            assert same(pair)
        if order == "add":
            backward(pair, 2)
            assert same(pair)
        if order == "step":
            for run in pair:
                run.optimizer.step()
            assert same(pair)
            assert [] == differences(*pair)
        for run in pair:
            run.optimizer.zero_grad()


def test_gradients_changed_before_clipping(pair: list[Run]) -> None:
    """By the user, by a scaler: what the lane found is none of theirs."""
    backward(pair, 3)
    found: list[Any] = []
    for run in pair:
        model = run.model.module if hasattr(run.model, "plan") else run.model
        for p in model.parameters():
            p.grad.mul_(0.25)
        first = next(iter(model.parameters()))
        first.grad = first.grad * 2
        clipping(run, found, (0.1,))(None, 1.0)
    assert found[0] == found[1]
    assert same(pair)


def test_a_norm_that_is_not_finite(pair: list[Run]) -> None:
    """Torch's error, and gradients as they were; without asking for it, torch's numbers."""
    for run in pair:
        model = run.model.module if hasattr(run.model, "plan") else run.model
        next(iter(model.parameters())).grad.view(-1)[0] = INF
    before = gradients(pair[1])
    with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
        pair[1].model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(pair[1]), strict=True))
    for run in pair:
        clipping(run, [], (1.0,), foreach=False)(None, 1.0)
    pairs = zip(*map(gradients, pair), strict=True)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)
    for run in pair:
        run.optimizer.zero_grad()


@pytest.mark.parametrize("ends", ["closed", "let go", "built anew"])
def test_nothing_is_left_on_parameters(ends: str) -> None:
    """Once a module that has clipped is gone, gradients are clipped, and its original trains without it."""
    torch.manual_seed(0)
    original = MAKE()
    optimizer = AdamW(original.parameters(), lr=1e-2)
    called = offmate(original, BATCHES(0), "35%", optimizer=optimizer)
    called(**BATCHES(0)).loss.backward()
    assert called.clip_grad_norm_(0.1) > 0.2
    if ends == "closed":
        called.close()
    called = offmate(original, BATCHES(0), "40%", optimizer=optimizer) if ends == "built anew" else original
    norm = torch.nn.utils.get_total_norm([p.grad for p in original.parameters()])
    torch.testing.assert_close(torch.tensor(0.1), norm, rtol=1e-3, atol=0)
    optimizer.zero_grad()
    called(**BATCHES(1)).loss.backward()
    assert all(p.grad is not None for p in original.parameters())
