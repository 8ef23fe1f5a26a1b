"""Private names of fake tensors, and of the cache of inferred results."""

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from remat_executor.stride_rules import KernelLayouts
from remat_executor.torch_private.lookup import private_name
from remat_executor.torch_private.pytrees import flatten
from remat_executor.torch_private.tensors import storage_id
from remat_graph.contexts import context


@context
def fake_tensors() -> Generator[Callable[[torch.Tensor, torch.device], torch.Tensor], None, None]:
    """A function that makes a tensor of the same layout on a device, without memory; no kernel runs."""
    with with_careful_fake_cache(run_kernels=False):
        mode = private_name("torch._subclasses.fake_tensor", "FakeTensorMode")(allow_non_fake_inputs=True)

        def fake(like: torch.Tensor, device: torch.device) -> torch.Tensor:
            with mode:
                made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
            return made.requires_grad_(like.requires_grad) if like.is_leaf else made

        yield fake


@context
def with_careful_fake_cache(*, run_kernels: bool = True) -> Generator[None, None, None]:
    """Bypass torch's cache of inferred results where it is wrong, and correct layouts (`stride_rules`).

    Args:
        run_kernels: whether kernels may run to find their layouts.

    A cached result has one new storage for each tensor, as large as the tensor shows. That is wrong if
    outputs share a storage, or if an op copies a whole storage of which its argument shows a part.
    """
    mode = private_name("torch._subclasses.fake_tensor", "FakeTensorMode")
    not_cached = private_name("torch._subclasses.fake_tensor", "_BypassDispatchCache")
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    build, entries, level = mode.__init__, getattr(mode, "cache", None), logger.level

    def build_with_careful_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        infer, make_entry = (
            getattr(self, "_cached_dispatch_impl", None),
            getattr(self, "_make_cache_entry", None),
        )
        if infer is None or make_entry is None or entries is None:
            self.cache_enabled = False
            return
        real_mode = private_name("torch.utils._mode_utils", "no_dispatch")
        layouts = KernelLayouts(real_mode if run_kernels else None)

        def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            return layouts.corrected(func, args, kwargs, infer(func, types, args, kwargs))

        def make_entry_if_whole(state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
            if not _is_remembered_whole(func, args, kwargs, output):
                raise not_cached("a storage is shared or shown in part")
            return make_entry(state, key, func, args, kwargs, output)

        self._cached_dispatch_impl, self._make_cache_entry = dispatch, make_entry_if_whole

    try:
        mode.__init__ = build_with_careful_cache
        mode.cache = {}
        logger.setLevel(logging.CRITICAL)  # `capture` reports its messages in one line
        yield
    finally:
        mode.__init__ = build
        mode.cache = entries
        logger.setLevel(level)


def _is_remembered_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> bool:
    """Whether the cache can reproduce a result.

    It can return an argument, make a view of the only argument, or make a new storage for each tensor.
    """
    if copies_storages(str(func)):
        return False
    results = output if isinstance(output, tuple) else (output,)
    given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    made = [t for t in results if isinstance(t, torch.Tensor) and not any(t is a for a in args)]
    if any(t.layout != torch.strided for t in (*made, *given)):
        return False
    storages, others = {storage_id(t) for t in made}, {storage_id(t) for t in given}
    if len(results) == 1 and getattr(func, "is_view", False):
        return storages <= others
    return len(storages) == len(made) and storages.isdisjoint(others) and all(map(_shows_all, made))


def _shows_all(tensor: torch.Tensor) -> bool:
    """Whether a tensor reaches from the first to the last byte of its storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    shown_nbytes = elements * tensor.element_size()
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == shown_nbytes


def copies_storages(operator: str) -> bool:
    """Whether an op's result gets a storage as large as its first argument's whole storage."""
    return operator.startswith("aten.copy.") or "_scatter." in operator


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor only has a layout: on the meta device, or fake."""
    return tensor.is_meta or isinstance(tensor, private_name("torch._subclasses.fake_tensor", "FakeTensor"))
