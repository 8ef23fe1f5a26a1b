"""Ways to fine-tune all of a Llama whose values need not all lie on the device, for `gpu_offload.py`.

Each computes in bf16 with fp32 masters and Adam's states:

* `eager`: everything on the device, the gradients widened a few parameters at a time;
* `save_on_cpu`: the same, with what the backward needs moved away by `torch.autograd.graph.save_on_cpu`;
* `cpu_step`: the model on the device, masters and states on the CPU, where AdamW steps them;
* `offmate`: within a budget.

On a machine without an accelerator the device is simulated.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_facade import Offmate
from remat_graph import Links
from remat_offload import CudaMachine, HostPool, Machine, SimulatedMachine, WeightReader
from remat_offload.tensor_memory import rebind_storage
from tests.helpers.models import import_transformers
from tests.helpers.offmates import Mapped

_AT_ONCE = 16  # parameters whose gradients are widened together
LINK_NBYTES_PER_S = 2e9  # of the simulated device


@attrs.frozen(kw_only=True)
class Shape:
    """A Llama, and a batch for it."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.batch * self.length

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        attention = 2 * self.width * self.width * (1 + self.kv_heads / self.heads)
        layer = attention + 3 * self.width * self.inner + 2 * self.width
        return int(self.layers * layer) + 2 * self.vocabulary * self.width + self.width

    def widened(self, host_nbytes: int, nbytes_per_parameter: int) -> "Shape":
        """As many layers as fit."""
        one, two = (attrs.evolve(self, layers=layers).parameters for layers in (1, 2))
        layers = 1 + (host_nbytes // nbytes_per_parameter - one) // (two - one)
        return attrs.evolve(self, layers=max(1, layers))

    def empty(self) -> nn.Module:
        """The model on the meta device."""
        transformers = import_transformers()
        config = transformers.LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.length,
            use_cache=False,
        )
        with torch.device("meta"):
            model: nn.Module = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        return model

    def ids(self, device: torch.device) -> dict[str, Tensor]:
        """A batch."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(self.vocabulary, (self.batch, self.length), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids}

    def loss(self, output: Any) -> Tensor:
        """The loss in a model's output."""
        loss: Tensor = output.loss
        return loss


