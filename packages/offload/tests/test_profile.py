"""The profile finds kinds, states and optimizers to refuse, without side effects."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from remat_offload import Kind, RefusedOptimizer, kind_of, state_layout
from remat_offload.optimizer.trial_steps import same
from tests.helpers import optimizers

Made = tuple[type[optim.Optimizer], dict[str, Any]]

ELEMENTWISE: list[Made] = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    (optim.Adam, {"lr": torch.tensor(0.01)}),
    (optim.AdamW, {"amsgrad": True, "maximize": True, "foreach": True}),
    (optim.AdamW, {"fused": True}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Adagrad, {}),
    (optim.Adadelta, {}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Rprop, {}),
    (optim.ASGD, {}),
    (optimizers.Lion, {}),
    (optimizers.Odd, {}),
    (optimizers.Filled, {}),
    (optimizers.Touching, {}),
]
WHOLE: list[Made] = [
    (optim.Adafactor, {}),
    (optim.Muon, {}),
    (optimizers.Lars, {}),
    (optimizers.MatrixDecay, {}),
    (optimizers.Blocks, {}),
]
REFUSED = [
    (optim.LBFGS, "step needs a closure"),
    (optim.SparseAdam, "does not support dense gradients"),
    (optimizers.GlobalClip, "changes clip"),
    (optimizers.NumpyNoise, "draws random numbers from numpy.random"),
    (optimizers.PythonNoise, "draws random numbers from Python's random"),
    (optimizers.Noise, "draws random numbers from torch's generator"),
    (optimizers.Counting, "changes steps"),
    (optimizers.Scheduled, "changes k"),
    (optimizers.Common, "belong to no parameter"),
]


def name(made: Any) -> str:
    return made.__name__ if isinstance(made, type) else ""


def weights(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "made"), [(Kind.ELEMENTWISE, m) for m in ELEMENTWISE] + [(Kind.WHOLE, m) for m in WHOLE]
)
def test_kinds_and_layouts(kind: Kind, made: Made, dtype: torch.dtype) -> None:
    """Each class has its kind, and its layout is that of the state after two plain steps."""
    param = weights(70, 90, dtype=dtype)
    optimizer = made[0]([param], **made[1])
    assert kind is kind_of(optimizer)
    layout = {t.name: (t.shape, t.dtype) for t in state_layout(optimizer, param)}
    for _ in range(2):
        param.grad = torch.randn_like(param)
        optimizer.step()
    kept = {n: v for n, v in optimizer.state.get(param, {}).items() if isinstance(v, torch.Tensor)}
    assert layout == {n: (tuple(v.shape), v.dtype) for n, v in kept.items()}
    assert sum(v.nbytes for v in kept.values()) == sum(t.nbytes for t in state_layout(optimizer, param))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4, 5), (2, 3, 4, 5, 6)])
def test_layouts_of_other_dimensions(shape: tuple[int, ...]) -> None:
    """Layouts are correct for scalars, empty tensors and many dimensions."""
    for made in (optim.Adam, optim.Adafactor):
        param = weights(*shape)
        optimizer = made([param])
        layout = {t.name: t.shape for t in state_layout(optimizer, param)}
        if param.numel():
            param.grad = torch.ones_like(param)
            optimizer.step()
            assert layout == {n: tuple(v.shape) for n, v in optimizer.state[param].items()}


@pytest.mark.parametrize(("made", "reason"), REFUSED, ids=name)
def test_refusals(made: type[optim.Optimizer], reason: str) -> None:
    """An optimizer that cannot be stepped in parts is refused in one line with its name and the reason."""
    with pytest.raises(RefusedOptimizer, match=reason) as caught:
        kind_of(made([weights(3, 5)]))
    line = str(caught.value)
    assert line.startswith(f"{made.__name__} cannot be stepped in parts: ")
    assert "\n" not in line


def test_coupling_through_norms() -> None:
    """Coupling is found even if only the results show it."""

    class Quiet(optimizers.GlobalClip):
        __slots__ = ("clip",)  # not among its attributes

    with pytest.raises(RefusedOptimizer, match="couples parameters"):
        kind_of(Quiet([weights(3, 5)]))


@pytest.mark.parametrize("made", [optimizers.Lookahead, optimizers.Forwarding])
def test_wrappers(made: type[optimizers.Lookahead]) -> None:
    """An optimizer that holds another is refused, and the real parameters do not change."""
    param = weights(3, 5)
    param.grad = torch.ones_like(param)
    with pytest.raises(RefusedOptimizer, match=r"does not move|holds another"):
        kind_of(made(optim.SGD([param], lr=0.1)))
    assert torch.equal(torch.ones(3, 5), param)


def test_settings_that_cannot_be() -> None:
    """Recorded steps, and settings that the class itself refuses, are refused with its message."""
    with pytest.raises(RefusedOptimizer, match="use differentiable=False"):
        kind_of(optim.Adam([weights(3)], differentiable=True))
    with pytest.raises(RefusedOptimizer, match=r"fails on a small dense torch.float32 .*capturable=True"):
        kind_of(optim.Adam([weights(3)], capturable=True))


def test_groups_are_probed_apart() -> None:
    """The settings of one group do not affect the state of another."""
    first, second = weights(4), weights(4)
    optimizer = optim.SGD([{"params": [first]}, {"params": [second], "momentum": 0.5}], lr=0.1)
    assert state_layout(optimizer, first) == ()
    assert [(t.name, t.nbytes) for t in state_layout(optimizer, second)] == [("momentum_buffer", 16)]


def test_layout_of_a_stand_in() -> None:
    """The state of an fp32 master is found with a meta tensor; nothing of its size is allocated."""
    param = weights(8, dtype=torch.bfloat16)
    like = torch.empty(1 << 20, 1 << 20, device="meta")
    layout = {t.name: t.nbytes for t in state_layout(optim.Adam([param]), param, like)}
    assert layout == {"step": 4, "exp_avg": 1 << 42, "exp_avg_sq": 1 << 42}
    matrix = weights(8, 8)
    assert [1 << 22, 1 << 22] == [t.nbytes for t in state_layout(optim.Adafactor([matrix]), matrix, like)[1:]]


def test_sizes_that_are_concluded() -> None:
    """If the class cannot run on meta tensors, sizes are inferred from a smaller parameter and not exact."""

    class Rows(optimizers.Simple):
        def update(
            self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
        ) -> None:
            scale = 1 / (1 + float(grad.norm()))
            if not state:
                state["rows"] = grad.new_zeros(len(p), 1)
            p.sub_(grad * scale * group["lr"])

    (rows,) = state_layout(Rows([param := weights(70, 90)]), param)
    assert ((70, 1), False) == (rows.shape, rows.exact)


@pytest.mark.parametrize("made", [m for m, _ in ELEMENTWISE + WHOLE] + [m for m, _ in REFUSED], ids=name)
def test_no_trace(made: type[optim.Optimizer]) -> None:
    """The user's object, its tensors, its hooks and the generators are unchanged."""
    param = weights(6, 7)
    param.grad = torch.ones_like(param)
    optimizer = made([param], lr=0.1)
    optimizer.own = {"generator": torch.Generator().manual_seed(3), "self": optimizer}
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    hook = register_optimizer_step_pre_hook(lambda *_: called.append("global"))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step
    before = copy.deepcopy(optimizer.state_dict()), dict(vars(optimizer)), torch.get_rng_state()
    others = random.getstate(), np.random.get_state()
    defaults = dict(optimizer.defaults)
    try:
        kind_of(optimizer)
    except RefusedOptimizer:
        assert made in [m for m, _ in REFUSED]
    finally:
        hook.remove()
    assert same(before[0], optimizer.state_dict())
    assert before[1].keys() == vars(optimizer).keys()
    assert all(value is vars(optimizer)[key] for key, value in before[1].items())
    assert torch.equal(before[2], torch.get_rng_state())
    assert others[0] == random.getstate()
    np.testing.assert_equal(np.random.get_state(), others[1])
    assert defaults == optimizer.defaults
    assert torch.equal(torch.ones(6, 7), param)
    assert torch.equal(torch.ones(6, 7), param.grad)
    assert called == []
    assert scheduler.get_last_lr() == [0.1]
