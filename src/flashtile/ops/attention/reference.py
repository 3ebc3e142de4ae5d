"""The eager reference: the definition of the semantics, written to be read, not to be fast.

It builds the whole score matrix, works in any float dtype on any device, is differentiable to any order by PyTorch's
autograd, and imports no kernel. In fp16 and bf16 it computes as an eager model would, rounding where PyTorch rounds,
except that the softmax runs in float32; 8-bit inputs become what they stand for in float32 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.philox import keep_tile, positions, sequence_heads
from flashtile.ops.attention.score_program import INPUTS, apply, parse
from flashtile.ops.attention.spec import (
    FP8,
    AttentionSpec,
    BackwardInputs,
    Gradients,
    SideInputs,
    Wanted,
    dequantized,
    lse_dtype,
    out_dtype,
)
from flashtile.ops.common.dispatch import autograd_in_operator
from flashtile.ops.common.rows import logsumexp


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Attention of a dense or packed call: (out, lse), or (out, lse, max_scores)."""
    if q.dtype is FP8:
        out, *statistics = forward(*dequantized(q, k, v, side), spec)
        return out.to(out_dtype(FP8)), *statistics
    if side.packed:
        return _forward_packed(q, k, v, side, spec)
    return _forward_dense(q, k, v, side, spec, first_sequence=0)


def backward(inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> Gradients:
    """Gradients by PyTorch's autograd through `forward`; `out` and `lse` are not used."""
    dout, dlse, q, k, v, _, lse = inputs
    with autograd_in_operator():
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, *learned_inputs(side, wanted))]
        outputs = forward(leaves[0], leaves[1], leaves[2], with_learned(side, wanted, leaves[3:]), spec)[:2]
        upstream = (dout, torch.zeros_like(lse) if dlse is None else dlse)
        grads = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, materialize_grads=True)
    of_learned = iter([grad.contiguous() for grad in grads])
    found: list[Any] = [next(of_learned) for _ in range(3)]
    found += [next(of_learned) if wants else None for wants in wanted[:-1]]
    found.append(tuple(next(of_learned) if wants else None for wants in wanted.captured))
    return Gradients(*found)


def column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """The sum over queries of each key's weights, `[batch, heads_q, seq_k]`, packed `[heads_q, total_k]`."""
    if side.packed:
        return _column_sums_packed(q, k, lse, side, spec)
    return _column_sums_dense(q, k, lse, side, spec, 0)


def learned_inputs(side: SideInputs, wanted: Wanted) -> list[Tensor]:
    """The side inputs whose gradient is wanted."""
    tensors = (*(getattr(side, name) for name in Wanted._fields[:-1]), *side.captured)
    return [tensor for tensor, wants in zip(tensors, wanted.flags) if wants]


def with_learned(side: SideInputs, wanted: Wanted, learned: Sequence[Tensor]) -> SideInputs:
    """The side inputs with the `learned_inputs` exchanged."""
    given = iter(learned)
    single: dict[str, Any] = {name: next(given) for name, wants in zip(Wanted._fields[:-1], wanted) if wants}
    flags = wanted.captured or (False,) * len(side.captured)
    captured = tuple(next(given) if wants else tensor for tensor, wants in zip(side.captured, flags))
    return side._replace(**single, captured=captured)


def visible_keys(seq_q: int, seq_k: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """The keys that each query sees by the band alone: bool `[seq_q, seq_k]`, True = visible."""
    diagonal = torch.arange(seq_q, device=device)[:, None] + (0 if spec.top_left else seq_k - seq_q)
    key = torch.arange(seq_k, device=device)[None, :]
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool, device=device)
    if spec.window_left is not None:
        visible = visible & (key >= diagonal - spec.window_left)
    if spec.window_right is not None:
        visible = visible & (key <= diagonal + spec.window_right)
    return visible


def _forward_dense(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, first_sequence: int
) -> tuple[Tensor, ...]:
    batch, seq_q, heads, _ = q.shape
    seq_k, group = k.shape[1], heads // k.shape[2]
    # [B, H, S, D]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    visible = visible_keys(seq_q, seq_k, spec, q.device)
    if side.key_lengths is not None:
        valid = torch.arange(seq_k, device=q.device) < side.key_lengths[:, None]
        visible = visible & valid[:, None, None, :]
    # Keys that no query sees may hold anything; 0 · NaN would let it into out and into dq.
    unseen = ~visible.any(dim=-2)[..., None]
    k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    visible = visible & _shown(side, spec, seq_q, seq_k, slice(first_sequence, first_sequence + batch))
    if spec.score_program is not None:
        # Hidden pairs have no gradient, whatever the function's derivative is there.
        with torch.no_grad():
            visible = visible & ~_scores(q, k, side, spec, visible, first_sequence).isneginf()
    scores = _scores(q, k, side, spec, visible, first_sequence)
    visible = visible & ~scores.isneginf()  # a score of -inf hides its pair, whatever made it
    blind = ~visible.any(dim=-1, keepdim=True)  # rows with no visible key
    scores = scores.masked_fill(~visible, float("-inf"))
    largest = _largest(scores) if spec.returns_max_scores else None
    if side.sinks is not None:
        # One more key, which has no value.
        sink = side.sinks.view(-1, 1, 1).expand(batch, heads, seq_q, 1)
        nothing = blind & sink.isneginf()
        scores = torch.cat((scores, sink.masked_fill(nothing, 0)), dim=-1)
        lse = logsumexp(scores, -1).masked_fill(nothing, float("-inf"))
        probs = torch.softmax(scores, dim=-1)[..., :-1].masked_fill(blind, 0)
    else:
        scores = scores.masked_fill(blind, 0)  # [B, H, Sq, Sk]
        lse = logsumexp(scores, -1).masked_fill(blind, float("-inf"))
        probs = torch.softmax(scores, dim=-1).masked_fill(blind, 0)
    if side.dropout_seed is not None:
        matrices = sequence_heads(range(first_sequence, first_sequence + batch), range(heads), heads, spec.origin)
        rows, columns = positions(range(seq_q), range(seq_k), spec.origin)
        kept = keep_tile(side.dropout_seed, spec.dropout_p, matrices.to(q.device), rows, columns)
        probs = probs * kept.view(probs.shape) / (1 - spec.dropout_p)
    # Masking out as well keeps whatever gradient comes from above out of those rows.
    out = (probs.to(q.dtype) @ v).masked_fill(blind, 0).transpose(1, 2).contiguous()
    return (out, lse.squeeze(-1)) if largest is None else (out, lse.squeeze(-1), largest)


