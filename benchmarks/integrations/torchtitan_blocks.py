"""torchtitan's own Llama, by its own `parallelize_llama` with FSDP, in a plain loop.

torchtitan's `Trainer` needs a GPU: without one its device is ``cuda`` all the same, and its metrics ask for
the memory of that device. Its attention for language models, `FlexAttention`, has no backward on the CPU, so
the blocks have the `ScaledDotProductAttention` of torchtitan here.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import tool
from remat_executor import MemoryMeter
from remat_facade import planned

TOOL = "torchtitan"
SHAPE = (4, 128)
OVERRIDE = "remat_facade.integrations.torchtitan.remat"
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def titan(name: str) -> Any:
    """A module of torchtitan; kernels of its experts, which import triton and do not run here, are absent."""
    if KERNELS not in sys.modules:
        absent = types.ModuleType(KERNELS)
        absent.__getattr__ = lambda name: None
        sys.modules[KERNELS] = absent
        tool("torchtitan.tools.utils").device_type = "cpu"
    return tool(f"torchtitan.{name}")


@contextmanager
def group(run: Run) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{run.folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def policy(run: Run, *, selective: bool) -> Any:
    """The configured activation checkpointing, after the overrides of the command line."""
    override, configs = titan("config.override"), titan("config")
    default = titan("distributed.activation_checkpoint").SelectiveAC.Config

    @dataclass(kw_only=True)
    class Config(configs.Configurable.Config):  # type: ignore[name-defined]
        activation_checkpoint: Any = field(default_factory=default)

    config = Config()
    if run.planned:
        options = {**run.line, "cache_dir": str(run.cache), "budget": "75%"}
        imports = override.parse_cli_imports([f"{OVERRIDE}={json.dumps(options)}"])
        override.apply_overrides(override.OverrideConfig(imports=imports), config)
    elif not selective:
        return None
    return config.activation_checkpoint


def sharded(model: Any, checkpointing: Any) -> Any:
    """What torchtitan makes of a model on one rank: its policy of checkpointing first, then FSDP."""
    configs = titan("config")
    dims = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "world_size": 1}
    return titan("models.llama3").parallelize_llama(
        model,
        parallel_dims=titan("distributed").ParallelDims(**dims),
        training=configs.TrainingConfig(mixed_precision_param="float32"),
        parallelism=configs.ParallelismConfig(),
        compile_config=configs.CompileConfig(enable=False),
        ac_config=checkpointing,
        dump_folder="",
    )


def applied(model: Any, checkpointing: Any) -> Any:
    """The policy alone, without FSDP."""
    if checkpointing is not None:
        checkpointing.build(dump_folder="").apply(model)
    return model


def model_by(parallelize: Callable[[Any, Any], Any], checkpointing: Any) -> Any:
    """The debug model with two layers and its weights."""
    spec = titan("models.llama3").model_registry("debugmodel")
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = titan("models.common.attention").ScaledDotProductAttention.Config()
    with torch.device("meta"):
        model = spec.model.build()
    model = parallelize(model, checkpointing)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return model.train()


def train(run: Run, model: Any) -> None:
    """Four steps, as torchtitan's trainer does them."""
    for layer in model.layers.values():
        run.watched(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        tokens = torch.randint(0, 2048, SHAPE, generator=torch.Generator().manual_seed(step))
        logits = model(tokens).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens.roll(-1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    for name, value in model.state_dict().items():
        run.tensors[name] = (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def meter_blocks(run: Run, model: Any) -> None:
    """Whether the step of each block alone keeps the block's budget."""
    shares = []
    for layer in model.layers.values():
        x = torch.randn(*SHAPE, 256, requires_grad=True)
        upstream = torch.randn(*SHAPE, 256)
        with MemoryMeter() as meter:
            layer(x, None, None).backward(upstream)
        if run.planned:
            shares.append(meter.peak_nbytes / planned(layer).plan.budget_nbytes)
    if run.planned:
        run.checks["each block keeps its budget"] = max(shares) <= 1
        run.notes.append(f"each block alone takes at most {max(shares):.1%} of its budget")


@scenario(TOOL, "FSDP, override, beside SelectiveAC", plans=2, parts=True)
def beside_selective(run: Run) -> None:
    """Beside the policy that it replaces."""
    with group(run):
        train(run, model_by(sharded, policy(run, selective=True)))


@scenario(TOOL, "FSDP, override, beside no checkpointing", plans=2, parts=True)
def beside_none(run: Run) -> None:
    """Losses and weights are those without any recomputation."""
    with group(run):
        train(run, model_by(sharded, policy(run, selective=False)))


@scenario(TOOL, "override, each block metered", plans=2, parts=True)
def metered(run: Run) -> None:
    """Without FSDP, whose gathered parameters the meter would count."""
    model = model_by(applied, policy(run, selective=False))
    train(run, model)
    meter_blocks(run, model)
