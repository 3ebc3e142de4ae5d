"""Calls of attention with the arguments of flash_attn 1, 2 and 3, dense and packed: what they mean, and how they run. B
batch or sequences, H query heads, G key/value heads, D head_dim, Sq, Sk (longest) lengths."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile.compat.rows import check_page_numbers, check_pages, gathered_keys
from flashtile.modules.attention import unpacked

Window = tuple[int | None, int | None]
#: out, and what else was asked for.
Output = Tensor | tuple[Tensor, ...]
#: Arguments of flashtile that few calls have.
_RARE = "align", "sinks", "block_mask", "score_mod", "descale_q", "descale_k", "descale_v"
#: Rows and columns of the weights that are returned are padded to multiples of it.
_MULTIPLE = (128, 128)


class Call(NamedTuple):
    """The options of one call, as flash_attn names them. `top_left`: the diagonal begins at the first key, else it ends
    at the last."""

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
    top_left: bool = False


_OPTIONS = frozenset(Call._fields)


class Packed(NamedTuple):
    """How the sequences of a packed call lie.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: `[B + 1]`.
        max_seqlen_q, max_seqlen_k: of the longest; None where only the GPU knows it.
        block_table: integers `[B, pages of a sequence]` where keys and values lie in pages, or None.
        leftpad_k: `[B]`, how many keys at the beginning of each sequence do not count, or None.
        seqused_k: `[B]`, how many keys of each sequence are there, or None for all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    block_table: Tensor | None = None
    leftpad_k: Tensor | None = None
    seqused_k: Tensor | None = None


