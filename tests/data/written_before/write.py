"""Write one small file of every kind, with the code of commit 1d9c8da; see README.md.

    REMAT_CACHE_DIR=/nowhere OMP_NUM_THREADS=1 python write.py FOLDER

The names of modules are those of that commit: this does not run with today's code, and no test runs it.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import attrs
import models
import torch
from remat_facade import Hiremate, Offmate, generate_config, save_config
from remat_facade.cli import main
from remat_facade.config import config_types
from remat_graph import (
    Compute, Deliver, Free, FreeHost, Graph, Home, Implementation, Lane, Links, Measured, Measurement, Op, OpCost,
    OptimizerStep, Roofline, Schedule, Start, Transfer, Update, Value, Wait, fingerprint, load_graph, load_plan,
    noremat_peak_nbytes, save_graph, save_plan, save_platform,
)
from remat_graph.ir import Role
from remat_graph.jsonfile import write_json
from remat_graph.serialize import schedule_to_data
from remat_executor import plan_graph

OUT = Path(sys.argv[1])
EXPECTED = {}
LINKS = Links(**models.LINKS)
ALL_LINKS = Links(
    to_host_nbytes_per_s=2e9, to_device_nbytes_per_s=3e9, to_host_duplex_nbytes_per_s=1e9,
    to_device_duplex_nbytes_per_s=1.5e9, host_nbytes_per_s=2e10,
)
CHANGED = {
    "auto": {"gap": 0.25},
    "noremat": {},
    "rotor": {"stages": 7, "slots": 77},
    "rockmate": {"stages": 7, "slots": 77, "levels": 3, "exact": 9, "block_seconds": None, "backend": "SCIPY"},
    "checkmate": {"backend": "SCIPY", "accounting": "paper"},
    "hilp": {"segments": 3, "leaf": 9, "levels": 2, "options": 3, "leaf_seconds": 0.5, "top_seconds": None,
             "backend": "SCIPY"},
    "hiremate": {"segments": 3, "leaf": 9, "exact": 5, "slots": 77, "levels": 2, "leaf_seconds": None, "moves": 11,
                 "backend": "SCIPY"},
    "offmate": {"host_budget": "3GiB", "optimizer": "AdamW", "optimizer_options": {"lr": 0.01, "betas": (0.8, 0.9)},
                "optimizer_in_backward": True, "master_weights": True, "weights": "model.safetensors",
                "accumulation": 3, "links": {"to_host_nbytes_per_s": "55GB", "host_nbytes_per_s": 1e10}},
}


def figures_of_graph(graph):
    return {
        "fingerprint": fingerprint(graph), "name": graph.name, "values": len(graph.values), "ops": len(graph.ops),
        "updates": len(graph.updates), "nbytes": sum(v.nbytes for v in graph.values), "time_s": graph.time_s,
        "conditions": [list(pair) for pair in graph.conditions], "rounding_nbytes": graph.rounding_nbytes,
    }


def figures_of_plan(plan):
    return {
        "fingerprint": plan.fingerprint, "graph_name": plan.graph_name, "budget_nbytes": plan.budget_nbytes,
        "peak_nbytes": plan.peak_nbytes, "live_peak_nbytes": plan.live_peak_nbytes,
        "host_peak_nbytes": plan.host_peak_nbytes, "noremat_peak_nbytes": plan.noremat_peak_nbytes,
        "gradient_nbytes": plan.gradient_nbytes, "time_s": plan.time_s, "noremat_time_s": plan.noremat_time_s,
        "recomputed_s": plan.recomputed_s, "lower_bound_s": plan.lower_bound_s, "overhead": plan.overhead,
        "solver": plan.solver, "platform": plan.platform, "deadline_hit": plan.deadline_hit,
        "periods": plan.periods, "on_host": list(plan.on_host), "stats": sorted(plan.solver_stats),
        "links": None if plan.links is None else attrs.asdict(plan.links), "steps": len(plan.schedule.steps),
        "order_sha256": hashlib.sha256(repr(tuple(plan.schedule.order)).encode()).hexdigest(),
        "steps_sha256": hashlib.sha256(json.dumps(schedule_to_data(plan.schedule)).encode()).hexdigest(),
    }


def every_key():
    """A graph with every key of the format. Not one that a model gives, but a valid one."""
    values = (
        Value(name="x", nbytes=10, role=Role.ACTIVATION, external=True),
        Value(name="w", nbytes=64, role=Role.PARAM, home=Home.DEVICE, chunk_of="weights"),
        Value(name="w.exp_avg", nbytes=64, role=Role.OPTIMIZER_STATE, of=1, home=Home.HOST),
        Value(name="seed", nbytes=8, role=Role.RNG),
        Value(name="h", nbytes=100),
        Value(name="r", nbytes=100),
        Value(name="loss", nbytes=4, role=Role.OUTPUT),
        Value(name="tangent", nbytes=4, role=Role.TANGENT, of=6),
        Value(name="g", nbytes=64, role=Role.GRAD, of=1),
        Value(name="count", nbytes=8, role=Role.BUFFER, external=True),
        Value(name="count.1", nbytes=8, role=Role.BUFFER, external=True, replaces=9),
    )
    one = Implementation
    ops = (
        Op(name="draw", target="snapshot", rerun=None, implementations=(one(inputs=(), outputs=(3,), time_s=1e-6),)),
        Op(name="drop", target="aten.dropout", key="drop(10)", rerun=1, implementations=(
            one(inputs=(0, 1, 3), outputs=(4,), time_s=2e-6, workspace_nbytes=32),
            one(inputs=(0, 1, 3), outputs=(4,), time_s=3e-6))),
        Op(name="relu", target="aten.relu", implementations=(
            one(inputs=(4,), outputs=(5,), time_s=1e-6, reuses=((5, 4),)),)),
        Op(name="add_", target="aten.add", rerun=None, implementations=(one(inputs=(9,), outputs=(10,)),)),
        Op(name="sum", target="aten.sum", implementations=(one(inputs=(5,), outputs=(6,), time_s=1e-6),)),
        Op(name="mm", target="aten.mm", backward=True, implementations=(
            one(inputs=(7, 5), outputs=(8,), time_s=4e-6),)),
    )
    updates = (Update(param=1, grad=8, states=(2,), device_time_s=1e-6, cpu_time_s=1e-5, workspace_nbytes=16),)
    return Graph(name="every key", values=values, ops=ops, updates=updates, rounding_nbytes=4,
                 conditions=(("mode", "training"), ("autocast", "off")))


def write_graphs(folder):
    save_graph(every_key(), folder / "every_key.json")
    with torch.autocast("cpu", torch.bfloat16):
        captured = plan_graph(models.make_model(), (), models.make_batch(), platform=Roofline(**models.RATES),
                              cache_dir=folder / "no_costs")
    save_graph(captured, folder / "captured.json")
    corpus = {"name": "corpus", "loss_value": 1, "ops": [
        {"id": 0, "name": "mm", "op": "aten.mm", "inputs": [], "outputs": [0], "is_backward": False, "time_us": 3.5},
        {"id": 1, "name": "sum", "op": "aten.sum", "inputs": [0], "outputs": [1], "is_backward": False, "time_us": 1.0},
        {"id": 2, "name": "mm_1", "op": "aten.mm", "inputs": [0], "outputs": [2, 3], "is_backward": True,
         "time_us": 7.0}],
        "values": [
        {"id": 0, "op": 0, "bytes": 4096, "is_grad_output": False, "is_fwd_output": False},
        {"id": 1, "op": 1, "bytes": 4, "is_grad_output": False, "is_fwd_output": True},
        {"id": 2, "op": 2, "bytes": 512, "is_grad_output": True, "is_fwd_output": False},
        {"id": 3, "op": 2, "bytes": 64, "is_grad_output": False, "is_fwd_output": False}]}
    (folder / "corpus.json").write_text(json.dumps(corpus) + "\n")
    shutil.rmtree(folder / "no_costs", ignore_errors=True)


def write_schedule(path):
    copy = [Transfer(4, lane) for lane in (Lane.TO_HOST, Lane.TO_DEVICE)]
    steps = (Compute(0), Compute(1), Start(copy[0]), Wait(copy[0]), Free(4), Start(copy[1]), Wait(copy[1]),
             FreeHost(4), Compute(1, 1), Compute(5), Deliver(8), OptimizerStep(1, Lane.COMPUTE),
             OptimizerStep(1, Lane.CPU_OPTIMIZER))
    write_json(schedule_to_data(Schedule(steps, 9, 11)), path)


def write_platforms(folder):
    costs = [OpCost(flops=1e9, read_nbytes=1 << 20, written_nbytes=1 << 18, key="aten.mm(a)", arithmetic="bf16"),
             OpCost(flops=2e6, read_nbytes=1 << 22, written_nbytes=1 << 22, key="again: aten.add(b)")]
    measured = [Measurement(cost=cost, time_s=t, workspace_nbytes=n)
                for cost, t, n in zip(costs, (1e-4, 2e-4), (0, 512), strict=True)]
    plain = Measured(device="a device", date="2026-11-22", versions={"torch": "2.13.0"}, measurements=measured)
    save_platform(plain, folder / "plain.json")
    save_platform(attrs.evolve(plain, links=ALL_LINKS), folder / "links.json")
    probe = OpCost(flops=5e8, read_nbytes=1 << 20, written_nbytes=1 << 20, key="aten.mm(c)")
    for name, platform in (("plain", plain), ("links", attrs.evolve(plain, links=ALL_LINKS))):
        EXPECTED[f"platforms/{name}.json"] = {
            "name": platform.name, "rates": list(platform.rates), "known_s": [platform.time_s(c) for c in costs],
            "fitted_s": platform.time_s(probe), "keys": sorted(platform.measurements),
            "links": None if platform.links is None else attrs.asdict(platform.links),
        }


def write_configs(folder):
    for name, cls in config_types().items():
        for kind, config in (("default", generate_config(name)),
                             ("changed", cls(seed=3, time_limit_s=12.5, **CHANGED[name]))):
            own = {f.name: getattr(config, f.name) for f in attrs.fields(cls)}
            assert kind == "default" or all(own[f.name] != f.default for f in attrs.fields(cls)), name
            save_config(config, folder / f"{name}_{kind}.yaml")
            EXPECTED[f"configs/{name}_{kind}.yaml"] = json.loads(json.dumps(own))


def write_cache(folder):
    """Costs measured, plans of both classes: all that lies in a cache folder."""
    plan_graph(models.make_model(), (), models.make_batch(), cache_dir=folder)
    options = {"platform": Roofline(**models.RATES), "cache_dir": folder}
    ours = Hiremate(models.make_model(), models.make_batch(), models.BUDGET, **options)
    EXPECTED["cache/Hiremate"] = figures_of_plan(ours.plan) | {"notes": list(ours.plan.notes)}
    model = models.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = Offmate(model, models.make_batch(), models.TRAINING_BUDGET, links=LINKS, host_budget=models.HOST_BUDGET,
                   optimizer=optimizer, **options)
    EXPECTED["cache/Offmate"] = figures_of_plan(ours.plan) | {"notes": list(ours.plan.notes)}
    for _ in range(2):
        ours(**models.make_batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": ours.state_dict(), "optimizer": optimizer.state_dict()}, folder.parent / "checkpoint.pt")
    save_graph(ours.graph, folder.parent / "graphs" / "training.json")
    save_plan(ours.plan, folder.parent / "plans" / "on_host.json")
    save_plan(attrs.evolve(ours.plan, links=ALL_LINKS), folder.parent / "plans" / "links.json")
    ours.close()
    for path in sorted(folder.rglob("*.json")):
        data = json.loads(path.read_text())
        EXPECTED[str(path.relative_to(folder.parent))] = (
            {"costs": data["costs"]} if data["format"] == "remat-costs" else {"key": data["key"]})


def run(*words):
    assert main([str(word) for word in words]) == 0, words


def write_by_command(folder, graph):
    here = Path(__file__).parent
    run("solve", graph, "--budget", "70%", "--solver", "greedy", "--plan-out", folder / "solve_plan.json",
        "--order-out", folder / "solve_order.json")
    run("plan", f"{here / 'models.py'}:factory", "--budget", models.BUDGET, "--platform", "h200-spec", "--no-zoo",
        "--out", folder / "plan_plan.json", "--graph-out", folder / "plan_graph.json")
    run("config", "offmate", "--out", folder / "config.yaml")
    run("sweep", graph, "--budgets", "75%,100%", "--solvers", "greedy", "--csv", folder / "sweep.csv")


def write_all():
    for name in ("graphs", "plans", "platforms", "configs", "cache", "command"):
        (OUT / name).mkdir(parents=True)
    write_graphs(OUT / "graphs")
    write_schedule(OUT / "schedule.json")
    write_platforms(OUT / "platforms")
    write_configs(OUT / "configs")
    write_cache(OUT / "cache")
    write_by_command(OUT / "command", OUT / "graphs" / "captured.json")
    for path in [*sorted((OUT / "graphs").iterdir()), OUT / "command" / "plan_graph.json"]:
        graph = load_graph(path)
        EXPECTED[str(path.relative_to(OUT))] = figures_of_graph(graph) | {
            "noremat_peak_nbytes": None if graph.updates else noremat_peak_nbytes(graph)}
    for path in [*sorted((OUT / "plans").iterdir()), *sorted((OUT / "command").glob("*_plan.json"))]:
        EXPECTED[str(path.relative_to(OUT))] = figures_of_plan(load_plan(path))
    (OUT / "expected.json").write_text(json.dumps(EXPECTED, indent=1, sort_keys=True) + "\n")


write_all()
