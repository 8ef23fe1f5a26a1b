"""A step that a command reads from a file or captures from a model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import typer

from remat_facade.cli.target import Target
from remat_facade.errors import BadTarget
from remat_graph import Graph, Platform, find_platform, load_graph

if TYPE_CHECKING:  # it imports numpy
    from remat_facade.planning.planner import Progress


def is_saved(place: str, input: str | None) -> bool:
    """Whether a place with an option ``--input`` or None is a saved graph, not a model."""
    if place.endswith(".py"):
        return False
    return Path(place).is_file() or place.endswith(".json") or (input is None and ":" not in place)


Stage = Callable[[str, int, int], None]
"""Called with (what, done, total) while a model is captured and measured."""


@attrs.frozen(kw_only=True)
class SavedOrModel:
    """A saved graph, or a model with the options of its capture.

    Attributes:
        place: as the user wrote it.
        target: the model; None for a saved graph.
        platform: gives the times; None to measure.
        ways: as for `Rockmate`.
        outputs: as for `Rockmate`.
    """

    place: str
    target: Target | None
    platform: Platform | None = None
    ways: str = "exact"
    outputs: str = "kept"

    @classmethod
    def parse(cls, place: str, **given: Any) -> "SavedOrModel":
        """The step that the command line names; `given` are the options of models, None where left out.

        Raises:
            BadParameter: an option of models is given with a saved graph.
            BadTarget: there is no such file or model.
            UnknownPlatform: there is no such platform.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        if is_saved(place, chosen.get("input")):
            if chosen:
                name = next(iter(chosen))
                raise typer.BadParameter(f"--{name} is for a model: give MODULE:FACTORY, or leave it out")
            if not Path(place).exists():
                problem = "no such file; for a model give train.py:make, or its name with --input 3x224x224"
                raise BadTarget(target=place, problem=problem)
            return cls(place=place, target=None)
        named = chosen.pop("platform", None)
        times = None if named is None else find_platform(named)
        described = (chosen.pop(name, None) for name in ("input", "batch", "dtype"))
        target = Target.parse(place, *described)
        return cls(place=place, target=target, platform=times, **chosen)

    @property
    def saved(self) -> bool:
        """Whether it is a saved graph."""
        return self.target is None

    @property
    def kind(self) -> str:
        """The name of the argument that it is."""
        return "GRAPH.json" if self.saved else "MODULE:FACTORY"

    def load(self, update: "Progress", stage: Stage | None = None) -> Graph:
        """Read the graph, or build the model and capture its step.

        Args:
            update: shows the stage, unless `stage` is given.
            stage: called while a model is captured and measured.
        """
        if self.target is None:
            return load_graph(self.place)
        from remat_facade.cli.steps import graph_of

        def shown(what: str, done: int, total: int) -> None:
            update(f"{what} {done} of {total}" if total > 1 else what)

        loaded = self.target.load(meta=self.platform is not None)
        return graph_of(
            loaded,
            platform=self.platform,
            ways=self.ways,
            outputs=self.outputs,  # type: ignore[arg-type]
            on_progress=stage or shown,
        )
