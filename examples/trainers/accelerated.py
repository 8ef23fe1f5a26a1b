"""A loop with accelerate inside a memory budget: ``python examples/trainers/accelerated.py --budget 60%``."""

import argparse

import torch
from accelerate import Accelerator
from texts import Sentences, model
from torch.utils.data import DataLoader

from remat_facade import limit_memory
from remat_facade.integrations.accelerate import report


def main() -> None:
    """Train for some steps and print each loss, with the plan after the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help="bytes, a size or a share; without it, nothing is planned")
    parser.add_argument("--prepared", action="store_true", help="limit the model after prepare, not before")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    trained = model()
    if arguments.budget and not arguments.prepared:
        limit_memory(trained, arguments.budget)  # the one line
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    loader = DataLoader(Sentences(), batch_size=8)
    trained, optimizer, loader = accelerator.prepare(trained, optimizer, loader)
    if arguments.budget and arguments.prepared:
        limit_memory(trained, arguments.budget)
    torch.manual_seed(1)
    for step, batch in enumerate(loader):
        loss = trained(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.6f}")
        if step == 0:
            report(accelerator, trained, step)


if __name__ == "__main__":
    main()
