"""A torch that is newer than the tested ones is warned of once, where a model is first captured."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from remat_executor import RematWarning, estimated_graph
from remat_executor.torch_private.tested_versions import warn_if_untested
from remat_graph import Roofline


@pytest.fixture(autouse=True)
def nothing_reported_yet() -> Iterator[None]:
    """As in a new process; and no test leaves a report behind."""
    warn_if_untested.cache_clear()
    yield
    warn_if_untested.cache_clear()


def capture() -> None:
    """Capture a small model."""
    platform = Roofline(flops_per_s=1e12, nbytes_per_s=1e11)
    estimated_graph(nn.Linear(4, 4), (torch.randn(2, 4),), {}, platform)


def warned(version: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of two captures with a torch of this version."""
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        capture()
        capture()
    return [str(each.message) for each in found if issubclass(each.category, RematWarning)]


@pytest.mark.parametrize("version", ["2.14.0", "2.14.0a0+git1234", "2.100.1+cu130", "3.0.0"])
def test_a_newer_minor_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with both versions and what to do, however many models are captured."""
    (line,) = warned(version, monkeypatch)
    assert line.startswith(f"torch {version} is newer than")
    assert line.endswith("or install torch<2.14")


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.13.9"])
def test_a_tested_minor_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning, whatever the patch and the build."""
    assert [] == warned(version, monkeypatch)


def test_it_names_the_line_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place is the call, not a file of remat."""
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    with pytest.warns(RematWarning) as found:
        capture()
    assert __file__ == found[0].filename
