"""A cut of `benchmarks/integrations`: trainers with one line changed, judged as in the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.integrations.judge import row_of
from benchmarks.integrations.table import OWN_ENVIRONMENT, TOOLS, absent_tools, all_scenarios

# One or two of each tool; `hatch run integrations` runs all.
CUT = [
    "plain loop: deepcopied before training",
    "Trainer: RematCallback",
    "Trainer: load_best_model_at_end",
    "Trainer: offmate: checkpoint, resumed",
    "SFTTrainer: LoRA by peft_config, RematCallback",
    "DPOTrainer: limit_memory before the trainer",
    "PEFT: LoRA on a model limited before get_peft_model",
    "bitsandbytes: QLoRA in 4 bits, saved and loaded",
    "Accelerate: bf16, limited after prepare",
    "Lightning: MemoryLimit",
    "Lightning: the LightningModule itself limited",
    "timm: --torchcompile remat --torchcompile-mode 70%",
    "diffusers: EMAModel, gradient accumulation",
    "ignite: create_supervised_trainer, evaluator, EMAHandler",
    "fastai: Learner.fit with validation",
    "torchtitan: FSDP, override, beside SelectiveAC",
    "torchtitan: override, each block metered",
]
LONG = {"Trainer: load_best_model_at_end", "Trainer: offmate: checkpoint, resumed"}
# Those that the default environment lacks; the others are never skipped.
EXTRA = {
    "Lightning": "lightning",
    "bitsandbytes": "bitsandbytes",
    "timm": "timm",
    "diffusers": "diffusers",
} | {
    "ignite": "pytorch-ignite",
    "fastai": "fastai",
    "torchtitan": "torchtitan",
}


@pytest.mark.filterwarnings("ignore")  # what these programs warn of among themselves is theirs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in CUT]
)
def test_one_line_changes_no_number(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits, budget, checkpoint, number of plans and warnings."""
    absent = EXTRA.get(name.partition(":")[0])
    if absent in absent_tools():
        pytest.skip(f"{absent} is in the environment `integrations` only")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (scenario,) = (each for each in all_scenarios() if each.name == name)
    row = row_of(scenario, tmp_path)
    assert row["wrong"] == []
    assert row["steps"] > 0


def test_only_extra_tools_may_be_absent() -> None:
    """The default environment has the others, so their rows run in each CI."""
    assert (
        set(absent_tools()) - OWN_ENVIRONMENT <= set(EXTRA.values()) <= {name for name, _ in TOOLS.values()}
    )
