"""Format bytes and seconds for people."""

import math

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def format_nbytes(nbytes: int) -> str:
    """Bytes for people: three digits and a binary unit, such as ``1.43 GiB``; below 1024 the exact number."""
    size, power = abs(float(nbytes)), 0
    # 1023.9996 would print as 1024, so the step to the next unit looks at the printed digits.
    while power < len(BINARY) - 1 and float(f"{size:.4g}") >= 1024:
        size, power = size / 1024, power + 1
    sign = "-" if nbytes < 0 else ""
    if power == 0:
        return f"{sign}{abs(nbytes)} B"
    return f"{sign}{_three_digits(size)} {BINARY[power]}"


def format_seconds(seconds: float) -> str:
    """Seconds for people: three digits and a unit, such as ``12.3 ms``, from 2 min on ``3 min 20 s``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if abs(seconds) >= 120:
        minutes, remainder = divmod(round(abs(seconds)), 60)
        return f"{'-' if seconds < 0 else ''}{minutes} min {remainder} s"
    if not seconds:
        return "0 s"
    # 999.7 us would print as 1000 us, so the choice of the unit looks at the printed digits.
    printed = float(f"{abs(seconds):.3g}")
    scale, unit = next((pair for pair in _SECONDS if printed >= pair[0]), (1e-9, "ns"))
    return f"{'-' if seconds < 0 else ''}{_three_digits(abs(seconds) / scale)} {unit}"


def format_change(ratio: float, digits: int = 2) -> str:
    """A ratio for people as a signed percentage, such as ``+1.74%``; empty if its digits are all zero."""
    text = f"{ratio:+.{digits}%}"
    return text if text.strip("+-0.%") else ""


def in_brackets(ratio: float) -> str:
    """The same after a figure, such as `` (+1.74%)``."""
    text = format_change(ratio)
    return f" ({text})" if text else ""


def _three_digits(size: float) -> str:
    """At least three digits, zeros at the end too: figures below each other have the same number of them."""
    printed = float(f"{size:.3g}")
    return f"{size:.{2 if printed < 10 else 1 if printed < 100 else 0}f}"