class Values(Mapping[str, Tensor]):
    """Values for a language model on the meta device, each made when it is asked for, where that is quick.

    Args:
        model: the model; of those with buffers, a Llama of transformers.
        device: where random numbers are drawn.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._like = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._seeds = {name: seed for seed, name in enumerate(self._like)}  # in whatever order they are read
        self._buffers = {}
        if dict(model.named_buffers()):  # those of the rotary embedding
            rotary = model.model.rotary_emb
            buffers = type(rotary)(model.config).named_buffers()
            self._buffers = {f"model.rotary_emb.{name}": buffer for name, buffer in buffers}
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        if name in self._buffers:
            return self._buffers[name]
        like = self._like[name]
        made = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        if "norm" in name:
            return made.fill_(1.0)
        generator = torch.Generator(self._device).manual_seed(self._seeds[name])
        return made.normal_(std=0.02, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)


@attrs.frozen(kw_only=True)
class Way:
    """A model in training.

    Attributes:
        loss: runs a forward.
        update: steps the optimizer on the gradients that are there; updates may go on when it returns.
        forget: drops the gradients.
        wait: returns when all updates are done.
        there: what lies on the device between steps.
        module: the planned one.
        host: bytes that moved values take on the host at most, if that is known.
    """

    loss: Callable[[], Tensor]
    update: Callable[[], object]
    forget: Callable[[], object]
    wait: Callable[[], object]
    there: Callable[[], Iterable[Tensor]]
    module: Offmate | None = None
    host: Callable[[], int | None] = lambda: None


def _filled(shape: Shape, device: torch.device) -> nn.Module:
    model = shape.empty()
    reader = WeightReader(model, Values(model, device))
    for tensor in (*model.parameters(), *model.buffers()):
        if reader.has(tensor):
            values = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.data
            reader.read(tensor, values)
            rebind_storage(tensor, values)
    return model.to(device).train()


def _forget(params: Iterable[Tensor]) -> None:
    for param in params:
        param.grad = None


def eager(shape: Shape, device: torch.device, saving: Callable[[], Any] = contextlib.nullcontext) -> Way:
    """Everything on the device.

    Args:
        shape: of the model and its batch.
        device: where it trains.
        saving: makes the context of a forward.
    """
    model, batch = _filled(shape, device), shape.ids(device)
    params = list(model.parameters())
    masters = [param.detach().float() for param in params]
    parts = [slice(start, start + _AT_ONCE) for start in range(0, len(params), _AT_ONCE)]
    optimizers = [torch.optim.AdamW(masters[part], lr=1e-5, fused=True) for part in parts]

    def loss() -> Tensor:
        with saving():
            return shape.loss(model(**batch))

    def update() -> None:
        for part, optimizer in zip(parts, optimizers, strict=True):
            for param, master in zip(params[part], masters[part], strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float(), None
            optimizer.step()
            for param, master in zip(params[part], masters[part], strict=True):
                param.data.copy_(master)
                master.grad = None

    def there() -> Iterator[Tensor]:
        yield from (*params, *model.buffers(), *masters, *batch.values())
        for optimizer in optimizers:
            yield from (t for state in optimizer.state.values() for t in state.values())

    return Way(loss=loss, update=update, forget=lambda: _forget(params), wait=int, there=there)


def save_on_cpu(shape: Shape, device: torch.device) -> Way:
    """What the backward needs is moved to the host, all of it, and back."""
    pin = device.type != "cpu"
    return eager(shape, device, lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin))


def cpu_step(shape: Shape, device: torch.device) -> Way:
    """Gradients are copied to the host, masters stepped there, parameters copied back; nothing overlaps."""
    model, batch = _filled(shape, device), shape.ids(device)
    params = list(model.parameters())
    masters = [param.detach().to("cpu", torch.float32) for param in params]
    pin = device.type != "cpu"
    landing = [torch.empty(p.shape, dtype=p.dtype, pin_memory=pin) for p in params]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)

    def update() -> None:
        for param, place in zip(params, landing, strict=True):
            assert param.grad is not None
            place.copy_(param.grad, non_blocking=True)
        finish(device)
        _forget(params)
        for master, place in zip(masters, landing, strict=True):
            assert master.grad is not None
            master.grad.copy_(place)
        optimizer.step()
        for param, master, place in zip(params, masters, landing, strict=True):
            place.copy_(master)
            param.data.copy_(place, non_blocking=True)
        finish(device)  # what the landing places hold may be written over

    return Way(
        loss=lambda: shape.loss(model(**batch)),
        update=update,
        forget=lambda: _forget(params),
        wait=int,
        there=lambda: (*params, *model.buffers(), *batch.values()),
        host=lambda: sum(math.prod(p.shape) * (p.itemsize + 16) for p in params),
    )


def offmate(
    shape: Shape,
    device: torch.device,
    machine: Machine,
    links: Links,
    *,
    budget_nbytes: int,
    host_nbytes: int,
    in_backward: bool,
    plan_s: float,
) -> Way:
    """Within a budget of device bytes and one of the host's.

    Args:
        shape: of the model and its batch.
        device: where it trains.
        machine: copies and steps.
        links: its bandwidths.
        budget_nbytes: of the device.
        host_nbytes: of the host.
        in_backward: whether parameters are updated during the backward.
        plan_s: seconds that the planner may take.
    """
    model, batch, memory = shape.empty().train(), shape.ids(device), Mapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    pool = HostPool(host_nbytes, device=device, memory=memory if device.type == "cpu" else None)
    module = Offmate(
        model,
        batch,
        budget_nbytes,
        optimizer=optimizer,
        optimizer_in_backward=in_backward,
        master_weights=True,
        weights=Values(model, device),
        machine=machine,
        pool=pool,
        links=links,
        time_limit_s=plan_s,
    )

    def there() -> list[Tensor]:
        states = (t for state in optimizer.state.values() for t in state.values())
        found = (*(p.data for p in model.parameters()), *model.buffers(), *states, *batch.values())
        return [t for t in found if t.dim() and t.untyped_storage().data_ptr() not in memory.addresses]

    return Way(
        loss=lambda: shape.loss(module(**batch)),
        update=int if in_backward else optimizer.step,
        forget=optimizer.zero_grad,
        wait=module.synchronize,
        there=there,
        module=module,
        host=lambda: module.host.peak_nbytes,
    )


def new_machine(device: torch.device) -> CudaMachine | SimulatedMachine:
    """What moves values to and from a device."""
    if device.type == "cpu":
        return SimulatedMachine(LINK_NBYTES_PER_S, LINK_NBYTES_PER_S)
    return CudaMachine(device)


def finish(device: torch.device) -> None:
    """Wait until the device has computed what it was given on this stream."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
