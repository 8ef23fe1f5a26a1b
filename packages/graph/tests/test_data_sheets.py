"""Data sheets: rates by dtype and kind of operator."""

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from remat_graph import OpCost, Platform, get_platform
from remat_graph.platforms import data_sheets
from remat_graph.platforms.base import links_of
from remat_graph.platforms.data_sheets import DataSheet, a100, c5_24xlarge, h100, h200, k80, rtx4090, v100

DEVICES = {"a100": a100, "h100": h100, "h200": h200, "rtx4090": rtx4090, "v100": v100}
DEVICES |= {"k80": k80, "c5.24xlarge": c5_24xlarge}
CHECKMATE = {"p32xlarge": v100, "p2xlarge": k80, "c524xlarge": c5_24xlarge}
"""The machines of Checkmate's profiles, by its names."""


def seconds(device: DataSheet, operator: str, arithmetic: str = "", **cost: Any) -> float:
    """Without the launch, of an operator on one tensor."""
    key = f"{operator}(float32[8, 64, 7, 7][3136, 49, 7, 1])"
    return device.time_s(OpCost(key=key, arithmetic=arithmetic, **cost)) - device.launch_s


def test_each_device_is_a_platform_of_its_name() -> None:
    """By the entry points of the distribution; names say that nothing was measured, and differ with rates."""
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    points = tomllib.loads(pyproject.read_text())["project"]["entry-points"]["remat.platforms"]
    assert {f"{name}-spec" for name in DEVICES} <= points.keys()
    for name, make in DEVICES.items():
        module, _, attribute = points[f"{name}-spec"].partition(":")
        assert getattr(import_module(module), attribute) is make
        device = make()
        assert isinstance(device, Platform)
        assert device.name.startswith(f"{name}-spec (by its data sheet, not measured")
        assert device.name != make(nbytes_per_s=1e12, launch_s=0.0).name
        assert device == make()
    for name, make in CHECKMATE.items():
        module, _, attribute = points[name].partition(":")
        assert getattr(import_module(module), attribute) is make


def test_a_device_is_found_without_the_ending() -> None:
    """A name says that nothing was measured, and need not be typed."""
    assert get_platform("v100") == get_platform("v100-spec") == v100()
    assert get_platform("h100", launch_s=0.0) == h100(launch_s=0.0)


def test_a_cpu_has_no_links_and_a_device_has() -> None:
    """Its memory is that of the host."""
    assert {name for name, make in DEVICES.items() if links_of(make()) is None} == {"c5.24xlarge"}


@pytest.mark.parametrize(
    ("device", "arithmetic", "tflops"),
    [
        (h200, "bfloat16", 989.5),
        (h200, "tf32", 494.7),
        (h200, "float32", 67.0),
        (h200, "", 67.0),
        (h200, "complex64", 67.0),
        (a100, "float16", 312.0),
        (a100, "tf32", 156.0),
        (a100, "float32", 19.5),
        (v100, "float16", 125.0),
        (v100, "bfloat16", 15.7),
        (v100, "tf32", 15.7),
        (rtx4090, "bfloat16", 165.2),
        (k80, "float16", 4.37),
        (c5_24xlarge, "float64", 4.6),
    ],
)
def test_products_take_the_rate_of_their_arithmetic(device: Any, arithmetic: str, tflops: float) -> None:
    """A device without it, or an arithmetic that is not known, computes in float32."""
    expected = 1.0 / data_sheets.PRODUCT_SHARE
    found = seconds(device(), "aten.mm.default", arithmetic, flops=tflops * 1e12)
    assert found == pytest.approx(expected)


def test_kinds_of_operators_reach_shares_of_their_own() -> None:
    """Products, convolutions, attention and its gradient."""
    work = {"arithmetic": "bfloat16", "flops": 989.5e12}
    found = {
        operator: 1 / seconds(h100(), operator, **work)
        for operator in (
            "aten.addmm.default",
            "aten.convolution.default",
            "aten._scaled_dot_product_cudnn_attention.default",
            "aten._scaled_dot_product_cudnn_attention_backward.default",
            "aten._scaled_dot_product_flash_attention.default",
        )
    }
    shares = [data_sheets.PRODUCT_SHARE, data_sheets.CONVOLUTION_SHARE]
    shares += [data_sheets.ATTENTION_SHARE, data_sheets.ATTENTION_SHARE * data_sheets.GRADIENT_SHARE]
    assert list(found.values()) == pytest.approx([*shares, data_sheets.FLASH_ON_HOPPER_SHARE])
    flash = OpCost(
        key="aten._scaled_dot_product_flash_attention.default()", arithmetic="float16", flops=312e12
    )
    assert a100(launch_s=0).time_s(flash) == pytest.approx(1 / data_sheets.ATTENTION_SHARE)


def test_bytes_move_at_a_share_of_the_bandwidth() -> None:
    """Once, or as often as a kernel reads them; a lookup reads what it writes; no bytes take no time."""
    device = h100(nbytes_per_s=1 / data_sheets.BANDWIDTH_SHARE)
    moved = {"read_nbytes": 300, "written_nbytes": 300}
    assert seconds(device, "aten.add.Tensor", **moved) == pytest.approx(600)
    assert seconds(device, "cudnn_batch_norm", **moved) == pytest.approx(900)
    assert seconds(device, "again: aten._log_softmax.default", **moved) == pytest.approx(1200)
    assert seconds(device, "aten.embedding.default", read_nbytes=10**9, written_nbytes=300) == pytest.approx(
        600
    )
    assert device.time_s(OpCost(key="read_generator cuda")) == 0.0
    assert device.time_s(OpCost(key="aten.add.Tensor()", read_nbytes=1)) > device.launch_s


@pytest.mark.parametrize(
    ("stride", "arithmetic", "passes"),
    [
        ("3136, 49, 7, 1", "tf32", 3),
        ("3136, 1, 448, 64", "tf32", 1),
        ("3136, 49, 7, 1", "float32", 1),
    ],
)
def test_tensor_cores_take_channels_last(stride: str, arithmetic: str, passes: int) -> None:
    """Tensors of another layout are copied before and after a convolution."""
    device = h100(nbytes_per_s=1 / data_sheets.BANDWIDTH_SHARE)
    key = f"aten.convolution.default(float32[8, 64, 7, 7][{stride}], float32[64, 64, 3, 3][576, 9, 3, 1])"
    cost = OpCost(key=key, arithmetic=arithmetic, read_nbytes=10**6)
    assert device.time_s(cost) - device.launch_s == pytest.approx(passes * 10**6)


@pytest.mark.parametrize(
    "options",
    [{"tflops": {"float16": 1.0}}, {"tflops": {"float32": 0.0}}, {"nbytes_per_s": 0}, {"launch_s": -1}],
)
def test_rates_that_no_device_has(options: dict[str, Any]) -> None:
    """Refused by the name of the rate."""
    with pytest.raises(ValueError, match=next(iter(options))):
        h100(**options)
