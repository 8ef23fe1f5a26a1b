"""The planned steps that a module keeps, one for each way it is called.

Shapes, dtypes, modes and devices are all in a call's key, so a call that returns to an earlier way finds its
step. A step holds its captured graph and its lowered parts, but no tensors of a size that matters; still, a
sequence length that never comes twice would fill any memory. So there is a bound, and what has not been used
for the longest time goes first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from remat_executor.errors import BadInput
from remat_graph.errors import shown

K = TypeVar("K")
S = TypeVar("S")

MOST_PLANS = 32


class LRUCache(Generic[K, S]):
    """A bounded mapping from keys to steps that forgets the least recently used one.

    Args:
        most: how many steps are kept, 1 or more.

    Attributes:
        most: the same.
        dropped: how many have been forgotten.

    Raises:
        BadInput: `most` is no such number.
    """

    def __init__(self, most: int = MOST_PLANS) -> None:
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise BadInput(
                problem=f"max_plans is {shown(most)}, not a number of plans",
                advice="give a whole number from 1 on",
            )
        self.most = most
        self.dropped = 0
        self._items: OrderedDict[K, S] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[S]:
        return iter(self._items.values())

    def get(self, key: K) -> S | None:
        """The step of a key, which is now the most recently used one; None if there is none."""
        try:
            self._items.move_to_end(key)  # in one go: another thread may look for it
            return self._items[key]
        except KeyError:
            return None

    def __setitem__(self, key: K, step: S) -> None:
        """Keep a step; where there is no room, another one goes."""
        self._items.pop(key, None)
        if len(self._items) >= self.most:
            del self._items[next(iter(self._items))]
            self.dropped += 1
        self._items[key] = step

    def copy(self, keeps: Callable[[K], bool]) -> "LRUCache[K, S]":
        """The same steps, with a bound and an order of their own.

        Args:
            keeps: whether the step of a key is among them.
        """
        copied: LRUCache[K, S] = LRUCache(self.most)
        copied._items = OrderedDict((key, step) for key, step in self._items.items() if keeps(key))
        return copied
