"""`Stepper` steps some of an optimizer's parameters, or one in chunks, bit-identical to one plain step.

The user's optimizer keeps the state: after every parameter's step ``optimizer.state`` holds what a plain step
leaves, so that state dicts, schedulers and groups work unchanged. Settings are read when a step begins.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from remat_executor.fork_lock import ForkAwareLock
from remat_offload.errors import StepMisuse
from remat_offload.optimizer.chunked_step import ChunkedStep, store_state
from remat_offload.optimizer.chunking import ALIGNMENT, CHUNK_NUMEL, split_elements
from remat_offload.optimizer.draw_guard import is_from_torch
from remat_offload.optimizer.private_copy import State, narrowed, settings_for, shallow_copy, step
from remat_offload.optimizer.profile import Kind, Profile, StateTensor, layout, profile_optimizer
from remat_offload.tensor_memory import flat_view, memory_order, share_order

Memory = Callable[[torch.Tensor, StateTensor], torch.Tensor]

_UNPROFILED = ("params", "param_names", "lr", "initial_lr")  # do not change how a group is stepped


class Stepper:
    """Steps an optimizer in parts.

    A method's argument `like` is a tensor with the shape, layout, dtype and device of what is stepped instead
    of the parameter: its fp32 master, its copy on the host, or a meta tensor for planning. The parameter
    itself is the default.

    Threads may step different parameters concurrently if `kind` was called for each before.

    Args:
        optimizer: the user's optimizer. Its hooks are not called.
        chunk_numel: the most elements of a chunk, a multiple of 64.
        memory: returns memory for a state of its parameter's shape and, for parameters that are stepped
            whole, for any state with dimensions: a contiguous tensor of its dtype and number of elements. It
            may be called again until the state exists. Existing states move there now. By default states
            stay where the optimizer creates them.

    Raises:
        RefusedOptimizer: steps in parts would not give the results of one plain step.
        StepMisuse: `chunk_numel` is not a positive multiple of 64.
    """

    def __init__(
        self, optimizer: Optimizer, *, chunk_numel: int = CHUNK_NUMEL, memory: Memory | None = None
    ) -> None:
        if chunk_numel <= 0 or chunk_numel % ALIGNMENT:
            raise StepMisuse(problem=f"chunk_numel is {chunk_numel}; give a positive multiple of {ALIGNMENT}")
        self._optimizer, self._chunk_numel, self._memory = optimizer, chunk_numel, memory
        self._lock = ForkAwareLock("the profile of an optimizer")
        self._groups: dict[torch.Tensor, int] = {}
        self._profiles: dict[tuple[torch.Tensor, int, torch.dtype, str], Profile] = {}
        self._by_settings: dict[tuple[str, int, torch.dtype, str], Profile] = {}
        self._switched: dict[tuple[int, torch.dtype, str, int], set[frozenset[str]]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                self.kind(param)
                self.adopt(param)

    def kind(self, param: torch.Tensor, like: torch.Tensor | None = None) -> Kind:
        """Return how a parameter may be stepped; the optimizer is profiled once for similar parameters."""
        return self._profile(param, param if like is None else like).kind

    def layout(self, param: torch.Tensor, like: torch.Tensor | None = None) -> tuple[StateTensor, ...]:
        """Return the tensors that steps will keep for a parameter, without allocating them."""
        like = param if like is None else like
        return layout(self._profile(param, like), self._optimizer, self._group(param), like)

    def chunks(self, param: torch.Tensor, like: torch.Tensor | None = None) -> list[slice]:
        """Return the chunks that a parameter is stepped in, as slices of its elements in the order of memory.

        On a CPU they depend on the number of threads of kernels in the calling thread: a step of the whole
        is assumed to use as many.
        """
        like = param if like is None else like
        if self.kind(param, like) is Kind.WHOLE or memory_order(like) is None:
            return [slice(0, like.numel())]
        distributed = like.device.type == "cpu" and not self._group(param).get("fused")
        return split_elements(like.numel(), self._chunk_numel, torch.get_num_threads() if distributed else 1)

    def adopt(self, param: torch.Tensor) -> None:
        """Move a parameter's existing state, for example a loaded one, to its place."""
        if param in self._optimizer.state:
            self._move_state(param, {}, self._optimizer.state[param])

    def step(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor] | None = None,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Step whole parameters together, in place, as if only they had gradients.

        Args:
            params: some of the optimizer's.
            grads: their gradients; by default each one's ``grad``. Parameters without gradient are skipped.
            scale: a scalar tensor; gradients are multiplied by it first, in place.

        Raises:
            StepMisuse: a parameter is not of this optimizer.
        """
        given = [p.grad for p in params] if grads is None else grads
        instead: dict[torch.Tensor, torch.Tensor] = {}
        for param, grad in zip(params, given, strict=True):
            self._group(param)
            if grad is None:
                continue
            if scale is not None:
                grad.mul_(scale.to(grad.device))
            instead[param] = param
            if grad is not param.grad:
                instead[param] = torch.nn.Parameter(param.detach())
                instead[param].grad = grad
        groups = [narrowed(group, instead) for group in self._optimizer.param_groups]
        replica = shallow_copy(self._optimizer, [group for group in groups if group["params"]])
        state = self._optimizer.state
        before = {param: dict(state[param]) for param in instead if param in state}
        replica.state.update({instead[param]: state[param] for param in before})
        step(replica)
        for param, substitute in instead.items():
            if substitute in replica.state:
                kept = replica.state[substitute]
                self._move_state(param, before.get(param, {}), kept)
                state[param] = kept

    def step_by_chunks(
        self,
        param: torch.Tensor,
        data: torch.Tensor,
        grad: torch.Tensor,
        *,
        master: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Step one parameter in its place, in chunks if its kind allows; see `prepared`."""
        self.prepared(param, data, grad, master=master, scale=scale)()

    def prepared(
        self,
        param: torch.Tensor,
        data: torch.Tensor,
        grad: torch.Tensor,
        *,
        master: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> Callable[[], None]:
        """Begin a step of one parameter with the current settings; return a function that takes the step.

        Args:
            param: a parameter of the optimizer, whose state and settings are used.
            data: the tensor to update: the parameter itself, or a tensor with its values.
            grad: its gradient.
            master: its values in a wider dtype. The master is stepped, with the gradient and states in that
                dtype, and `data` is rounded from it.
            scale: a scalar tensor; `grad` is multiplied by it first, in place.

        Raises:
            StepMisuse: shapes differ, or the parameter is not of this optimizer.
        """
        stepped = data if master is None else master
        if not data.shape == grad.shape == stepped.shape:
            shapes = [tuple(t.shape) for t in (data, grad, stepped)]
            raise StepMisuse(problem=f"data, gradient and master have shapes {shapes}; they must be the same")
        chunked = self.begin(param, stepped)

        def take() -> None:
            states = {name: chunked.place(name) for name in chunked.names}
            chunks = self.chunks(param, stepped)
            if len(chunks) == 1 or not share_order(data, grad, stepped, *states.values()):
                chunked.step(data, grad, states, master=master, scale=scale)
            else:
                flats = {name: flat_view(state) for name, state in states.items()}
                flat_data, flat_grad, flat_stepped = flat_view(data), flat_view(grad), flat_view(stepped)
                for chunk in chunks:
                    chunked.step(
                        flat_data[chunk],
                        flat_grad[chunk],
                        {name: state[chunk] for name, state in flats.items()},
                        master=None if master is None else flat_stepped[chunk],
                        scale=scale,
                    )
            chunked.finish()

        return take

    def begin(self, param: torch.Tensor, like: torch.Tensor | None = None) -> ChunkedStep:
        """Begin a step whose chunks the caller brings to where they are stepped: one for each of ``chunks``.

        Raises:
            StepMisuse: the parameter is not of this optimizer, or its state has other dtypes than `like`
                needs.
        """
        like = param if like is None else like
        profile = self._profile(param, like)
        self._check_switches(param, like, profile)
        state = self._optimizer.state.get(param, {})
        for each in profile.tensors:
            if each.name in profile.placed and each.name in state and state[each.name].dtype != each.dtype:
                found = f"the state {each.name} is {state[each.name].dtype}, expected is {each.dtype}"
                raise StepMisuse(problem=f"{found}; replace it, or step the tensor that it was made for")

        missing = any(name not in state for name in profile.placed)
        # Found now: the search restores the generators of the process, and chunks run in a lane's thread.
        made = {t.name: t for t in self.layout(param, like)} if missing else {}

        def reserve(name: str) -> torch.Tensor:
            return self._place(param, made[name], like)

        settings = {  # tensors are cloned, since a scheduler may change them in place
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in settings_for(self._group(param), param).items()
        }
        return ChunkedStep(self._optimizer, param, settings, profile.placed, reserve, like.numel())

    def _check_switches(self, param: torch.Tensor, like: torch.Tensor, profile: Profile) -> None:
        """Profile a class that is not torch's again if settings were turned on or off: noise, for example.

        Raises `RefusedOptimizer` or `StepMisuse` if its steps in parts are not valid any more.
        """
        group = self._group(param)
        turned = frozenset(
            name
            for name, value in group.items()
            if name not in _UNPROFILED and (isinstance(value, torch.Tensor) or value)
        )
        key = (like.dim(), like.dtype, like.device.type, self._groups[param])
        known = self._switched.setdefault(key, set())
        if turned in known:
            return
        if known and not is_from_torch(self._optimizer):
            now = profile_optimizer(self._optimizer, group, param, like)
            if (now.kind, now.tensors) != (profile.kind, profile.tensors):
                raise StepMisuse(
                    problem="changed settings make the optimizer keep other states; build the module again"
                )
        known.add(turned)

    def _move_state(self, param: torch.Tensor, before: State, after: State) -> None:
        """Move states that a step of the whole has created to their places."""
        if self._memory is None:
            return
        places = {}
        for name in self._profile(param, param).placed:
            if isinstance(value := after.get(name), torch.Tensor):
                new = StateTensor(name=name, shape=tuple(value.shape), dtype=value.dtype)
                places[name] = before[name] if name in before else self._place(param, new, value)
        store_state(after, places, before)
        after.update(places)

    def _place(self, param: torch.Tensor, tensor: StateTensor, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a state, in the layout of the parameter if it has its shape."""
        if self._memory is None:
            if tensor.shape == like.shape:
                return torch.empty_like(like, dtype=tensor.dtype).detach()
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=like.device)
        place, numel = self._memory(param, tensor), math.prod(tensor.shape)
        if not place.is_contiguous() or (place.numel(), place.dtype) != (numel, tensor.dtype):
            given = f"memory() for {tensor.name} gave a {place.dtype} tensor of shape {tuple(place.shape)}"
            raise StepMisuse(problem=f"{given}; give a contiguous {tensor.dtype} one of {numel} elements")
        if tensor.shape == like.shape and memory_order(like) is not None:
            return place.view(-1).as_strided(like.shape, like.stride())
        return place.view(tensor.shape)

    def _group(self, param: torch.Tensor) -> Mapping[str, Any]:
        groups = self._optimizer.param_groups  # load_state_dict replaces them, in the same order
        if param not in self._groups:
            for index, group in enumerate(groups):
                self._groups.update(dict.fromkeys(group["params"], index))
        if param not in self._groups:
            raise StepMisuse(problem=f"a tensor of {tuple(param.shape)} is not a parameter of this optimizer")
        return groups[self._groups[param]]

    def _profile(self, param: torch.Tensor, like: torch.Tensor) -> Profile:
        kind = (like.dim(), like.dtype, like.device.type)
        if (param, *kind) not in self._profiles:
            group = self._group(param)
            settings = repr(sorted((name, value) for name, value in group.items() if name not in _UNPROFILED))
            with self._lock:
                if (settings, *kind) not in self._by_settings:
                    self._by_settings[settings, *kind] = profile_optimizer(
                        self._optimizer, group, param, like
                    )
                self._profiles[param, *kind] = self._by_settings[settings, *kind]
        return self._profiles[param, *kind]


def kind_of(optimizer: Optimizer) -> Kind:
    """Return how an optimizer may be stepped: elementwise if all of its parameters are.

    Raises:
        RefusedOptimizer: steps in parts would not give the results of one plain step.
    """
    stepper = Stepper(optimizer)
    kinds = {stepper.kind(param) for group in optimizer.param_groups for param in group["params"]}
    return Kind.WHOLE if Kind.WHOLE in kinds else Kind.ELEMENTWISE


def state_layout(
    optimizer: Optimizer, param: torch.Tensor, like: torch.Tensor | None = None
) -> tuple[StateTensor, ...]:
    """Return the tensors that an optimizer's steps will keep for a parameter, without allocating them.

    Args:
        optimizer: the user's optimizer.
        param: one of its parameters.
        like: the tensor that is stepped instead, such as an fp32 master; may be on the meta device.

    Raises:
        RefusedOptimizer: steps in parts would not give the results of one plain step.
        StepMisuse: the parameter is not of this optimizer.
    """
    return Stepper(optimizer).layout(param, like)
