"""The numbers of the house: how the sources are built, and the limits that CI holds them to.

    python tests/repository/house.py [--words]

Prints a line for each number and exits with 1 if one is beyond its limit. With --words it prints the private
words that are left, each with its count, the standard word to use instead, and where it stands.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LONGEST_FILE = 400
LONGEST_FUNCTION = 60
SHARED_LINES = 6

# The one long file is a compiled kernel, which numba wants in one piece (`kernels/incremental.py`).
MOST = {
    "import circles": 0,
    "broken import contracts": 0,
    "files at the top of a package": 12,
    "files above 400 lines": 0,
    "functions above 60 lines": 0,
    "duplicates of six lines": 15,
    "private words": 0,
    "class names defined twice": 0,
    "markers of a merge": 0,
    "changes before their try": 0,
}


class Word(NamedTuple):
    """A word of this project alone.

    Attributes:
        name: for the list.
        pattern: a regular expression that matches the private meaning and no standard one.
        instead: the standard word, or the new name.
        where: a regular expression that the path must match; a name may mean something else elsewhere.
    """

    name: str
    pattern: str
    instead: str
    where: str = ""


_OFFLOAD = "remat_solvers/(offload|transfers)/"
_MODULE = "remat_executor/(module|guards|lowering)/|remat_offload/"

WORDS = (
    # Names that were replaced.
    Word("home", r"\b(at_home|[Hh]omes?|take_home)\b", "placement, `Placement`, placed on the host"),
    Word("ladder, rung", r"\b([Ll]adders?|[Rr]ungs?)\b", "order frontier: `OrderFrontier`, `FrontierPoint`"),
    Word("trials", r"\b[Tt]rials\b", "`CandidateSearch`", _OFFLOAD),
    Word("attempt", r"\b[Aa]ttempts?\b", "`Candidate`, `evaluate_candidate`", _OFFLOAD),
    Word("neighbours", r"\bneighbours\b", "`placement_neighbors`", _OFFLOAD),
    Word("stepping", r"\b[Ss]tepping\b", "`TrainingProblem`", "remat_solvers/"),
    Word("hand over", r"\bhand_?over\b|\bhand(s|ed|ing)? (\w+ ){0,3}over\b", "deliver, write"),
    Word("judged", r"\bjudged\b", "`simulate_accumulating`", _OFFLOAD),
    Word("gap", r"\b[Gg]aps?\b", "idle interval: `IdleInterval`", _OFFLOAD),
    Word("trip", r"\b[Tt]rips?\b", "`Swap`"),
    Word("away", r"\baway\b", "swapped out, offloaded, freed"),
    Word("leaving", r"\bleaving\b", "`swap_out`", _OFFLOAD),
    Word("Way", r"\b(Way|WAYS)\b", "`TransferPolicy`"),
    Word("Line", r"\bLine\b", "`OrderTimeline`", "remat_solvers/"),
    Word("place_on", r"\bplace_on\b|\bplace\(", "`schedule_transfers`", _OFFLOAD),
    Word("style", r"\b[Ss]tyle\b", "`UpdateMode`", "remat_solvers/"),
    Word("guest", r"\bguests?\b", "subprocess: `solve_in_subprocess`"),
    Word("Answer, ask", r"\bAnswer\b|\bask\(", "`SubprocessResult`", "remat_solvers/"),
    Word("questions", r"\bquestions\b", "queries"),
    Word("descend", r"\bdescend\b", "`minimize_peak`"),
    Word("kin", r"\bkin\b", "reachability"),
    Word("relatives", r"\b[Rr]elatives\b", "`Reachability`"),
    Word("Program", r"\bProgram\b", "`MixedIntegerProgram`", "remat_solvers/"),
    Word("menu", r"\b[Mm]enus?\b", "options: `OptionTable`"),
    Word("Watched", r"\bWatched\b|\bunder watch\b", "`SideEffectGuard`"),
    Word("Itself", r"\bItself\b", "`Identity`"),
    Word("room", r"\b[Rr]oom\b", "headroom; `TraversalLimit`"),
    Word("stand-in", r"\b[Ss]tand[-_]?ins?\b|\bStandIns?\b", "fake tensor: `with_fake_tensors`"),
    Word("rehearse", r"\b[Rr]ehears\w*", "measure: `measure_peak`"),
    Word("within_budget", r"\bwithin_budget\b", "`replan_until_it_fits`"),
    Word("look_at", r"\blook_at\b", "`snapshot`", _MODULE),
    Word("holds", r"\bholds\(", "`is_current`", "remat_executor/(module|guards)/"),
    Word("seen", r"\.seen\(|\bdef seen\b", "`signature`", "remat_executor/(module|guards)/"),
    Word("Plans", r"\bPlans\b(?=[\[(,]|$)", "`LRUCache`", r"\.py$"),
    Word("Planning", r'(?<!""")\bPlanning\b', "`PlanManager`", r"\.py$"),
    Word("cut", r"\bcut\(|import cut\b", "`split_backward`", "remat_executor/(lowering|runtime)/"),
    Word("Handlers", r"\bHandlers\b", "`OffloadBackend`"),
    Word("extended", r"\bextended\b", "`extend_graph`", _MODULE),
    Word("settle", r"\b[Ss]ettle[ds]?\b", "fix, fixed; `apply_placement`"),
    Word("plan_graph", r"\bplan_graph\b", "`step_graph`"),
    Word("shadow", r"\b[Ss]hadows?\b", "private copy"),
    Word("probe", r"\b[Pp]robes?\b", "profile", "remat_offload/"),
    Word("piecewise", r"\b[Pp]iecewise\w*", "chunked"),
    Word("lend", r"\b[Ll]end(s|er|ers|ing)?\b|\b[Ll]ent(_\w+)?\b", "fetch: `WeightFetcher`; external"),
    Word("take off, land", r"\b(inflight|take_off|land|lands|landed)\b", "`mark_pending`, `clear_pending`"),
    Word("take back, let lie", r"\b(take_back|let_lie)\b", "`restore_placement`, `rebind_storage`"),
    Word("house", r"\bhouses?\b|\bhoused\b", "`reserve_on_host`", "remat_offload/"),
    Word("hold", r"\bmachine\.(discard|leave)\(|\bdef (hold|discard)\b|\bhold\(", "`wait_on_compute`"),
    Word(
        "Training",
        r'(?<!""")\bTraining\b(?! [a-z])',
        "`TrainingSession`",
        "remat_offload/|facade/(entry|plan)",
    ),
    Word("Noted", r"\b(Noted|SavedPlan)\b|\btighter\(", "`AnnotatedPlanner`, `FixedPlanner`, `with_margin`"),
    Word("tightening", r"\btightening\b|\btighter (plan|one)\b|\bplanned tighter\b", "with a margin"),
    # Words of the glossary.
    Word("tell", r"\b[Tt]old\b|\b[Tt]ells?\b(?! (\w+ )*apart)", "report, warn, emit; `events`"),
    Word("said", r"\b(is|are|was|were|be|been|and|has|have) said\b|\bsaid (once|so)\b", "reported, warned"),
    Word("made again", r"\bma(d|k)(e|es|ing)? (it |them |\w+ )?again\b", "recomputed"),
    Word("compute again", r"\bcomput(e|es|ed|ing) (it |them )?again\b", "recompute"),
    Word(
        "goes",
        r"\bgoes (first|home|away|with its|to the (host|device))\b",
        "is freed, is offloaded",
    ),
    Word("leaves", r"\b(leaves|leave|left) (for )?the (host|device)\b", "is swapped out"),
    Word("anew", r"\b[Aa]new\b", "again"),
    Word("beside", r"\b[Bb]eside\b", "alongside, in addition to, concurrently with, next to"),
    Word("whoever", r"\b[Ww]hoever\b|\b[Ww]hoso\b", "the planner, the caller"),
    Word("who plans", r"\b[Ww]ho plans\b", "the planner"),
    Word("scratch", r"\b[Ss]cratch\b", "workspace"),
    Word("ask again", r"\b[Aa]sk(s|ed|ing)? (\w+ ){0,2}again\b", "retry, retried"),
    Word("manners", r"\bmanners?\b", "`nn.Module` behaviour"),
    Word("hides", r"\bhides?\b", "overlaps", "remat_solvers/|remat_offload/copy_lanes/|docs/offmate|README"),
    Word(
        "as it is",
        r"\bas ever\b|\bas (it|they) (is|are|was|were)\b(?=[.,;:)]|$| (there|in|and|before|after|now)\b)",
        "unchanged",
    ),
    Word("means nothing", r"\bmeans? nothing\b", "is invalid"),
    Word("so many", r"\bso many\b", "n"),
    Word("to the bit", r"\bto the bit\b|\bthe bits of\b", "bit-identical"),
    Word("in flight", r"\bin flight\b|\bunder way\b", "pending"),
    Word("put off", r"\bput(s|ting)? (it |them |\w+ )?off\b", "defer, deferred"),
    Word("liar", r"\bliars?\b|\ba lie\b", "a wrong prediction"),
    Word(
        "takes",
        r"\btakes? (up )?(the |its |no |\w+ )?(bytes|room|memory|space)\b"
        r"|\btakes? (as much|so much|as many|more|less|\d[\d.,]* ([KMGT]i)?B)\b",
        "costs, needs",
    ),
    Word("a text", r"\b[Aa] text\b|\btexts\b", "a string, strings"),
    Word("dear", r"\bdear(er|est)?\b", "expensive"),
    Word("mend", r"\bmend(s|ed|ing)?\b", "fix"),
    Word("walk", r"\b[Ww]alk(s|ed|ing)?\b", "pass, traverse"),
    Word("the rest", r"\b[Tt]he rest\b", "the remainder, the others"),
)