class Given(NamedTuple):
    """The arguments of a function of attention, taken apart; `rest` are those that belong to no other field."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Packed | None
    call: Call
    rest: dict[str, Any]


def split_options(given: dict[str, Any], **fixed: Any) -> tuple[Call, dict[str, Any]]:
    """The options among arguments, and the other arguments."""
    rest: dict[str, Any] = {}
    for name, value in given.items():
        (fixed if name in _OPTIONS else rest)[name] = value
    if "window_size_left" in rest:
        fixed["window_size"] = rest.pop("window_size_left"), rest.pop("window_size_right")
    return Call(**fixed), rest


def taken_apart(given: dict[str, Any], **fixed: Any) -> Given:
    """Tensors, layout and options of a call, from whichever of the arguments of flash_attn's functions it has: `q, k,
    v`, `q, kv` or `qkv`; of packed sequences `cu_seqlens_q` and so on, or `cu_seqlens` and `max_seqlen`; and options,
    with one window or two sides of it. `fixed`: options that the function has no argument for."""
    call, rest = split_options(given, **fixed)
    layout = None
    if "cu_seqlens" in rest:
        ends, most = rest.pop("cu_seqlens"), rest.pop("max_seqlen")
        layout = with_longest(Packed(ends, ends, most, most))
    elif "cu_seqlens_q" in rest:
        layout = with_longest(Packed(**{name: rest.pop(name) for name in Packed._fields if name in rest}))
    if "qkv" in rest:
        q, k, v = unpacked("qkv", rest.pop("qkv"), 3, layout is not None)
    elif "kv" in rest:
        q, (k, v) = rest.pop("q"), unpacked("kv", rest.pop("kv"), 2, layout is not None)
    else:
        q, k, v = rest.pop("q"), rest.pop("k"), rest.pop("v")
    return Given(q, k, v, layout, call, rest)


def attend(**given: Any) -> Output:
    """Attention: out, or with return_attn_probs out, lse `[batch, heads, seq_q]`, packed `[heads, total_q]`, and the
    weights (`weights`), which are empty without dropout.

    q is `[batch, seq_q, heads, head_dim]`, k and v `[batch, seq_k, heads_kv, head_dim]`, kv `[batch, seq_k, 2,
    heads_kv, head_dim]`, qkv `[batch, seq, 3, heads, head_dim]`; with cumulative lengths `[total, ...]`. With
    block_table, int32 `[batch, pages of a sequence]`, k and v are pages `[pages, page_size, heads_kv, head_dim]`, and
    cu_seqlens_k tells the lengths. `flashtile.compat.flash_attn_2` and docs/migrating.md have the other arguments.
    """
    q, k, v, layout, call, rest = taken_apart(given)
    if layout is not None and not rest["return_attn_probs"] and _reads_pages(q, k, v, layout, call):
        return _over_pages(q, k, v, layout, call)
    k, v, layout = with_packed_keys(k, v, layout)
    if not rest["return_attn_probs"]:
        return computed(q, k, v, layout, call)
    seed = drawn_seed(q, call.dropout_p)
    out, lse = computed(q, k, v, layout, call, dropout_seed=seed, return_lse=True)
    return out, lse, q.new_empty(0) if seed is None else weights(q, k, layout, call, seed)


def _reads_pages(q: Tensor, k: Tensor, v: Tensor, layout: Packed, call: Call) -> bool:
    """Whether `attention_varlen` reads keys where they lie in pages; it has no gradient there."""
    recorded = torch.is_grad_enabled() and any(rows.requires_grad for rows in (q, k, v))
    return layout.block_table is not None and layout.leftpad_k is None and not (recorded or call.dropout_p)


def _over_pages(q: Tensor, k: Tensor, v: Tensor, layout: Packed, call: Call) -> Tensor:
    assert layout.block_table is not None
    check_pages(k, v, layout.cu_seqlens_k, layout.block_table)
    lengths = layout.cu_seqlens_k.diff() if layout.seqused_k is None else layout.seqused_k
    if k.device.type == "cpu" and not torch.compiler.is_compiling():
        check_page_numbers(k.shape[0], k.shape[1], layout.block_table, lengths)
    return flashtile.attention_varlen(
        q, k, v, layout.cu_seqlens_q, max_seqlen_q=layout.max_seqlen_q, key_lengths=lengths,
        block_table=layout.block_table, **map_options(q, call),
    )  # fmt: skip


def computed(q: Tensor, k: Tensor, v: Tensor, layout: Packed | None, call: Call, **more: Any) -> Any:
    """What `flashtile.attention` returns, or with a layout `attention_varlen`; `more` are further arguments of it."""
    options = map_options(q, call) | more
    if layout is None:
        return flashtile.attention(q, k, v, **options)
    options |= dict(zip(Packed._fields[:4], layout))
    return flashtile.attention_varlen(q, k, v, **options)


@torch.no_grad()
def with_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, call: Call, return_lse: bool,
    **places: Any,
) -> Output:  # fmt: skip
    """Attention to a cache, to which k and v are appended first: out, or (out, lse `[B, H, Sq]`), not recorded by
    autograd. `places`: further arguments of `flashtile.attention_with_kv_cache`."""
    options = map_options(q, call) | places | {"return_lse": bool(return_lse)}
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


def with_packed_keys(k: Tensor, v: Tensor, layout: Packed | None) -> tuple[Tensor, Tensor, Packed | None]:
    """The keys and values of a packed call as one sequence after another, where they lie otherwise."""
    if layout is None or all(part is None for part in layout[4:]):
        return k, v, layout
    if layout.block_table is not None:
        check_pages(k, v, layout.cu_seqlens_k, layout.block_table)
    k, v, cu_seqlens_k = gathered_keys(
        k, v, layout.cu_seqlens_k, layout.max_seqlen_k,
        block_table=layout.block_table, lengths=layout.seqused_k, left_padding=layout.leftpad_k,
    )  # fmt: skip
    return k, v, Packed(layout.cu_seqlens_q, cu_seqlens_k.to(layout.cu_seqlens_q.dtype), *layout[2:4])


@torch.no_grad()
def weights(
    q: Tensor, k: Tensor, layout: Packed | None, call: Call, seed: Tensor | None, multiple: tuple[int, int] = _MULTIPLE
) -> Tensor:
    """`S_dmask`: weights `exp(score - maximum of the row)`, negative where dropped and 0 where not visible, as a matrix
    of all scores: `[B, H, Sq', Sk']` in q's dtype, each sequence from its start, padded with 0 to multiples of so many
    rows and columns. The lengths of packed sequences are read on the host."""
    options = map_options(q, call)
    del options["dropout_p"], options["deterministic"]
    parts, sizes, slopes = [(q, k)], (q.shape[1], k.shape[1]), [options.pop("alibi_slopes")]
    if layout is not None:
        if layout.max_seqlen_q is None or layout.max_seqlen_k is None:
            raise TypeError(
                "max_seqlen: expected ints with return_attn_probs, got a tensor on a GPU; reading it would synchronise"
            )
        lengths = (ends.diff().tolist() for ends in layout[:2])
        parts = [(a[None], b[None]) for a, b in zip(*(x[: sum(n)].split(n) for x, n in zip((q, k), lengths)))]
        sizes = layout.max_seqlen_q, layout.max_seqlen_k
        each = slopes[0] is not None and slopes[0].dim() == 2
        slopes = [*slopes[0].split(1)] if each else slopes * len(parts)
    found = [
        F.pad(flashtile.attention_probs(a, b, alibi_slopes=of, **options), _missing((a.shape[1], b.shape[1]), sizes))
        for (a, b), of in zip(parts, slopes)
    ]
    probs = torch.cat(found) if found else q.new_empty(0, q.shape[-2], *sizes)
    if probs.numel():
        probs = probs / probs.amax(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)
    if seed is not None:
        batch, heads = probs.shape[:2]
        kept = flashtile.dropout_mask(seed, call.dropout_p, batch=batch, heads=heads, seq_q=sizes[0], seq_k=sizes[1])
        probs = torch.where(kept, probs, -probs)
    rounded = [-(-size // of) * of for size, of in zip(sizes, multiple)]
    return F.pad(probs.to(q.dtype), _missing(sizes, rounded))


def _missing(sizes: Sequence[int], wanted: Sequence[int]) -> tuple[int, int, int, int]:
    """The padding of rows and columns to a wanted size."""
    return 0, wanted[1] - sizes[1], 0, wanted[0] - sizes[0]


def drawn_seed(x: Tensor, dropout_p: float, generator: torch.Generator | None = None) -> Tensor | None:
    """The dropout seed of a call, drawn from a generator, by default torch's own; None where nothing is dropped."""
    if not dropout_p:
        return None
    if generator is None:
        return flashtile.draw_dropout_seed(x.device)
    return torch.randint(2**32, (2,), dtype=torch.int64, device=x.device, generator=generator)


@torch.no_grad()
def forward(
    given: Given, return_weights: bool, generator: torch.Generator | None = None, multiple: tuple[int, int] = _MULTIPLE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, the weights (empty where they were not asked for), and the dropout seed, `[2]` int64, of a forward that
    autograd does not record."""
    q, k, v, layout, call, _ = given
    seed = drawn_seed(q, call.dropout_p, generator)
    k, v, layout = with_packed_keys(k, v, layout)
    out, lse = computed(q, k, v, layout, call, dropout_seed=seed, return_lse=True)
    made = weights(q, k, layout, call, seed, multiple) if return_weights else q.new_empty(0)
    return out, lse, made, torch.zeros(2, dtype=torch.int64, device=q.device) if seed is None else seed


def backward(
    given: Given, dout: Tensor, out: Tensor, lse: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from the results of a forward, and the dropout seed that it returned."""
    q, k, v, layout, call, _ = given
    if call.dropout_p and seed is None:
        raise ValueError(
            "rng_state: expected what the forward returned, beside dropout_p, got None; it says what was dropped"
        )
    options = map_options(q, call) | {"dropout_seed": seed if call.dropout_p else None}
    if options["alibi_slopes"] is not None:
        options["alibi_slopes"] = options["alibi_slopes"].detach()
    if layout is not None:
        options |= dict(zip(("cu_seqlens", "cu_seqlens_k", "max_seqlen", "max_seqlen_k"), layout[:4]))
    return flashtile.attention_backward(dout, q, k, v, out, lse, **options)[:3]


def write_gradients(gradients: Sequence[Tensor], dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> None:
    """Copies gradients to buffers, where there are any."""
    for name, gradient, buffer in zip(("dq", "dk", "dv"), gradients, (dq, dk, dv)):
        written(name, gradient, buffer)


def written(name: str, result: Tensor, buffer: Tensor | None) -> Tensor:
    """A result, in a buffer where there is one."""
    if buffer is None:
        return result
    if buffer.shape != result.shape or buffer.dtype is not result.dtype:
        raise ValueError(
            f"{name}: expected {result.dtype} {list(result.shape)}, got {buffer.dtype} {list(buffer.shape)}; the "
            "result is written to it"
        )
    return buffer.copy_(result)


def row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """`rowsum(dout · out)`, float32 `[B, H, Sq]`, packed `[H, total]`."""
    wide = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(wide) * out.to(wide)).sum(-1).transpose(-1, -2).contiguous()


def map_options(q: Tensor, call: Call) -> dict[str, Any]:
    """The options of a call in the words of flashtile; what a call does not have is left out."""
    slopes = call.alibi_slopes
    if slopes is not None and slopes.dtype is torch.float32 and q.dtype is torch.float64:
        slopes = slopes.double()  # slopes are float32 whatever q is
    options: dict[str, Any] = {
        "causal": bool(call.causal),
        "window": window(call.window_size),
        "scale": call.softmax_scale,
        "dropout_p": call.dropout_p,
        "softcap": call.softcap,
        "alibi_slopes": slopes,
        "deterministic": bool(call.deterministic),
    }
    align = "top_left" if call.top_left else None
    for name, given in zip(_RARE, (align, call.sinks, call.block_mask, call.score_mod, *call.descales)):
        if given is not None:
            options[name] = given
    return options


def window(window_size: Any) -> Window:
    """(left, right) with None where a side is unlimited, which flash_attn writes as a negative number."""
    given = window_size
    if isinstance(given, Tensor):
        if given.device.type != "cpu":
            raise TypeError("window_size: expected two ints, got a tensor on a GPU; reading it would synchronise")
        given = given.tolist()
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"window_size: expected a pair (left, right), got {window_size!r}; -1 is an unlimited side")
    left, right = (_side(side, window_size) for side in given)
    return left, right


def _side(side: Any, window_size: Any) -> int | None:
    """One side, of any type that stands for an int."""
    if isinstance(side, Tensor) and side.device.type != "cpu":
        raise TypeError("window_size: expected two ints, got tensors on a GPU; reading them would synchronise")
    try:
        keys = operator.index(side)
    except TypeError:
        raise TypeError(f"window_size: expected two ints, got {window_size!r}; -1 is an unlimited side") from None
    return None if keys < 0 else keys


def longest(value: Any) -> Any:
    """A longest sequence as flashtile takes it: an int, or None for a number on a GPU, which is not waited for, because
    all rows are as good a bound."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return int(value) if value.device.type == "cpu" else None
    return value
