"""Measured costs kept on disk, so that an operator is timed once on a machine and not once in every process.

One JSON file for each device, torch version, thread count and set of kernel-choosing flags, since what was
measured under other conditions does not hold: a convolution takes other scratch with one CPU thread than with
two. A cache is a convenience, so nothing that happens to its file may stop the work: a file that cannot be
read is ignored, a folder that cannot be written is left alone, each with one warning.

A save reads the file again, adds to it, and puts the whole in place by renaming, so a reader never sees half
a file. Of two processes that save in the same moment one may lose its additions; it measures them again next
time.
"""

import json
import math
import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
import torch

_FORMAT = "remat-costs"
_VERSION = 1


@attrs.frozen(kw_only=True)
class OpCost:
    """What one run of an operator costs, in its steady state.

    Attributes:
        time_s: seconds, the lower quartile of several runs.
        workspace_nbytes: bytes held while it ran beyond its inputs and outputs.
        output_nbytes: bytes that its outputs hold and its inputs did not: 0 for a view.
    """

    time_s: float = attrs.field(validator=attrs.validators.ge(0.0))
    workspace_nbytes: int = attrs.field(validator=attrs.validators.ge(0))
    output_nbytes: int = attrs.field(validator=attrs.validators.ge(0))


class CostCache:
    """The costs known for one device under the conditions of this process.

    Args:
        device: the device that the costs are for.
        folder: where the files are; ``None`` means ``$REMAT_CACHE_DIR`` or the platform's cache folder.

    Attributes:
        path: the file behind the cache, there or not.
    """

    def __init__(
        self, device: torch.device | str = "cpu", folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.path = (default_folder() if folder is None else Path(folder)) / _file_name(torch.device(device))
        self._costs: dict[str, OpCost] | None = None
        self._may_write = True
        self._may_warn = True  # of a bad file

    def get(self, keys: Iterable[str]) -> dict[str, OpCost]:
        """The costs known among these keys. The file is read at the first call."""
        if self._costs is None:
            self._costs = self._read()
        return {key: self._costs[key] for key in keys if key in self._costs}

    def add(self, costs: Mapping[str, OpCost]) -> None:
        """Keep costs, here and on disk; later ones replace earlier ones of the same key."""
        if not costs:
            return
        self._costs = {**(self._costs or {}), **self._read(), **costs}
        if self._may_write:
            try:
                self._write(self._costs)
            except OSError as error:
                self._may_write = False
                warnings.warn(
                    f"costs are not kept: {self.path.parent}: {error.strerror or error}; "
                    "set REMAT_CACHE_DIR to a folder that can be written",
                    stacklevel=2,
                )

    def _read(self) -> dict[str, OpCost]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, UnicodeDecodeError) as error:
            return self._ignored(str(error))
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT or content["version"] != _VERSION:
                return self._ignored(f"is not version {_VERSION} of {_FORMAT}")
            return {key: _cost(*numbers) for key, numbers in content["costs"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return self._ignored(f"{type(error).__name__}: {error}")

    def _ignored(self, problem: str) -> dict[str, OpCost]:
        if self._may_warn:
            self._may_warn = False
            warnings.warn(f"{self.path} is ignored and costs are measured again: {problem}", stacklevel=4)
        return {}

    def _write(self, costs: Mapping[str, OpCost]) -> None:
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "costs": {key: [c.time_s, c.workspace_nbytes, c.output_nbytes] for key, c in costs.items()},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def default_folder() -> Path:
    """``$REMAT_CACHE_DIR``, or ``remat`` in the folder where this platform keeps a user's caches."""
    chosen = os.environ.get("REMAT_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "remat"


def _cost(time_s: object, workspace_nbytes: object, output_nbytes: object) -> OpCost:
    """A cost from the numbers of a file, which may be anything."""
    if not isinstance(time_s, float) or not math.isfinite(time_s):
        raise ValueError(f"a time is a finite number of seconds, not {time_s!r}")
    if not isinstance(workspace_nbytes, int) or not isinstance(output_nbytes, int):
        raise ValueError("sizes are whole numbers of bytes")
    return OpCost(time_s=time_s, workspace_nbytes=workspace_nbytes, output_nbytes=output_nbytes)


def _file_name(device: torch.device) -> str:
    if device.type == "cpu":
        name = f"cpu-{_cpu_name()}-{torch.get_num_threads()}threads"
    else:
        properties = torch.get_device_module(device).get_device_properties(device)
        name = f"{device.type}-{properties.name}"
    flags = "".join(f"-{flag}" for flag, on in _unusual_flags().items() if on)
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", f"costs-v{_VERSION}-{name}-torch{torch.__version__}{flags}.json")


def _unusual_flags() -> dict[str, bool]:
    """Global settings that choose other kernels, which take other times and other scratch."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(): torch.get_float32_matmul_precision() != "highest",
        "benchmark": torch.backends.cudnn.benchmark,
        "no_cudnn": not torch.backends.cudnn.enabled,
        "no_onednn": not torch.backends.mkldnn.enabled,
    }


def _cpu_name() -> str:
    """The processor's model where the system tells it, else its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
