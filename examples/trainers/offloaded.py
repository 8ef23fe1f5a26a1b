"""transformers' Trainer with values on the host: ``python examples/trainers/offloaded.py --budget 60%``."""

import argparse
import tempfile

from texts import Sentences, model
from transformers import Trainer, TrainingArguments

from remat_facade.integrations.transformers import offmate


def main() -> None:
    """Train for some steps and print each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help="bytes, a size or a share; without it, nothing is planned")
    parser.add_argument("--host-budget", default="256MiB", help="for what moves to the host")
    parser.add_argument("--output", default=tempfile.gettempdir(), help="folder of checkpoints")
    arguments = parser.parse_args()
    settings = TrainingArguments(
        arguments.output,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model(), settings, train_dataset=Sentences())
    if arguments.budget:
        offloaded = offmate(trainer, arguments.budget, host_budget=arguments.host_budget)  # the one line
        print(offloaded.plan.summary())
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
