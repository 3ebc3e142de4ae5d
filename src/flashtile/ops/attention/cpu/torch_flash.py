"""PyTorch's own CPU flash attention, for the calls that it serves better than the tiles here.

It computes rectangles of scores: either each row sees every key, or row `i` sees the keys up to `i`, both counted from
the first. A call that consists of such rectangles is cut into them. Letters as in `tiles`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.cpu import tiles
from flashtile.ops.attention.spec import AttentionSpec, SideInputs

# Half of a small call's time is the way to it: this one is shorter than that through `torch.ops`.
_forward_op: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

#: At least as many elements as a vector register of any processor holds.
_LONGEST_VECTOR = 128

#: Most queries of a rectangle without a diagonal whose heads of a group are stacked as rows. With more, products are
#: large without it, and copies of q and out cost more than reading the keys again.
_MOST_STACKED_QUERIES = 64
#: The same of the backward in 16 bits, where the kernel does not pack.
_MOST_STACKED_GRADIENTS = 512
#: Fewest and most keys of a split, and the number where none between them divides the keys. PyTorch's kernel reads 512
#: keys of one head, then those of the next head lie far away; in splits of 512 their lines are in the L2 already.
_SPLIT_KEYS = range(256, 769)
_USUAL_SPLIT = 512
#: Most rows, queries times heads of a group, of a call whose keys are split: with more, products take the time.
_MOST_SPLIT_ROWS = 32
#: Most elements of keys and values with which a single thread does not gain from splits: the caches hold them.
_MOST_UNSPLIT_ELEMENTS = 2**22
#: Copies of a single row that PyTorch's kernel gets where it is slow with one.
_COPIES_OF_SINGLE_ROW = 4
#: Fewest keys of such a row: with fewer, the library that multiplies several takes longer to begin (3 µs).
_FEWEST_KEYS_OF_COPIES = 64


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
    reason = _unsupported_reason(spec, side, q_shape, k_shape, v_shape, dtype)
    if reason is None:
        of = " of each packed sequence" if side.packed else ""
        return True, f"PyTorch's CPU flash attention: nothing changes the scores, and rectangles{of} are visible"
    return False, f"flashtile tiles: {reason}"


def _unsupported_reason(
    spec: AttentionSpec,
    side: SideInputs,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    dtype: torch.dtype,
) -> str | None:
    """Why PyTorch's flash attention does not serve a call; None where it does."""
    if spec.softcap or side.bias is not None or side.alibi_slopes is not None or side.sinks is not None:
        return "PyTorch's CPU flash attention has no soft cap, ALiBi or sinks, and no bias with a gradient"
    if spec.score_program is not None:
        return "PyTorch's CPU flash attention takes no score function"
    if side.mask is not None or side.block_lists is not None:
        return "PyTorch's CPU flash attention takes no masks that tiles could skip"
    if spec.dropout_p:
        return "PyTorch's CPU flash attention has no dropout"
    if spec.returns_max_scores:
        return "PyTorch's CPU flash attention does not return the largest score of a row"
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


@functools.cache
def _packs_16_bits() -> bool:
    """Whether PyTorch's kernel packs keys and values in 16 bits, for AMX. Elsewhere it multiplies them where they lie,
    a single row element after element."""
    return torch.cpu._is_amx_tile_supported()


@functools.cache
def _loses_infinite_scores() -> bool:
    """Whether PyTorch's kernels are those for any processor, whose lse of a row with an infinite score is NaN."""
    return torch.backends.cpu.get_cpu_capability() == "DEFAULT"


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


def forward_unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """(out, lse) where every row sees every key; None as in `forward`."""
    found = _attend_split(q, k, v, scale) if _splitting_pays(q, k) else _attend(q, k, v, False, scale)
    return None if found is None else (found.out.contiguous(), found.lse.contiguous())


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a call that is `served_by_torch`; None where PyTorch's result cannot be told from a wrong one."""
    causal = _one_rectangle(side, spec, q.shape[-3], k.shape[-3])
    if causal is not None:
        if not causal:
            return forward_unmasked(q, k, v, spec.scale)
        whole = _attend(q, k, v, True, spec.scale)
        return None if whole is None else (whole.out.contiguous(), whole.lse.contiguous())
    if side.packed:
        q, k, v = q[None], k[None], v[None]
    # Rows that no segment owns, or that see no key, keep these values.
    out = torch.zeros(q.shape, dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=tiles.compute_dtype(q.dtype))
    for segment in tiles.segments(q, k, side, spec):
        found: _Statistics | None = None
        for part in parts(segment):
            keys, values = k[part.batches, part.keys], v[part.batches, part.keys]
            more = _attend(q[part.batches, part.rows], keys, values, part.causal, spec.scale)
            found = more if found is None or more is None else _merged(found, more)
            if found is None or (found is not more and found.lse.isnan().any()):
                # PyTorch's lse of a part whose scores are all -inf is NaN, and so is that of a part with NaN.
                return None
        if found is not None:
            out[part.batches, part.rows] = found.out
            lse[part.batches, :, part.rows] = found.lse
    return (out[0], lse[0]) if side.packed else (out, lse)


