"""Lowered graphs recorded as CUDA graphs and replayed: no launch costs, the same memory at every step.

Each part is run once as it is, recorded when it runs next, and replayed from then on. The parts of a program
share one memory pool and are recorded in the order in which they run, so that the pool holds what the plan
says: a value that one part leaves for a later one stays at its address, and what the plan frees is reused.
What the caller gets is copied out of the pool, what he passes in is copied into tensors that stay.

A pool serves one call at a time. A part runs as it is, unrecorded, whenever it is given values from elsewhere
than the pool: in a second forward before the first one's backward, or in a backward with ``retain_graph``.

Two things cannot be recorded, and a part that has one runs as it is: numbers on the host among its inputs,
and writing into an input of the caller's.

Random numbers: draws take theirs from the default generator, which recorded graphs advance as eager runs do.
What a draw is repeated from is (seed, offset at the call's begin + its own distance), computed at each call;
the repeat draws from a generator of its own that is set to that state.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from remat_executor.errors import UnplannedUse
from remat_executor.fx_nodes import args_of, is_item
from remat_executor.lowering.runtime_protocol import GraphFunction, GraphInterface
from remat_executor.rng import default_generator, read_state, replay
from remat_executor.runtime.mutations import written
from remat_executor.torch_private.autograd import backward_keeps_graph


@attrs.frozen(kw_only=True)
class PoolTensor:
    """Where a tensor of the pool lies and how it looks."""

    address: int
    nbytes: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "PoolTensor":
        """The place of a tensor, by its storage."""
        storage = tensor.untyped_storage()
        return cls(
            address=storage.data_ptr(),
            nbytes=storage.nbytes(),
            offset=int(tensor.storage_offset()),
            size=tuple(tensor.size()),
            stride=tensor.stride(),
            dtype=tensor.dtype,
        )


class GraphRecorder(Protocol):
    """Records work on a device; what it records shares one memory pool."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the device."""
        ...

    def record(
        self, work: Callable[[], list[Tensor]], generators: Sequence[torch.Generator]
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Record work without doing it.

        Args:
            work: what to record; it draws from these generators beside the default one.
            generators: they keep their states outside of the record.

        Returns:
            The results, which lie in the pool, and a function that does the work.
        """
        ...

    def at(self, place: PoolTensor) -> Tensor:
        """A tensor on memory of the pool that it does not own."""
        ...


class _Memory:
    """Bytes of the pool, for `torch.as_tensor`."""

    def __init__(self, place: PoolTensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (place.nbytes,),
            "typestr": "|u1",
            "data": (place.address, False),
            "version": 2,
        }


class CudaGraphRecorder:
    """CUDA graphs in one pool of the current device."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return tensor.is_cuda

    def record(
        self, work: Callable[[], list[Tensor]], generators: Sequence[torch.Generator]
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Capture a graph."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # The engine's other threads may be at work: only this one is recorded.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = work()
        return results, graph.replay

    def at(self, place: PoolTensor) -> Tensor:
        """A tensor on memory of the pool."""
        whole = torch.as_tensor(_Memory(place), device="cuda").view(place.dtype)
        return whole.as_strided(place.size, place.stride, place.offset)


class CudaGraphs:
    """The parts of one program.

    Attributes:
        pool: what records; None until the second call.
        recording: whether the call under way is recorded.
        addresses: where the pool holds what parts leave for later ones.
        saved: the storages that the latest recorded forward left, while they live.
    """

    def __init__(self, recorder: Callable[[], GraphRecorder] = CudaGraphRecorder) -> None:
        self.recorder = recorder
        self.graphs: list[_RecordedGraph] = []
        self.pool: GraphRecorder | None = None
        self.recording = False
        self.addresses: set[int] = set()
        self.saved: list[weakref.ref[Any]] = []

    def __call__(self, module: GraphModule, interface: GraphInterface) -> GraphFunction:
        """The next part of the program; the first one is its forward."""
        graph = _RecordedGraph(program=self, module=module, interface=interface, first=not self.graphs)
        self.graphs.append(graph)
        return graph.run

    def in_use(self) -> bool:
        """Whether the saved values of an earlier call may still be wanted."""
        return any(reference() is not None for reference in self.saved)

    def start_over(self) -> None:
        """Drop what is recorded, if anything: the pool is empty again."""
        self.pool = self.recorder()
        self.addresses.clear()
        for graph in self.graphs:
            graph.recorded = None


@attrs.frozen(kw_only=True, eq=False)
class _Recording:
    """A recorded part.

    Attributes:
        do: does it.
        addresses: {input: where it must lie}.
        copies: {input: the tensor that it is copied to}.
        redraws: {input, a generator's state: the generators that are set to it}.
        outputs: {output that is no such state: its place}.
    """

    do: Callable[[], None]
    addresses: dict[int, int]
    copies: dict[int, Tensor]
    redraws: dict[int, list[torch.Generator]]
    outputs: dict[int, PoolTensor]

    def fits(self, tensors: list[Tensor], indices: Iterable[int]) -> bool:
        """Whether these inputs lie where they lay."""
        return all(tensors[i].data_ptr() == self.addresses[i] for i in indices if i in self.addresses)


@attrs.define(kw_only=True, eq=False)
class _RecordedGraph:
    program: CudaGraphs
    module: GraphModule
    interface: GraphInterface
    first: bool
    warm: bool = False
    distances: dict[int, int] = attrs.field(factory=dict)  # {output, a generator's state: offset since begin}
    recorded: _Recording | None = None

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the part in the way that serves this call."""
        if not self.warm:
            return self.warm_up(tensors)
        stable_inputs = range(self.interface.stable_inputs)
        if self.first:
            if self.program.in_use():
                return self.as_it_is(tensors)
            self.program.recording = self.recorded is None or not self.recorded.fits(tensors, stable_inputs)
            if self.program.recording:
                self.program.start_over()
        elif backward_keeps_graph() or not self.from_pool(tensors):
            return self.as_it_is(tensors)
        if self.recorded is None:
            return self.record(tensors) if self.program.recording else self.as_it_is(tensors)
        if not self.recorded.fits(tensors, stable_inputs):
            raise UnplannedUse(
                problem="a parameter was moved between a forward and its backward",
                advice="move the module before the forward",
            )
        return self.replay(tensors)

    def as_it_is(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run without a record."""
        return list(self.module.forward(tensors))

    def warm_up(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run without a record; note how far the generator has come at each state that is read."""
        self.warm = True
        generator = drawing_generator(self.module)
        begin = _offset(generator.get_state()) if generator is not None else 0
        results = self.as_it_is(tensors)
        self.distances = {i: _offset(results[i]) - begin for i in states_read(self.module)}
        return results

    def from_pool(self, tensors: list[Tensor]) -> bool:
        """Whether the values that earlier parts left are those of a recorded call."""
        passed = range(self.interface.stable_inputs, len(tensors))
        if self.recorded is None:
            return any(_address(tensors[i]) in self.program.addresses for i in passed)
        return self.recorded.fits(tensors, passed)

    def record(self, tensors: list[Tensor]) -> list[Tensor]:
        """Record the part on these tensors, or on copies that stay, and do it once."""
        program, pool = self.program, self.program.pool
        assert pool is not None
        work = _RecordingInterpreter(self.module)
        passed = [i for i in range(len(tensors)) if i not in work.redraws]
        host = not all(pool.holds(tensors[i]) for i in passed)  # a number there would stay what it is now
        if (
            host
            or not work.recordable
            or any(i >= self.interface.stable_inputs for i in written(self.module))
        ):
            return self.as_it_is(tensors)
        stay = [
            i for i in passed if i < self.interface.stable_inputs or _address(tensors[i]) in program.addresses
        ]
        copies = {i: tensors[i].clone() for i in passed if i not in stay}
        addresses = {i: tensors[i].data_ptr() for i in stay}
        inputs = [copies.get(i, tensor) for i, tensor in enumerate(tensors)]
        self.set_generators(work.redraws, tensors)
        tensors.clear()
        generators = [generator for several in work.redraws.values() for generator in several]
        outputs, do = pool.record(lambda: list(work.run(inputs)), generators)
        kept = [i for i in range(len(outputs)) if i not in self.distances]
        self.recorded = _Recording(
            do=do,
            addresses=addresses,
            copies=copies,
            redraws=work.redraws,
            outputs={i: PoolTensor.of(outputs[i]) for i in kept},
        )
        program.addresses.update(_address(outputs[i]) for i in kept if i >= self.interface.results)
        return self.done({i: outputs[i] for i in kept})

    def replay(self, tensors: list[Tensor]) -> list[Tensor]:
        """Do the recorded work on the tensors of this call."""
        recorded, pool = self.recorded, self.program.pool
        assert recorded is not None
        assert pool is not None
        for i, copy in recorded.copies.items():
            copy.copy_(tensors[i])
        self.set_generators(recorded.redraws, tensors)
        tensors.clear()
        return self.done({i: pool.at(place) for i, place in recorded.outputs.items()})

    def done(self, outputs: dict[int, Tensor]) -> list[Tensor]:
        """Do the work that these outputs are of; copy the caller's out of the pool."""
        assert self.recorded is not None
        states = self.states()
        self.recorded.do()
        saved = {i: t for i, t in outputs.items() if i >= self.interface.results}
        if self.first:
            self.program.saved = [weakref.ref(t.untyped_storage()) for t in saved.values()]
        results = {i: t.clone() for i, t in outputs.items() if i < self.interface.results}
        found = results | saved | states
        return [found[i] for i in range(len(found))]

    def states(self) -> dict[int, Tensor]:
        """The states that eager would read in this call, from where the generator stands."""
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
    """A lowered graph as it is recorded: repeats draw from generators of their own, no state is read.

    Attributes:
        redraws: {index of a state in the list of tensors: the generators that are to be set to it}.
        recordable: whether every state comes from another part or goes to one.
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
        """Run a node, or what stands for it while recording."""
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


def _offset(state: Tensor) -> int:
    """How far a CUDA generator is: the second number of its state."""
    return int(state.view(torch.int64)[1])


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
