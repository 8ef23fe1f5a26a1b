"""The sections in their order, and the shares of the time that they get."""

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
    """A module with the rows of a section, and its share of the time."""

    module: ModuleType
    share: float

    @property
    def name(self) -> str:
        """What its rows are filed under."""
        name: str = self.module.SECTION
        return name

    def names(self, *, small: bool) -> tuple[str, ...]:
        """Names of its rows, in their order."""
        names: tuple[str, ...] = self.module.names(small=small)
        return names


SECTIONS = (
    Section(environment, 15),
    Section(cuda_tests, 150),
    Section(exactness, 105),
    Section(full_budget, 35),
    Section(timing_model, 35),
    Section(runtimes, 45),
    Section(language_model, 50),
    Section(offloading, 45),
)
