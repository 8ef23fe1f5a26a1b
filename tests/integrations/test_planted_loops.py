"""Tools that train past a model with a memory limit: one warning says that nothing is planned."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.integrations.scenario import Run
from benchmarks.integrations.tiny import Blocks, batches, llama, tool
from remat_executor import RematWarning
from remat_facade import limit_memory, planned


class Past(nn.Module):
    """Runs the forward of a model's own class, as `super().forward(...)` does: the limit is not asked."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.kind = type(model)
        self.model = limit_memory(model, "60%")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Past the limited model."""
        return self.kind.forward(self.model, *args, **kwargs)


def scenarios_of(name: str) -> Any:
    """The scenarios of a tool, which need it."""
    return importlib.import_module(f"benchmarks.integrations.{name}")


def with_ignite(run: Run) -> nn.Module:
    return scenarios_of("ignite_engine").train(run, Past(Blocks()))


def with_fastai(run: Run) -> nn.Module:
    """With an optimizer of torch."""
    wrapped = functools.partial(tool("fastai.optimizer").OptimWrapper, opt=torch.optim.SGD)
    return scenarios_of("fastai_learner").learn(run, Past(Blocks()), opt_func=wrapped).model


def with_fastai_alone(run: Run) -> nn.Module:
    """Its own, which does not derive from torch's."""
    return scenarios_of("fastai_learner").learn(run, Past(Blocks())).model


def with_timm(run: Run) -> nn.Module:
    """A task of timm has the model, and its step calls it."""
    model = Past(scenarios_of("timm_script").network())
    task = tool("timm.task").ClassificationTask(model, criterion=nn.CrossEntropyLoss(), verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        task(torch.randn(4, 3, 32, 32), torch.randint(0, 8, (4,)))["loss"].backward()
        optimizer.step()
    return model


def with_diffusers(run: Run) -> nn.Module:
    model = Past(scenarios_of("diffusers_loops").unet())
    scheduler = tool("diffusers").DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for clean in torch.randn(2, 4, 3, 16, 16):
        noise, times = torch.randn_like(clean), torch.randint(0, 100, (len(clean),))
        predicted = model(scheduler.add_noise(clean, noise, times), times).sample
        nn.functional.mse_loss(predicted, noise).backward()
        optimizer.step()
    return model


def with_accelerate(run: Run) -> nn.Module:
    model = Past(llama())
    with scenarios_of("accelerate_loops").accelerator() as speed:
        prepared, optimizer = speed.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        for batch in batches(2):
            speed.backward(prepared(**batch).loss)
            optimizer.step()
    return model


@pytest.mark.filterwarnings("ignore")  # what the tools warn of among themselves is theirs
@pytest.mark.parametrize(
    "train", [with_ignite, with_fastai, with_fastai_alone, with_timm, with_diffusers, with_accelerate]
)
def test_training_past_the_limited_model_warns_once(train: Callable[[Run], Any], tmp_path: Path) -> None:
    name = train.__name__.removeprefix("with_").partition("_")[0]
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is in the environment `integrations` only")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = train(Run(planned=False, folder=tmp_path, cache=tmp_path))
    ours = [str(each.message) for each in caught if issubclass(each.category, RematWarning)]
    assert planned(model) is None
    assert len(ours) == 1
    assert "was not called in a step of training" in ours[0]


@pytest.mark.filterwarnings("ignore")
def test_torchtitan_compiles_no_block_that_is_planned(tmp_path: Path) -> None:
    """Its `--compile.enable` calls `compile` of each block: the block warns and computes as before."""
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is in the environment `integrations` only")
    blocks = scenarios_of("torchtitan_blocks")
    run = Run(planned=True, folder=tmp_path, cache=tmp_path)
    model = blocks.model_by(blocks.applied, blocks.policy(run, selective=False))
    tokens = torch.randint(0, 2048, blocks.SHAPE)
    expected = copy.deepcopy(model)(tokens)
    for layer in model.layers.values():
        with pytest.warns(RematWarning, match="is not compiled: torch.compile changes nothing"):
            layer.compile(backend="inductor", fullgraph=True)
    assert torch.equal(model(tokens), expected)
    assert all(planned(layer).runs["planned"] == 1 for layer in model.layers.values())
