"""Plan the outputs that are not differentiated as dropped by the caller before the backward.

Such an output is returned, so the forward holds it to its end, as `with_dropped` says. After that it is an
activation like any other: freed, kept for the backward, or recomputed.
"""

from typing import Literal, TypeVar, get_args

import attrs

from remat_executor.capture.captured import Captured
from remat_executor.errors import check_choice
from remat_executor.translation.recipes import RunKernel
from remat_executor.translation.translation import Translation
from remat_executor.ways.substitution import Change
from remat_graph.training import with_dropped

T = TypeVar("T")

OutputsState = Literal["kept", "dropped"]
"""Whether the caller holds the outputs that are not differentiated until the backward ends."""


def check_outputs(outputs: object) -> None:
    """Check the option `outputs`.

    Raises:
        BadInput: it is not one of `OutputsState`.
    """
    check_choice("outputs", outputs, get_args(OutputsState), "kept")


def with_dropped_outputs(translation: Translation, captured: Captured) -> Translation:
    """The translation with another role for these outputs; one that shares a differentiated storage stays."""
    graph = translation.graph
    differentiated = {graph.values[tangent].of for tangent in graph.tangents}
    dropped = [value for value in graph.outputs if value not in differentiated]
    if not dropped:
        return translation
    nothing = RunKernel(Change(node=captured.graph_module.graph.output_node()))
    place = sum(not op.backward for op in graph.ops)
    return attrs.evolve(
        translation,
        graph=with_dropped(graph, dropped),
        recipes=_inserted(translation.recipes, place, nothing),
        made_by=_inserted(translation.made_by, place, ()),
        in_place=_inserted(translation.in_place, place, {}),
        kernels={(i + (i >= place), k): recipe for (i, k), recipe in translation.kernels.items()},
    )


def _inserted(items: tuple[T, ...], place: int, item: T) -> tuple[T, ...]:
    return (*items[:place], item, *items[place:])
