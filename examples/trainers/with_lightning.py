"""Lightning inside a memory budget: ``python examples/trainers/with_lightning.py --budget 60%``."""

import argparse
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from texts import Sentences, model
from torch import Tensor
from torch.utils.data import DataLoader

from remat_facade.integrations.lightning import MemoryLimit


class Language(LightningModule):
    """The small GPT-2 with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.model(**batch).loss
        print(f"loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As in the other examples."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train for some steps and print each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help="bytes, a size or a share; without it, nothing is planned")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tempfile.gettempdir(),
        callbacks=[MemoryLimit(arguments.budget)] if arguments.budget else [],  # the one line
    )
    trainer.fit(Language(), DataLoader(Sentences(), batch_size=8))


if __name__ == "__main__":
    main()
