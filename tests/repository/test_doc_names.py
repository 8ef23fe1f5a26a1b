"""Files, modules, names and commands that the docs mention exist."""

import ast
import importlib
import os
import pkgutil
import re
import tomllib
from functools import cache
from itertools import chain
from pathlib import Path

import attrs
import pytest
import typer

from remat_facade.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *("README.md", "CONTRIBUTING.md"),
    *(
        page.relative_to(ROOT).as_posix()
        for page in sorted(
            chain.from_iterable(
                ROOT.glob(f"docs/{each}*.md")
                for each in ("", "trainers/", "coming_from/", "gallery/", "api/")
            )
        )
        if "results" not in page.name
    ),
    *(page.relative_to(ROOT).as_posix() for page in sorted(ROOT.glob("packages/*/README.md"))),
]
PACKAGES = ("remat_graph", "remat_solvers", "remat_executor", "remat_offload", "remat_facade")
ENTRY_POINT_GROUPS = {"remat.solvers", "remat.platforms", "remat.optimizers", "remat.ways", "remat.command"}
MADE_LATER = re.compile(r"^\.(venv|hatch)|^dist/$|\.(added|changed|fixed|removed)\.md$")
# Names of other programs, and of what a user writes.
OTHERS = {
    *("activation_memory_budget", "save_pretrained", "torchrun", "Trainer", "lint", "venv", "weights32"),
    *("find_unused_parameters", "static_graph", "from_pretrained", "get_peft_model"),
    *("SFTTrainer", "DPOTrainer", "RematPlugin", "gradient_checkpointing"),
    *("FlexAttention", "TensorBoard", "OptimWrapper", "TORCH_INDEX"),
    *("p32xlarge", "p2xlarge", "c524xlarge", "p32xlarge_fp16"),  # machines of Checkmate
    # Of torch and of DeepSpeed, on the pages for their users.
    *("gradient_as_bucket_view", "use_reentrant", "preserve_rng_state", "context_fn", "early_stop"),
    *("determinism_check", "number_checkpoints", "cpu_checkpointing", "partition_activations", "drop_last"),
    *(
        "gradient_checkpointing_enable",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
        "deepspeed",
    ),
}


def text_of(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def quoted(page: str) -> list[str]:
    """What is in backticks in the running text of a page; without the names of other projects in tables."""
    prose = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    if page == "docs/coming_from/research.md":  # what to type here runs in a test of its own
        prose = re.sub(r"^\|[^|]*\|[^|]*\|", "", prose, flags=re.MULTILINE)
    return re.findall(r"`([^`]+)`", prose)


@cache
def paths() -> frozenset[str]:
    """Files and folders of the repository, with a slash in front."""
    found = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name in (".ci", ".github") or not name.startswith((".", "__pycache__"))
        ]
        found |= {"/" + Path(folder, name).relative_to(ROOT).as_posix() for name in (*folders, *files)}
    return frozenset(found)


def is_there(path: str) -> bool:
    """Whether a path is one from the root, or the end of one."""
    if "*" in path:
        return any(ROOT.glob(path))
    return any(each.endswith("/" + path.rstrip("/")) for each in paths())


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    if name.startswith("remat_facade.integrations."):  # they import what need not be installed
        module, _, member = name.removeprefix("remat_facade.integrations.").partition(".")
        source = ROOT / "packages/facade/src/remat_facade/integrations" / f"{module}.py"
        names = [getattr(node, "name", "") for node in ast.parse(source.read_text()).body]
        return not member or member in names
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@cache
def classes() -> dict[str, list[type]]:
    """The classes that the packages offer, by name."""
    found: dict[str, list[type]] = {}
    for package in map(importlib.import_module, PACKAGES):
        for name in package.__all__:
            thing = getattr(package, name)
            if isinstance(thing, type):
                found.setdefault(name, []).append(thing)
    return found


def has(kind: type, name: str) -> bool:
    """Whether instances of a class have an attribute."""
    return hasattr(kind, name) or (attrs.has(kind) and name in attrs.fields_dict(kind))


@cache
def words() -> frozenset[str]:
    """Every word of the sources and of the fixtures."""
    files = [*ROOT.glob("packages/*/src/**/*.py"), ROOT / "conftest.py"]
    return frozenset(chain.from_iterable(re.findall(r"\w+", path.read_text()) for path in files))


@cache
def tool_words() -> frozenset[str]:
    """Every word of what runs the tools: a page on a tool names nothing of it that nothing here uses."""
    files = [*ROOT.glob("benchmarks/integrations/*.py"), *ROOT.glob("examples/trainers/*.py")]
    texts = [path.read_text() for path in files]
    for page in ROOT.glob("docs/trainers/*.md"):
        texts += re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    return frozenset(chain.from_iterable(re.findall(r"\w+", text) for text in texts))


