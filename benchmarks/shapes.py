"""Inputs whose length changes at every step: what planning costs, and whether plans keep numbers and budget.

    python benchmarks/shapes.py [MODEL ...] [--draws 40] [--budgets bytes,45%] [--dropout 0,0.1] [--seed 0]
        [--samples 4 | --whole] [--modelled] [--json FILE]

A decoder and an encoder of transformers, of four layers, with their losses, train beside a copy that is not
planned. Each step draws a length from 64 to 1,024. Its loss and gradients are compared with the copy's bit by
bit, and the metered peak with the budget: a share of each graph, or that share of the longest length in
bytes, for all. `--dropout` gives the models' probabilities of dropout.

Per length: processor seconds, so that other load does not count, of capture with translation, measuring,
planning, lowering and the remainder of the call, and whether a search ran. A search ends at once where the
budget holds everything; such a one counts like any other.

"Today" is what a plan for each distinct length costs by itself, within the same bytes: a module is built for
`--samples` of the lengths (the shortest, the longest and others between), with empty folders for costs and
plans that these share, and the seconds of the lengths between are interpolated. With `--whole` each length is
built.

With `--modelled` the times of operators are those of a roofline, so plans and searches do not depend on other
load; measuring then shares nothing between lengths.

The exit status is not zero if numbers differ, if a peak is above its budget, if more than three searches
run for one model, budget and dropout, or if planning takes more than 5 % of today's seconds of planning.
"""

import argparse
import copy
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.planning_models import CPU
from remat_executor import MemoryMeter, estimated_graph
from remat_executor.module.pipeline import PipelineStages
from remat_facade import Hiremate
from remat_facade.planning.known_plans import carried
from remat_facade.planning.planner import StepPlanner
from remat_graph import Platform, Roofline, format_nbytes, resolve_budget
from remat_graph.contexts import context
from tests.helpers.acceptance import same_bits
from tests.helpers.models import import_transformers

SHORTEST, LONGEST = 64, 1024
MOST_SEARCHES = 3
MOST_SHARE = 0.05
VOCABULARY = 8_192
STAGES: dict[str, tuple[type, str]] = {
    "capture": (PipelineStages, "capture"),
    "translate": (PipelineStages, "translate"),
    "measure": (PipelineStages, "annotate"),
    "plan": (StepPlanner, "__call__"),
    "lower": (PipelineStages, "lower"),
}


def decoder(dropout: float) -> nn.Module:
    """GPT-2 of four layers with its loss."""
    transformers = import_transformers()
    sizes = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": LONGEST, "vocab_size": VOCABULARY}
    rates = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes, **rates, **ends))
    model.loss_type = "ForCausalLM"
    return model


def encoder(dropout: float) -> nn.Module:
    """BERT of four layers with its loss of masked words."""
    transformers = import_transformers()
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    settings = transformers.BertConfig(
        vocab_size=VOCABULARY, max_position_embeddings=LONGEST, **sizes, **rates
    )
    return transformers.BertForMaskedLM(settings)


MODELS: dict[str, Callable[[float], nn.Module]] = {"decoder": decoder, "encoder": encoder}


def batch(length: int, step: int) -> dict[str, Tensor]:
    """Two sequences of one length; the loss ignores the last position of one."""
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (2, length), generator=drawn)
    labels = ids.clone()
    labels[1, -1] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@attrs.frozen(kw_only=True)
class Seconds:
    """What one length cost; `rest_s` is what the call takes in addition to the stages, without its step."""

    capture_s: float
    measure_s: float
    planning_s: float
    lower_s: float
    rest_s: float

    @property
    def all_s(self) -> float:
        """The whole."""
        return self.capture_s + self.measure_s + self.planning_s + self.lower_s + self.rest_s


@attrs.frozen(kw_only=True)
class Step:
    """One step of training.

    Attributes:
        length: of its sequences.
        ops: of its graph.
        searched: whether a full search ran.
        seconds: of planning a length; None for one that was planned before.
        overhead, bound: of its plan.
        budget_nbytes, peak_nbytes: the plan's, and the metered one.
        differences: what differs from the original.
    """

    length: int
    ops: int
    searched: bool
    seconds: Seconds | None
    overhead: float
    bound: float
    budget_nbytes: int
    peak_nbytes: int
    differences: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Run:
    """All steps of one model, and what planning each length by itself costs.

    Attributes:
        model, dropout, budget: what ran.
        steps: in their order.
        alone: lengths that were planned by themselves, with what each took.
    """

    model: str
    dropout: float
    budget: str
    steps: tuple[Step, ...]
    alone: dict[int, Seconds]

    @property
    def searches(self) -> int:
        """How many full searches ran."""
        return sum(step.searched for step in self.steps)

    def spent_s(self, part: str) -> float:
        """The seconds of a part (a field of `Seconds`, or `all_s`) in this run."""
        return float(sum(getattr(step.seconds, part) for step in self.steps if step.seconds is not None))

    def today_s(self, part: str) -> float:
        """The seconds of a part if each distinct length is planned by itself."""
        lengths = sorted({step.length for step in self.steps})
        return sum(_between(self.alone, length, part) for length in lengths)

    def wrong(self) -> Iterator[str]:
        """What breaks a rule."""
        here = f"{self.model} at {self.budget}, dropout {self.dropout:g}"
        for number, step in enumerate(self.steps):
            if step.differences:
                yield f"{here}, step {number}: {', '.join(step.differences[:3])} differ"
            if step.peak_nbytes > step.budget_nbytes:
                peak, budget = map(format_nbytes, (step.peak_nbytes, step.budget_nbytes))
                yield f"{here}, step {number}: the peak {peak} is above {budget}"
        if self.searches > MOST_SEARCHES:
            yield f"{here}: {self.searches} searches"
        share = self.spent_s("planning_s") / self.today_s("planning_s")
        if share > MOST_SHARE:
            yield f"{here}: planning takes {share:.1%} of planning each length"


