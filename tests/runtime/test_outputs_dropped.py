"""`outputs="dropped"`: outputs that are not differentiated count to the end of the forward only."""

from __future__ import annotations

import gc
import warnings
import weakref
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import (
    BadInput,
    MemoryMeter,
    PlanFunction,
    PlannedModule,
    RematWarning,
    allocator_peak,
    step_graph,
)
from remat_executor.ways.loss_head import loss_head
from remat_facade import Hiremate, generate_config, limit_memory, save_config
from remat_facade import planned as find_plan
from remat_graph import Role, get_platform
from remat_solvers import Deadline, min_budget
from tests.helpers.models import import_transformers
from tests.helpers.planners import all_switched, repeat_at_random, save_all

WORDS = 4000
SMALL = [partial(loss_head, least_nbytes=0)]


class Head(nn.Module):
    """A loss of logits that are returned too, with a view of them and a hidden tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, WORDS, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(torch.tanh(self.body(x)))
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.float(), target)
        return {
            "loss": loss,
            "logits": logits,
            "last": logits[-1:],
            "hidden": hidden,
            "top": logits.argmax(1),
        }


def head() -> Head:
    torch.manual_seed(0)
    return Head()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 8, generator=generator), torch.randint(0, WORDS, (64,), generator=generator)


LOGITS_NBYTES = 64 * WORDS * 4


def planned(planner: PlanFunction, outputs: str = "dropped") -> PlannedModule:
    return PlannedModule(head(), inputs(), {}, planner, ways=SMALL, outputs=outputs)


def assert_eager(module: nn.Module, output: dict[str, Tensor] | None = None) -> None:
    """The gradients, and the outputs where they are given, are those of eager in every bit."""
    model = head()
    wanted = model(*inputs())
    wanted["loss"].backward()
    for name in output or ():
        assert torch.equal(wanted[name], output[name]), name
    for one, other in zip(model.parameters(), module.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def step(module: nn.Module, *args: Tensor) -> None:
    """As training does it: nothing but the loss is alive when the backward begins."""
    module(*args)["loss"].backward()


PLANNERS = [save_all, all_switched(), *(all_switched(seed) for seed in range(4))]
PLANNERS += [repeat_at_random(12, seed) for seed in range(4)]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("accumulating", [False, True])
def test_peaks_are_those_of_the_plan_and_bits_those_of_eager(
    planner: PlanFunction, accumulating: bool
) -> None:
    """Whatever the plan does with the logits: save, overwrite, recompute."""
    module = planned(planner)
    dropped = {module.graph.values[v].nbytes for v in module.graph.dropped}
    assert dropped == {LOGITS_NBYTES, 64 * 8 * 4, 64 * 8}
    args = inputs()
    for by_meter in (True, False):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if accumulating else None
        gc.collect()
        if by_meter:
            with MemoryMeter(module, *args) as meter:
                step(module, *args)
            peak_nbytes, said_nbytes = meter.peak_nbytes, module.plan.live_peak_nbytes
        else:
            peak_nbytes = allocator_peak(partial(step, module, *args)).peak_nbytes
            said_nbytes = module.plan.peak_nbytes
        if by_meter and module.plan.switched:  # the meter sees the tensors inside of the ways' kernels too
            said_nbytes = module.plan.peak_nbytes
        # The tangent of the loss, 4 bytes, is counted with the loss.
        least_nbytes = 0 if accumulating else said_nbytes - 4
        assert least_nbytes <= peak_nbytes <= said_nbytes
    if not accumulating:
        assert_eager(module)


def test_the_smallest_budget_no_longer_has_the_logits_and_their_gradient() -> None:
    """Kept, both are there at the end of the loss's backward; dropped, one takes over the other's storage."""
    kept, dropped = (planned(save_all, outputs).graph for outputs in ("kept", "dropped"))
    assert not kept.dropped
    assert 2 * LOGITS_NBYTES < min_budget(kept).nbytes
    assert 1.6 * LOGITS_NBYTES > min_budget(dropped).nbytes


@pytest.mark.parametrize("planner", [save_all, all_switched(), repeat_at_random(12, 1)])
def test_nothing_of_the_outputs_is_held_but_what_the_plan_saves(planner: PlanFunction) -> None:
    """A storage that the backward does not read, or recomputes, dies with the caller's tensors."""
    module = planned(planner)
    output = module(*inputs())
    loss = output["loss"]
    storages = [weakref.ref(output[name].untyped_storage()) for name in ("logits", "hidden", "top")]
    saved = {module.graph.values[v].nbytes for v in module._remat.last_call().saved}
    del output
    gc.collect()
    alive = [storage is not None and storage.nbytes() in saved for storage in (each() for each in storages)]
    assert [each() is not None for each in storages] == alive
    assert not alive[2]
    loss.backward()
    assert [each() for each in storages] == [None] * 3
    assert_eager(module)


