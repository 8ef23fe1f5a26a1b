"""Everything that a user of the package needs is a name of `remat_facade`."""

import builtins
import inspect
import re
import subprocess
import sys

import pytest

import remat_facade

PROBE = "import sys; from remat_facade import {}; print('torch' in sys.modules)"


def documented_errors() -> dict[str, str]:
    """The classes named under Raises in docstrings of entry points and their methods, with one place each."""
    found: dict[str, str] = {}
    for name in remat_facade.__all__:
        entry = getattr(remat_facade, name)
        own = [member for _, member in inspect.getmembers(entry)] if isinstance(entry, type) else []
        for documented in [entry, *own]:
            if not (getattr(documented, "__module__", None) or "").startswith("remat_"):
                continue
            _, _, raises = (inspect.getdoc(documented) or "").partition("Raises:\n")
            found |= dict.fromkeys(re.findall(r"^ {4}(\w+): ", raises.split("\n\n")[0], re.MULTILINE), name)
    return found


def test_errors_of_the_entry_points_are_exported() -> None:
    """A caller of an entry point can catch, by a public name, each error that its docstring lists."""
    errors = {name: entry for name, entry in documented_errors().items() if not hasattr(builtins, name)}
    assert {"InfeasibleBudget", "NoRoom", "BadConfig", "LaneFailed"} <= errors.keys()
    assert {} == {name: entry for name, entry in errors.items() if name not in remat_facade.__all__}
    assert {} == {name: entry for name, entry in errors.items() if not hasattr(remat_facade, name)}


def test_every_public_name_loads() -> None:
    """Errors have one base, and `dir` lists every name before it is loaded."""
    loaded = {name: getattr(remat_facade, name) for name in remat_facade.__all__}
    errors = [kind for kind in loaded.values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, remat_facade.RematError | Warning) for kind in errors)
    assert set(remat_facade.__all__) <= set(dir(remat_facade))
    with pytest.raises(AttributeError, match="no attribute 'Rotor'"):
        _ = remat_facade.Rotor


@pytest.mark.parametrize("name", ["BadBudget", "BadConfig", "InfeasibleBudget", "RematError", "load_config"])
def test_errors_of_planning_need_no_torch(name: str) -> None:
    """Planning a saved graph, and what it raises, loads no torch."""
    command = [sys.executable, "-c", PROBE.format(name)]
    assert "False" == subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
