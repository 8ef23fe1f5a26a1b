"""Every private name of torch that remat relies on, behind functions of our own.

A torch version that moves one of them breaks this file and no other, with one clear error.
"""

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.errors import UnsupportedTorch
from remat_executor.stride_rules import Layouts
from remat_graph.contexts import context
from remat_graph.errors import text_of


def _private(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise UnsupportedTorch(name=f"{module}.{name}", version=torch.__version__) from None


@attrs.frozen(kw_only=True)
class Joint:
    """A joint forward and backward graph as torch exports it.

    Attributes:
        graph_module: the fx module; placeholders and the output node carry descriptors in ``meta["desc"]``.
        aliases: per flat output, the name of torch's output type (``non_alias``, ``is_input``, ...).
        reshaped: whether an input's shape or strides change in place.
    """

    graph_module: torch.fx.GraphModule
    aliases: tuple[str, ...]
    reshaped: bool


def past_torch_function() -> contextlib.AbstractContextManager[None]:
    """Within it tensors of a subclass are taken as plain ones, in this thread."""
    disabled: contextlib.AbstractContextManager[None] = _private("torch._C", "DisableTorchFunctionSubclass")()
    return disabled


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler know that the optimizer has stepped, by whatever way."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Let one optimizer step by a function of ours; a scheduler that watches its steps goes on to.

    Args:
        optimizer: the object; its class stays as it is.
        step: takes the optimizer and a closure.
    """

    def stepped(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        mark_stepped(self)
        return step(self, closure)

    method = types.MethodType(stepped, optimizer)
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        stepped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = method  # type: ignore[method-assign]


@context
def step_hooks(optimizer: torch.optim.Optimizer) -> Generator[None, None, None]:
    """Call the hooks that a user registered for an optimizer's steps, before and after."""
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, (), {})
    yield
    for hook in list(optimizer._optimizer_step_post_hooks.values()):
        hook(optimizer, (), {})


@context
def fake_tensors() -> Generator[Callable[[torch.Tensor, torch.device], torch.Tensor], None, None]:
    """A function that makes a tensor of the same layout on a device, without memory."""
    mode = _private("torch._subclasses.fake_tensor", "FakeTensorMode")(allow_non_fake_inputs=True)

    def fake(like: torch.Tensor, device: torch.device) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        return made.requires_grad_(like.requires_grad) if like.is_leaf else made

    yield fake


@context
def _as_if_compiling() -> Generator[None, None, None]:
    """Hugging Face mask code branches on data unless it believes that it is being compiled."""
    compiler = torch.compiler
    if not hasattr(compiler, "_is_compiling_flag"):
        raise UnsupportedTorch(name="torch.compiler._is_compiling_flag", version=torch.__version__)
    before, ask, me = compiler._is_compiling_flag, compiler.is_compiling, threading.get_ident()

    def is_compiling() -> bool:
        """An optimizer that steps in another thread meanwhile rounds otherwise if it is told so."""
        return ask() if threading.get_ident() == me else before

    compiler._is_compiling_flag = True
    compiler.is_compiling = is_compiling
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler.is_compiling = before, ask


