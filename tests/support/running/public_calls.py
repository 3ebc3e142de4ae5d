"""A small call of each public function with CPU tensors, for tests of what holds for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashtile
from flashtile import BlockMask, patterns

_CPU = torch.device("cpu")
SEQ, HEADS, DIM = 5, 2, 8
#: Rows of the leaves in tests that take one size.
ROWS = 3


class PublicCall(NamedTuple):
    """A call of a public function.

    Attributes:
        function: of the leaves, and makes all its other tensors on the CPU. Returns a tensor or a sequence of them.
        shapes: of the leaves; -1 stands for the number of rows (batch entries, or tokens).
        of_values: it is no operator, or decides by numbers, so that it cannot be traced.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ()
    of_values: bool = False

    def leaves(self, rows: int, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator("cpu").manual_seed(seed)
        sizes = ([rows if size == -1 else size for size in shape] for shape in self.shapes)
        return [torch.randn(size, generator=generator, device=_CPU) for size in sizes]

    def results(self, *leaves: Tensor) -> list[Tensor]:
        """The tensors that the call returns."""
        returned = self.function(*leaves)
        return [returned] if isinstance(returned, Tensor) else [t for t in returned if isinstance(t, Tensor)]


def _seed() -> Tensor:
    return torch.tensor([1, 2], device=_CPU)


def _lengths(x: Tensor) -> Tensor:
    """A length for each row, from 0 to 5."""
    return torch.arange(x.shape[0], device=_CPU) % (SEQ + 1)


def _cumulative(x: Tensor) -> Tensor:
    """Cumulative lengths of packed tokens: half of them, an empty sequence, and the rest."""
    tokens = torch.full((4,), x.shape[0], dtype=torch.int32, device=_CPU)
    return tokens * torch.tensor([0, 1, 1, 2], device=_CPU) // 2


def shown(queries: int = SEQ, keys: int = SEQ) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=_CPU).tril(keys - queries)


def _slopes_and_sinks() -> dict[str, Callable[[Tensor], Tensor]]:
    return {"alibi_slopes": _slopes, "sinks": _slopes}


def _slopes(q: Tensor) -> Tensor:
    return torch.tensor([0.5, 0.25], dtype=q.dtype, device=_CPU)


