"""The checker finds the races of a recorded order, all of them and nothing else."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import Lane
from remat_offload import (
    HostPool,
    LaneFailed,
    MachineMisuse,
    Race,
    Recorder,
    SimulatedMachine,
    Ticket,
    find_races,
)


def races(recorder: Recorder) -> list[tuple[str, str]]:
    """The names of racing operations."""
    return [(race.first.name, race.second.name) for race in find_races(recorder.record)]


def tensor(machine: Recorder) -> torch.Tensor:
    """A device tensor with values."""
    made = machine.allocate((8,), (1,), torch.float32)
    made.fill_(1)
    machine.writes([made], "make")
    return made


@pytest.mark.parametrize("waits", [True, False])
def test_reading_before_it_arrived(waits: bool) -> None:
    """Compute that reads a prefetched tensor waits for its copy."""
    with Recorder(SimulatedMachine()) as machine:
        x = machine.allocate((8,), (1,), torch.float32)
        ticket = machine.copy(Lane.TO_DEVICE, x, torch.ones(8), name="fetch")
        if waits:
            machine.wait_on_compute(ticket)
        machine.reads([x], "matmul")
    assert ([] if waits else [("fetch", "matmul")]) == races(machine)


@pytest.mark.parametrize("waits", [True, False])
def test_releasing_in_a_copy(waits: bool) -> None:
    """A tensor is released after the copy that saves it."""
    with Recorder(SimulatedMachine()) as machine:
        x = tensor(machine)
        ticket = machine.copy(Lane.TO_HOST, torch.empty(8), x, name="save")
        if waits:
            machine.wait_on_compute(ticket)
        machine.release(x)
    assert ([] if waits else [("save", "release")]) == races(machine)


@pytest.mark.parametrize("reported", [True, False])
def test_a_slab_used_again_too_early(reported: bool) -> None:
    """A host block is reused after the copy that reads it if the pool gets the copy's ticket."""
    pool = HostPool(32)
    with Recorder(SimulatedMachine()) as machine:
        x, y = tensor(machine), machine.allocate((8,), (1,), torch.float32)
        block = pool.allocate((8,), torch.float32)
        save = machine.copy(Lane.TO_HOST, block, x, name="save")
        fetch = machine.copy(Lane.TO_DEVICE, y, block, after=[save], name="fetch")
        pool.release(block, after=fetch if reported else None)
        again = pool.allocate((8,), torch.float32)
        assert block.data_ptr() == again.data_ptr()
        machine.copy(Lane.TO_HOST, again, x, name="save again")
    assert ([] if reported else [("fetch", "save again")]) == races(machine)


def test_fetching_before_it_was_saved() -> None:
    """A copy to the device names the copy to the host; two lanes have no order of their own."""
    with Recorder(SimulatedMachine()) as machine:
        host, x, y = torch.empty(8), tensor(machine), machine.allocate((8,), (1,), torch.float32)
        machine.copy(Lane.TO_HOST, host, x, name="save")
        machine.copy(Lane.TO_DEVICE, y, host, name="fetch")
    assert [("save", "fetch")] == races(machine)


@pytest.mark.parametrize("waits", [True, False])
def test_work_on_the_cpu(waits: bool) -> None:
    """Reads and writes of an optimizer are recorded automatically: of gradients and of weights."""
    with Recorder(SimulatedMachine()) as machine:
        g, w = tensor(machine), machine.allocate((8,), (1,), torch.float32)
        grad, weight, state = torch.empty(8), torch.zeros(8), torch.zeros(8)

        def step() -> None:
            state.view(2, 4).add_(grad.view(2, 4))
            torch._foreach_sub_([weight], [state])

        saved = machine.copy(Lane.TO_HOST, grad, g, name="save")
        adam = machine.work(step, after=[saved] if waits else [], name="adam")
        machine.copy(Lane.TO_DEVICE, w, weight, after=[adam] if waits else [], name="fetch")
    assert ([] if waits else [("save", "adam"), ("adam", "fetch")]) == races(machine)


def test_work_is_not_after_compute() -> None:
    """Compute runs on while the host goes on, and idle lanes do not stop it; work may report its reads."""
    with Recorder(SimulatedMachine()) as machine:
        x = tensor(machine)
        machine.drain()
        machine.work(partial(machine.reads, [x]), name="peek")
    assert [("make", "peek")] == [pair for pair in races(machine) if pair[0] != "allocate"]


def test_views_touch_nothing() -> None:
    """Work that looks at a tensor's shape alone does not meet the copy that fills it."""
    with Recorder(SimulatedMachine()) as machine:
        host = torch.empty(8)
        machine.copy(Lane.TO_HOST, host, tensor(machine))
        machine.work(lambda: host.view(2, 4).t().split(2))
    assert [] == races(machine)


