"""Record lowered graphs as CUDA graphs and replay them: no launch costs, and the same memory at every step.

Each lowered graph runs once unrecorded, is recorded at its next run, and is replayed from then on. The graphs
of a step share one memory pool and are recorded in the order in which they run, so the pool holds what the
plan predicts: a value that one graph leaves for a later one keeps its address, and freed memory is reused.
The caller's results are copied out of the pool, and its inputs into tensors that stay.

A pool serves one call at a time. A graph runs unrecorded if its values are not from the pool: in a second
forward before the first one's backward, or in a backward with ``retain_graph``. Two cases cannot be recorded
and always run unrecorded: numbers on the host among the inputs, and writes into an input of the caller.

A replay allocates only the caller's results, and the pool stays reserved between steps. So the memory of a
replayed step is the allocator's peak plus `held_nbytes`: the most that was ever allocated in the pool, and
the tensors that inputs are copied to. The pool reserves more than that, in blocks of megabytes. Workspaces of
libraries are not counted: all graphs of a module share them.

Draws use the default generator, which recorded graphs advance as eager runs do. The state from which a draw
is repeated is (seed, offset at the beginning of the call + the draw's distance), computed at each call; the
repeat draws from a generator of its own that is set to that state.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from remat_executor.errors import UnplannedUse
from remat_executor.fx_nodes import args_of, is_item
from remat_executor.generator_state import default_generator, read_state, replay
from remat_executor.lowering.runtime_protocol import GraphFunction, GraphInterface
from remat_executor.runtime.graph_recorder import GraphRecorder, PoolTensor
from remat_executor.runtime.mutations import written
from remat_executor.torch_private.autograd import backward_keeps_graph


class CudaGraphs:
    """The runtime of one step.

    Args:
        recorder: makes a recorder with an empty pool.

    Attributes:
        pool: the recorder; None until the first call.
        used: whether its pool holds records.
        recording: whether the running call is recorded.
        addresses: where the pool holds values that graphs leave for later ones.
        saved: the storages that the latest recorded forward left, while they live.
    """

    def __init__(self, recorder: Callable[[], GraphRecorder]) -> None:
        self.recorder = recorder
        self.graphs: list[_RecordedGraph] = []
        self.pool: GraphRecorder | None = None
        self.used = False
        self.recording = False
        self.addresses: set[int] = set()
        self.saved: list[weakref.ref[Any]] = []

    def __call__(self, module: GraphModule, interface: GraphInterface) -> GraphFunction:
        """Prepare the next graph of the step; the first one is its forward."""
        graph = _RecordedGraph(runtime=self, module=module, interface=interface, first=not self.graphs)
        self.graphs.append(graph)
        return graph.run

    @property
    def held_nbytes(self) -> int:
        """Bytes that are held between steps: the pool at its peak, and the copies of inputs."""
        copies = [t for g in self.graphs if g.recorded is not None for t in g.recorded.copies.values()]
        pool_nbytes = self.pool.peak_nbytes if self.pool is not None else 0
        return pool_nbytes + sum(copy.untyped_storage().nbytes() for copy in copies)

    def warm_up(self) -> None:
        """Let libraries take the workspaces of this thread before anything is recorded."""
        if self.pool is None:
            self.pool = self.recorder()
        self.pool.warm_up()

    def start_over(self) -> None:
        """Drop all records and begin with an empty pool."""
        if self.pool is None or self.used:
            self.pool = self.recorder()
        self.used = True
        self.addresses.clear()
        for graph in self.graphs:
            graph.recorded = None


@attrs.frozen(kw_only=True, eq=False)
class _Recording:
    """A recorded graph.

    Attributes:
        run: runs the recorded work.
        addresses: {input: the address that it must have}.
        copies: {input: the tensor that it is copied to}.
        redraws: {input that is a generator state: the generators that are set to it}.
        outputs: {output that is not a generator state: its tensor in the pool}.
    """

    run: Callable[[], None]
    addresses: dict[int, int]
    copies: dict[int, Tensor]
    redraws: dict[int, list[torch.Generator]]
    outputs: dict[int, PoolTensor]

    def fits(self, tensors: list[Tensor], indices: Iterable[int]) -> bool:
        """Whether these inputs have the recorded addresses."""
        return all(tensors[i].data_ptr() == self.addresses[i] for i in indices if i in self.addresses)


@attrs.define(kw_only=True, eq=False)
class _RecordedGraph:
    runtime: CudaGraphs
    module: GraphModule
    interface: GraphInterface
    first: bool
    warm: bool = False
    distances: dict[int, int] = attrs.field(factory=dict)  # {output that is a generator state: offset}
    recorded: _Recording | None = None

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Replay, record or run the graph, whatever this call allows."""
        if not self.warm:
            return self.warm_up(tensors)
        stable_inputs = range(self.interface.stable_inputs)
        if self.first:
            if any(reference() is not None for reference in self.runtime.saved):  # a pending backward
                return self.run_unrecorded(tensors)
            self.runtime.recording = self.recorded is None or not self.recorded.fits(tensors, stable_inputs)
            if self.runtime.recording:
                self.runtime.start_over()
        elif backward_keeps_graph() or not self.from_pool(tensors):
            return self.run_unrecorded(tensors)
        if self.recorded is None:
            return self.record(tensors) if self.runtime.recording else self.run_unrecorded(tensors)
        if not self.recorded.fits(tensors, stable_inputs):
            raise UnplannedUse(
                problem="a parameter was moved between a forward and its backward",
                advice="move the module before the forward",
            )
        return self.replay(tensors)

    def run_unrecorded(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the graph without a record."""
        return list(self.module.forward(tensors))

    def warm_up(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the graph without a record; note the generator's offset at each state that it reads."""
        generator = drawing_generator(self.module)
        begin = _offset(generator.get_state()) if generator is not None else 0
        results = self.run_unrecorded(tensors)
        self.distances = {i: _offset(results[i]) - begin for i in states_read(self.module)}
        self.runtime.warm_up()
        self.warm = True  # last: a run that fails, for lack of memory say, is no warm-up
        return results

    def from_pool(self, tensors: list[Tensor]) -> bool:
        """Whether the values of earlier graphs are those of a recorded call."""
        passed = range(self.interface.stable_inputs, len(tensors))
        if self.recorded is None:
            return any(_address(tensors[i]) in self.runtime.addresses for i in passed)
        return self.recorded.fits(tensors, passed)

    def record(self, tensors: list[Tensor]) -> list[Tensor]:
        """Record the graph on these tensors, or on copies that stay, and run it once."""
        runtime, pool = self.runtime, self.runtime.pool
        assert pool is not None
        work = _RecordingInterpreter(self.module)
        passed = [i for i in range(len(tensors)) if i not in work.redraws]
        stable_inputs = self.interface.stable_inputs
        # A number on the host would be recorded as a constant.
        on_device = all(pool.holds(tensors[i]) for i in passed)
        if not on_device or not work.recordable or any(i >= stable_inputs for i in written(self.module)):
            return self.run_unrecorded(tensors)
        runtime.warm_up()  # this thread may not be the one of the first run
        stay = [i for i in passed if i < stable_inputs or _address(tensors[i]) in runtime.addresses]
        copies = {i: _extent(tensors[i]).clone() for i in passed if i not in stay}
        addresses = {i: tensors[i].data_ptr() for i in stay}
        inputs = [
            copies[i].as_strided(tensor.size(), tensor.stride(), 0) if i in copies else tensor
            for i, tensor in enumerate(tensors)
        ]
        self.set_generators(work.redraws, tensors)
        tensors.clear()
        generators = [generator for several in work.redraws.values() for generator in several]
        outputs, run = pool.record(lambda: list(work.run(inputs)), generators)
        kept = [i for i in range(len(outputs)) if i not in self.distances]
        self.recorded = _Recording(
            run=run,
            addresses=addresses,
            copies=copies,
            redraws=work.redraws,
            outputs={i: PoolTensor.of(outputs[i]) for i in kept},
        )
        runtime.addresses.update(_address(outputs[i]) for i in kept if i >= self.interface.results)
        return self.done({i: outputs[i] for i in kept})

    def replay(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the recorded work on the tensors of this call."""
        recorded, pool = self.recorded, self.runtime.pool
        assert recorded is not None
        assert pool is not None
        for i, copy in recorded.copies.items():
            copy.copy_(_extent(tensors[i]))
        self.set_generators(recorded.redraws, tensors)
        tensors.clear()
        return self.done({i: pool.at(place) for i, place in recorded.outputs.items()})

    def done(self, outputs: dict[int, Tensor]) -> list[Tensor]:
        """Run the recorded work; copy the caller's outputs out of the pool."""
        assert self.recorded is not None
        states = self.states()
        self.recorded.run()
        saved = {i: t for i, t in outputs.items() if i >= self.interface.results}
        if self.first:
            self.runtime.saved = [weakref.ref(t.untyped_storage()) for t in saved.values()]
        results = {i: t.clone() for i, t in outputs.items() if i < self.interface.results}
        found = results | saved | states
        return [found[i] for i in range(len(found))]

    def states(self) -> dict[int, Tensor]:
        """The generator states that eager would read in this call."""
        generator = drawing_generator(self.module) if self.distances else None
        if generator is None:
            return {}
        seed, offset = generator.get_state().view(torch.int64).tolist()
        return {
            i: torch.tensor([seed, offset + distance]).view(torch.uint8)
            for i, distance in self.distances.items()
        }

    def set_generators(self, redraws: dict[int, list[torch.Generator]], tensors: list[Tensor]) -> None:
        for i, generators in redraws.items():
            for generator in generators:
                generator.set_state(tensors[i])


class _RecordingInterpreter(Interpreter):
    """Runs a graph for recording: repeats draw from generators of their own, and no state is read.

    Attributes:
        redraws: {index of a state in the list of tensors: the generators that are set to it}.
        recordable: whether every state comes from another graph or goes to one.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.generators: dict[Node, torch.Generator] = {}
        self.redraws: dict[int, list[torch.Generator]] = {}
        nodes = module.graph.find_nodes(op="call_function", target=replay)
        for node in nodes:
            state, device = args_of(node)[:2]
            if is_item(state) and args_of(state)[0].op == "placeholder":
                self.generators[node] = torch.Generator(torch.device(device))
                self.redraws.setdefault(args_of(state)[1], []).append(self.generators[node])
        reads = module.graph.find_nodes(op="call_function", target=read_state)
        self.recordable = len(self.generators) == len(nodes) and len(states_read(module)) == len(reads)

    def run_node(self, n: Node) -> Any:
        """Run a node, or its replacement while recording."""
        if n.target is read_state:
            return torch.empty(0)  # computed at each call instead
        if n not in self.generators:
            return super().run_node(n)
        (_, device, target, *args), kwargs = self.fetch_args_kwargs_from_env(n)
        default = default_generator(torch.device(device))
        found = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generators[n])
        try:
            return target(*args, **kwargs)
        finally:
            default.graphsafe_set_state(found)


def states_read(module: GraphModule) -> list[int]:
    """Outputs of a lowered graph that are generator states it reads."""
    outputs = args_of(module.graph.output_node())[0]
    return [i for i, output in enumerate(outputs) if output.target is read_state]


def drawing_generator(module: GraphModule) -> torch.Generator | None:
    """The generator whose states a lowered graph reads."""
    for node in module.graph.find_nodes(op="call_function", target=read_state):
        return default_generator(torch.device(str(args_of(node)[0])))
    return None


def _extent(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, in one dimension."""
    if tensor.numel() == 0:
        return tensor.as_strided((0,), (1,))
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))


def _offset(state: Tensor) -> int:
    """The offset of a CUDA generator: the second number of its state."""
    return int(state.view(torch.int64)[1])


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
