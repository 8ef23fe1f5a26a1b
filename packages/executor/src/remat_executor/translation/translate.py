"""Translate the joint fx graph to the IR: ops, values, and a recipe for each op.

Storages of the graph become values. Writes to the caller's tensors become a chain of versions of an external
value, so the simulator refuses a repeat that would read a later version. Generators are such chains too: a
draw advances its generator, and its repeat reads the state that an op before it saved.
"""

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.capture.dataflow import Dataflow, is_random
from remat_executor.fx_nodes import is_item, layer_of, meta_tensors
from remat_executor.generator_state import default_generator
from remat_executor.inspection.tensors import Tensors
from remat_executor.torch_private.tensors import storage_id
from remat_executor.translation.direct_writes import direct_writes
from remat_executor.translation.dropped_outputs import OutputsState, with_dropped_outputs
from remat_executor.translation.gradient_layouts import obeys_layout, own_stride
from remat_executor.translation.inplace import InPlace, in_place_forms, overwritable
from remat_executor.translation.keys import call_key, target_name
from remat_executor.translation.recipes import (
    CallOperator,
    Draw,
    OwnGradient,
    ReadGenerator,
    Recipe,
    TrainBatchNorm,
    WriteBack,
    WriteInPlace,
)
from remat_executor.translation.translation import Translation
from remat_executor.translation.unique_names import with_unique_names
from remat_executor.translation.varying_kernels import may_vary
from remat_executor.translation.with_ways import with_ways
from remat_executor.ways.substitution import Family
from remat_graph import Graph, Implementation, Op, Role, Value


def translate(
    captured: Captured,
    tensors: Tensors,
    *,
    name: str,
    conditions: Iterable[tuple[str, str]] = (),
    absent: torch.device | None = None,
    families: Iterable[Family] = (),
    outputs: OutputsState = "kept",
) -> Translation:
    """Build the IR of a captured step.

    Args:
        captured: the step.
        tensors: what it was captured with.
        name: of the graph.
        conditions: what a plan depends on in addition to the ops.
        absent: the device for which the meta device stands.
        families: of other ways to run its ops.
        outputs: whether the caller holds the outputs that are not differentiated during the backward.

    Raises:
        CaptureError: an op shares storage in a way that cannot be followed.
    """
    found = _Translator(captured, tensors, absent).run(name, tuple(conditions))
    found = with_ways(found, (way for family in families for way in family(captured)))
    found = with_dropped_outputs(found, captured) if outputs == "dropped" else found
    return attrs.evolve(found, graph=with_unique_names(found.graph))


