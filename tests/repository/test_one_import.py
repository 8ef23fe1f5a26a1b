"""A name that the root of a package exports is imported from the root, everywhere outside that package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORT_IN_TEXT = re.compile(r"^\s*from (remat_\w+\.[\w.]+) import (.+)$", re.MULTILINE)


def exported() -> dict[str, set[str]]:
    """The names in `__all__` of each package."""
    found = {}
    for path in ROOT.glob("packages/*/src/*/__init__.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[path.parent.name] = set(ast.literal_eval(node.value))
    return found


def imports(path: Path) -> Iterator[tuple[int, str, set[str]]]:
    """Line, module and names of every `from ... import` of a Python or Markdown file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        for match in IMPORT_IN_TEXT.finditer(text):
            yield text.count("\n", 0, match.start(1)) + 1, match[1], set(re.findall(r"\w+", match[2]))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module, {alias.name for alias in node.names}


def own_files() -> Iterator[Path]:
    """Python and Markdown files of the repository, without hidden folders such as environments.

    Files in tests/data are left out: they keep the imports of the commit that wrote them.
    """
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.name.startswith("."):
            found = (path for suffix in ("py", "md") for path in folder.rglob(f"*.{suffix}"))
            yield from (path for path in found if ROOT / "tests" / "data" not in path.parents)
    yield from ROOT.glob("*.md")


def test_exported_names_are_imported_from_the_root() -> None:
    """There is one way to import a name; inside its package, the module that defines it is named."""
    roots = exported()
    assert 5 == len(roots)
    wrong, looked_at = [], 0
    for path in own_files():
        for line, module, names in imports(path):
            package = module.partition(".")[0]
            inside = f"/src/{package}/" in path.as_posix()
            if module == package or package not in roots or inside:
                continue
            looked_at += 1
            wrong += [f"{path.relative_to(ROOT)}:{line}: {module}.{name}" for name in names & roots[package]]
    assert looked_at > 100
    assert [] == sorted(wrong)
