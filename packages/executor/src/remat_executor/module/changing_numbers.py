"""Which Python numbers among the arguments are inputs of the plans, because they changed between calls."""

from collections.abc import Mapping
from typing import Any

import attrs

from remat_executor.capture.captured import Captured
from remat_executor.capture.number_inputs import NumberIsRead, same_operators
from remat_executor.guards.signature import Signature
from remat_executor.inspection.tensors import Tensors, called_with, is_number
from remat_executor.torch_private.pytrees import unflatten


@attrs.define(kw_only=True, eq=False)
class ChangingNumbers:
    """The numbers that became inputs, and those that cannot, by the structure of the arguments.

    Attributes:
        inputs: leaves that are inputs of the plans.
        constants: leaves whose values the forward reads: each value has a plan of its own.
    """

    inputs: dict[Any, frozenset[int]] = attrs.field(factory=dict)
    constants: dict[Any, frozenset[int]] = attrs.field(factory=dict)

    def candidates(self, before: Signature | None, now: Signature, tensors: Tensors) -> frozenset[int]:
        """The numbers that changed since the last planned call, if nothing else did; empty otherwise."""
        if before is None or attrs.evolve(now, constants=before.constants) != before:
            return frozenset()
        pairs = enumerate(zip(before.constants, now.constants, strict=True))
        changed = frozenset(i for i, (was, new) in pairs if was != new)
        numbers = all(
            is_number(tensors.constants[i]) and before.constants[i][0] is type(tensors.constants[i])
            for i in changed
        )
        known = self.constants.get(tensors.spec, frozenset())
        return changed if numbers and not changed & known else frozenset()

    def as_inputs(self, tensors: Tensors, candidates: frozenset[int]) -> Tensors:
        """The same call with these numbers as inputs too."""
        self.inputs[tensors.spec] = self.inputs.get(tensors.spec, frozenset()) | candidates
        return _called_again(tensors, self.inputs)

    def as_constants(self, tensors: Tensors) -> Tensors:
        """The same call without numbers as inputs, unless they may be."""
        return _called_again(tensors, self.inputs) if tensors.numbers else tensors

    def refuse(self, tensors: Tensors) -> None:
        """Leave the numbers that are inputs of this call constants from now on."""
        self.inputs[tensors.spec] = self.inputs[tensors.spec] - tensors.numbers
        self.constants[tensors.spec] = self.constants.get(tensors.spec, frozenset()) | tensors.numbers

    def copied(self) -> "ChangingNumbers":
        """The same, to be changed separately."""
        return ChangingNumbers(inputs={**self.inputs}, constants={**self.constants})


def _called_again(tensors: Tensors, numbers: Mapping[Any, frozenset[int]]) -> Tensors:
    leaves = tensors.filled_leaves(tensors.arguments)
    for i in tensors.numbers:
        leaves[i] = leaves[i].item()
    args, kwargs = unflatten(leaves, tensors.spec)
    return called_with(tensors.owned, args, kwargs, numbers)


def check_same_operators(captured: Captured, tensors: Tensors, constant: Captured) -> None:
    """Check that a step with numbers as inputs is the step in which they are constants.

    Raises:
        NumberIsRead: it runs other operators.
    """
    first = len(tensors.parameters) + len(tensors.buffers)
    places = (tensors.leaves[i] for i in tensors.numbers)
    numbers = {captured.externals[first + place] for place in places if place is not None}
    if not same_operators(constant.graph_module.graph, captured.graph_module.graph, numbers):
        raise NumberIsRead(problem="a branch reads a number's value", advice="pass a tensor")