def is_file(word: str) -> bool:
    """Whether a word in backticks is a path: it has a slash, or the ending of a file."""
    return re.fullmatch(r"[\w.*/+-]*(/[\w.*-]*|\.(py|toml|md|yml|cff))", word) is not None


@pytest.mark.parametrize("page", PAGES)
def test_paths(page: str) -> None:
    """Files and folders in backticks, and relative links."""
    named = filter(is_file, quoted(page))
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text_of(page))
    assert [] == [path for path in named if not MADE_LATER.search(path) and not is_there(path)]
    assert [] == [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_commands(page: str) -> None:
    """`hatch run` and `remat` with what follows."""
    settings = tomllib.loads((ROOT / "hatch.toml").read_text())
    scripts = {*settings["envs"]["default"]["scripts"]}
    for part in settings["envs"].keys() - {"default"}:
        scripts |= {f"{part}:{name}" for name in settings["envs"][part]["scripts"]}
    named = set(re.findall(r"hatch run ([\w:-]+)", text_of(page)))
    assert set() == named - scripts
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = {word.split()[1] for word in quoted(page) if re.match(r"remat [a-z]", word)}
    assert set() == named - commands


@pytest.mark.parametrize("page", PAGES)
def test_dotted_names(page: str) -> None:
    """Modules and their members, and attributes of classes that a package offers."""
    heads = {re.split(r"[(\[=]", word)[0] for word in quoted(page)}
    dotted = {head for head in heads if re.fullmatch(r"\w+(\.\w+)+", head)}
    modules = {name for name in dotted if name.startswith("remat")} - ENTRY_POINT_GROUPS
    assert [] == sorted(name for name in modules if not resolves(name))
    members = [name.split(".") for name in dotted if name.count(".") == 1]
    offered = [(kind, name, member) for name, member in members for kind in classes().get(name, ())]
    assert [] == [f"{name}.{member}" for kind, name, member in offered if not has(kind, member)]


@pytest.mark.parametrize("page", PAGES)
def test_words(page: str) -> None:
    """Identifiers and calls in backticks are words of the sources."""
    calls = [w for w in quoted(page) if re.fullmatch(r"[\w.]+(\(.*\)|\[.*\])?(=\w*)?", w) and not is_file(w)]
    code = " ".join(re.sub(r"[\"'].*?[\"']", "", call) for call in calls)
    named = set(re.findall(r"[A-Za-z_]\w{2,}", code)) - OTHERS
    known = words() | tool_words() if page.startswith("docs/trainers") else words()
    assert [] == sorted(named - known)


def test_the_picture_of_the_folders_is_complete() -> None:
    """Each folder of a package is in the first block of the page, and no other."""
    block = text_of("docs/architecture.md").split("\n\n")[1]
    shown = {
        part.split()[0]: set(re.findall(r"(\w+)/", part))
        for part in re.split(r"\n?    (?=remat_)", block)
        if part
    }
    folders = {
        path.name: {each.parent.name for each in path.glob("*/__init__.py")}
        for path in ROOT.glob("packages/*/src/remat_*/")
    }
    assert folders == shown


def test_the_picture_of_the_pipeline_is_the_code() -> None:
    """Each stage is a step of the function that the page names, in its order."""
    block = text_of("docs/architecture.md").split("## The pipeline")[1].split("\n\n")[1]
    shown = [line.split()[0] for line in block.splitlines()]
    source = (ROOT / "packages/executor/src/remat_executor/module/pipeline.py").read_text()
    body = source.split("def planned_step")[1].split('"""')[2].split("\n\n\n")[0]
    called = re.findall(r"(?:stages\.)?(\w+)\(", body)
    called.remove("report_end")  # no stage: that there are no more
    assert shown == ["plan" if name == "planner" else name for name in called]


def test_docstrings_name_modules_that_are_there() -> None:
    """`folder.module` is a module of the package that says so, and `file.py` a file of the repository.

    `autograd` and `optimizer` are left out: such names are mostly torch's.
    """
    files = {
        path.name for folder in ("packages/*/src", "benchmarks") for path in ROOT.glob(f"{folder}/**/*.py")
    }
    missing, looked_at = [], 0
    for package in ROOT.glob("packages/*/src/remat_*/"):
        folders = {path.name for path in package.iterdir() if path.is_dir()} - {"autograd", "optimizer"}
        for path in package.rglob("*.py"):
            source = path.read_text()
            for folder, module in re.findall(r"`(\w+)\.(\w+)[\w.]*`", source):
                if folder in folders:
                    looked_at += 1
                    known = re.findall(r"\w+", (package / folder / "__init__.py").read_text())
                    if not (package / folder / f"{module}.py").exists() and module not in known:
                        missing.append(f"{path.name}: {folder}.{module}")
            missing += [
                f"{path.name}: {name}"
                for name in re.findall(r"`[\w/]*?(\w+\.py)`", source)
                if name not in files
            ]
    assert looked_at > 10
    assert [] == missing
