"""A pytest plugin for sessions on the test device: ``python -m pytest -p tests.device.plugin -m cuda``.

It is imported before torch. Every test fails that leaves a race behind. Without a compiler all tests of the
session are skipped, and the reason says so. If the library does not compile, it ends with the errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

from tests.device.build import NoCompiler, library
from tests.device.torch_cuda import load


@attrs.frozen
class Device:
    """What a test can ask of the test device, and set.

    Attributes:
        library: the C++ module.
    """

    library: ModuleType

    @contextlib.contextmanager
    def early_copies(self) -> Iterator[None]:
        """Streams other than the default one do their work as early as they may, instead of as late."""
        self.library.set_policy(True, True)
        try:
            yield
        finally:
            self.library.set_policy(False, True)

    def take_races(self) -> list[str]:
        """The accesses found since the last call that no event orders; they do not fail the test any more."""
        found: list[str] = self.library.take_races()
        return found

    def syncs(self) -> dict[str, int]:
        """How often the host has waited for the device, by reason."""
        found: dict[str, int] = self.library.syncs()
        return found

    def launches(self) -> dict[str, int]:
        """How often each kernel was launched."""
        found: dict[str, int] = self.library.launches()
        return found

    def reset_counts(self) -> None:
        """Count syncs and launches from here."""
        self.library.reset_counts()


def _load() -> tuple[Device | None, str]:
    try:
        return Device(load(library())), ""
    except NoCompiler as error:
        return None, str(error)


_DEVICE, _REASON = _load()


@pytest.fixture
def test_device() -> Device:
    """The device on which the session runs."""
    assert _DEVICE is not None
    return _DEVICE


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """A test fails if it leaves accesses that no event orders."""
    if _DEVICE is None:
        yield
        return
    _DEVICE.take_races()
    yield
    assert _DEVICE.take_races() == []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that mark no test `cuda`: to import them all takes 15 s."""
    if config.option.markexpr != "cuda" or not collection_path.match("test_*.py"):
        return None
    return None if b"mark.cuda" in collection_path.read_bytes() else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all tests if there is no device."""
    if _DEVICE is None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"the test device cannot be built: {_REASON}"))


def pytest_report_header(config: Any) -> str:
    """Say where the tests run."""
    return "cuda: the test device" if _DEVICE is not None else f"cuda: none; {_REASON}"
