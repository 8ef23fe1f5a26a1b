"""When gradients reach DDP: bucket-ready times of the original and of planned modules, side by side.

    python benchmarks/distributed.py [--budgets 100% 50%] [--steps 15] [--json FILE]

Two gloo processes on CPU train one transformer under `DistributedDataParallel`, in turns as it is and planned
(rank 0 plans, the other receives the plan). A DDP communication hook notes when each bucket is ready to be
reduced, as a fraction of `loss.backward()`; printed are medians over steps and ranks. What is ready early is
reduced while the rest of the backward runs; a backward that hands over all gradients at its end leaves
nothing to overlap. Parameters and gradients after the last step are compared with the original's to the bit.

The row "all at once" is a control: the original inside one autograd function, which must be found wanting.

The exit status is not zero if a planned module's gradients differ, a step ran without its plan, or its
buckets are one late burst, by eager's in the same run:

* spread, from the first bucket to the last, below 0.75 of eager's;
* mean ready fraction more than 0.15 above eager's;
* first bucket more than 0.15 later than eager's.

Nor is it zero if the control is none.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from remat_facade import Hiremate
from tests.helpers.models import Block
from tests.helpers.ranks import Ranks, gathered

EAGER, CONTROL = "eager", "all at once"
LEAST_SPREAD, MOST_LATER = 0.75, 0.15
WIDTH, HEADS, LAYERS, TOKENS, BATCH, VOCABULARY = 192, 6, 6, 64, 4, 1024
WARM_UP = 3  # DDP puts its buckets in the order of readiness after the first step


class Transformer(nn.Module):
    """A small causal language model with dropout, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, dropout=0.1) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class AtOnce(nn.Module):
    """A model whose backward is one autograd function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        return _AtOnce.apply(self.model, args, *self.model.parameters())


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, model: nn.Module, args: tuple[Tensor, ...], *parameters: Tensor) -> Tensor:
        names = [name for name, _ in model.named_parameters()]
        ctx.inner = [parameter.detach().requires_grad_() for parameter in parameters]
        with torch.enable_grad():
            ctx.loss = torch.func.functional_call(model, dict(zip(names, ctx.inner, strict=True)), args)
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Any:
        return (None, None, *torch.autograd.grad(ctx.loss, ctx.inner, tangent))


@attrs.frozen(kw_only=True)
class Row:
    """One way to train.

    Attributes:
        fractions: per bucket when it was ready, of the backward.
        nbytes: per bucket.
        step_s: median seconds of forward and backward.
        same: whether the numbers are eager's to the bit.
        planned: whether each step ran by the plan.
    """

    fractions: list[float]
    nbytes: list[int]
    step_s: float
    same: bool = True
    planned: bool = True

    @property
    def spread(self) -> float:
        """From the first bucket to the last."""
        return self.fractions[-1] - self.fractions[0]

    @property
    def mean(self) -> float:
        """Of the buckets' fractions."""
        return statistics.mean(self.fractions)


def late_burst(row: Row, eager: Row) -> list[str]:
    """What speaks for a late burst, by the criteria above; nothing if it is none."""
    found = []
    if row.spread < LEAST_SPREAD * eager.spread:
        found.append(
            f"its buckets spread over {row.spread:.2f} of the backward, eager's over {eager.spread:.2f}"
        )
    if row.mean > eager.mean + MOST_LATER:
        found.append(f"they are ready at {row.mean:.2f} on average, eager's at {eager.mean:.2f}")
    if row.fractions[0] > eager.fractions[0] + MOST_LATER:
        found.append(f"the first is ready at {row.fractions[0]:.2f}, eager's at {eager.fractions[0]:.2f}")
    return found


