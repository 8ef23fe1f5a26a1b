"""What the tests with transformers' trainer share."""

from typing import Any

QUIET: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 0,
}
"""Arguments of a trainer that is repeatable, on the CPU, and reports to nobody."""


def history(trainer: Any) -> list[dict[str, float]]:
    """Losses of training and of evaluation."""
    return history_of(trainer.state)


def history_of(state: Any) -> list[dict[str, float]]:
    """The same of a trainer's state, which is what a callback gets."""
    kept = ("loss", "eval_loss")
    return [{name: entry[name] for name in kept if name in entry} for entry in state.log_history]
