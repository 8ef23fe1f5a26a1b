"""Private names of nested containers: flatten them to leaves, and restore them."""

from typing import Any

from remat_executor.torch_private.lookup import private_name


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and the structure that `unflatten` takes."""
    leaves, spec = private_name("torch.utils._pytree", "tree_flatten")(tree)
    return leaves, spec


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """Put leaves back into their containers."""
    return private_name("torch.utils._pytree", "tree_unflatten")(leaves, spec)
