"""A plain loop inside a memory budget: ``python examples/trainers/plain.py --budget 60%``."""

import argparse

import torch
from texts import Sentences, model
from torch.utils.data import DataLoader

from remat_facade import limit_memory, planned


def main() -> None:
    """Train for some steps and print each loss, then the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help="bytes, a size or a share; without it, nothing is planned")
    arguments = parser.parse_args()
    trained = model()
    if arguments.budget:
        limit_memory(trained, arguments.budget)  # the one line
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    torch.manual_seed(1)
    for batch in DataLoader(Sentences(), batch_size=8):
        loss = trained(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
    found = planned(trained)
    if found is not None:
        print(found.plan.summary())


if __name__ == "__main__":
    main()