# What no pattern counts: (path, part of a line, reason). The part is dropped before the line is searched.
ALLOWED = (
    ("", r"[\"`]home[\"`]|\bkey home\b|Path\.home\b", "a JSON key of graphs; Python's own"),
    ("", r'"settled"', "a JSON key of saved plans"),
    ("", r"\brehearsed_nbytes\b", "a public property"),
    ("", r"[\w./-]*scratch\.(py|c|json)\b|bench-scratch|from scratch", "a benchmark's name; an idiom"),
    ("", r"\b(right|throw\w*|pass\w*|straight) away\b", "plain English"),
    ("", r"\b(ma(k|d)(e|es|ing)) room\b", "plain English"),
    ("", r"\bround[- ]trips?\b", "a standard term"),
    ("", r"\b(soon|long|far) as (it|they)\b", "plain English"),
    ("", r"\b(ast|os)\.walk\b|\brandom walks?\b|\bwalk(s|ing)? (through|up|down)\b", "a standard term"),
    (
        "remat_solvers/(local_search|kernels|portfolio|methods/annealing|switching|carrying)",
        r"\b[Ww]alks?\b",
        "a random walk of annealing",
    ),
    ("remat_solvers/kernels/", r"\bsettle\b", "a kernel that carries a change through, nothing of placement"),
    ("remat_offload/host_memory/|docs/api/", r"\b[Ll]end(s|ing)?\b|\b[Ll]ent\b", "`HostPool.lend` is public"),
    ("", r"\.lend\b", "`HostPool.lend` is public"),
    ("remat_offload/host_memory/", r"\b_?lent_nbytes\b", "a public figure of the pool"),
    ("remat_solvers/portfolio/auto", r"\bguests?\b", "`guests` is a public parameter of the solver"),
    ("report/doctor_page", '"(descend|walk)"', "names of `Progress.solver`"),
    ("docs/results", r"\btakes [\d.]+ MiB\b.*\bleaves it room\b", "an error as it was recorded"),
    ("", r"\bthe rest of\b", "plain English"),
    ("CONTRIBUTING", r"\|[^|]*\|$", "the glossary names what its words replace"),
)


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
    return {folder.name: len(list(folder.glob("*.py"))) for folder in sorted(ROOT.glob("packages/*/src/*/"))}


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


