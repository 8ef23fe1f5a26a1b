"""GELU with a tanh, written out in elementwise calls, as one call forward and one backward. It rounds.

Hugging Face's `gelu_new` and its variants make eight tensors forward and keep five of them. `aten.gelu` and
its backward compute the same function in one pass each, keep the input alone, and round once.

The calls are found by what they compute: around each tanh, those that depend on one tensor alone, and behind
a gradient, those that depend on it too, are run in float64 on some numbers and compared with `aten.gelu`. Not
found: a GELU whose input something else reads too, if the sum of both gradients begins with the other one.
"""

from collections.abc import Iterable, Iterator, Mapping

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.fx_nodes import meta_tensors, target_of
from remat_executor.torch_private.tensors import storage_id
from remat_executor.ways.substitution import Change, Substitution

aten = torch.ops.aten

MOST_CALLS = 40  # that are followed from a tensor
TOLERANCE = 1e-8  # of float64 results: some write the constants with ten digits
_ELEMENTWISE = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.alias.default,
    aten.detach.default,
    aten.div.Tensor,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.sub.Tensor,
    aten.tanh.default,
    aten.tanh_backward.default,
}


def fused_gelu(captured: Captured) -> Iterator[Substitution]:
    """A way for each tanh that is part of a GELU and of its gradient."""
    order = {node: i for i, node in enumerate(captured.graph_module.graph.nodes)}
    for tanh in captured.graph_module.graph.find_nodes(op="call_function", target=aten.tanh.default):
        found = next(filter(None, (_find(tanh, x, order) for x in _sources(tanh, order))), None)
        if found is not None:
            yield _way(found)


@attrs.frozen(kw_only=True, eq=False)
class _Gelu:
    """The ends of a GELU and of its backward, and the calls in between, in their order."""

    x: Node
    y: Node
    gradient: Node
    of_x: Node
    between: tuple[Node, ...]


def _sources(tanh: Node, order: Mapping[Node, int]) -> Iterator[Node]:
    """Tensors on which the tanh depends alone, the nearest first."""
    inside = {tanh}
    while len(inside) < MOST_CALLS:
        edge = {n for node in inside for n in node.all_input_nodes} - inside
        if len(edge) == 1:
            yield from edge
        last = max(edge, key=order.__getitem__, default=None)
        if last is None or not _is_elementwise(last, tanh):
            return
        inside.add(last)


def _find(tanh: Node, x: Node, order: Mapping[Node, int]) -> _Gelu | None:
    """The GELU of `x` whose tanh this is."""
    points = torch.linspace(-6, 6, 97, dtype=torch.float64)
    made = _computed({x: points}, order)
    y = _equal(made, aten.gelu.default(points, approximate="tanh"))
    if y is None or tanh not in _needed([y], {x}):
        return None
    gradients = torch.cos(3 * points) + 0.25
    wanted = aten.gelu_backward.default(gradients, points, approximate="tanh")
    for gradient in dict.fromkeys(_gradients(made, tanh)):
        found = _computed({**made, gradient: gradients}, order)
        of_x = _equal({n: t for n, t in found.items() if n not in made and n is not gradient}, wanted)
        if of_x is None or not _alike(x, y, gradient, of_x):
            continue
        between = _needed([y, of_x], {x, gradient}) - {y, of_x}
        calls = sorted((n for n in between if not _is_view(n)), key=order.__getitem__)
        return _Gelu(x=x, y=y, gradient=gradient, of_x=of_x, between=tuple(calls))
    return None


def _gradients(made: Mapping[Node, Tensor], like: Node) -> Iterator[Node]:
    """The tensors that calls read together with these."""
    for node in made:
        for user in node.users:
            if user not in made and _is_elementwise(user, like):
                yield from (n for n in user.all_input_nodes if n not in made)


def _computed(given: Mapping[Node, Tensor], order: Mapping[Node, int]) -> dict[Node, Tensor]:
    """The calls that depend on these tensors alone, with their results."""
    made = dict(given)
    like = next(iter(given))
    waiting = {user for node in given for user in node.users}
    while waiting and len(made) < len(given) + MOST_CALLS:
        node = min(waiting, key=order.__getitem__)
        waiting.remove(node)
        if (
            node in made
            or not _is_elementwise(node, like)
            or any(n not in made for n in node.all_input_nodes)
        ):
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
        made[node] = target_of(node)(*args, **kwargs)
        waiting.update(node.users)
    return made


def _is_elementwise(node: Node, like: Node) -> bool:
    """Whether a call computes each number from those at its place, in the same dtype."""
    if node.op != "call_function" or node.target not in _ELEMENTWISE:
        return False
    tensors = [each.meta["val"] for each in (node, *node.all_input_nodes)]
    wanted = like.meta["val"]
    return all(isinstance(t, Tensor) and (t.shape, t.dtype) == (wanted.shape, wanted.dtype) for t in tensors)


def _equal(made: Mapping[Node, Tensor], wanted: Tensor) -> Node | None:
    """The first call whose result is this."""
    close = (n for n, found in made.items() if torch.allclose(found, wanted, rtol=0, atol=TOLERANCE))
    return next(close, None)


def _needed(nodes: Iterable[Node], given: set[Node]) -> set[Node]:
    """These nodes and all that they depend on, up to what is given."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in given:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _is_view(node: Node) -> bool:
    given = {storage_id(t) for n in node.all_input_nodes for t in meta_tensors(n.meta["val"])}
    return any(storage_id(t) in given for t in meta_tensors(node.meta["val"]))


def _alike(*nodes: Node) -> bool:
    """Whether all of these are contiguous tensors of one dtype, which `aten.gelu` has."""
    values = [node.meta["val"] for node in nodes]
    kinds = {(value.dtype, value.device) for value in values}
    return len(kinds) == 1 and values[0].is_floating_point() and all(v.is_contiguous() for v in values)


def _way(gelu: _Gelu) -> Substitution:
    backward = Change(
        node=gelu.of_x,
        kernel=gelu_gradient,
        over_kernel=gelu_gradient_over,
        over=gelu.gradient,
        reads=(gelu.gradient, gelu.x),
    )
    forward = Change(node=gelu.y, kernel=gelu_of, reads=(gelu.x,))
    gone = (Change(node=call) for call in gelu.between)
    return Substitution(family="fused_gelu", changes=(forward, backward, *gone), exact=False)


def gelu_of(x: Tensor) -> Tensor:
    """GELU with a tanh."""
    made: Tensor = aten.gelu.default(x, approximate="tanh")
    return made


def gelu_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x`."""
    made: Tensor = aten.gelu_backward.default(gradient, x, approximate="tanh")
    return made


def gelu_gradient_over(gradient: Tensor, x: Tensor) -> Tensor:
    """`gelu_gradient`, written over the gradient."""
    made: Tensor = aten.gelu_backward.grad_input(gradient, x, approximate="tanh", grad_input=gradient)
    return made
