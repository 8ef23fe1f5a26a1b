"""What is dangerous is done in one place, which takes care; nobody does it another way."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2] / "packages"


@pytest.mark.parametrize(
    ("done", "places"),
    [
        (
            r"os\.(replace|rename)\(|mkstemp|\.write_(text|bytes)\(|open\([^)]*[\"'][wax]b?[\"']",
            {"serialization/atomic_write.py", "serialization/pipes.py"},
        ),
        (r"\byaml\.\w*(load|parse|compose|dump)\w*\(", {"config/yaml_reader.py"}),
        (r"\bjson\.load\(", {"portfolio/isolated.py", "mip/cp_sat.py"}),  # our own processes, by pipes
        (r"contextmanager\b", {"remat_graph/contexts.py"}),  # contextlib's write on the exceptions that pass
        (
            r"import_module\(",
            {
                "cli/target.py",
                "demo/tasks.py",
                "remat_facade/libraries.py",
                "torch_private/inductor.py",
                "torch_private/lookup.py",
                "remat_facade/__init__.py",
                "remat_solvers/__init__.py",
            },
        ),
    ],
    ids=["writing", "yaml", "json", "contexts", "importing"],
)
def test_nobody_does_it_another_way(done: str, places: set[str]) -> None:
    """Files are written whole, read with suspicion, and what data names is not imported."""
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGES.glob("*/src/**/*.py")}
    found = {"/".join(path.parts[-2:]) for path, text in sources.items() if re.search(done, text)}
    assert found
    assert found <= places


FOREIGN = {"Exception", "BaseException"}


def texts_asked_for(tree: ast.AST) -> Iterator[int]:
    """Lines that ask an exception of any class for its text, as `text_of` alone may."""
    for scope in ast.walk(tree):
        names: set[str] = set()
        if (
            isinstance(scope, ast.ExceptHandler)
            and scope.name
            and ast.unparse(scope.type or scope) in FOREIGN
        ):
            names = {scope.name}
        elif isinstance(scope, ast.FunctionDef):
            given = [a for a in scope.args.args if a.annotation and ast.unparse(a.annotation) in FOREIGN]
            names = {a.arg for a in given}
        for node in ast.walk(scope) if names else ():
            asked: ast.AST | None = node.value if isinstance(node, ast.FormattedValue) else None
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "repr") and node.args:
                asked = node.args[0]
            if isinstance(asked, ast.Name) and asked.id in names:
                yield asked.lineno


def test_nobody_asks_an_exception_of_any_class_for_its_text() -> None:
    """Its class may be a user's, and raise when it is asked."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGES.glob("*/src/**/*.py")}
    asked = {f"{path.name}:{line}" for path, tree in trees.items() for line in texts_asked_for(tree)}
    assert {"errors.py"} == {place.partition(":")[0] for place in asked}, sorted(asked)
    assert 1 == len(asked), sorted(asked)