def written() -> list[Path]:
    """The files that users and developers read: sources, READMEs, documentation."""
    patterns = ("*.md", "docs/**/*.md", "packages/*/README.md")
    return [*sources(), *sorted(path for pattern in patterns for path in ROOT.glob(pattern))]


def private_words(paths: Sequence[Path]) -> dict[Word, list[str]]:
    """Where each private word still stands: identifiers, comments, docstrings, messages and Markdown."""
    found: dict[Word, list[str]] = {word: [] for word in WORDS}
    for path in paths:
        place = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
        here = [(word, re.compile(word.pattern)) for word in WORDS if re.search(word.where, place)]
        allowed = [re.compile(part) for where, part, _ in ALLOWED if re.search(where, place)]
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for part in allowed:
                line = part.sub("_", line)
            for word, pattern in here:
                found[word] += [f"{place}:{number}"] * len(pattern.findall(line))
    return found


def show_words() -> None:
    """Print the private words that are left, the most frequent first."""
    left = [(word, places) for word, places in private_words(written()).items() if places]
    for word, places in sorted(left, key=lambda item: -len(item[1])):
        sys.stdout.write(f"{len(places):4} {word.name}: {word.instead}\n")
        sys.stdout.writelines(f"         {place}\n" for place in dict.fromkeys(places))


