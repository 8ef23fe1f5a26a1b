"""Data-parallel training inside a memory budget: one script for CPUs and GPUs.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py --budget 60%

Each rank uses one GPU (nccl) if the machine has GPUs, else the CPU (gloo). Rank 0 plans for all ranks.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from remat_facade import Hiremate

LENGTH, WIDTH, VOCABULARY = 64, 128, 256


class Model(nn.Module):
    """A small causal language model that returns its loss, so that the plan covers the whole step."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of predicting each id from those before it."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(x[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def sentences(count: int, device: torch.device) -> Tensor:
    """Sequences of consecutive ids, which the model can learn: int64 [count, LENGTH]."""
    first = torch.randint(VOCABULARY, (count, 1), device=device)
    return (first + torch.arange(LENGTH, device=device)) % VOCABULARY


def main() -> None:
    """Train, and print the plan and the loss on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="60%", help='bytes, "2GiB", or a share such as "60%%"')
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    local, device = int(os.environ["LOCAL_RANK"]), torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, local)
        torch.accelerator.set_device_index(local)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    torch.manual_seed(dist.get_rank())  # own data and dropout per rank; DDP broadcasts rank 0's weights

    model = Model(arguments.layers).to(device)
    sample = sentences(arguments.batch, device)
    planned = Hiremate(model, sample, arguments.budget, ranks="together")
    trained = DistributedDataParallel(planned)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    if dist.get_rank() == 0:
        print(planned.plan.summary())

    for step in range(arguments.steps):
        loss = trained(sentences(arguments.batch, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 5 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
