"""Models as people have them, and training loops as people write them: planned, they do what eager does."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from remat_executor import PlannedModule, RematWarning
from tests.helpers.models import import_transformers
from tests.helpers.planners import repeat_at_random


class Block(nn.Module):
    """A residual block with a norm and dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Checkpointed(nn.Module):
    """Checkpoints placed by hand, of both kinds."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Cube(torch.autograd.Function):
    """A function with a backward of its own, which is not the true derivative: to tell whether it is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 7 * gradient * x


class Custom(nn.Module):
    """A model around a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(Cube.apply(self.block(x)))
        return found


@torch.library.custom_op("remat_tests::smooth", mutates_args=())
def smooth(x: Tensor, rate: float) -> Tensor:
    """An operator that torch knows nothing about."""
    return x * rate + x.flip(-1) * (1 - rate)


@smooth.register_fake
def _(x: Tensor, rate: float) -> Tensor:
    return torch.empty_like(x)


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.rate = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> Any:
    return smooth(gradient, ctx.rate), None


smooth.register_autograd(_backward, setup_context=_set_up)


@torch.library.triton_op("remat_tests::ripple", mutates_args=())
def ripple(x: Tensor, rate: float) -> Tensor:
    """What a compiler may look into, and eager calls as one operator; no kernel of Triton's in it here."""
    return x.sin() * rate + x.flip(-1)


def _backward_of_ripple(ctx: Any, gradient: Tensor) -> Any:
    return ripple(gradient, ctx.rate), None  # any formula will do: eager's is the same


ripple.register_autograd(_backward_of_ripple, setup_context=_set_up)


class Opaque(nn.Module):
    """A model around an operator of its own."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(getattr(torch.ops.remat_tests, self.operator)(self.first(x).relu(), 0.7))
        return found


class Scaled(nn.Module):
    """A parametrization: the weight is made from what is trained."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh() * 2


def parametrized() -> nn.Module:
    """Weight norm, orthogonal-like scaling and a parametrization of one's own."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    parametrizations.weight_norm(model[0])
    parametrize.register_parametrization(model[2], "weight", Scaled())
    return model


class Mixed(nn.Module):
    """Tensors of four dtypes: ids, bfloat16 layers, a complex detour, float32 at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.low = nn.Linear(8, 8).bfloat16()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.last = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.low(self.table(ids).bfloat16()).float()
        spectrum = torch.fft.fft(x.to(torch.complex64), dim=-1) * self.turn
        found: Tensor = self.last(torch.fft.ifft(spectrum, dim=-1).real)
        return found


def _normal(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "checkpoint": (lambda: Checkpointed(reentrant=False), lambda: _normal(4, 8)),
    "reentrant checkpoint": (lambda: Checkpointed(reentrant=True), lambda: _normal(4, 8)),
    "autograd.Function": (Custom, lambda: _normal(4, 8)),
    "torch.library": (lambda: Opaque("smooth"), lambda: _normal(4, 8)),
    "triton_op": (lambda: Opaque("ripple"), lambda: _normal(4, 8)),
    "parametrized": (parametrized, lambda: _normal(4, 8)),
    "bfloat16": (lambda: Block().bfloat16(), lambda: _normal(4, 8).bfloat16()),
    "float16": (lambda: Block().half(), lambda: _normal(4, 8).half()),
    "float64": (lambda: Block().double(), lambda: _normal(4, 8).double()),
    "several dtypes": (Mixed, lambda: torch.arange(12).reshape(3, 4)),
}


def plan(model: nn.Module, cache: Path, *args: Any, **options: Any) -> tuple[nn.Module, PlannedModule]:
    """An untouched copy, and the planned module."""
    return copy.deepcopy(model), PlannedModule(
        model, args, {}, repeat_at_random(12), cache_dir=cache, **options
    )


