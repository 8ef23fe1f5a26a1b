"""A cache of measured costs on disk, so that an operator is timed once on a machine, not in every process.

There is one JSON file for each device, torch version, thread count and set of kernel-choosing flags, with
those of libraries in the environment: a convolution needs another workspace with two CPU threads than with
one. The cache is a convenience, so no file problem stops the work: an unreadable file is ignored, a read-
only folder is left alone, each with one warning. A checksum protects the file, since nobody could see that
a workspace of 0 bytes is wrong. Times that were measured while other processes kept the cores busy are listed
as doubtful, so that a later process measures them again.

A save reads the file again, adds to it, and replaces it by renaming, so a reader never sees half a file. If
two processes save at the same moment, one may lose its additions; it measures them again next time. A file
keeps the newest entries, those of some hundred models, and so is read in less than a second.
"""

import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path

import attrs
import torch

from remat_executor.errors import warn
from remat_executor.guards.global_flags import unusual_flags
from remat_graph import BadFile
from remat_graph.errors import shown
from remat_graph.serialization.json_reader import read_sealed, write_sealed

_FORMAT = "remat-costs"
_VERSION, _CPU_VERSION = 3, 2
"""Version 3 adds the seconds of issuing, which are 0 on the CPU: its files stay in version 2."""
_MOST_COSTS = 20_000  # of one file
_OF_LIBRARIES = (  # settings with which they choose kernels, or the sizes of workspaces
    "CUDNN_CONV_WSCAP_DBG",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
)
_LONGEST_S = 3600.0  # no operator takes longer; a measurement during which the machine slept does


BUSY = (
    "other processes keep the cores busy: operator times are estimates, and plans may be slower; "
    "on an idle machine they are measured again when a model is next planned"
)

Numbers = list[float | int]
"""A cost in a file: seconds, bytes of workspace and of outputs, on a device the seconds of issuing."""


@attrs.frozen(kw_only=True)
class MeasuredCost:
    """The measured cost of one run of an operator in its steady state.

    Attributes:
        time_s: seconds: the least of several runs on the CPU, else their lower quartile.
        workspace_nbytes: bytes held during the run beyond its inputs and outputs.
        output_nbytes: bytes of its outputs that are not inputs: 0 for a view.
        issue_s: seconds in which the host issues it; 0 on the CPU.
        doubtful: whether other processes kept the cores busy, so that the time is an estimate.
    """

    time_s: float = attrs.field(validator=attrs.validators.ge(0.0))
    workspace_nbytes: int = attrs.field(validator=attrs.validators.ge(0))
    output_nbytes: int = attrs.field(validator=attrs.validators.ge(0))
    issue_s: float = attrs.field(default=0.0, validator=attrs.validators.ge(0.0))
    doubtful: bool = False