@pytest.mark.parametrize("how", ["synchronize", "query", "wait", "drain"])
def test_what_the_caller_waited_for(how: str) -> None:
    """Work submitted after the calling thread saw earlier work done comes after it on every lane."""
    with Recorder(SimulatedMachine()) as machine:
        host, x = torch.zeros(8), machine.allocate((8,), (1,), torch.float32)
        ticket = machine.work(lambda: host.add_(1), name="add")
        if how == "query":
            while not ticket.query():
                pass
        elif how == "wait":
            machine.wait_on_compute(ticket)
        elif how == "drain":
            machine.drain()
        else:
            ticket.synchronize()
        machine.copy(Lane.TO_DEVICE, x, host)
    assert [] == races(machine)


def test_only_compute_waits_for_a_copy() -> None:
    """The host continues while compute waits for a copy: work that names no ticket is not ordered by it."""
    with Recorder(SimulatedMachine()) as machine:
        host = torch.empty(8)
        machine.wait_on_compute(machine.copy(Lane.TO_HOST, host, tensor(machine), name="save"))
        machine.work(host.sum, name="norm")
    assert [("save", "norm")] == races(machine)


def test_memory_reused_by_the_allocator() -> None:
    """A buffer is an allocation: a reused address is another buffer, and no tensor is kept alive."""
    with Recorder(SimulatedMachine()) as machine:
        for _ in range(5):
            x = tensor(machine)
            machine.release(x)
            del x
    written = [min(operation.writes) for operation in machine.record if operation.name == "allocate"]
    assert [0, 1, 2, 3, 4] == written


def test_a_race_is_one_line() -> None:
    """It names both operations and the buffer."""
    with Recorder(SimulatedMachine()) as machine:
        x = tensor(machine)
        machine.copy(Lane.TO_HOST, torch.empty(8), x, name="save x")
        machine.release(x)
    (race,) = find_races(machine.record)
    assert isinstance(race, Race)
    assert (
        "buffer 0: 'save x' (operation 2, on to_host) and 'release' (operation 3, on compute) may overlap; "
        "let one wait for the other"
    ) == str(race)


def test_a_recorder_is_a_machine() -> None:
    """It passes on calls and failures, and refuses tickets of the machine behind it."""
    inner = SimulatedMachine()
    with Recorder(inner) as machine:
        assert inner.device == machine.device
        failed = machine.work(lambda: 1 / 0, name="adam")
        with pytest.raises(LaneFailed, match="'adam'"):
            failed.synchronize()
        with pytest.raises(MachineMisuse, match="Job was given to a recorder"):
            machine.wait_on_compute(inner.work(lambda: None))
        x = tensor(machine)
        machine.wait_on_compute(machine.copy(Lane.TO_HOST, torch.empty(8), x))
        machine.release(x)
        assert x.isnan().all()
    with pytest.raises(MachineMisuse, match="closed"):
        machine.work(lambda: None)
    assert [] == races(machine)


# Random programs, against the transitive closure of a graph that is built from the program itself.


@attrs.frozen
class Step:
    """`after` are places of earlier steps; `reads` and `writes` are numbers of buffers."""

    kind: str  # "compute", "copy", "work", "wait" or "sync"
    lane: Lane = Lane.COMPUTE
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def conflicts(self, other: "Step") -> bool:
        return bool({*self.writes} & {*other.reads, *other.writes} or {*self.reads} & {*other.writes})


