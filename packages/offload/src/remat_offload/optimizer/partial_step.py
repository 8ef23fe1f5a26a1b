"""Step an optimizer on some of its parameters, and on pieces of one, bit for bit as one step of all.

The user's object keeps the state: after every parameter's step ``optimizer.state`` holds what a plain step
leaves, so that state dicts, schedulers and groups work as ever. Settings are read when a step begins.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from remat_executor.fork_lock import ForkAwareLock
from remat_offload.errors import StepMisuse
from remat_offload.optimizer.chunked_step import ChunkedStep, store_state
from remat_offload.optimizer.chunking import ALIGNMENT, flat_view, memory_order, share_order, split_elements
from remat_offload.optimizer.draw_guard import is_torchs
from remat_offload.optimizer.private_copy import State, narrowed, shallow_copy, step
from remat_offload.optimizer.profile import Kind, Profile, StateTensor, layout, profile_optimizer

Memory = Callable[[torch.Tensor, StateTensor], torch.Tensor]

_PASSING = ("params", "param_names", "lr", "initial_lr")  # what says nothing about how a group is stepped


class Stepper:
    """Steps an optimizer in parts.

    Every method that takes `like` asks about a tensor of that shape, layout, dtype and device in the
    parameter's place: its fp32 master, its copy on the host, or a meta tensor to plan with. The parameter
    itself is the default.

    Threads may step different parameters at once, of the kinds that were asked for before.

    Args:
        optimizer: the user's. Its hooks are not called.
        chunk_numel: the most elements of a piece, a multiple of 64.
        memory: gives the place of a state that has its parameter's shape, and, for parameters that are
            stepped whole, of any with dimensions: a contiguous tensor of its dtype and elements. It may be
            asked again until the state exists. What exists already moves there now. By default state stays
            where the optimizer makes it.

    Raises:
        RefusedOptimizer: the results of stepping it in parts would not be those of one step.
        StepMisuse: the chunk's size is no positive multiple of 64.
    """

    def __init__(
        self, optimizer: Optimizer, *, chunk_numel: int = 1 << 22, memory: Memory | None = None
    ) -> None:
        if chunk_numel <= 0 or chunk_numel % ALIGNMENT:
            raise StepMisuse(
                problem=f"chunks of {chunk_numel} elements; give a positive multiple of {ALIGNMENT}"
            )
        self._optimizer, self._chunk_numel, self._memory = optimizer, chunk_numel, memory
        self._lock = ForkAwareLock("an optimizer that is tried out")
        self._groups: dict[torch.Tensor, int] = {}
        self._profiles: dict[tuple[torch.Tensor, int, torch.dtype, str], Profile] = {}
        self._by_settings: dict[tuple[str, int, torch.dtype, str], Profile] = {}
        self._switched: dict[tuple[int, torch.dtype, str, int], set[frozenset[str]]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                self.kind(param)
                self.adopt(param)

    def kind(self, param: torch.Tensor, like: torch.Tensor | None = None) -> Kind:
        """How a parameter may be stepped. The first of a kind to be asked for is probed."""
        return self._profile(param, param if like is None else like).kind

    def layout(self, param: torch.Tensor, like: torch.Tensor | None = None) -> tuple[StateTensor, ...]:
        """The tensors that steps will keep for a parameter; nothing of its size is allocated."""
        like = param if like is None else like
        return layout(self._profile(param, like), self._optimizer, self._group(param), like)

    def chunks(self, param: torch.Tensor, like: torch.Tensor | None = None) -> list[slice]:
        """The pieces that a parameter is stepped on, of its elements as they lie in memory.

        On a CPU they depend on the number of threads that kernels have, in the thread that asks: a step of
        the whole is taken to have as many.
        """
        like = param if like is None else like
        if self.kind(param, like) is Kind.WHOLE or memory_order(like) is None:
            return [slice(0, like.numel())]
        shared_out = like.device.type == "cpu" and not self._group(param).get("fused")
        return split_elements(like.numel(), self._chunk_numel, torch.get_num_threads() if shared_out else 1)

    def adopt(self, param: torch.Tensor) -> None:
        """Move the state that the optimizer holds, loaded or made at first, to where it is to live."""
        if param in self._optimizer.state:
            self._move_state(param, {}, self._optimizer.state[param])

    def step(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor] | None = None,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Step whole parameters at once, where they are, as if only they had gradients.

        Args:
            params: some of the optimizer's.
            grads: their gradients; by default each one's ``grad``, and those without one are left alone.
            scale: no dimensions; gradients are multiplied with it first, in place.

        Raises:
            StepMisuse: one is not of this optimizer.
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
        for param, stand_in in instead.items():
            if stand_in in replica.state:
                kept = replica.state[stand_in]
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
        """Step one parameter, piece by piece if its kind allows, where its state lives; see `prepared`."""
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
        """A step of one parameter that begins now, with the settings of now, and is taken when called.

        Args:
            param: one of the optimizer's, which names the state and the settings.
            data: what is updated: the parameter itself, or a tensor that holds its values.
            grad: its gradient.
            master: its values in a wider dtype. It is stepped, with the gradient in that dtype and a state
                for it, and `data` is rounded from it.
            scale: no dimensions; `grad` is multiplied with it first, in place.

        Raises:
            StepMisuse: tensors do not fit together, or it is not of this optimizer.
        """
        stepped = data if master is None else master
        if not data.shape == grad.shape == stepped.shape:
            shapes = [tuple(t.shape) for t in (data, grad, stepped)]
            raise StepMisuse(problem=f"data, gradient and master of shapes {shapes}; they must be the same")
        chunked = self.begin(param, stepped)

        def take() -> None:
            states = {name: chunked.place(name) for name in chunked.names}
            cut = self.chunks(param, stepped)
            if len(cut) == 1 or not share_order(data, grad, stepped, *states.values()):
                chunked.step(data, grad, states, master=master, scale=scale)
            else:
                flats = {name: flat_view(state) for name, state in states.items()}
                flat_data, flat_grad, flat_stepped = flat_view(data), flat_view(grad), flat_view(stepped)
                for piece in cut:
                    chunked.step(
                        flat_data[piece],
                        flat_grad[piece],
                        {name: state[piece] for name, state in flats.items()},
                        master=None if master is None else flat_stepped[piece],
                        scale=scale,
                    )
            chunked.finish()

        return take

    def begin(self, param: torch.Tensor, like: torch.Tensor | None = None) -> ChunkedStep:
        """Begin a step whose pieces the caller brings where they are stepped: one for each of ``chunks``.

        Raises:
            StepMisuse: it is not of this optimizer.
        """
        like = param if like is None else like
        profile = self._profile(param, like)
        self._check_switches(param, like, profile)
        state = self._optimizer.state.get(param, {})
        for each in profile.tensors:
            if each.name in profile.placed and each.name in state and state[each.name].dtype != each.dtype:
                found = f"the state {each.name} is {state[each.name].dtype}, wanted is {each.dtype}"
                raise StepMisuse(problem=f"{found}; replace it, or step what it was made for")

        missing = any(name not in state for name in profile.placed)
        # Found out now, by a step of a stand-in that keeps the generators: pieces run in a lane's thread.
        made = {t.name: t for t in self.layout(param, like)} if missing else {}

        def reserve(name: str) -> torch.Tensor:
            return self._place(param, made[name], like)

        settings = {
            name: value.clone() if isinstance(value, torch.Tensor) else value  # a scheduler may fill it anew
            for name, value in narrowed(self._group(param), {param: param}).items()
        }
        return ChunkedStep(self._optimizer, param, settings, profile.placed, reserve, like.numel())

    def _check_switches(self, param: torch.Tensor, like: torch.Tensor, profile: Profile) -> None:
        """Look again at a class of the user's whose settings were turned on or off: noise from now on, say.

        Raises:
            RefusedOptimizer: the results of stepping it in parts would not be those of one step any more.
            StepMisuse: it keeps other states now.
        """
        group = self._group(param)
        turned = frozenset(
            name
            for name, value in group.items()
            if name not in _PASSING and (isinstance(value, torch.Tensor) or value)
        )
        key = (like.dim(), like.dtype, like.device.type, self._groups[param])
        known = self._switched.setdefault(key, set())
        if turned in known:
            return
        if known and not is_torchs(self._optimizer):
            now = profile_optimizer(self._optimizer, group, param, like)
            if (now.kind, now.tensors) != (profile.kind, profile.tensors):
                raise StepMisuse(
                    problem="settings were changed so that other states are kept; build the module anew"
                )
        known.add(turned)

    def _move_state(self, param: torch.Tensor, before: State, after: State) -> None:
        """Bring what a step of the whole made to where it is to live."""
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
        """Where a state is to live, laid out as the tensor whose shape it has."""
        if self._memory is None:
            if tensor.shape == like.shape:
                return torch.empty_like(like, dtype=tensor.dtype).detach()
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=like.device)
        place, numel = self._memory(param, tensor), math.prod(tensor.shape)
        if not place.is_contiguous() or (place.numel(), place.dtype) != (numel, tensor.dtype):
            given = f"memory for {tensor.name} is a {place.dtype} tensor of shape {tuple(place.shape)}"
            raise StepMisuse(problem=f"{given}; give a contiguous {tensor.dtype} one of {numel} elements")
        if tensor.shape == like.shape and memory_order(like) is not None:
            return place.view(-1).as_strided(like.shape, like.stride())
        return place.view(tensor.shape)

    def _group(self, param: torch.Tensor) -> Mapping[str, Any]:
        groups = self._optimizer.param_groups  # load_state_dict makes them anew, in the same order
        if param not in self._groups:
            for index, group in enumerate(groups):
                self._groups.update(dict.fromkeys(group["params"], index))
        if param not in self._groups:
            raise StepMisuse(problem=f"a tensor of {tuple(param.shape)} is no parameter of this optimizer")
        return groups[self._groups[param]]

    def _profile(self, param: torch.Tensor, like: torch.Tensor) -> Profile:
        kind = (like.dim(), like.dtype, like.device.type)
        if (param, *kind) not in self._profiles:
            group = self._group(param)
            settings = repr(sorted((name, value) for name, value in group.items() if name not in _PASSING))
            with self._lock:
                if (settings, *kind) not in self._by_settings:
                    self._by_settings[settings, *kind] = profile_optimizer(
                        self._optimizer, group, param, like
                    )
                self._profiles[param, *kind] = self._by_settings[settings, *kind]
        return self._profiles[param, *kind]


def kind_of(optimizer: Optimizer) -> Kind:
    """How an optimizer may be stepped: elementwise if every one of its parameters is.

    Raises:
        RefusedOptimizer: the results of stepping it in parts would not be those of one step.
    """
    stepper = Stepper(optimizer)
    kinds = {stepper.kind(param) for group in optimizer.param_groups for param in group["params"]}
    return Kind.WHOLE if Kind.WHOLE in kinds else Kind.ELEMENTWISE


def state_layout(
    optimizer: Optimizer, param: torch.Tensor, like: torch.Tensor | None = None
) -> tuple[StateTensor, ...]:
    """The tensors that an optimizer's steps will keep for a parameter; nothing of its size is allocated.

    Args:
        optimizer: the user's.
        param: one of its parameters.
        like: what is stepped in its place, such as an fp32 master; may be on the meta device.

    Raises:
        RefusedOptimizer: the results of stepping it in parts would not be those of one step.
        StepMisuse: it is not of this optimizer.
    """
    return Stepper(optimizer).layout(param, like)