def classes_of_one_name() -> list[str]:
    """Public class names that more than one file defines, with these files."""
    places = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module_of(path))
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def unmerged(paths: Iterable[Path]) -> list[str]:
    """Lines that a merge has left for a person to decide."""
    return [
        f"{path.name}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.match(r"(<{7}|>{7}|\|{7}) ", line)
    ]


def unprotected_changes() -> list[str]:
    """Where a context changes something outside before the `try` whose `finally` changes it back.

    Ctrl-C after the change and before the `try` would leave it.
    """
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "context" in map(ast.unparse, node.decorator_list):
                found += [f"{module_of(path)}:{line}" for line in changes_before_try(node.body)]
    return found


def changes_before_try(body: Sequence[ast.stmt], earlier: Sequence[int] = ()) -> Iterator[int]:
    """Lines that call for an effect, or store anywhere but in a local name, before such a `try`.

    The `try` may be in a `with` or an `if`; `earlier` are the lines before that.
    """
    before = list(earlier)
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            continue  # it runs later
        inside = list(ast.walk(statement))
        if isinstance(statement, ast.Try) and statement.finalbody:
            if any(isinstance(node, ast.Yield) for node in inside):
                yield from before
            return
        if isinstance(statement, ast.With | ast.If) and any(isinstance(node, ast.Try) for node in inside):
            yield from changes_before_try(statement.body, before)
            continue
        before += [
            node.lineno
            for node in inside
            if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
            or (isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load))
        ]


WRITTEN = {".py", ".md", ".toml", ".yml", ".yaml", ".cff", ".c", ".cpp", ""}


def texts() -> Iterator[Path]:
    """All files of the repository that people write."""
    for pattern in ("*.*", "[!.]*/**/*.*", ".ci/*", ".github/**/*.*"):
        for path in ROOT.glob(pattern):
            inside = path.relative_to(ROOT).parts
            if path.is_file() and path.suffix in WRITTEN and not {"build", "dist"} & set(inside):
                yield path


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
        "private words": [
            f"{place} {word.name}: {word.instead}"
            for word, places in private_words(written()).items()
            for place in places
        ],
        "class names defined twice": classes_of_one_name(),
        "markers of a merge": unmerged(texts()),
        "changes before their try": unprotected_changes(),
    }


def main(words: Sequence[str] = ()) -> int:
    """Print the numbers, or with ``--words`` the private words; 1 if a number is beyond its limit."""
    if "--words" in words:
        show_words()
        return 0
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
    sys.exit(main(sys.argv[1:]))
