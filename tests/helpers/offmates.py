"""Small models in training, plainly and by `Offmate`, so that tests can compare them bit for bit."""

import functools
import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from remat_facade import Offmate
from remat_graph import Links, Roofline
from remat_offload import HostPool, Machine
from remat_offload.optimizer.step_cost import UpdateCost, update_cost
from tests.helpers.small_llama import WORDS, small_llama

PLATFORM = Roofline(flops_per_s=1e11, nbytes_per_s=1e10)
"""Times of operators that do not depend on the machine."""

UPDATE_S = 1e-8
"""Seconds in which an optimizer steps an element, as about on a CPU, but the same on every machine."""

LINKS = Links(to_host_nbytes_per_s=1e9, to_device_nbytes_per_s=1e9)


class Convolutions(nn.Module):
    """A residual network with batch norm and dropout, small and channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)
            )
            for _ in range(3)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def convolutions() -> nn.Module:
    """The same one each time."""
    torch.manual_seed(0)
    return Convolutions()


def images(seed: int) -> dict[str, Tensor]:
    """A batch for it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "images": torch.randn(4, 3, 12, 12, generator=generator),
        "labels": torch.randint(0, 10, (4,), generator=generator),
    }


def llama() -> nn.Module:
    """One with tied weights."""
    return small_llama(tie_word_embeddings=True)


def tokens(seed: int) -> dict[str, Tensor]:
    """A batch for it."""
    ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "llama": (llama, tokens),
    "convolutions": (convolutions, images),
}

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1),
}


@functools.cache
def kept_plans() -> tempfile.TemporaryDirectory[str]:
    """A folder for plans that lasts as long as the tests of this process: each is made once."""
    return tempfile.TemporaryDirectory()


def offmate(
    model: nn.Module,
    sample: Any,
    budget: int | str,
    *,
    update_s: float = UPDATE_S,
    issue_s: float = 0.0,
    **options: Any,
) -> Offmate:
    """Build one whose plan depends on its arguments alone."""
    defaults = {
        "platform": PLATFORM,
        "links": LINKS,
        "host_budget": "20MiB",
        "cache_dir": kept_plans().name,
    }

    def steady(*arguments: Any) -> UpdateCost:
        return attrs.evolve(update_cost(*arguments), s_per_element=update_s, issue_s=issue_s)

    with mock.patch("remat_offload.optimizer.states.update_cost", steady):
        return Offmate(model, sample, budget, **(defaults | options))


@attrs.define
class Mapped:
    """Host memory that the meter of the device, which is the CPU here, does not see; it counts by itself."""

    now_nbytes: int = 0
    peak_nbytes: int = 0
    addresses: set[int] = attrs.field(factory=set)

    def charge(self, nbytes: int) -> int:
        """Exactly what was asked."""
        return nbytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Pages of the system's."""
        self.now_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes)
        block = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.addresses.add(block.data_ptr())
        return block

    def give_back(self, block: torch.Tensor) -> None:
        """They go with the last reference."""
        self.now_nbytes -= block.numel()


def _loss(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


@attrs.define
class Run:
    """A model in training.

    Attributes:
        model: the module that is called.
        optimizer: its optimizer.
        batches: makes the batch of a number.
        accumulation: micro-batches of a step.
        in_backward: whether the backward steps the optimizer; plain training then steps without clipping.
        steps: how many the schedule of the learning rate has.
        step: the next one.
        losses: of all micro-batches so far.
        clip: clips the gradients.
        memory: where the module takes the host's memory, if that is to be told from the device's.
    """

    model: nn.Module
    optimizer: Optimizer
    batches: Callable[[int], Any]
    accumulation: int = 1
    in_backward: bool = False
    steps: int = 10
    step: int = 0
    losses: list[float] = attrs.field(factory=list)
    scheduler: Any = None
    clip: Callable[[Iterable[nn.Parameter], float], Tensor] = torch.nn.utils.clip_grad_norm_
    memory: Mapped = attrs.field(factory=Mapped)

    def __attrs_post_init__(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.steps)

    def train(self, steps: int) -> "Run":
        """Train for so many steps."""
        for _ in range(steps):
            torch.manual_seed(self.step)
            for part in range(self.accumulation):
                # What the model returns beside its loss is let go: held until the next call, it would be no
                # part of that call's budget.
                loss = _loss(self.model(**self.batches(self.accumulation * self.step + part)))
                loss = loss / self.accumulation
                adds = part < self.accumulation - 1 and isinstance(self.model, Offmate)
                with self.model.accumulating() if adds else nullcontext():
                    loss.backward()
                self.losses.append(loss.item())
            if not self.in_backward:
                self.clip(self.model.parameters(), 1.0)
            if not (self.in_backward and isinstance(self.model, Offmate)):
                self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
        return self


def moving_run(
    name: str,
    budget: str,
    *,
    machine: Machine,
    in_backward: bool,
    accumulation: int,
    steps: int = 10,
    host_nbytes: int = 4 << 20,
    **options: Any,
) -> Run:
    """One of `MODELS` in training with values that move, on a machine; the run's memory is the host's."""
    make, batches = MODELS[name]
    model, memory = make(), Mapped()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    module = offmate(
        model,
        batches(0),
        budget,
        optimizer=optimizer,
        optimizer_in_backward=in_backward,
        accumulation=accumulation,
        machine=machine,
        pool=HostPool(host_nbytes, memory=memory),
        **options,
    )
    return Run(
        module,
        optimizer,
        batches,
        accumulation=accumulation,
        in_backward=in_backward,
        steps=steps,
        memory=memory,
    )


def kept_on_device(run: Run) -> list[Tensor]:
    """What an `Offmate` has there between steps: what lies in no memory of the host's."""
    states = (t for state in run.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    model = run.model.module
    there = (*(p.data for p in model.parameters()), *model.buffers(), *(t for t in states if t.dim()))
    return [t for t in there if t.untyped_storage().data_ptr() not in run.memory.addresses]


def differences(plain: Run, ours: Run) -> list[str]:
    """Everything in which two runs differ: losses, parameters, buffers, states, settings."""
    found = [f"loss {i}" for i, (a, b) in enumerate(zip(plain.losses, ours.losses, strict=True)) if a != b]
    pairs = zip(plain.model.state_dict().items(), ours.model.state_dict().items(), strict=True)
    found += [f"{name} {other}" for (name, a), (other, b) in pairs if name != other or not torch.equal(a, b)]
    mine, theirs = plain.optimizer.state_dict(), ours.optimizer.state_dict()
    found += [] if mine["param_groups"] == theirs["param_groups"] else ["param_groups"]
    found += [] if mine["state"].keys() == theirs["state"].keys() else ["states"]
    for index, state in mine["state"].items():
        other = theirs["state"].get(index, {})
        found += [] if state.keys() == other.keys() else [f"states of {index}"]
        found += [
            f"{name} of {index}"
            for name, value in state.items()
            if name in other and not torch.equal(torch.as_tensor(value), torch.as_tensor(other[name]))
        ]
    return found