class Done:
    """The ticket of work that is done already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Instant:
    """A machine that does everything at once; only the order matters."""

    device = torch.device("cpu")

    def copy(
        self, lane: Lane, to: torch.Tensor, of: torch.Tensor, after: Iterable[Ticket] = (), name: str = ""
    ) -> Done:
        return Done()

    def work(self, function: Callable[[], object], after: Iterable[Ticket] = (), name: str = "") -> Done:
        function()
        return Done()

    def wait_on_compute(self, ticket: Ticket) -> None:
        pass


DEVICE, HOST = range(3), range(3, 6)
some = st.integers(0, 2)


@st.composite
def accesses(draw: st.DrawFn) -> list[Step]:
    """Compute on device buffers, copies between device and host buffers, work on host buffers."""
    steps = []
    for _ in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(["compute", "copy", "copy", "work"]))
        device, host = DEVICE[draw(some)], HOST[draw(some)]
        if kind == "compute":
            steps.append(Step(kind, Lane.COMPUTE, (device,), (DEVICE[draw(some)],)))
        elif kind == "work":
            steps.append(Step(kind, Lane.CPU_OPTIMIZER, (host,), (HOST[draw(some)],)))
        elif draw(st.booleans()):
            steps.append(Step(kind, Lane.TO_HOST, (device,), (host,)))
        else:
            steps.append(Step(kind, Lane.TO_DEVICE, (host,), (device,)))
    return steps


def is_ticket(step: Step) -> bool:
    return step.kind in ("copy", "work")


@st.composite
def any_programs(draw: st.DrawFn) -> list[Step]:
    """Accesses that wait for random tickets."""
    program: list[Step] = []
    for step in draw(accesses()):
        tickets = [place for place, before in enumerate(program) if is_ticket(before)]
        chosen = tuple(draw(st.sets(st.sampled_from(tickets), max_size=3))) if tickets else ()
        if is_ticket(step):
            step = attrs.evolve(step, after=chosen)
        else:
            program.extend(Step(draw(st.sampled_from(["wait", "sync"])), after=(place,)) for place in chosen)
        program.append(step)
    return program


@st.composite
def safe_programs(draw: st.DrawFn) -> list[Step]:
    """Accesses that wait for what they conflict with, and for nothing else."""
    program: list[Step] = []
    for step in draw(accesses()):
        meets = [p for p, before in enumerate(program) if is_ticket(before) and step.conflicts(before)]
        if is_ticket(step):
            step = attrs.evolve(step, after=tuple(meets))
        else:
            program.extend(Step("wait", after=(place,)) for place in meets)
        program.append(step)
    return program


def run(program: Sequence[Step]) -> set[tuple[int, int]]:
    """The races that the checker finds, as positions in the program."""
    buffers = [torch.empty(1) for _ in (*DEVICE, *HOST)]
    recorder = Recorder(Instant())  # type: ignore[arg-type]
    tickets: dict[int, Ticket] = {}
    places: list[int] = []  # in the program, of what is in the record

    def touch(step: Step) -> None:
        recorder.reads(buffers[number] for number in step.reads)
        recorder.writes(buffers[number] for number in step.writes)

    for place, step in enumerate(program):
        after = [tickets[before] for before in step.after]
        if step.kind == "compute":
            touch(step)
        elif step.kind == "copy":
            tickets[place] = recorder.copy(step.lane, buffers[step.writes[0]], buffers[step.reads[0]], after)
        elif step.kind == "work":
            tickets[place] = recorder.work(lambda step=step: touch(step), after)
        elif step.kind == "wait":
            recorder.wait_on_compute(after[0])
        else:
            after[0].synchronize()
        places.extend([place] * (len(recorder.record) - len(places)))
    return {(places[race.first.index], places[race.second.index]) for race in find_races(recorder.record)}


def oracle(program: Sequence[Step]) -> set[tuple[int, int]]:
    """The races by reachability: each step's set of all steps that come before it, closed edge by edge."""
    before: list[set[int]] = []
    for place, step in enumerate(program):
        direct = set(step.after)
        for number, other in enumerate(program[:place]):
            if other.kind == "sync":
                direct.add(number)
            elif step.kind != "sync":
                computed = step.kind == "copy" and other.lane is Lane.COMPUTE
                if other.lane is step.lane or computed:
                    direct.add(number)
            if other.kind == "wait" and program[other.after[0]].kind == "work":
                direct |= set(other.after)  # the host waited for the work, not for compute
        before.append(direct.union(*(before[other] for other in direct)))
    return {
        (first, second)
        for second, step in enumerate(program)
        for first in range(second)
        if program[first].lane is not step.lane
        and step.conflicts(program[first])
        and first not in before[second]
    }


@given(program=any_programs())
def test_as_the_closure_says(program: list[Step]) -> None:
    """On any program the races are those that reachability finds."""
    assert oracle(program) == run(program)


@given(program=safe_programs(), data=st.data())
def test_one_edge_removed(program: list[Step], data: st.DataObject) -> None:
    """Where each conflict waits there is no race; without one wait there are those of the closure."""
    assert set() == oracle(program) == run(program)
    edges = [(place, waited) for place, step in enumerate(program) for waited in step.after]
    if not edges:
        return
    place, waited = data.draw(st.sampled_from(edges))
    step = program[place]
    if step.kind == "wait":
        broken = [*program[:place], Step("compute"), *program[place + 1 :]]
    else:
        rest = tuple(other for other in step.after if other != waited)
        broken = [*program[:place], attrs.evolve(step, after=rest), *program[place + 1 :]]
    assert oracle(broken) == run(broken)
