"""The programs that people train with: PEFT's adapters, accelerate's loop, transformers' trainer."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule, RematWarning
from tests.helpers.models import import_transformers
from tests.helpers.planners import repeat_at_random
from tests.helpers.small_llama import WORDS, small_llama
from tests.helpers.trainers import QUIET, history

LAYOUTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "biases": {"target_modules": "all-linear", "use_rslora": True, "bias": "lora_only"},
}


pytestmark = pytest.mark.usefixtures("only_our_warnings_count")


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Two sentences, and what comes next in them."""
    ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def planned(model: nn.Module, cache: Path) -> PlannedModule:
    """With repeats here and there."""
    return PlannedModule(model, (), batch(), repeat_at_random(12), cache_dir=cache)


def steps(model: Any, count: int = 3) -> list[Tensor]:
    """Losses and gradients of a few."""
    torch.manual_seed(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    seen = []
    for step in range(count):
        optimizer.zero_grad()
        loss = model(**batch(step)).loss
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in trained)]
        optimizer.step()
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_of_peft(layout: str, tmp_path: Path) -> None:
    """Trained to the bit; saved, switched off, merged and generated with as in an unplanned model."""
    import_transformers()
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM", **LAYOUTS[layout])
    original = peft.get_peft_model(small_llama(), config)
    module = planned(copy.deepcopy(original), tmp_path)
    for expected, actual in zip(steps(original), steps(module), strict=True):
        assert torch.equal(expected, actual)
    assert module.runs == {"planned": 3}

    module.save_pretrained(tmp_path / "adapter")
    states = peft.get_peft_model_state_dict(original)
    assert states
    loaded = peft.PeftModel.from_pretrained(small_llama(), tmp_path / "adapter")
    for name, tensor in peft.get_peft_model_state_dict(loaded).items():
        assert torch.equal(tensor, states[name])

    original.eval()
    module.eval()
    ids = batch()["input_ids"][:, :4]
    with torch.no_grad():
        found = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in (original, module)]
        assert torch.equal(*found)
        logits = [model(**batch()).logits for model in (original, module)]
        assert torch.equal(*logits)
        with original.disable_adapter(), module.disable_adapter():
            plain = [model(**batch()).logits for model in (original, module)]
        assert torch.equal(*plain)
        assert not torch.equal(logits[0], plain[0])
        assert torch.allclose(module.merge_and_unload()(**batch()).logits, logits[0], atol=1e-5)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_of_accelerate(precision: str, tmp_path: Path) -> None:
    """Accumulation, clipping and mixed precision, which is put around `forward`; unwrapped, it is planned."""
    import_transformers()
    accelerate = pytest.importorskip("accelerate")

    def loop(model: nn.Module) -> tuple[list[Tensor], Any]:
        torch.manual_seed(1)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for step in range(4):
            with accelerator.accumulate(prepared):
                output = prepared(**batch(step))
                accelerator.backward(output.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses += [output.loss.detach(), output.logits.detach()]
        return losses, accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)

    module = planned(small_llama(), tmp_path)
    expected, _ = loop(small_llama())
    # Accelerate's marks are read by no forward; in 16 bits it also replaces the forward.
    replaced = precision != "no"
    with pytest.warns(RematWarning, match="planning again") if replaced else nullcontext():
        actual, unwrapped = loop(module)
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)
    assert unwrapped is module
    assert module.runs == Counter(planned=4, replanned=int(replaced))
    steps(copy.deepcopy(module))


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sixteen of them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        """One, without its batch dimension."""
        return {name: tensor[0] for name, tensor in batch(place).items()}


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    """The same losses and weights; evaluation, checkpoints and going on from one."""
    transformers = import_transformers()
    pytest.importorskip("accelerate")

    def train(model: nn.Module, folder: Path, resume: bool = False) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=6,
            save_steps=3,
            eval_strategy="steps",
            eval_steps=3,
            label_names=["labels"],
            **QUIET,
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences()
        )
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
        return history(trainer)

    original, module = small_llama(), planned(small_llama(), tmp_path)
    expected = train(original, tmp_path / "original")
    with pytest.warns(RematWarning, match="planning again"):
        assert train(module, tmp_path / "planned") == expected
    assert sum("eval_loss" in entry for entry in expected) == 2
    again = planned(small_llama(), tmp_path)
    with pytest.warns(RematWarning, match="planning again"):
        assert train(again, tmp_path / "planned", resume=True) == expected
    # The trainer calls the model with an input that the sample has not. Marks of accelerate and what saving
    # writes into the config change nothing.
    assert [1, 1] == [model.runs["replanned"] for model in (module, again)]
    for model in (module, again):
        for name, tensor in original.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor)
