"""Format bytes and seconds for people."""

import math

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")


def format_nbytes(nbytes: int) -> str:
    """Bytes for people: three digits and a binary unit, such as ``1.43 GiB``; below 1024 the exact number."""
    size, power = abs(float(nbytes)), 0
    # 1023.9996 would print as 1024, so the step to the next unit looks at the printed digits.
    while power < len(BINARY) - 1 and float(f"{size:.4g}") >= 1024:
        size, power = size / 1024, power + 1
    sign = "-" if nbytes < 0 else ""
    if power == 0:
        return f"{sign}{abs(nbytes)} B"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{sign}{size:.{digits}f} {BINARY[power]}"


def format_seconds(seconds: float) -> str:
    """Seconds for people: three digits and a unit, such as ``12.3 ms``, from 2 min on ``3 min 20 s``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if abs(seconds) >= 120:
        minutes, remainder = divmod(round(abs(seconds)), 60)
        return f"{'-' if seconds < 0 else ''}{minutes} min {remainder} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"
