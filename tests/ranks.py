"""Several processes of `torch.distributed` on this machine, for tests: gloo on CPU, met through a file."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from remat_executor import RematWarning

LIMIT_S = 120.0


def run_ranks(work: Callable[..., None], *args: Any, ranks: int = 2) -> None:
    """Run `work(rank, *args)` in so many new processes; fail with what one raises, or if they hang."""
    with tempfile.TemporaryDirectory() as folder:
        started = mp.start_processes(
            _run_rank, (work, str(Path(folder) / "met"), ranks, args), nprocs=ranks, join=False
        )
        end_s = time.monotonic() + LIMIT_S
        while not started.join(timeout=1.0):  # raises what a rank raises, and ends the others
            if time.monotonic() > end_s:
                for process in started.processes:
                    process.kill()
                    process.join()
                pytest.fail(f"{work.__name__} does not end: a rank waits for another")


def _run_rank(rank: int, work: Callable[..., None], met: str, ranks: int, args: tuple[Any, ...]) -> None:
    warnings.simplefilter("error", RematWarning)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a container's own name may lead nowhere
    dist.init_process_group("gloo", init_method=f"file://{met}", rank=rank, world_size=ranks)
    work(rank, *args)
    dist.destroy_process_group()  # not after a failure: it might wait for the others, who wait for this one


def gathered(thing: Any) -> list[Any]:
    """What each rank has there."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found
