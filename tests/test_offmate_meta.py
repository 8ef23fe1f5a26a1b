"""A model on the meta device is planned by its shapes, and filled straight into memory of the host."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from remat_executor import plan_graph
from remat_executor.estimate import estimated_graph
from remat_offload.errors import BadWeights
from tests.offmates import MODELS, OPTIMIZERS, PLATFORM, Run, differences, offmate

MAKE, BATCHES = MODELS["llama"]


def without_values():
    """The same model on the meta device, with its tied weights; and its values by name."""
    model = MAKE()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    values |= {name: b.clone() for name, b in model.named_buffers()}
    with torch.device("meta"):
        return MAKE(), values


@pytest.mark.parametrize("from_file", [False, True])
def test_filled_and_trained(from_file, tmp_path):
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


def test_weights_that_do_not_fill_it(tmp_path):
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


def test_a_file_without_the_library_that_reads_it(tmp_path, monkeypatch):
    """One line that says what to install; a mapping needs nothing."""
    model, _ = without_values()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(BadWeights, match=r"pip install 'remat-offload\[weights\]'") as caught:
        offmate(model, BATCHES(0), "45%", weights=tmp_path / "weights.safetensors")
    assert "\n" not in str(caught.value)


def test_the_graph_of_shapes_is_the_graph():
    """What is traced without memory has the values and ops of what is traced with it."""
    model, _ = without_values()
    batch = BATCHES(0)
    real = plan_graph(MAKE(), (), batch, platform=PLATFORM)
    shapes = estimated_graph(model, (), batch, PLATFORM)
    assert [v.name for v in real.values] == [v.name for v in shapes.values]
    assert [v.nbytes for v in real.values] == [v.nbytes for v in shapes.values]
    keys = [(op.name, op.key, op.first.inputs, op.first.outputs, op.first.time_s) for op in real.ops]
    assert keys == [(o.name, o.key, o.first.inputs, o.first.outputs, o.first.time_s) for o in shapes.ops]
    assert all(p.is_meta for p in model.parameters())
