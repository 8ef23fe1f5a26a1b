"""A model on the meta device is planned by its shapes, and filled straight into memory of the host."""

import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from remat_executor import estimated_graph, step_graph
from remat_facade import NoRoom
from remat_offload import BadWeights, HostPool, OffloadMisuse
from tests.helpers.offmates import MODELS, OPTIMIZERS, PLATFORM, Mapped, Run, differences, offmate

MAKE, BATCHES = MODELS["llama"]


def without_values() -> tuple[nn.Module, dict[str, Tensor]]:
    """The same model on the meta device, with its tied weights; and its values by name."""
    model = MAKE()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    values |= {name: b.clone() for name, b in model.named_buffers()}
    with torch.device("meta"):
        return MAKE(), values


@pytest.mark.parametrize("from_file", [False, True])
def test_filled_and_trained(from_file: bool, tmp_path: Path) -> None:
    """By a mapping or a file; the optimizer made before trains it, bit for bit."""
    model, values = without_values()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    parameters = list(model.parameters())
    weights = values
    if from_file:
        weights = tmp_path / "weights.safetensors"
        save_file(values, weights)
    module = offmate(model, BATCHES(0), "45%", optimizer=optimizer, weights=weights)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    plain = MAKE()
    runs = [Run(plain, OPTIMIZERS["adamw"](plain.parameters()), BATCHES), Run(module, optimizer, BATCHES)]
    assert [] == differences(*(run.train(2) for run in runs))


def test_weights_that_do_not_fill_it(tmp_path: Path) -> None:
    """One line each, before anything is changed."""
    model, values = without_values()
    name, value = next(iter(values.items()))
    path = tmp_path / "not.safetensors"
    path.write_text("no tensors")
    for weights, said in (
        ({k: v for k, v in values.items() if k != name}, f"lack {name}"),
        (values | {name: value[:1]}, "has the shape"),
        (path, "cannot be read"),
    ):
        with pytest.raises(BadWeights, match=said):
            offmate(model, BATCHES(0), "45%", weights=weights)
    assert all(p.is_meta for p in model.parameters())


class MadeWhenRead(Mapping[str, Tensor]):
    """Values that nobody keeps, and how many of them there were at once."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values_, self.most = values, 0
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def __getitem__(self, name: str) -> Tensor:
        made = self.values_[name].clone()
        self.alive.add(made)
        self.most = max(self.most, len(self.alive))
        return made

    def __iter__(self) -> Any:
        return iter(self.values_)

    def __len__(self) -> Any:
        return len(self.values_)


def test_each_is_read_straight_to_its_home() -> None:
    """One at a time, in whatever dtype; the host lends what is planned, which all of it is for."""
    model, values = without_values()
    next(iter(model.parameters())).tag = "a user's"  # type: ignore[attr-defined]
    weights = MadeWhenRead({name: v.double() if v.is_floating_point() else v for name, v in values.items()})
    memory = Mapped()
    module = offmate(model, BATCHES(0), "45%", weights=weights, pool=HostPool(20 << 20, memory=memory))
    assert weights.most == 1
    moved = [p for p in module.parameters() if p.untyped_storage().data_ptr() in memory.addresses]
    assert 0 < sum(p.nbytes for p in moved) <= module.host.peak_nbytes <= module.plan.host_peak_nbytes
    assert all(torch.equal(values[name], tensor) for name, tensor in module.named_parameters())
    assert all(torch.equal(values[name], tensor) for name, tensor in module.named_buffers())
    assert next(iter(module.parameters())).tag == "a user's"  # type: ignore[attr-defined]
    Run(module, module.optimizer, BATCHES, in_backward=True).train(2)
    assert module.host.peak_nbytes <= module.plan.host_peak_nbytes


@pytest.mark.parametrize("budgets", [("1KiB", "20MiB"), ("45%", "1KiB")])
def test_a_shortage_leaves_it_without_values(budgets: tuple[str, str]) -> None:
    """Nothing was read beyond shapes, nothing was taken on the host, and the model serves with more room."""
    model, values = without_values()
    before = [*model.parameters(), *model.buffers()]
    pool = HostPool(20 << 20 if budgets[1] == "20MiB" else 1 << 10, memory=Mapped())
    with pytest.raises(NoRoom) as caught:
        offmate(model, BATCHES(0), budgets[0], weights=values, pool=pool)
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b and b.is_meta for a, b in zip(before, after, strict=True))
    assert pool.statistics.peak_nbytes == 0
    room = caught.value
    least = {"host_budget": room.least_host_nbytes or 1}
    module = offmate(model, BATCHES(0), room.least_nbytes, weights=values, **least)
    assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def test_a_model_that_has_values() -> None:
    """It gets those that are named and keeps the others; weights that name nothing of it are refused."""
    model, (first, *_) = MAKE(), dict(MAKE().named_parameters())
    values = {first: model.get_parameter(first).detach() + 1}
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if name != first}
    module = offmate(model, BATCHES(0), "45%", weights=values)
    assert all(torch.equal(p, (kept | values)[name]) for name, p in module.named_parameters())
    with pytest.raises(BadWeights, match="they name no tensor of the model"):
        offmate(MAKE(), BATCHES(0), "45%", weights={"another": values[first]})


def test_a_model_with_buffers_of_its_own() -> None:
    """Statistics that were made with values are loaded too, as those of a checkpoint."""
    make, batches = MODELS["convolutions"]
    trained = make()
    for _, buffer in trained.named_buffers():
        buffer.add_(1)
    with torch.device("meta"):
        model = make()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    found = offmate(model, batches(0), "60%", weights=trained.state_dict()).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in trained.state_dict().items())


def test_an_optimizer_that_made_its_states_at_once() -> None:
    """Adagrad's have values from the start, which those on the meta device are not."""
    model, values = without_values()
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(OffloadMisuse, match="without values"):
        offmate(model, BATCHES(0), "45%", optimizer=optimizer, weights=values)
    assert all(p.is_meta for p in model.parameters())


def test_a_file_without_the_library_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to install; a mapping needs nothing."""
    model, _ = without_values()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(BadWeights, match=r"pip install 'remat-offload\[weights\]'") as caught:
        offmate(model, BATCHES(0), "45%", weights=tmp_path / "weights.safetensors")
    assert "\n" not in str(caught.value)


def test_the_graph_of_shapes_is_the_graph() -> None:
    """What is traced without memory has the values and ops of what is traced with it."""
    model, _ = without_values()
    batch = BATCHES(0)
    real = step_graph(MAKE(), (), batch, platform=PLATFORM)
    shapes = estimated_graph(model, (), batch, PLATFORM)
    assert [v.name for v in real.values] == [v.name for v in shapes.values]
    assert [v.nbytes for v in real.values] == [v.nbytes for v in shapes.values]
    keys = [(op.name, op.key, op.first.inputs, op.first.outputs, op.first.time_s) for op in real.ops]
    assert keys == [(o.name, o.key, o.first.inputs, o.first.outputs, o.first.time_s) for o in shapes.ops]
    assert all(p.is_meta for p in model.parameters())
