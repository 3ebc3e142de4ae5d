"""Calls of attention with the arguments that flash_attn 2 and 3 have, dense and packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import flashtile
from flashtile.compat.shared import probs
from flashtile.compat.shared.arguments import longest, window
from flashtile.compat.shared.probs import Scores
from flashtile.compat.shared.rows import check_pages, gathered_keys

#: Rows and columns of the weights that are returned are padded to multiples of it.
PROBS_MULTIPLE = (128, 128)


class Call(NamedTuple):
    """The options of one call, as flash_attn has them."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    descales: tuple[Tensor | None, ...] = (None, None, None)
    sinks: Tensor | None = None
    block_mask: flashtile.BlockMask | None = None
    score_mod: Callable[..., Tensor] | None = None


class Packed(NamedTuple):
    """How the sequences of a packed call lie.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: `[batch + 1]`.
        max_seqlen_q, max_seqlen_k: of the longest; None where only the GPU knows it.
        block_table: integers `[batch, pages of a sequence]` where keys and values lie in pages, or None.
        leftpad_k: `[batch]`, how many keys at the beginning of each sequence do not count, or None.
        seqused_k: `[batch]`, how many keys of each sequence are there, or None for all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    block_table: Tensor | None = None
    leftpad_k: Tensor | None = None
    seqused_k: Tensor | None = None


def dense(q: Tensor, k: Tensor, v: Tensor, call: Call, return_probs: bool) -> Tensor | tuple[Tensor, ...]:
    """`[B, Sq, H, D]` attention to `[B, Sk, G, D]`.

    Returns:
        out; with return_probs out, lse `[B, H, Sq]` and the weights (see `probs_of`).
    """
    if not return_probs:
        return flashtile.attention(q, k, v, **options_of(q, call))
    seed = drawn_seed(q, call.dropout_p)
    out, lse = flashtile.attention(q, k, v, **options_of(q, call), dropout_seed=seed, return_lse=True)
    return out, lse, probs_of(q, k, call, seed) if seed is not None else q.new_empty(0)


def packed(
    q: Tensor, k: Tensor, v: Tensor, layout: Packed, call: Call, return_probs: bool
) -> Tensor | tuple[Tensor, ...]:
    """`[total_q, H, D]` attention to `[total_k, G, D]`, or to pages of keys.

    Returns:
        out; with return_probs out, lse `[H, total_q]` and the weights.
    """
    k, v, layout = with_packed_keys(k, v, with_longest(layout))
    if not return_probs:
        return flashtile.attention_varlen(q, k, v, **lengths_of(layout), **options_of(q, call))
    seed = drawn_seed(q, call.dropout_p)
    out, lse = flashtile.attention_varlen(
        q, k, v, **lengths_of(layout), **options_of(q, call), dropout_seed=seed, return_lse=True
    )
    return out, lse, packed_probs_of(q, k, layout, call, seed) if seed is not None else q.new_empty(0)


@torch.no_grad()
def with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    call: Call,
    return_lse: bool,
    **places: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Attention to a cache, to which k and v are appended first; `places` are further arguments of
    `flashtile.attention_with_kv_cache`. Not recorded by autograd.

    Returns:
        out, or (out, lse `[B, H, Sq]`).
    """
    options = options_of(q, call) | places | {"return_lse": bool(return_lse)}
    del options["dropout_p"], options["deterministic"]
    return flashtile.attention_with_kv_cache(q, k_cache, v_cache, k, v, **options)


def equal_lengths(x: Tensor) -> Tensor:
    """The cumulative lengths of a dense batch `[B, rows, ...]` whose first two dimensions are to be flattened."""
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def as_dense(out: Tensor, lse: Tensor, batch: int, rows: int) -> tuple[Tensor, Tensor]:
    """Packed results of a batch of equal lengths as `[B, Sq, H, D]` and `[B, H, Sq]`."""
    lse = lse.unflatten(1, (batch, rows)).transpose(0, 1)
    return out.unflatten(0, (batch, rows)), lse.contiguous()


def with_longest(layout: Packed) -> Packed:
    """The same with longest sequences as flashtile takes them."""
    return layout._replace(max_seqlen_q=longest(layout.max_seqlen_q), max_seqlen_k=longest(layout.max_seqlen_k))


def with_packed_keys(k: Tensor, v: Tensor, layout: Packed) -> tuple[Tensor, Tensor, Packed]:
    """The keys and values of a packed call as one sequence after another, where they lie otherwise."""
    if layout.block_table is not None:
        check_pages(k, v, layout.cu_seqlens_k, layout.block_table)
    elif layout.leftpad_k is None and layout.seqused_k is None:
        return k, v, layout
    k, v, cu_seqlens_k = gathered_keys(
        k, v, layout.cu_seqlens_k, layout.max_seqlen_k,
        block_table=layout.block_table, lengths=layout.seqused_k, left_padding=layout.leftpad_k,
    )  # fmt: skip
    sequences = Packed(layout.cu_seqlens_q, cu_seqlens_k.to(layout.cu_seqlens_q.dtype), *layout[2:4])
    return k, v, sequences


