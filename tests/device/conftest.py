"""Tests here need the test device: other sessions do not collect them."""

import sys

collect_ignore_glob = [] if "tests.device.plugin" in sys.modules else ["test_*.py"]
