"""What a forward returns, and where it is called: written outputs, unused ones, transforms, autocast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor import CaptureError, PlannedModule, RematWarning, UnplannedUse
from tests.helpers.planners import repeat_at_random
from tests.helpers.small_forward import Small, assert_trains_alike, planned


@pytest.mark.parametrize("victim", ["input", "buffer", "held", "average", "view"])
def test_a_written_tensor_that_is_returned(victim: str, cache: Path) -> None:
    """The caller gets the tensor itself, written once."""

    def forward(m: Small, x: Tensor) -> Any:
        if victim == "input":
            return m.middle(x.add_(1)).sum(), x
        loss = m.middle(x).sum()
        if victim == "buffer":
            return loss, m.scale.add_(1)
        if victim == "held":
            return loss, m.table.add_(1)
        average = m.scale.mul_(0.9).add_(m.first(x).detach().mean(0))
        return loss, average if victim == "average" else average[:3]

    x = torch.randn(8, 16)
    found = []
    for plan in (False, True):
        torch.manual_seed(0)
        model = Small(forward)
        module = planned(model, cache, x.clone()) if plan else model
        mine = x.clone()
        results = [module(mine)[1].clone() for _ in range(3)]
        found.append([*results, mine, model.scale.clone(), model.table.clone()])
    for expected, actual in zip(*found, strict=True):
        assert torch.equal(expected, actual)


def test_a_change_of_shape_in_place_is_refused(cache: Path) -> None:
    """``unsqueeze_`` on the caller's tensor."""
    with pytest.raises(CaptureError, match=r"shape of an input in place.*unsqueeze\(0\)"):
        planned(Small(lambda m, x: m.middle(x.unsqueeze_(0)).sum()), cache, torch.randn(8, 16))


def test_a_submodule_used_again_elsewhere(cache: Path) -> None:
    """The same object under a second name is another model."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    module = planned(model, cache, x)
    model.append(model[0])
    with pytest.warns(RematWarning, match="modules changed"):
        result = module(x)
    assert torch.equal(result, model(x))


def test_a_buffer_that_requires_a_gradient_later(cache: Path) -> None:
    """It gets one."""
    x = torch.randn(8, 16)
    module = planned(Small(lambda m, x: (m.middle(x) * m.scale).sum()), cache, x)
    module.scale.requires_grad_()
    with pytest.warns(RematWarning, match=r"buffers \(.*\) changed"):
        module(x).backward()
    gradient, module.scale.grad = module.scale.grad, None
    module.module(x).backward()
    assert torch.equal(gradient, module.scale.grad)


def test_zeros_for_an_unused_output_never_make_a_number(cache: Path) -> None:
    """A root of zero in a branch that the loss does not use: eager's gradients are finite, a product with
    zeros is not.
    """

    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(x)
            return hidden.square().sum(-1).sqrt(), self.head(hidden)

    x = torch.randn(3, 4)
    x[1] = 0
    module = planned(Distances(), cache, x)
    with pytest.raises(UnplannedUse, match=r"not finite.*differentiate=\[\.\.\.\]"):
        module(x)[1].sum().backward()
    chosen = PlannedModule(module.module, (x,), {}, repeat_at_random(4), cache_dir=cache, differentiate=[1])
    chosen.zero_grad()
    chosen(x)[1].sum().backward()
    assert chosen.body.weight.grad.isfinite().all()


class Reads(TorchDispatchMode):
    """Counts the reads of a tensor's value, each of which waits for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_wait_for_all_gradients_that_zeros_may_have_spoilt(cache: Path, dtype: torch.dtype) -> None:
    """Gradients of a shared trunk are checked together, also where their sum is no number of their dtype."""

    def forward(m: Any, x: Tensor) -> Any:
        hidden = m.middle(x)
        return hidden, hidden.square()

    x = torch.full((8, 16), 0.5, dtype=dtype)
    module = PlannedModule(
        Small(forward).to(dtype), (x,), {}, repeat_at_random(4), cache_dir=cache, part_nbytes=0
    )
    assert module.parts == 4
    with Reads() as reads:
        (module(x)[0].sum() * 1024).backward()
    assert reads.count == 1
    assert all(p.grad.isfinite().all() for p in module.parameters())
    assert dtype == torch.float32 or module.last.bias.grad.sum().isinf()


def test_hooks_on_the_planned_module_are_its_own(cache: Path) -> None:
    """A full backward hook is called, once."""
    x = torch.randn(8, 16, requires_grad=True)
    module = planned(Small(lambda m, x: m.middle(x).sum()), cache, x)
    calls: list[int] = []
    module.register_full_backward_hook(lambda *_: calls.append(1))
    module(x).backward()
    assert calls == [1]


def test_dropping_everything_draws_nothing(cache: Path) -> None:
    """Dropout with a rate of 1 leaves the generator where it was, as in eager."""
    assert_trains_alike(lambda m, x: functional.dropout(m.middle(x), 1.0).sum() + m.first(x).sum(), cache)


def test_a_loss_that_torch_decomposes_wrongly(cache: Path) -> None:
    """Torch's Python form of this loss gives other numbers than its kernel."""

    def forward(m: Small, x: Tensor) -> Tensor:
        return functional.multilabel_margin_loss(m.middle(x), torch.tensor([[3, -1] + [0] * 14] * 8))

    assert_trains_alike(forward, cache)


def _under_vmap(module: PlannedModule, x: Tensor) -> Any:
    return torch.vmap(module)(x[None])


def _under_forward_ad(module: PlannedModule, x: Tensor) -> Any:
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def _under_saved_tensor_hooks(module: PlannedModule, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return module(x)


def _under_functional_grad(module: PlannedModule, x: Tensor) -> Any:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(module, parameters, (x,)).square().sum()
        return found

    return torch.func.grad(loss)({name: p.detach() for name, p in module.named_parameters()})


UNDER = [_under_functional_grad, _under_vmap, _under_forward_ad, _under_saved_tensor_hooks]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("under", UNDER)
def test_under_a_transform_the_original_runs(
    under: Callable[[PlannedModule, Tensor], Any], cache: Path
) -> None:
    """What a plan does not know of is left to the original, counted and said."""
    x = torch.randn(8, 16)
    module = planned(Small(lambda m, x: m.middle(x).sum()), cache, x)
    with pytest.warns(RematWarning, match="without a plan"):
        result = under(module, x)
    assert result is not None
    assert module.runs == {"original": 1}


def test_autocast_around_the_backward_alone_is_refused(cache: Path) -> None:
    """Eager would compute it in half precision."""
    x = torch.randn(8, 16)
    loss = planned(Small(lambda m, x: m.middle(x).sum()), cache, x)(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnplannedUse, match="leave autocast"):
        loss.backward()
