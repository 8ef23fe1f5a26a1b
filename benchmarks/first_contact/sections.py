"""The sections in their order, and the shares of the time that they get."""

from collections.abc import Sequence
from types import ModuleType

import attrs

from benchmarks.first_contact import (
    cuda_tests,
    environment,
    exactness,
    full_budget,
    language_model,
    offloading,
    runtimes,
    timing_model,
)


@attrs.frozen
class Section:
    """A module with the rows of a section.

    Attributes:
        module: has `SECTION`, `names` and `run`.
        share: of the time for all sections that are left.
        processes: how many may run its rows at the same time as those of other sections; 0 if its rows are
            timed, so that nothing else may run.
    """

    module: ModuleType
    share: float
    processes: int = 0

    @property
    def name(self) -> str:
        """What its rows are filed under."""
        name: str = self.module.SECTION
        return name

    def names(self, *, small: bool) -> tuple[str, ...]:
        """Names of its rows, in their order."""
        names: tuple[str, ...] = self.module.names(small=small)
        return names

    def portions(self, names: Sequence[str]) -> list[list[str]]:
        """Names for each of its processes; rows of one model stay together."""
        models = list(dict.fromkeys(name.split()[0] for name in names))
        place = {model: number % self.processes for number, model in enumerate(models)}
        found: list[list[str]] = [[] for _ in range(min(self.processes, len(models)))]
        for name in names:
            found[place[name.split()[0]]].append(name)
        return found


SECTIONS = (
    Section(environment, 15),
    Section(cuda_tests, 150, processes=1),
    Section(exactness, 105, processes=3),
    Section(full_budget, 35),
    Section(timing_model, 35),
    Section(runtimes, 45),
    Section(language_model, 50),
    Section(offloading, 45),
)
