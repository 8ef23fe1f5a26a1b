"""Fine-tuning models whose state does not fit their budget, on an accelerator, in one command of minutes.

    python benchmarks/gpu_offload.py [--time-limit 540] [--out FOLDER] [--again] [--tiny]

It writes `<out>/<device>-offload.json` after every row. Rows that are there are skipped, none is begun that
may not end in time, and those left are named: run it again for the rest. In their order:

* links: what each direction copies, alone, together and beside an optimizer that steps on the CPU, and what
  that optimizer moves; bytes per second;
* Llamas of 1.3 and 3.4 billion parameters, all of them trained with bf16 compute, fp32 masters and Adam's
  states: eager first, then ours at 40, 20 and 70 % of all bytes that eager takes (parameters, gradients,
  states, activations; of the device where eager does not fit), a plain step of the optimizer on the CPU, and
  `save_on_cpu`;
* the largest Llama whose state fits the host, with 22 GiB of the device, beside what is predicted.

"step" is the median of steps in a row, "pass" of forward and backward alone, "optimizer" of an update with
nothing beside it; "hidden" is the share of the optimizer that adds nothing to a step. The methods of a model
do not fit the device together, so their steps do not alternate; passes and steps of a method do. The device's
peak is the allocator's over all those steps, above what it held before the row; it stands beside the budget.

A row without figures says why. That there is no plan, or that the device is too small, is a result. The exit
status is 1 if a budget is broken, or if a row failed in any other way; a failed row is run again next time.

`--tiny` runs a row of each kind on models of some thousand parameters, on a simulated device where there is
none, to test the script.
"""

import argparse
import functools
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record, report
from benchmarks.device_steps import current_device, device_name, first_line, release, too_small
from benchmarks.offload_ways import Shape, Way, cpu_step, eager, finish, new_machine, offmate, save_on_cpu
from remat_executor import MemoryMeter
from remat_facade.planning.memory_fit import free_on
from remat_graph import Lane, Links, simulate
from remat_offload import HostPool, Machine, measure_links

RESULTS = Path(__file__).resolve().parent / "results"
GIB = 1 << 30
MODELS = {
    "llama-3b": Shape(
        layers=28, width=3072, inner=8192, heads=24, kv_heads=24, vocabulary=32000, batch=4, length=2048
    ),
    "llama-1.3b": Shape(
        layers=24, width=2048, inner=5504, heads=16, kv_heads=16, vocabulary=32000, batch=4, length=2048
    ),
}
LARGEST = Shape(
    layers=1, width=4096, inner=14336, heads=32, kv_heads=8, vocabulary=32000, batch=1, length=4096
)
TINY = Shape(layers=2, width=32, inner=64, heads=2, kv_heads=2, vocabulary=64, batch=2, length=16)
HOST_SHARE = 0.75  # of the host's free memory, that moved values may take
IN_BACKWARD_NBYTES = (
    15  # of a parameter on the host: value, master, two states, and some gradients on the way
)
LARGEST_SHARE = 0.6  # of the time limit, after which the largest is not begun
UPDATE_NBYTES = 28  # of an element that AdamW steps

ORDER = (
    ("llama-1.3b", "eager", None),
    ("llama-1.3b", "offmate", 0.4),
    ("llama-1.3b", "offmate", 0.2),
    ("llama-1.3b", "cpu step", None),
    ("llama-3b", "eager", None),
    ("llama-3b", "offmate", 0.4),
    ("llama-3b", "offmate", 0.2),
    ("llama-3b", "cpu step", None),
    ("llama-1.3b", "offmate", 0.7),
    ("llama-3b", "offmate", 0.7),
    ("llama-1.3b", "save_on_cpu", None),
    ("llama-3b", "save_on_cpu", None),
    ("largest", "offmate", None),
)
TINY_ORDER = (
    ("llama-3b", "eager", None),
    ("llama-3b", "offmate", 0.4),
    ("llama-3b", "cpu step", None),
    ("llama-3b", "save_on_cpu", None),
    ("largest", "offmate", None),
)


