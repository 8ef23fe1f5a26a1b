"""Warnings of a planned module: their wording, and the figures that decide whether they are given."""

from collections.abc import Iterator, Sequence

from remat_executor.guards.differences import Difference
from remat_executor.guards.snapshot import Snapshot
from remat_executor.memory.block_slack import largest_slack_nbytes
from remat_graph import format_nbytes, format_seconds

COMPILED = (
    "torch.compile changes nothing in a planned module, whose plan runs unchanged: give "
    'runtime="inductor" to compile the plan'
)

NUMBERS_ARE_INPUTS = "from now on the plan takes numbers there as inputs, whose changes need no other plan"

PENDING_CALLS = (
    "called again before the backward of the previous call, whose values are still held: each pending call "
    "needs a budget of its own; call backward first, or lower the budget"
)

# Fragments are mentioned from these on: below, they decide nothing.
_FRAGMENTS_NBYTES, _FRAGMENTS_SHARE = 64 << 20, 0.05


def external_state(before: Snapshot, now: Snapshot) -> Iterator[tuple[str, str]]:
    """(kind, message) for external state that a forward reads or changed between two snapshots."""
    clocks = before.external.clocks
    if clocks:
        yield (
            "clock",
            f"the forward reads the clock ({', '.join(clocks)}): a planned module keeps the value read "
            "during planning; pass the time as an argument",
        )
    changed = {label for label, _ in {*before.own.external_state} ^ {*now.own.external_state}}
    if changed:
        yield (
            "globals",
            f"the forward changes {', '.join(sorted(changed)[:3])} outside of its module: a planned module "
            "does not do that",
        )


def uncalled(parts: Sequence[str], *, original: bool = False) -> str:
    """That a step of training did not call a module.

    Args:
        parts: the children of the module that have gradients.
        original: whether the planned module is another object than the original.
    """
    instead = f"its parts ({', '.join(parts[:5])}) or other methods of it" if parts else "a copy of it"
    advice = "limit the module that training calls"
    if original:
        instead, advice = f"the original, {instead}", "call the planned module, or use limit_memory"
    return (
        f"was not called in a step of training, which ran without a plan: training calls {instead}; {advice}"
    )


def replanned(found: Sequence[Difference], took_s: float, advice: str) -> str:
    """That differences to the last call made a plan, which took some seconds, and what to do about them."""
    return (
        f"called in another way ({_listed(found)} changed): planning again took {format_seconds(took_s)}"
        + (f"; {advice}" if advice else "")
    )


def unneeded_captures(found: Sequence[Difference]) -> str:
    """That captures are repeated for changes that change no op."""
    return (
        f"every call is recaptured because {_listed(found)} changes although no op reads it; store it "
        "outside the module"
    )


def fragments(fragments_nbytes: int | None, rehearsed_nbytes: int | None) -> str | None:
    """That expandable segments would save memory of the device, where they would.

    Args:
        fragments_nbytes: what the allocator held beyond tensors; None if not measured.
        rehearsed_nbytes: the measured peak; None if not measured.
    """
    beyond_nbytes, peak_nbytes = fragments_nbytes or 0, rehearsed_nbytes or 0
    if beyond_nbytes <= max(_FRAGMENTS_NBYTES, _FRAGMENTS_SHARE * peak_nbytes) or not largest_slack_nbytes():
        return None
    return (
        f"in a step of {format_nbytes(peak_nbytes)}, CUDA's allocator holds {format_nbytes(beyond_nbytes)} "
        "more than tensors take: PYTORCH_ALLOC_CONF=expandable_segments:True, set before the first use of "
        "the device, saves nearly all of that"
    )


def dropped_plans(most: int) -> str:
    """That more plans are needed than are kept."""
    return (
        f"called in more than {most} ways: each new plan replaces the least recently used one; pad lengths "
        "with buckets=, or raise max_plans="
    )


def kept_outputs(nbytes: int) -> str:
    """That the caller holds outputs in the backward that the plan expects to be dropped."""
    return (
        f"outputs of {format_nbytes(nbytes)} are still held when the backward begins, but the plan expects "
        'outputs="dropped": they are outside the budget; drop them, as in loss = model(...).loss, or plan '
        'with outputs="kept"'
    )


def _listed(found: Sequence[Difference]) -> str:
    return ", ".join(map(str, found))
