"""Step some of an optimizer's parameters, or chunks of one, with the kernels that its user has chosen.

A shallow copy is an object of the user's class that shares the attributes of the user's object, but has its
own parameters and state. The class's ``step`` works on it as on any small optimizer, so that every class
(foreach, fused, or a user's subclass) runs unchanged on the parameters of the copy.

Step hooks are not called: a hook belongs to a step of the whole.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

State = dict[str, Any]


def shallow_copy(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Return an object of the optimizer's class with its attributes and these groups; no state, no hooks."""
    replica = object.__new__(type(optimizer))
    # As in unpickling: torch adds empty collections of hooks to an object without any.
    blank = {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": list(groups)}
    Optimizer.__setstate__(replica, blank)
    for name, value in vars(optimizer).items():
        vars(replica).setdefault(name, value)
    return replica


def private_copy(optimizer: Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """Return a copy of an optimizer with one group, which shares nothing that steps could change.

    The group has the settings of one of the user's groups, and other parameters.
    """
    replica = shallow_copy(optimizer, [])
    nothing = torch.nn.Parameter(torch.empty(0))
    known: dict[int, Any] = {id(p): nothing for each in optimizer.param_groups for p in each["params"]}
    known |= {id(p): p for p in group["params"]}
    known |= {id(optimizer): replica, id(optimizer.state): replica.state, id(optimizer.param_groups): []}
    own = {name: _copied(value, known) for name, value in group.items()}
    vars(replica).update(
        {name: _copied(value, known) for name, value in vars(replica).items() if name != "state"}
    )
    vars(replica)["param_groups"] = [own]
    return replica


def step(replica: Optimizer) -> None:
    """Step a copy by its class, without hooks."""
    function: Any = type(replica).step
    if getattr(function, "hooked", False):  # torch's wrapper, which calls hooks
        function = function.__wrapped__
    function(replica)


def step_tensor(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    data: torch.Tensor,
    grad: torch.Tensor,
    state: State | None,
) -> State | None:
    """Step one tensor in place as if it were a parameter; return its new state.

    The user's optimizer is not changed; `state`, ``None`` before the first step, may be.
    """
    substitute = torch.nn.Parameter(data.detach())
    substitute.grad = grad
    replica = shallow_copy(optimizer, [{**settings, "params": [substitute]}])
    if state is not None:
        replica.state[substitute] = state
    step(replica)
    return replica.state.get(substitute)


def state_like(pattern: Mapping[str, Any], shape: Sequence[int], param: torch.Tensor) -> State:
    """Return a state for a parameter after that of another one, whose shape is `shape`.

    A state of that shape gets the shape of `param`, filled with its first element. This serves classes that
    create states in their constructor alone, as Adagrad does in torch 2.11: a new parameter has none.
    """

    def like(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape != torch.Size(shape):
            return value.clone()
        first = value[(0,) * value.dim()].item() if value.numel() else 0
        return torch.full_like(param, first, dtype=value.dtype).detach()

    return {name: like(value) for name, value in pattern.items()}


def narrowed(group: Mapping[str, Any], instead: Mapping[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Return a group with its current settings, restricted to the keys of `instead`, which are replaced."""
    chosen = [index for index, param in enumerate(group["params"]) if param in instead]
    narrow = {**group, "params": [instead[group["params"][index]] for index in chosen]}
    if "param_names" in group:
        narrow["param_names"] = [group["param_names"][index] for index in chosen]
    return narrow


def settings_for(group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return a group with its current settings and one of its parameters; O(1) in theirs without names."""
    found = {**group, "params": [param]}
    if "param_names" in group:
        place = next(place for place, each in enumerate(group["params"]) if each is param)
        found["param_names"] = [group["param_names"][place]]
    return found


def _copied(value: Any, known: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, known)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return value  # a handle, such as a file or a process group
