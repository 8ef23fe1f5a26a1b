"""A step is traced for a CUDA device that is not there, with the operators and bytes that it has there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat_executor import estimated_graph
from remat_executor.capture.cuda_kernels import FUSED
from remat_executor.capture.joint_graph import capture
from remat_executor.inspection.tensors import collect
from remat_executor.torch_private.dispatch import autocast_operators
from remat_executor.translation.keys import anywhere
from remat_executor.translation.translate import translate
from remat_executor.ways.registry import families
from remat_graph import Graph, Roofline, load_platform
from tests.helpers.models import get_case, import_torchvision, import_transformers

aten = torch.ops.aten
PLATFORM = Roofline()
HOPPER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, also where there is one."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


def estimate(module: nn.Module, *args: Tensor, **kwargs: Any) -> Graph:
    """For a CUDA device."""
    return estimated_graph(module, args, kwargs, PLATFORM, device="cuda")


def targets(graph: Graph) -> list[str]:
    """The operators of a graph, without namespace and overload."""
    return [op.target.removeprefix("aten.").partition(".")[0] for op in graph.ops]


class Called(nn.Module):
    """A linear layer, and a function of its output whose mean square is the loss."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(32, 32), function

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.function(self.layer(x)).float().square().mean()


class FusedOnCuda(nn.Sequential):
    """Layers whose forward or backward is one kernel on CUDA, and several operators where there is none."""

    def __init__(self) -> None:
        without_weight = nn.RMSNorm((8, 32), elementwise_affine=False)
        super().__init__(nn.Mish(), nn.RMSNorm(32, eps=1e-5), nn.Linear(32, 32), without_weight)


def heads(x: Tensor) -> Tensor:
    """[batch, 4 heads, tokens, 8]."""
    return x.unflatten(-1, (4, 8)).transpose(1, 2)


def attend(*, mask: str = "", **options: Any) -> Callable[[Tensor], Tensor]:
    """Attention of a tensor to itself, with a mask whose rows or columns are dense."""

    def attention(x: Tensor) -> Tensor:
        square = torch.ones(16, 16, dtype=torch.bool, device=x.device)
        seen = {"": None, "rows": square.tril(), "columns": square.triu().t()}[mask]
        return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), seen, **options)

    return attention


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("dtype", "order", "options", "expected"),
    [
        (torch.bfloat16, HOPPER[1:], {"is_causal": True, "dropout_p": 0.1}, "flash"),
        (torch.bfloat16, HOPPER, {"is_causal": True, "dropout_p": 0.1}, "cudnn"),
        (torch.bfloat16, HOPPER[1:], {"mask": "rows"}, "efficient"),
        (torch.bfloat16, HOPPER, {"mask": "columns"}, None),
        (torch.float32, HOPPER, {"is_causal": True}, "efficient"),
        (torch.float64, HOPPER, {"is_causal": True}, None),
        (torch.bfloat16, [], {"is_causal": True}, None),
    ],
)
def test_attention_is_the_kernel_that_cuda_takes(
    dtype: torch.dtype, order: list[SDPBackend], options: dict[str, Any], expected: str | None
) -> None:
    """By dtype, mask and preference; with the seeds of dropout, and its gradient."""
    with sdpa_kernel([*order, SDPBackend.MATH], set_priority=True):
        graph = estimate(Called(attend(**options)).to(dtype), torch.randn(2, 16, 32, dtype=dtype))
    found = [name for name in targets(graph) if "attention" in name]
    if expected is None:
        assert not found
        assert {"_safe_softmax", "_softmax"} & {*targets(graph)}
        return
    kernel = f"_scaled_dot_product_{expected}_attention"
    assert found == [kernel, f"{kernel}_backward"]
    assert ("read_generator" in targets(graph)) == ("dropout_p" in options)


def autocast(x: Tensor) -> Tensor:
    """A norm, products and a softmax under autocast, after what the model asks of its device."""
    assert x.is_cuda
    assert x.device == torch.device("cuda", 0)
    assert not x.is_meta
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        product = F.linear(F.layer_norm(x, (32,)), torch.ones(32, 32, device="cuda"))
        assert product.dtype is torch.bfloat16
        assert F.layer_norm(product, (32,)).dtype is torch.float32
        assert product.softmax(-1).dtype is torch.float32
        assert product.sum().dtype is torch.float32
        assert F.relu(product).dtype is torch.bfloat16
        assert attend()(x).dtype is torch.bfloat16
        assert torch.addcmul(product, product, x).dtype is torch.float32
        with torch.autocast("cuda", enabled=False):
            assert F.linear(x, torch.ones(32, 32).to(x.device)).dtype is torch.float32
        return product.softmax(-1)


@pytest.mark.usefixtures("no_cuda")
def test_autocast_and_devices_are_those_of_cuda() -> None:
    """Torch would switch autocast off without a GPU; half precision is widened within the softmax."""
    graph = estimate(Called(autocast), torch.randn(2, 16, 32))
    softmax = next(op for op in graph.ops if op.target == "aten._softmax.default")
    assert softmax.key.startswith("aten._softmax.default(bfloat16[")
    assert softmax.key.endswith("-1, True) on meta")
    assert not torch.is_autocast_enabled("cuda")
    assert not any(torch._C.DispatchKey.AutogradMeta in op.py_kernels for op in autocast_operators())


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cuda_has_a_kernel_for_is_one_operator(dtype: torch.dtype) -> None:
    """Its other outputs have their shapes and dtypes; afterwards, torch takes it apart on meta as before."""
    graph = estimate(Called(FusedOnCuda()).to(dtype), torch.randn(8, 32, dtype=dtype))
    found = targets(graph)
    assert found.count("_fused_rms_norm") == found.count("_fused_rms_norm_backward") == 2
    assert found.count("mish_backward") == 1
    assert not {"rsqrt", "tanh"} & {*found}
    inverses = [graph.values[op.first.outputs[1]].nbytes for op in graph.ops if "rms_norm.d" in op.target]
    assert inverses == [8 * 4, 4]
    for operator in FUSED:
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Meta")


