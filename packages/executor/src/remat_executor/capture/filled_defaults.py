"""Defaults that a forward fills in at its first call: a plan leaves them filled in, as the original does.

transformers' classifiers write the kind of problem into their config, where it is None. A plan that was
captured with None serves later calls only if the forward computes the same once the default is there. So the
step is captured again with it, and compared.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from remat_executor.capture.captured import Captured
from remat_executor.errors import CaptureError
from remat_executor.inspection.attribute_keys import exact_key


def check_filled_defaults(captured: Captured, capture_again: Callable[[], Captured]) -> None:
    """Check that a forward computes the same once the defaults that it fills in are there.

    Raises:
        CaptureError: it does not.
    """
    if not captured.changes.defaults:
        return
    with captured.changes.filled():
        again = capture_again()
    if not _same_step(captured, again):
        names = ", ".join(sorted({name for _, name, _ in captured.changes.defaults})[:3])
        raise CaptureError(
            problem=f"the forward sets {names} at its first call, and computes something else from then on",
            advice="call the model once before",
        )


def _same_step(one: Captured, other: Captured) -> bool:
    constants = [list(map(exact_key, each.output_constants)) for each in (one, other)]
    same_output = one.out_spec == other.out_spec and constants[0] == constants[1]
    return same_output and _same_graph(one.graph_module, other.graph_module)


def _same_graph(one: torch.fx.GraphModule, other: torch.fx.GraphModule) -> bool:
    """Whether two graphs run the same operators with the same arguments and constants."""
    if str(one.graph) != str(other.graph):
        return False
    for node in one.graph.find_nodes(op="get_attr"):
        mine, theirs = getattr(one, node.target), getattr(other, node.target)
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
                return False
        elif isinstance(mine, torch.fx.GraphModule) and isinstance(theirs, torch.fx.GraphModule):
            if not _same_graph(mine, theirs):
                return False
        elif mine is not theirs:
            return False
    return True
