"""FSDP2 inside a memory budget: the blocks of a model are planned, then sharded.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --budget 60%

Each rank uses one GPU (nccl) if the machine has GPUs, else the CPU (gloo). What FSDP gathers and reduces is
outside of the budget of a block.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from remat_facade import Hiremate

WIDTH = 64


class Net(nn.Module):
    """Blocks that are planned and sharded one by one, and a head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(self._layer() for _ in range(3))) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def _layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] to the same shape."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    """Train, and print the plan of a block and the loss on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--budget", default="60%", help='of a block: bytes, "2GiB", or a share such as "60%%"'
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    local, device = int(os.environ["LOCAL_RANK"]), torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, local)
        torch.accelerator.set_device_index(local)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    torch.manual_seed(0)  # the same weights on every rank

    model = Net(arguments.blocks).to(device)
    hidden = torch.randn(arguments.batch, WIDTH, device=device, requires_grad=True)
    for i, block in enumerate(model.blocks):
        sample = hidden if i else hidden.detach()  # what comes in requires no gradient
        planned = Hiremate(block, sample, arguments.budget, ranks="together")
        if dist.get_rank() == 0 and i == 1:
            print(planned.plan.summary())
        model.blocks[i] = fully_shard(planned)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + dist.get_rank())  # own data on every rank
    for step in range(arguments.steps):
        x = torch.randn(arguments.batch, WIDTH, device=device)
        loss = nn.functional.mse_loss(model(x), x.tanh())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 5 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
