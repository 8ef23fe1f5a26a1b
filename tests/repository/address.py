"""Write the public address of the repository, which CITATION.cff has, into all files that name it.

    python -m tests.repository.address

Whoever publishes edits one line, `repository-code` in CITATION.cff, and runs this.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = "https://example.org/remat"
"""The address until somebody publishes; nothing with it is released."""

FILES = ("packages/*/pyproject.toml", "packages/*/README.md", "*.md", ".github/**/*", "mkdocs.yml")


def address() -> str:
    """The public address, without a slash at its end."""
    cited: str = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"]
    return cited.rstrip("/")


def named_before() -> str:
    """The address that the distributions name."""
    settings = tomllib.loads((ROOT / "packages/graph/pyproject.toml").read_text(encoding="utf-8"))
    named: str = settings["project"]["urls"]["Repository"]
    return named


def files() -> Iterator[Path]:
    """The files that may name the address."""
    for pattern in FILES:
        yield from (path for path in sorted(ROOT.glob(pattern)) if path.is_file())


def main() -> int:
    """Replace the old address by the new one, and print which files changed."""
    old, new = named_before(), address()
    for path in files():
        text = path.read_text(encoding="utf-8")
        if old != new and old in text:
            path.write_text(text.replace(old, new), encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
