"""flash_attn 1.0.9 (2023), where it is not version 2; `extensions_1` has its compiled extensions.

The functions of attention are calls of `flashtile.attention_varlen`. Their arguments mean what they mean in version 2
(`flashtile.compat.flash_attn_2`), but:

- q, k and v are packed by `cu_seqlens`, int32 `[batch + 1]`; `max_seqlen` is the longest sequence.
- causal: no key right of the diagonal is visible, which begins at the first key.
- return_attn_probs: also return lse, float32 `[batch, heads, max_seqlen rounded up to 16]`, -inf past the end of a
  sequence, and `S_dmask`, `[batch, heads, rows rounded up to 16, keys rounded up to 64]`, with the elements that it has
  there, in the order of tensor-core fragments.

A row that sees no key is 0. Raised are the `TypeError` and `ValueError` of the public functions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile import modules
from flashtile.compat import block, calls, mha, rotary
from flashtile.compat.adapter import refuse, refuse_given
from flashtile.compat.calls import Given, Output, taken_apart
from flashtile.compat.padding import kept_rows
from flashtile.compat.rows import locate_rows
from flashtile.compat.signatures import VERSION_1

#: Rows of lse and of the weights are padded to a multiple of the first, keys to one of the second.
PROBS_MULTIPLE = (16, 64)


def flash_attn_unpadded_func(return_attn_probs: bool, **given: Any) -> Output:
    """Attention of packed sequences, q, k and v or kv `[total_k, 2, heads_kv, ...]`, or qkv `[total, 3, heads, ...]`:
    out; with return_attn_probs out, lse and the weights in their own layout."""
    apart = taken_apart(given, top_left=True)
    out, *rest = _attend(apart, return_attn_probs)
    return (out, rest[0], in_fragments(rest[1])) if return_attn_probs else out


flash_attn_unpadded_kvpacked_func = flash_attn_unpadded_qkvpacked_func = flash_attn_unpadded_func
flash_attn_func = flash_attn_unpadded_func


def _attend(apart: Given, return_weights: bool) -> tuple[Tensor, ...]:
    q, k, v, layout, call, _ = apart
    assert layout is not None
    seed = calls.drawn_seed(q, call.dropout_p)
    out, lse = calls.computed(q, k, v, layout, call, dropout_seed=seed, return_lse=True)
    if not return_weights:
        return (out,)
    lse = padded_lse(lse, layout.cu_seqlens_q, layout.max_seqlen_q)
    return out, lse, calls.weights(q, k, layout, call, seed, PROBS_MULTIPLE)


def flash_attn_unpadded_qkvpacked_split_func(
    cu_seqlens: Tensor, max_seqlen0: int, max_seqlen1: int, batch_size0: int, return_attn_probs: bool, **given: Any
) -> Output:
    """As `flash_attn_unpadded_qkvpacked_func`, where the first `batch_size0` sequences are at most max_seqlen0 long and
    the others at most max_seqlen1: out, or (out, lse, S_dmask of the first, S_dmask of the others)."""
    sequences = cu_seqlens.shape[0] - 1
    if not 0 <= batch_size0 <= sequences:
        raise ValueError(
            f"batch_size0: expected from 0 to {sequences}, the number of sequences, got {batch_size0}; it is how many "
            "of them max_seqlen0 is the longest of"
        )
    given |= {"cu_seqlens": cu_seqlens, "max_seqlen": max(max_seqlen0, max_seqlen1)}
    out, *rest = _attend(taken_apart(given, top_left=True), return_attn_probs)
    if not return_attn_probs:
        return out
    lse, weights = rest
    made = []
    for part, longest in ((weights[:batch_size0], max_seqlen0), (weights[batch_size0:], max_seqlen1)):
        rows, columns = (-(-longest // multiple) * multiple for multiple in PROBS_MULTIPLE)
        made.append(in_fragments(part[:, :, :rows, :columns]))
    return out, lse, *made


def _get_block_size(**given: Any) -> int:
    """Keys of a block of `S_dmask`: all of them, because its elements refer to the maximum of the whole row."""
    return 1 << 30


@torch.no_grad()
def _flash_attn_forward(
    out: Tensor, return_softmax: bool, generator: torch.Generator | None, **given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The forward by itself, written to `out`: out, lse, rng_state int64 `[2]`, which the backward wants, and S_dmask.

    `num_splits` was how many thread blocks share the rows of a sequence: the result does not depend on it.
    """
    apart = taken_apart(given, top_left=True)
    result, lse, made, seed = calls.forward(apart, return_softmax, generator, PROBS_MULTIPLE)
    out.copy_(result)
    assert apart.layout is not None
    lse = padded_lse(lse, apart.layout.cu_seqlens_q, apart.layout.max_seqlen_q)
    return out, lse, seed, in_fragments(made) if return_softmax else None


