"""axolotl, by its command line and a YAML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.integrations.hf_trainer import loads
from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import tool
from benchmarks.integrations.whole_programs import texts, watching, write_model, write_texts

TOOL = "axolotl"
ADAPTERS = {
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_modules": ["q_proj", "v_proj"],
    **dict.fromkeys(("lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel"), False),  # for a GPU
}


def train(run: Run, **options: Any) -> Path:
    """Six steps of fine-tuning; where the result is."""
    import yaml

    rows = write_texts(run.folder, [{"text": text} for text in texts()])
    settings = {
        "base_model": str(write_model(run.folder)),
        "model_type": "AutoModelForCausalLM",
        "tokenizer_type": "AutoTokenizer",
        "datasets": [{"path": str(rows), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(run.folder / "prepared"),
        "sequence_len": 48,
        "max_steps": 6,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "learning_rate": 1e-2,
        "bf16": False,
        "seed": 0,
        "logging_steps": 1,
        "saves_per_epoch": 0,
        "output_dir": str(run.folder / "out"),
        **options,
    }
    plugins = tool("axolotl.integrations.base").PluginManager.get_instance().plugins
    plugins.clear()  # those of the last run
    plugins["scenario"] = watching_plugin(run)
    if run.planned:
        settings["plugins"] = ["remat_facade.integrations.axolotl.RematPlugin"]
        settings |= {"remat_budget": run.budget, "remat_time_limit_s": run.line["time_limit_s"]}
    path = run.folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    os.environ["REMAT_CACHE_DIR"] = str(run.cache)
    try:
        tool("axolotl.cli.train").do_cli(str(path))
    finally:
        del os.environ["REMAT_CACHE_DIR"]
    return run.folder / "out"


def watching_plugin(run: Run) -> Any:
    """A plugin with the callback of `watching`."""

    class Watching(tool("axolotl.integrations.base").BasePlugin):
        """Adds it as RematPlugin adds its own."""

        def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
            """Before the trainer's own."""
            return [watching(run)]

    return Watching()


@scenario(TOOL, "full fine-tuning, saved, from_pretrained")
def full(run: Run) -> None:
    out = train(run)
    loads(run, out, run.models[-1])


@scenario(TOOL, "LoRA with dropout")
def lora(run: Run) -> None:
    train(run, adapter="lora", **ADAPTERS)


@scenario(TOOL, "QLoRA in 4 bits")
def qlora(run: Run) -> None:
    train(run, adapter="qlora", load_in_4bit=True, **ADAPTERS)


@scenario(TOOL, "gradient accumulation, evaluation, activation checkpointing")
def accumulated(run: Run) -> None:
    evaluation = {"val_set_size": 0.2, "eval_steps": 2, "eval_batch_size": 2}
    train(run, gradient_accumulation_steps=2, max_steps=4, gradient_checkpointing=True, **evaluation)
