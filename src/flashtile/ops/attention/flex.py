"""Attention with the arguments and the layout of `torch.nn.attention.flex_attention.flex_attention`.

Shape letters: B batch, H query heads, G key/value heads, L queries, S keys, E head_dim, V head_dim of the values.

PyTorch evaluates `mask_mod` in every call, so a mask means what its function, the tensors that it reads, and its lists
are at that time. Its block masks are converted again when any of these has changed. One mask serves the layers of a
model, and each of its steps, and they seldom change between.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch import Tensor

from flashtile.ops.attention.api import attention
from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.options import ScoreMod
from flashtile.ops.attention.score_tracing import Surroundings
from flashtile.ops.attention.sdpa import check_query_key_value
from flashtile.ops.common.checks import raise_not_bool
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.sizes import differ, known

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | FlexBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | FlexBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = None,
    return_aux: None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | FlexBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest,
    backend: str = "auto",
    deterministic: bool = False,
) -> tuple[Tensor, AuxOutput]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | FlexBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | FlexBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with the arguments, layout and meaning of `torch.nn.attention.flex_attention.flex_attention`.

    It needs no `torch.compile`. Differentiable in query, key, value and the tensors that score_mod reads, also through
    lse. The last two arguments are flashtile's own.

    Args:
        query: `[B, H, L, E]`; dtypes as for `flashtile.attention`.
        key: `[B, G, S, E]`; beside a block_mask also with a batch size of 1, which all queries share.
        value: `[B, G, S, V]`, with key's batch size.
        score_mod: `(score, batch, head, q_index, k_index) -> score`, as for `flashtile.attention`.
        block_mask: a `torch.nn.attention.flex_attention.BlockMask` for L queries and S keys, or a
            `flashtile.BlockMask`. PyTorch's is converted at its first use, and again when its mask_mod or something
            that this reads has changed.
        scale: factor on the scores; default `1/sqrt(E)`.
        enable_gqa: query head `h` reads key/value head `h // (H // G)`. Without it, H and G are equal.
        return_lse: also return lse `[B, H, L]`, the natural log-sum-exp of each row.
        kernel_options: None; flashtile chooses tile sizes from tables.
        return_aux: an `AuxRequest`: return an `AuxOutput` with lse, max_scores or both, `[B, H, L]` each.
        backend: as in `flashtile.attention`.
        deterministic: as in `flashtile.attention`.

    Returns:
        `[B, H, L, V]` in query's dtype; with return_lse a pair with lse, with return_aux a pair with an `AuxOutput`.

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, kernel_options are given, or no backend serves the call.

    Reference:
        Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels" (2024).
    """
    if other_names:
        refuse_other_names(flex_attention, other_names)
    check_query_key_value(query, key, value, eight_bits=True)
    if not (isinstance(enable_gqa, bool) and isinstance(return_lse, bool)):
        raise_not_bool(enable_gqa=enable_gqa, return_lse=return_lse)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: expected 4 dimensions [batch, heads, seq, head_dim], got shape {tuple(tensor.shape)}; insert "
                "dimensions of size 1"
            )
    query, key, value = _align_batches(query, key, value, block_mask is not None, enable_gqa)
    if kernel_options:
        raise ValueError(
            f"kernel_options: expected None, got {kernel_options!r}; leave it out, flashtile chooses tile sizes from "
            "tables"
        )
    if return_lse and return_aux is not None:
        raise ValueError("return_lse, return_aux: expected one of them, got both; ask for AuxRequest(lse=True)")
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    wants_max = return_aux is not None and return_aux.max_scores
    call: Any = attention
    found = call(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        scale=scale,
        score_mod=score_mod,
        block_mask=None if block_mask is None else converted(block_mask),
        return_lse=wants_lse,
        return_max_scores=wants_max,
        backend=backend,
        deterministic=deterministic,
    )
    results = list(found) if isinstance(found, tuple) else [found]
    out = results.pop(0).transpose(1, 2)
    lse = results.pop(0) if wants_lse else None
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse, results.pop(0) if wants_max else None)
    return out if lse is None else (out, lse)


