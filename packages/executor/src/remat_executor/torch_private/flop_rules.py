"""Torch's rules for counting FLOPs, as its newer versions have them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.flop_counter import flop_registry

from remat_executor.torch_private.dispatch import argument_names


def flop_rule(packet: Any) -> Callable[..., Any] | None:
    """The rule for an operator, called with its arguments and `out_val`, the result; None without one."""
    rule = flop_registry.get(packet)
    if rule is None or not str(packet).startswith("aten._scaled_dot_product"):
        return rule
    return partial(_of_attention, rule, argument_names(packet.default).index("query"))


def _of_attention(rule: Callable[..., Any], place: int, /, *args: Any, **kwargs: Any) -> Any:
    """Count as many heads of keys and values as of queries, which share them.

    The rules of torch 2.11 end in an error where there are fewer, as in grouped-query attention.

    Args:
        rule: torch's.
        place: that of the queries among the arguments; keys and values follow them.
        *args: of the operator.
        **kwargs: of the operator, and its result.
    """
    queries, *shared = (tensor.shape for tensor in args[place : place + 3])
    heads = queries[1]
    widened = [(batch, heads, *sizes) for batch, _, *sizes in shared]
    return rule(*args[: place + 1], *widened, *args[place + 3 :], **kwargs)
