"""The backend "cpu": PyTorch's own flash attention where it computes the same (`served_by_torch`, in rectangles:
`torch_parts`), tiles in PyTorch for all other calls, and where PyTorch's result may be a wrong one. Letters:
`tiles`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtile.ops.attention.call import Call, KernelChoice
from flashtile.ops.attention.cpu import tiled, tiles
from flashtile.ops.attention.cpu.scores import SideGradients
from flashtile.ops.attention.cpu.tiled import column_sums, lengths_as_mask
from flashtile.ops.attention.cpu.torch_parts import (
    Statistics,
    attend,
    attend_split,
    gradients,
    merged,
    row_parts,
    splitting_pays,
    with_logits,
)
from flashtile.ops.attention.spec import (
    FP8,
    AttentionSpec,
    AuxInputs,
    BackwardInputs,
    Gradients,
    SideInputs,
    Wanted,
    dequantized,
    lse_dtype,
    out_dtype,
)
from flashtile.ops.common.backends import Backend, cpu_unsupported_reason

__all__ = ["BACKEND", "backward", "column_sums", "forward", "prepare_unmasked"]


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """(out, lse), or (out, lse, max_scores), of a call on the CPU."""
    if q.dtype is FP8:
        out, *statistics = forward(*dequantized(q, k, v, side), spec)
        return out.to(out_dtype(FP8)), *statistics
    if not spec.batch_invariant:
        k, v, side = lengths_as_mask(q, k, v, side)
    if served_by_torch(spec, side, q.shape, k.shape, v.shape, q.dtype)[0]:
        found = _forward_by_torch(q, k, v, side, spec)
        if found is not None:
            return found
    return tiled.forward(q, k, v, side, spec)


def prepare_unmasked(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    """A function that computes the forward of calls like this one without a mask, for any number of keys; it returns
    None for a result that may be wrong. None unless PyTorch's flash attention serves them."""
    if not served_by_torch(spec, SideInputs(), q.shape, k.shape, v.shape, q.dtype)[0]:
        return None
    return functools.partial(_forward_unmasked, scale=spec.scale)


