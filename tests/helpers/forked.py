"""Processes forked beside a planned module, in every state of a step: what becomes of them.

It is run as a program, for pytest itself has threads, and a child that hangs must be ended. It prints one
line for each child: state, what the child did, and how it ended.
"""

import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from remat_facade import Hiremate, Offmate
from remat_graph import RematError
from remat_offload import SimulatedMachine

LIMIT_S = 30.0
HUNG, REFUSED, DONE = 9, 4, 3  # what a child ends with


def child(act: Callable[[], object]) -> int:
    """The exit status of a process that does something and ends as a program does."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            act()
        except RematError as error:
            sys.stdout.write(f"  {type(error).__name__}: {error}\n")
            sys.exit(REFUSED)
        sys.exit(DONE)
    began_s = time.monotonic()
    while time.monotonic() - began_s < LIMIT_S:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return HUNG


def states(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Iterator[str]:
    """Before a step, and right after it."""
    yield "built"
    model(x).square().mean().backward()
    optimizer.step()
    yield "stepped"


TRIED = {"built": ("exit", "forward", "state_dict"), "stepped": ("exit", "forward", "step", "read", "let go")}
"""What children try where nothing is under way, and where most is."""


def actions(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> dict[str, Any]:
    """What a child may try."""
    return {
        "exit": int,
        "forward": lambda: model(x).sum().item(),
        "step": optimizer.step,
        "state_dict": model.state_dict,
        "read": lambda: [float(p.sum()) for p in model.parameters()],
        "let go": lambda: model.close() if isinstance(model, Offmate) else None,
    }


def main(kind: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())])
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(32, 64)
    gc.freeze()  # children need not search torch for garbage as they end; what is made below they do
    if kind == "offmate":
        machine = SimulatedMachine(to_host_nbytes_per_s=1e6, to_device_nbytes_per_s=1e6)
        model: Any = Offmate(
            net, x, "40%", optimizer=optimizer, machine=machine, host_budget="20MiB", cache_dir=folder
        )
    else:
        model = Hiremate(net, x, "100%", cache_dir=folder)
    for state in states(model, optimizer, x):
        acts = actions(model, optimizer, x)
        for name in TRIED.get(state, ()):
            sys.stdout.write(f"{state}|{name}|{child(acts[name])}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
