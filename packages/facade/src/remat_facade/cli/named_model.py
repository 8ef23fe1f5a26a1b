"""Build a model by its name alone, with random weights, random inputs and a loss; nothing is downloaded.

A class of Hugging Face transformers is built from the defaults of its config. Other functions and classes are
called without arguments, with the arguments that would download weights set to none.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from remat_facade.errors import BadTarget
from remat_graph.errors import shown

_NO_WEIGHTS: Mapping[str, Any] = {"weights": None, "weights_backbone": None, "pretrained": False}
"""The arguments by which torchvision and timm download weights, and the values that forbid it."""


class WithLoss(nn.Module):
    """A model and a loss over its first output: cross entropy of rows of classes, else the mean square."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss."""
        output = self.model(*args, **kwargs)
        leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
        first = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
        if first.dim() == 2:
            return F.cross_entropy(first, first.new_zeros(len(first), dtype=torch.int64))
        return first.float().square().mean()


def built(
    name: str, factory: Callable[..., Any], shape: tuple[int, ...], batch: int, *, meta: bool = False
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model that a function or class makes, in train mode, and inputs.

    Args:
        name: of the target, for messages.
        factory: the function or class.
        shape: of one sample; one number is the length of a sequence of tokens if the model has embeddings.
        batch: the batch size.
        meta: whether model and inputs are on the meta device.

    Returns:
        A module that returns its loss first, positional inputs and keyword inputs.

    Raises:
        BadTarget: the function does not return a model.
    """
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = _model(factory)
        if not isinstance(model, nn.Module):
            problem = f"it returned {shown(type(model).__name__)}; with --input it must return a model"
            raise BadTarget(target=name, problem=problem, advice="leave --input out for (model, sample)")
        _check_shape(name, model, shape)
        model.train()
        words = _vocabulary(model) if len(shape) == 1 else None
        if words is None:
            return _with_loss(model), (torch.randn(batch, *shape),), {}
        tokens = torch.randint(words, (batch, *shape))
        if not hasattr(model, "config"):
            return _with_loss(model), (tokens,), {}
        if _learns_language(model):
            return model, (), {"input_ids": tokens, "labels": tokens}
        return _with_loss(model), (), {"input_ids": tokens}


def _model(factory: Callable[..., Any]) -> Any:
    config_class = getattr(factory, "config_class", None)
    if config_class is not None:  # a class of transformers
        transformers = sys.modules.get("transformers")
        if transformers is not None:
            transformers.logging.set_verbosity_error()  # no hints on defaults, such as that of the loss
        config = config_class()
        config.use_cache = False  # nothing is generated during training
        return factory(config)
    known = inspect.signature(factory).parameters
    return factory(**{name: value for name, value in _NO_WEIGHTS.items() if name in known})


def _check_shape(name: str, model: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse a shape that the model cannot take, as far as its class and config say.

    Raises:
        BadTarget: it cannot.
    """
    given, kind = f"--input {'x'.join(map(str, shape))}", type(model).__name__
    config = getattr(model, "config", None)
    if config is not None and getattr(model, "main_input_name", "") == "input_ids":
        if len(shape) != 1:
            problem = f"{given}: {kind} reads tokens"
            raise BadTarget(target=name, problem=problem, advice="give the length of a sequence: --input 128")
        most = _positions(model, config)
        if most is not None and shape[0] > most:
            problem = f"{given}: {kind} has positions for {most} tokens"
            raise BadTarget(target=name, problem=problem, advice=f"give at most --input {most}")
    elif len(shape) == 1 and isinstance(_first_layer(model), nn.Conv2d):
        problem = f"{given}: {kind} reads images"
        advice = "give channels, height and width: --input 3x224x224"
        raise BadTarget(target=name, problem=problem, advice=advice)


def _positions(model: nn.Module, config: Any) -> int | None:
    """The length of a sequence for which a model has positions; None if it has no table of them."""
    named = [(name.rpartition(".")[2], each) for name, each in model.named_modules()]
    tables = [
        each
        for name, each in named
        if isinstance(each, nn.Embedding) and (name == "wpe" or "position" in name)
    ]
    if not tables:  # sequences may be longer than the config says
        return None
    # Positions begin behind the row of padding, if there is one; others are left out by the config's number.
    rows = [each.num_embeddings - (0 if (pad := each.padding_idx) is None else pad + 1) for each in tables]
    said = getattr(config, "max_position_embeddings", None)
    return min([*rows, said] if isinstance(said, int) else rows)


def _first_layer(model: nn.Module) -> nn.Module | None:
    """The first module that has parameters of its own."""
    return next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)


def _with_loss(model: nn.Module) -> nn.Module:
    """The model with a loss; its class has the model's name, which plans and tables show."""
    named: type[WithLoss] = type(type(model).__name__, (WithLoss,), {})
    return named(model)


def _vocabulary(model: nn.Module) -> int | None:
    """The number of tokens that a model knows; None if it reads no tokens."""
    config = getattr(model, "config", None)
    if isinstance(getattr(config, "vocab_size", None), int):
        return int(config.vocab_size)  # type: ignore[union-attr]
    return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)


def _learns_language(model: nn.Module) -> bool:
    """Whether a model of transformers takes the tokens as labels too."""
    name = type(model).__name__
    return "LM" in name or "ConditionalGeneration" in name
