"""One rectangle of scores by PyTorch's own CPU flash attention. Letters as in `tiles`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.cpu import torch_served
from flashtile.ops.attention.cpu.tiles import LOG2E

# Half of a small call's time is the way to it: this one is shorter than that through `torch.ops`.
_forward_op: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

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


class Statistics(NamedTuple):
    """`out` `[b, R, H, D]` and `lse` `[b, H, R]` of a rectangle."""

    out: Tensor
    lse: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, table: Tensor | None = None
) -> Statistics | None:
    """The result of a rectangle, q `[b, R, H, D]`, k and v `[b, C, Hkv, D]`; None where it may be wrong.

    Args:
        causal: row `i` sees the keys up to `i`; otherwise every row sees every key.
        table: what is added to the scores, `[b | 1, H | 1, R | 1, C | 1]`; -inf hides.
    """
    group = q.shape[2] // k.shape[2]
    rows = q.shape[1]
    stacked = not causal and (rows == 1 or (group > 1 and rows <= _MOST_STACKED_QUERIES and table is None))
    q = _repeated(_stacked(q, group), k.shape[1]) if stacked else q.transpose(1, 2)
    reread = group > 1 and not stacked
    k, v = _by_head(k, reread), _by_head(v, reread)
    if table is None:
        out, lse = _forward_op(q, k, v, 0.0, causal, scale=scale)
        if _may_be_hidden(out, lse):
            return None
    else:
        of_rows = table.reshape(table.shape[0], -1, group, table.shape[3]) if stacked and table.shape[1] > 1 else table
        found = _with_hidden_rows(*_forward_op(q, k, v, 0.0, causal, attn_mask=of_rows, scale=scale), of_rows, causal)
        if found is None:
            return None
        out, lse = found
    if torch_served.loses_infinite_scores() and lse.isnan().any():
        return None
    # An infinite score makes a row NaN; PyTorch's 16-bit kernel returns numbers for it.
    if out.dtype in (torch.bfloat16, torch.float16) and not math.isfinite(lse.sum().item()):
        out.masked_fill_((lse == float("inf")).unsqueeze(-1), float("nan"))
    if stacked:
        if q.shape[2] > group * rows:
            out, lse = out[:, :, : group * rows], lse[:, :, : group * rows]
        return Statistics(_unstacked(out, group), lse.reshape(lse.shape[0], -1, rows))
    return Statistics(out.transpose(1, 2), lse)


def _may_be_hidden(out: Tensor, lse: Tensor) -> bool:
    """Whether PyTorch took a row for one without a visible key: out = 0 and lse = 0, which hardly any other row has. So
    it does if all scores are -inf, and if they are NaN and fewer than a vector of the processor holds."""
    return not lse.all() and not bool(out[lse == 0].any(dim=-1).all())


def _with_hidden_rows(out: Tensor, lse: Tensor, table: Tensor, causal: bool) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a rectangle with a table, 0 and -inf where a row sees no key; None where PyTorch's result may be
    wrong.

    PyTorch's lse of a row without a visible key is 0, and so may be that of a row of NaN. The lse of others is NaN
    where a hidden key is infinite or NaN, because the table is added to its score.
    """
    least = lse.amin().item()
    if math.isnan(least):
        return None
    if least < torch.finfo(lse.dtype).min / LOG2E:
        # Tiles, on every backend, hold scores times log₂e: such a row sees no key there.
        hidden = lse < torch.finfo(lse.dtype).min / LOG2E
        out, lse = out.masked_fill(hidden.unsqueeze(-1), 0), lse.masked_fill(hidden, float("-inf"))
    zero = lse == 0
    if not zero.any():
        return out, lse
    seen = table != float("-inf")
    if causal:
        seen = seen.expand(-1, -1, lse.shape[2], -1).tril()
    hidden = ~seen.any(dim=-1)
    return None if (zero & ~hidden).any() else (out, lse.masked_fill(zero, float("-inf")))