@attrs.frozen(kw_only=True)
class Row:
    """One way to train one model; bytes and seconds.

    Attributes:
        model, method, fraction: which; the budget is that fraction of what eager takes.
        parameters: of the model.
        tokens_per_s: trained on.
        step_s, pass_s, optimizer_s: medians; see the module.
        hidden: share of the optimizer that adds nothing to a step.
        budget_nbytes, peak_nbytes: of the device.
        host_budget_nbytes, host_nbytes: of what moves; the latter as the pool or the way counts it.
        resident_nbytes: the most that the process had in the host's memory so far.
        predicted_s, predicted_nbytes: by the plan; the bytes are of a step that finds no `.grad`, as here.
        on_host_nbytes: values placed on the host.
        ready_s: until it could train.
        took_s: of the whole row.
        note: why there are no figures.
        failed: whether that is a failure, and no result.
    """

    model: str
    method: str
    fraction: float | None = None
    parameters: int = 0
    tokens_per_s: float | None = None
    step_s: float | None = None
    pass_s: float | None = None
    optimizer_s: float | None = None
    hidden: float | None = None
    budget_nbytes: int | None = None
    peak_nbytes: int | None = None
    host_budget_nbytes: int | None = None
    host_nbytes: int | None = None
    resident_nbytes: int | None = None
    predicted_s: float | None = None
    predicted_nbytes: int | None = None
    on_host_nbytes: int | None = None
    ready_s: float | None = None
    took_s: float = 0.0
    note: str = ""
    failed: bool = False

    @property
    def key(self) -> tuple[str, str, float | None]:
        """Which row it is."""
        return self.model, self.method, self.fraction

    @property
    def broken(self) -> bool:
        """Whether it took more than a budget."""
        pairs = ((self.budget_nbytes, self.peak_nbytes), (self.host_budget_nbytes, self.host_nbytes))
        return any(budget and taken and taken > budget for budget, taken in pairs)


# -- links


