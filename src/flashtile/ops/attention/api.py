"""The public attention functions: what a user calls. They check, make the call canonical, and hand it on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import torch.nn.functional as F
from torch import Tensor

from flashtile.ops.attention import repeated, select
from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.operator import run_attention
from flashtile.ops.attention.options import (
    DENSE_LAYOUT,
    PACKED_LAYOUT,
    Align,
    ScoreMod,
    Taken,
    Window,
    checked_qkv,
    representable_scale,
    resolve_call,
    resolve_dropout,
)
from flashtile.ops.attention.spec import FP8, AttentionSpec, SideInputs, side_tensors
from flashtile.ops.attention.triton import invariant_tiles as invariant_tiles
from flashtile.ops.common.checks import (
    check_cu_seqlens,
    check_float_dtype,
    check_lengths,
    check_max_seqlen,
    check_tensors,
    raise_not_bool,
    readable,
)
from flashtile.ops.common.eight_bits import factors_for, rounded
from flashtile.ops.common.other_names import refuse_by_position, refuse_other_names
from flashtile.ops.common.sizes import known
from flashtile.ops.kv_cache.api import attention_with_kv_cache


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *by_position: NoReturn,
    causal: bool = False,
    align: Align = "bottom_right",
    window: Window | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    key_lengths: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    return_lse: bool = False,
    return_max_scores: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, ...]:
    """Exact attention, `softmax(scale · q kᵀ) v`, in memory linear in the sequence length.

    Differentiable in q, k, v, bias, alibi_slopes, sinks and the tensors that score_mod reads, also through `lse`; not
    with 8-bit inputs. With `causal=True` two queries see these of four keys (`x` = visible)::

        bottom_right   x x x .        top_left   x . . .
                       x x x x                   x x . .

    Args:
        q: `[batch, seq_q, heads_q, head_dim]`; float16, bfloat16, float32, float64 (CPU and reference only), or
            float8_e4m3fn (no gradients). PyTorch's SDPA has heads before seq: transpose its tensors.
        k: `[batch, seq_k, heads_kv, head_dim]`; `heads_q % heads_kv == 0`, query head `h` reads key/value head
            `h // (heads_q // heads_kv)`.
        v: `[batch, seq_k, heads_kv, head_dim_v]`; head_dim and head_dim_v are each 1 to 512. Any strides are allowed. A
            tensor is copied only if its last dimension is not contiguous; expanded (stride 0) tensors are not.
        causal: hide the keys right of the diagonal.
        align: where the diagonal lies if `seq_q != seq_k`: "bottom_right" ends it at the last key, "top_left" starts it
            at the first.
        window: `(left, right)` number of keys visible on each side of the diagonal, None = unlimited.
        scale: factor on the scores; default `1/sqrt(head_dim)`.
        dropout_p: probability, in [0, 1), that an attention weight is dropped; the others are scaled by 1/(1 - p).
        dropout_seed: `[2]` int64 tensor from `draw_dropout_seed`, on q's device. Without it, the seed is drawn from
            torch's generator, so that `torch.manual_seed` makes a run reproducible.
        key_lengths: `[batch]` int32 or int64, at most seq_k: keys at or past the length are not visible. The diagonal
            still uses the full seq_k. A CPU always checks the values, a GPU with `FLASHTILE_CHECK_VALUES=1` only.
        softcap: bound of the scores, which become `softcap · tanh(score / softcap)` after the scale and before bias and
            ALiBi; None or 0 for no cap.
        bias: added to the scores; broadcasts to `[batch, heads_q, seq_q, seq_k]`, in q's dtype or float32 (float64 with
            float64 q). -inf hides a key. Its gradient has its own shape, so do not expand it.
        alibi_slopes: `[heads_q]` or `[batch, heads_q]`, float32 or q's dtype (float64 with float64 q). Each score is
            reduced by `slope · |i + seq_k - seq_q - j|`, whatever `align` is.
        mask: bool, True = visible; broadcasts as bias does.
        block_mask: a `BlockMask` built for these sizes, on q's device; its empty tiles are not computed. A key is
            visible if block_mask, mask, window, key_lengths and causal all show it.
        score_mod: a function `(score, batch, head, q_index, k_index) -> score` in plain Python, which changes each
            score after the scale and the soft cap and before bias and ALiBi. It computes with PyTorch's elementwise
            operations on scalars, and reads tensors around it by index, as in `table[head, q_index - k_index]`; these
            get gradients. -inf hides a key. See the guide, docs/score_functions.md.
        sinks: `[heads_q]`, dtypes as for the slopes: an extra logit in each row's softmax, without a value; -inf has no
            effect.
        descale_q: for float8_e4m3fn inputs only: positive float32 factors that broadcast to `[batch, heads_kv]`; the
            values are `q · descale_q`, and query heads share the factor of their key/value head. None is 1.
            `flashtile.quantize_fp8` makes such inputs.
        descale_k: the same for k.
        descale_v: the same for v.
        return_lse: also return the log-sum-exp of each row's scores.
        return_max_scores: also return the largest score of each row, as QK-clip needs it to keep scores small in
            training; `max_scores.amax(dim=(0, 2))` is that of each head. "split" has none.
        deterministic: the gradients are the same in every run, bit for bit. (The forward always is.)
            `torch.use_deterministic_algorithms(True)` has the same effect.
        batch_invariant: the bits of a sequence's results and gradients depend on that sequence alone, not on the batch,
            padding, packing or pages: see "Batch invariance" in the contract. Implies `deterministic`.
            `flashtile.batch_invariant_mode()` and the environment variable `FLASHTILE_BATCH_INVARIANT=1` have the same
            effect. Not with dropout and 8-bit inputs.
        backend: "auto" chooses by device and call. "split", "hopper", "triton", "cpu" or "reference" run that backend
            or raise. "split" has no backward, and "hopper" not for every call; another backend then computes the
            gradients.

    Returns:
        out `[batch, seq_q, heads_q, head_dim_v]` in q's dtype, or in bfloat16 for float8_e4m3fn inputs. With
        `return_lse`, also lse `[batch, heads_q, seq_q]` float32 (float64 for float64 inputs): the natural logarithm,
        over scores and sink. A row without a visible key has `out = 0`, `lse = -inf` (or the sink) and zero gradients.
        With `return_max_scores`, last max_scores in the shape and dtype of lse: the largest visible score after scale,
        soft cap, bias and ALiBi, without the sink; -inf in a row without a visible key. It has no gradient.

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, the named backend cannot serve the call, or 8-bit inputs
            require gradients.

    Reference:
        Dao et al., "FlashAttention" (2022), algorithms 1-4; Dao, "FlashAttention-2" (2023), section 3. ALiBi: Press et
        al., "Train Short, Test Long" (2021), section 3. Sinks: Xiao et al., "Efficient Streaming Language Models with
        Attention Sinks" (2023), section 3; softcap: Gemma Team, "Gemma 2" (2024), section 2. Split keys: Dao et al.,
        "Flash-Decoding for long-context inference" (2023). QK-clip: Kimi Team, "Kimi K2" (2025), section 2.1.
    """
    if by_position:
        refuse_by_position(attention, by_position)
    if other_names:
        refuse_other_names(attention, other_names)
    if not (type(return_lse) is type(return_max_scores) is bool):
        raise_not_bool(return_lse=return_lse, return_max_scores=return_max_scores)
    plain = (
        bias is None and alibi_slopes is None and mask is None and block_mask is None and score_mod is None
        and sinks is None and descale_q is None and descale_k is None and descale_v is None
        and key_lengths is None and dropout_seed is None and type(dropout_p) is float and not dropout_p
        and return_max_scores is False
    )  # fmt: skip
    # A call may be like an earlier one.
    given: repeated.Given = ()
    present: Sequence[Tensor] = ()
    key = repeated.call_key(
        q, k, v, causal, align, window, scale,
        softcap=softcap, deterministic=deterministic, batch_invariant=batch_invariant, backend=backend,
    )  # fmt: skip
    if key is not None and not plain:
        single = None, None, key_lengths, dropout_seed, bias, mask, alibi_slopes, sinks
        others = dropout_p, return_max_scores, None, None
        descales = descale_q, descale_k, descale_v
        key, given, present = repeated.key_with_aux(key, q, single, descales, block_mask, score_mod, others)
    if key is not None and (call := repeated.found(key, q, k, v, present)) is not None:
        out_only = not (return_lse or return_max_scores)
        return _returned(call.run(q, k, v, present, out_only), return_lse, return_max_scores)
    q, k, v = checked_qkv(q, k, v, DENSE_LAYOUT, eight_bits=True)
    options = Taken(
        causal=causal, align=align, window=window, scale=scale, key_lengths=key_lengths, softcap=softcap, bias=bias,
        alibi_slopes=alibi_slopes, mask=mask, dropout_p=dropout_p, dropout_seed=dropout_seed, block_mask=block_mask,
        deterministic=deterministic, backend=backend, sinks=sinks, descale_q=descale_q, descale_k=descale_k,
        descale_v=descale_v, return_lse=return_lse, return_max_scores=return_max_scores, score_mod=score_mod,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return _first_call(q, k, v, options, key, given)


def _first_call(
    q: Tensor, k: Tensor, v: Tensor, options: Taken, key: Hashable | None, given: repeated.Given,
    offsets: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Runs a call that is like no earlier one. `key`, `given`: of `repeated`, which keeps a call that has a key.
    `offsets`: of packed queries and keys."""
    dropout = resolve_dropout(options.dropout_p, options.dropout_seed, q.device)
    side, spec = resolve_call(q, k, v, options, *offsets, dropout)
    call = None
    if key is not None:
        call = repeated.new_call(key, q, k, v, given, side=side, spec=spec, backend=options.backend)
    results: Tensor | tuple[Tensor, ...]
    if call is not None:
        aux = [tensor for tensor in side_tensors(side) if tensor is not None]
        out_only = not (options.return_lse or options.return_max_scores)
        results = call.run(q, k, v, aux, out_only, resolved=True)
    else:
        results = run_attention(q, k, v, side, spec, options.backend)
    return _returned(results, options.return_lse, options.return_max_scores)


