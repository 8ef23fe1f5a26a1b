"""The graph of a target's training step: measured here, or estimated for a platform from shapes alone."""

from typing import Any

from remat_executor import estimated_graph, step_graph
from remat_executor.module.pipeline import Progress
from remat_executor.translation.dropped_outputs import OutputsState
from remat_facade.entrypoints.inputs import as_call, check_forward, check_model
from remat_facade.entrypoints.options import families_of
from remat_facade.entrypoints.prepare import ESTIMATED_DEVICE, is_estimated
from remat_graph import Graph, Platform


def graph_of(
    loaded: tuple[Any, Any, Any],
    *,
    platform: Platform | None = None,
    ways: str = "exact",
    outputs: OutputsState = "kept",
    on_progress: Progress | None = None,
) -> Graph:
    """The graph of a step.

    Args:
        loaded: model, sample and keyword inputs, as `Target.load` returns them.
        platform: gives the times; a model on the meta device is estimated with it.
        ways: as for `Rockmate`.
        outputs: as for `Rockmate`.
        on_progress: called with (what, done, total).

    Raises:
        BadModel: the model cannot be planned.
        BadSample: the sample is not a call of the model.
    """
    model, sample, sample_kwargs = loaded
    args, kwargs = as_call(sample, sample_kwargs)
    families = families_of(ways)
    if platform is not None and is_estimated(model, platform):
        check_model(model, (), {}, filled=True)
        check_forward(model)
        return estimated_graph(
            model, args, kwargs, platform, device=ESTIMATED_DEVICE, ways=families, outputs=outputs
        )
    check_model(model, args, kwargs)
    check_forward(model)
    return step_graph(
        model, args, kwargs, platform=platform, ways=families, outputs=outputs, on_progress=on_progress
    )