def backward(inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> Gradients:
    """The gradients of a call on the CPU from its outputs and their gradients."""
    _, dlse, q, k, v, *_ = inputs
    if dlse is not None and not dlse.any():
        dlse = None  # torch.compile passes zeros where nothing comes through lse
    if not spec.batch_invariant:
        k, v, side = lengths_as_mask(q, k, v, side)
    given = inputs._replace(dlse=dlse, k=k, v=v)
    if dlse is None and served_by_torch(spec, side, q.shape, k.shape, v.shape, q.dtype, wanted)[0]:
        found = _backward_by_torch(given, side, spec, wanted)
        if found is not None:
            return found
    return tiled.backward(given, side, spec, wanted)


def _forward_unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """(out, lse) where every row sees every key; None as in `_forward_by_torch`."""
    found = attend_split(q, k, v, scale) if splitting_pays(q, k) else attend(q, k, v, False, scale)
    return None if found is None else (found.out.contiguous(), found.lse.contiguous())


def _forward_by_torch(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a call that is `served_by_torch`; None where PyTorch's result cannot be told from a wrong one."""
    causal = _one_rectangle(side, spec, q.shape[-3], k.shape[-3])
    if causal is not None:
        if not causal:
            return _forward_unmasked(q, k, v, spec.scale)
        whole = attend(q, k, v, True, spec.scale)
        return None if whole is None else (whole.out.contiguous(), whole.lse.contiguous())
    if side.packed:
        q, k, v = q[None], k[None], v[None]
    total: Statistics | None = None
    for parts in row_parts(q, k, side, spec):
        found: Statistics | None = None
        for part in parts:
            keys = k[part.keys_index], v[part.keys_index]
            more = attend(q[part.queries_index], *keys, part.causal, spec.scale, part.table)
            found = more if found is None or more is None else merged(found, more)
            if found is None or (found is not more and found.lse.isnan().any()):
                return None
        if found is not None and parts[0].raised is not None:
            found = Statistics(found.out, found.lse - parts[0].raised)
        if found is not None and found.out.shape == q.shape:
            total = Statistics(found.out.contiguous(), found.lse.contiguous())
        elif found is not None:
            total = total or _empty_statistics(q)
            total.out[parts[0].queries_index] = found.out
            total.lse[parts[0].statistics_index] = found.lse
    total = total or _empty_statistics(q)
    logits = side.row_logits
    if logits is not None:
        if not (logits < float("inf")).all():
            return None
        for segment in tiles.segments(q, k, side, spec):  # the rows that belong to one
            rows, places = (segment.batches, segment.rows), (segment.batches, slice(None), segment.rows)
            total.out[rows], total.lse[places] = with_logits(Statistics(total.out[rows], total.lse[places]), logits)
    return (total.out[0], total.lse[0]) if side.packed else total


def _empty_statistics(q: Tensor) -> Statistics:
    """The result where no row belongs to a segment, or sees a key."""
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=lse_dtype(q.dtype), device="cpu")
    return Statistics(torch.zeros(q.shape, dtype=q.dtype, device="cpu"), lse)


def _one_rectangle(side: SideInputs, spec: AttentionSpec, seq_q: int, seq_k: int) -> bool | None:
    """Whether a call is one causal rectangle (True), a full one (False), or neither (None): a short cut."""
    if side.packed or side.key_lengths is not None or side.changes_scores:
        return None
    _, left, right, top_left, *_ = spec
    first, last = (0, seq_q - 1) if top_left else (seq_k - seq_q, seq_k - 1)  # the keys on the diagonal
    if left is not None and left < last:
        return None
    if right is None or first + right >= seq_k - 1:
        return False
    return True if first + right == 0 else None


def _backward_by_torch(
    given: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> Gradients | None:
    """The gradients of a call that is `served_by_torch`, without a gradient of lse; None where they may be wrong."""
    causal = _one_rectangle(side, spec, given.q.shape[-3], given.k.shape[-3])
    if causal is not None:
        dq, dk, dv = (t.contiguous() for t in gradients(given, causal, spec.scale))
        return Gradients(dq, dk, dv)
    if side.packed:
        given = given.as_batch()
    dout, _, q, k, v, out, lse = given
    hides = side.changes_scores or spec.window_left is not None
    blind = lse.isneginf()
    if hides and blind.any():
        # Whatever comes from above, and even if it is NaN, nothing may pass through such a row.
        blind_rows = blind.transpose(1, 2).unsqueeze(-1)
        q, dout, lse = q.masked_fill(blind_rows, 0), dout.masked_fill(blind_rows, 0), lse.masked_fill(blind, 0)
    sums = _summed(BackwardInputs(dout, None, q, k, v, out, lse), side, spec)
    dq, dk, dv = (t.to(of.dtype) for t, of in zip(sums, (q, k, v)))
    if hides and not tiles.are_finite(dq, dk, dv):
        return None  # a hidden key may have been NaN
    of_side = SideGradients(side, wanted, lse.dtype)
    of_side.add_call(out, dout, lse, blind, side)
    if side.packed:
        dq, dk, dv = dq[0], dk[0], dv[0]
    return Gradients(dq, dk, dv, *of_side.finish(side))


def _summed(given: BackwardInputs, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """(dq, dk, dv), those of the keys in the compute dtype where rectangles may share them."""
    dout, _, q, k, v, out, lse = given
    sums: tuple[Tensor, ...] | None = None
    for parts in row_parts(q, k, side, spec):
        for part in parts:
            rows, keys = part.queries_index, part.keys_index
            of_rows = lse[part.statistics_index]
            of_rows = of_rows if part.raised is None else of_rows + part.raised
            of_part = BackwardInputs(dout[rows], None, q[rows], k[keys], v[keys], out[rows], of_rows)
            grads = gradients(of_part, part.causal, spec.scale, part.table)
            if grads[0].shape == q.shape and grads[1].shape == k.shape:
                return tuple(grad.contiguous() for grad in grads)
            sums = sums or _zeros(q, k, v)
            for total, index, share in zip(sums, (rows, keys, keys), grads):
                total[index] += share
    return sums or _zeros(q, k, v)


def _zeros(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    dk, dv = (torch.zeros(t.shape, dtype=lse_dtype(t.dtype), device="cpu") for t in (k, v))
    return torch.zeros(q.shape, dtype=q.dtype, device="cpu"), dk, dv


def describe(call: Call) -> tuple[KernelChoice, ...]:
    """The code that computes the forward, or the backward."""
    dtype = torch.float32 if call.dtype is FP8 else call.dtype
    wanted = call.wanted if call.phase == "backward" else None
    _, computed_by = served_by_torch(call.spec, call.aux, call.q.shape, call.k.shape, call.v.shape, dtype, wanted)
    return (KernelChoice(computed_by, backend="cpu"),)


# The choice: PyTorch's is faster if it computes the same. It takes modifiers of scores as a table that it adds to them.


def served_by_torch(
    spec: AttentionSpec,
    side: AuxInputs,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    dtype: torch.dtype,
    wanted: Wanted | None = None,
) -> tuple[bool, str]:
    """(whether PyTorch's CPU flash attention computes a call, why). `wanted`: of a backward, lse without gradient."""
    reason = _unsupported_reason(spec, side, q_shape, k_shape, v_shape)
    reason = reason or _slow_reason(dtype, wanted)
    if reason is not None:
        return False, f"flashtile tiles: {reason}"
    of = " of each packed sequence" if side.packed else ""
    # The left side of a window leaves a single row a slice of the keys.
    if side.changes_scores or (spec.window_left is not None and (side.packed or q_shape[-3] != 1)):
        return True, f"PyTorch's CPU flash attention, on rectangles{of} with tables of what changes the scores"
    return True, f"PyTorch's CPU flash attention: nothing changes the scores, and rectangles{of} are visible"


def _unsupported_reason(
    spec: AttentionSpec,
    side: AuxInputs,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
) -> str | None:
    """Why PyTorch's flash attention cannot compute a call; None where it can."""
    if spec.batch_invariant:
        return "PyTorch's CPU flash attention cuts a call by its sizes, and this one is batch-invariant"
    if spec.softcap or spec.score_program is not None:
        return "PyTorch's CPU flash attention has no soft cap and no score function"
    if side.block_lists is not None:
        return "PyTorch's CPU flash attention skips no tiles of a block mask"
    if spec.dropout_p:
        return "PyTorch's CPU flash attention has no dropout"
    if spec.returns_max_scores:
        return "PyTorch's CPU flash attention does not return the largest score of a row"
    if not spec.scale:
        return "PyTorch's CPU flash attention has an exponential whose error shows in lse where all scores are 0"
    if spec.window_right is not None and spec.scale < 0 and (side.packed or q_shape[-3] != 1):
        return "PyTorch's CPU flash attention scales what it has masked: -inf times a negative scale"
    if q_shape[-1] != v_shape[-1]:
        return "PyTorch's CPU flash attention takes one head_dim"
    if 0 in (*q_shape, *k_shape):
        return "the call is empty"
    return None


def _slow_reason(dtype: torch.dtype, wanted: Wanted | None) -> str | None:
    """Why the tiles are the better choice: faster, or the only ones with all gradients that are wanted; else None."""
    emulates_float16 = dtype is torch.float16 and not tiles.has_float16_matmul()
    if wanted is None:
        if emulates_float16 and not tiles.has_x86_vectors():
            return "PyTorch's CPU flash attention takes several times longer in float16 on a CPU without its products"
        return None
    if any(wanted.flags[:2]):
        return "PyTorch's CPU flash attention gives no gradients of a bias or of ALiBi's slopes"
    if emulates_float16:
        return "PyTorch's CPU flash attention takes some forty times longer in float16 on a CPU without its products"
    if dtype is torch.bfloat16 and tiles.emulates_bfloat16():
        return "PyTorch's CPU flash attention takes over twice as long in bfloat16 on a CPU without its products"
    return None


BACKEND = Backend("cpu", "flashtile.ops.attention.cpu", cpu_unsupported_reason, describe)