def _returned(
    results: Tensor | tuple[Tensor, ...], return_lse: bool, return_max_scores: bool
) -> Tensor | tuple[Tensor, ...]:
    """Picks the results that a call returns from (out, lse), from (out, lse, max_scores), or from out alone."""
    if return_lse:
        return results
    if return_max_scores:
        return results[::2]
    return results if isinstance(results, Tensor) else results[0]


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *by_position: NoReturn,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    align: Align = "bottom_right",
    window: Window | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    key_lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    return_lse: bool = False,
    return_max_scores: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, ...]:
    """Exact attention over sequences of different lengths, packed one after another without padding.

    Sequence `b` has the queries `q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]` and the keys
    `k[cu_seqlens_k[b]:cu_seqlens_k[b + 1]]`. Sequences do not see each other, and their length may be 0. Rows past
    `cu_seqlens_q[-1]` belong to no sequence: their output and gradients are 0. The call never waits for the GPU.
    Arguments that are not listed here are those of `attention`; diagonal, window and dropout count from each sequence's
    start.

    Args:
        q: `[total_q, heads_q, head_dim]`, in the dtypes of `attention`.
        k: `[total_k, heads_kv, head_dim]`.
        v: `[total_k, heads_kv, head_dim_v]`.
        cu_seqlens_q: `[batch + 1]` int32 or int64 on q's device, cumulative lengths that start at 0.
        cu_seqlens_k: the same for keys; default `cu_seqlens_q`.
        max_seqlen_q: upper bound of the query lengths, by which tiles are chosen; by default by twice the mean length.
        max_seqlen_k: the same for keys.
        key_lengths: `[batch]`: keys of sequence `b` at or past the length are not visible.
        block_table: `[batch, max_pages]` int32 or int64: k and v are pages `[pages, page_size, heads_kv, head_dim]`,
            and key `j` of sequence `b` is in page `block_table[b, j // page_size]`. The sequences have key_lengths
            keys, or without these the lengths of cu_seqlens_k, and the last query is aligned with the last key. This
            is `attention_with_kv_cache` without new rows: for inference, with causal, window, scale, softcap,
            alibi_slopes and sinks.
        bias: broadcasts to `[1, heads_q, max_seqlen_q, max_seqlen_k]`. Rows and columns count from each sequence's
            start, and both maxima are required. The same holds for mask.
        block_mask: a `BlockMask` built for max_seqlen_q and max_seqlen_k, both required, and for one batch entry or as
            many as there are sequences. Its rows and columns count from each sequence's start.
        alibi_slopes: `[heads_q]` or `[batch, heads_q]`; distances count from each sequence's end.
        score_mod: `batch` is the number of the sequence; both indices count from its start.

    Returns:
        out `[total_q, heads_q, head_dim_v]`; with `return_lse`, also lse `[heads_q, total_q]` float32, and with
        `return_max_scores` last max_scores in the same shape.

    Raises:
        TypeError, ValueError: as `attention`. Values in `cu_seqlens` and `key_lengths` are always checked on a CPU.
            On a GPU they are checked only with the environment variable `FLASHTILE_CHECK_VALUES=1`, because reading
            them there synchronises.

    Reference:
        As `attention`. Pages: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
        PagedAttention" (2023), section 4.
    """
    if by_position:
        refuse_by_position(attention_varlen, by_position)
    if other_names:
        refuse_other_names(attention_varlen, other_names)
    if not (type(return_lse) is type(return_max_scores) is bool):
        raise_not_bool(return_lse=return_lse, return_max_scores=return_max_scores)
    if block_table is not None:
        unserved = {
            "align": align != "bottom_right", "dropout_p": dropout_p, "dropout_seed": dropout_seed, "bias": bias,
            "mask": mask, "block_mask": block_mask, "score_mod": score_mod, "descale_q": descale_q,
            "descale_k": descale_k, "descale_v": descale_v, "return_max_scores": return_max_scores,
        }  # fmt: skip
        return _attention_over_pages(
            q, k, v, cu_seqlens_q, cu_seqlens_k, key_lengths, max_seqlen_k, unserved=unserved, block_table=block_table,
            max_seqlen_q=max_seqlen_q, causal=causal, window=window, scale=scale, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, return_lse=return_lse, batch_invariant=batch_invariant,
            backend=backend,
        )  # fmt: skip
    given: repeated.Given = ()
    present: Sequence[Tensor] = ()
    key = repeated.call_key(
        q, k, v, causal, align, window, scale,
        softcap=softcap, deterministic=deterministic, batch_invariant=batch_invariant, backend=backend,
    )  # fmt: skip
    if key is not None:
        single = cu_seqlens_q, cu_seqlens_k, key_lengths, dropout_seed, bias, mask, alibi_slopes, sinks
        others = dropout_p, return_max_scores, max_seqlen_q, max_seqlen_k
        descales = descale_q, descale_k, descale_v
        key, given, present = repeated.key_with_aux(key, q, single, descales, block_mask, score_mod, others)
    if key is not None and (call := repeated.found(key, q, k, v, present)) is not None:
        out_only = not (return_lse or return_max_scores)
        return _returned(call.run(q, k, v, present, out_only), return_lse, return_max_scores)
    q, k, v = checked_qkv(q, k, v, PACKED_LAYOUT, eight_bits=True)
    check_tensors(cu_seqlens_q=cu_seqlens_q)
    options = Taken(
        causal=causal, align=align, window=window, scale=scale, key_lengths=key_lengths, softcap=softcap, bias=bias,
        alibi_slopes=alibi_slopes, mask=mask, dropout_p=dropout_p, dropout_seed=dropout_seed, block_mask=block_mask,
        deterministic=deterministic, backend=backend, sinks=sinks, descale_q=descale_q, descale_k=descale_k,
        descale_v=descale_v, return_lse=return_lse, return_max_scores=return_max_scores, score_mod=score_mod,
        batch_invariant=batch_invariant, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return _first_call(q, k, v, options, key, given, (cu_seqlens_q, cu_seqlens_k))


def _attention_over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    key_lengths: Tensor | None,
    max_seqlen_k: int | None,
    unserved: dict[str, Any],
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Shapes as in `flashtile.attention_varlen`. `unserved`: arguments that only calls without pages have, which must
    be None or false."""
    for name, value in unserved.items():
        if value is not None and value is not False and (isinstance(value, Tensor) or value):
            raise ValueError(
                f"{name}: expected its default beside block_table, got another value; attention over pages is for "
                "inference, without dropout, bias, masks, score functions and 8-bit inputs"
            )
    if (key_lengths is None) is (cu_seqlens_k is None):
        raise ValueError(
            "key_lengths: expected the number of keys of each sequence beside block_table, either as key_lengths or by "
            f"cu_seqlens_k, got {'neither' if key_lengths is None else 'both'}; pass key_lengths"
        )
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    check_tensors(q=q)
    entries = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    if cu_seqlens_k is not None:
        check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device, entries, ", as many as for queries")
        key_lengths = cu_seqlens_k.diff()
    elif key_lengths is not None:
        check_lengths("key_lengths", key_lengths, entries - 1, q.device, "one length for each sequence")
    if max_seqlen_k is not None and key_lengths is not None and key_lengths.numel() and readable(key_lengths):
        longest = int(key_lengths.max())
        if longest > max_seqlen_k:
            raise ValueError(
                f"max_seqlen_k: expected an upper bound of the sequence lengths, got {max_seqlen_k} for a sequence of "
                f"{longest}; leave it out if it is not known"
            )
    return attention_with_kv_cache(q, k, v, cache_lengths=key_lengths, cu_seqlens_q=cu_seqlens_q, **options)


def quantize_fp8(x: Tensor, heads_kv: int | None = None) -> tuple[Tensor, Tensor]:
    """Rounds q, k or v to 8 bits. Each head is scaled so that its largest number becomes the largest of float8_e4m3fn.

    ::

        (q8, descale_q), (k8, descale_k), (v8, descale_v) = quantize_fp8(q, heads_kv), quantize_fp8(k), quantize_fp8(v)
        out = attention(q8, k8, v8, descale_q=descale_q, descale_k=descale_k, descale_v=descale_v)

    Args:
        x: `[batch, seq, heads, head_dim]`, or packed `[total, heads, head_dim]`, any float dtype. Autograd records
            nothing.
        heads_kv: heads of k and v, if x is q and has more heads: the query heads of a key/value head share a factor.

    Returns:
        x in float8_e4m3fn, contiguous, and the factors, float32: `x ≈ x8 · descale`. They have shape
        `[batch, heads_kv]`, or `[1, heads_kv]` for packed x, whose sequences share them.

    Raises:
        TypeError, ValueError: x is no float tensor of 3 or 4 dimensions, or heads_kv does not divide its heads.

    Reference:
        Micikevicius et al., "FP8 Formats for Deep Learning" (2022), section 3.
    """
    check_tensors(x=x)
    check_float_dtype("x", x.dtype)
    if x.dim() not in (3, 4):
        raise ValueError(
            f"x: expected [batch, seq, heads, head_dim] or [total, heads, head_dim], got shape {list(x.shape)}"
        )
    heads = x.shape[-2]
    heads_kv = heads if heads_kv is None else heads_kv
    if isinstance(heads_kv, bool) or not isinstance(heads_kv, int) or heads_kv < 1 or heads % heads_kv:
        raise ValueError(
            f"heads_kv: expected a divisor of the {heads} heads of x, got {heads_kv!r}; leave it out for k"
        )
    x = x.detach()
    groups = (x if x.dim() == 4 else x[None]).unflatten(2, (heads_kv, -1))  # [batch, seq, heads_kv, group, head_dim]
    magnitudes = groups.abs()
    if not known(groups.shape[1] > 0):  # nothing has no largest
        magnitudes = F.pad(magnitudes, (0, 0, 0, 0, 0, 0, 0, 1))
    largest = magnitudes.amax(dim=(1, 3, 4))
    descale = factors_for(largest, FP8)
    # Rounding of a quotient may lead past the largest number.
    return rounded(groups / descale[:, None, :, None, None], FP8).view(x.shape), descale


def checked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: Window,
    scale: float,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    backend: str,
    mask: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) for operations that have checked and resolved these arguments of `attention`, within an operator of
    their own: without checks, autocast and autograd, which cost as much host time as a small call."""
    side = SideInputs(None, None, q.shape[1], k.shape[1], mask=mask, alibi_slopes=alibi_slopes, sinks=sinks)
    scale = representable_scale(scale, q.dtype)
    spec = AttentionSpec(scale, *window, softcap=softcap, batch_invariant=batch_invariant)
    out, lse = select.serve_forward(q, k, v, side, spec, backend, side.plain)
    return out, lse


def unmasked_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, backend: str
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    """A function that computes calls like a checked one in which every query sees every key, for any number of keys;
    None where the backend has none. If it returns None, `checked_forward` has to find the result."""
    spec = AttentionSpec(representable_scale(scale, q.dtype))
    return select.prepared_unmasked(q, k, v, spec, backend)