def step(module: nn.Module, *args: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Output and gradients of one step from a fixed seed."""
    module.zero_grad()
    torch.manual_seed(3)
    output: Tensor = module(*args)
    output.float().square().mean().backward()
    return output.detach(), {name: p.grad for name, p in module.named_parameters()}


def assert_same(original: nn.Module, planned: PlannedModule, *args: Tensor) -> None:
    """The same output and gradients, to the bit, by a plan."""
    (expected, gradients), (actual, found) = step(original, *args), step(planned, *args)
    assert torch.equal(expected, actual)
    assert gradients.keys() == found.keys()
    for name, gradient in gradients.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or other is None or torch.equal(gradient, other), name
    assert planned.runs["original"] == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_model_as_it_is(name: str, tmp_path: Path) -> None:
    """Several steps of an optimizer built before planning, and the numbers of eager."""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    original, planned = plan(model, tmp_path, batch())
    optimizers.append(torch.optim.SGD(original.parameters(), lr=0.1))
    for _ in range(2):
        assert_same(original, planned, batch())
        for optimizer in optimizers:
            optimizer.step()
    assert planned.runs["replanned"] == 0


@torch.library.custom_op("remat_tests::drop", mutates_args=())
def drop(x: Tensor) -> Tensor:
    """Draws without a word of it in its schema."""
    return (torch.rand_like(x) > 0.5).to(x.dtype)


@torch.library.custom_op("remat_tests::drop_", mutates_args=["x"])
def drop_(x: Tensor) -> None:
    """The same in place."""
    x.mul_(torch.rand_like(x) > 0.5)


@torch.library.custom_op("remat_tests::draws", mutates_args=())
def draws(x: Tensor) -> list[Tensor]:
    """Two draws in a list."""
    return [torch.rand_like(x), torch.rand_like(x[0])]


drop.register_fake(torch.empty_like)
draws.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x[0])])


def _in_place(x: Tensor) -> Tensor:
    copied = x.clone()
    drop_(copied)
    return copied


NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "result": drop,
    "in place": _in_place,
    "list": lambda x: torch.add(*draws(x)),
}


class Noisy(nn.Module):
    """Blocks that draw by an operator of the user's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
            x = x * NOISES[self.kind](x.detach())
        return x


@pytest.mark.parametrize("kind", NOISES)
def test_an_operator_of_the_users_that_draws(kind: str, tmp_path: Path) -> None:
    """Recomputed it draws the same numbers, and the generator ends where eager leaves it."""
    model, x = Noisy(kind), _normal(512, 8)
    original = copy.deepcopy(model)
    planned = PlannedModule(model, (x,), {}, repeat_at_random(80), cache_dir=tmp_path)
    operators = {i for i, op in enumerate(planned.graph.ops) if "remat_tests" in op.key}
    assert any(planned.plan.schedule.order.count(i) > 1 for i in operators)
    states = []
    for module in (original, planned):
        step(module, x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert_same(original, planned, x)


@pytest.mark.parametrize("operator", ["smooth", "ripple"])
def test_an_operator_of_the_users_is_one_op(operator: str, tmp_path: Path) -> None:
    """Forward and backward, each measured as a whole."""
    _, planned = plan(Opaque(operator), tmp_path, _normal(4, 8))
    found = [op for op in planned.graph.ops if op.target == f"remat_tests.{operator}.default"]
    assert [op.backward for op in found] == [False, True]
    assert all(op.first.time_s > 0 for op in found)


def test_gradient_checkpointing_of_transformers(tmp_path: Path) -> None:
    """A model with `gradient_checkpointing_enable()`; and `generate` after planning."""
    transformers = import_transformers()
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers is about to rename it
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    original = copy.deepcopy(model)
    planned = PlannedModule(
        model,
        (),
        {"input_ids": ids, "labels": ids, "use_cache": False},
        repeat_at_random(8),
        cache_dir=tmp_path,
    )
    losses = []
    for module in (original, planned):
        torch.manual_seed(3)
        loss = module(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.allclose(losses[0], losses[1], rtol=1e-6)  # capture takes the mask's other branch
    assert planned.runs["original"] == 0
    original.eval()
    planned.eval()
    kwargs = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(original.generate(ids, **kwargs), planned.generate(ids, **kwargs))


# -- gradients, and who listens to them


def _doubled(heard: list[tuple[str, str]], name: str, gradient: Tensor) -> Tensor:
    heard.append(("before", name))
    return 2 * gradient


def _heard(heard: list[tuple[str, str]], name: str, parameter: Tensor) -> None:
    heard.append(("after", name))


def test_hooks_clipping_and_accumulation(tmp_path: Path) -> None:
    """Both kinds of hooks of parameters, clipping, two micro-batches: as eager, in eager's numbers."""
    torch.manual_seed(0)
    original, planned = plan(nn.Sequential(*(Block() for _ in range(3))).train(), tmp_path, _normal(4, 8))
    results = []
    for module in (original, planned):
        heard: list[tuple[str, str]] = []
        for name, parameter in module.named_parameters():
            parameter.register_hook(partial(_doubled, heard, name))
            parameter.register_post_accumulate_grad_hook(partial(_heard, heard, name))
        module.zero_grad()
        torch.manual_seed(3)
        for scale in (1.0, 0.5):
            module(scale * _normal(4, 8)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        results.append((sorted(heard), norm, [p.grad for p in module.parameters()]))
    (heard, norm, gradients), (found_heard, found_norm, found) = results
    assert heard == found_heard
    assert torch.equal(norm, found_norm)
    assert all(map(torch.equal, gradients, found))


def test_an_optimizer_in_the_backward(tmp_path: Path) -> None:
    """Each parameter is updated and its gradient dropped as soon as it is there."""
    torch.manual_seed(0)
    original, planned = plan(nn.Sequential(*(Block() for _ in range(3))).train(), tmp_path, _normal(4, 8))
    for module in (original, planned):
        for parameter in module.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.01)

            def update(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        torch.manual_seed(3)
        for _ in range(2):
            module(_normal(4, 8)).square().mean().backward()
        assert all(p.grad is None for p in module.parameters())
    assert all(map(torch.equal, original.parameters(), planned.parameters()))


def test_a_scaler(tmp_path: Path) -> None:
    """Autocast in fp16 and a GradScaler around the planned module."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2))).train()
    with torch.autocast("cpu", dtype=torch.float16):
        original, planned = plan(model, tmp_path, _normal(4, 8))
    for module in (original, planned):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        torch.manual_seed(3)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = module(_normal(4, 8)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert all(map(torch.equal, original.parameters(), planned.parameters()))
    assert planned.runs == {"planned": 2}


class Attending(nn.Module):
    """Attention with dropout, which eager computes in float32 also under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x).chunk(3, dim=-1)
        found: Tensor = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return found


def test_autocast_ends_before_the_backward(tmp_path: Path) -> None:
    """Products of the backward in float32 stay so: as in eager, to the bit."""
    torch.manual_seed(0)
    x = _normal(2, 16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        original, planned = plan(Attending(), tmp_path, x)
    for module in (original, planned):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(x).float().square().sum()
        loss.backward()
    assert torch.equal(original.projection.weight.grad, planned.module.projection.weight.grad)
    assert planned.runs == {"planned": 1}


class Judged(nn.Module):
    """Half precision into a norm whose weights are in full, turned around, and a loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), norm, nn.Linear(8, 8)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(self.first(x)).transpose(0, 1)).transpose(0, 1)
        return self.loss(y.float(), x)


LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 4)], ids=["layer", "group"])
@pytest.mark.parametrize("loss", LOSSES)
def test_norms_and_losses_under_autocast(loss: str, norm: nn.Module, dtype: Any, tmp_path: Path) -> None:
    """Kernels give what torch's rules do not say, and a loss reduces as it does outside of autocast."""
    torch.manual_seed(0)
    x = _normal(3, 4, 8).sigmoid()
    with torch.autocast("cpu", dtype=dtype):
        original, planned = plan(Judged(getattr(nn.functional, loss), copy.deepcopy(norm)), tmp_path, x)
    for module in (original, planned):
        with torch.autocast("cpu", dtype=dtype):
            found = module(x)
        assert found.shape == ()
        found.backward()
    for one, other in zip(original.parameters(), planned.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert planned.runs == {"planned": 1}


AROUND: dict[str, Callable[[Any], Any]] = {
    "itself": lambda module: module,
    "a model": lambda module: nn.Sequential(module, nn.Tanh()),
    "a function": lambda module: lambda x: 2 * module(x),
}


@pytest.mark.parametrize("where", AROUND)
def test_torch_compile_around_a_planned_module_leaves_it_alone(where: str, tmp_path: Path) -> None:
    """It breaks the graph there, and the plan runs."""
    torch.manual_seed(0)
    original, planned = plan(nn.Sequential(nn.Linear(8, 8), nn.GELU()), tmp_path, _normal(4, 8))
    around = AROUND[where]
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo marks the module, which is captured anew
        compiled = torch.compile(around(planned), backend="eager")
        output = compiled(_normal(4, 8))
    assert torch.equal(output, around(original)(_normal(4, 8)))
    output.sum().backward()
    assert planned.runs["planned"] == 1
    assert planned.runs["original"] == 0


class Viewing(nn.Module):
    """Returns a view of its input, a view of an output, and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.block(x)
        return x[:, :4], y.reshape(-1), y


def test_views_as_outputs_and_gradients_of_inputs(tmp_path: Path) -> None:
    """Views of inputs and of outputs are views, differentiate, and inputs get their gradients."""
    torch.manual_seed(0)
    sample = _normal(4, 8).requires_grad_()
    original, planned = plan(Viewing().train(), tmp_path, sample)
    results = []
    for module in (original, planned):
        x = _normal(4, 8).requires_grad_()
        torch.manual_seed(3)
        part, flat, whole = module(x)
        assert part.data_ptr() == x.data_ptr()
        assert flat.data_ptr() == whole.data_ptr()
        (part.sum() + flat.square().sum() + whole.sum()).backward()
        results.append([*(p.grad for p in module.parameters()), x.grad])
    *expected, of_input = results[0]
    *found, found_of_input = results[1]
    assert all(map(torch.equal, expected, found))
    # Three addends; the view of the input lies outside of the plan, so its share comes last.
    assert torch.allclose(of_input, found_of_input, rtol=1e-6)


def test_retain_graph_twice(tmp_path: Path) -> None:
    """Three backwards of one forward, with the same gradients each time."""
    torch.manual_seed(0)
    original, planned = plan(nn.Sequential(Block(), Block()).train(), tmp_path, _normal(4, 8))
    results = []
    for module in (original, planned):
        torch.manual_seed(3)
        loss = module(_normal(4, 8)).square().mean()
        for keep in (True, True, False):
            loss.backward(retain_graph=keep)
        results.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *results))


# -- manners of a module


def test_moved_cast_and_loaded(tmp_path: Path) -> None:
    """`.to()`, `.half()`, `.double()`, `load_state_dict(assign=True)` after planning: planned anew, right."""
    torch.manual_seed(0)
    original, planned = plan(nn.Sequential(Block(), Block()).train(), tmp_path, _normal(4, 8))
    state = {name: torch.randn_like(value) for name, value in planned.state_dict().items()}
    for module in (original, planned):
        module.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    assert_same(original, planned, _normal(4, 8))
    assert planned.runs["replanned"] == 0
    for count, dtype in enumerate((torch.float64, torch.bfloat16, torch.float16), start=1):
        for module in (original, planned):
            module.to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RematWarning)  # it says once that it plans again
            assert_same(original, planned, _normal(4, 8).to(dtype))
        assert planned.runs["replanned"] == count


def test_saved_and_copied(tmp_path: Path) -> None:
    """`torch.save` of the state goes back into an original; a deep copy trains on its own."""
    torch.manual_seed(0)
    original, planned = plan(nn.Sequential(Block(), Block()).train(), tmp_path, _normal(4, 8))
    file = io.BytesIO()
    torch.save(planned.state_dict(), file)
    file.seek(0)
    original.load_state_dict(torch.load(file))
    copied = copy.deepcopy(planned)
    assert_same(original, copied, _normal(4, 8))
    assert all(p.grad is None for p in planned.parameters())
    assert_same(original, planned, _normal(4, 8))
    assert planned.get_submodule("0.up") is planned.module.get_submodule("0.up")


def test_a_copy_keeps_its_hooks_and_what_was_put_around_its_forward(tmp_path: Path) -> None:
    """As a copy of any module does; each calls its own."""
    torch.manual_seed(0)
    _, planned = plan(nn.Linear(8, 8), tmp_path, _normal(4, 8))
    seen: list[Any] = []
    planned.register_forward_hook(lambda module, args, output: seen.append(module))
    inner = planned.forward.__func__

    def doubled(self: Any, x: Tensor) -> Tensor:
        output: Tensor = 2 * inner(self, x)
        return output

    expected = 2 * planned(_normal(4, 8)).detach()
    planned.forward = MethodType(doubled, planned)
    copied = copy.deepcopy(planned)
    for module in (copied, planned):
        with pytest.warns(RematWarning, match="forward changed"):
            found = module(_normal(4, 8)).detach()
        assert torch.equal(found, expected)
    assert seen == [planned, copied, planned]
    assert copied.runs == {"planned": 1, "replanned": 1}
    assert planned.runs == {"planned": 2, "replanned": 1}
    del planned.forward
    assert torch.equal(2 * planned(_normal(4, 8)), expected)
    assert planned.runs == {"planned": 3, "replanned": 1}


def test_the_forward_shows_the_signature_of_the_originals(tmp_path: Path) -> None:
    """Trainers drop the inputs of a batch that it does not name."""
    original, planned = plan(Block().train(), tmp_path, _normal(4, 8))
    assert inspect.signature(planned.forward) == inspect.signature(original.forward)


class Doubled(torch.Tensor):
    """A tensor subclass that nobody knows."""


def test_a_tensor_subclass_runs_the_original_and_says_so(tmp_path: Path) -> None:
    """What no plan can serve is not planned, and is told."""
    original, planned = plan(nn.Linear(8, 8), tmp_path, _normal(4, 8))
    strange = _normal(4, 8).as_subclass(Doubled)
    with pytest.warns(UserWarning, match="Doubled"):
        found = planned(strange)
    assert torch.equal(torch.Tensor(found), torch.Tensor(original(strange)))
    assert planned.runs["original"] == 1
