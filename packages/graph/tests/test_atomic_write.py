"""Files are written atomically."""

import os

import pytest

from remat_graph import load_order, save_order
from remat_graph.serialization.json_reader import write_json


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """It leaves no temporary file either."""
    path = tmp_path / "order.json"
    save_order([1, 2], path)
    for broken in (object(), float("nan"), {1: object()}):
        with pytest.raises((TypeError, ValueError)):
            write_json([broken], path)
    assert (1, 2) == load_order(path)
    assert ["order.json"] == os.listdir(tmp_path)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    """Ctrl-C right before the file is replaced."""
    path = tmp_path / "order.json"
    save_order([1, 2], path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_order([3], path)
    assert (1, 2) == load_order(path)
    assert ["order.json"] == os.listdir(tmp_path)


def test_a_missing_folder_is_the_systems_error(tmp_path):
    """No folder is created."""
    with pytest.raises(FileNotFoundError):
        save_order([1], tmp_path / "nowhere" / "order.json")
    assert [] == os.listdir(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="modes are posix")
def test_the_mode_is_that_of_any_other_file(tmp_path):
    """A replaced file keeps its own mode."""
    path, plain = tmp_path / "order.json", tmp_path / "plain"
    save_order([1], path)
    plain.write_text("")
    assert plain.stat().st_mode == path.stat().st_mode
    path.chmod(0o600)
    save_order([2], path)
    assert 0o600 == path.stat().st_mode & 0o777


@pytest.mark.skipif(os.name != "posix", reason="links are posix")
def test_a_link_is_written_through(tmp_path):
    """The file it points to changes, the link stays."""
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    save_order([1], real)
    link.symlink_to(real)
    save_order([2], link)
    assert link.is_symlink()
    assert (2,) == load_order(real)


@pytest.mark.skipif(os.name != "posix", reason="devices are posix")
def test_what_is_no_file_is_written_to(tmp_path):
    """A pipe cannot be replaced."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save_order([1, 2], pipe)
    assert b"[1,2]\n" == os.read(reader, 100)
    os.close(reader)
