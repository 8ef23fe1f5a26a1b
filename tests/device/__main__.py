"""Run a script on the test device: ``python -m tests.device benchmarks/gpu.py --small``."""

import runpy
import sys
from pathlib import Path

from tests.device.build import library
from tests.device.torch_cuda import load

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("no script was given; expected `python -m tests.device SCRIPT [ARGUMENT...]`")
    load(library())
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # as if Python ran it
    runpy.run_path(sys.argv[0], run_name="__main__")
