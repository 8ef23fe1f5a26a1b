"""What a way may change: results that it makes instead, tensors of its own, added ops, repeats."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule, step_graph
from remat_executor.capture.captured import Captured
from remat_executor.ways.substitution import Change, Family, Substitution, new_tensor
from remat_graph import Alternative, simulate, specialize, verify
from tests.helpers.planners import all_switched, save_all

aten = torch.ops.aten


def positive(made: Tensor) -> tuple[Tensor]:
    return ((made > 0).to(torch.uint8),)


def masked(gradient: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), gradient, 0)


def masks(captured: Captured) -> Iterator[Substitution]:
    """A byte for each number of a relu instead of the number."""
    for node in captured.graph_module.graph.find_nodes(
        op="call_function", target=aten.threshold_backward.default
    ):
        gradient, made, _ = node.args
        while made.target is aten.detach.default:
            made = made.args[0]
        if made.target is not aten.relu.default:
            continue
        fake = made.meta["val"]
        mask = new_tensor(f"{made.name}_mask", fake.new_empty(fake.shape, dtype=torch.uint8))
        yield Substitution(
            family="masks",
            changes=(
                Change(node=made, added=True, kernel=positive, reads=(made,), makes=(mask,)),
                Change(node=node, kernel=masked, reads=(gradient, mask)),
            ),
        )


def input_gradient(gradient: Tensor, weight: Tensor, columns: int) -> tuple[Tensor]:
    stand_in = gradient.new_empty(()).expand(gradient.shape[0], columns, *gradient.shape[2:])
    made = aten.convolution_backward(
        gradient, stand_in, weight, None, [1], [0], [1], False, [0], 1, [True, False, False]
    )
    return (made[0],)


def weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor]:
    made = aten.convolution_backward(
        gradient, x, weight, None, [1], [0], [1], False, [0], 1, [False, True, False]
    )
    return (made[1],)


def halves(captured: Captured) -> Iterator[Substitution]:
    """The backward of a convolution in two ops."""
    calls = captured.graph_module.graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default
    )
    for node in calls:
        gradient, x, weight = node.args[:3]
        made = {user.args[1]: user for user in node.users}
        if set(made) != {0, 1}:
            continue
        columns = (x.meta["val"].shape[1],)
        yield Substitution(
            family="halves",
            changes=(
                Change(
                    node=node,
                    kernel=input_gradient,
                    reads=(gradient, weight),
                    constants=columns,
                    makes=(made[0],),
                ),
                Change(
                    node=node,
                    added=True,
                    kernel=weight_gradient,
                    reads=(gradient, x, weight),
                    makes=(made[1],),
                ),
            ),
        )


def clamped(x: Tensor) -> Tensor:
    return x.clamp_min(0)


def repeats(captured: Captured) -> Iterator[Substitution]:
    """Another kernel for repeats of relu."""
    for node in captured.graph_module.graph.find_nodes(op="call_function", target=aten.relu.default):
        change = Change(node=node, on_repeat=True, kernel=clamped, reads=node.args)
        yield Substitution(family="repeats", changes=(change,))


class Net(nn.Module):
    """Convolutions and relus."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv1d(6, 6, 1, bias=False) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (torch.relu(layer(x)) * 1.5).sin()
        return x.square().mean()


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    module(x).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize(
    ("family", "switches"), [(masks, 3), (halves, 2), (repeats, 3)], ids=lambda v: getattr(v, "__name__", "")
)
def test_plans_with_the_ways_on_give_the_bits_of_eager(
    family: Family, switches: int, seed: int | None
) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 6, 50)
    wanted = gradients(copy.deepcopy(model), x)
    module = PlannedModule(copy.deepcopy(model), (x,), {}, all_switched(seed), ways=[family])
    assert switches == len(module.graph.switches)
    verify(module.graph)
    for _ in range(2):
        found = gradients(module, x)
        assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert module.plan.switched == module.graph.switches


def test_ways_of_several_families_are_in_force_together() -> None:
    """Added ops of one way have a place among those of others; the plan's bytes are those of the referee."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 6, 50)
    wanted = gradients(copy.deepcopy(model), x)
    module = PlannedModule(copy.deepcopy(model), (x,), {}, all_switched(), ways=[masks, halves])
    assert 5 == len(module.graph.switches)
    found = gradients(module, x)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_a_tensor_of_a_way_exists_in_this_way_only() -> None:
    """A byte for each number, made by an added op; without the way it is never made."""
    graph = step_graph(Net(), (torch.randn(4, 6, 50),), {}, ways=[masks])
    made = [v for v, value in enumerate(graph.values) if value.name.endswith("_mask")]
    assert [4 * 6 * 50] * 3 == [graph.values[v].nbytes for v in made]
    for on, makers in (((), 0), (graph.switches, 1)):
        decided = specialize(graph, on).graph
        for value in made:
            assert makers == sum(value in op.first.outputs for op in decided.ops)


def test_only_repeats_run_another_kernel() -> None:
    graph = step_graph(Net(), (torch.randn(4, 6, 50),), {}, ways=[repeats])
    relu = next(op for op in graph.ops if op.target == "aten.relu.default")
    first, again = relu.implementations[1:]
    assert (Alternative(switch=f"repeats.{relu.name}", first=1, again=2),) == relu.alternatives
    assert first.outputs == again.outputs == relu.first.outputs


def test_an_added_op_needs_a_kernel_and_says_what_it_makes() -> None:
    node = torch.fx.Graph().placeholder("x")
    for options in ({}, {"kernel": positive}, {"makes": (node,)}):
        with pytest.raises(ValueError, match="an op added after x needs a kernel and what it makes"):
            Change(node=node, added=True, **options)


def test_the_plan_without_ways_is_not_changed_by_them() -> None:
    """Added ops run nothing there."""
    model, x = Net(), torch.randn(4, 6, 50)
    plain = PlannedModule(copy.deepcopy(model), (x,), {}, save_all, ways=[])
    off = PlannedModule(copy.deepcopy(model), (x,), {}, save_all, ways=[masks, halves])
    for module in (plain, off):
        assert simulate(module.graph, module.plan.schedule).peak_nbytes == module.plan.peak_nbytes
    assert plain.plan.peak_nbytes == off.plan.peak_nbytes
