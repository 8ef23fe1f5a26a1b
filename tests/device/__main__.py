"""Run a script on the test device: ``python -m tests.device benchmarks/gpu.py --small``."""

import runpy
import sys
import time
from pathlib import Path

from tests.device.build import library
from tests.device.torch_cuda import load

# torch's thread of a device drops the last node of a backward after the caller has gone on. If Python ends at
# that moment, a node of a Python function makes the thread end the process (before Python 3.13).
AT_EXIT_S = 0.5

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("no script was given; expected `python -m tests.device SCRIPT [ARGUMENT...]`")
    load(library())
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # as if Python ran it
    runpy.run_path(sys.argv[0], run_name="__main__")
    time.sleep(AT_EXIT_S)
