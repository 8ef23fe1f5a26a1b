"""QLoRA: PEFT's adapters on weights that bitsandbytes quantized."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.integrations.hf_trainer import finish, trainer_of
from benchmarks.integrations.peft_adapters import adapted, adapters_load
from benchmarks.integrations.plain_loops import steps_of
from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import batches, llama, tool
from tests.helpers.models import import_transformers

TOOL = "bitsandbytes"


def quantized(run: Run, **options: Any) -> Any:
    """A small Llama from a folder, its weights in 4 bits, with adapters."""
    transformers, peft = import_transformers(), tool("peft")
    llama().save_pretrained(run.folder / "whole")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
    model = transformers.LlamaForCausalLM.from_pretrained(run.folder / "whole", quantization_config=config)
    return adapted(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)).train()


@scenario(TOOL, "QLoRA in 4 bits, saved and loaded")
def qlora(run: Run) -> None:
    model = run.limited(quantized(run))
    steps_of(run, model, batches(4))
    adapters_load(run, model)


@scenario(TOOL, "QLoRA in Trainer, double quantization, bf16, RematCallback")
def qlora_in_trainer(run: Run) -> None:
    model = quantized(run, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    callbacks = run.callbacks("transformers", model)
    finish(run, trainer_of(run, model, trainer={"callbacks": callbacks}, bf16=True))
