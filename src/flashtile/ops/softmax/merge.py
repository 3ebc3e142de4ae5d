"""The online softmax as a small piece of its own: partial results that are put together without their scores.

With row maximum `m`, row sum `l = Σ exp(s - m)` and accumulator `acc = Σ exp(s - m) v` of some keys, those of more keys
are (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1)::

    m' = max(m, rowmax(s))        alpha = exp(m - m')        p = exp(s - m')
    l' = alpha · l + rowsum(p)    acc' = alpha · acc + p v

and at the end `out = acc / l`, `lse = m + ln l`. Normalised results of disjoint keys are put together by their `lse`
alone (Rabe and Staats 2021)::

    lse = ln Σ exp(lse_i)         out = Σ exp(lse_i - lse) · out_i
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile.ops.common import checks, dtensor
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.memory import check_writable, share_memory
from flashtile.ops.common.operators import OnBackend, operator
from flashtile.ops.common.rows import as_they_are, compute_dtype, logsumexp
from flashtile.ops.common.sizes import differ, known
from flashtile.ops.softmax import spec as reference
from flashtile.ops.softmax.spec import IsFirst, Merge, Merged, MergedPart, OutputType

_BACKENDS = standard_backends("softmax")


_merge_part = operator(
    "merge_attention_",
    MergedPart,
    (IsFirst,),
    None,
    run=OnBackend(_BACKENDS, "merge_part", arrange=as_they_are),
    writes="acc row_max row_sum",
).call
_merge_finish = operator(
    "finish_attention",
    Merge,
    (OutputType,),
    Merged,
    run=OnBackend(_BACKENDS, "merge_finish", arrange=as_they_are),
    fake=lambda merge, spec: Merged(
        merge.acc.new_empty(merge.acc.shape, dtype=spec.dtype), merge.row_max.new_empty(merge.row_max.shape)
    ),
    decomposition=reference.merge_finish,
).call


class OnlineSoftmax(NamedTuple):
    """The state of an online softmax: statistics of the keys so far.

    Attributes:
        row_max: `[..., rows]`, the largest score, -inf before the first visible key.
        row_sum: `[..., rows]`, `Σ exp(score - row_max)`.
        acc: `[..., rows, columns]`, `Σ exp(score - row_max) · value`.
    """

    row_max: Tensor
    row_sum: Tensor
    acc: Tensor

    def finish(self) -> tuple[Tensor, Tensor]:
        """out `[..., rows, columns]` and lse `[..., rows]`; 0 and -inf in a row that saw no key."""
        blind = self.row_sum == 0
        total = self.row_sum.masked_fill(blind, 1)
        return self.acc / total[..., None], (self.row_max + total.log()).masked_fill(blind, float("-inf"))


def online_softmax(scores: Tensor, values: Tensor, state: OnlineSoftmax | None = None) -> OnlineSoftmax:
    """One step of the online softmax: adds some keys to the state of the keys before.

    Args:
        scores: `[..., rows, keys]`, -inf if a key is not visible.
        values: `[..., keys, columns]`.
        state: state of the keys before, or None.

    Returns:
        The new state, in float32 (float64 for float64); `finish()` gives the result.

    Raises:
        TypeError: an argument is not a tensor, a dtype is wrong, or state is not what this function returned.
        ValueError: a shape is wrong, or the numbers of keys differ.

    Reference:
        Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3.
    """
    checks.check_input("scores", scores, "(..., rows, keys)", "unsqueeze it")
    checks.check_input("values", values, "(..., keys, columns)", "unsqueeze it", 2)
    if compute_dtype(values.dtype) is not compute_dtype(scores.dtype):
        raise TypeError(
            f"values: expected float64 exactly where scores are, got {values.dtype} with {scores.dtype}; cast one of "
            "them"
        )
    if differ(scores.shape[-1:], values.shape[-2:-1]):
        raise ValueError(
            f"values: expected {scores.shape[-1]} rows, one for each key of scores, got shape {tuple(values.shape)}"
        )
    dtype = compute_dtype(scores.dtype)
    if state is not None:
        outer = torch.broadcast_shapes(scores.shape[:-2], values.shape[:-2])
        _check_state(state, scores, (*outer, *scores.shape[-2:-1], *values.shape[-1:]), dtype)
    scores, values = scores.to(dtype), values.to(dtype)
    # Nothing has no largest.
    padded = scores if known(scores.shape[-1] > 0) else F.pad(scores, (0, 1), value=float("-inf"))
    largest = padded.amax(dim=-1)
    row_max = largest if state is None else torch.maximum(state.row_max, largest)
    # While a row has seen nothing, the difference is taken against 0: -inf - -inf would be NaN.
    against = row_max.masked_fill(row_max == float("-inf"), 0)
    weights = (scores - against[..., None]).exp()
    row_sum, acc = weights.sum(dim=-1), weights @ values
    if state is not None:
        alpha = (state.row_max - against).exp()
        row_sum, acc = row_sum + alpha * state.row_sum, acc + alpha[..., None] * state.acc
    return OnlineSoftmax(row_max, row_sum, acc)


def _check_state(state: OnlineSoftmax, scores: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whether a state is of other keys for the same rows; `shape`: of acc."""
    if not isinstance(state, OnlineSoftmax):
        raise TypeError(f"state: expected an OnlineSoftmax or None, got {type(state).__name__}; begin with None")
    for name, tensor, expected in zip(state._fields, state, (scores.shape[:-1], scores.shape[:-1], shape)):
        remedy = "pass what online_softmax returned for the same rows, and begin with None"
        checks.check_shape(f"state.{name}", tensor, expected, "that of these scores and values", remedy)
        if tensor.dtype is not dtype:
            raise TypeError(
                f"state.{name}: expected {dtype}, in which {scores.dtype} is computed, got {tensor.dtype}; begin with "
                "None"
            )
        checks.check_device(f"state.{name}", tensor, scores.device, "scores")


