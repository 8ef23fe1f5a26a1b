"""Run an example as its reader would: ``python -m tests.helpers.example SCRIPT [ARGUMENT...]``.

The tests' torchvision has none of its operators, which other packages need when they import it.
"""

import runpy
import sys
from pathlib import Path

from tests.helpers.models.imports import import_torchvision

if __name__ == "__main__":
    import_torchvision()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as if Python ran it
    runpy.run_path(sys.argv[0], run_name="__main__")