def _one_rectangle(side: SideInputs, spec: AttentionSpec, seq_q: int, seq_k: int) -> bool | None:
    """Whether a call is one causal rectangle (True), one in which every row sees every key (False), or neither (None).
    The commonest calls are one: this saves them the work of finding out."""
    if side.packed or side.key_lengths is not None:
        return None
    _, left, right, top_left, *_ = spec
    first, last = (0, seq_q - 1) if top_left else (seq_k - seq_q, seq_k - 1)  # the keys on the diagonal
    if left is not None and left < last:
        return None
    if right is None or first + right >= seq_k - 1:
        return False
    return True if first + right == 0 else None


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Statistics | None:
    """The result of a rectangle, q `[b, R, H, D]`, k and v `[b, C, Hkv, D]`; None where it may be wrong."""
    group = q.shape[2] // k.shape[2]
    rows = q.shape[1]
    stacked = not causal and (rows == 1 or (group > 1 and rows <= _MOST_STACKED_QUERIES))
    q = _repeated(_stacked(q, group), k.shape[1]) if stacked else q.transpose(1, 2)
    reread = group > 1 and not stacked
    out, lse = _forward_op(q, _by_head(k, reread), _by_head(v, reread), 0.0, causal, scale=scale)
    # With fewer keys than a vector of the processor holds, PyTorch takes a row of NaN scores for one without a visible
    # key: out = 0 and lse = 0, a value that hardly any other row has.
    if k.shape[1] < _LONGEST_VECTOR and (lse == 0).any():
        return None
    if _loses_infinite_scores() and lse.isnan().any():
        return None
    # An infinite score makes a row NaN; PyTorch's 16-bit kernel returns numbers for it.
    if out.dtype in (torch.bfloat16, torch.float16) and not math.isfinite(lse.sum().item()):
        out.masked_fill_((lse == float("inf")).unsqueeze(-1), float("nan"))
    if stacked:
        if q.shape[2] > group * rows:
            out, lse = out[:, :, : group * rows], lse[:, :, : group * rows]
        return _Statistics(_unstacked(out, group), lse.reshape(lse.shape[0], -1, rows))
    return _Statistics(out.transpose(1, 2), lse)


