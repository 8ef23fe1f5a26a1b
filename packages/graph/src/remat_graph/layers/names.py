"""Names of layers: dotted paths of submodules, such as ``transformer.h.3.mlp``.

Layers that repeat are folded to one pattern, ``transformer.h.*.mlp``, so that a model has a few of them.
"""

from collections.abc import Collection, Sequence

MOST_PATTERNS = 12
"""Patterns of a whole model, if a shorter form of the names gives as few."""


def enclosing(names: Sequence[str]) -> str:
    """The innermost layer that encloses all of these layers; "" if only the model does."""
    if not names:
        return ""
    first, last = (name.split(".") for name in (min(names), max(names)))
    common = 0
    while common < min(len(first), len(last)) and first[common] == last[common]:
        common += 1
    return ".".join(first[:common])


def cut(name: str, depth: int) -> str:
    """The layer at most `depth` levels below the model that encloses a layer."""
    return ".".join(name.split(".")[:depth])


def folded(name: str) -> str:
    """The pattern of a layer: numbers of blocks become stars."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def depth_for(names: Collection[str], most: int = MOST_PATTERNS) -> int:
    """The largest depth at which these layers have at most `most` patterns, and at least 1."""
    deepest = max((name.count(".") + 1 for name in names), default=1)
    for depth in range(deepest, 1, -1):
        if len({folded(cut(name, depth)) for name in names}) <= most:
            return depth
    return 1
