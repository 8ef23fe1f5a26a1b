"""`Offmate` on `CudaMachine`, with a stand-in for CUDA whose streams copy as late as their events allow."""

import contextlib
import itertools
import threading

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat_offload import CudaMachine
from tests.helpers.offmates import MODELS, OPTIMIZERS, Run, differences, offmate


@attrs.define(eq=False)
class Event:
    """A place in a stream; None is one that has been reached."""

    stream: "Stream | None" = None
    place: int = 0

    def query(self):
        """Whether the stream got there, which it does only if it is asked to."""
        return self.stream is None or self.stream.done >= self.place

    def synchronize(self):
        """Let the stream get there."""
        if self.stream is not None:
            self.stream.run(self.place)


@attrs.define(eq=False)
class Stream:
    """Does nothing before it must."""

    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    given: list = attrs.field(factory=list)
    done: int = 0
    lock: threading.RLock = attrs.field(factory=threading.RLock)

    def wait_event(self, event):
        """What is given from now on comes after the event."""
        self.given.append(event.synchronize)

    def record_event(self):
        """Of what was given so far."""
        return Event(self, len(self.given))

    def synchronize(self):
        """Do all of it."""
        self.run(len(self.given))

    def run(self, place):
        """Do what was given, up to a place."""
        with self.lock:
            while self.done < place:
                self.given[self.done]()
                self.given[self.done] = None
                self.done += 1


class Compute(Stream):
    """Computes at once, so that what it waits for is done at once."""

    def wait_event(self, event):
        """Wait."""
        event.synchronize()

    def record_event(self):
        """All of it is done."""
        return Event()


class Later(TorchDispatchMode):
    """Gives copies to a stream instead of making them."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note a copy; nothing else is asked of a stream here."""
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))

        def copy():
            with torch.inference_mode():
                args[0].copy_(args[1])

        self.stream.given.append(copy)
        return args[0]


class LateCuda:
    """Stands for `torch.cuda`, with the CPU as its device."""

    def __init__(self):
        self.compute = Compute()
        self.made = itertools.count()

    def Stream(self, device):  # noqa: N802
        """A stream of its own."""
        next(self.made)
        return Stream()

    def current_stream(self, device):
        """What computes."""
        return self.compute

    def device(self, device):
        """The only one."""
        return contextlib.nullcontext()

    def stream(self, stream):
        """In it copies are the stream's."""
        return Later(stream)


class Machine(CudaMachine):
    """The CPU's tensors know no streams."""

    def __init__(self):
        super().__init__("cpu", cuda=LateCuda())

    def release_after_copies(self, tensor):
        """A stream keeps what it was given."""


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("name", "budget"), [("llama", "35%"), ("convolutions", "50%")])
def test_training_is_exact_however_late_copies_are(name, budget, in_backward):
    """Bit for bit plain training, with inference in between."""
    make, batches = MODELS[name]
    models = [make(), make()]
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    ours = offmate(
        models[1],
        batches(0),
        budget,
        optimizer=optimizers[1],
        optimizer_in_backward=in_backward,
        machine=Machine(),
    )
    assert ours.plan.on_host
    found = []
    runs = [
        Run(model, optimizer, batches, accumulation=1, in_backward=in_backward)
        for model, optimizer in zip((models[0], ours), optimizers, strict=True)
    ]
    for run in runs:
        run.train(2)
        run.model.eval()
        with torch.no_grad():
            output = run.model(**batches(5))
        found.append(output if isinstance(output, torch.Tensor) else output.logits)
        run.model.train()
        run.train(2)
    assert torch.equal(*found)
    assert [] == differences(*runs)
