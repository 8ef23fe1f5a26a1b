"""Fine-tune a language model of Hugging Face inside a memory budget.

    python examples/huggingface.py
    python examples/huggingface.py --model FOLDER --text FILE --budget 12GiB

FOLDER has a causal language model with its tokenizer, as `save_pretrained` writes them. Without it, a small
GPT-2 with random weights is saved and loaded, whose tokens are bytes, so nothing is downloaded. The trained
model is saved like any other, and loads without remat.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from remat_facade.integrations.transformers import RematCallback


def small_gpt2(folder: Path, length: int) -> Path:
    """Save a GPT-2 with random weights; return its folder."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=length, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def rows_of(ids: list[int], length: int) -> list[dict[str, Tensor]]:
    """Rows of `length` tokens, whose labels are the tokens themselves."""
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def main() -> None:
    """Train for some steps, save the model and load it again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model and its tokenizer")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to train on")
    parser.add_argument("--budget", default="50%", help='bytes, "12GiB", or a share such as "50%%"')
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path, help="folder of the trained model")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.model or small_gpt2(Path(temporary, "small"), arguments.length)
        text = arguments.text.read_text(encoding="utf-8")
        ids = (
            AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
            if arguments.model
            else list(text.encode())
        )
        output = arguments.output or Path(temporary, "trained")
        settings = TrainingArguments(
            str(output),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_drop_last=True,  # a smaller last batch would be planned too
        )
        trainer = Trainer(
            AutoModelForCausalLM.from_pretrained(folder),
            settings,
            train_dataset=rows_of(ids, arguments.length),
            callbacks=[RematCallback(arguments.budget)],  # the one line; it prints the plan
        )
        trainer.train()
        trainer.save_model(str(output))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last")
        loaded = AutoModelForCausalLM.from_pretrained(output)
        print(f"saved and loaded: {type(loaded).__name__}")


if __name__ == "__main__":
    main()
