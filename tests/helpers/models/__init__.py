"""The models on which remat tests itself: each one small, seeded, and built without a download.

A case is a model in train mode (dropout on where its family has any), a batch, and the scalar to
differentiate. Activations are at least 80 % of the peak of one unplanned forward and backward, so that a
budget has something to bite on, and no single op holds more than half of it; a step takes well below half a
second on two CPU cores. Families are the ones people train (transformers and torchvision classes,
narrowed), and small networks of our own for what those do not show: tied, shared and frozen weights,
mutated buffers, aliased and nested outputs, complex numbers, mixed dtypes, parametrizations, models that
already checkpoint or autocast themselves.

    case = get_case("gpt2")
    model, (args, kwargs) = case.build(), case.sample(0)
    case.loss(model(*args, **kwargs)).backward()

transformers and torchvision are imported by the cases that need them, when they are built.
"""

from tests.helpers.models.case import ModelCase
from tests.helpers.models.imports import import_torchvision, import_transformers
from tests.helpers.models.networks import Block
from tests.helpers.models.registry import CASES, CI_CASES, LARGE_CASES, get_case

__all__ = [
    "CASES",
    "CI_CASES",
    "LARGE_CASES",
    "Block",
    "ModelCase",
    "get_case",
    "import_torchvision",
    "import_transformers",
]