def probs_of(q: Tensor, k: Tensor, call: Call, seed: Tensor | None) -> Tensor:
    """The weights of a dense call, `[B, H, Sq', Sk']` with rows and columns padded to multiples of 128."""
    return probs.attention_probs(q, k, _scores(call), seed, call.dropout_p, PROBS_MULTIPLE)


def packed_probs_of(q: Tensor, k: Tensor, layout: Packed, call: Call, seed: Tensor | None) -> Tensor:
    """The weights of a packed call, each sequence from its start, padded to the longest and so on."""
    return probs.packed_attention_probs(q, k, *layout[:4], _scores(call), seed, call.dropout_p, PROBS_MULTIPLE)


def drawn_seed(x: Tensor, dropout_p: float, generator: torch.Generator | None = None) -> Tensor | None:
    """The dropout seed of a call, drawn from a generator, by default torch's own; None where nothing is dropped."""
    if not dropout_p:
        return None
    if generator is None:
        return flashtile.draw_dropout_seed(x.device)
    return torch.randint(2**32, (2,), dtype=torch.int64, device=x.device, generator=generator)


def forward(q: Tensor, k: Tensor, v: Tensor, layout: Packed | None, call: Call, return_probs: bool):
    """A forward by itself, not recorded by autograd.

    Returns:
        out, lse, the weights (empty where they were not asked for), and the dropout seed, `[2]` int64.
    """
    with torch.no_grad():
        seed = drawn_seed(q, call.dropout_p)
        options: dict[str, Any] = {**options_of(q, call), "dropout_seed": seed, "return_lse": True}
        if layout is None:
            out, lse = flashtile.attention(q, k, v, **options)
        else:
            k, v, layout = with_packed_keys(k, v, with_longest(layout))
            out, lse = flashtile.attention_varlen(q, k, v, **lengths_of(layout), **options)
        weights = q.new_empty(0)
        if return_probs:
            weights = probs_of(q, k, call, seed) if layout is None else packed_probs_of(q, k, layout, call, seed)
        return out, lse, weights, torch.zeros(2, dtype=torch.int64, device=q.device) if seed is None else seed


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Packed | None,
    call: Call,
    seed: Tensor | None,
    align: Literal["bottom_right", "top_left"] = "bottom_right",
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from the results of a forward, the dropout seed that it returned, and the gradients
    of out and lse."""
    if call.dropout_p and seed is None:
        raise ValueError(
            "rng_state: expected what the forward returned, beside dropout_p, got None; it says what was dropped"
        )
    options = options_of(q, call) | {"dropout_seed": seed if call.dropout_p else None, "align": align}
    if options["alibi_slopes"] is not None:
        options["alibi_slopes"] = options["alibi_slopes"].detach()
    if layout is not None:
        layout = with_longest(layout)
        options |= dict(zip(("cu_seqlens", "cu_seqlens_k", "max_seqlen", "max_seqlen_k"), layout[:4]))
    return flashtile.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)[:3]


def write_gradients(gradients: Sequence[Tensor], buffers: Sequence[Tensor | None]) -> None:
    """Copies gradients to buffers, where there are any."""
    for name, gradient, buffer in zip(("dq", "dk", "dv"), gradients, buffers):
        if buffer is None:
            continue
        if buffer.shape != gradient.shape or buffer.dtype is not gradient.dtype:
            raise ValueError(
                f"{name}: expected {gradient.dtype} {list(gradient.shape)}, got {buffer.dtype} {list(buffer.shape)}; "
                "the gradient is written to it"
            )
        buffer.copy_(gradient)


def row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """`rowsum(dout · out)`, float32 `[B, H, Sq]`, packed `[H, total]`."""
    wide = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(wide) * out.to(wide)).sum(-1).transpose(-1, -2).contiguous()


def options_of(q: Tensor, call: Call) -> dict[str, Any]:
    """The options of a call in the words of flashtile; what a call does not have is left out."""
    slopes = call.alibi_slopes
    if slopes is not None and slopes.dtype is torch.float32 and q.dtype is torch.float64:
        slopes = slopes.double()  # slopes are float32 whatever q is
    rare: dict[str, Any] = {name: getattr(call, name) for name in ("sinks", "block_mask", "score_mod")}
    rare |= dict(zip(("descale_q", "descale_k", "descale_v"), call.descales))
    return {
        "causal": bool(call.causal),
        "window": window(call.window_size),
        "scale": call.softmax_scale,
        "dropout_p": call.dropout_p,
        "softcap": call.softcap,
        "alibi_slopes": slopes,
        "deterministic": bool(call.deterministic),
        **{name: given for name, given in rare.items() if given is not None},
    }


def lengths_of(layout: Packed) -> dict[str, Any]:
    """The lengths of a packed call in the words of flashtile."""
    return dict(zip(Packed._fields[:4], layout))


def _scores(call: Call) -> Scores:
    left, right = window(call.window_size)
    band = (left, 0 if call.causal else right)
    return Scores(call.softmax_scale, band, False, call.softcap, call.alibi_slopes)
