"""Names of layers: dotted paths of submodules, such as ``transformer.h.3.mlp``.

Layers that repeat are folded to one pattern, ``transformer.h.*.mlp``, so that a model has a few of them.
Those of a `Sequential`, which differ, keep their numbers, or are a range, ``features.0-36``, if they are
many; in a model that is a `Sequential` they are ``[0]`` or ``[0-36]``.
"""

from collections import defaultdict
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


class Patterns:
    """The patterns of the layers of a model.

    Args:
        names: of all layers that have ops.
        most: patterns, if a shorter form of the names gives as few.
        depth: of the layers that have patterns; None for the largest with few patterns.
    """

    def __init__(
        self, names: Collection[str], most: int = MOST_PATTERNS, *, depth: int | None = None
    ) -> None:
        self._depth = depth_for(names, most) if depth is None else depth
        layers = {self.layer(name) for name in names}
        inner = {cut(name, level) for name in names for level in range(name.count(".") + 1)}
        numbered = [layer for layer in layers - inner if layer.rpartition(".")[2].isdecimal()]
        self._numbered = {layer: _ending(layer, layer.rpartition(".")[2]) for layer in numbered}
        if len({self(layer) for layer in layers}) > most:
            self._numbered = _ranges(numbered)

    def layer(self, name: str) -> str:
        """The layer with a pattern that encloses a layer."""
        return cut(name, self._depth)

    def __call__(self, name: str) -> str:
        """The pattern of a layer; "" for the model itself."""
        layer = self.layer(name)
        return self._numbered.get(layer) or folded(layer)


def _ranges(numbered: Collection[str]) -> dict[str, str]:
    """For layers that end with a number, the range of the numbers of those with one pattern."""
    members: defaultdict[str, list[int]] = defaultdict(list)
    for layer in numbered:
        members[folded(layer)].append(int(layer.rpartition(".")[2]))
    ends = {pattern: (min(found), max(found)) for pattern, found in members.items()}
    return {
        layer: _ending(layer, "-".join(map(str, dict.fromkeys(ends[folded(layer)])))) for layer in numbered
    }


def _ending(layer: str, last: str) -> str:
    """The pattern of the enclosing layer, and a last part; a number alone would read as a count."""
    outer = folded(layer).rpartition(".")[0]
    return f"{outer}.{last}" if outer else f"[{last}]"