def _largest(scores: Tensor) -> Tensor:
    """The largest of each row, without a gradient; -inf where there is none."""
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], float("-inf"))
    return scores.detach().amax(dim=-1)


def _column_sums_dense(
    q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec, sequence: int
) -> Tensor:
    seq_q, seq_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(group, dim=1)
    visible = visible_keys(seq_q, seq_k, spec, q.device) & ~lse.isneginf()[..., None]
    visible = visible & _shown(side, spec, seq_q, seq_k, slice(sequence, sequence + q.shape[0]))
    if side.key_lengths is not None:
        visible = visible & (torch.arange(seq_k, device=q.device) < side.key_lengths[:, None])[:, None, None, :]
    weights = torch.exp(_scores(q, k, side, spec) - lse.unsqueeze(-1))
    return weights.masked_fill(~visible, 0).sum(dim=-2)


def _column_sums_packed(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec) -> Tensor:
    sums = lse.new_zeros(q.shape[1], k.shape[0])
    for sequence, rows, columns, one in side.sequences():
        given = q[None, rows], k[None, columns], lse[None, :, rows]
        sums[:, columns] = _column_sums_dense(*given, one, spec, sequence)[0]
    return sums


def _scores(
    q: Tensor, k: Tensor, side: SideInputs, spec: AttentionSpec, visible: Tensor | None = None, first_sequence: int = 0
) -> Tensor:
    """`[B, H, Sq, Sk]` in the dtype of lse: scaled, capped, changed by the score function, with bias and ALiBi; nothing
    masked yet. `visible`: which of them count, for the score function."""
    seq_q, seq_k = q.shape[-2], k.shape[-2]
    scores = (q @ k.transpose(-1, -2) * spec.scale).to(lse_dtype(q.dtype))
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.score_program is not None:
        scores = _changed(scores, side, spec.score_program, visible, first_sequence)
    if side.bias is not None:
        scores = scores + side.bias[..., :seq_q, :seq_k]
    if side.alibi_slopes is not None:
        shift = seq_k - seq_q + (0 if spec.origin is None else spec.origin.diagonal)
        diagonal = torch.arange(seq_q, device=q.device)[:, None] + shift
        distance = (diagonal - torch.arange(seq_k, device=q.device)).abs()
        scores = scores - side.alibi_slopes.unsqueeze(-1).unsqueeze(-1) * distance
    return scores


def _changed(scores: Tensor, side: SideInputs, program: str, visible: Tensor | None, first_sequence: int) -> Tensor:
    """Scores `[B, H, Sq, Sk]` after the score function."""
    inputs = {INPUTS[0]: scores}
    for dim, (name, size) in enumerate(zip(INPUTS[1:], scores.shape)):
        first = first_sequence if dim == 0 else 0
        numbers = torch.arange(first, first + size, dtype=torch.int32, device=scores.device)
        inputs[name] = numbers.view([-1 if at == dim else 1 for at in range(4)])
    return apply(parse(program), inputs, side.captured, visible)


def _shown(side: SideInputs, spec: AttentionSpec, seq_q: int, seq_k: int, sequences: slice) -> Tensor | bool:
    """The pairs that masks show: bool, broadcasts to `[B, H, Sq, Sk]`. `sequences`: the batch entries, or the packed
    sequence, among those of the call. A bias of -inf hides too."""
    shown: Tensor | bool = True
    if side.mask is not None:
        shown = side.mask[..., :seq_q, :seq_k]
    if side.block_lists is not None and side.block_patterns is not None and spec.block_shape is not None:
        batch, heads, *tile = spec.block_shape
        shape = batch, heads, side.max_seqlen_q, side.max_seqlen_k
        dense = BlockMask(shape, (tile[0], tile[1]), side.block_lists, side.block_patterns).to_dense()
        # That of a packed call has the longest lengths.
        shown = (dense[sequences] if batch > 1 else dense)[..., :seq_q, :seq_k] & shown
    if side.bias is not None:
        shown = ~side.bias[..., :seq_q, :seq_k].isneginf() & shown
    return shown


def _forward_packed(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Each sequence as a batch of one, its rows put back in place; this reads `cu_seqlens` on the host."""
    parts, end = [], 0
    for sequence, rows, columns, one in side.sequences():
        parts.append(_forward_dense(q[None, rows], k[None, columns], v[None, columns], one, spec, sequence))
        end = rows.stop
    # Rows past the last sequence are queries without keys.
    nothing = spec._replace(score_program=None)
    parts.append(_forward_dense(q[None, end:], k[None, :0], v[None, :0], SideInputs(), nothing, 0))
    outs, *statistics = zip(*parts)
    return torch.cat(outs, dim=1)[0], *(torch.cat(rows, dim=2)[0] for rows in statistics)
