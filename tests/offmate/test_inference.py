"""Where no plan serves, the original runs on the device with the weights that each operator is lent."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import MemoryMeter
from remat_graph import Lane, Value
from remat_offload import HostPool, SimulatedMachine
from remat_offload.copy_lanes.threaded import Job
from remat_offload.engine.on_demand_weights import OnDemandWeights
from tests.helpers.offmates import (
    MODELS,
    OPTIMIZERS,
    Convolutions,
    Mapped,
    Run,
    differences,
    llama,
    offmate,
    tokens,
)

BUDGETS = {"llama": "35%", "convolutions": "60%"}


class Slow(SimulatedMachine):
    """Steps late, and notes what is brought to the device."""

    def __init__(self) -> None:
        super().__init__(to_device_nbytes_per_s=1e8)
        self.brought: list[Any] = []

    def copy(self, lane: Lane, destination: Tensor, source: Tensor, after: Any = (), name: str = "") -> Job:
        """Copy, and note it."""
        if lane is Lane.TO_DEVICE:
            self.brought.append(name)
        return super().copy(lane, destination, source, after, name)


def runs(name: str, **options: HostPool | Slow) -> tuple[Run, Run]:
    """The same training twice, plain and with values that move."""
    make, batches = MODELS[name]
    models = [make(), make()]
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    plain = Run(models[0], optimizers[0], batches)
    ours = offmate(models[1], batches(0), BUDGETS[name], optimizer=optimizers[1], **options)
    return plain, Run(ours, optimizers[1], batches)


def moved(run: Run) -> list[Value]:
    """Parameters that are placed on the host."""
    names = run.model.plan.on_host
    values = run.model.graph.values
    return [values[v] for v in names if values[v].of is None]


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_inference_right_after_a_step(name: str, off: type[Any]) -> None:
    """Bit for bit as of a plain model, while updates are still under way; then training goes on."""
    plain, ours = runs(name, machine=Slow())
    found = []
    for run in (plain, ours):
        run.train(2)
        run.model.eval()
        with off():
            output = run.model(**run.batches(7))
        found.append(output if isinstance(output, torch.Tensor) else output.logits)
        run.model.train()
        run.train(1)
    assert torch.equal(*found)
    assert [] == differences(plain, ours)


def test_inference_holds_one_operators_weights_at_a_time() -> None:
    """By a meter; each moved weight is brought once for each time that it is read, and let go."""
    memory, machine = Mapped(), Slow()
    _, ours = runs("llama", machine=machine, pool=HostPool(20 << 20, memory=memory))
    ours.model.eval()
    there = [p for p in ours.model.parameters() if p.data_ptr() not in memory.addresses]
    largest = max(p.nbytes for p in ours.model.parameters())
    assert len(there) < len(list(ours.model.parameters()))
    batch = tokens(3)
    with torch.no_grad():
        ours.model(**batch)  # what is set up once
        ours.model.synchronize()
        machine.brought.clear()
        with MemoryMeter(there, device="cpu") as meter:
            lent = ours.model(**batch)
        with MemoryMeter(device="cpu") as plain:
            kept = llama().eval()(**batch)
    del lent, kept
    gc.collect()
    assert len(machine.brought) >= len(moved(ours))
    assert meter.peak_nbytes <= plain.peak_nbytes + largest
    assert all(p.device.type == "cpu" for p in ours.model.parameters())


def test_a_method_of_the_originals_generates() -> None:
    """Tokens as the plain model's, greedily."""
    plain, ours = runs("llama")
    prompt = tokens(1)["input_ids"][:, :4]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for run in (plain, ours):
        run.train(1)
        run.model.eval()
    assert torch.equal(plain.model.generate(prompt, **options), ours.model.generate(prompt, **options))


@pytest.mark.filterwarnings("ignore::remat_executor.errors.RematWarning")
def test_training_without_a_plan() -> None:
    """A hook keeps plans from serving: gradients are plain training's, where their weights are."""
    plain, ours = runs("convolutions")
    calls = []
    for run in (plain, ours):
        module = run.model if run is plain else run.model.module
        run.train(1)
        module.head.register_forward_hook(lambda *_: calls.append(1))
        run.train(2)
    assert len(calls) == 4
    assert ours.model.runs["original"] == 2
    assert [] == differences(plain, ours)


class Counting(nn.Module):
    """Writes to a parameter in its forward, reads one without calling who holds it, asks where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.count = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1.0)
        assert self.inner.weight.shape == (4, 4)
        x = x.to(self.inner.weight.device)
        return (
            nn.functional.linear(x, self.inner.weight) + self.count + torch.stack([*self.parameters()][2:])[0]
        )


class Elsewhere:
    """Lends from the host to another device: that of nothing, on which nothing of the host's can be used."""

    def __init__(self, model: nn.Module, device: str = "meta") -> None:
        self.device = torch.device(device)
        self.params = set(model.parameters())
        self.home: list[Any] = []

    def moves(self, param: nn.Parameter) -> bool:
        """All of the model's do."""
        return param in self.params

    def fetch(self, param: nn.Parameter) -> Tensor:
        """A copy."""
        return param.detach().clone().to(self.device)

    def write_back(self, param: nn.Parameter, lent: Tensor) -> None:
        """Write it, and note that."""
        self.home.append(param)
        if not lent.is_meta:
            param.data.copy_(lent)


class Drifting(Convolutions):
    """Writes to a weight in inference."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        if not self.training:
            self.blocks[1][0].weight.mul_(0.5)
        return super().forward(images, labels)


def test_a_weight_that_inference_writes_trains_on_from_there() -> None:
    """Its home is written, once earlier updates are done."""
    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = Drifting()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        budget, batches = BUDGETS["convolutions"], MODELS["convolutions"][1]
        called = offmate(model, batches(0), budget, optimizer=optimizer, machine=Slow()) if moves else model
        found.append(run := Run(called, optimizer, batches))
        run.train(1)
        called.eval()
        with torch.no_grad():
            run.losses.append(called(**batches(3)).item())
        called.train()
        run.train(1)
    assert "blocks.1.0.weight" in {value.name for value in moved(found[1])}
    assert [] == differences(*found)


class Many(nn.Module):
    """Modules that read their weights in one way or another; the last layer's is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.recurrent(self.embedding(ids))
        x = x + self.attention(x, x, x)[0]
        x = self.convolution(x.mT).mT
        return self.head(self.norm(x))


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_of_the_host_is_mixed_in(grad: bool) -> None:
    """On the device meta every operator that got a tensor of the host's beside it would fail."""
    model, ids = Many(), torch.zeros(2, 5, dtype=torch.long)
    with torch.set_grad_enabled(grad):
        expected = model(ids)
        with OnDemandWeights(Elsewhere(model)):
            output = model(ids.to("meta"))
        with OnDemandWeights(Elsewhere(model, "cpu")):
            assert torch.equal(expected, model(ids))
    assert output.is_meta
    assert output.requires_grad == grad
    odd = Counting()
    with torch.no_grad(), OnDemandWeights(fetcher := Elsewhere(odd)):
        assert odd(torch.ones(2, 4)).is_meta
    assert len(fetcher.home) == 1
    assert fetcher.home[0] is odd.count


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_what_is_written_in_place_goes_home(off: type[Any]) -> None:
    """As the plain module's."""
    plain, ours = Counting(), Counting()
    ours.load_state_dict(plain.state_dict())
    x = torch.ones(2, 4)
    with off():
        expected = plain(x)
        with OnDemandWeights(Elsewhere(ours, "cpu")):
            assert torch.equal(expected, ours(x))
    assert torch.equal(plain.count, ours.count)
