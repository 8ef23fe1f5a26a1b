"""LLaMA-Factory, by the function that its command line calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.integrations.hf_trainer import loads
from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import tool
from benchmarks.integrations.whole_programs import texts, watching, write_model, write_texts

TOOL = "LLaMA-Factory"
ADAPTERS = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "q_proj,v_proj", "lora_dropout": 0.1}


def train(run: Run, **options: Any) -> Path:
    """Six steps of supervised fine-tuning; where the result is."""
    rows = [{"instruction": text, "input": "", "output": text} for text in texts()]
    write_texts(run.folder, rows)
    columns = {"texts": {"file_name": "texts.json"}}
    (run.folder / "dataset_info.json").write_text(json.dumps(columns), encoding="utf-8")
    settings = {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "model_name_or_path": str(write_model(run.folder)),
        "dataset": "texts",
        "dataset_dir": str(run.folder),
        "template": "default",
        "cutoff_len": 48,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": str(run.folder / "out"),
        "use_cpu": True,
        "seed": 0,
    }
    limit = []
    if run.planned:
        from remat_facade.integrations.transformers import RematCallback

        limit = [RematCallback(run.budget, **run.line)]
    tool("llamafactory.train.tuner").run_exp({**settings, **options}, callbacks=[watching(run), *limit])
    return run.folder / "out"


@scenario(TOOL, "full fine-tuning, saved, from_pretrained")
def full(run: Run) -> None:
    out = train(run)
    loads(run, out, run.models[-1])


@scenario(TOOL, "LoRA with dropout")
def lora(run: Run) -> None:
    train(run, **ADAPTERS)


@scenario(TOOL, "QLoRA in 4 bits")
def qlora(run: Run) -> None:
    train(run, **ADAPTERS, quantization_bit=4)


@scenario(TOOL, "bf16, gradient accumulation, evaluation")
def accumulated(run: Run) -> None:
    evaluation = {"val_size": 0.2, "eval_strategy": "steps", "eval_steps": 2}
    train(run, bf16=True, gradient_accumulation_steps=2, max_steps=4, **evaluation)
