"""Compile lowered graphs by Inductor, in pieces that never contain an op together with its recomputation.

A piece is traced again with Inductor's decompositions. Tensors that cross from piece to piece are those that
the plan keeps; within a piece Inductor fuses in the given order and frees inputs after their last use.
Options that would move work or change layouts are off. In-place forms of the plan become new storages, placed
by Inductor, so a compiled step may need a little more than its plan predicts:
`remat_executor.module.peak_check` measures it.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from remat_executor.errors import warn
from remat_executor.fx_nodes import args_of
from remat_executor.lowering.runtime_protocol import GraphFunction, GraphInterface
from remat_executor.runtime.mutations import written
from remat_executor.runtime.opaque_ops import Opaque
from remat_executor.runtime.repeat_splits import Piece, split_at_repeats
from remat_executor.torch_private.inductor import compile_by_inductor, inductor_decompositions
from remat_graph.errors import text_of


class Inductor:
    """Compiles each graph at its first run, when the layouts of its tensors are known.

    A piece that Inductor cannot compile runs uncompiled, with one warning for a step.

    Args:
        compile_piece: compiles one piece for tensors of given layouts.

    Attributes:
        compiled_pieces: see `ChunkedRuntime`.
    """

    def __init__(
        self, compile_piece: Callable[[GraphModule, list[Tensor]], GraphFunction] | None = None
    ) -> None:
        self.compile_piece = compile_piece or compile_graph
        self.warned = False
        self.compiled_pieces: list[Piece] = []

    def __call__(self, module: GraphModule, interface: GraphInterface) -> GraphFunction:
        """Prepare a graph that is compiled at its first run."""
        return _CompiledGraph(self, module).run

    def compile(self, piece: Piece, tensors: list[Tensor]) -> None:
        """Compile a piece for tensors of these layouts; it runs uncompiled if that fails."""
        try:
            piece.compiled = self.compile_piece(piece.module, tensors)
            self.compiled_pieces.append(piece)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises, the plan can still run
            if not self.warned:
                self.warned = True
                line = (text_of(error).strip().splitlines() or [""])[0][:200]
                problem = f"Inductor cannot compile a part of the plan ({type(error).__name__}: {line})"
                warn(f"{problem}; this part runs uncompiled")
            piece.runs_compiled = False


class _CompiledGraph:
    """A graph in pieces, each compiled at its first run."""

    def __init__(self, runtime: Inductor, module: GraphModule) -> None:
        self.runtime, self.pieces = runtime, split_at_repeats(module)

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        live = dict(zip(self.pieces.entries, tensors, strict=True))
        tensors.clear()
        for piece in self.pieces.pieces:
            inputs = self.pieces.inputs(piece, live)
            if piece.compiled is None and piece.runs_compiled:
                self.runtime.compile(piece, inputs)
            live.update(zip(piece.gives, piece.run(inputs), strict=True))
        return [live[node] for node in self.pieces.results]


def compile_graph(module: GraphModule, tensors: list[Tensor]) -> GraphFunction:
    """Compile a lowered graph for tensors of these layouts."""
    opaque = Opaque(module)
    inputs = [*tensors, torch.zeros(1)] if opaque.ordered else tensors
    with torch.no_grad():
        traced = make_fx(
            torch.func.functionalize(opaque.flat, remove="mutations"),
            inductor_decompositions(),
            tracing_mode="fake",
        )(*inputs)
    _write_back_only(traced, written(module))
    compiled = compile_by_inductor(traced)
    return _with_token(compiled) if opaque.ordered else lambda tensors: list(compiled(tensors))


def _with_token(compiled: Callable[[list[Tensor]], Iterable[Tensor]]) -> GraphFunction:
    def run(tensors: list[Tensor]) -> list[Tensor]:
        tensors.append(torch.zeros(1))
        return list(compiled(tensors))[:-1]

    return run


def _write_back_only(traced: GraphModule, kept: set[int]) -> None:
    """Drop the trace's copies into inputs, except `kept`: the plan frees the others."""
    for index, node in enumerate(traced.graph.find_nodes(op="placeholder")):
        for user in list(node.users):
            if index not in kept and user.target is torch.ops.aten.copy_.default and user.args[0] is node:
                user.replace_all_uses_with(args_of(user)[1])
                traced.graph.erase_node(user)
    traced.recompile()