def splitting_pays(q: Tensor, k: Tensor) -> bool:
    """Whether to split the keys of a call without a diagonal, q `[b, R, H, D]` and k `[b, C, Hkv, D]`."""
    batch, keys, heads_kv, head_dim = k.shape
    if batch > 1 or q.shape[1] * (q.shape[2] // heads_kv) > _MOST_SPLIT_ROWS or keys < 2 * _SPLIT_KEYS.start:
        return False
    # PyTorch's kernel gives the rows of a key/value head to one thread.
    return 2 * keys * heads_kv * head_dim > _MOST_UNSPLIT_ELEMENTS or heads_kv < torch.get_num_threads()


def attend_split(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Statistics | None:
    """As `attend` for few rows of one sequence: splits of the keys are batch entries of one call, merged by lse."""
    keys, heads_kv, head_dim = k.shape[1:]
    group = q.shape[2] // heads_kv
    count, size = _splits(keys)
    rows = group * q.shape[1]
    stacked = _repeated(_stacked(q, group), keys)
    whole = (k, v) if count * size == keys else (k[:, : count * size], v[:, : count * size])
    splits = [t.view(count, size, heads_kv, head_dim).transpose(1, 2) for t in whole]
    out, lse = _forward_op(stacked.expand(count, -1, -1, -1), *splits, 0.0, False, scale=scale)
    if _may_be_hidden(out, lse):
        return None
    if count * size < keys:
        rest = [t[:, count * size :].transpose(1, 2) for t in (k, v)]
        last_out, last_lse = _forward_op(stacked, *rest, 0.0, False, scale=scale)
        if _may_be_hidden(last_out, last_lse):
            return None
        out, lse = torch.cat((out, last_out)), torch.cat((lse, last_lse))
    weights = lse.softmax(0)
    # The largest weight is exp(largest lse - lse of all).
    total = lse.amax(0, keepdim=True) - weights.amax(0, keepdim=True).log_()
    if not math.isfinite(total.sum().item()):
        return None  # NaN, or infinite scores: see `attend` and `merged`
    out = (out * weights.unsqueeze(-1)).sum(0, keepdim=True).to(q.dtype)
    return Statistics(_unstacked(out[:, :, :rows], group), total[:, :, :rows].reshape(1, -1, q.shape[1]))


def _splits(keys: int) -> tuple[int, int]:
    """(number of splits, keys of each); what they leave over is one more."""
    for count in range(max(2, -(-keys // _SPLIT_KEYS[-1])), keys // _SPLIT_KEYS[0] + 1):
        if not keys % count:
            return count, keys // count
    return keys // _USUAL_SPLIT, _USUAL_SPLIT


def merged(first: Statistics, second: Statistics) -> Statistics:
    """The result of rows from those of two parts of their keys. PyTorch's lse of a part whose scores are all -inf is
    NaN, and so is that of a part with NaN: then that of the rows is NaN."""
    lse = torch.logaddexp(first.lse, second.lse)
    total = None
    for out, of_part in (first, second):
        weighted = out * _weights(of_part, lse)
        total = weighted if total is None else total.add_(weighted)
    assert total is not None
    return Statistics(total.to(first.out.dtype), lse)


def with_logits(found: Statistics, logits: Tensor) -> Statistics:
    """The result of rows whose softmax has a logit `[H]` without a value besides."""
    lse = torch.logaddexp(found.lse, logits[:, None])
    return Statistics((found.out * _weights(found.lse, lse)).to(found.out.dtype), lse)


def _weights(of_part: Tensor, lse: Tensor) -> Tensor:
    """The share that a part has in the softmax of its rows, from lse of both `[b, H, R]`: `[b, R, H, 1]`."""
    weights = (of_part - lse).exp_().masked_fill_(of_part.isneginf(), 0)
    return weights.transpose(1, 2).unsqueeze(-1)


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    table: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of a rectangle, from the out and lse of its rows over all their keys."""
    group = q.shape[2] // k.shape[2]
    # In 16 bits the gradients of stacked rows take two thirds of the time, copies included.
    gains = q.itemsize < 4 and (q.shape[1] <= _MOST_STACKED_GRADIENTS or torch_served.packs_16_bits())
    stacked = group > 1 and not causal and (q.shape[1] <= _MOST_STACKED_QUERIES or gains) and table is None
    dout, q, out = (_stacked(t, group) if stacked else t.transpose(1, 2) for t in (dout, q, out))
    if stacked:
        lse = lse.reshape(lse.shape[0], k.shape[2], -1)
    reread = group > 1 and not stacked
    k, v = _by_head(k, reread), _by_head(v, reread)
    dq, dk, dv = _backward_op(dout, q, k, v, out, lse, 0.0, causal, attn_mask=table, scale=scale)
    return _unstacked(dq, group) if stacked else dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _by_head(tensor: Tensor, reread: bool) -> Tensor:
    """`[b, C, Hkv, D]` to `[b, Hkv, C, D]`. Where several query heads read a key/value head in turn, a copy whose rows
    lie side by side saves a tenth of the time, unless PyTorch's kernel packs the rows itself."""
    heads_first = tensor.transpose(1, 2)
    copied = reread and (tensor.itemsize > 2 or not torch_served.packs_16_bits())
    return heads_first.contiguous() if copied else heads_first


def _stacked(tensor: Tensor, group: int) -> Tensor:
    """The heads of a key/value head as rows: `[b, R, H, D]` to `[b, Hkv, G·R, D]`. A view where R is 1."""
    batch, rows, heads, head_dim = tensor.shape
    if rows == 1:
        return tensor.view(batch, heads // group, group, head_dim)
    by_head = tensor.view(batch, rows, heads // group, group, head_dim).permute(0, 2, 3, 1, 4)
    return by_head.reshape(batch, heads // group, group * rows, head_dim)


def _repeated(stacked: Tensor, keys: int) -> Tensor:
    """Rows `[b, Hkv, G·R, D]` as PyTorch's kernel gets them: copies of a single one where it is slow with that."""
    if stacked.shape[2] > 1 or stacked.itemsize > 2 or keys < _FEWEST_KEYS_OF_COPIES or torch_served.packs_16_bits():
        return stacked
    return stacked.repeat(1, 1, _COPIES_OF_SINGLE_ROW, 1)


def _unstacked(tensor: Tensor, group: int) -> Tensor:
    """The inverse of `_stacked`."""
    batch, heads_kv, rows, head_dim = tensor.shape
    if rows == group:
        return tensor.reshape(batch, 1, heads_kv * group, head_dim)
    by_head = tensor.view(batch, heads_kv, group, rows // group, head_dim).permute(0, 3, 1, 2, 4)
    return by_head.reshape(batch, rows // group, heads_kv * group, head_dim)
