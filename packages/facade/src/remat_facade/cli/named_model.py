"""Build a model by its name alone, with random weights, random inputs and a loss; nothing is downloaded.

A class of Hugging Face transformers is built from the defaults of its config. Other functions and classes are
called without arguments, with the arguments that would download weights set to none.
"""

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from remat_executor.torch_private.tensors import is_out_of_memory
from remat_facade.errors import BadTarget
from remat_graph.errors import shown, text_of

_NO_WEIGHTS: Mapping[str, Any] = {"weights": None, "weights_backbone": None, "pretrained": False}
"""The arguments by which torchvision and timm download weights, and the values that forbid it."""

Call = tuple[Any, Any, Any]
"""A model, positional inputs and keyword inputs."""


@attrs.frozen(kw_only=True)
class Loss:
    """The loss that a model without one gets: a function of one of its outputs and a target.

    Attributes:
        name: of the function, in `torch.nn.functional`.
        place: of the output, in what the model returns: a key or an index; None if it is all of that.
    """

    name: str
    place: str | int | None

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss."""
        of = output if self.place is None else output[self.place]
        return cast(Tensor, getattr(F, self.name)(of, target))

    def __str__(self) -> str:
        function = f"torch.nn.functional.{self.name}"
        if self.place is None:
            return function
        return f"lambda output, target: {function}(output[{self.place!r}], target)"


class WithLoss(nn.Module):
    """A model and a loss, called as `limit_memory(model, loss=loss)` has the model called.

    Without a loss, for an output of unknown shape, it returns the mean square of the first output, and takes
    no target.
    """

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """The loss."""
        output = self.model(*args, **kwargs)
        if self.loss is not None:
            return self.loss(output, target)
        leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
        first = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
        return first.float().square().mean()


def built(
    name: str,
    factory: Callable[..., Any],
    shape: tuple[int, ...],
    batch: int,
    *,
    meta: bool = False,
    dtype: str | None = None,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model that a function or class makes, in train mode, and inputs.

    A model that returns no loss gets one: cross entropy of rows of classes, else the mean square error of its
    first output.

    Args:
        name: of the target, for messages.
        factory: the function or class.
        shape: of one sample; one number is the length of a sequence of tokens if the model has embeddings.
        batch: the batch size.
        meta: whether model and inputs are on the meta device.
        dtype: to which they are converted.

    Returns:
        A module that returns its loss first, positional inputs and keyword inputs.

    Raises:
        BadTarget: the function does not return a model.
    """
    with torch.device("meta") if meta else contextlib.nullcontext():
        _check_builds_models(name, factory)
        model = _model(factory)
        if not isinstance(model, nn.Module):
            problem = f"it returned {shown(type(model).__name__)}; with --input it must return a model"
            raise BadTarget(target=name, problem=problem, advice="leave --input out for (model, sample)")
        _check_shape(name, model, shape)
        model.train()
        words = _vocabulary(model) if len(shape) == 1 else None
        tokens = None if words is None else torch.randint(words, (batch, *shape))
        args: tuple[Any, ...] = (torch.randn(batch, *shape) if tokens is None else tokens,)
        kwargs: dict[str, Any] = {}
        if tokens is not None and hasattr(model, "config"):
            args, kwargs = (), {"input_ids": tokens}
        model, args, kwargs = converted((model, args, kwargs), dtype)
        if tokens is not None and hasattr(model, "config") and _learns_language(model):
            return model, args, kwargs | {"labels": tokens}
        return _with_loss(name, model, args, kwargs)


def _check_builds_models(name: str, factory: Callable[..., Any]) -> None:
    """Refuse what cannot build a model without arguments.

    Raises:
        BadTarget: it is a class of something else, or needs arguments.
    """
    kind, advice = getattr(factory, "__name__", "it"), "give a function of yours instead: MODULE:FACTORY"
    if isinstance(factory, type) and not issubclass(factory, nn.Module):
        such = "torchvision.models.resnet50 or transformers.GPT2LMHeadModel"
        raise BadTarget(
            target=name, problem=f"{kind} is not a class of models, such as {such}", advice=advice
        )
    if getattr(factory, "config_class", None) is not None:
        return
    try:
        known = inspect.signature(factory, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return
    given = {each.name for each in known if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)} | set(
        _NO_WEIGHTS
    )
    needed = [each.name for each in known if each.default is each.empty and each.name not in given]
    if needed:
        raise BadTarget(target=name, problem=f"{kind} needs arguments: {', '.join(needed)}", advice=advice)