def _between(alone: dict[int, Seconds], length: int, part: str) -> float:
    """The seconds of a length, from those of the two measured ones around it."""
    if length in alone:
        return float(getattr(alone[length], part))
    below, above = max(n for n in alone if n < length), min(n for n in alone if n > length)
    low_s, high_s = getattr(alone[below], part), getattr(alone[above], part)
    return float(low_s + (high_s - low_s) * (length - below) / (above - below))


@context
def clocked() -> Generator[dict[str, float], None, None]:
    """Add up the seconds of the pipeline's stages, by name."""
    spent = dict.fromkeys(STAGES, 0.0)
    before = {name: getattr(owner, method) for name, (owner, method) in STAGES.items()}

    def timed(name: str) -> Callable[..., Any]:
        def stage(*args: Any, **kwargs: Any) -> Any:
            began_s = time.process_time()
            try:
                return before[name](*args, **kwargs)
            finally:
                spent[name] += time.process_time() - began_s

        return stage

    for name, (owner, method) in STAGES.items():
        setattr(owner, method, timed(name))
    try:
        yield spent
    finally:
        for name, (owner, method) in STAGES.items():
            setattr(owner, method, before[name])


def seconds_of(spent: dict[str, float], all_s: float) -> Seconds:
    """The stages of a call or a build that took `all_s`."""
    return Seconds(
        capture_s=spent["capture"] + spent["translate"],
        measure_s=spent["measure"],
        planning_s=spent["plan"],
        lower_s=spent["lower"],
        rest_s=max(0.0, all_s - sum(spent.values())),
    )


def trained(module: nn.Module, given: dict[str, Tensor], step: int) -> tuple[list[Tensor], int]:
    """Loss and gradients of a step, and its metered peak."""
    torch.manual_seed(1_000 + step)
    module.zero_grad()
    with MemoryMeter(module, given) as meter:
        loss = module(**given).loss
        loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)], meter.peak_nbytes


def stepped(module: nn.Module) -> None:
    """Update the parameters by their gradients."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-3)


def run(
    model: str,
    dropout: float,
    budget: str,
    lengths: list[int],
    samples: int | None,
    platform: Platform | None,
) -> Run:
    """Train one model at all lengths, then plan some of the lengths by themselves."""
    torch.manual_seed(0)
    original = MODELS[model](dropout).train()
    share = "45%" if budget == "bytes" else budget
    longest = estimated_graph(original, (), batch(LONGEST, 0), Roofline())
    limit: int | str = resolve_budget(share, longest) if budget == "bytes" else share
    steps: list[Step] = []
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.process_time()
        with clocked() as spent:
            planned = Hiremate(
                copy.deepcopy(original),
                (),
                limit,
                sample_kwargs=batch(lengths[0], 0),
                cache_dir=folder,
                max_plans=len(lengths),
                platform=platform,
                outputs="dropped",
            )
        first = seconds_of(spent, time.process_time() - began_s)
        for number, length in enumerate(lengths):
            step = compared(planned, original, batch(length, number), number, None if number else first)
            steps.append(step)
            print(line(step), flush=True)
    names = sorted(set(lengths))
    if samples is not None and samples < len(names):
        places = {round(i * (len(names) - 1) / (samples - 1)) for i in range(samples)}
        names = [names[place] for place in sorted(places)]
    return Run(
        model=model,
        dropout=dropout,
        budget=budget,
        steps=tuple(steps),
        alone=planned_alone(original, {step.length: step.budget_nbytes for step in steps}, names, platform),
    )


def compared(
    planned: Hiremate, original: nn.Module, given: dict[str, Tensor], number: int, first: Seconds | None
) -> Step:
    """One step of both modules; `first` is what building took, for the step whose length was the sample's."""
    replanned = planned.runs["replanned"]
    with clocked() as spent:
        began_s = time.process_time()
        planned_s = 0.0
        if first is None:
            # The call alone, so that what it takes in addition to its step shows; the backward is not needed.
            torch.manual_seed(0)
            planned(**given)
            planned_s = time.process_time() - began_s
    new = first is not None or planned.runs["replanned"] > replanned
    if first is None and new:
        began_s = time.process_time()
        torch.manual_seed(0)
        planned(**given)
        first = seconds_of(spent, planned_s - (time.process_time() - began_s))
    mine, peak_nbytes = trained(planned, given, number)
    others, _ = trained(original, given, number)
    names = ["loss", *(name for name, p in original.named_parameters() if p.grad is not None)]
    pairs = zip(names, mine, others, strict=True)
    differences = tuple(name for name, one, other in pairs if not same_bits(one, other))
    stepped(planned)
    stepped(original)
    plan = planned.plan
    return Step(
        length=given["input_ids"].shape[1],
        ops=len(planned.graph.ops),
        searched=new and not carried(plan),
        seconds=first,
        overhead=plan.overhead,
        bound=plan.lower_bound_overhead,
        budget_nbytes=plan.budget_nbytes,
        peak_nbytes=peak_nbytes,
        differences=differences,
    )