def _flash_attn_backward(num_splits: int, **given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward by itself, by `flashtile.attention_backward`, written to dq, dk and dv.

    `num_splits` 1 asks for gradients that are the same in every run. With dropout, `rng_state` is that of the forward;
    where it is None, it is drawn from `generator`, which must be as it was then.

    Returns:
        dq, dk, dv and `rowsum(dout · out)`, float32 `[batch, heads, max_seqlen_q rounded up to 16]`.
    """
    return backward(deterministic=num_splits == 1, **given)


@torch.no_grad()
def backward(
    dout: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, rng_state: Tensor | None,
    generator: torch.Generator | None, **given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same with any options of a call."""
    apart = taken_apart(given, top_left=True)
    if rng_state is None and generator is not None:
        rng_state = calls.drawn_seed(apart.q, apart.call.dropout_p, generator)
    assert apart.layout is not None
    ends, longest = apart.layout.cu_seqlens_q, apart.layout.max_seqlen_q
    gradients = calls.backward(apart, dout, out, packed_lse(softmax_lse, ends, apart.q.shape[0]), rng_state)
    calls.write_gradients(gradients, dq, dk, dv)
    return dq, dk, dv, padded_lse(calls.row_sums(dout, out), ends, longest, 0.0)


def padded_lse(lse: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, past: float = -math.inf) -> Tensor:
    """`[heads, total]` as `[batch, heads, max_seqlen rounded up to 16]`, `past` behind the end of a sequence."""
    assert max_seqlen is not None
    rows = -(-max_seqlen // PROBS_MULTIPLE[0]) * PROBS_MULTIPLE[0]
    within = torch.arange(rows, device=lse.device)
    if not lse.shape[1]:
        return lse.new_full((cu_seqlens.shape[0] - 1, lse.shape[0], rows), past)
    row = (cu_seqlens[:-1, None] + within).clamp(max=lse.shape[1] - 1)
    behind = within >= cu_seqlens.diff()[:, None]
    return lse[:, row].transpose(0, 1).masked_fill(behind[:, None], past)


def packed_lse(lse: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """What `padded_lse` undoes: `[heads, total]`, -inf for rows that belong to no sequence."""
    sequence, within, there = locate_rows(cu_seqlens, total)
    rows = lse[sequence, :, within.clamp(max=lse.shape[2] - 1)]
    return rows.transpose(0, 1).masked_fill(~there, -math.inf).contiguous()


def in_fragments(weights: Tensor) -> Tensor:
    """The elements of `[B, H, R, C]` in the order in which threads of a tensor core hold them.

    With rows `(steps 2 8)` and columns `(blocks 4 2 4 2)`, the order in memory becomes
    `(steps, blocks, 4, 8, 4, 2, 2, 2)`: what the converters of flash_attn 1 undo.
    """
    batch, heads, rows, columns = weights.shape
    split = weights.view((batch, heads, rows // 16, 2, 8, columns // 64, 4, 2, 4, 2))
    return split.permute((0, 1, 2, 5, 6, 4, 8, 3, 7, 9)).reshape(weights.shape)


# flash_attn.bert_padding


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of version 2 without its last argument and its last result."""
    return modules.unpad_input(hidden_states, kept_rows(attention_mask))[:4]


# flash_attn.flash_blocksparse_attn_interface


def convert_blockmask(blockmask: Tensor, causal: bool) -> Tensor:
    """A layout of tiles as lists: for each column the rows that are visible in it.

    Args:
        blockmask: `[rows, columns]`, not 0 where a tile is visible.
        causal: must be False; the calls take care of it.

    Returns:
        int32 `[columns, rows]`: `4 · row + 2 · (last of its row) + (first of its row)` in the order of rows, then -1.
    """
    if causal:
        raise ValueError("causal: expected False, got True; pass causal to the call of attention")
    visible = blockmask != 0
    along = visible.to(torch.int32)
    first = visible & (along.cumsum(1) == 1)
    last = visible & (along.flip(1).cumsum(1).flip(1) == 1)
    row = torch.arange(visible.shape[0], device=visible.device)[:, None]
    entries = (4 * row + 2 * last + first).masked_fill(~visible, -1).t()
    # A stable sort by "is there" keeps the order of rows.
    order = visible.t().to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    return entries.gather(1, order).to(torch.int32).contiguous()


def blockmask_layout(converted: Tensor) -> Tensor:
    """What `convert_blockmask` undoes: bool `[rows, columns]`."""
    columns, rows = converted.shape
    layout = torch.zeros(rows + 1, columns, dtype=torch.bool, device=converted.device)
    row = converted.long().div(4, rounding_mode="floor").masked_fill(converted < 0, rows)
    return layout.scatter_(0, row.t(), True)[:rows]


def flash_blocksparse_attn_func(blockmask: Tensor, convert_mask: bool, **given: Any) -> Tensor:
    """`flashtile.modules.flash_blocksparse_attn_func`; without convert_mask, `blockmask` is what `convert_blockmask`
    makes of a layout."""
    return modules.flash_blocksparse_attn_func(
        blockmask=blockmask if convert_mask else blockmask_layout(blockmask), **given
    )


# flash_attn.fused_softmax


def scaled_upper_triang_masked_softmax(inputs: Tensor, _: Any, scale: float) -> Tensor:
    """Softmax of `scale · inputs` `[batch, heads, seq, seq]` over the keys up to each query's own."""
    refuse_given("the causal mask is the only one; scaled_masked_softmax takes others", mask=_)
    return flashtile.scaled_causal_softmax(inputs, scale)


# flash_attn.flash_attention, flash_blocksparse_attention, modules, layers.rotary, losses


class FlashAttention(modules.FlashSelfAttention):
    """Attention of packed queries, keys and values: `flashtile.modules.FlashSelfAttention` with padding masks."""

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0) -> None:
        super().__init__(softmax_scale=softmax_scale, attention_dropout=attention_dropout)

    def forward(  # type: ignore[override]
        self, qkv: Tensor, key_padding_mask: Tensor | None, causal: bool, cu_seqlens: Tensor | None, max_s: int | None
    ) -> tuple[Tensor, None]:
        """Attention of qkv to itself, and None in the place of weights, so that need_weights must be False.

        qkv is `[batch, seq, 3, heads, head_dim]`, or with cu_seqlens `[batch + 1]` and max_s, the longest sequence,
        `[total, 3, heads, head_dim]`. key_padding_mask is bool `[batch, seq]`, True = keep; other rows give 0.
        """
        if cu_seqlens is not None and (key_padding_mask is not None or max_s is None):
            raise ValueError(
                "cu_seqlens: expected max_s beside it and no key_padding_mask; packed sequences have no padding"
            )
        if key_padding_mask is None:
            return super().forward(qkv, causal, cu_seqlens, max_s if cu_seqlens is not None else None), None
        rows, indices, ends, longest = unpad_input(qkv, key_padding_mask)
        out = super().forward(rows, causal, ends, longest)
        return modules.pad_input(out, indices, qkv.shape[0], qkv.shape[1]), None


class FlashBlocksparseAttention(modules.FlashBlocksparseAttention):
    """`flashtile.modules.FlashBlocksparseAttention`, where `softmax_temp` is `softmax_scale`, for sequences of at most
    max_seq_length. There are no parameters; the mask goes where qkv is, whatever `device` and `dtype` are."""

    def __init__(self, max_seq_length: int, device: Any = None, dtype: Any = None, **given: Any) -> None:
        super().__init__(**given)
        self.max_seq_length = max_seq_length

    def forward(self, qkv: Tensor, key_padding_mask: Any, **given: Any) -> Any:  # type: ignore[override]
        """As there. attn_mask must be None; a key_padding_mask may be an object with a `bool_matrix`; convert_mask says
        in which form the mask is kept, and changes nothing here."""
        longest = given["max_s"] if given["cu_seqlens"] is not None else qkv.shape[1]
        if longest is not None and longest > self.max_seq_length:
            refuse("max_seq_length", f"at least {longest}, the sequence of the call", self.max_seq_length, "raise it")
        return super().forward(qkv, getattr(key_padding_mask, "bool_matrix", key_padding_mask), **given)


class FlashBlocksparseMHA(modules.FlashBlocksparseMHA):
    """`flashtile.modules.FlashBlocksparseMHA` around `FlashBlocksparseAttention`; arguments as there."""

    def __init__(self, sparsity_config: Any, max_seq_length: int, **given: Any) -> None:
        super().__init__(sparsity_config=sparsity_config, **given)
        self.embed_dim = given["embed_dim"]
        self.inner_attn = FlashBlocksparseAttention(
            sparsity_config=sparsity_config, attention_dropout=given["attention_dropout"], max_seq_length=max_seq_length
        )

    def forward(  # type: ignore[override]
        self, x: Tensor, key_padding_mask: Any, need_weights: bool, **same: Any
    ) -> tuple[Tensor, None]:
        """Attention of x `[batch, seq, embed_dim]` to itself.

        `x_ignored_` and `x_ignored_1_` stand where other modules have keys and values: they must be x, or None.
        """
        for name, given in same.items():
            if given is not None and given is not x:
                refuse(name, "x or None", given, "this is self-attention")
        return super().forward(x, key_padding_mask, need_weights)


class _TopLeft:
    """The diagonal of attention begins at the first key."""

    def __init__(self, triton: bool = False, **given: Any) -> None:
        super().__init__(**given)
        self.triton = triton

    def options(self, q: Tensor, causal: bool | None = None) -> dict[str, Any]:
        return super().options(q, causal) | {"align": "top_left"}  # type: ignore[misc]


class FlashSelfAttention(_TopLeft, modules.FlashSelfAttention):
    """`flashtile.modules.FlashSelfAttention`; the diagonal begins at the first key. `triton` chose another kernel."""


class FlashCrossAttention(_TopLeft, modules.FlashCrossAttention):
    """`flashtile.modules.FlashCrossAttention`; the diagonal begins at the first key. `triton` chose another kernel."""


class MHA(mha.MHA):
    """Multi-head self-attention or cross-attention; arguments as those of version 2 that have the same name.

    The causal diagonal of cross-attention with use_flash_attn begins at the first key.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.use_flash_attn:
            options = {"causal": self.causal, "softmax_scale": given["softmax_scale"]}
            options["attention_dropout"] = given["dropout"]
            self.inner_attn, self.inner_cross_attn = FlashSelfAttention(**options), FlashCrossAttention(**options)


class Block(block.Block):
    """`Block` of version 2; the default mixer is the `MHA` of version 1."""

    mha = MHA


class ParallelBlock(block.ParallelBlock):
    """`ParallelBlock` of version 2; the default mixer is the `MHA` of version 1."""

    mha = MHA


apply_rotary_emb_func, apply_rotary_emb_qkv_ = rotary.apply_rotary_emb, rotary.apply_rotary_emb_qkv_


class RotaryEmbedding(modules.RotaryEmbedding):
    """`flashtile.modules.RotaryEmbedding` of packed qkv; `pos_idx_in_fp32` must be True: positions are exact."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.pos_idx_in_fp32 = True


class CrossEntropyLoss(modules.CrossEntropyLoss):
    """`flashtile.modules.CrossEntropyLoss` with the arguments of flash_attn 1; reduction is "mean" or "none"."""

    def __init__(self, reduction: str, **given: Any) -> None:
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction: expected 'mean' or 'none', got {reduction!r}; sum the losses of 'none'")
        super().__init__(reduction=reduction, **given)


CrossEntropyLossApex = CrossEntropyLoss


VERSION_1.serve(globals())