@pytest.mark.parametrize("name", ["logits", "last"])
@pytest.mark.parametrize("planner", [save_all, all_switched(), all_switched(1), repeat_at_random(12, 1)])
def test_a_caller_that_keeps_them_is_warned_once_and_gets_eagers_bits(
    planner: PlanFunction, name: str
) -> None:
    """Also where the plan would write over the logits; a view holds its whole storage."""
    module = planned(planner)
    output = module(*inputs())
    held = {"loss": output["loss"], name: output[name]}
    del output
    with pytest.warns(RematWarning, match=r"outputs of 1000 KiB are still held when the backward begins"):
        held["loss"].backward()
    assert_eager(module, held)
    module.zero_grad()
    output = module(*inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output["loss"].backward()  # once
    assert_eager(module, output)


def test_a_second_backward_is_eagers(tmp_path: Path) -> None:
    """With `retain_graph` nothing of the caller's is written over, and nothing is said."""
    module = planned(all_switched())
    loss = module(*inputs())["loss"]
    loss.backward(retain_graph=True)
    module.zero_grad()
    loss.backward()
    assert_eager(module)


def test_a_change_of_a_saved_output_is_noticed() -> None:
    """As with kept outputs; one that the backward recomputes may change."""
    module = planned(all_switched())
    output = module(*inputs())
    output["logits"].detach().zero_()
    with pytest.raises(Exception, match="modified in place after the forward"):
        output["loss"].backward()


def test_what_is_differentiated_is_kept() -> None:
    """Outputs with gradients, and others that show the same storage, have the role of outputs."""
    module = PlannedModule(head(), inputs(), {}, save_all, differentiate=[1], outputs="dropped")
    sizes = {module.graph.values[v].nbytes for v in module.graph.outputs}
    assert LOGITS_NBYTES in sizes
    assert LOGITS_NBYTES not in {module.graph.values[v].nbytes for v in module.graph.dropped}
    module(*inputs())["logits"].sum().backward()
    model = head()
    model(*inputs())["logits"].sum().backward()
    for one, other in zip(model.parameters(), module.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_module_that_returns_its_loss_alone_is_planned_alike() -> None:
    """There is nothing to drop."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = head()

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            loss: Tensor = self.inner(x, target)["loss"]
            return loss

    kept, dropped = (
        PlannedModule(Loss(), inputs(), {}, save_all, outputs=outputs).graph
        for outputs in ("kept", "dropped")
    )
    assert not dropped.dropped
    assert (kept.values, kept.ops) == (dropped.values, dropped.ops)


@pytest.mark.full  # a compiler takes seconds for each part
# Inductor imports a module of torch's own that torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_measured_runtimes_drop_them_too(tmp_path: Path) -> None:
    """Inductor's step is measured before use: without the outputs."""
    options: dict[str, Any] = {"cache_dir": tmp_path, "runtime": "inductor", "zoo": False}
    kept = Hiremate(head(), inputs(), "16MiB", outputs="kept", **options)
    dropped = Hiremate(head(), inputs(), "16MiB", outputs="dropped", **options)
    assert dropped.rehearsed_nbytes is not None
    assert kept.rehearsed_nbytes is not None
    assert dropped.rehearsed_nbytes <= kept.rehearsed_nbytes - LOGITS_NBYTES // 2
    step(dropped, *inputs())
    assert dropped.runs["planned"] == 1


def test_a_language_model_by_the_entry_points(tmp_path: Path) -> None:
    """`model(...).loss.backward()` needs less; the option works in place; other words are refused."""
    transformers = import_transformers()

    def model() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=64, use_cache=False
        )
        made: nn.Module = transformers.GPT2LMHeadModel(config)
        return made.train()

    ids = torch.randint(0, WORDS, (2, 64), generator=torch.Generator().manual_seed(1))
    kwargs = {"input_ids": ids, "labels": ids}
    options: dict[str, Any] = {"cache_dir": tmp_path, "platform": get_platform("flops"), "zoo": False}
    least = {}
    for outputs in ("kept", "dropped"):
        graph = Hiremate(model(), kwargs, "100%", outputs=outputs, **options).graph
        quick = Deadline(100.0, clock=count().__next__)  # readings; ten times as many gain 4 bytes
        least[outputs] = min_budget(graph, quick).nbytes
    logits_nbytes = 2 * 64 * WORDS * 4
    assert least["dropped"] < least["kept"] - 0.9 * logits_nbytes
    limited = limit_memory(model(), least["dropped"], outputs="dropped", **options)
    eager = model()
    for each in (limited, eager):
        torch.manual_seed(3)
        each(**kwargs).loss.backward()
    for one, other in zip(limited.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    with MemoryMeter(limited, ids) as meter:
        limited.zero_grad()
        limited(**kwargs).loss.backward()
    assert meter.peak_nbytes <= least["dropped"]
    with pytest.raises(BadInput, match="outputs is 'gone', not one of 'kept', 'dropped'"):
        limit_memory(model(), "1GiB", outputs="gone")


def test_a_config_has_the_option(tmp_path: Path) -> None:
    """Of a file; the keyword overrules it."""
    options: dict[str, Any] = {"cache_dir": tmp_path, "platform": get_platform("flops"), "zoo": False}
    path = save_config(generate_config("noremat").with_(outputs="dropped"), tmp_path / "config.yaml")
    assert Hiremate(head(), inputs(), "100%", config=path, **options).graph.dropped
    assert not Hiremate(head(), inputs(), "100%", config=path, outputs="kept", **options).graph.dropped
    model = limit_memory(head(), "100%", sample=inputs(), config=path, **options)
    found = find_plan(model)
    assert found is not None
    assert found.graph.dropped


def test_a_graph_alone_has_the_option() -> None:
    """Other words are refused at this level too."""
    graph = step_graph(head(), inputs(), platform=get_platform("flops"), outputs="dropped")
    assert {graph.values[v].nbytes for v in graph.dropped} == {LOGITS_NBYTES, 64 * 8 * 4, 64 * 8}
    wrong: Any = "gone"
    with pytest.raises(BadInput, match="outputs is 'gone', not one of 'kept', 'dropped'"):
        step_graph(head(), inputs(), outputs=wrong)
    with pytest.raises(BadInput, match="outputs is 'gone', not one of 'kept', 'dropped'"):
        PlannedModule(head(), inputs(), {}, save_all, outputs=wrong)


def test_dropped_outputs_have_a_role_of_their_own() -> None:
    """Which plans and files show."""
    graph = planned(save_all).graph
    assert {graph.values[v].role for v in graph.dropped} == {Role.DROPPED}
    assert "return_outputs" in [op.name for op in graph.ops]