class CostCache:
    """The known costs for one device under the present thread count and flags.

    Args:
        device: the device.
        folder: where the files are; ``None`` means ``$REMAT_CACHE_DIR`` or the platform's cache folder.
    """

    def __init__(
        self, device: torch.device | str = "cpu", folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._device = torch.device(device)
        self._folder = default_folder() if folder is None else Path(folder)
        self._known: dict[Path, _Known] = {}
        self._may_write = True
        self._may_warn = True  # about a bad file
        self._warned_busy = False

    @property
    def path(self) -> Path:
        """The cache's file, which may not exist; it depends on the present thread count and flags."""
        return self._folder / _file_name(self._device)

    def get(self, keys: Iterable[str]) -> dict[str, MeasuredCost]:
        """The known costs among these keys. A file is read once."""
        path = self.path
        if path not in self._known:
            self._known[path] = self._read(path)
        known = self._known[path]
        return {key: known.cost(key) for key in keys if key in known.numbers}

    def add(self, costs: Mapping[str, MeasuredCost]) -> None:
        """Keep costs in memory and on disk; they replace earlier ones of the same keys."""
        if not costs:
            return
        path, believable = self.path, self._judge()
        added = _Known(
            numbers={key: self._numbers(cost) for key, cost in costs.items()},
            doubtful={key for key, cost in costs.items() if cost.doubtful},
        )
        known = self._known.get(path, _Known()).with_newer(self._read(path)).with_newer(added)
        self._known[path] = known
        if self._may_write:
            kept = {key: numbers for key, numbers in known.numbers.items() if believable(numbers)}
            newest = dict(islice(kept.items(), max(0, len(kept) - _MOST_COSTS), None))
            data = {"format": _FORMAT, "version": _version(self._device), "costs": newest}
            if doubtful := sorted(known.doubtful & newest.keys()):
                data["doubtful"] = doubtful
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_sealed(data, path)
            except OSError as error:
                self._may_write = False
                warn(
                    f"costs are not saved: {path.parent}: {error.strerror or error}; "
                    "set REMAT_CACHE_DIR to a writable folder"
                )

    def _read(self, path: Path) -> "_Known":
        if not os.path.exists(path):
            return _Known()
        try:
            file = read_sealed(path, _FORMAT, _version(self._device))
            costs, believable = file.get("costs"), self._judge()
            for key, numbers in costs.mapping().items():
                if not believable(numbers):
                    costs.get(key).fail(f"no operator costs {shown(numbers)} on this device")
            listed = file.find("doubtful")
            doubtful = {key.text() for key in listed.items()} if listed else set()
            return _Known(numbers=dict(costs.mapping()), doubtful=doubtful)
        except BadFile as error:
            if self._may_warn:
                self._may_warn = False
                warn(f"{error}; it is ignored and costs are measured again")
            return _Known()

    def warn_busy(self) -> None:
        """Warn, once, that other processes spoil the times."""
        if not self._warned_busy:
            self._warned_busy = True
            warn(BUSY)

    def _numbers(self, cost: MeasuredCost) -> Numbers:
        """A cost as the numbers of a file."""
        numbers = [float(cost.time_s), cost.workspace_nbytes, cost.output_nbytes]
        return numbers if self._device.type == "cpu" else [*numbers, float(cost.issue_s)]

    def _judge(self) -> Callable[[object], bool]:
        """Whether numbers, which may be anything, can be a cost on this device."""
        kinds = [float, int, int] if self._device.type == "cpu" else [float, int, int, float]
        most = {float: _LONGEST_S, int: _memory_nbytes(self._device)}

        def believable(numbers: object) -> bool:
            return (
                isinstance(numbers, list)
                and list(map(type, numbers)) == kinds
                and all(0 <= number <= most[type(number)] for number in numbers)
            )

        return believable


@attrs.frozen(kw_only=True)
class _Known:
    """The costs of a file, as numbers, and the keys of those that are doubtful."""

    numbers: dict[str, Numbers] = attrs.field(factory=dict)
    doubtful: set[str] = attrs.field(factory=set)

    def cost(self, key: str) -> MeasuredCost:
        """The cost of a key."""
        time_s, workspace_nbytes, output_nbytes, *issue_s = self.numbers[key]
        return MeasuredCost(
            time_s=time_s,
            workspace_nbytes=int(workspace_nbytes),
            output_nbytes=int(output_nbytes),
            issue_s=sum(issue_s),
            doubtful=key in self.doubtful,
        )

    def with_newer(self, newer: "_Known") -> "_Known":
        """These costs and others, which replace them."""
        older = self.doubtful - newer.numbers.keys()
        return _Known(numbers={**self.numbers, **newer.numbers}, doubtful=older | newer.doubtful)


def default_folder() -> Path:
    """``$REMAT_CACHE_DIR``, or ``remat`` in the platform's folder for user caches."""
    chosen = os.environ.get("REMAT_CACHE_DIR")
    if chosen:
        return _expanded(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(base) / "remat"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
        there = Path(tempfile.gettempdir(), f"remat{user}")
        warn(f"{path[:80]} cannot be resolved: costs and plans are saved in {there}; set REMAT_CACHE_DIR")
        return there


def _version(device: torch.device) -> int:
    return _CPU_VERSION if device.type == "cpu" else _VERSION


def _file_name(device: torch.device) -> str:
    if device.type == "cpu":
        name = f"cpu-{_cpu_name()}-{torch.get_num_threads()}threads"
    else:
        properties = torch.get_device_module(device).get_device_properties(device)
        name = f"{device.type}-{properties.name}"
    settings = [f"{name}={os.environ[name]}" for name in _OF_LIBRARIES if os.environ.get(name)]
    flags = "".join(f"-{flag}" for flag in (*unusual_flags(), *settings))
    name = f"costs-v{_version(device)}-{name}-torch{torch.__version__}{flags}.json"
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", name)


def _memory_nbytes(device: torch.device) -> float:
    """The memory of the device; infinite if unknown."""
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
        return float(getattr(properties, "total_memory", math.inf))
    if not hasattr(os, "sysconf"):
        return math.inf
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cpu_name() -> str:
    """The processor's model if the system reports it, else its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
