"""The numbers of the house: how the sources are built, and the limits that CI holds them to.

    python tests/repository/house.py

Prints a line for each number and exits with 1 if one is beyond its limit.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_FILE = 400
LONGEST_FUNCTION = 60
SHARED_LINES = 6

# The one long file is a compiled kernel, which numba wants in one piece (`kernels/incremental.py`).
MOST = {
    "import circles": 0,
    "broken import contracts": 0,
    "files at the top of a package": 12,
    "files above 400 lines": 1,
    "functions above 60 lines": 0,
    "duplicates of six lines": 15,
}


def sources() -> list[Path]:
    """The files of all packages."""
    return sorted(ROOT.glob("packages/*/src/**/*.py"))


def module_of(path: Path) -> str:
    """The dotted name."""
    parts = path.relative_to(next(p for p in path.parents if p.name == "src")).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, known: frozenset[str]) -> set[str]:
    """Modules of ours that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known or {node.module}
    return found & known


def circles() -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components)."""
    files = {module_of(path): path for path in sources()}
    known = frozenset(files)
    edges = {name: imports_of(path, known) - {name} for name, path in files.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                found.append(sorted(group))

    for name in files:
        if name not in index:
            visit(name)
    return found


def at_the_top() -> dict[str, int]:
    """Files directly in each package."""
    return {folder.name: len(list(folder.glob("*.py"))) for folder in sorted(ROOT.glob("packages/*/src/*"))}


def long_files() -> list[str]:
    """Files above the limit."""
    return [
        f"{path.name} ({count})"
        for path in sources()
        if (count := len(path.read_text().splitlines())) > LONGEST_FILE
    ]


def long_functions() -> list[str]:
    """Functions above the limit, their docstrings not counted; compiled kernels are left out."""
    found = []
    for path in sources():
        if "kernels" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                text = (first.end_lineno or 0) - first.lineno + 1 if is_text else 0
                count = (node.end_lineno or 0) - node.lineno + 1 - text
                if count > LONGEST_FUNCTION:
                    found.append(f"{path.name}:{node.name} ({count})")
    return found


def code_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that count for duplicates: no blanks, comments, imports or docstrings, without indentation."""
    text = path.read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Expr) and is_text):
            skipped |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if number not in skipped and re.search(r"\w", line) and not line.startswith("#"):
            yield number, line


def duplicates(paths: list[Path]) -> list[str]:
    """Pairs of places that share six lines or more, as far as each run goes."""
    places = defaultdict(list)
    lines = {path: list(code_lines(path)) for path in paths}
    for path, held in lines.items():
        for at in range(len(held) - SHARED_LINES + 1):
            places[tuple(text for _, text in held[at : at + SHARED_LINES])].append((path, at))
    hits = {(a, b) for found in places.values() for i, a in enumerate(found) for b in found[i + 1 :]}
    starts = [(a, b) for a, b in hits if ((a[0], a[1] - 1), (b[0], b[1] - 1)) not in hits]
    return sorted(
        f"{a[0].relative_to(ROOT)}:{lines[a[0]][a[1]][0]} ~ {b[0].relative_to(ROOT)}:{lines[b[0]][b[1]][0]}"
        for a, b in starts
    )


def broken_contracts() -> list[str]:
    """Contracts that `lint-imports` finds broken, or what kept it from looking."""
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    if program is None:
        return ["lint-imports is not installed"]
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    kept = re.search(r"Contracts: (\d+) kept, 0 broken", done.stdout)
    if kept and int(kept[1]) > 0:
        return []
    return re.findall(r"^(.*) BROKEN$", done.stdout, re.MULTILINE) or [
        done.stderr or "no contract was looked at"
    ]


def numbers() -> dict[str, list[str]]:
    """What counts against each limit."""
    most_at_the_top = max(at_the_top().items(), key=lambda item: item[1])
    return {
        "import circles": [" <-> ".join(group) for group in circles()],
        "broken import contracts": broken_contracts(),
        "files at the top of a package": [most_at_the_top[0]] * most_at_the_top[1],
        "files above 400 lines": long_files(),
        "functions above 60 lines": long_functions(),
        "duplicates of six lines": duplicates(sources()),
    }


def main() -> int:
    """Print the numbers; 1 if one is beyond its limit."""
    beyond = 0
    for name, found in numbers().items():
        too_many = len(found) > MOST[name]
        beyond += too_many
        sys.stdout.write(f"{name:32} {len(found):3} (at most {MOST[name]})\n")
        if too_many:
            sys.stdout.writelines(f"    {each}\n" for each in sorted(set(found)))
    lines = sum(len(path.read_text().splitlines()) for path in sources())
    sys.stdout.write(f"{'lines of src':32} {lines}\n")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