@pytest.mark.usefixtures("no_cuda")
def test_batch_norms_are_cudnns_and_keep_channels_last() -> None:
    """Also after convolutions whose weights alone have their channels last."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten())
    module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    graph = estimate(module, torch.randn(2, 3, 12, 12))
    assert "cudnn_batch_norm" in targets(graph)
    assert "cudnn_batch_norm_backward" in targets(graph)
    norm = next(op for op in graph.ops if op.target == "cudnn_batch_norm")
    assert "float32[2, 8, 10, 10][800, 1, 80, 8]" in norm.key
    assert graph.rounding_nbytes == 512


def _gpt2(**sizes: int) -> nn.Module:
    transformers = import_transformers()
    config = transformers.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    network = transformers.GPT2LMHeadModel(config).bfloat16()
    network.loss_type = "ForCausalLM"
    found: nn.Module = network
    return found


class Mean(nn.Module):
    """A network with the loss of `benchmarks/gpu.py`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The model's own loss, or the mean square."""
        if x.is_floating_point():
            loss: Tensor = self.network(x).float().square().mean()
        else:
            loss = self.network(input_ids=x, labels=x).loss
        return loss


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("model", ["gpt2", "resnet50"])
def test_the_operators_are_those_that_ran_on_a_gpu(model: str) -> None:
    """Every key of the estimate was measured on an H100, at the sizes of the benchmark."""
    h100 = load_platform(ROOT / "platforms" / "nvidia-h100-80gb-hbm3.json")
    with torch.device("meta"):
        if model == "gpt2":
            module = _gpt2(n_layer=2, n_embd=1024, n_head=16, n_positions=1024, vocab_size=50304)
            x = torch.zeros(8, 1024, dtype=torch.long)
        else:
            module, x = import_torchvision().models.resnet50(), torch.zeros(184, 3, 224, 224)
    with sdpa_kernel([*HOPPER, SDPBackend.MATH], set_priority=True):
        graph = estimate(Mean(module).train(), x)
    # An op that only a way adds reads and makes nothing without it.
    keys = {anywhere(op.key) for op in graph.ops if op.first.inputs or op.first.outputs}
    assert len(keys) > 50
    assert keys <= h100.measurements.keys()


class Classifier(nn.Module):
    """A residual network under AMP in float16, channels last."""

    def __init__(self) -> None:
        super().__init__()
        network = get_case("resnet18").make()
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """The cross entropy with class 0."""
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.network(x.contiguous(memory_format=torch.channels_last))
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))


def kernels_of_the_device() -> AbstractContextManager[Any]:
    """Attention by products where the device has no fused kernel: then the estimate assumes none either."""
    x = torch.randn(1, 1, 16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    made = F.scaled_dot_product_attention(x, x, x)
    fused = "ScaledDotProduct" in type(made.grad_fn).__name__
    return nullcontext() if fused else sdpa_kernel(SDPBackend.MATH)


@pytest.fixture
def cudnn_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch norms of cuDNN where torch is built without: then the estimate assumes none either."""
    monkeypatch.setattr(torch.backends.cudnn, "enabled", torch.backends.cudnn.is_available())


def captured_graph(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The graph of a step where its tensors are; nothing is measured."""
    tensors = collect(module, args, kwargs)
    return translate(capture(module, tensors), tensors, name="", families=families()).graph


def compared(graph: Graph) -> tuple[list[Any], list[Any]]:
    """Ops and values, without their names."""
    ops = [
        (anywhere(op.key), [(each.inputs, each.outputs) for each in op.implementations], op.rerun)
        for op in graph.ops
    ]
    return ops, [(value.role, value.external, value.nbytes) for value in graph.values]


@pytest.mark.cuda
@pytest.mark.usefixtures("cudnn_of_the_device")
@pytest.mark.parametrize(
    "name", ["gpt2", "bert", "t5", "vit", "unet_dropout", "mobilenet_v2", "amp", "fused", "fused_half"]
)
def test_the_estimate_is_the_capture_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators, arguments and bytes, on a machine that seems to have no GPU."""
    if name.startswith("fused"):
        dtype = torch.bfloat16 if name == "fused_half" else torch.float32
        module: nn.Module = Called(FusedOnCuda()).to(dtype)
        args, kwargs = (torch.randn(8, 32, dtype=dtype),), dict[str, Any]()
    else:
        case = get_case("resnet18" if name == "amp" else name)
        module = (Classifier() if name == "amp" else case.make()).train()
        args, kwargs = case.sample(0)
    with kernels_of_the_device():
        with monkeypatch.context() as patch:
            patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
            expected = compared(estimated_graph(module, args, kwargs, PLATFORM, device="cuda"))
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, Tensor.cuda, (args, kwargs))
        found = compared(captured_graph(module.cuda(), args, kwargs))
    for here, there in zip(*(each[0] for each in (expected, found)), strict=False):
        assert here == there
    assert expected == found
