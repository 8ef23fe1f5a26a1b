"""transformers' Trainer inside a memory budget: ``python examples/trainers/trainer.py --budget 60%``."""

import argparse
import tempfile

from texts import Sentences, model
from transformers import Trainer, TrainingArguments

from remat_facade.integrations.transformers import RematCallback


def main() -> None:
    """Train for some steps and print each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help="bytes, a size or a share; without it, nothing is planned")
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
    callbacks = [RematCallback(arguments.budget)] if arguments.budget else []  # the one line
    trainer = Trainer(model(), settings, train_dataset=Sentences(), callbacks=callbacks)
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