def _align_batches(
    query: Tensor, key: Tensor, value: Tensor, masked: bool, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The three, whose batch sizes and heads fit together."""
    batch, heads, *_ = query.shape
    heads_kv = key.shape[1]
    if differ(key.shape[:2], value.shape[:2]):
        raise ValueError(
            f"value: expected the batch size and heads of key, {tuple(key.shape[:2])}, got {tuple(value.shape[:2])}; "
            "each key has one value"
        )
    if not enable_gqa and heads != heads_kv:
        raise ValueError(
            f"key: expected the number of heads of query, {heads}, got {heads_kv}; pass enable_gqa=True where query "
            "heads share those of key and value"
        )
    if heads_kv and heads % heads_kv:
        raise ValueError(
            f"key: expected a number of heads that divides query's {heads}, got {heads_kv}; query heads share them in "
            "groups of equal size"
        )
    if differ(query.shape[:1], key.shape[:1]):
        if not (masked and known(key.shape[0] == 1)):
            raise ValueError(
                f"key: expected the batch size of query, {batch}, or 1 beside a block_mask, got {key.shape[0]}; expand "
                "key and value, or repeat them"
            )
        key, value = (tensor.expand(batch, -1, -1, -1) for tensor in (key, value))
    return query, key, value


def converted(block_mask: BlockMask | FlexBlockMask) -> BlockMask:
    """flashtile's mask for the argument `block_mask` of `flex_attention`."""
    if isinstance(block_mask, BlockMask):
        return block_mask
    if torch.compiler.is_compiling():
        # A graph would keep what the mask is while it is traced.
        torch._dynamo.graph_break(
            msg="block_mask: expected a flashtile.BlockMask in one graph, got one of PyTorch, which is read anew in "
            "each call; convert it before with flashtile.BlockMask.from_flex, or compile without fullgraph=True"
        )
        return torch.compiler.disable(_remembered)(block_mask)
    return _remembered(block_mask)


class _Conversion(NamedTuple):
    """A mask, and what it was made from: the tensors with the state of each, and all else."""

    mask: BlockMask
    tensors: tuple[Tensor | None, ...]
    states: tuple[int | Tensor | None, ...]
    key: Any

    def holds(self, tensors: tuple[Tensor | None, ...], key: Any) -> bool:
        """Whether a mask made from these would be the same."""
        if self.key != key or len(self.tensors) != len(tensors):
            return False
        for own, other, state in zip(self.tensors, tensors, self.states):
            if own is not other or (own is not None and not _unchanged(own, state)):
                return False
        return True


#: PyTorch's masks that live, and what was made from them.
_CONVERSIONS: weakref.WeakKeyDictionary[Any, _Conversion] = weakref.WeakKeyDictionary()


def _remembered(block_mask: FlexBlockMask) -> BlockMask:
    seen = Surroundings.of(block_mask.mask_mod) if hasattr(block_mask, "mask_mod") else None
    if seen is None:
        return BlockMask.from_flex(block_mask)
    tensors = (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        *seen.tensors,
    )
    key = seen.key, block_mask.seq_lengths, block_mask.BLOCK_SIZE
    found = _CONVERSIONS.get(block_mask)
    if found is None or not found.holds(tensors, key):
        # The states of before, in case that mask_mod changes what it reads.
        states = tuple(map(_state, tensors))
        found = _Conversion(BlockMask.from_flex(block_mask), tensors, states, key)
        _CONVERSIONS[block_mask] = found
    return found.mask


def _state(tensor: Tensor | None) -> int | Tensor | None:
    """Something by which a later change in place is found. Tensors of inference mode do not count theirs."""
    if tensor is None:
        return None
    return tensor.clone() if tensor.is_inference() else tensor._version


def _unchanged(tensor: Tensor, state: int | Tensor | None) -> bool:
    return torch.equal(tensor, state) if isinstance(state, Tensor) else tensor._version == state
