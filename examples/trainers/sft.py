"""TRL's SFTTrainer with LoRA inside a memory budget: ``python examples/trainers/sft.py --budget 200MiB``."""

import argparse
import tempfile

from datasets import Dataset
from peft import LoraConfig
from texts import Sentences, model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from remat_facade.integrations.transformers import RematCallback


def main() -> None:
    """Train for some steps and print each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help="bytes, a size or a share; without it, nothing is planned")
    parser.add_argument("--output", default=tempfile.gettempdir(), help="folder of checkpoints")
    arguments = parser.parse_args()
    words = models.WordLevel({str(number): number for number in range(128)}, "0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    tokenizer.add_special_tokens({"pad_token": "0", "eos_token": "0"})
    rows = [{"input_ids": sentence["input_ids"].tolist()} for sentence in Sentences()]
    settings = SFTConfig(
        arguments.output,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    limit = [RematCallback(arguments.budget)] if arguments.budget else []  # the one line
    trainer = SFTTrainer(
        model(),
        settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM"),
        callbacks=limit,
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
