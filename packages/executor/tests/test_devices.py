"""What torch does not have is one clear error: a device, a private name. Its first selection of attention."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat_executor import BadInput, PlannedModule, UnsupportedTorch, estimated_graph
from remat_executor.inspection.devices import check_device
from remat_executor.torch_private import lookup
from remat_executor.torch_private.lookup import private_name
from remat_executor.torch_private.precision import attention_order, select_attention
from remat_graph import Graph, Plan, Roofline


def refuse(graph: Graph) -> Plan:
    """A planner that is not to be asked."""
    raise AssertionError("planned for a device that is not there")


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a CPU only."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


@pytest.mark.usefixtures("no_accelerator")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    """Refused before torch is asked for anything on it, which may end the process."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(2, 4)
    platform = Roofline(flops_per_s=1e12, nbytes_per_s=1e11)
    with pytest.raises(BadInput, match=r"the device is xpu.*finds the CPU only"):
        estimated_graph(model, (x,), {}, platform, device="xpu")
    with pytest.raises(BadInput, match=r"the device is cuda:1.*finds the CPU only"):
        PlannedModule(model, (x,), {}, refuse, device=torch.device("cuda:1"), cache_dir=tmp_path)
    assert estimated_graph(model, (x,), {}, platform).ops


def test_devices_of_another_type_or_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of devices and their type are what the error says."""
    accelerator = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for name in ("cpu", "meta", "cuda", "cuda:1"):
        check_device(torch.device(name))
    with pytest.raises(BadInput, match="cuda:2, and this machine has 2"):
        check_device(torch.device("cuda:2"))
    with pytest.raises(BadInput, match=r"xpu, .* finds cuda and the CPU"):
        check_device(torch.device("xpu"))


def test_private_names_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module or a name that is not there is another version of torch; a failing import within is not."""
    for module, name in (("torch._nothing", "x"), ("torch._C", "_nothing"), ("torch._nothing.deeper", "x")):
        with pytest.raises(UnsupportedTorch, match=rf"has no {module}\.{name}"):
            private_name(module, name)
    tmp_path.joinpath("importing_what_is_missing.py").write_text("import a_library_that_is_missing")
    tmp_path.joinpath("importing_a_missing_name.py").write_text("from sys import a_missing_name")
    tmp_path.joinpath("failing_by_itself.py").write_text("import sys; sys.a_missing_name")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for module, error, message in (
        ("importing_what_is_missing", ImportError, "a_library_that_is_missing"),
        ("importing_a_missing_name", ImportError, "a_missing_name"),
        ("failing_by_itself", AttributeError, "a_missing_name"),
    ):
        with pytest.raises(error, match=message):
            private_name(module, "x")


def test_a_private_name_that_is_there_makes_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step looks several of them up."""
    monkeypatch.setattr(lookup, "UnsupportedTorch", None)
    assert private_name("torch.utils._pytree", "tree_flatten")
    with pytest.raises(TypeError):
        private_name("torch.utils._pytree", "_nothing")


def test_attention_is_selected_without_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each device, with any kernels allowed, on devices without attention too; nothing is drawn."""
    select_attention.cache_clear()
    state, cpu = torch.get_rng_state(), torch.device("cpu")
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        expected = attention_order(cpu)
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.equal(state, torch.get_rng_state())

    def without_attention(*tensors: Tensor) -> int:
        raise NotImplementedError

    monkeypatch.setattr(torch, "_fused_sdp_choice", without_attention)
    assert expected == attention_order(cpu) == attention_order(torch.device("meta"))
