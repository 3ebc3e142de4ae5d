"""Exported models: graphs with flashtile's operators, and graphs of PyTorch's own alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import flashtile

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The same program in PyTorch's operations only, for ONNX and for other places without flashtile.

    A model that `torch.export.export` has exported contains flashtile's operators, which run flashtile's kernels. This
    function replaces each of them by PyTorch operations. Attention then holds all of its scores, `seq_q × seq_k`.

    Args:
        program: exported from a model in evaluation mode. It must not contain dropout, packed sequences, losses of
            linear layers, or caches that are written in place.

    Returns:
        A new program; the given one stays unchanged.

    Raises:
        TypeError: the argument is no exported program.
        ValueError: an operator of flashtile in it has no equivalent.
    """
    from torch.export import ExportedProgram  # which loads the compiler

    if not isinstance(program, ExportedProgram):
        raise TypeError(
            f"program: expected an ExportedProgram, got {type(program).__name__}; torch.export.export makes one"
        )
    table = flashtile.decompositions()
    decomposed = program.run_decompositions(dict(table))
    left = sorted(_ours(decomposed))
    if left:
        raise ValueError(
            f"program: expected operators that PyTorch's can replace, got {', '.join(left)}; export the part of the "
            "model without them"
        )
    return decomposed


def _ours(program: ExportedProgram) -> set[str]:
    """Names of flashtile's operators in a program, its submodules included."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    overloads = (argument for graph in graphs for node in graph.nodes for argument in (node.target, *node.args))
    return {
        str(overload)
        for overload in overloads
        if isinstance(overload, torch._ops.OpOverload) and overload.namespace == "flashtile"
    }
