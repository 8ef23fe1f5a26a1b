"""Temporary files of killed processes are removed by the next process that writes in the folder."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from remat_graph import BadFile
from remat_graph.serialization import atomic_write, pipes
from remat_graph.serialization.atomic_write import write_whole
from remat_graph.serialization.json_reader import read_json

STOPS = """
import os, signal, sys
from remat_graph.serialization import atomic_write
if sys.argv[2] == "killed":
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
else:
    os.replace = lambda *_: (print("writing", flush=True), input())
atomic_write.write_whole(sys.argv[1], "half")
"""


def started(path: Path, how: str) -> Any:
    """A process that stops right before it replaces the target."""
    words = [sys.executable, "-c", STOPS, str(path), how]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.skipif(os.name != "posix", reason="signals are posix")
def test_what_a_killed_process_leaves_is_removed(tmp_path: Path) -> None:
    """By the next process that writes any file in that folder."""
    (tmp_path / "a").write_text("before")
    with started(tmp_path / "a", "killed") as process:
        assert -signal.SIGKILL == process.wait()
    assert len(os.listdir(tmp_path)) == 2
    write_whole(tmp_path / "b", "whole")
    assert ["a", "b"] == sorted(os.listdir(tmp_path))
    assert "before" == (tmp_path / "a").read_text()


@pytest.mark.skipif(os.name != "posix", reason="locks are posix")
def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    """A locked temporary file is not abandoned."""
    with started(tmp_path / "a", "waiting") as process:
        process.stdout.readline()
        write_whole(tmp_path / "b", "whole")
        assert len(os.listdir(tmp_path)) == 2
        process.communicate(b"\n")
    assert ["b"] == [name for name in os.listdir(tmp_path) if not name.startswith(".")]


def test_many_write_one_file_at_once(tmp_path: Path) -> None:
    """Each result is complete, no writer fails, no temporary file is left."""
    failed = []

    def write(letter: Any) -> None:
        try:
            for _ in range(50):
                write_whole(tmp_path / "file", letter * 1000)
                assert 1 == len(set((tmp_path / "file").read_text()))
        except (OSError, AssertionError) as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failed
    assert ["file"] == os.listdir(tmp_path)


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Only files with the names of our temporary files are removed."""
    names = [".a.part", "a.remat-part", ".a.remat-part", ".a.0000000g.remat-part"]
    for name in names:
        (tmp_path / name).write_text("mine")
    write_whole(tmp_path / "b", "whole")
    assert sorted([*names, "b"]) == sorted(os.listdir(tmp_path))


def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a temporary file can be removed only if no process has it open."""
    monkeypatch.setattr(atomic_write, "fcntl", None)
    (tmp_path / ".a.00000000.remat-part").write_text("half")
    write_whole(tmp_path / "a", b"whole")
    assert ["a"] == os.listdir(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="modes are posix")
def test_a_private_file_is_the_users_alone(tmp_path: Path) -> None:
    """Also if the replaced file was not private."""
    path = tmp_path / "file"
    path.write_text("before")
    path.chmod(0o644)
    write_whole(path, "after", private=True)
    assert 0o600 == path.stat().st_mode & 0o777


def test_a_name_as_long_as_names_may_be(tmp_path: Path) -> None:
    """The name of the temporary file is not longer, in bytes."""
    name = "é" * 127
    write_whole(tmp_path / name, "whole")
    assert [name] == os.listdir(tmp_path)


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipe with a short `WAIT_S`."""
    monkeypatch.setattr(pipes, "WAIT_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.skipif(os.name != "posix", reason="pipes are posix")
def test_a_pipe_without_another_end_is_not_waited_for(pipe: Path) -> None:
    """Neither to read nor to write."""
    with pytest.raises(BadFile, match="it is a pipe into which no process writes"):
        read_json(pipe)
    with pytest.raises(OSError, match="it is a pipe from which no process reads"):
        write_whole(pipe, "whole")


@pytest.mark.skipif(os.name != "posix", reason="pipes are posix")
def test_a_pipe_with_a_writer_is_read_to_its_end(pipe: Path) -> None:
    """However slow the writer is: it writes during the second wait."""
    reads = []
    read = os.read

    def counted(file: Any, most: Any) -> Any:
        reads.append(file)
        if len(reads) == 2:
            os.write(writer, b"[1,")
        if len(reads) == 3:
            os.write(writer, b"2]")
            os.close(writer)
        return read(file, most)

    keeper = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "read", counted)
        assert [1, 2] == read_json(pipe)
    os.close(keeper)


@pytest.mark.skipif(os.name != "posix", reason="pipes are posix")
def test_a_cache_is_not_written_into_a_pipe(pipe: Path) -> None:
    """A private file replaces only a regular file; anything else stays."""
    keeper = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="pipe exists and is not a file"):
        write_whole(pipe, "whole", private=True)
    assert b"" == os.read(keeper, 1)
    os.close(keeper)
