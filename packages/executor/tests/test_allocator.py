"""The allocator's reading: right where blocks can be counted by hand; the meter's plus workspaces."""

import subprocess
import sys
import threading

import pytest
import torch
from torch.profiler import profile

from remat_executor import MemoryMeter, allocator_peak
from remat_executor.memory.allocator import ProfilerBusy

N = 1000
NBYTES = 4 * N


def test_by_hand() -> None:
    """Three blocks, of which two at a time, of which one stays."""

    def work() -> torch.Tensor:
        a = torch.empty(N)
        b = torch.empty(2 * N)
        del a
        c = torch.empty(N)
        del b
        return c

    record = allocator_peak(work)
    assert (record.peak_nbytes, record.end_nbytes) == (3 * NBYTES, NBYTES)
    assert record.result.numel() == N


def test_equals_the_meter_without_scratch() -> None:
    """A multi-layer perceptron's kernels need no workspace on CPU: both readings are equal in bytes."""
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.ReLU()
    )
    x = torch.randn(128, 64)
    tangent = torch.randn(128, 64)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        net(x).backward(tangent)

    step()
    net.zero_grad(set_to_none=True)
    with MemoryMeter(net, x) as meter:
        step()
    metered = (meter.peak_nbytes, meter.live_nbytes)
    net.zero_grad(set_to_none=True)
    record = allocator_peak(step)
    assert metered == (record.peak_nbytes, record.end_nbytes)


def test_sees_the_scratch_that_the_meter_does_not() -> None:
    """A convolution reorders its input into a workspace: only the allocator counts it."""
    conv = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False)
    x = torch.randn(8, 64, 32, 32)
    with torch.no_grad(), MemoryMeter(conv, x) as meter:
        conv(x)
    with torch.no_grad():
        record = allocator_peak(lambda: conv(x))
    assert record.result.nbytes == meter.peak_nbytes == record.end_nbytes
    assert record.peak_nbytes > meter.peak_nbytes + x.nbytes // 2


def test_blocks_of_earlier_sessions() -> None:
    """A block that stands where an earlier session's stood goes without being counted as that one."""
    kept = [allocator_peak(lambda: torch.empty(10 * N)).result]
    address = kept[0].data_ptr()
    for size in range(10 * N, 9 * N, -10):  # the allocator soon hands out the same address
        kept[0] = torch.empty(0)
        kept[0] = torch.empty(size)
        if kept[0].data_ptr() == address:
            break

    def work() -> torch.Tensor:
        made = torch.empty(5 * N)
        kept.clear()
        return made

    record = allocator_peak(work)
    assert (record.peak_nbytes, record.end_nbytes) == (5 * NBYTES, 5 * NBYTES)


def test_blocks_freed_by_another_thread() -> None:
    """Their frees are not recorded; they count no longer than until their addresses are allocated again."""
    addresses: list[int] = []

    def work() -> None:
        while len(set(addresses)) == len(addresses):
            box = [torch.empty(N)]
            addresses.append(box[0].data_ptr())
            thread = threading.Thread(target=box.clear)
            thread.start()
            thread.join()

    record = allocator_peak(work)
    assert record.peak_nbytes == record.end_nbytes == NBYTES * len(set(addresses))


def test_refuses_to_end_a_running_profile() -> None:
    """While another profiler runs it is a clear error, and that profiler continues."""
    with profile(acc_events=True) as running:  # without it torch 2.11 warns
        torch.zeros(1)
        with pytest.raises(ProfilerBusy, match="profiler is running"):
            allocator_peak(lambda: torch.zeros(1))
        torch.ones(1)
    assert {"aten::zeros", "aten::ones"} <= {event.name for event in running.events()}


def test_an_error_passes_and_ends_the_session() -> None:
    """What the function raises comes out, and the next reading works."""
    with pytest.raises(ZeroDivisionError):
        allocator_peak(lambda: 1 // 0)
    assert allocator_peak(lambda: torch.empty(N)).peak_nbytes == NBYTES


def test_says_nothing() -> None:
    """A session leaves standard output and standard error empty."""
    code = "import torch; from remat_executor import allocator_peak; allocator_peak(lambda: torch.empty(9))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.cuda
def test_on_cuda() -> None:
    """The device's own statistics, above what it held at entry; CUDA rounds blocks up to 512 bytes."""
    before = torch.empty(10 * N, device="cuda")

    def work() -> torch.Tensor:
        a = torch.empty(128 * N, device="cuda")
        return a[:128].clone()

    record = allocator_peak(work, "cuda")
    assert (record.peak_nbytes, record.end_nbytes) == (4 * 128 * N + 512, 512)
    del before