def converted(loaded: Call, dtype: str | None) -> Call:
    """A model and its inputs with floating-point numbers of a type, by its name; unchanged without one."""
    if dtype is None:
        return loaded
    model, *inputs = loaded
    kind = getattr(torch, dtype)

    def cast_to(leaf: Any) -> Any:
        return leaf.to(kind) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return model.to(kind), *tree_map(cast_to, inputs)


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


def _with_loss(name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The model with a loss, and the call with a target; its class has the model's name, which plans show.

    Raises:
        BadTarget: the model does not accept the inputs.
    """
    named: type[WithLoss] = type(type(model).__name__, (WithLoss,), {})
    try:
        place, output = _first_output(_returned(model, args, kwargs))
    except Exception as error:  # the code is the user's
        refused = _refused(name, model, args, kwargs, error)
        if refused is not None:
            raise refused from error
        return named(model, None), args, kwargs  # capture reports what is wrong with the call
    if output.dim() == 2:
        loss, target = Loss(name="cross_entropy", place=place), torch.zeros(len(output), dtype=torch.int64)
    else:
        loss, target = Loss(name="mse_loss", place=place), torch.zeros(output.shape, dtype=output.dtype)
    return named(model, loss), args, kwargs | {"target": target}


def _returned(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a model returns: computed without values, unless its code needs them."""
    tensors = {name: each.detach().to("meta") for name, each in _tensors(model)}
    inputs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    with torch.no_grad():
        try:
            with torch.device("meta"):
                return torch.func.functional_call(model, tensors, *inputs)
        except Exception:  # noqa: BLE001 - whatever the user's code raises on the meta device
            return model(*args, **kwargs)


def _refused(
    name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> BadTarget | None:
    """The error for inputs that a model does not accept; None for its other errors, which capture explains.

    Args:
        name: of the target.
        model: it has failed without gradients.
        args: positional inputs.
        kwargs: keyword inputs.
        error: what it raised.
    """
    try:
        model(*args, **kwargs)  # the forward may differentiate
    except Exception as again:  # noqa: BLE001 - the code is the user's
        error = again
    else:
        return None
    text = text_of(error).partition("\n")[0]
    on_meta = any(each.is_meta for _, each in _tensors(model))
    # On the meta device a forward may fail because it reads values.
    kinds = (RuntimeError, IndexError) if on_meta else (RuntimeError, IndexError, ValueError, AssertionError)
    if not isinstance(error, kinds) or isinstance(error, NotImplementedError) or not text:
        return None
    if is_out_of_memory(error) or (on_meta and "meta" in text):
        return None
    shapes = ", ".join(f"{tuple(each.shape)}" for each in (*args, *kwargs.values()))
    frames = [(Path(each.filename), each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    users = [
        f" ({file.name}, line {line})"
        for file, line in frames
        if "site-packages" not in file.parts and not file.is_relative_to(Path(__file__).parents[1])
    ]
    where = users[-1] if users else ""
    problem = (
        f"{type(model).__name__} refuses inputs of shape {shapes}: {type(error).__name__}: {text}{where}"
    )
    advice = (
        "give another --input or --batch, or a function that returns the model and its sample: MODULE:FACTORY"
    )
    return BadTarget(target=name, problem=problem, advice=advice)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _first_output(returned: Any) -> tuple[str | int | None, Tensor]:
    """The first floating-point tensor in what a model returns, and its key or index there."""
    if isinstance(returned, Mapping):
        places: Iterable[tuple[str | int | None, Any]] = returned.items()
    elif isinstance(returned, tuple | list):
        places = enumerate(returned)
    else:
        places = [(None, returned)]
    return next((k, leaf) for k, leaf in places if isinstance(leaf, Tensor) and leaf.is_floating_point())


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
