"""LLaMA-Factory inside a memory budget: ``python examples/trainers/with_llamafactory.py --budget 60%``."""

import argparse
import json
import tempfile
from pathlib import Path

from files import print_losses, write
from llamafactory.train.tuner import run_exp

from remat_facade.integrations.transformers import RematCallback


def main() -> None:
    """Train for some steps and print each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help="bytes, a size or a share; without it, nothing is planned")
    parser.add_argument("--lora", action="store_true", help="train adapters, not all weights")
    arguments = parser.parse_args()
    folder = write(Path(tempfile.mkdtemp()))
    sentences = {"sentences": {"file_name": "sentences.json"}}
    (folder / "dataset_info.json").write_text(json.dumps(sentences), encoding="utf-8")
    settings = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(folder / "model"),
        "finetuning_type": "lora" if arguments.lora else "full",
        "lora_target": "c_attn",
        "dataset": "sentences",
        "dataset_dir": str(folder),
        "template": "default",
        "cutoff_len": 48,
        "max_steps": 8,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": str(folder / "out"),
        "use_cpu": True,
    }
    limit = [RematCallback(arguments.budget)] if arguments.budget else []
    run_exp(settings, callbacks=limit)  # the one line
    print_losses(folder)


if __name__ == "__main__":
    main()
