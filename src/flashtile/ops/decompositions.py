"""flashtile's operators in PyTorch's own: for graphs that go where flashtile is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.attention import reference as attention
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.common.operators import OPERATORS, Operator, packed


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The forward operators of flashtile, each with a function of PyTorch operations that computes the same.

    The table is for `ExportedProgram.run_decompositions` and other PyTorch tools that take such tables;
    `flashtile.integrations.export.decompose` applies it. The functions are the eager references, so attention holds all
    of its scores. They raise ValueError for dropout, and for packed sequences, whose sizes a graph does not know. The
    table has no operators of `linear_cross_entropy`, `attention_column_sums` and `attention_with_kv_cache`, and none
    that write in place.

    Returns:
        A new dict: operator overload -> function with its arguments.
    """
    made = {each.overload: functools.partial(_decomposed, each) for each in OPERATORS.values() if each.decomposition}
    return {torch.ops.flashtile.attention_forward.default: _attention, **made}


def _decomposed(made: Operator, *flat: Any) -> Any:
    assert made.decomposition is not None
    return packed(made.decomposition(*made.nested(flat)), made.present is None)


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    side = SideInputs(*rest[: len(SideInputs._fields)])
    side = side._replace(captured=tuple(side.captured))  # the dispatcher passes a list
    spec = AttentionSpec(*rest[len(SideInputs._fields) : -1])
    if spec.block_shape is not None:
        batch, heads, tile_q, tile_k = spec.block_shape
        spec = spec._replace(block_shape=(batch, heads, tile_q, tile_k))
    if side.packed:
        raise ValueError(
            "cu_seqlens_q: expected None in a graph of PyTorch's operations, which does not know where sequences end; "
            "export the model with a padded batch"
        )
    if side.dropout_seed is not None:
        raise ValueError(
            "dropout_p: expected 0 in a graph of PyTorch's operations, which draw other bits; call model.eval() before "
            "it is exported"
        )
    results = attention.forward(q, k, v, side, spec)
    return results if spec.returns_max_scores else (*results, results[1].new_empty(0))
