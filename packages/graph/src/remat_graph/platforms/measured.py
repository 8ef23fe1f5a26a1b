"""Describe a device by measured operator times, kept in a file, for plans that are made on other machines.

A measured operator costs its measured time. For other operators a roofline is fitted through the best
measurements; its time is multiplied by the median slowdown of operators of the same name relative to that
roofline (of all operators, for a name that was not measured).
"""

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from remat_graph.links import Links
from remat_graph.platforms.base import OpCost, Platform, Roofline, get_platform
from remat_graph.serialization.fields import links_to_data, read_links
from remat_graph.serialization.json_reader import Reader, read_json, write_json

FORMAT, VERSION = "remat-platform", 1
_BEST = 0.9  # quantile of the measured rates that is taken as the rate of the device
_SHORTEST_S, _LONGEST_S, _MOST_NBYTES = 1e-12, 1e6, 2**50  # of one operator on any device
_MOST_FLOPS = 1e24  # of one operator
_LEAST_RATE, _MOST_RATE = 1.0, 1e24  # of any device, per second
_LONG = 4.0  # launches; only operators that take longer are used to fit rates


@attrs.frozen(kw_only=True)
class Measurement:
    """One measured operator.

    Attributes:
        cost: its operations and bytes, with its key.
        time_s: seconds of one run.
        workspace_nbytes: bytes that the allocator saw in addition to its outputs.
        issue_s: seconds in which the host issued it.
    """

    cost: OpCost
    time_s: float = attrs.field(validator=attrs.validators.ge(0.0))
    workspace_nbytes: int = attrs.field(validator=attrs.validators.ge(0))
    issue_s: float = attrs.field(default=0.0, validator=attrs.validators.ge(0.0))


def _by_key(given: Iterable[Measurement] | Mapping[str, Measurement]) -> Mapping[str, Measurement]:
    measurements = given.values() if isinstance(given, Mapping) else given
    return {m.cost.key: m for m in measurements}


@attrs.frozen(kw_only=True)
class Measured:
    """A platform made of measurements.

    Attributes:
        device: name of the measured device.
        date: day of the measurement, as ``2026-11-22``.
        versions: versions of the software that ran there, such as torch.
        measurements: by the keys of their costs; the constructor takes any iterable of measurements.
        links: bandwidths between the device and its host, if they were measured.
    """

    device: str
    date: str
    versions: Mapping[str, str] = attrs.field(factory=dict)
    measurements: Mapping[str, Measurement] = attrs.field(converter=_by_key)
    links: Links | None = None
    _roofline: Roofline = attrs.field(init=False)
    _slowdown: Mapping[str, float] = attrs.field(init=False)  # median by operator name; "" stands for all
    _median_issue_s: float = attrs.field(init=False)

    @_roofline.default
    def _fitted_roofline(self) -> Roofline:
        every = [m for m in self.measurements.values() if m.time_s > 0]
        launch_s = min((m.time_s for m in every), default=0.0)
        long = [m for m in every if m.time_s > _LONG * launch_s] or every
        moved = [(m.cost.read_nbytes + m.cost.written_nbytes) / m.time_s for m in long]
        computed = [m.cost.flops / m.time_s for m in long if m.cost.flops]
        plain = Roofline()
        return Roofline(
            flops_per_s=_quantile(computed) or plain.flops_per_s,
            nbytes_per_s=_quantile(moved) or plain.nbytes_per_s,
            launch_s=launch_s,
        )

    @_slowdown.default
    def _fitted_slowdown(self) -> Mapping[str, float]:
        ratios: dict[str, list[float]] = defaultdict(list)
        for m in self.measurements.values():
            ideal_s = self._roofline.time_s(m.cost)
            if ideal_s > 0:
                for name in ("", m.cost.operator):
                    ratios[name].append(m.time_s / ideal_s)
        return {name: statistics.median(each) for name, each in ratios.items()}

    @_median_issue_s.default
    def _fitted_issue_s(self) -> float:
        return statistics.median([m.issue_s for m in self.measurements.values()] or [0.0])

    @property
    def name(self) -> str:
        """The device and the date of the measurement."""
        return f"{self.device}, measured {self.date}"

    @property
    def rates(self) -> tuple[float, float]:
        """Fitted operations and bytes per second."""
        return self._roofline.flops_per_s, self._roofline.nbytes_per_s

    def issue_s(self, cost: OpCost) -> float:
        """The seconds in which the host issues the operator; for an unknown one, the median of all."""
        known = self.measurements.get(cost.key)
        return self._median_issue_s if known is None else known.issue_s

    def time_s(self, cost: OpCost) -> float:
        """The measured seconds of the operator, or the fitted ones."""
        known = self.measurements.get(cost.key)
        if known is not None:
            return known.time_s
        slowdown = self._slowdown.get(cost.operator, self._slowdown.get("", 1.0))
        return slowdown * self._roofline.time_s(cost)


