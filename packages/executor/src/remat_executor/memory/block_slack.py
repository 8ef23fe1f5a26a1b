"""Bound what a schedule takes when the allocator hands out blocks that are larger than asked for.

CUDA's caching allocator counts whole blocks. It serves a request above 1 MiB from a cached block, and splits
that block only if more than 1 MiB would be left over. So each such block may hold up to 1 MiB that no tensor
uses. Blocks of 1 MiB or less have no slack beyond the rounding to 512 bytes, and with
``expandable_segments:True`` no block has. The source is ``should_split`` in
``c10/cuda/CUDACachingAllocator.cpp``.
"""

import math
import os
from collections.abc import Mapping

import attrs
import torch

from remat_graph import Grads, Graph, Schedule, simulate

_MIB = 1 << 20
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_OTHER_RULES = ("max_split_size_mb", "roundup_power2_divisions", "backend:cudamallocasync")


def largest_slack_nbytes(environment: Mapping[str, str] = os.environ) -> int | None:
    """The most slack of one block by the allocator's settings; None if they change the rules.

    Expandable segments are believed if the allocator has no others: the setting has no effect where the
    platform lacks them, and after the first use of a device.
    """
    settings = ",".join(environment.get(name, "") for name in _SETTINGS).replace(" ", "").lower()
    if any(rule in settings for rule in _OTHER_RULES):
        return None
    return 0 if "expandable_segments:true" in settings and not _has_fixed_segments() else _MIB


def _has_fixed_segments() -> bool:
    if not torch.cuda.is_initialized():
        return False
    return any(not segment.get("is_expandable", True) for segment in torch.cuda.memory_snapshot())


def worst_case_nbytes(
    graph: Graph, schedule: Schedule, slack_nbytes: int = _MIB, grads: Grads = Grads.NEW
) -> int:
    """An upper bound of a schedule's peak if each block above 1 MiB has this much slack.

    The number of blocks of a workspace is unknown: it is at most its bytes by 1 MiB.
    """
    values = tuple(
        attrs.evolve(value, nbytes=value.nbytes + slack_nbytes) if graph.allocated_nbytes(i) > _MIB else value
        for i, value in enumerate(graph.values)
    )

    def workspace(nbytes: int) -> int:
        return nbytes + nbytes // _MIB * slack_nbytes

    ops = tuple(
        attrs.evolve(
            op,
            implementations=tuple(
                attrs.evolve(run, workspace_nbytes=workspace(run.workspace_nbytes))
                for run in op.implementations
            ),
        )
        for op in graph.ops
    )
    updates = tuple(
        attrs.evolve(update, workspace_nbytes=workspace(update.workspace_nbytes)) for update in graph.updates
    )
    slack = attrs.evolve(graph, values=values, ops=ops, updates=updates)
    return simulate(slack, schedule, grads=grads).peak_nbytes


def slack_variation_nbytes(
    graph: Graph, schedule: Schedule, grads: Grads = Grads.NEW, measured_nbytes: int = 0
) -> int:
    """By how much the slack at a schedule's peak may grow beyond that of a measured step, as a rule.

    Which cached block serves a request depends on what else the process has allocated, for instance states of
    an optimizer. The slacks of n blocks are between 0 and 1 MiB; if they are independent, the standard
    deviation of their sum is below 0.3 MiB times the root of n. Three of these are left, below the most that
    is possible: slack that the measured step had cannot be added to it again.
    """
    if largest_slack_nbytes() == 0:
        return 0
    peak_nbytes = simulate(graph, schedule, grads=grads).peak_nbytes
    most_nbytes = worst_case_nbytes(graph, schedule, grads=grads) - peak_nbytes
    measured_slack_nbytes = max(0, measured_nbytes - peak_nbytes)
    # A step that took even more took it for another reason, and its slack is unknown.
    left_nbytes = most_nbytes - (measured_slack_nbytes if measured_slack_nbytes <= most_nbytes else 0)
    return min(left_nbytes, math.ceil(_MIB * math.sqrt(most_nbytes / _MIB)))
