"""Results on disk: the rows of a benchmark, and when and with what they were made."""

import datetime
import json
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def write(path: Path, rows: Any, *, packages: Iterable[str], **facts: Any) -> None:
    """Write a file of results.

    Args:
        path: its folder is made.
        rows: what was measured, as JSON.
        packages: those whose versions matter.
        facts: what else a reader must know, such as the number of threads.
    """
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        **facts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
