"""flash_attn_cuda: forward and backward of packed attention, and of block-sparse attention, by themselves.

Autograd records none of them. Shapes, lse and weights are those of `flash_attn.flash_attn_interface` of version 1; the
diagonal begins at the first key. `zero_tensors` changes nothing, because rows of no sequence are always 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile.compat.flash_attn_v1.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from flashtile.compat.flash_attn_v1.flash_blocksparse_attn_interface import layout_of
from flashtile.compat.shared import calls
from flashtile.compat.shared.arguments import refuse
from flashtile.compat.shared.probs import padded_rows
from flashtile.compat.shared.rows import locate_rows
from flashtile.compat.shared.version1 import PROBS_MULTIPLE, padded_lse

#: Queries and keys of a block of a block mask.
_TILE = (16, 256)


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    return_softmax: bool,
    num_splits: int,
    gen: torch.Generator | None = None,
) -> list[Tensor]:
    """Attention, written to `out`: lse, rng_state, and with return_softmax the weights."""
    _, lse, rng_state, weights = _flash_attn_forward(
        q, k, v, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, is_causal,
        return_softmax, num_splits, gen,
    )  # fmt: skip
    return [lse, rng_state] if weights is None else [lse, rng_state, weights]


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    num_splits: int,
    gen: torch.Generator | None = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """The gradients, written to dq, dk and dv: these and `rowsum(dout · out)`."""
    gradients = _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout,
        softmax_scale, is_causal, rng_state, num_splits, gen,
    )  # fmt: skip
    return list(gradients)


@torch.no_grad()
def fwd_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    blockmask: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    return_softmax: bool,
    gen: torch.Generator | None = None,
) -> list[Tensor]:
    """Block-sparse attention: out `[total_q, heads, head_dim]` and lse.

    Args:
        blockmask: what `convert_blockmask` makes of a layout `[ceil(max_seqlen_q / 16), ceil(max_seqlen_k / 256)]`. Its
            values are read on the host.
        return_softmax: must be False, because the weights are never in memory.
        gen: draws the dropout seed; None for torch's own generator.
    """
    if return_softmax:
        refuse("return_softmax", "False", True, "attention weights are never in memory as a whole")
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    seed = calls.drawn_seed(q, p_dropout, gen)
    out, lse = _attend(q, k, v, lengths, blockmask, p_dropout, softmax_scale, is_causal, seed)
    past = torch.arange(max_seqlen_q, device=q.device) >= cu_seqlens_q.diff()[:, None, None]
    lse = lse.masked_fill(past, float("-inf"))
    return [out, torch.nn.functional.pad(lse, (0, -max_seqlen_q % PROBS_MULTIPLE[0]), value=float("-inf"))]


def bwd_block(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    blockmask: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    gen: torch.Generator | None = None,
) -> list[Tensor]:
    """The gradients of `fwd_block`, written to dq, dk and dv: these and `rowsum(dout · out)`.

    The forward is computed once more. With dropout, `gen` or torch's generator must be as it was before the forward.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    seed = calls.drawn_seed(q, p_dropout, gen)
    with torch.enable_grad():
        leaves = q, k, v = q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
        result, _ = _attend(q, k, v, lengths, blockmask, p_dropout, softmax_scale, is_causal, seed)
        gradients = torch.autograd.grad(result, leaves, dout)
    with torch.no_grad():
        calls.write_gradients(gradients, (dq, dk, dv))
        sums = padded_lse(calls.row_sums(dout, out), cu_seqlens_q, max_seqlen_q)
        return [dq, dk, dv, sums.masked_fill(sums.isneginf(), 0)]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor, Tensor, int, int],
    blockmask: Tensor,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out `[total_q, heads, head_dim]` and lse `[batch, heads, max_seqlen_q]`, by a dense call of padded sequences."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    tiles = -(-max_seqlen_q // _TILE[0]), -(-max_seqlen_k // _TILE[1])
    layout = layout_of(blockmask)[: tiles[0], : tiles[1]]
    out, lse = flashtile.attention(
        padded_rows(q, cu_seqlens_q, max_seqlen_q), padded_rows(k, cu_seqlens_k, max_seqlen_k),
        padded_rows(v, cu_seqlens_k, max_seqlen_k), causal=bool(is_causal), align="top_left", scale=softmax_scale,
        dropout_p=p_dropout, dropout_seed=seed, key_lengths=cu_seqlens_k.diff(),
        block_mask=flashtile.BlockMask.from_layout(layout, _TILE, max_seqlen_q, max_seqlen_k), return_lse=True,
    )  # fmt: skip
    sequence, within, there = locate_rows(cu_seqlens_q, q.shape[0])
    if not out.numel():
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), lse
    rows = out[sequence, within.clamp(max=max_seqlen_q - 1)]
    return rows.masked_fill(~there[:, None, None], 0), lse
