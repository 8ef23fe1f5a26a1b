"""The bound of what CUDA's allocator counts for a schedule, against a model of its rules for blocks."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings

from remat_executor.memory.block_slack import (
    largest_slack_nbytes,
    slack_variation_nbytes,
    worst_case_nbytes,
)
from remat_graph import Compute, Free, Graph, Schedule, simulate
from remat_graph.testing.strategies import schedules

MIB = 1 << 20
BYTES = 40_009  # a unit of a random graph's sizes becomes this many bytes: some blocks are above 1 MiB


@attrs.define(eq=False)
class Block:
    """A block of a segment, in a list of its neighbours by address."""

    nbytes: int
    segment: list[Block] = attrs.field(factory=list, repr=False)
    free: bool = True


@attrs.define
class NativeAllocator:
    """The rules of c10/cuda/CUDACachingAllocator.cpp with its default settings, on one stream."""

    pools: dict[bool, list[Block]] = attrs.field(factory=lambda: {True: [], False: []})
    counted_nbytes: int = 0
    peak_nbytes: int = 0

    def allocate(self, nbytes: int) -> tuple[bool, Block]:
        nbytes = max(512, -(-nbytes // 512) * 512)
        small = nbytes <= MIB
        pool = self.pools[small]
        block = min((b for b in pool if b.nbytes >= nbytes), key=lambda b: b.nbytes, default=None)
        if block is None:
            large = 20 * MIB if nbytes < 10 * MIB else -(-nbytes // (2 * MIB)) * 2 * MIB
            block = Block(2 * MIB if small else large)
            block.segment.append(block)
        else:
            pool.remove(block)
        left_nbytes = block.nbytes - nbytes
        if left_nbytes >= 512 if small else left_nbytes > MIB:
            block.nbytes = nbytes
            rest = Block(left_nbytes, block.segment)
            block.segment.insert(block.segment.index(block) + 1, rest)
            pool.append(rest)
        block.free = False
        self.counted_nbytes += block.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.counted_nbytes)
        return small, block

    def release(self, small: bool, block: Block) -> None:
        pool, segment = self.pools[small], block.segment
        self.counted_nbytes -= block.nbytes
        block.free = True
        place = segment.index(block)
        for neighbour in (*segment[place + 1 : place + 2], *segment[max(0, place - 1) : place]):
            if neighbour.free:
                pool.remove(neighbour)
                segment.remove(neighbour)
                block.nbytes += neighbour.nbytes
        pool.append(block)


def counted_nbytes(graph: Graph, schedule: Schedule) -> int:
    """The allocator's peak for the storages that a schedule computes and frees."""
    allocator, held = NativeAllocator(), {}
    for step in schedule.steps:
        match step:
            case Compute(op, implementation):
                run = graph.ops[op].implementations[implementation]
                for value in run.outputs:
                    if value not in held and graph.allocated_nbytes(value):
                        held[value] = allocator.allocate(graph.values[value].nbytes)
                if run.workspace_nbytes:
                    allocator.release(*allocator.allocate(run.workspace_nbytes))
            case Free(value) if value in held:
                allocator.release(*held.pop(value))
            case _:
                pass
    return allocator.peak_nbytes


def enlarged(graph: Graph) -> Graph:
    """The graph on CUDA, with storages above and below 1 MiB, and workspaces as measured there."""
    values = tuple(attrs.evolve(value, nbytes=BYTES * value.nbytes // 8) for value in graph.values)
    ops = tuple(
        attrs.evolve(
            op,
            implementations=tuple(
                attrs.evolve(run, reuses=(), workspace_nbytes=512 * 79 * run.workspace_nbytes)
                for run in op.implementations
            ),
        )
        for op in graph.ops
    )
    return attrs.evolve(graph, values=values, ops=ops, rounding_nbytes=512)


@settings(deadline=None)
@given(schedules())
def test_the_allocator_never_counts_more_than_the_bound(made: tuple[Graph, Schedule]) -> None:
    """Whatever blocks it splits."""
    graph, schedule = enlarged(made[0]), made[1]
    peak_nbytes = simulate(graph, schedule).peak_nbytes
    bound_nbytes = worst_case_nbytes(graph, schedule)
    assert peak_nbytes <= bound_nbytes
    assert counted_nbytes(graph, schedule) <= bound_nbytes
    assert 0 <= slack_variation_nbytes(graph, schedule) <= bound_nbytes - peak_nbytes


def test_the_allocator_counts_more_than_was_asked_for() -> None:
    """The model itself: a block of 20 MiB is not split where 1 MiB would be left, and is where more would."""
    allocator = NativeAllocator()
    allocator.release(*allocator.allocate(19 * MIB))
    assert allocator.peak_nbytes == 20 * MIB
    allocator.allocate(18 * MIB)
    assert allocator.counted_nbytes == 18 * MIB


@pytest.mark.parametrize(
    ("settings_text", "slack_nbytes"),
    [
        ("", MIB),
        ("garbage_collection_threshold:0.8", MIB),
        ("expandable_segments:True", 0),
        ("expandable_segments: true, max_split_size_mb:64", None),
        ("roundup_power2_divisions:4", None),
        ("backend:cudaMallocAsync", None),
    ],
)
def test_the_settings_of_the_allocator(settings_text: str, slack_nbytes: int | None) -> None:
    """Expandable segments leave nothing in blocks; settings with other rules have no bound here."""
    assert largest_slack_nbytes({"PYTORCH_ALLOC_CONF": settings_text}) == slack_nbytes
    assert largest_slack_nbytes({"PYTORCH_CUDA_ALLOC_CONF": settings_text}) == slack_nbytes