def logsumexp_merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint parts of the keys. Each part is normalised by itself.

    Args:
        outs: each `[batch, seq, heads, head_dim]`, or packed `[total, heads, head_dim]`.
        lses: each `[batch, heads, seq]`, packed `[heads, total]`: the log-sum-exp of the scores, natural logarithm, as
            `flashtile.attention` returns it. -inf if a row saw no key.

    Returns:
        out in the dtype of the first, and lse in float32 (float64 for float64): the result of one call over all keys.

    Raises:
        TypeError: something is not a tensor, or outs are not floating point.
        ValueError: there is nothing to merge, or shapes do not match.

    Reference:
        Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.1.
    """
    for name, parts in (("outs", outs), ("lses", lses)):  # both may be tensors that stack the parts
        if not isinstance(parts, (Sequence, Tensor)):
            raise TypeError(f"{name}: expected a sequence of tensors, got {type(parts).__name__}; of one make a list")
    if len(outs) != len(lses) or not len(outs):
        raise ValueError(f"lses: expected as many as outs, and at least one, got {len(outs)} outs and {len(lses)} lses")
    checks.check_tensors(**{f"outs[{index}]": out for index, out in enumerate(outs)})
    checks.check_tensors(**{f"lses[{index}]": lse for index, lse in enumerate(lses)})
    checks.check_float_dtype("outs", outs[0].dtype)
    if outs[0].dim() < 3:
        raise ValueError(
            f"outs[0]: expected [batch, seq, heads, head_dim] or [total, heads, head_dim], got shape "
            f"{tuple(outs[0].shape)}; insert dimensions of size 1"
        )
    expected = (*outs[0].shape[:-3], outs[0].shape[-2], outs[0].shape[-3])
    for index, (out, lse) in enumerate(zip(outs, lses)):
        if differ(out.shape, outs[0].shape) or differ(lse.shape, expected):
            raise ValueError(
                f"outs[{index}], lses[{index}]: expected shapes {tuple(outs[0].shape)} and {expected}, "
                f"got {tuple(out.shape)} and {tuple(lse.shape)}"
            )
    dtype = compute_dtype(outs[0].dtype)
    each = torch.stack([lse.to(dtype) for lse in lses])
    # In a row that no part has seen, the derivative of logsumexp would be NaN, and so would 0 times it.
    blind = each.isneginf().all(dim=0)
    lse = logsumexp(each.masked_fill(blind, 0), 0)[0].masked_fill(blind, float("-inf"))
    against = lse.masked_fill(blind, 0)
    weights = (each - against).exp().transpose(-1, -2)[..., None]  # [parts, ..., seq, heads, 1]
    merged = torch.zeros_like(outs[0], dtype=dtype)
    for weight, out in zip(weights, outs):
        merged = merged + weight * out.to(dtype)
    return merged.to(outs[0].dtype), lse


def merge_attention_(
    acc: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    first: bool = False,
    backend: str = "auto",
) -> None:
    """Merges attention over some keys into a running result, in place: for parts that arrive one by one.

    ::

        m' = max(m, lse)        l' = exp(m - m') l + exp(lse - m')        acc' = exp(m - m') acc + exp(lse - m') out

    At the end `finish_attention` divides: `acc / l` is the result over all keys, and `m + ln l` its log-sum-exp. While
    the maximum stays the same, the running result is multiplied by exactly 1, so rounding errors do not accumulate.
    Start with acc, row_max and row_sum of 0, -inf and 0, or with `first=True`. Autograd records nothing. On a GPU this
    is one pass over memory.

    Args:
        acc: float32 (float64 for float64) `[batch, rows, heads, head_dim]`, contiguous in the last dimension.
        row_max: `[batch, heads, rows]` in the dtype of acc, contiguous in the last dimension.
        row_sum: the same, with the strides of row_max.
        out: `[batch, rows, heads, head_dim]`, normalised, contiguous in the last dimension.
        lse: `[batch, heads, rows]` in the dtype of acc, natural logarithm.
        first: this is the first part: acc, row_max and row_sum may contain anything, and become this part.
        backend: "auto", "triton", "cpu" or "reference".

    Raises:
        TypeError: something is not a tensor.
        ValueError: shapes, dtypes or strides do not fit, acc, row_max and row_sum share memory or are lazily negated,
            or the backend cannot serve the call.

    Reference:
        As `logsumexp_merge`.
    """
    _BACKENDS.check(backend)
    checks.raise_not_bool(first=first)
    checks.check_tensors(acc=acc, row_max=row_max, row_sum=row_sum, out=out, lse=lse)
    _check_merge(acc, row_max, row_sum, compute_dtype(out.dtype), {"lse": lse})
    if differ(out.shape, acc.shape) or out.stride(-1) != 1:
        raise ValueError(
            f"out: expected the shape of acc, {tuple(acc.shape)}, the last dimension contiguous, got "
            f"{tuple(out.shape)} with strides {out.stride()}; use out.contiguous()"
        )
    running = {"acc": acc, "row_max": row_max, "row_sum": row_sum}
    for name, tensor in running.items():
        check_writable(name, tensor, "make the running result with torch.empty")
    for (name, tensor), (other_name, other) in itertools.combinations(running.items(), 2):
        if share_memory(tensor, other):
            raise ValueError(
                f"{name}, {other_name}: expected memory of its own for each of them, because both are written, got "
                "tensors that share memory; make each with torch.empty"
            )
    with torch.no_grad():
        _merge_part(MergedPart(acc, row_max, row_sum, out.resolve_neg(), lse.resolve_neg()), IsFirst(first), backend)


def finish_attention(
    acc: Tensor, row_max: Tensor, row_sum: Tensor, dtype: torch.dtype, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The result of a merge by `merge_attention_`: attention over the keys of all parts. On a GPU one pass over memory.

    Args:
        acc, row_max, row_sum: the running result of `merge_attention_`.
        dtype: dtype of the output.
        backend: "auto", "triton", "cpu" or "reference".

    Returns:
        out `[batch, rows, heads, head_dim]` in that dtype, and lse `[batch, heads, rows]` in the dtype of acc; 0 and
        -inf in a row that saw no key.

    Raises:
        TypeError: something is not a tensor, or dtype is not one of floating point.
        ValueError: shapes, dtypes or strides do not fit, or the backend cannot serve the call.
    """
    _BACKENDS.check(backend)
    checks.check_tensors(acc=acc, row_max=row_max, row_sum=row_sum)
    checks.check_float_dtype("dtype", dtype)
    _check_merge(acc, row_max, row_sum, compute_dtype(dtype), {})
    merge = Merge(acc.resolve_neg(), row_max.resolve_neg(), row_sum.resolve_neg())
    with torch.no_grad():
        found = _merge_finish(merge, OutputType(dtype), backend)
    return found.out, found.lse


def _check_merge(acc: Tensor, row_max: Tensor, row_sum: Tensor, dtype: torch.dtype, more: dict[str, Tensor]) -> None:
    """Whether these are a running merge in a dtype; `more`: what has the shape of row_max, by name."""
    if dtensor.present(acc, row_max, row_sum):
        raise TypeError("acc, row_max, row_sum: expected plain tensors, got DTensors; merge what to_local() returns")
    if acc.dim() != 4 or acc.dtype is not dtype or acc.stride(-1) != 1:
        raise ValueError(
            f"acc: expected {dtype} [batch, rows, heads, head_dim], the last dimension contiguous, got {acc.dtype} "
            f"{tuple(acc.shape)} with strides {acc.stride()}; torch.empty of that dtype makes one"
        )
    expected = acc.shape[0], acc.shape[2], acc.shape[1]
    for name, tensor in {"row_max": row_max, "row_sum": row_sum, **more}.items():
        if (
            differ(tensor.shape, expected)
            or tensor.dtype is not acc.dtype
            or (tensor.stride(-1) != 1 and expected[2] > 1)
        ):
            raise ValueError(
                f"{name}: expected {acc.dtype} {tuple(expected)}, rows side by side, got {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if row_sum.stride() != row_max.stride():
        raise ValueError(f"row_sum: expected the strides of row_max, {row_max.stride()}, got {row_sum.stride()}")
