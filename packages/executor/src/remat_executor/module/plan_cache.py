"""A bounded cache of planned steps, one for each signature that the module is called with.

Shapes, dtypes, modes and devices are part of a signature, so a call that repeats an earlier one finds its
step. A step holds its captured graph and lowered graphs but no large tensors. A sequence length that never
repeats would still fill any memory, so the cache is bounded.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from remat_executor.errors import BadInput
from remat_graph.errors import shown

K = TypeVar("K")
S = TypeVar("S")

MOST_PLANS = 32


def check_most(most: int) -> None:
    """Check how many plans are kept.

    Raises:
        BadInput: it is not a whole number from 1 on.
    """
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise BadInput(
            problem=f"max_plans is {shown(most)}, not a number of plans",
            advice="give a whole number from 1 on",
        )


class LRUCache(Generic[K, S]):
    """A bounded mapping that drops the least recently used item.

    Attributes:
        most: how many items are kept, 1 or more.
        dropped: how many items have been dropped.

    Raises:
        BadInput: `most` is not such a number.
    """

    def __init__(self, most: int = MOST_PLANS) -> None:
        check_most(most)
        self.most = most
        self.dropped = 0
        self._items: OrderedDict[K, S] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[S]:
        return iter(self._items.values())

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def keys(self) -> tuple[K, ...]:
        """The keys, the least recently used first."""
        return tuple(self._items)

    def get(self, key: K) -> S | None:
        """The item of a key, which becomes the most recently used one; None if there is none."""
        try:
            self._items.move_to_end(key)  # no look-up before: another thread may drop the item in between
            return self._items[key]
        except KeyError:
            return None

    def __setitem__(self, key: K, item: S) -> None:
        """Keep an item; a full cache drops another one."""
        self._items.pop(key, None)
        if len(self._items) >= self.most:
            del self._items[next(iter(self._items))]
            self.dropped += 1
        self._items[key] = item

    def copy(self, keeps: Callable[[K], bool]) -> "LRUCache[K, S]":
        """The items whose keys satisfy `keeps`, with a bound and an order of their own."""
        copied: LRUCache[K, S] = LRUCache(self.most)
        copied._items = OrderedDict((key, item) for key, item in self._items.items() if keeps(key))
        return copied
