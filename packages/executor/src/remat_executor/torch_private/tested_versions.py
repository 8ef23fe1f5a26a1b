"""Warn of a torch that is newer than those that remat was tested with.

In a new minor version a private name may be there and mean something else, which no missing name shows.
"""

from functools import cache

from remat_executor.errors import NEWEST_TORCH, OLDEST_TORCH, warn


@cache
def warn_if_untested(version: str) -> None:
    """Warn, once in a process, of a torch above the newest minor version that was tested.

    Args:
        version: torch's own, such as "2.14.0+cpu".
    """
    if _minor(version) > _minor(NEWEST_TORCH):
        tested = f"{OLDEST_TORCH} to {NEWEST_TORCH}"
        warn(
            f"torch {version} is newer than what this remat was tested with ({tested}): "
            f"compare a step with eager's before you rely on it, or install torch<{_above(NEWEST_TORCH)}"
        )


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def _above(version: str) -> str:
    major, minor = _minor(version)
    return f"{major}.{minor + 1}"
