"""The model that a command plans: ``MODULE:FACTORY`` of the user, or the name of a model with ``--input``."""

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from remat_facade.cli.target_names import full_name, misnamed
from remat_facade.errors import BadTarget
from remat_graph.errors import text_of

MOST_NAMES = 12  # of a module, in an error
FAR_BUT_NEAREST = 0.3  # similarity of names that are shown where none is close
MOST_SIZE, MOST_DIGITS = 2**31, 10  # of one dimension

_MISSING = object()
_TOO_LARGE = re.compile(r"can't allocate memory|out of memory")  # what torch raises
_OWN_FUNCTION = "name a model that is built without arguments, or give a function of yours: MODULE:FACTORY"

_WITH_TORCHVISION = frozenset({"torchvision", "transformers", "timm"})  # they import torchvision


@attrs.frozen(kw_only=True)
class Target:
    """What the command line names.

    Attributes:
        name: ``package.module:function`` or ``path/to/file.py:function``; with an input also
            ``package.module.function``.
        shape: of one sample, without the batch; None if the function returns the sample too.
        batch: the batch size; None if the function takes none.
        dtype: the name of the type to which the model and its inputs are converted; None to leave them.
    """

    name: str
    shape: tuple[int, ...] | None = None
    batch: int | None = None
    dtype: str | None = None

    @classmethod
    def parse(
        cls, name: str, shape: str | None = None, batch: int | None = None, dtype: str | None = None
    ) -> "Target":
        """The target of the command line; whatever is wrong without importing its module is raised here.

        Raises:
            BadTarget: the name or the shape is of another form, or there is no such file or package.
        """
        sizes = None if shape is None else _shape(name, shape)
        target = cls(name=name, shape=sizes, batch=batch, dtype=dtype)
        place, _ = target._split()
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise BadTarget(target=name, problem=f"no such file {place}: check the path")
        elif _spec(place.partition(".")[0]) is None:
            package = place.partition(".")[0]
            raise BadTarget(
                target=name, problem=f"No module named {package!r}: install it, or check the name"
            )
        else:
            elsewhere = full_name(*target._split())
            if elsewhere:
                problem = f"{place} has no such function or class: did you mean {elsewhere}?"
                raise BadTarget(target=name, problem=problem)
        return target

    def load(self, batch: int | None = None, *, meta: bool = False) -> tuple[Any, Any, Any]:
        """Build the model and its sample.

        Args:
            batch: replaces the target's.
            meta: build a model that is named with an input on the meta device, where it has no values.

        Returns:
            Model, sample, and keyword inputs or None.

        Raises:
            BadTarget: the function does not exist, fails, or returns something else.
        """
        place, name = self._split()
        if self.shape is not None and place.partition(".")[0] in _WITH_TORCHVISION:
            from remat_facade.libraries import import_torchvision

            import_torchvision()
        module = guarded(self.name, "importing it", lambda: _module(self.name, place))
        # A lazy module, such as transformers, imports at this point.
        factory = guarded(self.name, f"importing {name}", lambda: getattr(module, name, _MISSING))
        if factory is _MISSING:
            raise BadTarget(
                target=self.name, problem=f"{place} has no function {name}; {_names(module, name)}"
            )
        if not callable(factory) or inspect.iscoroutinefunction(factory):
            kind = "an async function" if callable(factory) else f"an object of type {type(factory).__name__}"
            problem = f"{name} in {place} is {kind}; expected a function that returns (model, sample)"
            raise BadTarget(target=self.name, problem=problem)
        batch = self.batch if batch is None else batch
        if self.shape is not None:
            from remat_facade.cli.named_model import built

            shape = self.shape
            doing = f"building {name} for an input of {'x'.join(map(str, shape))}"
            call = partial(built, self.name, factory, shape, batch or 1, meta=meta, dtype=self.dtype)
            named: tuple[Any, Any, Any] = guarded(self.name, doing, call, advice=_OWN_FUNCTION)
            return named
        made = _called(self.name, name, factory, batch)
        if not isinstance(made, tuple) or len(made) not in (2, 3):
            came = (
                f"{len(made)} values"
                if isinstance(made, tuple)
                else f"an object of type {type(made).__name__}"
            )
            problem = f"{name}() returned {came}; expected (model, sample) or (model, sample, kwargs)"
            advice = "" if isinstance(made, tuple) else "for a model alone give --input, such as 3x224x224"
            raise BadTarget(target=self.name, problem=problem, advice=advice)
        model, sample, *rest = made
        loaded = model, sample, rest[0] if rest else None
        if self.dtype is None:
            return loaded
        from remat_facade.cli.named_model import converted

        call = partial(converted, loaded, self.dtype)
        retyped: tuple[Any, Any, Any] = guarded(self.name, f"converting it to {self.dtype}", call)
        return retyped

    def _split(self) -> tuple[str, str]:
        """The module and the name in it."""
        place, colon, name = self.name.rpartition(":")
        if not colon:
            place, _, name = self.name.rpartition(".")
        problem = misnamed(self.name, place, name, by_colon=bool(colon), shaped=self.shape is not None)
        if problem:
            raise BadTarget(target=self.name, problem=problem)
        return place, name


