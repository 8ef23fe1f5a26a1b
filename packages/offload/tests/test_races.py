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
    """The names of what races."""
    return [(race.first.name, race.second.name) for race in find_races(recorder.record)]


def tensor(machine: Recorder) -> torch.Tensor:
    """A device tensor with something in it."""
    made = machine.allocate((8,), (1,), torch.float32)
    made.fill_(1)
    machine.writes([made], "make")
    return made


@pytest.mark.parametrize("held", [True, False])
def test_reading_before_it_arrived(held: bool) -> None:
    """Compute that reads a prefetched tensor is held for its copy."""
    with Recorder(SimulatedMachine()) as machine:
        x = machine.allocate((8,), (1,), torch.float32)
        ticket = machine.copy(Lane.TO_DEVICE, x, torch.ones(8), name="fetch")
        if held:
            machine.hold(ticket)
        machine.reads([x], "matmul")
    assert ([] if held else [("fetch", "matmul")]) == races(machine)


@pytest.mark.parametrize("held", [True, False])
def test_discarding_in_a_copy(held: bool) -> None:
    """A tensor is discarded after the copy that saves it."""
    with Recorder(SimulatedMachine()) as machine:
        x = tensor(machine)
        ticket = machine.copy(Lane.TO_HOST, torch.empty(8), x, name="save")
        if held:
            machine.hold(ticket)
        machine.discard(x)
    assert ([] if held else [("save", "discard")]) == races(machine)


@pytest.mark.parametrize("told", [True, False])
def test_a_slab_used_again_too_early(told: bool) -> None:
    """A host block is lent again after the copy that reads it: told of the copy, the pool waits."""
    pool = HostPool(32)
    with Recorder(SimulatedMachine()) as machine:
        x, y = tensor(machine), machine.allocate((8,), (1,), torch.float32)
        block = pool.allocate((8,), torch.float32)
        save = machine.copy(Lane.TO_HOST, block, x, name="save")
        fetch = machine.copy(Lane.TO_DEVICE, y, block, after=[save], name="fetch")
        pool.release(block, after=fetch if told else None)
        again = pool.allocate((8,), torch.float32)
        assert block.data_ptr() == again.data_ptr()
        machine.copy(Lane.TO_HOST, again, x, name="save again")
    assert ([] if told else [("fetch", "save again")]) == races(machine)


def test_fetching_before_it_was_saved() -> None:
    """A copy back names the copy away; two lanes have no order of their own."""
    with Recorder(SimulatedMachine()) as machine:
        host, x, y = torch.empty(8), tensor(machine), machine.allocate((8,), (1,), torch.float32)
        machine.copy(Lane.TO_HOST, host, x, name="save")
        machine.copy(Lane.TO_DEVICE, y, host, name="fetch")
    assert [("save", "fetch")] == races(machine)


@pytest.mark.parametrize("waits", [True, False])
def test_work_on_the_cpu(waits: bool) -> None:
    """What an optimizer reads and writes is seen by itself: gradients that arrive, weights that leave."""
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
    """Compute runs on while the host goes on, and idle lanes do not stop it; work may tell its reads."""
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


@pytest.mark.parametrize("how", ["synchronize", "query", "hold", "drain"])
def test_what_the_caller_waited_for(how: str) -> None:
    """What is given after the calling thread saw work done, in whatever way, comes after it on every lane."""
    with Recorder(SimulatedMachine()) as machine:
        host, x = torch.zeros(8), machine.allocate((8,), (1,), torch.float32)
        ticket = machine.work(lambda: host.add_(1), name="add")
        if how == "query":
            while not ticket.query():
                pass
        elif how == "hold":
            machine.hold(ticket)
        elif how == "drain":
            machine.drain()
        else:
            ticket.synchronize()
        machine.copy(Lane.TO_DEVICE, x, host)
    assert [] == races(machine)


def test_holding_a_copy_holds_compute_alone() -> None:
    """The host runs on after it holds compute for a copy: work that names nothing is not ordered by it."""
    with Recorder(SimulatedMachine()) as machine:
        host = torch.empty(8)
        machine.hold(machine.copy(Lane.TO_HOST, host, tensor(machine), name="save"))
        machine.work(host.sum, name="norm")
    assert [("save", "norm")] == races(machine)


