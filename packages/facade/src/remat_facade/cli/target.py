"""Load ``MODULE:FACTORY`` of the command line: a user's function that returns a model and a sample."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from remat_facade.errors import BadTarget
from remat_graph.errors import text_of


def load_target(target: str, *args: Any) -> tuple[Any, Any, Any]:
    """Call the factory that `target` names.

    Args:
        target: ``package.module:function`` or ``path/to/file.py:function``.
        *args: arguments of the factory.

    Returns:
        Model, sample, and keyword inputs or None.

    Raises:
        BadTarget: the function does not exist, fails, or returns something else.
    """
    place, colon, name = target.rpartition(":")
    if not (colon and place and name):
        raise BadTarget(
            target=target, problem="expected MODULE:FACTORY, such as train.py:make or package.train:make"
        )
    module = _guarded(target, "importing it", lambda: _module(target, place))
    factory = getattr(module, name, None)
    if not callable(factory):
        known = ", ".join(n for n, found in vars(module).items() if callable(found) and not n.startswith("_"))
        raise BadTarget(target=target, problem=f"{place} has no function {name}; it has {known or 'none'}")
    made = _guarded(target, f"calling {name}({', '.join(map(repr, args))})", lambda: factory(*args))
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        came = (
            f"{len(made)} values" if isinstance(made, tuple) else f"an object of type {type(made).__name__}"
        )
        problem = f"{name}() returned {came}; expected (model, sample) or (model, sample, kwargs)"
        raise BadTarget(target=target, problem=problem)
    model, sample, *rest = made
    return model, sample, rest[0] if rest else None


def _module(target: str, place: str) -> ModuleType:
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise BadTarget(target=target, problem=f"no such file {place}: check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadTarget(target=target, problem=f"{place} cannot be imported: give a Python file")
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE` does
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _guarded(target: str, doing: str, call: Callable[[], Any]) -> Any:
    """Call the user's code; turn any error into one line with its location."""
    try:
        return call()
    except BadTarget:
        raise
    except (Exception, SystemExit) as error:  # the code is the user's
        last = traceback.extract_tb(error.__traceback__)[-1]
        # A call with wrong arguments fails in this file, before it reaches a line of the user.
        where = "" if last.filename == __file__ else f" ({Path(last.filename).name}, line {last.lineno})"
        problem = f"{doing} raised {type(error).__name__}: {text_of(error)}{where}: correct the code"
        raise BadTarget(target=target, problem=problem) from error
