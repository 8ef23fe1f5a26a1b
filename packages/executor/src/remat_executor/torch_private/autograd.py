"""Private names of autograd: the running backward, and what changes its effect."""

from typing import Any

import torch

from remat_executor.torch_private.lookup import private_name


def backward_keeps_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def will_accumulate(node: torch.autograd.graph.Node) -> bool:
    """Whether the running backward will run the node that adds to the ``.grad`` of a leaf."""
    try:
        return bool(private_name("torch._C", "_will_engine_execute_node")(node))
    except RuntimeError:  # torch.autograd.grad returns the gradient of this leaf
        return False


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks get the gradient of a tensor before anything else does."""
    return bool(tensor._backward_hooks)


def active_transform() -> str | None:
    """The active transform that changes autograd and that no plan supports; None if there is none."""
    if private_name("torch._C._functorch", "peek_interpreter_stack")() is not None:
        return "a transform of torch.func is active"
    if private_name("torch.autograd.forward_ad", "_current_level") >= 0:
        return "forward-mode differentiation is active"
    if private_name("torch._C._autograd", "_top_saved_tensors_default_hooks")(True) is not None:
        return "hooks for saved tensors are active"
    return None


def apply_plainly(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply` without its check of each argument for transforms of torch.func."""
    base: Any = super(torch.autograd.Function, function)
    return base.apply(*args)
