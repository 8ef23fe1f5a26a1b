"""Costs of a way's kernel are measured again when its code, or code in its folder, has changed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from remat_executor.costs.kernel_sources import source_hash


def loaded(folder: Path, name: str, package: str = "") -> ModuleType:
    """The module of a file, as if imported."""
    spec = importlib.util.spec_from_file_location(
        f"{package}.{name}" if package else name, folder / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the test are forgotten after it."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def hash_of(folder: Path, package: str = "") -> str:
    return source_hash(loaded(folder, "kernels", package).kernel)


def test_a_kernel_has_the_hash_of_its_module(tmp_path: Path) -> None:
    """A module that is in no package is hashed alone."""
    (tmp_path / "kernels.py").write_text("def kernel(): return 1\n")
    before = hash_of(tmp_path)
    assert 8 == len(before)
    (tmp_path / "other.py").write_text("x = 1\n")
    assert before == hash_of(tmp_path)
    (tmp_path / "kernels.py").write_text("def kernel(): return 2\n")
    assert before != hash_of(tmp_path)


def test_in_a_package_the_modules_in_its_folder_count(tmp_path: Path) -> None:
    """A kernel calls functions of them."""
    (tmp_path / "kernels.py").write_text("def kernel(): return 1\n")
    before = hash_of(tmp_path, "package")
    (tmp_path / "chunks.py").write_text("SIZE = 1\n")
    assert before != hash_of(tmp_path, "package")


def test_a_kernel_without_a_source_has_none() -> None:
    assert "" == source_hash(len)
