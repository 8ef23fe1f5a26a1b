"""Brute force over the copies that an order of ops may have: any value, any gap, any moment, any sequence.

A best-first search over (runs done, values on the device, values on the host, copies under way), by the
referee's rules: a copy's destination is held from its start, and each direction takes one copy after the
other. A value is dropped only when something has no room, and a copy is started only once its lane is free
within the longest run: neither costs a schedule its time. Sets of values are the bits of numbers.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import count

from remat_graph import Graph, Links

Flights = tuple[tuple[int, float], ...]  # (value, seconds until it has arrived)


def fastest_of(
    graph: Graph, orders: Iterable[Sequence[int]], budget_nbytes: int, links: Links, known_s: float
) -> float:
    """Least time of these orders with any copies, or what is known if that is no more.

    One implementation an op, no reuse, no tangents or gradients, nothing at home.
    """
    for order in sorted(orders, key=lambda order: sum(graph.ops[op].first.time_s for op in order)):
        known_s = min(known_s, fastest_s(graph, order, budget_nbytes, links, known_s))
    return known_s


def fastest_s(
    graph: Graph, order: Sequence[int], budget_nbytes: int, links: Links, known_s: float = float("inf")
) -> float:
    """Least time of one order, or infinite if that is not below `known_s`."""
    size = [graph.allocated_nbytes(v) for v in range(len(graph.values))]
    out_s = [value.nbytes / links.to_host_nbytes_per_s for value in graph.values]
    back_s = [value.nbytes / links.to_device_nbytes_per_s for value in graph.values]
    runs = [graph.ops[op].first for op in order]
    reads, makes = [bits(run.inputs) for run in runs], [bits(run.outputs) for run in runs]
    longest_s = max(run.time_s for run in runs)
    live = [0]  # before each run, what it or a later one reads of what is made
    for read, made in zip(reversed(reads), reversed(makes), strict=True):
        live.append(live[-1] & ~made | read)
    live.reverse()
    rest_s = [sum(run.time_s for run in runs[position:]) for position in range(len(runs) + 1)]
    ticket = count()
    heap = [(rest_s[0], 0, next(ticket), 0, 0, 0, Flights(), Flights())]
    seen: set[tuple[int, int, int, Flights, Flights]] = set()

    @cache
    def held(values: int) -> int:
        return sum(size[v] for v in members(values))

    def push(clock_s: float, position: int, device: int, host: int, out: Flights, back: Flights) -> None:
        least_s = clock_s + rest_s[position]
        state = (position, device & live[position], host & live[position], out, back)
        if least_s < known_s and state not in seen:
            heapq.heappush(heap, (least_s, -position, next(ticket), *state))

    while heap:
        least_s, _, _, position, device, host, out, back = heapq.heappop(heap)
        if (position, device, host, out, back) in seen:
            continue
        seen.add((position, device, host, out, back))
        if position == len(runs):
            return least_s
        clock_s, run = least_s - rest_s[position], runs[position]
        leaving, coming = dict(out), dict(back)
        short = held(device) + held(makes[position]) + run.workspace_nbytes > budget_nbytes
        if not reads[position] & ~device and not short:
            spent_s = max((coming.get(v, 0.0) for v in run.inputs), default=0.0) + run.time_s
            now = device | makes[position], host & ~makes[position]
            push(clock_s + spent_s, position + 1, *now, after(out, spent_s), after(back, spent_s))
        lane_s = max(leaving.values(), default=0.0)
        for v in members(device & ~host) if lane_s <= longest_s else ():
            push(clock_s, position, device, host | 1 << v, (*out, (v, lane_s + out_s[v])), back)
        lane_s = max(coming.values(), default=0.0)
        for v in members(host & ~device) if lane_s <= longest_s else ():
            done_s = max(lane_s, leaving.get(v, 0.0)) + back_s[v]
            if held(device) + size[v] <= budget_nbytes:
                push(clock_s, position, device | 1 << v, host, out, (*back, (v, done_s)))
            else:
                short = True
        for v in members(device & host) if short else ():
            if v not in coming:
                wait_s = leaving.get(v, 0.0)
                now = device & ~(1 << v), host
                push(clock_s + wait_s, position, *now, after(out, wait_s), after(back, wait_s))
    return float("inf")


def bits(values: Iterable[int]) -> int:
    return sum(1 << v for v in values)


def members(values: int) -> Iterator[int]:
    while values:
        lowest = values & -values
        yield lowest.bit_length() - 1
        values ^= lowest


def after(flights: Flights, seconds: float) -> Flights:
    """What is still under way then."""
    return tuple((v, left_s - seconds) for v, left_s in flights if left_s > seconds)
