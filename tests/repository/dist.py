"""Build the five distributions into `dist/`, check them, and use their wheels in fresh environments.

    python -m tests.repository.dist

Wheels are built from the sdists, and equal those of the sources. A fresh environment has the wheels and what
they declare, nothing else; to download nothing, it has links to what is installed where this runs. The first
lines of the README run in one, and `remat` in another with remat-solvers alone, which has no torch.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repository.address import address
from tests.repository.first_lines import first_lines

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
NAMES = ("graph", "solvers", "executor", "offload", "facade")
GRAPH = ROOT / "tests" / "data" / "graphs" / "vgg16.json"


class Wrong(Exception):
    """What is wrong with a distribution, in one line or with the output of the program that found it."""


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    """The output of a program, which finds no plans and costs of earlier runs.

    Raises:
        Wrong: it fails.
    """
    alone = {**os.environ, "REMAT_CACHE_DIR": str(cwd / "cache")}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=alone, capture_output=True, text=True)
    if done.returncode:
        raise Wrong(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


def hatchling(kind: str, source: Path, target: Path) -> Path:
    """Build one file of a package: an sdist or a wheel."""
    target.mkdir(parents=True, exist_ok=True)
    before = set(target.iterdir())
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", target, cwd=source)
    (made,) = set(target.iterdir()) - before
    return made


def build(name: str, folder: Path, workspace: Path) -> tuple[Path, Path]:
    """Build the sdist of a package, and its wheel from the sdist.

    Raises:
        Wrong: the sources make another wheel.
    """
    source = ROOT / "packages" / name
    sdist = hatchling("sdist", source, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(workspace, filter="data")
    wheel = hatchling("wheel", workspace / sdist.name.removesuffix(".tar.gz"), folder)
    direct = hatchling("wheel", source, workspace / name)
    if wheel.read_bytes() != direct.read_bytes():
        raise Wrong(f"{wheel.name}: the sdist makes another wheel than the sources: compare their files")
    return sdist, wheel


def metadata(wheel: Path) -> Distribution:
    """What a wheel says about itself."""
    archive = zipfile.Path(wheel)
    return PathDistribution(next(each for each in archive.iterdir() if each.name.endswith(".dist-info")))


def relative_links(text: str) -> list[str]:
    """The targets in a Markdown text, in line or below it, that lead nowhere on the page of an index."""
    return re.findall(r"(?:\]\(|^\[[^]]+\]: )(?!https?://|#)([^)\s]*)", text, flags=re.MULTILINE)


def problems(name: str, wheel: Path, made: Distribution) -> Iterator[str]:
    """What the metadata and the files of a wheel lack."""
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    urls = dict(line.split(", ") for line in made.metadata.get_all("Project-URL", ()))
    for url in ("Homepage", "Documentation", "Repository", "Issues", "Changelog"):
        if not urls.get(url, "").startswith(address()):
            yield f"the url {url} does not start with {address()}"
    if made.metadata["Author"] != "The remat authors":
        yield f"the author is {made.metadata['Author']}"
    if made.metadata.get_all("License-File") != ["LICENSE"]:
        yield "LICENSE is not a license file"
    readme = made.metadata.get_payload()  # type: ignore[attr-defined]
    yield from (f"the README has a relative link: {link}" for link in relative_links(readme))
    files = set(zipfile.ZipFile(wheel).namelist())
    yield from (f"{file} is missing" for file in {f"remat_{name}/py.typed"} - files)
    declared = {("console_scripts", *item) for item in project.get("scripts", {}).items()}
    for group, points in project.get("entry-points", {}).items():
        declared |= {(group, *item) for item in points.items()}
    if declared != {(point.group, point.name, point.value) for point in made.entry_points}:
        yield "the entry points are not those of pyproject.toml"


def needed(wheels: Iterable[Path]) -> dict[str, Distribution]:
    """The distributions that wheels need here, in addition to the wheels, by name.

    Raises:
        PackageNotFoundError: one is not installed here.
    """
    ours = {canonicalize_name(made.name): made for made in map(metadata, wheels)}
    found: dict[str, Distribution] = {}
    left = [(made, frozenset[str]()) for made in ours.values()]
    while left:
        made, extras = left.pop()
        for line in made.requires or ():
            wanted = Requirement(line)
            name = canonicalize_name(wanted.name)
            applies = wanted.marker is None or any(
                wanted.marker.evaluate({"extra": extra}) for extra in {"", *extras}
            )
            if applies and name not in ours and name not in found:
                found[name] = distribution(name)
                left.append((found[name], frozenset(wanted.extras)))
    return found


def environment(folder: Path, wheels: Iterable[Path]) -> Path:
    """A fresh environment with wheels, and links to what they need; its folder of programs."""
    wheels = tuple(wheels)
    venv.create(folder)
    programs = folder / ("Scripts" if sys.platform == "win32" else "bin")
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    run(*pip, "install", "-q", "--no-index", "--no-deps", *wheels)
    packages = next(folder.glob("**/site-packages"))
    for each in needed(wheels).values():
        for top in {Path(file).parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():  # a folder that several share
                (packages / top).symlink_to(Path(str(each.locate_file(top))))
    run(*pip, "check")
    return programs


def use(wheels: dict[str, Path], workspace: Path) -> Iterator[str]:
    """What the wheels print where only they and their requirements are installed."""
    programs = environment(workspace / "all", wheels.values())
    lines = workspace / "first_lines.py"
    lines.write_text(first_lines())
    yield run(programs / "python", "-I", lines, cwd=workspace)
    yield run(programs / "remat", "show", "--help", cwd=workspace).splitlines()[0]
    programs = environment(workspace / "solvers", (wheels["graph"], wheels["solvers"]))
    torch = run(programs / "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))")
    if torch != "None\n":
        raise Wrong(f"remat-solvers needs torch: {torch}")
    yield run(programs / "remat", "solve", GRAPH, "--budget", "100%", "--solver", "noremat", cwd=workspace)


def main() -> int:
    """Build, check and use; 1 if something is wrong."""
    shutil.rmtree(DIST, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            workspace = Path(temporary)
            made = {name: build(name, DIST, workspace) for name in NAMES}
            wheels = {name: wheel for name, (_, wheel) in made.items()}
            files = [path for pair in made.values() for path in pair]
            run(sys.executable, "-m", "twine", "check", "--strict", *files)
            # W009: the script's module stands alone in the wheel of remat-solvers, on purpose.
            run(sys.executable, "-m", "check_wheel_contents", "--ignore", "W009", *wheels.values())
            for name, wheel in wheels.items():
                for problem in problems(name, wheel, metadata(wheel)):
                    raise Wrong(f"{wheel.name}: {problem}")
            for printed in use(wheels, workspace):
                sys.stdout.write(f"{printed.rstrip()}\n\n")
    except Wrong as wrong:
        sys.stderr.write(f"{wrong}\n")
        return 1
    sys.stdout.writelines(f"{path.relative_to(ROOT)}\n" for path in files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
