"""Parts of a search side by side, in threads.

Compiled loops and HiGHS let other threads run. How many parts run at once is a constant of the search and not
the number of processors, so that results do not depend on the machine; on one processor they take turns.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

from remat_solvers.protocol import Deadline

LANES = 2  # parts that run at once, and as many in each of them
CHECK_S = 0.05  # between two looks for Ctrl-C while only other threads work

T = TypeVar("T")


def batches(parts: Iterable[T], lanes: int = LANES) -> Iterator[list[T]]:
    """As many at a time as run at once."""
    waiting = iter(parts)
    while batch := list(islice(waiting, lanes)):
        yield batch


def in_parallel(tasks: Sequence[Callable[[Deadline], T]], deadline: Deadline) -> list[T]:
    """The results of tasks, in the order of the tasks.

    The first runs in the caller's thread, and it alone reports and looks for Ctrl-C. No task may change what
    another one reads.

    Args:
        tasks: called with a part of the deadline.
        deadline: of all of them. An error in the caller's thread, such as Ctrl-C, ends the time of the
            others; one of another task is raised when the tasks before it have ended.
    """
    if len(tasks) <= 1:
        return [task(deadline) for task in tasks]
    silent, process = deadline.unwatched(), os.getpid()
    with ThreadPoolExecutor(len(tasks) - 1, thread_name_prefix="remat search") as threads:
        try:
            others = [threads.submit(task, silent) for task in tasks[1:]]
            first = tasks[0](deadline)
            if os.getpid() != process:  # forked by a callback: the threads are the parent's
                return [first, *(task(silent) for task in tasks[1:])]
            while wait(others, timeout=CHECK_S).not_done:
                if deadline.on_check is not None:
                    deadline.on_check()
            return [first, *(other.result() for other in others)]
        except BaseException:
            silent.stop()
            raise