def planned_alone(
    original: nn.Module, budgets: dict[int, int], lengths: list[int], platform: Platform | None
) -> dict[int, Seconds]:
    """Seconds of planning lengths as modules of their own, each with the budget that the run gave it."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for length in lengths:
            model = copy.deepcopy(original)
            began_s = time.process_time()
            with clocked() as spent:
                Hiremate(
                    model,
                    (),
                    budgets[length],
                    sample_kwargs=batch(length, 0),
                    cache_dir=folder,
                    outputs="dropped",
                    platform=platform,
                )
            found[length] = seconds_of(spent, time.process_time() - began_s)
    return found


HEADER = (
    f"{'length':>6} {'ops':>5} {'capture':>8} {'measure':>8} {'plan':>6} {'lower':>6} {'rest':>6} "
    f"{'how':>9} {'overhead':>8} {'bound':>7} {'budget':>10} {'peak':>10} {'bits':>5}"
)


def line(step: Step) -> str:
    """A step as text."""
    parts = ("capture_s", "measure_s", "planning_s", "lower_s", "rest_s")
    widths = (8, 8, 6, 6, 6)
    seconds = step.seconds
    spent = " ".join(
        f"{'-' if seconds is None else format(getattr(seconds, part), '.2f'):>{width}}"
        for part, width in zip(parts, widths, strict=True)
    )
    how = "searched" if step.searched else "known" if seconds is None else "carried"
    return (
        f"{step.length:6} {step.ops:5} {spent} {how:>9} {step.overhead:8.2%} {step.bound:7.2%} "
        f"{format_nbytes(step.budget_nbytes):>10} {format_nbytes(step.peak_nbytes):>10} "
        f"{'DIFFER' if step.differences else 'equal':>5}"
    )


def summary(row: Run) -> str:
    """The totals of a run as text."""
    parts = {
        "capture": "capture_s",
        "measuring": "measure_s",
        "planning": "planning_s",
        "lowering": "lower_s",
        "all": "all_s",
    }
    sums = ", ".join(f"{name} {_share(row.spent_s(part), row.today_s(part))}" for name, part in parts.items())
    return f"{row.searches} searches; {sums}; {len(row.alone)} lengths planned by themselves"


def _share(spent_s: float, today_s: float) -> str:
    return f"{spent_s:.1f} s of {today_s:.1f} ({spent_s / today_s:.1%})"


def as_json(row: Run) -> dict[str, Any]:
    """A row for the file."""
    parts = [field.name for field in attrs.fields(Seconds)]
    return {
        **attrs.asdict(row),
        "searches": row.searches,
        "spent": {part: row.spent_s(part) for part in parts},
        "today": {part: row.today_s(part) for part in parts},
    }


def main() -> int:
    """Print the tables; 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--draws", type=int, default=40, help="steps of training")
    parser.add_argument("--budgets", default="bytes,45%", help="shares, or bytes, separated by commas")
    parser.add_argument("--dropout", default="0,0.1", help="probabilities, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--samples", type=int, default=4, help="lengths that are planned by themselves")
    parser.add_argument("--whole", action="store_true", help="plan every length by itself")
    parser.add_argument("--modelled", action="store_true", help="take the times of a roofline")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    if not set(MODELS).issuperset(options.models):
        parser.error(f"the models are {', '.join(MODELS)}; got {', '.join(options.models)}")
    if options.samples < 2 or options.draws < 2:
        parser.error("--samples and --draws are 2 or more")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    drawn = random.Random(options.seed)
    lengths = [drawn.randint(SHORTEST, LONGEST) for _ in range(options.draws)]
    samples = None if options.whole else options.samples
    rows: list[Run] = []
    wrong: list[str] = []
    for model in options.models or MODELS:
        for dropout in map(float, options.dropout.split(",")):
            for budget in options.budgets.split(","):
                print(f"{model}, dropout {dropout:g}, budget {budget}\n{HEADER}", flush=True)
                row = run(model, dropout, budget, lengths, samples, CPU if options.modelled else None)
                print(summary(row), flush=True)
                rows.append(row)
                wrong += row.wrong()
    if options.json:
        facts = {"threads": 1, "lengths": lengths, "modelled": options.modelled}
        packages = ("torch", "transformers")
        record.write(options.json, [as_json(row) for row in rows], packages=packages, **facts)
    print("\n".join(wrong) or "nothing wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