def _splitting_pays(q: Tensor, k: Tensor) -> bool:
    """Whether to split the keys of a call without a diagonal, q `[b, R, H, D]` and k `[b, C, Hkv, D]`."""
    batch, keys, heads_kv, head_dim = k.shape
    if batch > 1 or q.shape[1] * (q.shape[2] // heads_kv) > _MOST_SPLIT_ROWS or keys < 2 * _SPLIT_KEYS.start:
        return False
    # PyTorch's kernel gives the rows of a key/value head to one thread.
    return 2 * keys * heads_kv * head_dim > _MOST_UNSPLIT_ELEMENTS or heads_kv < torch.get_num_threads()


def _attend_split(q: Tensor, k: Tensor, v: Tensor, scale: float) -> _Statistics | None:
    """As `_attend` for few rows of one sequence: splits of the keys are batch entries of one call, merged by lse."""
    keys, heads_kv, head_dim = k.shape[1:]
    group = q.shape[2] // heads_kv
    count, size = _splits(keys)
    rows = group * q.shape[1]
    stacked = _repeated(_stacked(q, group), keys)
    whole = (k, v) if count * size == keys else (k[:, : count * size], v[:, : count * size])
    splits = [t.view(count, size, heads_kv, head_dim).transpose(1, 2) for t in whole]
    out, lse = _forward_op(stacked.expand(count, -1, -1, -1), *splits, 0.0, False, scale=scale)
    if count * size < keys:
        rest = [t[:, count * size :].transpose(1, 2) for t in (k, v)]
        last_out, last_lse = _forward_op(stacked, *rest, 0.0, False, scale=scale)
        if (last_lse == 0).any():
            return None  # see `_attend`
        out, lse = torch.cat((out, last_out)), torch.cat((lse, last_lse))
    weights = lse.softmax(0)
    # The largest weight is exp(largest lse - lse of all).
    total = lse.amax(0, keepdim=True) - weights.amax(0, keepdim=True).log_()
    if not math.isfinite(total.sum().item()):
        return None  # NaN, or infinite scores: see `_attend` and `forward`
    out = (out * weights.unsqueeze(-1)).sum(0, keepdim=True).to(q.dtype)
    return _Statistics(_unstacked(out[:, :, :rows], group), total[:, :, :rows].reshape(1, -1, q.shape[1]))


def _splits(keys: int) -> tuple[int, int]:
    """(number of splits, keys of each); what they leave over is one more."""
    for count in range(max(2, -(-keys // _SPLIT_KEYS[-1])), keys // _SPLIT_KEYS[0] + 1):
        if not keys % count:
            return count, keys // count
    return keys // _USUAL_SPLIT, _USUAL_SPLIT


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
    causal = _one_rectangle(side, spec, q.shape[-3], k.shape[-3])
    if causal is not None:
        return tuple(grad.contiguous() for grad in _gradients(dout, q, k, v, out, lse, causal, spec.scale))
    if side.packed:
        dout, q, k, v, out, lse = (t[None] for t in (dout, q, k, v, out, lse))
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype) for t in (q, k, v))
    for segment in tiles.segments(q, k, side, spec):
        for part in parts(segment):
            rows, keys = (part.batches, part.rows), (part.batches, part.keys)
            lse_of_rows = lse[part.batches, :, part.rows]
            of_part = _gradients(dout[rows], q[rows], k[keys], v[keys], out[rows], lse_of_rows, part.causal, spec.scale)
            dq[rows] += of_part[0]
            dk[keys], dv[keys] = of_part[1:]
    return (dq[0], dk[0], dv[0]) if side.packed else (dq, dk, dv)


def _gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of a rectangle, from the out and lse of its rows over all their keys."""
    group = q.shape[2] // k.shape[2]
    # In 16 bits the gradients of stacked rows take two thirds of the time, copies included.
    gains = q.itemsize < 4 and (q.shape[1] <= _MOST_STACKED_GRADIENTS or _packs_16_bits())
    stacked = group > 1 and not causal and (q.shape[1] <= _MOST_STACKED_QUERIES or gains)
    dout, q, out = (_stacked(t, group) if stacked else t.transpose(1, 2) for t in (dout, q, out))
    if stacked:
        lse = lse.reshape(lse.shape[0], k.shape[2], -1)
    reread = group > 1 and not stacked
    k, v = _by_head(k, reread), _by_head(v, reread)
    dq, dk, dv = _backward_op(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
    return _unstacked(dq, group) if stacked else dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _by_head(tensor: Tensor, reread: bool) -> Tensor:
    """`[b, C, Hkv, D]` to `[b, Hkv, C, D]`. Where several query heads read a key/value head in turn, a copy whose rows
    lie side by side saves a tenth of the time, unless PyTorch's kernel packs the rows itself."""
    heads_first = tensor.transpose(1, 2)
    return heads_first.contiguous() if reread and (tensor.itemsize > 2 or not _packs_16_bits()) else heads_first


def _stacked(tensor: Tensor, group: int) -> Tensor:
    """The heads of a key/value head as rows: `[b, R, H, D]` to `[b, Hkv, G·R, D]`. A view where R is 1."""
    batch, rows, heads, head_dim = tensor.shape
    if rows == 1:
        return tensor.view(batch, heads // group, group, head_dim)
    by_head = tensor.view(batch, rows, heads // group, group, head_dim).permute(0, 2, 3, 1, 4)
    return by_head.reshape(batch, heads // group, group * rows, head_dim)


def _repeated(stacked: Tensor, keys: int) -> Tensor:
    """Rows `[b, Hkv, G·R, D]` as PyTorch's kernel gets them: copies of a single one where it is slow with that."""
    if stacked.shape[2] > 1 or stacked.itemsize > 2 or keys < _FEWEST_KEYS_OF_COPIES or _packs_16_bits():
        return stacked
    return stacked.repeat(1, 1, _COPIES_OF_SINGLE_ROW, 1)


def _unstacked(tensor: Tensor, group: int) -> Tensor:
    """The inverse of `_stacked`."""
    batch, heads_kv, rows, head_dim = tensor.shape
    if rows == group:
        return tensor.reshape(batch, 1, heads_kv * group, head_dim)
    by_head = tensor.view(batch, heads_kv, group, rows // group, head_dim).permute(0, 3, 1, 2, 4)
    return by_head.reshape(batch, rows // group, heads_kv * group, head_dim)
