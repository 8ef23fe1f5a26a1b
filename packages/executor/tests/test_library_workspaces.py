"""Libraries are used in both threads of a step before anything is measured."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from remat_executor import RematWarning
from remat_executor.memory import library_workspaces
from remat_executor.memory.library_workspaces import warm_up_libraries, warn_of_trials


def test_each_dtype_in_the_forward_and_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's except integers, float32 and bfloat16; one without products is left out."""
    used: list[torch.dtype] = []

    def multiply(device: torch.device, dtype: torch.dtype) -> None:
        used.append(dtype)
        if dtype == torch.float64:
            raise RuntimeError("no product of this dtype")

    monkeypatch.setattr(library_workspaces, "_multiply", multiply)
    with torch.no_grad():
        warm_up_libraries(torch.device("cpu"), [torch.float64, torch.int64])
    assert Counter(used) == {torch.float32: 2, torch.bfloat16: 2, torch.float64: 2}


def test_the_products_run() -> None:
    """On a device that has them; nothing is left and the generator is untouched."""
    state = torch.get_rng_state()
    warm_up_libraries(torch.device("cpu"), [torch.float64])
    assert torch.equal(state, torch.get_rng_state())


def test_trials_of_cudnn_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where convolutions run on CUDA with the flag."""
    convolution, cuda = "aten.convolution.default", torch.device("cuda")
    warn_of_trials(cuda, [convolution])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    warn_of_trials(torch.device("cpu"), [convolution])
    warn_of_trials(cuda, ["aten.mm.default"])
    with pytest.warns(RematWarning, match=r"cudnn.benchmark is on: .*set it to False before planning"):
        warn_of_trials(cuda, ["aten.mm.default", convolution])


@pytest.mark.cuda
def test_on_cuda() -> None:
    """Afterwards neither the first product of this thread nor that of autograd's thread leaves a workspace.

    Autograd's thread may drop its last gradient after the caller has gone on, so a few bytes are let through.
    """
    matrix = torch.randn(256, 256, device="cuda", requires_grad=True)
    found = []

    def train() -> None:
        warm_up_libraries(torch.device("cuda"))
        before = torch.cuda.memory_allocated()
        torch.autograd.grad((matrix @ matrix).sum(), matrix)
        found.append(torch.cuda.memory_allocated() - before)

    thread = threading.Thread(target=train)  # a thread without handles of cuBLAS
    thread.start()
    thread.join()
    assert abs(found[0]) < 1 << 20