@context
def _as_eager_composes() -> Generator[None, None, None]:
    """Trace what C++ composes as C++ composes it, which is what eager runs.

    Torch's Python decompositions of these differ from it: other kernels, other rounding, an LSTM without its
    dropout between layers, a multilabel margin loss with other numbers (torch 2.13).
    """
    implicit, autograd = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd
    packets = [getattr(torch.ops.aten, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
    sizes = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
    names = [f"upsample_{size}" for size in sizes]
    names += [f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)]
    names += [f"_upsample_{how}2d_aa" for how in ("bilinear", "bicubic", "lanczos")]
    names += ["multilabel_margin_loss_forward", "multi_margin_loss", "hardshrink", "softshrink", "matmul"]
    packets += [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    removed = []
    for packet in packets:
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            for key in (implicit, autograd):
                if key in operator.py_kernels:
                    removed.append((operator, key, operator.py_kernels.pop(key)))
            operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, key, kernel in removed:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


@context
def _with_careful_fake_cache() -> Generator[None, None, None]:
    """Infer anew each result of which torch's cache forgets something, and each that others put there.

    A cached result has storages of its own, one for each tensor, as large as that tensor shows: wrong where
    outputs share one, and where an op copies a whole storage of which its argument shows a part. What is
    inferred is put right as well (`layouts`).
    """
    mode = _private("torch._subclasses.fake_tensor", "FakeTensorMode")
    not_cached = _private("torch._subclasses.fake_tensor", "_BypassDispatchCache")
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
        layouts = Layouts(_private("torch.utils._mode_utils", "no_dispatch"))

        def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            return layouts.corrected(func, args, kwargs, infer(func, types, args, kwargs))

        def make_entry_if_whole(state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
            if not _is_remembered_whole(func, args, kwargs, output):
                raise not_cached("a storage is shared or shown in part")
            return make_entry(state, key, func, args, kwargs, output)

        self._cached_dispatch_impl, self._make_cache_entry = dispatch, make_entry_if_whole

    mode.__init__ = build_with_careful_cache
    mode.cache = {}
    logger.setLevel(logging.CRITICAL)  # it prints at length what `capture` says in one line
    try:
        yield
    finally:
        mode.__init__ = build
        mode.cache = entries
        logger.setLevel(level)


def _is_remembered_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> bool:
    """Whether the cache can make a result again, which it does in one of three ways.

    It hands back an argument, makes a view of the only one, or makes each tensor a new storage of its own.
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
    """Whether an op's result gets a storage as large as its first argument's, whatever that shows of it."""
    return operator.startswith("aten.copy.") or "_scatter." in operator


class _WatchedGenerator:
    """Stands for a generator where torch's functions look it up; tells before it is set."""

    def __init__(self, generator: torch.Generator, tell: Callable[[str], None]) -> None:
        self._generator, self._tell, self._thread = generator, tell, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        sets = ("manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state")
        watched = name in sets and threading.get_ident() == self._thread  # others may do as they like
        if watched and not _caller().startswith(("torch._dynamo", "torch._functorch", "torch._inductor")):
            self._tell(name)
        return getattr(self._generator, name)


def _caller() -> str:
    """Name of the module that called a function of torch's for generators; a compiler keeps states itself."""
    frame: Any = sys._getframe(2)
    between = (
        "torch.random",
        "torch.cuda.random",
        "contextlib",
        "torch._compile",
        "torch._dynamo.eval_frame",
    )
    while frame.f_back is not None and frame.f_globals.get("__name__") in between:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


@context
def watched_generators(tell: Callable[[str], None]) -> Generator[None, None, None]:
    """Tell when a function of torch's is about to seed a default generator or to set its state."""
    device = torch.accelerator.current_accelerator()
    owners: list[Any] = [torch, torch.random]
    before: dict[Any, Any] = {owner: owner.default_generator for owner in owners}
    watched: Any = _WatchedGenerator(torch.default_generator, tell)
    of_device: Any = torch.get_device_module(device) if device is not None else None
    several = getattr(of_device, "default_generators", ())
    for owner in owners:
        owner.default_generator = watched
    if several:
        of_device.default_generators = tuple(_WatchedGenerator(g, tell) for g in several)
    try:
        yield
    finally:
        for owner in owners:
            owner.default_generator = before[owner]
        if several:
            of_device.default_generators = several


def export_joint(module: torch.nn.Module, tensors: tuple[torch.Tensor, ...]) -> Joint:
    """Trace the forward and backward of `module(*tensors)` on fake tensors."""
    export = _private("torch._functorch.aot_autograd", "aot_export_joint_with_descriptors")
    with (
        contextlib.ExitStack() as stack,
        _as_if_compiling(),
        _as_eager_composes(),
        _with_careful_fake_cache(),
        without_code(),
        _private("torch._functorch.config", "patch")(
            {
                "backward_pass_autocast": "off",  # not under the forward's: eager calls it after leaving that
                "decompose_custom_triton_ops": False,  # eager runs them whole
            }
        ),
    ):
        joint = export(stack, module, tensors)
        found = joint._aot_state.fw_metadata
        return Joint(
            graph_module=joint.graph_module,
            aliases=tuple(o.output_type.name for o in found.output_info),
            reshaped=any(i.mutates_metadata for i in found.input_info),
        )


def without_code() -> contextlib.AbstractContextManager[None]:
    """Let torch write a graph's Python code when it is first read, which is never while graphs are made."""
    lazy: contextlib.AbstractContextManager[None] = _private(
        "torch.fx._lazy_graph_module", "_use_lazy_graph_module"
    )(True)
    return lazy


def read_later(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """An fx module that writes its Python code when that is first read or called."""
    module: torch.fx.GraphModule = _private("torch.fx._lazy_graph_module", "_LazyGraphModule")({}, graph)
    return module


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and the structure that `unflatten` takes."""
    leaves, spec = _private("torch.utils._pytree", "tree_flatten")(tree)
    return leaves, spec


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """Put leaves back into their containers."""
    return _private("torch.utils._pytree", "tree_unflatten")(leaves, spec)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors share while they share a storage; valid while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor has been written in place."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # one is an inference tensor, which keeps no count
        return [0 if t.is_inference() else t._version for t in tensors]


def layout_guard(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """A quick check that tensors have the type, dtype, device, shape, strides and requires_grad of now."""
    guard_class = _private("torch._C._dynamo.guards", "TensorGuards")
    guard = guard_class(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    )
    return functools.partial(guard.check, *tensors)


def backward_keeps_graph() -> bool:
    """Whether the backward under way was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def transformed() -> str | None:
    """What is under way that changes what autograd would do, unknown to any plan; None if nothing is."""
    if _private("torch._C._functorch", "peek_interpreter_stack")() is not None:
        return "a transform of torch.func is under way"
    if _private("torch.autograd.forward_ad", "_current_level") >= 0:
        return "forward-mode differentiation is under way"
    if _private("torch._C._autograd", "_top_saved_tensors_default_hooks")(True) is not None:
        return "hooks for saved tensors are active"
    return None


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that hold the hooks which are called in a step."""

READ_REGISTRIES = ("_parameters", "_buffers", "_modules", *HOOKS)
"""Attributes that every module has and that a step depends on."""


def hook_registries(module: torch.nn.Module) -> list[dict[int, Any]]:
    """What holds the hooks that are registered on this module itself and called in a step."""
    return [getattr(module, name) for name in HOOKS]


def global_module_hooks() -> bool:
    """Whether hooks are registered for all modules."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(_private("torch.nn.modules.module", f"_global_{kind}_hooks") for kind in kinds)


def is_data_dependent(error: Exception) -> bool:
    """Whether capture stopped because a Python branch depends on a tensor's values."""
    names = ("DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException")
    return any(name in (type(error).__name__, *(c.__name__ for c in type(error).__mro__)) for name in names)


def has_dynamic_shape(error: Exception) -> bool:
    """Whether that is since the size of a result depends on a tensor's values."""
    return any(c.__name__ == "DynamicOutputShapeException" for c in type(error).__mro__)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocator, of the CPU or of a device, had nothing left."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in text_of(error)


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor only has a layout: on the meta device, or fake."""
    return tensor.is_meta or isinstance(tensor, _private("torch._subclasses.fake_tensor", "FakeTensor"))


def is_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether two objects are one generator: operators are given another object of Python's."""
    return bool(one._cdata == other._cdata)  # type: ignore[attr-defined]


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors, and Python's own object, hold a tensor's storage."""
    count: int = _private("torch._C", "_storage_Use_Count")(tensor.untyped_storage()._cdata)
    return count


@functools.cache
def _profilers_watcher() -> tuple[Any, Any] | None:
    """What finds the profiler's object that has a thread, and what ends that; None where there are none."""
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        with contextlib.suppress(OSError, AttributeError):
            loaded = ctypes.CDLL(str(library))
            instance, stop = (
                getattr(loaded, f"_ZN9libkineto12ConfigLoader{name}Ev")
                for name in ("8instance", "10stopThread")
            )
            instance.restype, stop.restype, stop.argtypes = ctypes.c_void_p, None, [ctypes.c_void_p]
            return instance, stop
    return None


def end_profilers_thread() -> None:
    """End the thread that the profiler's first session leaves behind, to wait for a tracing daemon's word.

    A process that is forked beside it never ends: its exit waits for that thread, or aborts. With a
    daemon, which ``KINETO_USE_DAEMON`` asks for, it stays.
    """
    found = None if os.environ.get("KINETO_USE_DAEMON") else _profilers_watcher()
    if found is not None:
        instance, stop = found
        stop(instance())


def profiler_running() -> bool:
    """Whether a profiler records in this process; starting a second one silently ends the first."""
    return bool(_private("torch.autograd.profiler", "_is_profiler_enabled"))


def public_forms(operator: Any) -> list[tuple[str, Any]]:
    """Ways to call an operator that read their arguments in C++, as kind and target of fx nodes."""
    name = operator.overloadpacket.__name__
    forms: list[tuple[str, Any]] = []
    if hasattr(torch.Tensor, name):
        forms.append(("call_method", name))
    forms += [
        ("call_function", getattr(space, name)) for space in (torch, torch._C._nn) if hasattr(space, name)
    ]
    return forms


def apply_plainly(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply` where no transform of torch.func is under way, which it would ask of each argument."""
    base: Any = super(torch.autograd.Function, function)
    return base.apply(*args)


def unseen_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which `torch.compile` around it calls as it is."""
    unseen: Callable[..., Any] = _private("torch._dynamo", "disable")(function)
    return unseen


def under_dynamo() -> bool:
    """Whether this was called from a region that `torch.compile` compiles."""
    compiled = _private("torch._dynamo.eval_frame", "__file__")
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == compiled:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def bare(operator: Any) -> Any:
    """An operator's overload without the Python frame around it, named so that fx can print it."""
    if not hasattr(operator, "_op"):
        return operator
    call = functools.partial(operator._op)
    call.__name__ = operator.__name__.replace(".", "_")  # type: ignore[attr-defined]
    call.__module__ = __name__
    return call


_PRECISIONS = (
    ("generic", "all"),
    *(("cuda", kind) for kind in ("matmul", "conv", "rnn")),
    *(("mkldnn", kind) for kind in ("matmul", "conv", "rnn")),
)


def float32_precisions() -> dict[str, str]:
    """How each library computes in float32: ``ieee``, ``tf32`` or ``bf16``.

    The public ways to ask fail where a user has set one library by itself.
    """
    read = _private("torch._C", "_get_fp32_precision_getter")
    found = {f"{library}.{kind}": str(read(library, kind)) for library, kind in _PRECISIONS}
    return {where: "ieee" if precision == "none" else precision for where, precision in found.items()}


def attention_order() -> str:
    """In which order attention's kernels are considered."""
    return str(_private("torch._C", "_get_sdp_priority_order")())


def without_any_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast off on every device."""
    guard: contextlib.AbstractContextManager[None] = _private("torch._C", "_DisableAutocast")()
    return guard


class _Seen(Exception):
    """Ends a call once it is known what it dispatches to."""


def dispatched(call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """What a call reaches the dispatcher with: the operator and its arguments, comparable; nothing runs.

    Returns:
        None if it does not get there, or with tensors that are not among the arguments.
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


def schema_text(target: Any) -> str:
    """An operator's schema as text: name, arguments, results."""
    return str(target._schema)


def inductor_lacks(device_type: str) -> str | None:
    """What Inductor needs on a device and this machine does not have; None if it has all."""
    if device_type != "cpu":
        return None if _private("torch.utils._triton", "has_triton")() else "Triton"
    try:
        _private("torch._inductor.cpp_builder", "get_cpp_compiler")()
    except RuntimeError:
        return "a C++ compiler"
    return None


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """How Inductor wants operators taken apart; random ones stay whole."""
    importlib.import_module("torch._inductor.lowering")  # that of max pooling reads it without importing it
    with _private("torch._inductor.config", "patch")(fallback_random=True):
        table: dict[Any, Callable[..., Any]] = _private(
            "torch._inductor.decomposition", "select_decomp_table"
        )()
    return table


def compile_by_inductor(traced: torch.fx.GraphModule) -> Callable[[list[torch.Tensor]], Any]:
    """Compile a flat graph as it stands, in its order.

    Args:
        traced: a graph of functional ATen operators on fake tensors, which returns a list.

    Returns:
        a function that takes a list of tensors, empties it and frees each after its last use.
    """
    compile_inner = _private("torch._inductor.compile_fx", "compile_fx_inner")
    examples = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
    as_given = {
        "fallback_random": True,
        "reorder_for_peak_memory": False,
        "reorder_for_locality": False,
        "layout_optimization": False,
        "comprehensive_padding": False,
        "triton.cudagraphs": False,
    }
    context = contextlib.nullcontext()
    if examples:  # Inductor keeps what it compiles on disk only if it knows where symbolic sizes would be
        fake_mode = examples[0].fake_mode
        fake_mode.shape_env = (
            fake_mode.shape_env or _private("torch.fx.experimental.symbolic_shapes", "ShapeEnv")()
        )
        context = _private("torch._guards", "tracing")(_private("torch._guards", "TracingContext")(fake_mode))
    with context, _private("torch._inductor.config", "patch")(as_given), torch.no_grad():
        compiled: Callable[[list[torch.Tensor]], Any] = compile_inner(traced, examples)
    return compiled
