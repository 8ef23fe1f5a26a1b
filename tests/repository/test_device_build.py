"""The test device is built once for several processes, and says so where it cannot be built."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.device import build


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(build.NoCompiler, match="no C\\+\\+ compiler: install g\\+\\+"):
        build.library(tmp_path)


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lines with errors are in the message, and no file is left that looks complete."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.CannotBuild, match="fatal error: no header") as caught:
        build.library(tmp_path / "cache")
    assert not isinstance(caught.value, build.NoCompiler)  # for which a session skips its tests
    assert list((tmp_path / "cache").rglob("*.so")) == []


def test_one_of_several_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others wait for it; another state of the sources is another library."""
    built: list[Path] = []
    begun = threading.Barrier(2)

    def slow(path: Path) -> None:
        built.append(path)
        path.write_bytes(b"library")

    def ask() -> None:
        begun.wait()
        assert build.library(tmp_path).read_bytes() == b"library"

    monkeypatch.setattr(build, "_build", slow)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    other = tmp_path / "sources"
    other.mkdir()
    (other / "device.cpp").write_text("// changed")
    monkeypatch.setattr(build, "SOURCES", other)
    assert build.library(tmp_path) != built[0]