@attrs.define(eq=False)
class _Translator:
    captured: Captured
    tensors: Tensors
    absent: torch.device | None
    flow: Dataflow = attrs.field(init=False)
    device: torch.device = attrs.field(init=False)
    values: list[Value] = attrs.field(init=False, factory=list)
    ops: list[Op] = attrs.field(init=False, factory=list)
    recipes: list[Recipe] = attrs.field(init=False, factory=list)
    made_by: list[tuple[tuple[Node, int], ...]] = attrs.field(init=False, factory=list)
    in_place: list[dict[int, tuple[int, InPlace]]] = attrs.field(init=False, factory=list)
    value_of: dict[Node, int] = attrs.field(init=False, factory=dict)
    direct: dict[Node, tuple[Node, InPlace]] = attrs.field(init=False)
    newest: dict[Node, int] = attrs.field(init=False, factory=dict)  # latest version of a mutated external
    generator: dict[str, int] = attrs.field(init=False, factory=dict)  # latest version of each generator
    forms: dict[Any, dict[int, InPlace]] = attrs.field(init=False, factory=in_place_forms)

    def __attrs_post_init__(self) -> None:
        self.flow = Dataflow(self.captured)
        self.device = self.tensors.device
        first = len(self.tensors.parameters)
        buffers = self.captured.externals[first : first + len(self.tensors.buffers)]
        self.direct = direct_writes(self.captured, buffers, self.forms, self.flow.base_of)

    def run(self, name: str, conditions: tuple[tuple[str, str], ...]) -> Translation:
        forward, backward = self.flow.order()
        self.add_externals()
        for node in forward:
            self.add_op(node, backward=False)
        self.add_write_backs()
        self.add_outputs_and_tangents()
        for node in backward:
            self.add_op(node, backward=True)
        gradients = self.add_gradients()
        graph = Graph(
            name=name,
            values=self.values,
            ops=self.forbid_stale_repeats(),
            rounding_nbytes=self.rounding_nbytes,
            conditions=conditions,
        )
        return Translation(
            graph=graph,
            recipes=tuple(self.recipes),
            value_of=self.value_of,
            made_by=tuple(self.made_by),
            base_of=self.flow.base_of,
            in_place=tuple(self.in_place),
            gradients=gradients,
            device=self.device,
        )

    # -- values and ops

    @property
    def planned_device(self) -> torch.device:
        """The device of the step, where another one stands for it too."""
        return self.absent or self.device

    @property
    def rounding_nbytes(self) -> int:
        """To what the device's allocator rounds."""
        return 512 if self.planned_device.type == "cuda" else 1

    def rounded(self, nbytes: int) -> int:
        """Bytes of a block of the allocator."""
        return -(-nbytes // self.rounding_nbytes) * self.rounding_nbytes

    def new_value(self, **fields: Any) -> int:
        self.values.append(Value(**fields))
        return len(self.values) - 1

    def new_version(self, replaces: int, name: str, role: Role) -> int:
        """The version of an external value after a write."""
        return self.new_value(name=name, nbytes=0, role=role, external=True, replaces=replaces)

    def add_value(self, node: Node | None, tensor: Tensor, **fields: Any) -> int:
        on_device = tensor.device.type == self.device.type
        fields.setdefault("nbytes", tensor.untyped_storage().nbytes() if on_device else 0)
        if node is None:
            return self.new_value(**fields)
        self.value_of[node] = self.new_value(**{"name": node.name, **fields})
        return self.value_of[node]

    def current(self, node: Node) -> int:
        """The latest version of a storage that a node makes."""
        return self.newest.get(node, self.value_of[node])

    def add_externals(self) -> None:
        roles = [Role.PARAM] * len(self.tensors.parameters) + [Role.BUFFER] * len(self.tensors.buffers)
        roles += [Role.ACTIVATION] * len(self.tensors.inputs)
        names = self.tensors.names
        for node, name, role in zip(self.captured.externals, names, roles, strict=True):
            self.add_value(node, node.meta["val"], name=name, role=role, external=True)
        for node in self.captured.graph_module.graph.nodes:
            if node.op == "get_attr":
                constant = getattr(self.captured.graph_module, node.target)
                self.add_value(node, constant, role=Role.BUFFER, external=True)

    def input_values(self, node: Node) -> tuple[int, ...]:
        arguments = self.flow.arguments(node)
        return tuple(dict.fromkeys(self.current(self.flow.base_of[argument]) for argument in arguments))

    def defined(self, node: Node) -> list[tuple[Node | None, Tensor]]:
        """The storages that a compute node makes, each with the node that names it (None: never read)."""
        value = node.meta["val"]
        if isinstance(value, Tensor):
            return [(node, value)]
        bases = [u for u in node.users if is_item(u) and self.flow.base_of[u] is u]
        named = {storage_id(value[u.args[1]]): u for u in bases}
        found: list[tuple[Node | None, Tensor]] = []
        for tensor in meta_tensors(value):
            # A fake tensor that is returned twice may be two tensors of the kernel: both are counted.
            found.append((named.pop(storage_id(tensor), None), tensor))
        return found

    def add_op(self, node: Node, *, backward: bool) -> None:
        inputs = self.input_values(node)
        if node in self.flow.norms:
            self.add_batch_norm(node, inputs)
            return
        if node in self.direct:
            buffer, form = self.direct[node]
            about = {"name": node.name, "target": target_name(node), "key": call_key(node, self.device)}
            self.add_write(buffer, WriteInPlace(node, form), inputs, layer=layer_of(node), **about)
            return
        state = self.add_reader(node, backward) if is_random(node) else None
        made = self.add_made(node, self.defined(node))
        outputs = tuple(value for _, value in made)
        forms = self.reusable(node, outputs)
        first = Implementation(inputs=inputs, outputs=outputs, reuses=[(outputs[0], each) for each in forms])
        once = may_vary(node, self.planned_device)
        op = Op(
            name=node.name,
            target=target_name(node),
            backward=backward,
            key=call_key(node, self.device),
            rerun=None if once else 0,
            implementations=(first,),
            layer=layer_of(node),
        )
        if state is None:
            self.append(op, CallOperator(node), made, forms)
            return
        device = str(self.draws_on(node))
        before = self.generator[device]
        self.generator[device] = after = self.new_version(before, f"generator_{node.name}", Role.RNG)
        draw = attrs.evolve(first, inputs=(*inputs, before), outputs=(*outputs, after), reuses=())
        # A repeat allocates the state that it puts back at its end.
        again = attrs.evolve(
            first, inputs=(*inputs, state), reuses=(), workspace_nbytes=self.values[state].nbytes
        )
        op = attrs.evolve(op, rerun=None if once else 1, implementations=(draw, again))
        self.append(op, Draw(node, device, state), made)

    def append(
        self,
        op: Op,
        recipe: Recipe,
        made: Iterable[tuple[Node | None, int]] = (),
        forms: dict[int, tuple[int, InPlace]] | None = None,
    ) -> None:
        self.ops.append(op)
        self.recipes.append(recipe)
        self.made_by.append(tuple((node, value) for node, value in made if node is not None))
        self.in_place.append(forms or {})

    def add_made(
        self, node: Node, defined: list[tuple[Node | None, Tensor]]
    ) -> list[tuple[Node | None, int]]:
        return [
            (name, self.add_value(name, tensor, name=name.name if name else f"{node.name}_unread{i}"))
            for i, (name, tensor) in enumerate(defined)
        ]

    def draws_on(self, node: Node) -> torch.device:
        device = meta_tensors(node.meta["val"])[0].device
        if self.absent is not None and device.type == "meta":
            return self.absent
        return device if device.index is not None or device.type == "cpu" else self.device

    def add_reader(self, node: Node, backward: bool) -> int:
        """Add the op that reads the generator's state before a draw; return the state's value index."""
        device = self.draws_on(node)
        if str(device) not in self.generator:
            name = f"generator_{device}"
            self.generator[str(device)] = self.new_value(name=name, nbytes=0, role=Role.RNG, external=True)
        nbytes = 0
        if self.absent is None:
            kept = default_generator(device).get_state()
            nbytes = kept.nbytes if self.device.type == kept.device.type else 0
        state = self.new_value(name=f"rng_{node.name}", nbytes=nbytes, role=Role.RNG)
        op = Op(
            name=f"read_{node.name}",
            target="read_generator",
            backward=backward,
            key=f"read_generator {device.type}",
            rerun=None,
            implementations=(Implementation(inputs=(self.generator[str(device)],), outputs=(state,)),),
            layer=layer_of(node),
        )
        self.append(op, ReadGenerator(str(device)))
        return state

    def add_batch_norm(self, node: Node, inputs: tuple[int, ...]) -> None:
        made = self.add_made(node, self.defined(node)[:-2])  # without the new statistics
        outputs = tuple(value for _, value in made)
        old, new = [], []
        for buffer in self.flow.norms[node]:
            old.append(self.current(buffer))
            new.append(self.new_version(old[-1], f"{buffer.name}_after_{node.name}", Role.BUFFER))
            self.newest[buffer] = new[-1]
        first = Implementation(inputs=(*inputs, *old), outputs=(*outputs, *new))
        again = Implementation(inputs=inputs, outputs=outputs)
        op = Op(
            name=node.name,
            target=target_name(node),
            key=call_key(node, self.device),
            rerun=1,
            implementations=(first, again),
            layer=layer_of(node),
        )
        self.append(op, TrainBatchNorm(node, *self.flow.norms[node]), made)

    def add_write_backs(self) -> None:
        written = {buffer for pair in self.flow.norms.values() for buffer in pair}
        written |= {buffer for buffer, _ in self.direct.values()}
        for target, source in self.captured.mutations:
            if target not in written:
                key = f"write {self.values[self.current(target)].nbytes}"
                about = {"name": f"write_{target.name}", "target": "aten.copy_.default", "key": key}
                read = (self.value_of[self.flow.base_of[source]],)
                self.add_write(target, WriteBack(target, source), read, layer=layer_of(source), **about)

    def add_write(self, buffer: Node, recipe: Recipe, inputs: tuple[int, ...], **fields: Any) -> None:
        old = self.current(buffer)
        new = self.newest[buffer] = self.new_version(old, f"{self.values[old].name}_written", Role.BUFFER)
        write = Implementation(inputs=tuple(dict.fromkeys((*inputs, old))), outputs=(new,))
        self.append(Op(rerun=None, implementations=(write,), **fields), recipe)

    def add_outputs_and_tangents(self) -> None:
        for output in self.captured.outputs:
            index = self.value_of.get(self.flow.base_of.get(output.node, output.node))
            if index is not None and not output.replayed and not self.values[index].external:
                self.values[index] = attrs.evolve(self.values[index], role=Role.OUTPUT)
            if output.tangent is not None:
                tangent = output.tangent.meta["val"]
                fields: dict[str, Any] = {"role": Role.TANGENT, "of": index}
                if tangent.ndim == 0 and index is not None:
                    # `loss.backward()` holds its initial gradient, which is counted with the loss: two
                    # blocks of the allocator, each rounded up.
                    loss = self.values[index]
                    nbytes = self.rounded(loss.nbytes) + self.rounded(tangent.element_size())
                    self.values[index] = attrs.evolve(loss, nbytes=nbytes)
                    self.write_over_nothing(index)
                    fields["nbytes"] = 0
                self.add_value(output.tangent, tangent, **fields)

    def write_over_nothing(self, value: int) -> None:
        """Forbid the op that makes a value to overwrite an input."""
        for i, op in enumerate(self.ops):
            if value in op.first.outputs:
                without = tuple(attrs.evolve(run, reuses=()) for run in op.implementations)
                self.ops[i] = attrs.evolve(op, implementations=without)
                self.in_place[i] = {}

    def reusable(self, node: Node, outputs: tuple[int, ...]) -> dict[int, tuple[int, InPlace]]:
        """Values that this op could overwrite, with the argument position and the form to call."""
        found: dict[int, tuple[int, InPlace]] = {}
        for base, place, form in overwritable(node, self.forms, self.flow.base_of):
            stored = self.values[value := self.value_of[base]]
            whole = stored.nbytes == self.values[outputs[0]].nbytes
            # A tangent belongs to autograd, which may pass it on, so it is never written.
            foreign = stored.external or stored.role is Role.TANGENT
            if whole and not foreign:
                found[value] = (place, form)
        return found

    def add_gradients(self) -> tuple[tuple[int, Node, int], ...]:
        """Give every gradient its own storage, which autograd can take over without a copy."""
        places = {node: i for i, node in enumerate(self.captured.externals)}
        bases = [self.flow.base_of.get(g, g) for _, g in self.captured.gradients]
        found = []
        for (owner, gradient), base in zip(self.captured.gradients, bases, strict=True):
            place, value = places[owner], self.value_of[base]
            parameter, made = self.tensors.flat[place], gradient.meta["val"]
            stored = self.values[value]
            whole = made.untyped_storage().nbytes() == made.numel() * made.element_size()
            own = bases.count(base) == 1 and not stored.external and stored.role is Role.ACTIVATION
            if own and whole and obeys_layout(made, parameter):
                self.values[value] = attrs.evolve(stored, role=Role.GRAD, of=place)
            else:
                value = self.copy_gradient(gradient, value, parameter, place)
            found.append((place, gradient, value))
        return tuple(found)

    def copy_gradient(self, gradient: Node, source: int, parameter: Tensor, place: int) -> int:
        made = gradient.meta["val"]
        stride = own_stride(parameter, tuple(made.shape))
        name = f"{gradient.name}_for_{self.values[place].name}"
        value = self.new_value(name=name, nbytes=made.numel() * made.itemsize, role=Role.GRAD, of=place)
        op = Op(
            name=f"own_{name}",
            target="own_gradient",
            backward=True,
            key=f"own_gradient {tuple(made.shape)} {made.stride()} {stride} {made.dtype}",
            implementations=(Implementation(inputs=(source,), outputs=(value,)),),
            layer=layer_of(gradient),
        )
        self.append(op, OwnGradient(gradient, tuple(made.shape), tuple(stride)))
        return value

    def forbid_stale_repeats(self) -> tuple[Op, ...]:
        """The ops; one that reads a caller's tensor before the forward overwrites it must not be repeated."""
        overwritten = {v.replaces for v in self.values if v.replaces is not None}
        return tuple(
            attrs.evolve(op, rerun=None)
            if op.rerun is not None and overwritten & set(op.implementations[op.rerun].inputs)
            else op
            for op in self.ops
        )
