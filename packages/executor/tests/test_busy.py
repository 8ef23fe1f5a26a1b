"""Other processes keep the cores busy: times leave the waits out, or are doubtful and measured again.

The machine is simulated: two clocks that only operators move, and a number of threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch

from remat_executor import RematWarning
from remat_executor.costs.cache import CostCache, MeasuredCost
from remat_executor.costs.measure import measure
from remat_executor.costs.stopwatch import HostClocks

US = 1e-6
BUSY = "other processes keep the cores busy"


@attrs.define
class Machine:
    """Its clocks, and torch's number of threads.

    Attributes:
        waits_s: what each run on several threads waits for a core.
    """

    threads: int
    passed_s: float = 0.0
    worked_s: float = 0.0
    waits_s: float = 0.0
    runs: list[str] = attrs.field(factory=list)

    @property
    def clock(self) -> HostClocks:
        """The clocks."""
        return HostClocks(passed=lambda: self.passed_s, worked=lambda: self.worked_s)

    def taking(
        self, one_s: float, several_s: float, name: str = "", waits_s: float = 0.0
    ) -> Callable[[], Callable[[], None]]:
        """An operator that takes these seconds on one thread and on several, and waits longer than others."""

        def run() -> None:
            alone = self.threads == 1
            taken_s = one_s if alone else several_s
            self.runs.append(name)
            self.worked_s += taken_s
            self.passed_s += taken_s + (0.0 if alone else self.waits_s + waits_s)

        return lambda: run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with two threads."""
    made = Machine(threads=2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: made.threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: setattr(made, "threads", threads))
    return made


def test_waits_of_one_thread_do_not_count(machine: Machine) -> None:
    """An operator of torch is timed by its thread's clock; one of the user's may have threads of its own."""
    machine.threads = 1

    def run() -> None:
        machine.worked_s += 100 * US
        machine.passed_s += 1000 * US

    names = ("aten.mm(f32[3])", "again: aten.mm(f32[3])", "head(f32[3])", "mine.op(f32[3])")
    costs = measure({name: lambda: run for name in names}, clock=machine.clock)
    assert [100 * US] * 3 + [1000 * US] == pytest.approx([costs[name].time_s for name in names])


def test_the_least_sample_counts(machine: Machine) -> None:
    """On the CPU, since other load only adds time."""
    taken = iter([100.0, 100.0, 130.0, 120.0, 110.0, 101.0, *[140.0] * 100])

    def run() -> None:
        us = next(taken)
        machine.worked_s += us * US
        machine.passed_s += us * US

    assert pytest.approx(100 * US) == measure({"a": lambda: run}, clock=machine.clock)["a"].time_s


