"""Private names of autograd: the backward that runs, and what changes what it does."""

from typing import Any

import torch

from remat_executor.torch_private.lookup import private_name


def backward_keeps_graph() -> bool:
    """Whether the backward under way was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def active_transform() -> str | None:
    """What is under way that changes what autograd would do, unknown to any plan; None if nothing is."""
    if private_name("torch._C._functorch", "peek_interpreter_stack")() is not None:
        return "a transform of torch.func is under way"
    if private_name("torch.autograd.forward_ad", "_current_level") >= 0:
        return "forward-mode differentiation is under way"
    if private_name("torch._C._autograd", "_top_saved_tensors_default_hooks")(True) is not None:
        return "hooks for saved tensors are active"
    return None


def apply_plainly(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply` where no transform of torch.func is under way, which it would ask of each argument."""
    base: Any = super(torch.autograd.Function, function)
    return base.apply(*args)
