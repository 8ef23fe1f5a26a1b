"""The environment, and whether the allocator counts blocks as plans assume."""

import importlib.util
import os
import platform
import random
import shutil
import subprocess

import torch
from torch import Tensor

from benchmarks.first_contact.rows import Findings, Setting
from remat_executor.memory.block_slack import largest_slack_nbytes
from remat_graph import format_nbytes

SECTION = "environment"
_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (1, 512, 513, _MIB, _MIB + 1, 3 * _MIB // 2, 21 * _MIB // 2, 11 * _MIB, 33 * _MIB + 5)
_RANDOM_BLOCKS = 300
_OPTIONAL = ("pytest", "xdist", "hypothesis", "transformers", "torchvision", "cvxpy", "highspy", "triton")
_SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
)


def names(*, small: bool) -> tuple[str, ...]:
    """The rows."""
    return "versions", "blocks"


def run(name: str, setting: Setting) -> Findings:
    """Run one row."""
    return _versions(setting) if name == "versions" else _blocks(setting)


def _versions(setting: Setting) -> Findings:
    found, device = Findings(setting), setting.device
    found.figures = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
        "cpus": os.cpu_count(),
        "compiler": shutil.which("g++") or shutil.which("gcc"),
        "packages": [each for each in _OPTIONAL if importlib.util.find_spec(each) is not None],
        "settings": {each: os.environ[each] for each in _SETTINGS if each in os.environ},
        "flags": _flags(),
    }
    if device.type != "cpu":
        module = torch.get_device_module(device)
        properties = module.get_device_properties(device)
        found.figures |= {
            "device": properties.name,
            "memory_nbytes": properties.total_memory,
            "free_nbytes": torch.accelerator.get_memory_info(device)[0],
            "capability": list(module.get_device_capability(device)),
        }
    if device.type == "cuda" and torch.version.cuda is not None:
        found.figures["allocator"] = torch.cuda.get_allocator_backend()
    figures = found.figures
    found.said = [
        f"torch {figures['torch']}, Python {figures['python']}, CUDA {figures['cuda']}",
        f"cuDNN {figures['cudnn']}, driver {figures['driver']}, {figures.get('device', 'no accelerator')}",
        f"not installed: {', '.join(sorted({*_OPTIONAL} - {*figures['packages']})) or 'nothing'}",
    ]
    if figures.get("allocator", "native") != "native":
        found.wrong.append(f"allocator {figures['allocator']}; goal: native, whose blocks plans know")
    return found


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return lines[0] if lines else None


def _flags() -> dict[str, bool]:
    cudnn, attention = torch.backends.cudnn, torch.backends.cuda
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": cudnn.enabled,
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        "tf32_convolutions": cudnn.allow_tf32,
        "tf32_products": attention.matmul.allow_tf32,
        "flash_attention": attention.flash_sdp_enabled(),
        "efficient_attention": attention.mem_efficient_sdp_enabled(),
        "math_attention": attention.math_sdp_enabled(),
        "cudnn_attention": attention.cudnn_sdp_enabled(),
    }


def _blocks(setting: Setting) -> Findings:
    """Blocks from an empty cache, then blocks among others that come and go."""
    found, device = Findings(setting), setting.device
    if device.type == "cpu":
        found.skipped = "the CPU's allocator has no blocks"
        return found
    slack_nbytes = largest_slack_nbytes()
    if slack_nbytes is None:
        found.skipped = "the settings of the allocator change its rules"
        return found
    counted = {}
    for nbytes in _SIZES:
        torch.accelerator.empty_cache()
        _, counted[nbytes] = _allocated(nbytes, device)
    held: list[Tensor] = []
    draws, largest_nbytes, unsplit = random.Random(0), 0, 0
    for _ in range(_RANDOM_BLOCKS):
        if held and draws.random() < 0.5:
            held.pop(draws.randrange(len(held)))
        nbytes = draws.randrange(1, (4 if setting.small else 40) * _MIB)
        tensor, taken_nbytes = _allocated(nbytes, device)
        held.append(tensor)
        beyond_nbytes = taken_nbytes - _rounded(nbytes)
        largest_nbytes, unsplit = max(largest_nbytes, beyond_nbytes), unsplit + (beyond_nbytes > 0)
        if not 0 <= beyond_nbytes <= (slack_nbytes if nbytes > _MIB else 0):
            found.wrong.append(
                f"a block of {nbytes} bytes counts {taken_nbytes}; goal: {_rounded(nbytes)}, and at most "
                f"{slack_nbytes} more above 1 MiB"
            )
    for nbytes, taken_nbytes in counted.items():
        if not _rounded(nbytes) <= taken_nbytes <= _rounded(nbytes) + (slack_nbytes if nbytes > _MIB else 0):
            found.wrong.append(f"{nbytes} bytes count {taken_nbytes} from an empty cache")
    found.figures = {
        "slack_nbytes": slack_nbytes,
        "counted": {str(nbytes): taken for nbytes, taken in counted.items()},
        "largest_slack_nbytes": largest_nbytes,
        "blocks_with_slack": unsplit,
    }
    found.said = [
        f"1 byte counts {counted[1]}, 1.5 MiB {counted[3 * _MIB // 2] / _MIB:g} MiB",
        f"11 MiB {counted[11 * _MIB] / _MIB:g} MiB (12 if not split)",
        f"of {_RANDOM_BLOCKS} blocks {unsplit} have slack, {format_nbytes(largest_nbytes)} at most",
        f"assumed at most {format_nbytes(slack_nbytes)}",
    ]
    return found


def _allocated(nbytes: int, device: torch.device) -> tuple[Tensor, int]:
    """A tensor, and what the allocator counts for it."""
    before_nbytes = torch.accelerator.memory_allocated(device)
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return tensor, torch.accelerator.memory_allocated(device) - before_nbytes


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512