def link_rates(
    machine: Machine, pool: HostPool, links: Links, *, nbytes: int, lasting_s: float
) -> list[dict[str, float]]:
    """Bytes per second of each lane, in every company; medians of three rounds.

    Args:
        machine: copies and steps.
        pool: lends the host's blocks.
        links: the bandwidths, about, to have copies last as long as wanted.
        nbytes: of a block, and of the values that are stepped.
        lasting_s: seconds of one measurement, about.
    """
    host = {lane: pool.allocate(nbytes) for lane in (Lane.TO_HOST, Lane.TO_DEVICE)}
    there = {lane: machine.allocate((nbytes,), (1,), torch.uint8) for lane in host}
    param = torch.nn.Parameter(torch.zeros(nbytes // 4))
    param.grad = torch.ones(nbytes // 4)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()

    def rates(lanes: tuple[Lane, ...]) -> dict[str, float]:
        began_s = time.perf_counter()
        spent_s: dict[Lane, float] = {}
        counts = {lane: 1 + int(lasting_s / links.alone_s(lane, nbytes)) for lane in lanes if lane in host}
        last = {}
        for lane, count in counts.items():
            for _ in range(count):
                to, of = (host, there) if lane is Lane.TO_HOST else (there, host)
                last[lane] = machine.copy(lane, to[lane], of[lane])
        steps = 0
        if Lane.CPU_OPTIMIZER in lanes:
            while time.perf_counter() - began_s < lasting_s:
                machine.work(optimizer.step).synchronize()
                steps += 1
            spent_s[Lane.CPU_OPTIMIZER] = time.perf_counter() - began_s
        while pending := counts.keys() - spent_s.keys():
            spent_s |= {lane: time.perf_counter() - began_s for lane in pending if last[lane].query()}
        moved = {lane: count * nbytes for lane, count in counts.items()}
        moved[Lane.CPU_OPTIMIZER] = steps * UPDATE_NBYTES * (nbytes // 4)
        return {str(lane): moved[lane] / spent_s[lane] for lane in lanes}

    companies = [(Lane.TO_HOST,), (Lane.TO_DEVICE,), (Lane.TO_HOST, Lane.TO_DEVICE), (Lane.CPU_OPTIMIZER,)]
    companies.append((Lane.TO_HOST, Lane.TO_DEVICE, Lane.CPU_OPTIMIZER))
    rounds = [[rates(lanes) for lanes in companies] for _ in range(3)]
    for block in host.values():
        pool.release(block)
    return [
        {lane: statistics.median(one[place][lane] for one in rounds) for lane in rounds[0][place]}
        for place in range(len(companies))
    ]


# -- training


def measure(row: Row, shape: Shape, make: Callable[[], Way], device: torch.device, steps: int) -> Row:
    """Train for some steps; the row with what was measured, or with what went wrong."""
    began_s = time.perf_counter()
    base_nbytes = _allocated_nbytes(device)
    row = attrs.evolve(row, parameters=shape.parameters)
    way = None
    try:
        way = make()
        ready_s = time.perf_counter() - began_s
        row = attrs.evolve(row, ready_s=ready_s, **_trained(way, shape, device, base_nbytes, steps))
    except Exception as error:  # noqa: BLE001 - whatever it is, the other rows are run
        row = attrs.evolve(row, note=first_line(error), failed=not too_small(error))
    finally:
        del way
        gc.collect()
        release(device)
    return attrs.evolve(row, took_s=time.perf_counter() - began_s)


def _trained(
    way: Way, shape: Shape, device: torch.device, base_nbytes: int, steps: int
) -> dict[str, float | int | None]:
    def forward_and_backward() -> None:
        way.loss().backward()

    def step() -> None:
        forward_and_backward()
        way.update()
        way.forget()

    def seconds(*functions: Callable[[], object]) -> float:
        start_s = time.perf_counter()
        for function in functions:
            function()
        finish(device)
        return time.perf_counter() - start_s

    plan = None if way.module is None else way.module.plan
    in_backward = way.module is not None and way.module.optimizer_in_backward
    step()  # what is set up once
    way.wait()
    peak_nbytes = _peak_nbytes(step, way, device, base_nbytes)
    way.wait()  # else the first pass would wait for the updates of that step
    step_s, pass_s, optimizer_s = [], [], []
    for _ in range(steps):
        if not in_backward:
            pass_s.append(seconds(forward_and_backward))
            optimizer_s.append(seconds(way.update, way.wait))
            way.forget()
        step()  # from here on updates run beside the next forward, as in a loop
        step_s += [seconds(step) for _ in range(2)]
        way.wait()
    if device.type != "cpu":
        peak_nbytes = max(peak_nbytes, torch.accelerator.max_memory_allocated(device) - base_nbytes)
    found: dict[str, float | int | None] = {
        "step_s": statistics.median(step_s),
        "tokens_per_s": shape.tokens / statistics.median(step_s),
        "peak_nbytes": peak_nbytes,
        "host_nbytes": way.host(),
        "resident_nbytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    if not in_backward:
        exposed_s = statistics.median(step_s) - statistics.median(pass_s)
        found |= {"pass_s": statistics.median(pass_s), "optimizer_s": statistics.median(optimizer_s)}
        found["hidden"] = min(1.0, max(0.0, 1.0 - exposed_s / statistics.median(optimizer_s)))
    if plan is not None and way.module is not None:
        values = way.module.graph.values
        names = {values[v].name for v in plan.on_host}
        found |= {
            "predicted_s": plan.time_s,
            # The plan's own peak is of a step that finds a `.grad`, if that needs more.
            "predicted_nbytes": simulate(way.module.graph, plan.schedule, grads=plan.grads).peak_nbytes,
            "on_host_nbytes": sum(value.nbytes for value in values if value.name in names),
        }
    return found


def _memory_nbytes(device: torch.device) -> int:
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def _allocated_nbytes(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def _peak_nbytes(step: Callable[[], None], way: Way, device: torch.device, base_nbytes: int) -> int:
    """All that training holds on the device at the peak of a step."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        torch.accelerator.synchronize(device)
        return int(torch.accelerator.max_memory_allocated(device)) - base_nbytes
    with MemoryMeter(list(way.there()), device=device) as meter:
        step()
        way.wait()
    return meter.baseline_nbytes + meter.peak_nbytes


def _warm_up(device: torch.device) -> None:
    """Let libraries take their workspaces, in autograd's thread too, before anything is counted."""
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
        (a @ a).sum().backward()


# -- all of it


def main() -> int:
    """Measure what is not there yet, write after each row; 1 if a budget is broken or a row failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds (default: 540)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to test the script")
    options = parser.parse_args()
    began_s = time.perf_counter()
    device = current_device()
    if device.type == "cpu" and not options.tiny:
        parser.error("there is no accelerator; --tiny tests the script without one")
    tiny: bool = options.tiny
    path = options.out / f"{device_name(device)}-offload{'-tiny' if tiny else ''}.json"
    shapes = dict.fromkeys(MODELS, TINY) if tiny else MODELS
    host_nbytes = 64 << 20 if tiny else int(HOST_SHARE * (free_on(torch.device("cpu")) or 0))
    _warm_up(device)
    with new_machine(device) as machine:
        with HostPool(host_nbytes, device=device) as pool:
            links = measure_links(machine, pool)
            # Larger than any cache.
            measured = link_rates(
                machine, pool, links, nbytes=1 << (16 if tiny else 28), lasting_s=0.001 if tiny else 0.5
            )
        for rates in measured:
            print(
                "links  " + ", ".join(f"{lane} {rate / 1e9:.2f} GB/s" for lane, rate in rates.items()),
                flush=True,
            )
        rows = []
        if path.exists() and not options.again:
            rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
            rows = [row for row in rows if not row.failed]
        write = functools.partial(_write, path, device, attrs.asdict(links), measured)
        write(rows)
        left = [key for key in (TINY_ORDER if tiny else ORDER) if key not in {row.key for row in rows}]
        while left and _in_time(left[0], rows, time.perf_counter() - began_s, options.time_limit):
            key = left.pop(0)
            rows.append(_run(key, rows, shapes, machine, links, host_nbytes, device, tiny=tiny))
            write(rows)
            print(line(rows[-1]), flush=True)
    for model, method, fraction in left:
        share = "" if fraction is None else f" {fraction:.0%}"
        print(f"out of time: {model} {method}{share} was skipped; run again for it")
    if options.out == RESULTS:
        report.main()
    return conclude(rows)


def conclude(rows: list[Row]) -> int:
    """Print how many rows there are, and what is wrong; the exit status."""
    print(f"{len(rows)} rows, {sum(bool(row.note) for row in rows)} without figures")
    for row in rows:
        if row.broken or row.failed:
            print(f"{'FAILED' if row.failed else 'BROKEN'}: {line(row)}")
    return 1 if any(row.broken or row.failed for row in rows) else 0


def _in_time(key: tuple[str, str, float | None], rows: list[Row], spent_s: float, limit_s: float) -> bool:
    """Whether a row that takes as long as the longest so far ends before the limit."""
    if key[0] == "largest":
        return spent_s < LARGEST_SHARE * limit_s
    return spent_s + max((row.took_s for row in rows if row.method == key[1]), default=0.0) < limit_s


def _run(
    key: tuple[str, str, float | None],
    rows: list[Row],
    shapes: Mapping[str, Shape],
    machine: Machine,
    links: Links,
    host_nbytes: int,
    device: torch.device,
    *,
    tiny: bool,
) -> Row:
    model, method, fraction = key
    row, steps = Row(model=model, method=method, fraction=fraction), 2 if tiny else 4
    plan_s = 0.2 if tiny else 20.0
    if model == "largest":
        base, budget_nbytes, moved_nbytes = (
            (TINY, 300_000, 400_000) if tiny else (LARGEST, 22 * GIB, host_nbytes)
        )
        # Tiny values take a page each where the host's memory is pinned.
        host_nbytes = 10 * moved_nbytes if tiny else moved_nbytes
        shape, in_backward = base.widened(moved_nbytes, IN_BACKWARD_NBYTES), True
    else:
        shape, in_backward = shapes[model], False
        totals = [r.peak_nbytes for r in rows if r.key == (model, "eager", None)]
        total_nbytes = totals[0] if totals else None
        if method == "save_on_cpu":
            free_nbytes = free_on(torch.device("cpu")) or 0
            # What it moves at most, each block rounded up to a power of two by the pinning allocator.
            if total_nbytes is not None and 2 * total_nbytes > free_nbytes:
                return attrs.evolve(row, note=f"skipped: it may pin {2 * total_nbytes / GIB:.0f} GiB")
        if fraction is not None:
            # Where eager does not fit, the fraction is of the device.
            budget_nbytes = int(fraction * (total_nbytes or _memory_nbytes(device)))
    if method != "offmate":
        ways = {"eager": eager, "cpu step": cpu_step, "save_on_cpu": save_on_cpu}
        return measure(row, shape, lambda: ways[method](shape, device), device, steps)
    row = attrs.evolve(row, budget_nbytes=budget_nbytes, host_budget_nbytes=host_nbytes)
    budgets = {"budget_nbytes": budget_nbytes, "host_nbytes": host_nbytes}
    make = functools.partial(
        offmate, shape, device, machine, links, **budgets, in_backward=in_backward, plan_s=plan_s
    )
    return measure(row, shape, make, device, steps)


def _write(
    path: Path, device: torch.device, links: dict[str, float], rates: list[dict[str, float]], rows: list[Row]
) -> None:
    record.write(
        path,
        list(map(attrs.asdict, rows)),
        packages=["torch", "transformers"],
        device=device_name(device),
        threads=torch.get_num_threads(),
        links=links,
        rates=rates,
    )


def line(row: Row) -> str:
    """One row for people."""
    share = "" if row.fraction is None else f"{row.fraction:.0%}"
    name = f"{row.model:10} {row.method:11} {share:>4}"
    if row.note or row.step_s is None or row.tokens_per_s is None or row.peak_nbytes is None:
        return f"{name} {row.note}"
    budget = "" if row.budget_nbytes is None else f" of {row.budget_nbytes / GIB:.2f}"
    parts = [
        f"{row.parameters / 1e9:.2f}e9 parameters",
        f"{row.tokens_per_s:8.0f} tokens/s",
        f"step {row.step_s:.3f} s",
        f"device {row.peak_nbytes / GIB:.2f}{budget} GiB",
    ]
    if row.host_nbytes is not None:
        parts.append(f"host {row.host_nbytes / GIB:.2f} GiB")
    if row.predicted_s is not None:
        parts.append(f"predicted {row.predicted_s:.3f} s")
    if row.hidden is not None:
        parts.append(f"optimizer {row.optimizer_s:.3f} s, {row.hidden:.0%} hidden")
    return f"{name} {'; '.join(parts)}; ready in {row.ready_s:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
