"""PyTorch's own CPU flash attention, for the calls that it serves better than the tiles here.

It computes rectangles of scores: either each row sees every key, or row `i` sees the keys up to `i`, both counted from
the first. A call that consists of such rectangles is cut into them. Letters as in `tiles`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.cpu import tiles
from flashtile.ops.attention.spec import AttentionSpec, SideInputs

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

#: At least as many elements as a vector register of any processor holds.
_LONGEST_VECTOR = 128


def served_by_torch(
    spec: AttentionSpec,
    side: SideInputs,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    dtype: torch.dtype,
) -> tuple[bool, str]:
    """Whether PyTorch's CPU flash attention computes a call on the CPU backend.

    Returns:
        (served, reason). A backward that has a gradient of lse goes through the tiles in any case.
    """
    obstacle = _obstacle(spec, side, q_shape, k_shape, v_shape, dtype)
    if obstacle is None:
        of = " of each packed sequence" if side.packed else ""
        return True, f"PyTorch's CPU flash attention: nothing changes the scores, and rectangles{of} are visible"
    return False, f"flashtile tiles: {obstacle}"


def _obstacle(
    spec: AttentionSpec,
    side: SideInputs,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    dtype: torch.dtype,
) -> str | None:
    """What keeps PyTorch's flash attention from serving a call, or None."""
    if spec.softcap or side.bias is not None or side.alibi_slopes is not None or side.sinks is not None:
        return "PyTorch's CPU flash attention has no soft cap, ALiBi or sinks, and no bias with a gradient"
    if side.mask is not None or side.block_lists is not None:
        return "PyTorch's CPU flash attention takes no masks that tiles could skip"
    if spec.dropout_p:
        return "PyTorch's CPU flash attention has no dropout"
    one_row = not side.packed and q_shape[-3] == 1
    if spec.window_left is not None and not one_row:
        return "PyTorch's CPU flash attention has no windows; a single row sees a slice of the keys"
    if not spec.scale:
        return "PyTorch's CPU flash attention has an exponential whose error shows in lse where all scores are 0"
    if spec.window_right is not None and not one_row and spec.scale < 0:
        return "PyTorch's CPU flash attention scales what it has masked: -inf times a negative scale"
    if q_shape[-1] != v_shape[-1]:
        return "PyTorch's CPU flash attention takes one head_dim"
    if dtype is torch.float16 and not _multiplies_float16():
        return "PyTorch's CPU flash attention takes several times longer in float16 on a CPU without its products"
    if 0 in (*q_shape, *k_shape):
        return "the call is empty"
    return None


@functools.cache
def _multiplies_float16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


class Part(NamedTuple):
    """A rectangle of scores: rows and keys of some batch entries, as indices into tensors `[B, S, ...]`.

    Attributes:
        causal: row `i` of the rectangle sees its keys up to `i`; otherwise every row sees every key.
    """

    batches: slice
    rows: slice
    keys: slice
    causal: bool


class _Statistics(NamedTuple):
    """`out` `[b, R, H, D]` and `lse` `[b, H, R]` of a rectangle."""

    out: Tensor
    lse: Tensor


def parts(segment: tiles.Segment) -> Iterator[Part]:
    """The rectangles of a segment in which something is visible. At most two, which differ in their keys only."""
    rows, keys, (lowest, highest, last) = segment.rows, segment.keys, segment.visible
    first_row, start, stop = 0, 0, last
    count = rows.stop - rows.start
    if lowest is not None:
        # One row, or a left side that hides nothing.
        start = max(0, lowest)
    if highest is not None and highest < last - 1:
        first_row = max(0, -highest)
        stop = first_row + highest + (count == 1)
    if first_row >= count or start >= last:
        return
    below = slice(rows.start + first_row, rows.stop)
    if start < stop:
        yield Part(segment.batches, below, slice(keys.start + start, keys.start + stop), False)
    if stop < last and count > 1:
        yield Part(segment.batches, below, slice(keys.start + stop, keys.start + last), True)


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a call that is `served_by_torch`; None where PyTorch's result cannot be told from a wrong one."""
    if side.packed:
        q, k, v = q[None], k[None], v[None]
    out = lse = None
    for segment in tiles.segments(q, k, side, spec):
        found: _Statistics | None = None
        for part in parts(segment):
            more = _attend(q[part.batches, part.rows], *_of_keys(part, k, v), part.causal, spec.scale)
            if more is None:
                return None
            found = more if found is None else _merged(found, more)
            if found is not more and found.lse.isnan().any():
                # PyTorch's lse of a part whose scores are all -inf is NaN, and so is that of a part with NaN.
                return None
        if found is None:
            continue
        if found.out.shape[:2] == q.shape[:2]:
            out, lse = found
            break
        if out is None or lse is None:
            # Rows that no segment owns, or that see no key, keep these values.
            out = torch.zeros(q.shape, dtype=q.dtype)
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=found.lse.dtype)
        out[part.batches, part.rows] = found.out
        lse[part.batches, :, part.rows] = found.lse
    if out is None or lse is None:
        return None
    return (out[0], lse[0]) if side.packed else (out.contiguous(), lse.contiguous())


