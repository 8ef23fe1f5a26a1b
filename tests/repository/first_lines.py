"""Print the first Python block of the README: what a new user runs first.

    python tests/repository/first_lines.py

It imports nothing but Python's own modules, so that any environment can run it.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def first_lines() -> str:
    """The block, with a line break at its end."""
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)[0]


if __name__ == "__main__":
    sys.stdout.write(first_lines())
