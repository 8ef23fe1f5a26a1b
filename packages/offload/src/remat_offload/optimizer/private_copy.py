"""Step some of an optimizer's parameters, or pieces of one, with the kernels that its user chose.

A shadow is an object of the user's class that shares the attributes of the user's object, but has parameters
and state of its own. The class's ``step`` works on it as on any small optimizer, so that whatever it is,
foreach, fused or somebody's subclass, it runs unchanged, on what the shadow holds.

Step hooks are not called: a hook belongs to a step of the whole, whoever takes it.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

State = dict[str, Any]


def shallow_copy(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """An object of the optimizer's class with its attributes, no state, and no hooks.

    Args:
        optimizer: the user's.
        groups: its parameter groups, each with all settings.
    """
    replica = object.__new__(type(optimizer))
    # What unpickling does: torch gives an object that comes without hooks new ones, which are empty.
    blank = {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": list(groups)}
    Optimizer.__setstate__(replica, blank)
    for name, value in vars(optimizer).items():
        vars(replica).setdefault(name, value)
    return replica


def private_copy(optimizer: Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """A shadow that shares nothing that its steps could change, and from which no real parameter is reached.

    Args:
        optimizer: the user's.
        group: the one group it has: a copy of one of the user's, with other parameters.
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
    """Let the class step a shadow."""
    function: Any = type(replica).step
    if getattr(function, "hooked", False):  # torch's wrapper, which calls the hooks of all optimizers
        function = function.__wrapped__
    function(replica)


def step_tensor(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    data: torch.Tensor,
    grad: torch.Tensor,
    state: State | None,
) -> State | None:
    """Step one tensor as if it were a parameter.

    Args:
        optimizer: the user's; not changed.
        settings: those of the parameter's group.
        data: changed in place.
        grad: its gradient, of the same shape, dtype and device.
        state: what the optimizer keeps for it, ``None`` if nothing yet; may be changed in place.

    Returns:
        What the optimizer keeps for it now.
    """
    stand_in = torch.nn.Parameter(data.detach())
    stand_in.grad = grad
    replica = shallow_copy(optimizer, [{**settings, "params": [stand_in]}])
    if state is not None:
        replica.state[stand_in] = state
    step(replica)
    return replica.state.get(stand_in)


def narrowed(group: Mapping[str, Any], instead: Mapping[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """A group with the settings of this moment and only some of its parameters.

    Args:
        group: the user's.
        instead: those parameters, each with the tensor that takes its place.
    """
    chosen = [index for index, param in enumerate(group["params"]) if param in instead]
    narrow = {**group, "params": [instead[group["params"][index]] for index in chosen]}
    if "param_names" in group:
        narrow["param_names"] = [group["param_names"][index] for index in chosen]
    return narrow


def _copied(value: Any, known: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, known)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return value  # a handle: a file, say, or a process group
