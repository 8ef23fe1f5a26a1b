"""Which attributes a captured step depends on: those that its capture read."""

import attrs


@attrs.frozen(cache_hash=True)
class Reads:
    """The attributes that a capture read, by name; hashable.

    A capture runs the user's code. If each attribute that it read has the same value, it would run the same
    code again, so the other attributes cannot change the graph. Names count for all objects together, since
    two objects may share one dict.

    Attributes:
        names: every name that was asked of any module, or of any object whose class was observed.
        kinds: the classes that were observed and of which no object was read as a whole (`vars`, `copy`);
            of other classes every attribute counts as read.
    """

    names: frozenset[str] = frozenset()
    kinds: frozenset[type] = frozenset()

    def include(self, kind: type, name: str) -> bool:
        """Whether an attribute of an object of a class may have been read."""
        return kind not in self.kinds or name in self.names

    def merged(self, other: "Reads") -> "Reads":
        """What either includes."""
        return Reads(self.names | other.names, self.kinds & other.kinds)


EVERYTHING = Reads()
"""Nothing was observed: every attribute counts as read."""
