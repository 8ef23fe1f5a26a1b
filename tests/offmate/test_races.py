"""Every copy and update of a training run is ordered with what computes, whatever the plan: no races."""

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat_facade import NoRoom
from remat_graph import Links
from remat_offload import Operation, Recorder, SimulatedMachine, find_races
from tests.helpers.offmates import MODELS, moving_run


class Telling(TorchDispatchMode):
    """Tells a recorder what computing reads and writes."""

    def __init__(self, recorder: Recorder, host: set[int]) -> None:
        super().__init__()
        self.recorder, self.host = recorder, host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every tensor among an operator's arguments is read; those that its schema names are written."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not getattr(func, "is_view", False):
            arguments = [*args, *kwargs.values()]
            schema = func._schema.arguments
            written = [
                leaf
                for value, argument in zip(args, schema, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
                for leaf in tree_leaves(value)
            ]
            touched = _tensors([*arguments, *tree_leaves(out)])
            self.recorder.reads(_tensors(arguments), name=str(func))
            known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
            made = [t for t in _tensors([out]) if t.untyped_storage().data_ptr() not in known]
            self.recorder.writes(_tensors([*written, *made]), name=str(func))
            if any(tensor.untyped_storage().data_ptr() in self.host for tensor in touched):
                self.recorder.computed()  # clipping and accumulating on the host are no device's work
        return out


def _tensors(values: list[Any]) -> list[Any]:
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)]


def watched(
    name: str, budget: str, *, in_backward: bool, accumulation: int, clips: bool, **options: Links
) -> tuple[Operation, ...]:
    """What a recorder saw of three steps of training, told operator by operator."""
    recorder = Recorder(SimulatedMachine())
    run = moving_run(
        name, budget, machine=recorder, in_backward=in_backward, accumulation=accumulation, **options
    )
    if clips:  # while stepping, the norms taken beside the backward

        def clip(parameters: Any, most: Any) -> None:
            run.model.clip_grad_norm_(most)
            recorder.computed()  # it brings the scale to the host, which waits for a device

        run.clip = clip
    with Telling(recorder, run.memory.addresses):
        run.train(3)
    run.model.synchronize()
    return recorder.record


@pytest.mark.parametrize(
    ("name", "budget", "in_backward"),
    [("llama", "35%", False), ("llama", "60%", True), ("convolutions", "60%", False)],
)
def test_no_run_has_a_race(name: str, budget: str, in_backward: bool) -> None:
    """In either style; clipped as the step reads the gradients."""
    clips = name == "llama" and not in_backward
    record = watched(name, budget, in_backward=in_backward, accumulation=2 if in_backward else 1, clips=clips)
    assert clips == any(operation.name == "the norm of a gradient" for operation in record)
    lanes = {operation.lane for operation in record}
    assert len(lanes) == 4 or (name == "convolutions" and len(lanes) >= 3)
    assert [] == find_races(record)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 40))])
def test_no_random_plan_has_a_race(seed: int) -> None:
    """Budgets down to the least, links of any speed, micro-batches; without room the least that has some."""
    rng = random.Random(seed)
    in_backward = rng.random() < 0.5
    options = {
        "in_backward": in_backward,
        "accumulation": rng.choice((1, 1, 2, 3)),
        "clips": not in_backward and rng.random() < 0.7,
        "links": Links(
            to_host_nbytes_per_s=10 ** rng.uniform(7.5, 10.0),
            to_device_nbytes_per_s=10 ** rng.uniform(7.5, 10.0),
        ),
    }
    name, budget = rng.choice(list(MODELS)), f"{rng.randint(5, 100)}%"
    try:
        record = watched(name, budget, **options)
    except NoRoom as error:
        record = watched(name, error.least_nbytes, **options)
    assert [] == find_races(record)