def _of_keys(part: Part, *tensors: Tensor) -> list[Tensor]:
    return [tensor[part.batches, part.keys] for tensor in tensors]


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Statistics | None:
    """The result of a rectangle, q `[b, R, H, D]`, k and v `[b, C, Hkv, D]`; None where it may be wrong."""
    group = q.shape[2] // k.shape[2]
    stacked = group > 1 and not causal
    q = _stacked(q, group) if stacked else q.transpose(1, 2)
    out, lse = _forward_op(q, k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=scale)
    # With fewer keys than a vector of the processor holds, PyTorch takes a row of NaN scores for one without a visible
    # key: out = 0 and lse = 0, a value that hardly any other row has.
    if k.shape[1] < _LONGEST_VECTOR and (lse == 0).any():
        return None
    if out.dtype in (torch.bfloat16, torch.float16):
        # An infinite score makes a row NaN; PyTorch's 16-bit kernel returns numbers for it.
        infinite = lse == float("inf")
        if infinite.any():
            out.masked_fill_(infinite.unsqueeze(-1), float("nan"))
    if stacked:
        return _Statistics(_unstacked(out, group), lse.reshape(lse.shape[0], -1, lse.shape[2] // group))
    return _Statistics(out.transpose(1, 2), lse)


def _merged(first: _Statistics, second: _Statistics) -> _Statistics:
    """The result of rows from those of two parts of their keys."""
    lse = torch.logaddexp(first.lse, second.lse)
    total = None
    for out, of_part in (first, second):
        weight = (of_part - lse).exp_().masked_fill_(of_part.isneginf(), 0)
        weighted = out * weight.transpose(1, 2).unsqueeze(-1)
        total = weighted if total is None else total.add_(weighted)
    assert total is not None
    return _Statistics(total.to(first.out.dtype), lse)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of a call that is `served_by_torch`, without a gradient of lse."""
    if side.packed:
        dout, q, k, v, out, lse = (t[None] for t in (dout, q, k, v, out, lse))
    pieces = [part for segment in tiles.segments(q, k, side, spec) for part in parts(segment)]
    if len(pieces) == 1 and _covers(pieces[0], q, k):
        grads = _gradients(dout, q, k, v, out, lse, pieces[0].causal, spec.scale)
        return tuple(grad[0] if side.packed else grad.contiguous() for grad in grads)
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype) for t in (q, k, v))
    for part in pieces:
        of_rows = [t[part.batches, part.rows] for t in (dout, q, out)]
        of_keys = _of_keys(part, k, v)
        lse_of_rows = lse[part.batches, :, part.rows]
        of_part = _gradients(of_rows[0], of_rows[1], *of_keys, of_rows[2], lse_of_rows, part.causal, spec.scale)
        dq[part.batches, part.rows] += of_part[0]
        for grad, found in zip((dk, dv), of_part[1:]):
            grad[part.batches, part.keys] = found
    return (dq[0], dk[0], dv[0]) if side.packed else (dq, dk, dv)


def _covers(part: Part, q: Tensor, k: Tensor) -> bool:
    """Whether a part is the whole call."""
    sizes = (part.batches, q.shape[0]), (part.rows, q.shape[1]), (part.keys, k.shape[1])
    return all(span.stop - span.start == size for span, size in sizes)


def _gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of a rectangle, from the out and lse of its rows over all their keys."""
    group = q.shape[2] // k.shape[2]
    stacked = group > 1 and not causal
    dout, q, out = (_stacked(t, group) if stacked else t.transpose(1, 2) for t in (dout, q, out))
    if stacked:
        lse = lse.reshape(lse.shape[0], k.shape[2], -1)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    dq, dk, dv = _backward_op(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
    return _unstacked(dq, group) if stacked else dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _stacked(tensor: Tensor, group: int) -> Tensor:
    """The heads of a key/value head as rows: `[b, R, H, D]` to `[b, Hkv, G·R, D]`. A view where R is 1."""
    batch, rows, heads, head_dim = tensor.shape
    by_head = tensor.view(batch, rows, heads // group, group, head_dim).permute(0, 2, 3, 1, 4)
    return by_head.reshape(batch, heads // group, group * rows, head_dim)


def _unstacked(tensor: Tensor, group: int) -> Tensor:
    """The inverse of `_stacked`."""
    batch, heads_kv, rows, head_dim = tensor.shape
    by_head = tensor.view(batch, heads_kv, group, rows // group, head_dim).permute(0, 3, 1, 2, 4)
    return by_head.reshape(batch, rows // group, heads_kv * group, head_dim)
