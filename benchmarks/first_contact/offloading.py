"""Offmate on a language model of a billion parameters, and its losses beside those of plain training."""

import attrs
import torch
from torch import Tensor, nn

from benchmarks.device_steps import release
from benchmarks.first_contact.models import Llama
from benchmarks.first_contact.rows import Findings, Setting
from benchmarks.gpu_offload import Row as Trained
from benchmarks.gpu_offload import measure
from benchmarks.offload_ways import Shape, Way, eager, new_machine, offmate
from remat_facade.planning.memory_fit import free_on
from remat_graph import format_nbytes
from remat_offload import HostPool, measure_links

SECTION = "offmate"
_FRACTION = 0.4  # of all bytes that plain training holds
_HOST_SHARE = 0.5  # of the host's free memory
_SMALL_HOST_NBYTES = 64 << 20
_LOSSES = 3
_LOSSES_OFF = 1e-2  # after the first: updates on the host round in another order than those on a device


@attrs.frozen(kw_only=True)
class PlainShape(Shape):
    """A Llama in plain torch, which returns its loss."""

    def empty(self) -> nn.Module:
        """The model on the meta device."""
        with torch.device("meta"):
            model = Llama(self.layers, self.width, self.heads, self.inner, self.vocabulary)
            return model.to(torch.bfloat16)

    def ids(self, device: torch.device) -> dict[str, Tensor]:
        """A batch."""
        return {"ids": super().ids(device)["input_ids"]}

    def loss(self, output: Tensor) -> Tensor:
        """The model's output."""
        return output


def _shape(*, small: bool, layers: int) -> PlainShape:
    if small:
        sizes = {"layers": 2, "width": 32, "inner": 64, "heads": 2, "kv_heads": 2, "vocabulary": 64}
        return PlainShape(**sizes, batch=2, length=16)
    sizes = {"width": 2048, "inner": 5632, "heads": 16, "kv_heads": 16, "vocabulary": 32_000}
    return PlainShape(layers=layers, **sizes, batch=4, length=2048)


def names(*, small: bool) -> tuple[str, ...]:
    """The rows."""
    return "losses", "40%"


def run(name: str, setting: Setting) -> Findings:
    """Plain training, then within the budget."""
    found, device = Findings(setting), setting.device
    losses = name == "losses"
    shape = _shape(small=setting.small, layers=4 if losses else 20)
    whole = measure(Trained(model="llama", method="eager"), shape, lambda: eager(shape, device), device, 1)
    if whole.peak_nbytes is None:
        found.wrong.append(f"plain training: {whole.note}")
        return found
    budget_nbytes = int(_FRACTION * whole.peak_nbytes)
    free_nbytes = free_on(torch.device("cpu")) or 0
    host_nbytes = _SMALL_HOST_NBYTES if setting.small else int(_HOST_SHARE * free_nbytes)
    with new_machine(device) as machine:
        with HostPool(host_nbytes, device=device) as pool:
            links = measure_links(machine, pool)

        def within_budget() -> Way:
            budgets = {"budget_nbytes": budget_nbytes, "host_nbytes": host_nbytes}
            seconds = 0.2 if setting.small else 10.0
            return offmate(shape, device, machine, links, **budgets, in_backward=False, plan_s=seconds)

        if losses:
            plain = _losses(eager(shape, device))
            release(device)
            _judge_losses(found, plain, _losses(within_budget()))
            return found
        row = Trained(
            model="llama",
            method="offmate",
            fraction=_FRACTION,
            budget_nbytes=budget_nbytes,
            host_budget_nbytes=host_nbytes,
        )
        row = measure(row, shape, within_budget, device, 2)
    _judge(found, row, whole)
    return found


def _losses(way: Way) -> list[float]:
    """Losses of a few steps."""
    found = []
    for _ in range(_LOSSES):
        loss = way.loss()
        loss.backward()
        way.update()
        way.forget()
        found.append(float(loss.detach()))
        del loss
    way.wait()
    return found


def _judge_losses(found: Findings, plain: list[float], ours: list[float]) -> None:
    found.figures = {"plain": plain, "offmate": ours, "exact": plain == ours}
    found.said.append(f"losses {ours}, of plain training {plain}")
    if plain[0] != ours[0]:
        found.wrong.append(f"first loss {ours[0]}, {plain[0]} in plain training; goal: equal")
    off = max(abs(one - other) / abs(other) for one, other in zip(ours, plain, strict=True))
    if not off <= _LOSSES_OFF:
        found.wrong.append(f"losses {off:.2g} of those of plain training apart; goal: {_LOSSES_OFF}")


def _judge(found: Findings, row: Trained, whole: Trained) -> None:
    found.figures = {"plain": attrs.asdict(whole), "offmate": attrs.asdict(row)}
    if row.step_s is None or row.peak_nbytes is None or row.predicted_s is None:
        found.wrong.append(f"no step: {row.note}")
        return
    assert row.budget_nbytes is not None
    assert row.predicted_nbytes is not None
    found.said.append(f"{row.parameters / 1e9:.2f}e9 parameters, ready in {row.ready_s:.0f} s")
    found.judge_peak(row.peak_nbytes, row.predicted_nbytes, row.budget_nbytes)
    found.judge_step(row.step_s, row.predicted_s)
    found.said.append(
        f"plain training {1e3 * (whole.step_s or 0):.1f} ms in {format_nbytes(whole.peak_nbytes or 0)}"
    )
    if row.host_nbytes is not None and row.host_nbytes > (row.host_budget_nbytes or 0):
        found.wrong.append(
            f"{row.host_nbytes} bytes on the host of {row.host_budget_nbytes}; goal: never more"
        )