def test_a_wait_that_passes(machine: Machine) -> None:
    """Operators that waited at first are measured again after the others, and then are like any other."""
    machine.waits_s = 900 * US

    def calm_from_now(done: int, total: int) -> None:
        machine.waits_s = 0.0 if done == total else machine.waits_s

    requests = {key: machine.taking(150 * US, 100 * US) for key in "abc"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        costs = measure(requests, clock=machine.clock, on_progress=calm_from_now)
    assert [100 * US] * 3 == pytest.approx([cost.time_s for cost in costs.values()])
    assert not any(cost.doubtful for cost in costs.values())


def test_a_wait_that_stays(machine: Machine) -> None:
    """Times that cannot be trusted are those on one thread with the speedup of others; one line says so."""
    machine.waits_s = 200 * US
    requests = {
        # Both measurements give 800 us, and that is plausible.
        "long 1": machine.taking(1000 * US, 600 * US),
        "long 2": machine.taking(1000 * US, 600 * US),
        "long 3": machine.taking(1000 * US, 600 * US),
        "slower on several": machine.taking(50 * US, 300 * US),
        "spoiled each time": machine.taking(600 * US, 600 * US, waits_s=5000 * US),
        "spoiled and short": machine.taking(20 * US, 15 * US, waits_s=5000 * US),
    }
    with pytest.warns(RematWarning, match=BUSY) as caught:
        costs = measure(requests, clock=machine.clock)
    assert (1, 0) == (len(caught), str(caught[0].message).count("\n"))
    assert machine.threads == 2
    assert all(cost.doubtful for cost in costs.values())
    expected = {
        **dict.fromkeys(("long 1", "long 2", "long 3"), 800),
        "slower on several": 500,
        "spoiled each time": 0.8 * 600,  # as those of about that length
        "spoiled and short": 0.8 * 20,  # as all
    }
    assert expected == pytest.approx({key: cost.time_s / US for key, cost in costs.items()})


def test_a_cache_warns_once(machine: Machine, tmp_path: Path) -> None:
    """However often a module is planned while the machine is busy."""
    machine.waits_s = 200 * US
    cache = CostCache("cpu", tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in ("one", "two"):
            request = {key: machine.taking(1000 * US, 600 * US)}
            assert measure(request, cache=cache, clock=machine.clock)[key].doubtful
    assert 1 == len([each for each in caught if BUSY in str(each.message)])


def test_measurements_that_disagree(machine: Machine) -> None:
    """The less of the two is not trusted either."""
    taking_us = iter([900, 700])

    def loaded() -> Callable[[], None]:
        return machine.taking(400 * US, 300 * US, waits_s=next(taking_us) * US)()

    with pytest.warns(RematWarning, match=BUSY):
        costs = measure({"a": loaded}, clock=machine.clock)
    assert pytest.approx(400 * US) == costs["a"].time_s


def test_an_operator_of_the_user_is_not_bounded(machine: Machine) -> None:
    """Its own threads may do the work, which the clock of one thread does not count."""
    machine.waits_s = 900 * US
    with pytest.warns(RematWarning, match=BUSY):
        cost = measure({"mine.op()": machine.taking(10 * US, 100 * US)}, clock=machine.clock)["mine.op()"]
    assert pytest.approx(1000 * US) == cost.time_s
    assert cost.doubtful


def test_an_operator_that_always_waits(machine: Machine) -> None:
    """Among others that do not, it is not doubtful: it would be measured in each process."""
    requests = {key: machine.taking(100 * US, 100 * US) for key in "abcde"}

    def waiting() -> None:
        machine.worked_s += 10 * US
        machine.passed_s += 300 * US

    requests["waits"] = lambda: waiting
    costs = measure(requests, clock=machine.clock)
    assert not any(cost.doubtful for cost in costs.values())
    assert pytest.approx(300 * US) == costs["waits"].time_s


def test_a_few_that_wait_for_milliseconds_are_not_trusted(machine: Machine) -> None:
    """Even if the others do not wait: 20 us are not entered as 5 ms, which may be most of a step."""
    requests = {key: machine.taking(100 * US, 100 * US) for key in "abcdefgh"}
    requests["spoiled"] = machine.taking(20 * US, 15 * US, waits_s=5000 * US)
    requests["slower on several"] = machine.taking(50 * US, 300 * US, waits_s=200 * US)
    with pytest.warns(RematWarning, match=BUSY):
        costs = measure(requests, clock=machine.clock)
    assert pytest.approx(20 * US) == costs["spoiled"].time_s
    assert pytest.approx(500 * US) == costs["slower on several"].time_s
    assert [key for key, cost in costs.items() if cost.doubtful] == ["spoiled"]


def test_waiting_for_milliseconds_is_not_trusted_later_either(machine: Machine, tmp_path: Path) -> None:
    """Doubtful times are measured again, and only those that hold up replace what was known."""
    requests = {key: machine.taking(100 * US, 100 * US) for key in "abcdefgh"}
    requests["spoiled"] = machine.taking(20 * US, 15 * US, waits_s=5000 * US)
    with pytest.warns(RematWarning, match=BUSY):
        first = measure(requests, clock=machine.clock, cache=CostCache(folder=tmp_path))
    again = measure(requests, clock=machine.clock, cache=CostCache(folder=tmp_path))
    for costs in (first, again):
        assert costs["spoiled"].doubtful
        assert pytest.approx(20 * US) == costs["spoiled"].time_s
    requests["spoiled"] = machine.taking(20 * US, 15 * US)
    calm = measure(requests, clock=machine.clock, cache=CostCache(folder=tmp_path))["spoiled"]
    assert not calm.doubtful
    assert pytest.approx(15 * US) == calm.time_s


def measured(machine: Machine, folder: Path) -> dict[str, MeasuredCost]:
    """Three operators as a new process measures them."""
    machine.runs.clear()
    requests = {key: machine.taking(150 * US, 100 * US, key) for key in "abc"}
    return measure(requests, clock=machine.clock, cache=CostCache(folder=folder))


def test_an_operator_that_always_waits_keeps_no_other_doubtful(machine: Machine, tmp_path: Path) -> None:
    """It is measured again with the others, and then trusted as they are."""

    def waiting() -> None:
        machine.worked_s += 10 * US
        machine.passed_s += 300 * US

    requests = {"waits": lambda: waiting, **{key: machine.taking(150 * US, 100 * US) for key in "abcde"}}
    machine.waits_s = 900 * US
    with pytest.warns(RematWarning, match=BUSY):
        measure(requests, clock=machine.clock, cache=CostCache(folder=tmp_path))
    machine.waits_s = 0.0
    costs = measure(requests, clock=machine.clock, cache=CostCache(folder=tmp_path))
    assert not any(cost.doubtful for cost in costs.values())
    assert [100 * US] * 5 == pytest.approx([costs[key].time_s for key in "abcde"])


def test_doubtful_costs_are_measured_again_once_the_cores_are_idle(machine: Machine, tmp_path: Path) -> None:
    """A busy machine costs a later process the time of two operators, an idle one replaces them all."""
    machine.waits_s = 900 * US
    with pytest.warns(RematWarning, match=BUSY):
        first = measured(machine, tmp_path)
    assert {True} == {cost.doubtful for cost in first.values()}
    assert first == measured(machine, tmp_path)
    assert {"a", "b"} == set(machine.runs)
    machine.waits_s = 0.0
    better = measured(machine, tmp_path)
    assert [100 * US] * 3 == pytest.approx([cost.time_s for cost in better.values()])
    assert better == measured(machine, tmp_path)
    assert not machine.runs
