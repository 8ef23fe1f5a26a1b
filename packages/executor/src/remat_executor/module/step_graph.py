"""The measured graph of a training step without a planned module."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from remat_executor.costs.annotate import costs_on
from remat_executor.costs.check_platform import check_platform
from remat_executor.guards.snapshot import Snapshot
from remat_executor.module.input_checks import check_input, output_indices
from remat_executor.module.pipeline import CallToPlan, PipelineStages, Progress
from remat_executor.translation.dropped_outputs import OutputsState
from remat_executor.ways.registry import families
from remat_executor.ways.substitution import Family
from remat_graph import Graph, Platform


def step_graph(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    platform: Platform | None = None,
    cache_dir: str | Path | None = None,
    differentiate: Iterable[int] | None = None,
    on_progress: Progress | None = None,
    ways: Iterable[Family] | None = None,
    outputs: OutputsState = "kept",
) -> Graph:
    """The measured graph of a training step, for planning without a `PlannedModule`.

    Args:
        model: the module, in the mode it will train in.
        args: positional sample inputs.
        kwargs: keyword sample inputs.
        platform: gives the times instead of the clock.
        cache_dir: folder of the cost cache; None for the user's.
        differentiate: indices among the output tensors that get gradients; None: a scalar in front, else all.
        on_progress: called with (what, done, total).
        ways: families of other ways to run ops, of which plans may choose; None for all that are exact.
        outputs: "dropped" if the caller drops the outputs that are not differentiated before the backward.

    Raises:
        BadInput: the model, an input, the platform or `outputs` is not what is expected.
    """
    check_platform(platform)
    tensors = check_input(model, args, kwargs or {})
    stages = PipelineStages(
        costs=costs_on(tensors.device, cache_dir, platform),
        differentiate=output_indices(differentiate),
        on_progress=on_progress,
        families=families(ways),
        outputs=outputs,
    )
    conditions = Snapshot.take(model).signature(tensors).conditions()
    call = CallToPlan(model=model, tensors=tensors, conditions=conditions, forward=model.forward)
    traced = stages.capture(call)
    return stages.annotate(call, traced, stages.translate(call, traced))
