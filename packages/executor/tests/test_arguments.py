"""Arguments on which ops are measured: integers are what their ops compute, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor.capture.joint_graph import capture
from remat_executor.costs.arguments import Arguments
from remat_executor.costs.measure import measure
from remat_executor.inspection.tensors import collect
from remat_executor.translation.recipes import CallOperator, Recipe
from remat_executor.translation.translate import translate

SEED = 1234
Seen = list[tuple[str, Any]]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """The calls of the operators below: their names, and the integers that they read."""
    _CALLS.clear()
    yield _CALLS
    _CALLS.clear()


_CALLS: Seen = []


@torch.library.custom_op("remat_arguments::attend", mutates_args=())
def attend(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As attention with dropout: a result, a seed and an offset."""
    _CALLS.append(("attend", None))
    return x.clone(), torch.tensor(SEED), torch.tensor(len(_CALLS))


@attend.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty((), dtype=torch.long), torch.empty((), dtype=torch.long)


@torch.library.custom_op("remat_arguments::attend_backward", mutates_args=())
def attend_backward(gradient: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """Reads the seed on the host."""
    _CALLS.append(("attend_backward", (int(seed), int(offset))))
    return gradient.clone()


@attend_backward.register_fake
def _(gradient: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return torch.empty_like(gradient)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> Tensor:
    return attend_backward(gradient, *ctx.saved_tensors)


attend.register_autograd(_backward, setup_context=_save)


class Model(nn.Module):
    """A function of a parameter and the inputs."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(*shape))
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.weight, *inputs).sum()


def prepared(model: nn.Module, *inputs: Tensor) -> tuple[Arguments, dict[str, Recipe]]:
    """The maker of a model's arguments, and the recipes of its ops by their targets."""
    tensors = collect(model, inputs, {})
    captured = capture(model, tensors)
    translation = translate(captured, tensors, name="test")
    given = dict(zip(captured.externals, tensors.flat, strict=True))
    recipes = {op.target: r for op, r in zip(translation.graph.ops, translation.recipes, strict=True)}
    return Arguments(captured.graph_module, given, translation), recipes


def made_for(target: str, model: nn.Module, *inputs: Tensor) -> tuple[Any, ...]:
    """The positional arguments on which an op of a model's step is measured."""
    arguments, recipes = prepared(model, *inputs)
    recipe = next(r for name, r in recipes.items() if name.startswith(target))
    assert isinstance(recipe, CallOperator)
    with torch.no_grad():
        made: tuple[Any, ...] = arguments.arguments(recipe.node, False, {})[0]
    return made


def measured(target: str, model: nn.Module, *inputs: Tensor) -> Any:
    arguments, recipes = prepared(model, *inputs)
    recipe = next(r for name, r in recipes.items() if name.startswith(target))
    return measure({target: arguments.request(recipe, repeat=False)})[target]


def test_a_backward_gets_the_seeds_of_its_forward(seen: Seen) -> None:
    """A backward that reads seeds gets those that the forward returns, both from one run."""
    arguments, recipes = prepared(Model(lambda w: attend(w)[0], 4))
    recipe = next(r for name, r in recipes.items() if name.startswith("remat_arguments.attend_backward"))
    run = arguments.request(recipe, repeat=False)()
    run()
    run()
    assert [name for name, _ in seen].count("attend") == 1
    assert {read for name, read in seen if name == "attend_backward"} == {(SEED, 1)}


def test_computed_indices() -> None:
    """A gather at computed indices reads those that the model computes from the caller's tensors."""
    ids = torch.tensor([3, 1, 2, 0])

    def at_computed(weight: Tensor, ids: Tensor) -> Tensor:
        return weight[(2 * ids + torch.arange(4)) % 8].exp()

    made = made_for("aten.index_put", Model(at_computed, 8, 5), ids)
    assert torch.equal((2 * ids + torch.arange(4)) % 8, made[1][0])


def test_indices_of_floats() -> None:
    """Indices that an op finds among floats are real ones, one for each window, and not all the same."""

    def pooled(weight: Tensor) -> Tensor:
        return nn.functional.max_pool2d(weight, 2)

    indices = made_for("aten.max_pool2d_with_indices_backward", Model(pooled, 2, 3, 8, 8))[-1]
    rows, columns = indices // 8, indices % 8
    assert torch.equal(torch.arange(4).view(4, 1).expand_as(rows), rows // 2)
    assert torch.equal(torch.arange(4).expand_as(columns), columns // 2)


def test_the_bytes_of_producers_do_not_count() -> None:
    """The op that computes indices runs before the measured one is observed."""

    def pooled(weight: Tensor) -> Tensor:
        return nn.functional.max_pool2d(weight, 2).exp()

    model = Model(pooled, 2, 3, 64, 64)
    cost = measured("aten.max_pool2d_with_indices_backward", model)
    assert (cost.workspace_nbytes, cost.output_nbytes) == (0, model.weight.nbytes)


def test_shared_producers_run_once(seen: Seen) -> None:
    """Integers that meet again come from one run, however many ways lead to them."""

    def doubled(weight: Tensor) -> Tensor:
        index = attend(weight)[1]
        for _ in range(12):
            index = index + index
        return weight[(index + torch.arange(4)) % 8].exp()

    made = made_for("aten.index_put", Model(doubled, 8))
    assert torch.equal((SEED * 2**12 + torch.arange(4)) % 8, made[1][0])
    assert len(seen) == 1


def test_same_seed_same_arguments() -> None:
    """Arguments depend on the generator alone."""

    def sampled(weight: Tensor) -> Tensor:
        return weight[torch.randint(8, (6,))] + weight.topk(6).indices

    model = Model(lambda w: sampled(w.exp()).exp(), 8)
    both = []
    for _ in range(2):
        torch.manual_seed(5)
        both.append(made_for("aten.index_put", model))
    assert torch.equal(both[0][1][0], both[1][1][0])
    assert torch.equal(both[0][2], both[1][2])


@torch.library.custom_op("remat_arguments::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    """Refuses whatever it gets."""
    raise ValueError("not these")


@picky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.long)


def test_a_producer_that_refuses() -> None:
    """Zeros are indices of anything, so an op whose indices cannot be computed is measured with them."""
    made = made_for("aten.index_put", Model(lambda w: w[picky(w)].exp(), 8))
    assert torch.equal(torch.zeros(8, dtype=torch.long), made[1][0])


@pytest.mark.parametrize("kept_if_true", [False, True])
@pytest.mark.parametrize("masks", [1, 2])
def test_a_mask_that_keeps_indices_in_range(masks: int, kept_if_true: bool) -> None:
    """A kernel that refuses what a random mask lets through gets what the model's own mask lets through.

    So does `CrossEntropyLoss` with class weights, label smoothing and ignored labels.
    """

    def gathered(weight: Tensor, labels: Tensor) -> Tensor:
        valid = labels >= 0
        if masks == 2:
            valid = valid & (labels != -100)
        inside = torch.where(valid, labels, 0) if kept_if_true else labels.masked_fill(~valid, 0)
        return weight.gather(0, inside).exp()

    measured("aten.gather", Model(gathered, 8), torch.tensor([3, -100, 7, -100]))


def test_a_shortage_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that finds no memory is not run again on arguments that need more of it."""
    arguments, recipes = prepared(Model(lambda w: attend(w)[0].exp(), 4))
    runs = []

    def exhausted(*_: object, **__: object) -> None:
        runs.append(1)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("remat_executor.costs.arguments.target_of", lambda node: exhausted)
    recipe = next(r for name, r in recipes.items() if name.startswith("aten.exp"))
    with pytest.raises(torch.OutOfMemoryError):
        arguments.request(recipe, repeat=False)()()
    assert len(runs) == 1
