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
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
import torch

from remat_executor.errors import warn
from remat_executor.flags import unusual_flags
from remat_graph.ir import MOST_NBYTES

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
    """The costs known for one device under the conditions of the moment.

    Args:
        device: the device that the costs are for.
        folder: where the files are; ``None`` means ``$REMAT_CACHE_DIR`` or the platform's cache folder.
    """

    def __init__(
        self, device: torch.device | str = "cpu", folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._device = torch.device(device)
        self._folder = default_folder() if folder is None else Path(folder)
        self._costs: dict[Path, dict[str, OpCost]] = {}
        self._may_write = True
        self._may_warn = True  # of a bad file

    @property
    def path(self) -> Path:
        """The file behind the cache, there or not; another one once threads or flags have changed."""
        return self._folder / _file_name(self._device)

    def get(self, keys: Iterable[str]) -> dict[str, OpCost]:
        """The costs known among these keys. A file is read at its first call."""
        path = self.path
        if path not in self._costs:
            self._costs[path] = self._read(path)
        known = self._costs[path]
        return {key: known[key] for key in keys if key in known}

    def add(self, costs: Mapping[str, OpCost]) -> None:
        """Keep costs, here and on disk; later ones replace earlier ones of the same key."""
        if not costs:
            return
        path = self.path
        self._costs[path] = {**self._costs.get(path, {}), **self._read(path), **costs}
        if self._may_write:
            try:
                _write(path, self._costs[path])
            except OSError as error:
                self._may_write = False
                warn(
                    f"costs are not kept: {path.parent}: {error.strerror or error}; "
                    "set REMAT_CACHE_DIR to a folder that can be written"
                )

    def _read(self, path: Path) -> dict[str, OpCost]:
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, UnicodeDecodeError) as error:
            return self._ignored(path, str(error))
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT or content["version"] != _VERSION:
                return self._ignored(path, f"is not version {_VERSION} of {_FORMAT}")
            return {key: _cost(*numbers) for key, numbers in content["costs"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return self._ignored(path, f"{type(error).__name__}: {error}")

    def _ignored(self, path: Path, problem: str) -> dict[str, OpCost]:
        if self._may_warn:
            self._may_warn = False
            warn(f"{path} is ignored and costs are measured again: {problem}")
        return {}


def _write(path: Path, costs: Mapping[str, OpCost]) -> None:
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "costs": {key: [c.time_s, c.workspace_nbytes, c.output_nbytes] for key, c in costs.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(name, path)
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
    if max(workspace_nbytes, output_nbytes) > MOST_NBYTES:
        raise ValueError(f"sizes are at most {MOST_NBYTES} bytes")
    return OpCost(time_s=time_s, workspace_nbytes=workspace_nbytes, output_nbytes=output_nbytes)


def _file_name(device: torch.device) -> str:
    if device.type == "cpu":
        name = f"cpu-{_cpu_name()}-{torch.get_num_threads()}threads"
    else:
        properties = torch.get_device_module(device).get_device_properties(device)
        name = f"{device.type}-{properties.name}"
    flags = "".join(f"-{flag}" for flag in unusual_flags())
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", f"costs-v{_VERSION}-{name}-torch{torch.__version__}{flags}.json")


def _cpu_name() -> str:
    """The processor's model where the system tells it, else its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
