"""Settings of library models that no capture read: none of them changes the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import CaptureError, PlannedModule
from remat_executor.inspection.tensors import REGISTRIES
from tests.helpers.models.imports import import_torchvision, import_transformers
from tests.helpers.planners import save_all

TOKENS = torch.arange(16).view(2, 8)


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    t = import_transformers()
    config = t.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=32)
    config.bos_token_id = config.eos_token_id = 0
    return t.GPT2LMHeadModel(config), {"input_ids": TOKENS, "labels": TOKENS}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    t = import_transformers()
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    config = t.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    return t.LlamaForCausalLM(config), {"input_ids": TOKENS, "labels": TOKENS}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    t = import_transformers()
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    model = t.BertForSequenceClassification(t.BertConfig(num_attention_heads=2, **sizes))
    return model, {"input_ids": TOKENS, "labels": torch.tensor([0, 1])}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    t = import_transformers()
    sizes = {"num_layers": 2, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "vocab_size": 50}
    model = t.T5ForConditionalGeneration(t.T5Config(decoder_start_token_id=0, **sizes))
    return model, {"input_ids": TOKENS, "labels": TOKENS}


def lora() -> tuple[nn.Module, dict[str, Tensor]]:
    model, sample = llama()
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config), sample


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    return import_torchvision().models.resnet18(num_classes=4), {"x": torch.randn(2, 3, 32, 32)}


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "lora": lora, "resnet": resnet}
OTHER: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 0.25,
    str: lambda value: f"{value}_other",
    type(None): lambda value: 1,
}


def plain(planned: PlannedModule, *, read: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """(holder, name) of numbers, strings, bools and None in modules and their configs, read or not."""
    manager: Any = planned._remat
    seen = set()
    for module in planned.module.modules():
        objects = [value for value in vars(module).values() if hasattr(value, "__dict__")]
        for thing in (module, *(o for o in objects if type(o) in manager.reads.kinds)):
            if id(thing) in seen or (isinstance(thing, nn.Module) and thing is not module):
                continue
            seen.add(id(thing))
            for name, value in list(vars(thing).items()):
                if name in REGISTRIES or type(value) not in OTHER:
                    continue
                if manager.reads.include(type(thing), name) is read:
                    yield vars(thing), name


def step(module: nn.Module, sample: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    output = module(**sample)
    loss = output.sum() if isinstance(output, Tensor) else output.loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("name", MODELS)
def test_what_no_capture_read_changes_nothing(name: str, cache: Path) -> None:
    """All of these at once: the same plan serves, a fresh capture has the same graph, eager the same bits."""
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    expected = step(model.train(), sample)  # the first forward of some writes into the config
    planned = PlannedModule(model, (), sample, save_all, cache_dir=cache)
    graph = planned.graph
    settings = list(plain(planned, read=False))
    assert len(settings) > 20
    for holder, key in settings:
        holder[key] = OTHER[type(holder[key])](holder[key])
    model._is_accelerate_prepared = model._hf_hook = True
    for found in (step(planned, sample), step(model, sample)):
        assert all(map(torch.equal, expected, found))
    assert planned.runs == {"planned": 1}
    again = PlannedModule(model, (), sample, save_all, cache_dir=cache).graph
    assert (graph.values, [op.target for op in graph.ops]) == (again.values, [op.target for op in again.ops])


@pytest.mark.filterwarnings("ignore:called in another way:remat_executor.RematWarning")
def test_what_a_capture_read_replans(cache: Path) -> None:
    """The rate of a dropout deep inside, and the scale that a config holds."""
    torch.manual_seed(0)
    model, sample = gpt2()
    planned: Any = PlannedModule(model.train(), (), sample, save_all, cache_dir=cache)
    for i, change in enumerate(
        (
            lambda: setattr(model.transformer.h[1].mlp.dropout, "p", 0.5),
            lambda: setattr(model.transformer.h[0].attn, "scaling", 0.3),
            lambda: setattr(model.config, "output_hidden_states", True),
        ),
        1,
    ):
        change()
        assert all(map(torch.equal, step(model, sample), step(planned, sample)))
        assert planned.runs["replanned"] == i


def test_a_classifier_that_fills_its_config_in_is_planned_once(cache: Path) -> None:
    """Its first forward writes the kind of problem into the config, as the original's does."""
    torch.manual_seed(0)
    model, sample = bert()
    original = copy.deepcopy(model)
    assert model.config.problem_type is None
    planned: Any = PlannedModule(model.train(), (), sample, save_all, cache_dir=cache)
    original.train()
    for _ in range(2):
        assert all(map(torch.equal, step(original, sample), step(planned, sample)))
        for each in (original, planned):
            each.eval()
            with torch.no_grad():
                each(**sample)
            each.train()
    assert planned.config.problem_type == original.config.problem_type == "single_label_classification"
    assert planned.runs == {"planned": 2, "original": 2}


class Settings:
    """Filled in by a forward."""

    kind: str | None = None

    def __init__(self) -> None:
        self.kind = None


class FillsIn(nn.Module):
    """Its forward fills a setting in; `differs`: and computes something else when it does."""

    def __init__(self, *, differs: bool) -> None:
        super().__init__()
        self.layer, self.settings, self.differs = nn.Linear(8, 8), Settings(), differs

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.settings.kind is None:
            self.settings.kind = "regression"
            x = x * 3 if self.differs else x
        return x.square().mean()


def test_a_forward_that_fills_in_a_setting_must_compute_the_same_with_it(cache: Path) -> None:
    """Otherwise each planned call would compute what the original computes at its first call only."""
    sample = (torch.ones(4, 8),)
    model = FillsIn(differs=True)
    with pytest.raises(CaptureError, match=r"sets kind at its first call.*call the model once before"):
        PlannedModule(model, sample, {}, save_all, cache_dir=cache)
    assert model.settings.kind is None
    model(*sample)
    for each in (model, FillsIn(differs=False)):
        original = copy.deepcopy(each)
        planned = PlannedModule(each, sample, {}, save_all, cache_dir=cache)
        for _ in range(2):
            assert torch.equal(planned(*sample), original(*sample))
        assert planned.runs == {"planned": 2}
        assert each.settings.kind == original.settings.kind == "regression"