class Trained:
    """A model under DDP with a clock in its communication hook."""

    def __init__(self, model: nn.Module, bucket_mb: float) -> None:
        self.model = model
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        self.ddp.register_comm_hook(None, self._reduce)
        self.ready_s: list[float] = []
        self.nbytes: list[int] = []
        self.fractions: list[list[float]] = []
        self.steps_s: list[float] = []

    def _reduce(
        self,
        _: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # checked by DDP; torch's stubs lack it
    ) -> torch.futures.Future[Tensor]:
        self.ready_s.append(time.perf_counter())
        self.nbytes.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)

    def step(self, seed: int) -> None:
        """One forward and backward on this rank's batch."""
        torch.manual_seed(seed)
        ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
        self.ddp.zero_grad()
        self.ready_s, self.nbytes = [], []
        dist.barrier()
        began_s = time.perf_counter()
        loss = self.ddp(ids)
        backward_s = time.perf_counter()
        loss.backward()
        end_s = time.perf_counter()
        self.steps_s.append(end_s - began_s)
        self.fractions.append([(s - backward_s) / (end_s - backward_s) for s in self.ready_s])
        with torch.no_grad():
            for parameter in self.ddp.parameters():
                parameter -= 0.01 * parameter.grad

    def row(self, eager: "Trained | None") -> Row:
        """The medians over the steps and ranks, once warm."""
        mine = [list(column) for column in zip(*self.fractions[WARM_UP:], strict=True)]
        of_ranks = zip(*gathered(mine), strict=True)
        fractions = [statistics.median([*first, *second]) for first, second in of_ranks]
        runs = getattr(self.model, "runs", None)
        steps = {"planned": len(self.steps_s)}
        return Row(
            fractions=fractions,
            nbytes=self.nbytes,
            step_s=statistics.median(self.steps_s[WARM_UP:]),
            same=all(gathered(eager is None or _same(self.model, eager.model))),
            planned=all(gathered(runs is None or runs == steps)),
        )


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) and torch.equal(a.grad, b.grad) for a, b in pairs)


def build() -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    return Transformer().train()


def measure(rank: int, budgets: list[str], steps: int, bucket_mb: float, path: Path) -> None:
    """What each rank does; rank 0 writes the rows."""
    sample = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    trained = {EAGER: Trained(build(), bucket_mb), CONTROL: Trained(AtOnce(build()), bucket_mb)}
    for budget in budgets:
        planned = Hiremate(build(), sample, budget, ranks="together", time_limit_s=10)
        trained[f"planned {budget}"] = Trained(planned, bucket_mb)
    for step in range(WARM_UP + steps):
        for one in trained.values():  # in turns, so that other load on the machine meets all
            one.step(1000 * step + rank)
    rows = {
        name: attrs.asdict(t.row(None if name == EAGER else trained[EAGER])) for name, t in trained.items()
    }
    if rank == 0:
        path.write_text(json.dumps(rows), encoding="utf-8")


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", nargs="+", default=["100%", "50%"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--bucket-mb", type=float, default=0.8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        with Ranks(2) as ranks:
            ranks.run(measure, arguments.budgets, arguments.steps, arguments.bucket_mb, path, limit_s=900.0)
        rows = {name: Row(**row) for name, row in json.loads(path.read_text(encoding="utf-8")).items()}
    eager = rows[EAGER]
    print(f"bucket ready at, of the backward (2 gloo processes, {arguments.steps} steps)\n")
    print(f"{'':16}" + "".join(f"{i:6}" for i in range(len(eager.fractions))) + "   mean  spread  step ms")
    problems = []
    for name, row in rows.items():
        cells = "".join(f"{fraction:6.2f}" for fraction in row.fractions)
        print(f"{name:16}{cells} {row.mean:6.2f} {row.spread:7.2f} {1000 * row.step_s:8.1f}")
        burst = late_burst(row, eager)
        if name == CONTROL:
            burst = [] if burst else ["is no late burst: the criteria say nothing"]
        problems += [f"{name}: {problem}" for problem in burst]
        if not row.same:
            problems.append(f"{name}: parameters or gradients differ from eager's")
        if not row.planned:
            problems.append(f"{name}: a step ran without its plan")
    print("\n" + ("\n".join(problems) or "gradients come as eager's do, and are the same to the bit"))
    if arguments.json is not None:
        content = {name: attrs.asdict(row) for name, row in rows.items()}
        record.write(arguments.json, content, packages=["torch"])
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
