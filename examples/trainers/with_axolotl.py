"""axolotl inside a memory budget: ``python examples/trainers/with_axolotl.py --budget 60%``."""

import argparse
import tempfile
from pathlib import Path

import yaml
from axolotl.cli.train import do_cli
from files import print_losses, write


def main() -> None:
    """Train for some steps and print each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help="bytes, a size or a share; without it, nothing is planned")
    parser.add_argument("--lora", action="store_true", help="train adapters, not all weights")
    arguments = parser.parse_args()
    folder = write(Path(tempfile.mkdtemp()))
    settings = {
        "base_model": str(folder / "model"),
        "model_type": "AutoModelForCausalLM",
        "tokenizer_type": "AutoTokenizer",
        "datasets": [{"path": str(folder / "sentences.json"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": 64,
        "max_steps": 8,
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "learning_rate": 1e-3,
        "bf16": False,
        "seed": 0,
        "logging_steps": 1,
        "saves_per_epoch": 0,
        "output_dir": str(folder / "out"),
    }
    if arguments.lora:
        settings |= {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["c_attn"]}
        settings |= dict.fromkeys(("lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel"), False)  # for a GPU
    if arguments.budget:
        plugin = "remat_facade.integrations.axolotl.RematPlugin"
        settings |= {"plugins": [plugin], "remat_budget": arguments.budget}  # the one line
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    do_cli(str(folder / "settings.yaml"))
    print_losses(folder)


if __name__ == "__main__":
    main()