def test_memory_lent_again_by_the_allocator() -> None:
    """A buffer is its allocation: an address that comes again is another one, and nothing is kept alive."""
    with Recorder(SimulatedMachine()) as machine:
        for _ in range(5):
            x = tensor(machine)
            machine.discard(x)
            del x
    written = [min(operation.writes) for operation in machine.record if operation.name == "allocate"]
    assert [0, 1, 2, 3, 4] == written


def test_a_race_is_one_line() -> None:
    """It names both operations and the buffer."""
    with Recorder(SimulatedMachine()) as machine:
        x = tensor(machine)
        machine.copy(Lane.TO_HOST, torch.empty(8), x, name="save x")
        machine.discard(x)
    (race,) = find_races(machine.record)
    assert isinstance(race, Race)
    assert (
        "buffer 0: 'save x' (operation 2, on to_host) and 'discard' (operation 3, on compute) may meet; "
        "let one wait for the other"
    ) == str(race)


def test_a_recorder_is_a_machine() -> None:
    """It hands on what it is given, failures too, and refuses tickets of the machine behind it."""
    inner = SimulatedMachine()
    with Recorder(inner) as machine:
        assert inner.device == machine.device
        failed = machine.work(lambda: 1 / 0, name="adam")
        with pytest.raises(LaneFailed, match="'adam'"):
            failed.synchronize()
        with pytest.raises(MachineMisuse, match="Job was given to a recorder"):
            machine.hold(inner.work(lambda: None))
        x = tensor(machine)
        machine.hold(machine.copy(Lane.TO_HOST, torch.empty(8), x))
        machine.discard(x)
        assert x.isnan().all()
    with pytest.raises(MachineMisuse, match="closed"):
        machine.work(lambda: None)
    assert [] == races(machine)


# Random programs, against the transitive closure of a graph that is built from the program itself.


@attrs.frozen
class Step:
    """`after` are places of earlier steps; `reads` and `writes` are numbers of buffers."""

    kind: str  # "compute", "copy", "work", "hold" or "sync"
    lane: Lane = Lane.COMPUTE
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def conflicts(self, other: "Step") -> bool:
        return bool({*self.writes} & {*other.reads, *other.writes} or {*self.reads} & {*other.writes})


class Done:
    """The ticket of something that is done already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Instant:
    """A machine that does everything at once, for the order is all that matters."""

    device = torch.device("cpu")

    def copy(
        self, lane: Lane, to: torch.Tensor, of: torch.Tensor, after: Iterable[Ticket] = (), name: str = ""
    ) -> Done:
        return Done()

    def work(self, function: Callable[[], object], after: Iterable[Ticket] = (), name: str = "") -> Done:
        function()
        return Done()

    def hold(self, ticket: Ticket) -> None:
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
    """Accesses that wait for this and that."""
    program: list[Step] = []
    for step in draw(accesses()):
        tickets = [place for place, before in enumerate(program) if is_ticket(before)]
        chosen = tuple(draw(st.sets(st.sampled_from(tickets), max_size=3))) if tickets else ()
        if is_ticket(step):
            step = attrs.evolve(step, after=chosen)
        else:
            program.extend(Step(draw(st.sampled_from(["hold", "sync"])), after=(place,)) for place in chosen)
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
            program.extend(Step("hold", after=(place,)) for place in meets)
        program.append(step)
    return program


def run(program: Sequence[Step]) -> set[tuple[int, int]]:
    """The races that the checker finds, as places in the program."""
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
        elif step.kind == "hold":
            recorder.hold(after[0])
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
            if other.kind == "hold" and program[other.after[0]].kind == "work":
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
    if step.kind == "hold":
        broken = [*program[:place], Step("compute"), *program[place + 1 :]]
    else:
        rest = tuple(other for other in step.after if other != waited)
        broken = [*program[:place], attrs.evolve(step, after=rest), *program[place + 1 :]]
    assert oracle(broken) == run(broken)