def _softened(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
    return score + (row - column) * 0.1 + head


def _half(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


def labels(x: Tensor) -> Tensor:
    return (x.detach().sum(-1) > 0).long()


def _tables(positions: int = 64) -> tuple[Tensor, Tensor]:
    return flashtile.rotary_tables(positions, DIM, device=_CPU)


def _attention(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v: flashtile.attention(q, k, v, **{name: of(q) for name, of in options.items()})


def _attention_in_the_mode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with flashtile.batch_invariant_mode():
        return flashtile.attention(q, k, v, causal=True)


def _packed(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v: flashtile.attention_varlen(
        q, k, v, _cumulative(q), **{name: of(q) for name, of in options.items()}
    )


def _cached(q: Tensor, k: Tensor, new: Tensor | None = None, **options: Any) -> Any:
    k_cache, v_cache = k.clone(), k.clone()
    return flashtile.attention_with_kv_cache(q, k_cache, v_cache, new, new, **options), k_cache


def _paged(q: Tensor, pages: Tensor, new: Tensor) -> Any:
    pages, table = pages.clone(), 5 - torch.arange(2 * q.shape[0], device=_CPU).view(-1, 2)
    options = {"cache_lengths": _lengths(q) * 7, "block_table": table}
    out = flashtile.attention_with_kv_cache(q, pages, pages.clone(), new, new, **options)
    return out, pages


def _paged_packed(q: Tensor, pages: Tensor, new: Tensor) -> Any:
    pages, starts = pages.clone(), _cumulative(q)
    table = torch.arange(2, device=_CPU).expand(starts.shape[0] - 1, -1)
    options = {"cache_lengths": 7 + 0 * starts[1:], "block_table": table, "cu_seqlens_q": starts}
    out = flashtile.attention_with_kv_cache(q, pages, pages.clone(), **options)
    return out, new


def _backward(q: Tensor, k: Tensor, v: Tensor) -> Any:
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    return flashtile.attention_backward(out, q, k, v, out, lse, causal=True)


def _column_sums(q: Tensor, k: Tensor) -> Tensor:
    _, lse = flashtile.attention(q, k, k, return_lse=True)
    return flashtile.attention_column_sums(q, k, lse)


def _eight_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (q, factor_q), (k, factor_k), (v, factor_v) = (flashtile.quantize_fp8(t) for t in (q, k, v))
    return flashtile.attention(q, k, v, descale_q=factor_q, descale_k=factor_k, descale_v=factor_v)


def _merged(out: Tensor, lse: Tensor) -> Any:
    acc, row_max, row_sum = torch.zeros_like(out), torch.zeros_like(lse), torch.zeros_like(lse)
    flashtile.merge_attention_(acc, row_max, row_sum, out, lse, first=True)
    flashtile.merge_attention_(acc, row_max, row_sum, out, lse)
    return flashtile.finish_attention(acc, row_max, row_sum, out.dtype)


def _of_pattern(make: Callable[[], BlockMask]) -> PublicCall:
    def call(q: Tensor) -> Tensor:
        mask = make()
        q = q.detach().expand(1, mask.shape[2], HEADS, DIM)
        return flashtile.attention(q, q, q, block_mask=mask)

    return PublicCall(call, ((1, 1, 1, 1),), of_values=True)


def _chosen_rows(x: Tensor) -> Tensor:
    """Numbers of rows for subsets: row i + 1, and none for the first."""
    return torch.arange(x.shape[0], dtype=torch.int32, device=_CPU)


_BLOCKS = BlockMask.from_dense(shown(), tile=(16, 16))
_SOFTENED = flashtile.trace_score_mod(_softened)

_QKV = ((-1, SEQ, HEADS, DIM),) * 3
_TOKENS = ((-1, HEADS, DIM),) * 3
_HEADS_FIRST = ((-1, HEADS, SEQ, DIM),) * 3
_CACHE = ((-1, 2, HEADS, DIM), (-1, 8, HEADS, DIM), (-1, 2, HEADS, DIM))
_ROWS = ((-1, 6), (-1, 6), (6,))
_LAYERS = ((-1, 4, 6), (8, 6), (8,), (6, 8), (6,))

CALLS: dict[str, PublicCall] = {
    "attention": PublicCall(_attention(), _QKV),
    "attention: half": PublicCall(lambda q, k, v: flashtile.attention(_half(q), _half(k), _half(v)), _QKV),
    "attention: narrow values": PublicCall(
        lambda q, k, v: flashtile.attention(q, k, v[..., : v.shape[-1] // 2], causal=True), _QKV
    ),
    "attention: window, softcap": PublicCall(
        _attention(window=lambda q: (2, 1), softcap=lambda q: 5.0, return_lse=lambda q: True), _QKV
    ),
    "batch_invariant_mode": PublicCall(_attention_in_the_mode, _QKV),
    "attention: key_lengths": PublicCall(_attention(key_lengths=_lengths, return_max_scores=lambda q: True), _QKV),
    "attention: dropout": PublicCall(_attention(dropout_p=lambda q: 0.25, dropout_seed=lambda q: _seed()), _QKV),
    "attention: bias": PublicCall(
        lambda q, k, v, bias: flashtile.attention(q, k, v, bias=bias), (*_QKV, (-1, 1, SEQ, SEQ))
    ),
    "attention: mask": PublicCall(
        lambda q, k, v, bias: flashtile.attention(q, k, v, mask=bias > 0, causal=True), (*_QKV, (-1, 1, 1, SEQ))
    ),
    "attention: slopes": PublicCall(_attention(alibi_slopes=_slopes, causal=lambda q: True), _QKV),
    "attention: slopes of batch": PublicCall(
        lambda q, k, v, slopes: flashtile.attention(q, k, v, alibi_slopes=slopes), (*_QKV, (-1, HEADS))
    ),
    "attention: sinks": PublicCall(_attention(sinks=_slopes, window=lambda q: (1, 1)), _QKV),
    "attention: all that learns": PublicCall(
        lambda q, k, v, bias, slopes, sinks: flashtile.attention(
            q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, softcap=2.0, dropout_p=0.3, dropout_seed=_seed()
        ),
        (*_QKV, (HEADS, SEQ, SEQ), (HEADS,), (HEADS,)),
    ),
    "attention: block_mask": PublicCall(_attention(block_mask=lambda q: _BLOCKS), _QKV),
    "attention: score_mod": PublicCall(_attention(score_mod=lambda q: _SOFTENED), _QKV),
    "attention: fp8": PublicCall(lambda q, k, v: _eight_bits(q.detach(), k.detach(), v.detach()), _QKV),
    "attention_varlen": PublicCall(_packed(causal=lambda q: True), _TOKENS),
    "attention_varlen: longest": PublicCall(
        _packed(max_seqlen_q=lambda q: q.shape[0], max_seqlen_k=lambda q: q.shape[0], window=lambda q: (1, 0)), _TOKENS
    ),
    "attention_varlen: dropout": PublicCall(_packed(dropout_p=lambda q: 0.25, dropout_seed=lambda q: _seed()), _TOKENS),
    "attention_varlen: slopes": PublicCall(_packed(**_slopes_and_sinks()), _TOKENS),
    "attention_varlen: score_mod": PublicCall(_packed(score_mod=lambda q: _SOFTENED), _TOKENS),
    "attention_varlen: key_lengths": PublicCall(_packed(key_lengths=lambda q: _cumulative(q).diff() // 2), _TOKENS),
    "attention_varlen: mask": PublicCall(
        _packed(mask=lambda q: shown(7, 7), max_seqlen_q=lambda q: 7, max_seqlen_k=lambda q: 7), _TOKENS
    ),
    "scaled_dot_product_attention": PublicCall(
        lambda q, k, v: flashtile.scaled_dot_product_attention(q, k, v, is_causal=True), _HEADS_FIRST
    ),
    "scaled_dot_product_attention: bool": PublicCall(
        lambda q, k, v, bias: flashtile.scaled_dot_product_attention(q, k, v, bias > -1),
        (*_HEADS_FIRST, (-1, 1, SEQ, SEQ)),
    ),
    "scaled_dot_product_attention: float": PublicCall(
        flashtile.scaled_dot_product_attention, (*_HEADS_FIRST, (-1, HEADS, SEQ, SEQ))
    ),
    "flex_attention": PublicCall(flashtile.flex_attention, _HEADS_FIRST),
    "flex_attention: functions": PublicCall(
        lambda q, k, v: flashtile.flex_attention(q, k, v, score_mod=_SOFTENED, block_mask=_BLOCKS), _HEADS_FIRST
    ),
    "attention_with_kv_cache": PublicCall(lambda q, k, _: _cached(q.detach(), k.detach()), _CACHE),
    "attention_with_kv_cache: append": PublicCall(
        lambda q, k, new: _cached(q.detach(), k.detach(), new.detach(), cache_lengths=_lengths(q), window=(3, 0)),
        _CACHE,
    ),
    "attention_with_kv_cache: rotary": PublicCall(
        lambda q, k, new: _cached(
            q.detach(),
            k.detach(),
            new.detach(),
            cache_lengths=4,
            rotary_cos=_tables()[0],
            rotary_sin=_tables()[1],
            cache_left_padding=_lengths(q),
        ),
        _CACHE,
    ),
    "attention_with_kv_cache: pages": PublicCall(
        lambda q, pages, new: _paged(q.detach(), pages.detach(), new.detach()),
        ((-1, 1, HEADS, DIM), (6, 16, HEADS, DIM), (-1, 1, HEADS, DIM)),
    ),
    "attention_with_kv_cache: packed": PublicCall(
        lambda q, pages, new: _paged_packed(q.detach(), pages.detach(), new.detach()),
        ((-1, HEADS, DIM), (6, 5, HEADS, DIM), (-1, HEADS, DIM)),
    ),
    "tree_mask": PublicCall(lambda: flashtile.tree_mask(torch.tensor([-1, 0, 0, 2], device=_CPU)), of_values=True),
    "attention_part": PublicCall(
        lambda q, k, v: flashtile.attention_part(
            q.detach(), k.detach(), v.detach(), flashtile.AttentionPart(0, 0, 2 * SEQ, SEQ), causal=True
        ),
        _QKV,
    ),
    "attention_backward": PublicCall(lambda q, k, v: _backward(q.detach(), k.detach(), v.detach()), _QKV),
    "attention_column_sums": PublicCall(lambda q, k: _column_sums(q.detach(), k.detach()), _QKV[:2]),
    "attention_probs": PublicCall(lambda q, k: flashtile.attention_probs(q, k, causal=True), _QKV[:2]),
    "dropout_mask": PublicCall(
        lambda: flashtile.dropout_mask(_seed(), 0.5, batch=2, heads=2, seq_q=3, seq_k=4), of_values=True
    ),
    "draw_dropout_seed": PublicCall(lambda: flashtile.draw_dropout_seed(_CPU).new_zeros(1), of_values=True),
    "quantize_fp8": PublicCall(lambda x: [t.float() for t in flashtile.quantize_fp8(x.detach())], _QKV[:1]),
    "cross_entropy": PublicCall(lambda x: flashtile.cross_entropy(x, labels(x)), ((-1, 7),)),
    "cross_entropy: of sequences": PublicCall(
        lambda x: flashtile.cross_entropy(
            x, labels(x), label_smoothing=0.1, lse_square_scale=0.1, reduction="none", return_z_loss=True
        ),
        ((-1, SEQ, 7),),
    ),
    "cross_entropy: class_weights": PublicCall(
        lambda x, w: flashtile.cross_entropy(x, labels(x), class_weights=w.detach().square(), softcap=3.0),
        ((-1, 7), (7,)),
    ),
    "linear_cross_entropy: class_weights": PublicCall(
        lambda x, weight, w: flashtile.linear_cross_entropy(
            x, weight, labels(x), class_weights=w.detach().square(), softcap=3.0
        ),
        ((-1, 6), (7, 6), (7,)),
    ),
    "linear_cross_entropy": PublicCall(
        lambda x, weight: flashtile.linear_cross_entropy(x, weight, labels(x)), ((-1, 6), (7, 6))
    ),
    "linear_cross_entropy: of sequences": PublicCall(
        lambda x, weight, bias: flashtile.linear_cross_entropy(
            x, weight, labels(x), bias, label_smoothing=0.1, reduction="none"
        ),
        ((-1, SEQ, 6), (7, 6), (7,)),
    ),
    "layer_norm": PublicCall(lambda x, _, w: flashtile.layer_norm(x, w, w), _ROWS),
    "layer_norm: of sequences": PublicCall(lambda x, w: flashtile.layer_norm(x, w), ((-1, SEQ, 6), (6,))),
    "rms_norm": PublicCall(lambda x, _, w: flashtile.rms_norm(x, w), _ROWS),
    "dropout_add_layer_norm": PublicCall(
        lambda x, r, w, b, c, _: flashtile.dropout_add_layer_norm(
            x, r, w, b, 0.25, prenorm=True, dropout_seed=_seed(), layerscale=c, rowscale=(_lengths(x) + 0.5).to(x.dtype)
        ),
        (*_ROWS, (6,), (6,), (6,)),
    ),
    "dropout_add_layer_norm: two": PublicCall(
        lambda x, r, w, b, v, c: flashtile.dropout_add_layer_norm(
            x, r, w, b, 0.25, dropout_seed=_seed(), x1=r, weight1=v, bias1=c, return_dropout_mask=True
        ),
        (*_ROWS, (6,), (6,), (6,)),
    ),
    "dropout_add_layer_norm: same x1": PublicCall(
        lambda x, r, w: flashtile.dropout_add_layer_norm(x, x, w, None, x1=x), _ROWS
    ),
    "dropout_add_rms_norm": PublicCall(
        lambda x, r, w: flashtile.dropout_add_rms_norm(x, r, w, rowscale_const=0.5, residual_in_fp32=True), _ROWS
    ),
    "dropout_add_rms_norm: subset": PublicCall(
        lambda x, r, w: flashtile.dropout_add_rms_norm(
            x,
            r,
            w,
            x0_subset=_chosen_rows(x),
            out_subset=_chosen_rows(x),
            out_numrows=x.shape[0],
            rowscale_const=1.5,
            prenorm=True,
            zero_centered_weight=True,
        ),
        _ROWS,
    ),
    "scaled_causal_softmax": PublicCall(lambda x: flashtile.scaled_causal_softmax(x, 0.5), ((-1, SEQ, SEQ),)),
    "scaled_masked_softmax": PublicCall(
        lambda x, mask: flashtile.scaled_masked_softmax(x, mask > 1, 0.5), ((-1, 2, SEQ, SEQ), (-1, 1, SEQ, SEQ))
    ),
    "online_softmax": PublicCall(
        lambda s, v: flashtile.online_softmax(s, v, flashtile.online_softmax(s, v)), ((-1, SEQ, 4), (-1, 4, DIM))
    ),
    "logsumexp_merge": PublicCall(
        lambda out, lse: flashtile.logsumexp_merge([out, out], [lse, lse]), (_QKV[0], (-1, HEADS, SEQ))
    ),
    "merge_attention_": PublicCall(lambda o, s: _merged(o.detach(), s.detach()), (_QKV[0], (-1, HEADS, SEQ))),
    "apply_rotary": PublicCall(lambda x: flashtile.apply_rotary(x, *_tables()), _QKV[:1]),
    "apply_rotary: offsets": PublicCall(
        lambda x: flashtile.apply_rotary(x, *_tables(), seqlen_offsets=_lengths(x), interleaved=True), _QKV[:1]
    ),
    "apply_rotary: position_ids": PublicCall(
        lambda x: flashtile.apply_rotary(
            x, *_tables(), position_ids=_lengths(x)[:, None] + torch.arange(SEQ, device=_CPU)
        ),
        _QKV[:1],
    ),
    "apply_rotary: packed": PublicCall(
        lambda x: flashtile.apply_rotary(x, *_tables(), cu_seqlens=_cumulative(x)), _TOKENS[:1]
    ),
    "apply_rotary: longest": PublicCall(
        lambda x: flashtile.apply_rotary(x, *_tables(), cu_seqlens=_cumulative(x), max_seqlen=x.shape[0]), _TOKENS[:1]
    ),
    "apply_rotary: in place": PublicCall(lambda x: flashtile.apply_rotary(x + 0, *_tables(), inplace=True), _QKV[:1]),
    "apply_rotary_qkv": PublicCall(
        lambda qkv: flashtile.apply_rotary_qkv(qkv, *_tables(), *_tables()), ((-1, SEQ, 3, HEADS, DIM),)
    ),
    "apply_rotary_kv": PublicCall(lambda kv: flashtile.apply_rotary_kv(kv, *_tables()), ((-1, SEQ, 2, HEADS, DIM),)),
    "rotary_frequencies": PublicCall(lambda: flashtile.rotary_frequencies(DIM, device=_CPU), of_values=True),
    "rotary_tables": PublicCall(
        lambda: flashtile.rotary_tables(9, DIM, scaling=flashtile.RotaryScaling("yarn", 2.0, 4), device=_CPU),
        of_values=True,
    ),
    "xpos_scale": PublicCall(lambda: flashtile.xpos_scale(9, DIM, 512.0, device=_CPU), of_values=True),
    "fused_dense": PublicCall(lambda x, w, b, *_: flashtile.fused_dense(x, w, b), _LAYERS),
    "fused_mlp": PublicCall(flashtile.fused_mlp, _LAYERS),
    "fused_mlp: checkpoints": PublicCall(
        lambda *leaves: flashtile.fused_mlp(*leaves, activation="relu", checkpoint_level=1), _LAYERS
    ),
    "fused_mlp: gated": PublicCall(
        lambda x, w, b, v, c: flashtile.fused_mlp(x, w, b, v[:, :4], c, activation="silu", gated=True), _LAYERS
    ),
    "fused_mlp: recomputed": PublicCall(
        lambda x, w, b, v, c: flashtile.fused_mlp(
            x, w, b, v[:, :4], c, activation="gelu", gated=True, checkpoint_level=2
        ),
        _LAYERS,
    ),
    "linear_bias_wgrad": PublicCall(
        lambda x, _: flashtile.linear_bias_wgrad(x.detach(), x.detach()), ((-1, 4, 6), (-1, 4, 6))
    ),
    "trace_score_mod": PublicCall(
        lambda x: flashtile.attention(x, x, x, score_mod=flashtile.trace_score_mod(_softened)), _QKV[:1], of_values=True
    ),
    "BlockMask.from_dense": _of_pattern(lambda: BlockMask.from_dense(shown(), tile=(16, 16))),
    "BlockMask.from_predicate": _of_pattern(
        lambda: BlockMask.from_predicate(lambda b, h, q, k: q >= k, None, None, 40, 40, device=_CPU)
    ),
    "BlockMask.from_layout": _of_pattern(
        lambda: BlockMask.from_layout(torch.eye(3, dtype=torch.bool, device=_CPU), (16, 16), 40, 40)
    ),
    **{
        f"patterns.{make.__name__}": _of_pattern(functools.partial(make, *given, **named, device=_CPU))
        for make, given, named in (
            (patterns.big_bird, (256,), {"block": 16, "heads": HEADS}),
            (patterns.butterfly, (256,), {"block": 16}),
            (patterns.causal, (40, 40), {"tile": (16, 16)}),
            (patterns.dilated, (40, 2, 2, 2), {"tile": (16, 16)}),
            (patterns.documents, (), {"lengths": [10, 30], "tile": (16, 16)}),
            (patterns.fixed, (40, 4, 2), {"tile": (16, 16)}),
            (patterns.neighborhood, ((6, 7), 3), {"tile": (16, 16)}),
            (patterns.prefix_lm, (40, 7), {"tile": (16, 16)}),
            (patterns.sliding_window, (40, 40, 3, 3), {"global_tokens": 2, "tile": (16, 16)}),
            (patterns.strided, (40, 4), {"tile": (16, 16)}),
            (patterns.tree, ([10, 20, 10], [-1, 0, 0]), {"tile": (16, 16)}),
        )
    },
    "patterns.tree_positions": PublicCall(
        lambda: patterns.tree_positions([10, 20, 10], [-1, 0, 0], device=_CPU), of_values=True
    ),
}
