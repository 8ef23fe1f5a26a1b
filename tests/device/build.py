"""Build the library of the test device, once for each torch and state of the sources.

python -m tests.device.build
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
CACHE = Path(__file__).resolve().parents[2] / "build" / "test_device"
NAME = "remat_test_device"
LIMIT_S = 900.0  # of the compiler, for which other processes wait


class CannotBuild(RuntimeError):
    """The library cannot be built here; the message says why."""


class NoCompiler(CannotBuild):
    """There is no compiler: the only reason to go without the device."""


def torch_folder() -> Path:
    """Where torch is installed. It is not imported: the library comes first."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuild("torch is not installed")
    return Path(found.origin).parent


def library(cache: Path = CACHE) -> Path:
    """The library, built if there is none for this Python, this torch and these sources.

    Of several processes one builds, and the others wait. The file appears under its name when it is complete.
    """
    folder = cache / _key()
    path = folder / f"{NAME}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not path.exists():
            _build(path)
    return path


def _key() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    python = sys.implementation.cache_tag
    return f"torch{importlib.metadata.version('torch')}-{python}-{digest.hexdigest()[:16]}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompiler("there is no C++ compiler: install g++, or set CXX")
    torch = torch_folder()
    unfinished = path.with_suffix(f".{os.getpid()}")
    include = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    done = subprocess.run(
        [
            *(compiler, "-O0", "-std=c++20", "-fPIC", "-shared", "-w"),
            *(f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H"),
            *(f"-I{folder}" for folder in include),
            *(str(SOURCES / "device.cpp"), "-o", str(unfinished), f"-L{torch / 'lib'}"),
            *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{torch / 'lib'}"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise CannotBuild(f"{compiler} failed for torch at {torch}: " + "\n".join(errors[:10]))
    unfinished.rename(path)


def main() -> None:
    """Build it before several processes need it; without a compiler there is nothing to do."""
    try:
        sys.stdout.write(f"{library()}\n")
    except NoCompiler as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()