def _quantile(rates: list[float]) -> float:
    return sorted(rates)[int(_BEST * (len(rates) - 1))] if rates else 0.0


def save_platform(platform: Measured, path: str | os.PathLike[str]) -> None:
    """Write a platform; an existing file is replaced atomically."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "device": platform.device,
        "date": platform.date,
        "versions": dict(platform.versions),
        "measurements": {
            key: {
                "flops": m.cost.flops,
                "read_nbytes": m.cost.read_nbytes,
                "written_nbytes": m.cost.written_nbytes,
                "time_s": m.time_s,
                "workspace_nbytes": m.workspace_nbytes,
            }
            | ({"issue_s": m.issue_s} if m.issue_s else {})
            | ({"arithmetic": m.cost.arithmetic} if m.cost.arithmetic else {})
            for key, m in sorted(platform.measurements.items())
        },
    }
    if platform.links is not None:
        data["links"] = links_to_data(platform.links)
    write_json(data, path)


def find_platform(name: str) -> Platform:
    """The platform with a name, or the one saved in a file, if the name ends with ``.json``.

    Raises:
        UnknownPlatform: no platform has that name.
        BadFile: the file is missing, cut off, or not a platform.
    """
    return load_platform(name) if name.endswith(".json") else get_platform(name)


def load_platform(path: str | os.PathLike[str]) -> Measured:
    """Read a file of `save_platform`.

    Raises:
        BadFile: the file is missing, cut off, or not a platform.
    """
    reader = Reader(read_json(path), os.fspath(path))
    reader.header(FORMAT, VERSION, "platform")
    measurements = reader.get("measurements")
    found = Measured(
        device=reader.get("device").text(),
        date=reader.get("date").text(),
        versions={key: reader.get("versions").get(key).text() for key in reader.get("versions").mapping()},
        measurements=[_measurement(key, measurements.get(key)) for key in measurements.mapping()],
        links=reader.get_or("links", read_links, None),
    )
    for rate, unit in zip(found.rates, ("operations", "bytes"), strict=True):
        if not _LEAST_RATE <= rate <= _MOST_RATE:
            measurements.fail(f"no device takes {rate:g} {unit} a second; measure again")
    return found


def _measurement(key: str, reader: Reader) -> Measurement:
    time_s, workspace_nbytes = reader.get("time_s").seconds(), reader.get("workspace_nbytes").size()
    if time_s and not _SHORTEST_S <= time_s <= _LONGEST_S:
        reader.get("time_s").fail(f"no operator takes {time_s:g} s; measure again")
    if workspace_nbytes > _MOST_NBYTES:
        reader.get("workspace_nbytes").fail(f"no device has {workspace_nbytes} bytes; measure again")
    flops = reader.get("flops").seconds()
    if flops and not 1 <= flops <= _MOST_FLOPS:
        reader.get("flops").fail(f"no operator has {flops:g} floating-point operations; measure again")
    return Measurement(
        cost=OpCost(
            flops=flops,
            read_nbytes=reader.get("read_nbytes").nbytes(),
            written_nbytes=reader.get("written_nbytes").nbytes(),
            key=key,
            arithmetic=reader.get_or("arithmetic", Reader.text, ""),
        ),
        time_s=time_s,
        workspace_nbytes=workspace_nbytes,
        issue_s=reader.get_or("issue_s", Reader.seconds, 0.0),
    )
