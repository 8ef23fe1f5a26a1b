"""Private names of the dispatcher: how an operator can be called, and what a call dispatches to."""

import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.torch_private.lookup import private_name
from remat_executor.torch_private.pytrees import flatten
from remat_graph.contexts import context

_AUTOGRAD_META, _AUTOGRAD_CPU = torch._C.DispatchKey.AutogradMeta, torch._C.DispatchKey.AutogradCPU
_AUTOGRAD_CUDA = torch._C.DispatchKey.AutogradCUDA


def public_forms(operator: Any) -> list[tuple[str, Any]]:
    """Ways to call an operator that parse arguments in C++, as (kind, target) of fx nodes."""
    name = operator.overloadpacket.__name__
    forms: list[tuple[str, Any]] = []
    if hasattr(torch.Tensor, name):
        forms.append(("call_method", name))
    forms += [
        ("call_function", getattr(space, name)) for space in (torch, torch._C._nn) if hasattr(space, name)
    ]
    return forms


def bare(operator: Any) -> Any:
    """An operator's overload without the Python frame around it, with a name that fx can print."""
    if not hasattr(operator, "_op"):
        return operator
    call = functools.partial(operator._op)
    call.__name__ = operator.__name__.replace(".", "_")  # type: ignore[attr-defined]
    call.__module__ = __name__
    return call


class _Seen(Exception):
    """Ends a call at the dispatcher."""


def dispatched(call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """The operator and arguments with which a call reaches the dispatcher, comparable; no kernel runs.

    Returns:
        None if it does not reach the dispatcher, or with tensors that are not arguments of the call.
    """
    given = {id(leaf): place for place, leaf in enumerate(flatten((args, kwargs))[0])}
    found: list[tuple[Any, ...] | None] = []

    def comparable(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return ("tensor", given[id(leaf)])
        return (type(leaf), repr(leaf))

    class Catch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            leaves, spec = flatten((args, kwargs or {}))
            try:
                found.append((func, tuple(map(comparable, leaves)), spec))
            except KeyError:  # a number became a tensor
                found.append(None)
            raise _Seen

    try:
        with torch.no_grad(), Catch():  # type: ignore[no-untyped-call]
            call(*args, **kwargs)
    except _Seen:
        return found[0]
    except (TypeError, RuntimeError, NotImplementedError, AttributeError):
        return None
    return None


@context
def outside_of_modes() -> Generator[None, None, None]:
    """Let calls see real tensors while a trace is active."""
    disable: Any = private_name("torch.utils._python_dispatch", "_disable_current_modes")
    with torch._C.DisableTorchFunction(), disable():
        yield


def selects_cudnn_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    train: bool,
    eps: float,
) -> bool:
    """Whether eager runs cuDNN's kernel for a batch norm of these tensors, which may be fake."""
    if x.device.type != "cuda":
        return False
    select = private_name("torch._C", "_select_batch_norm_backend")
    cudnn = private_name("torch._C", "_BatchNormBackend").Cudnn
    # Torch's binding takes no None, and without both statistics the answer is the same in training.
    given = (weight, weight) if mean is None or variance is None else (mean, variance)
    return bool(select(x, weight, bias, *given, train, eps) == cudnn)


def with_meta_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Let Python functions take the calls of operators on the meta device in a trace, ahead of autograd.

    Args:
        kernels: by overload; each gets in front of its arguments the operator's kernel elsewhere.
    """
    return _with_kernels(kernels, _AUTOGRAD_META, _AUTOGRAD_CPU)


def with_cuda_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Let Python functions take the calls of operators on CUDA in a trace, ahead of autograd.

    Args:
        kernels: by overload; each gets in front of its arguments the operator's own kernel.
    """
    return _with_kernels(kernels, _AUTOGRAD_CUDA, _AUTOGRAD_CUDA)


@context
def _with_kernels(
    kernels: Mapping[Any, Callable[..., Any]], key: Any, own_key: Any
) -> Generator[None, None, None]:
    try:
        for operator, kernel in kernels.items():
            own = functools.partial(_own_kernel, operator, own_key)
            operator.py_kernels[key] = functools.partial(kernel, own)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator in kernels:
            operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()


@context
def registered_on_meta(kernels: Mapping[Any, Callable[..., Any]]) -> Generator[None, None, None]:
    """Give operators kernels on the meta device, if torch has none there.

    Without one, autograd takes an operator apart that can be composed of others.
    """
    library = torch.library.Library("aten", "IMPL")
    known: Any = private_name("torch._C", "_dispatch_has_kernel_for_dispatch_key")
    try:
        for operator, kernel in kernels.items():
            if known(operator.name(), "Meta"):
                continue
            # `library.impl` refuses operators that can be composed.
            library.m.impl(operator.name(), "Meta", kernel, False)  # type: ignore[union-attr]
            operator._dispatch_cache.clear()
        yield
    finally:
        library._destroy()
        for operator in kernels:
            operator._dispatch_cache.clear()


def _own_kernel(operator: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the kernel that an operator has for autograd on the device of a key."""
    instead = operator.py_kernels.get(key)
    try:
        operator.py_kernels.pop(key, None)
        resolved = private_name("torch._ops", "resolve_key")(operator, key)
    finally:
        if instead is not None:
            operator.py_kernels[key] = instead
    kernel = operator.py_kernels.get(resolved)
    return operator._op_dk(resolved, *args, **kwargs) if kernel is None else kernel(*args, **kwargs)


def not_as_on_meta() -> tuple[Any, ...]:
    """The overloads that are composed of others on the meta device and not on the CPU, or the reverse."""
    resolve = private_name("torch._ops", "resolve_key")
    names = private_name("torch._C", "_dispatch_get_registrations_for_dispatch_key")
    composed = _overloads(names("CompositeImplicitAutograd"))
    return tuple(op for op in composed if resolve(op, _AUTOGRAD_META) != resolve(op, _AUTOGRAD_CPU))


def autocast_operators() -> tuple[Any, ...]:
    """The overloads that autocast on CUDA casts the arguments of, also in builds without CUDA."""
    return _overloads(
        private_name("torch._C", "_dispatch_get_registrations_for_dispatch_key")("AutocastCUDA")
    )


def _overloads(names: Iterable[str]) -> tuple[Any, ...]:
    """Overloads by their names in the dispatcher, without those that nothing defines."""
    found = []
    for name in names:
        namespace, _, packet = name.partition("::")
        packet, _, overload = packet.partition(".")
        operators = getattr(getattr(torch.ops, namespace), packet, None)
        found.append(getattr(operators, overload or "default", None))
    return tuple(operator for operator in found if operator is not None)


def is_mutable(target: Any) -> bool:
    """Whether a schema of an operator, or of one of its overloads, says that it writes arguments."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(is_mutable(getattr(target, name)) for name in target.overloads())
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def argument_names(operator: Any) -> tuple[str, ...]:
    """The names of an overload's arguments, in order."""
    return tuple(argument.name for argument in operator._schema.arguments)


def schema_text(target: Any) -> str:
    """An operator's schema as a string: name, arguments, results."""
    return str(target._schema)