def _called(target: str, name: str, factory: Callable[..., Any], batch: int | None) -> Any:
    """What the user's function returns, which takes a batch size if one is given.

    Raises:
        BadTarget: its arguments are others, or it fails.
    """
    args = () if batch is None else (batch,)
    doing = f"calling {name}({', '.join(map(repr, args))})"
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of a builtin
        return guarded(target, doing, lambda: factory(*args))
    if batch is not None and not _binds(signature, batch) and _binds(signature, batch=batch):
        return guarded(target, doing, lambda: factory(batch=batch))
    if _binds(signature, *args):
        return guarded(target, doing, lambda: factory(*args))
    if isinstance(factory, type):
        advice = "give --input, the shape of one sample such as 3x224x224, or a function: MODULE:FACTORY"
        raise BadTarget(target=target, problem=f"{name} is a class and needs arguments", advice=advice)
    needed = [each.name for each in signature.parameters.values() if each.default is each.empty]
    if batch is None and len(needed) == 1:
        advice = f"give --batch 8, or the argument a default: def {name}({needed[0]}=8)"
        raise BadTarget(target=target, problem=f"{name}() needs an argument {needed[0]}", advice=advice)
    if batch is None:
        problem, arguments = f"{name}() needs arguments {', '.join(needed)}; expected none", ""
    elif signature.parameters:
        problem, arguments = f"{name}{signature} cannot be called as {name}({batch})", "batch"
    else:
        problem, arguments = f"{name}() takes no batch size, and the command needs one", "batch"
    shape = f"give a function such as: def {name}({arguments}): return model, sample"
    raise BadTarget(target=target, problem=problem, advice=shape)


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called so."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _shape(target: str, text: str) -> tuple[int, ...]:
    sizes = [
        int(size) if size.isdecimal() and len(size) <= MOST_DIGITS else 0
        for size in text.strip().lower().split("x")
    ]
    if not all(0 < size < MOST_SIZE for size in sizes):
        problem = f"--input {text!r:.40} is not a shape: give sizes such as 3x224x224, or a length: 128"
        raise BadTarget(target=target, problem=problem)
    return tuple(sizes)


def _names(module: ModuleType, name: str) -> str:
    """What a module has instead of a name."""
    known = [each for each in dir(module) if not each.startswith("_")]
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"it has {close[0]}: did you mean that?"
    inside = [
        each
        for each, found in list(sys.modules.items())
        if each.startswith(f"{module.__name__}.") and callable(getattr(found, "__dict__", {}).get(name))
    ]
    if inside:
        return f"did you mean {min(inside, key=len)}.{name}?"
    functions = [each for each, found in vars(module).items() if each in known and callable(found)]
    if not functions:  # a lazy module, such as transformers, has thousands that are not imported yet
        names = [each for each in known if each.isidentifier()]
        nearest = difflib.get_close_matches(name, names, n=3, cutoff=FAR_BUT_NEAREST)
        return f"the nearest of its names are {', '.join(nearest)}" if nearest else "it has none"
    return f"it has {', '.join(functions[:MOST_NAMES])}"


def _spec(package: str) -> object:
    """Where a package is; None if there is none."""
    if package in sys.modules:
        return package
    _search_here()
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _search_here() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does


def _module(target: str, place: str) -> ModuleType:
    if not place.endswith(".py"):
        _search_here()
        return importlib.import_module(place)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadTarget(target=target, problem=f"{place} cannot be imported: give a Python file")
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE` does
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def guarded(target: str, doing: str, call: Callable[[], Any], *, advice: str = "correct the code") -> Any:
    """Call the user's code; turn any error into one line with its location.

    Args:
        target: as the user wrote it.
        doing: what is done, for the message.
        call: runs the code.
        advice: what to do where the line that failed is not the user's.

    Raises:
        BadTarget: the code failed.
    """
    try:
        return call()
    except BadTarget:
        raise
    except (Exception, SystemExit) as error:  # the code is the user's
        last = traceback.extract_tb(error.__traceback__)[-1]
        file = Path(last.filename)
        # Wrong arguments fail in our own files, bad syntax in Python's: neither is a line of the user.
        elsewhere = file.is_relative_to(Path(__file__).parent) or not file.is_file()
        where = "" if elsewhere else f" ({file.name}, line {last.lineno})"
        if not (elsewhere or "site-packages" in file.parts):
            advice = "correct the code"
        if isinstance(error, MemoryError) or _TOO_LARGE.search(text_of(error)):
            advice = "use a smaller model or --batch"
        problem = f"{doing} raised {type(error).__name__}: {text_of(error)}{where}: {advice}"
        raise BadTarget(target=target, problem=problem) from error
