"""Lowered graphs compiled by Inductor, in pieces in which no recomputation meets its original.

A piece is traced again under Inductor's decompositions. What crosses from piece to piece is what the plan
keeps; within one Inductor fuses, in the order it is given, and frees its inputs as it goes. What would move
work or change layouts is switched off. In-place forms of the plan become new storages that Inductor places
itself, so a compiled step may hold a little more than its plan says: `remat_executor.module.peak_check`
measures it.
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
from remat_executor.runtime.repeat_splits import split_at_repeats
from remat_executor.torch_private.inductor import compile_by_inductor, inductor_decompositions
from remat_graph.errors import text_of


class Inductor:
    """Compiles each part at its first run, when its tensors are there to be looked at.

    A part that Inductor cannot compile runs as the eager runtime would run it, with one warning a program.
    """

    def __init__(self) -> None:
        self.warned = False

    def __call__(self, module: GraphModule, interface: GraphInterface) -> GraphFunction:
        """A part that compiles itself."""
        return _CompiledGraph(self, module).run

    def compile(self, module: GraphModule, tensors: list[Tensor]) -> GraphFunction:
        """Compile a part for tensors like these; they are read for their layouts alone."""
        try:
            return compile_graph(module, tensors)
        except Exception as error:  # noqa: BLE001 - whatever a compiler fails with, the plan can still be run
            if not self.warned:
                self.warned = True
                line = (text_of(error).strip().splitlines() or [""])[0][:200]
                problem = f"Inductor cannot compile a part of the plan ({type(error).__name__}: {line})"
                warn(f"{problem}; that part runs uncompiled")
            run: GraphFunction = module.forward
            return run


class _CompiledGraph:
    """A part in pieces, each compiled at its first run."""

    def __init__(self, program: Inductor, module: GraphModule) -> None:
        self.program, self.pieces = program, split_at_repeats(module)

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        live = dict(zip(self.pieces.entries, tensors, strict=True))
        tensors.clear()
        for piece in self.pieces.pieces:
            inputs = self.pieces.inputs(piece, live)
            if piece.run is None:
                piece.run = self.program.compile(piece.module, inputs)
            live.update(zip(piece.gives, piece.run(inputs), strict=True))
        return [live[node] for node in self.pieces.results]


def compile_graph(module: GraphModule, tensors: list[Tensor]) -> GraphFunction:
    """Compile one lowered graph.

    Args:
        module: the graph; takes one list of tensors.
        tensors: what it will be given, by layout.
    """
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
    """Drop the copies by which the trace would bring storages up to date that the plan lets die."""
    for index, node in enumerate(traced.graph.find_nodes(op="placeholder")):
        for user in list(node.users):
            if index not in kept and user.target is torch.ops.aten.copy_.default and user.args[0] is node:
                user.replace_all_uses_with(args_of(user)[1])
                traced.graph.erase_node(user)
    traced.recompile()
