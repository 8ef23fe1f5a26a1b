"""Several processes of `torch.distributed` on this machine, for tests: gloo on CPU, met through a file."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from remat_executor import RematWarning

LIMIT_S = 200.0


class RankError(AssertionError):
    """What a rank raised, or that one hangs."""


class Ranks:
    """A few ranks that run what they are given, together, until the context ends.

    They are started when there is something to run, and again after a failure, which ends all of them: one
    may wait for another for ever.
    """

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self._folder = tempfile.TemporaryDirectory()
        self._started = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._processes and error is None:
            self.run(_leave)
            for process in self._processes:
                process.join(timeout=10.0)
        self._end()
        self._folder.cleanup()

    def run(self, work: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Call `work(rank, *args)` on each rank; returns what each returns.

        Raises:
            RankError: one raised, ended or did not finish in time.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((work, args))
        results: list[Any] = [None] * self.count
        end_s, waiting = time.monotonic() + limit_s, dict(enumerate(self._pipes))
        while waiting:
            ready = multiprocessing.connection.wait(waiting.values(), timeout=end_s - time.monotonic())
            if not ready:
                self._fail(f"{work.__name__}: ranks {sorted(waiting)} hang")
            for rank, pipe in list(waiting.items()):
                if pipe not in ready:
                    continue
                try:
                    failure, results[rank] = pipe.recv()
                except EOFError:
                    failure = "it ended"
                if failure is not None:
                    self._fail(f"{work.__name__}, rank {rank}: {failure}")
                del waiting[rank]
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._started += 1
        met = str(Path(self._folder.name) / f"met{self._started}")
        for rank in range(self.count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, met, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _fail(self, what: str) -> None:
        self._end()
        raise RankError(what)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(rank: int, count: int, met: str, pipe: Connection) -> None:
    warnings.simplefilter("error", RematWarning)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a container's own name may lead nowhere
    dist.init_process_group("gloo", init_method=f"file://{met}", rank=rank, world_size=count)
    while dist.is_initialized():
        work, args = pipe.recv()
        failure = result = None
        try:
            result = work(rank, *args)
        except BaseException:  # noqa: BLE001 - pytest's own failures are no Exceptions
            failure = traceback.format_exc()
        pipe.send((failure, result))


def _leave(rank: int) -> None:
    gc.collect()  # what refers to the group goes before it
    dist.barrier()
    dist.destroy_process_group()


def gathered(thing: Any) -> list[Any]:
    """What each rank has there."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found
