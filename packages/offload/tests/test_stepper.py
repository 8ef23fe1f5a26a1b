"""Steps in parts leave parameters and state dict bit-identical to plain steps."""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from remat_executor import MemoryMeter
from remat_offload import Kind, StateTensor, StepMisuse, Stepper
from remat_offload.optimizer.private_copy import narrowed, settings_for
from remat_offload.optimizer.trial_steps import same

from . import optimizers

Make = Callable[[Sequence[Any]], optim.Optimizer]
Take = Callable[[Stepper, list[torch.nn.Parameter], list[torch.Tensor]], None]

CASES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {}),
    "momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "foreach": True}),
    "nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "fused-sgd": (optim.SGD, {"momentum": 0.9, "fused": True}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "adam-tensor-lr": (optim.Adam, {"lr": torch.tensor(0.02)}),
    "amsgrad": (optim.AdamW, {"amsgrad": True, "maximize": True}),
    "foreach-adamw": (optim.AdamW, {"foreach": True}),
    "single-adamw": (optim.AdamW, {"foreach": False}),
    "fused-adamw": (optim.AdamW, {"fused": True, "amsgrad": True}),
    "rmsprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "fused-adagrad": (optim.Adagrad, {"fused": True}),
    "adadelta": (optim.Adadelta, {}),
    "adamax": (optim.Adamax, {}),
    "nadam": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {"t0": 2.0}),
    "adafactor": (optim.Adafactor, {}),
    "muon": (optim.Muon, {}),
    "lion": (optimizers.Lion, {}),
    "odd": (optimizers.Odd, {}),
    "filled": (optimizers.Filled, {}),
    "touching": (optimizers.Touching, {}),
    "lars": (optimizers.Lars, {}),
    "blocks": (optimizers.Blocks, {}),
}
HALF = (torch.bfloat16, torch.float16)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def broken(case: str, dtype: torch.dtype) -> bool:
    """Fused SGD in half precision on a CPU: torch 2.13 moves the last elements alone, and reads others."""
    return case == "fused-sgd" and dtype in HALF


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def making(case: str) -> Make:
    made, kwargs = CASES[case]
    return lambda params: made(params, **copy.deepcopy(kwargs))


