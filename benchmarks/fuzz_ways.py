"""Hold random small models, planned with all ways of a family, against eager in every bit.

    python benchmarks/fuzz_ways.py [FAMILY ...] [--count N] [--first SEED]

Models without a way of the family are drawn again, so `--count` models have one. The first difference ends
the run; its seed draws the same model again.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ways.fuzz import FAMILIES, cases_with_ways


def main() -> int:
    """Print a line for each family."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help="all by default")
    parser.add_argument("--count", type=int, default=300, help="models with ways of each family")
    parser.add_argument("--first", type=int, default=0, help="seed of the first model")
    options = parser.parse_args()
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        parser.error(f"no family {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    warnings.simplefilter("ignore")  # of models that draw nothing, or have NaN
    for name in options.families:
        began_s, ways, seed = time.perf_counter(), 0, options.first
        cases = cases_with_ways(FAMILIES[name], options.count, options.first)
        for checked, (last, switches) in enumerate(cases, 1):
            seed = last
            ways += switches
            if checked % 50 == 0:
                print(f"{name:10} {checked} of {options.count}", file=sys.stderr, flush=True)
        models = f"{options.count} models of {seed + 1 - options.first} with {ways} ways"
        print(f"{name:10} {models}: equal bits ({time.perf_counter() - began_s:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