def in_chunks(stepper: Stepper, params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
    for param, grad in reversed(list(zip(params, grads, strict=True))):
        stepper.step_by_chunks(param, param.detach(), grad)


def in_turn(stepper: Stepper, params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        stepper.step([param], [grad])


def agree(
    make: Make,
    values: Sequence[torch.Tensor],
    take: Take = in_chunks,
    *,
    steps: int = 7,
    chunk_numel: int = 192,
    memory: Callable[[torch.Tensor, StateTensor], torch.Tensor] | None = None,
    groups: Callable[[list[torch.nn.Parameter]], Sequence[Any]] = list,
) -> tuple[Stepper, optim.Optimizer]:
    """Train plainly and in parts; all values must agree before the first step and after each."""
    ours, plain = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizer, reference = make(groups(ours)), make(groups(plain))
    stepper = Stepper(optimizer, chunk_numel=chunk_numel, memory=memory)
    assert same(reference.state_dict(), optimizer.state_dict())
    scheduler = optim.lr_scheduler.ExponentialLR(reference, 0.7)
    for step in range(steps):
        grads = [numbers(*p.shape, dtype=torch.float64, seed=step) for p in plain]
        for param, grad in zip(plain, grads, strict=True):
            param.grad = torch.empty_like(param).copy_(grad)
        take(stepper, ours, [p.grad.clone() for p in plain])
        reference.step()
        assert same([p.detach() for p in plain], [p.detach() for p in ours])
        assert same(reference.state_dict()["state"], optimizer.state_dict()["state"])
        scheduler.step()
        for group, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
            group["lr"] = other["lr"]
    return stepper, optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_chunks(case: str, dtype: torch.dtype) -> None:
    """Every class, on two parameters of odd sizes, while the learning rate changes."""
    if broken(case, dtype):
        pytest.skip("torch's kernel")
    agree(making(case), [numbers(37, 61, dtype=dtype), numbers(5, 3, dtype=dtype)])


@pytest.mark.parametrize("case", CASES)
def test_whole_parameters(case: str) -> None:
    """The same for one whole parameter at a time."""
    agree(making(case), [numbers(37, 61), numbers(5, 3)], in_turn)


def test_all_at_once() -> None:
    """With all parameters it is a plain step; without gradients it does nothing."""

    def all_(stepper: Stepper, params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
        stepper.step(params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        stepper.step(params)

    agree(making("adam"), [numbers(5, 3), numbers(4)], all_, steps=1)


@given(
    case=st.sampled_from([case for case in CASES if case != "muon"]),
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    dtype=st.sampled_from([*DTYPES, torch.complex64]),
    rounds=st.integers(1, 4),
    last=st.booleans(),
    in_groups=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_shape(
    case: str, shape: tuple[int, ...], dtype: torch.dtype, rounds: int, last: bool, in_groups: bool
) -> None:
    """Any shape and layout, in groups with different settings."""
    if dtype.is_complex and case not in ("adam", "sgd", "rmsprop", "adagrad", "rprop", "asgd"):
        return
    if broken(case, dtype) or (case in ("adafactor", "lars", "blocks") and not torch.empty(shape).numel()):
        return  # or a norm of nothing
    value = numbers(*shape, dtype=dtype)
    if last and len(shape) == 4:
        value = value.to(memory_format=torch.channels_last)

    def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:1]}, {"params": params[1:], "lr": 0.3, "weight_decay": 0.0}]

    agree(
        making(case),
        [value, value.clone()],
        steps=3,
        chunk_numel=64 * rounds,
        groups=groups if in_groups else list,
    )


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case", ["sgd", "momentum", "fused-sgd", "rmsprop", "asgd", "adam", "fused-adamw", "lion"]
)
def test_threads_of_kernels(case: str, dtype: torch.dtype, threads: int) -> None:
    """Kernels that share a large tensor among threads round the same: equal chunks were seen to fail."""
    if broken(case, dtype):
        pytest.skip("torch's kernel")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        agree(making(case), [numbers(200_003, dtype=dtype)], steps=3, chunk_numel=3 * 32768 + 64)
    finally:
        torch.set_num_threads(before)


def test_threads_of_ours() -> None:
    """Threads step different parameters at the same time."""
    with ThreadPoolExecutor(4) as pool:

        def spread(stepper: Stepper, params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
            list(pool.map(lambda p, g: stepper.step_by_chunks(p, p.detach(), g), params, grads))

        agree(making("adam"), [numbers(500, seed=seed) for seed in range(12)], spread)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strided", [False, True])
def test_masters_of_what_was_written(dtype: torch.dtype, strided: bool) -> None:
    """Where a parameter differs from its rounded master, the master is reset; elsewhere it is kept."""
    whole = torch.randn(700, 400).to(dtype)
    param = torch.nn.Parameter(whole[:, ::2] if strided else whole[:, :200].clone())
    master = param.detach().float() * (1 + 2**-12)
    param.data.copy_(master)
    expected = master.clone()
    for place, value in (((699, 199), -0.0), ((3, 5), float("nan")), ((0, 0), 7.0)):
        param.data[place] = expected[place] = value
    stepper = Stepper(torch.optim.SGD([param], lr=0.0), chunk_numel=64 * 1024)
    stepper.step_by_chunks(param, param.detach(), torch.ones_like(param), master=master)
    assert same(expected, master)


@pytest.mark.parametrize("case", ["adam", "fused-sgd", "odd", "adafactor"])
def test_masters(case: str) -> None:
    """A master is stepped like an fp32 copy, with an fp32 gradient, and the parameter is rounded from it."""
    param = torch.nn.Parameter(numbers(37, 61, dtype=torch.bfloat16))
    wide = torch.nn.Parameter(param.detach().float())
    master = wide.detach().clone()
    optimizer, reference = making(case)([param]), making(case)([wide])
    stepper = Stepper(optimizer, chunk_numel=192)
    for step in range(4):
        grad = numbers(37, 61, dtype=torch.bfloat16, seed=step)
        wide.grad = grad.float()
        stepper.step_by_chunks(param, param.detach(), grad, master=master)
        reference.step()
        assert same(wide.detach(), master)
        assert same(wide.detach().bfloat16(), param.detach())
        assert same(reference.state_dict()["state"], optimizer.state_dict()["state"])


def test_scratch_is_small() -> None:
    """In addition to its state, a step allocates a few chunks, with an fp32 master, too."""
    numel, piece = 1 << 20, 1 << 14
    param = torch.nn.Parameter(numbers(numel, dtype=torch.bfloat16))
    master, grad = param.detach().float(), param.detach().clone()
    stepper = Stepper(optim.AdamW([param], foreach=False), chunk_numel=piece)
    for kept in (2 * 4 * numel, 0):
        with MemoryMeter() as meter:
            stepper.step_by_chunks(param, param.detach(), grad, master=master)
        assert kept < meter.peak_nbytes < kept + 8 * 4 * piece


@pytest.mark.parametrize("take", [in_chunks, in_turn])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale(take: Take, dtype: torch.dtype) -> None:
    """A scale multiplies the gradient itself before the step, as clipping does."""
    scale = torch.tensor(0.3, dtype=dtype)
    value, grad = numbers(37, 61, dtype=dtype), numbers(37, 61, dtype=dtype, seed=1)
    ours, plain = torch.nn.Parameter(value.clone()), torch.nn.Parameter(value.clone())
    stepper, reference = Stepper(optim.AdamW([ours]), chunk_numel=128), optim.AdamW([plain])
    plain.grad = grad.clone().mul_(scale)
    reference.step()
    if take is in_chunks:
        stepper.step_by_chunks(ours, ours.detach(), grad, scale=scale)
    else:
        stepper.step([ours], [grad], scale=scale)
    assert same(plain.detach(), ours.detach())
    assert same(plain.grad, grad)


@pytest.mark.parametrize("take", [in_chunks, in_turn])
@pytest.mark.parametrize("case", ["momentum", "amsgrad", "rprop", "odd", "filled", "adagrad", "muon"])
def test_places(case: str, take: Take) -> None:
    """State is in the memory reserved for it from the first step on, with the sizes of the layout."""
    places: dict[tuple[int, str], torch.Tensor] = {}

    def memory(param: torch.Tensor, tensor: StateTensor) -> torch.Tensor:
        assert param.shape == tensor.shape
        place = torch.full((tensor.nbytes,), 77, dtype=torch.uint8).view(tensor.dtype)
        return places.setdefault((id(param), tensor.name), place)

    stepper, optimizer = agree(making(case), [numbers(37, 61), numbers(5, 3)], take, memory=memory)
    for param, state in optimizer.state.items():
        placed = [t.name for t in stepper.layout(param) if t.shape == param.shape]
        assert placed
        assert [places[id(param), n].data_ptr() for n in placed] == [state[n].data_ptr() for n in placed]
        assert all(state[name].stride() == param.stride() for name in placed)


def test_loaded_state_moves_to_its_places() -> None:
    """After load_state_dict, `adopt` moves state back to its places, and training continues unchanged."""
    held: dict[str, torch.Tensor] = {}

    def memory(param: torch.Tensor, tensor: StateTensor) -> torch.Tensor:
        return held.setdefault(tensor.name, torch.empty(tensor.shape, dtype=tensor.dtype))

    stepper, optimizer = agree(making("adam"), [numbers(37, 61)], memory=memory, steps=2)
    (param,) = optimizer.param_groups[0]["params"]
    saved = copy.deepcopy(optimizer.state_dict())
    other = torch.nn.Parameter(param.detach().clone())
    reference = optim.Adam([other])
    for each in (optimizer, reference):
        each.load_state_dict(copy.deepcopy(saved))
    stepper.adopt(param)
    assert held["exp_avg"].data_ptr() == optimizer.state[param]["exp_avg"].data_ptr()
    other.grad = numbers(37, 61, seed=9)
    stepper.step_by_chunks(param, param.detach(), other.grad.clone())
    reference.step()
    assert same(other.detach(), param.detach())
    assert same(reference.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("case", ["adam", "odd", "adafactor"])
def test_pieces_brought_elsewhere(case: str) -> None:
    """A caller may copy each chunk and its state to where it is stepped, and back."""

    def carried(stepper: Stepper, params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
        for param, grad in zip(params, grads, strict=True):
            chunked = stepper.begin(param)
            cut = stepper.chunks(param)
            assert (stepper.kind(param) is Kind.ELEMENTWISE) == (len(cut) > 1)
            for piece in cut:
                whole = len(cut) == 1
                data = param.detach() if whole else param.detach().view(-1)[piece]
                places = {
                    n: chunked.place(n) if whole else chunked.place(n).view(-1)[piece] for n in chunked.names
                }
                moved_states = {
                    n: place.clone() if chunked.has(n) else torch.full_like(place, 7)
                    for n, place in places.items()
                }
                moved = data.clone()
                chunked.step(moved, (grad if whole else grad.view(-1)[piece]).clone(), moved_states)
                data.copy_(moved)
                for name, place in places.items():
                    place.copy_(moved_states[name])
            chunked.finish()

    agree(making(case), [numbers(37, 61)], carried)


def test_layouts_that_differ() -> None:
    """A parameter whose gradient has another layout is stepped whole, with the same results."""
    value = numbers(4, 5, 6, 7).to(memory_format=torch.channels_last)

    def otherwise(stepper: Stepper, params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
        stepper.step_by_chunks(params[0], params[0].detach(), grads[0].contiguous())

    agree(making("adam"), [value], otherwise, chunk_numel=64)
    agree(making("adam"), [numbers(8, 60)[:, ::2]], chunk_numel=64)


def test_the_users_object_keeps_its_own() -> None:
    """The counter and the learning rate stay the same tensors; hooks are not called."""
    param = torch.nn.Parameter(numbers(500))
    lr = torch.tensor(0.1)
    optimizer = optim.Adam([param], lr=lr)
    hook = register_optimizer_step_pre_hook(lambda *_: pytest.fail("a hook was called"))
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook was called"))
    try:
        stepper = Stepper(optimizer, chunk_numel=64)
        stepper.step_by_chunks(param, param.detach(), numbers(500))
        counter = optimizer.state[param]["step"]
        stepper.step_by_chunks(param, param.detach(), numbers(500))
        stepper.step([param], [numbers(500)])
    finally:
        hook.remove()
    assert counter is optimizer.state[param]["step"]
    assert float(counter) == 3
    assert lr is optimizer.param_groups[0]["lr"]
    assert float(lr) == float(torch.tensor(0.1))
    assert param.grad is None


def test_groups_added_later() -> None:
    """A group that is added after the stepper was made is stepped with its settings."""

    def later(stepper: Stepper, params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
        (first,) = stepper._optimizer.param_groups[0]["params"]
        if len(stepper._optimizer.param_groups) == 1:
            stepper._optimizer.add_param_group({"params": params[1:], "lr": 0.5, "momentum": 0.5})
        in_chunks(stepper, params, grads)
        assert first is params[0]

    ours = [torch.nn.Parameter(numbers(300)), torch.nn.Parameter(numbers(400))]
    plain = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = optim.SGD(ours[:1], lr=0.1)
    reference = optim.SGD([{"params": plain[:1]}, {"params": plain[1:], "lr": 0.5, "momentum": 0.5}], lr=0.1)
    stepper = Stepper(optimizer, chunk_numel=64)
    for step in range(2):
        for param in plain:
            param.grad = numbers(*param.shape, seed=step)
        later(stepper, ours, [p.grad.clone() for p in plain])
        reference.step()
    assert same([p.detach() for p in plain], [p.detach() for p in ours])
    assert same(reference.state_dict(), optimizer.state_dict())


def test_names_and_single_elements() -> None:
    """Named parameters keep their names; a last chunk of one element does not confuse states with it."""

    def named(params: list[torch.nn.Parameter]) -> list[tuple[str, torch.nn.Parameter]]:
        return [(f"layer{index}", param) for index, param in enumerate(params)]

    for take in (in_chunks, in_turn):
        agree(making("filled"), [numbers(129), numbers(1)], take, chunk_numel=64, groups=named)


def test_misuse() -> None:
    """Inconsistent arguments give one clear line."""
    param = torch.nn.Parameter(numbers(500))
    optimizer = optim.SGD([param], lr=0.1)
    for chunk_numel in (0, 100):
        with pytest.raises(StepMisuse, match="positive multiple of 64"):
            Stepper(optimizer, chunk_numel=chunk_numel)
    stepper = Stepper(optimizer, chunk_numel=64)
    with pytest.raises(StepMisuse, match="is not a parameter of this optimizer"):
        stepper.step([torch.zeros(3)], [torch.zeros(3)])
    with pytest.raises(StepMisuse, match="must be the same"):
        stepper.step_by_chunks(param, param.detach(), numbers(499))
    chunked = stepper.begin(param)
    chunked.step(param.detach()[:64], numbers(64), {})
    with pytest.raises(StepMisuse, match="436 elements are left"):
        chunked.finish()
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(
        StepMisuse, match="momentum_buffer is not in the optimizer's profile; make a new Stepper"
    ):
        stepper.step_by_chunks(param, param.detach(), numbers(500))
    stepper = Stepper(optimizer, chunk_numel=64, memory=lambda *_: torch.empty(3))
    with pytest.raises(StepMisuse, match=r"give a contiguous torch.float32 one of 500 elements"):
        stepper.step_by_chunks(param, param.detach(), numbers(500))
    with pytest.raises(StepMisuse, match="no place for momentum_buffer"):
        stepper.begin(param).step(param.detach(), numbers(500), {})


def test_states_of_another_dtype() -> None:
    """A state loaded in the parameter's dtype is refused with a wider master."""
    param = torch.nn.Parameter(numbers(500, dtype=torch.bfloat16))
    stepper = Stepper(optim.Adam([param]))
    stepper.step([param], [numbers(500, dtype=torch.bfloat16)])
    with pytest.raises(StepMisuse, match=r"exp_avg is torch.bfloat16, expected is torch.float32"):
        stepper.begin(param, param.detach().float())


def test_settings_for_one_parameter() -> None:
    """With the names of parameters, where the optimizer has them, and without."""
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    plain = torch.optim.AdamW(params, lr=0.5).param_groups[0]
    named = torch.optim.AdamW([(f"p{i}", param) for i, param in enumerate(params)], lr=0.5).param_groups[0]
    for group in (plain, named):
        found, expected = settings_for(group, params[1]), narrowed(group, {params[1]: params[1]})
        assert found.pop("params")[0] is expected.pop("params")[0] is params[1]
        assert found == expected
    assert settings_for(named, params[1])["param_names"] == ["p1"]
