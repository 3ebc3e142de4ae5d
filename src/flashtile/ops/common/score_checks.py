"""Checks of what shapes and changes the scores of attention, for the operations that compute it: scale, window, soft
cap, ALiBi slopes, sinks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtile.ops.common.checks import as_float, check_device, check_tensors, finite_float, largest_number
from flashtile.ops.common.sizes import differ


def resolve_window(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """The canonical (left, right) of `causal` and `window` together."""
    if window is None:
        left = right = None
    else:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window: expected a pair (left, right), got {window!r}; use None for an unlimited side")
        left, right = window
        for side, keys in (("left", left), ("right", right)):
            if keys is None:
                continue
            if isinstance(keys, bool) or not isinstance(keys, int):
                raise TypeError(f"window: expected int or None on the {side}, got {keys!r}; None is unlimited")
            if not 0 <= keys < 2**31:
                raise ValueError(
                    f"window: expected {side} from 0 to 2**31 - 1, got {keys}; use None for an unlimited side"
                )
    return left, 0 if causal else right


def resolve_scale(scale: float | None, head_dim: int, dtype: torch.dtype) -> float:
    """The scale of the scores of q in a dtype."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    why_not_tensor = "reading it would synchronise, multiply q by it instead"
    remedy = "leave it out for 1/sqrt(head_dim)"
    return finite_float("scale", scale, remedy, why_not_tensor, dtype)


def resolve_softcap(softcap: float | None, scale: float, dtype: torch.dtype) -> float:
    """The soft cap as a float, 0.0 for none, beside the scale of the scores of q in a dtype."""
    if softcap is None:
        return 0.0
    softcap = as_float("softcap", softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap: expected a finite number of at least 0, got {softcap}; leave it out for no cap")
    largest = largest_number(dtype)
    if softcap > largest or abs(scale) > softcap * largest > 0:
        raise ValueError(
            f"softcap: expected at most {largest:.1e}, and as much of scale / softcap, got {softcap} beside a scale of "
            f"{scale}; leave it out for no cap"
        )
    return softcap


def resolve_alibi_slopes(alibi_slopes: Tensor, batch: int, heads: int, q: Tensor) -> Tensor:
    """Slopes `[heads]` or `[batch, heads]` in the dtype of lse."""
    check_tensors(alibi_slopes=alibi_slopes)
    if differ(alibi_slopes.shape, (heads,)) and differ(alibi_slopes.shape, (batch, heads)):
        raise ValueError(
            f"alibi_slopes: expected shape [heads_q] = [{heads}] or [batch, heads_q] = [{batch}, {heads}], got "
            f"{list(alibi_slopes.shape)}; slopes belong to query heads"
        )
    return _as_statistics("alibi_slopes", alibi_slopes, q)


def resolve_sinks(sinks: Tensor, heads: int, q: Tensor) -> Tensor:
    """Sinks `[heads]` in the dtype of lse."""
    check_tensors(sinks=sinks)
    if tuple(sinks.shape) != (heads,):
        raise ValueError(
            f"sinks: expected shape [heads_q] = [{heads}], one logit for each query head, got {list(sinks.shape)}; "
            "query heads that share keys have one each"
        )
    return _as_statistics("sinks", sinks, q)


def _as_statistics(name: str, tensor: Tensor, q: Tensor) -> Tensor:
    """A small tensor in float32, or float64 beside float64 q."""
    check_device(name, tensor, q.device)
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    narrow = q.dtype if q.dtype.itemsize > 1 else torch.bfloat16  # beside 8 bits that of out
    if tensor.dtype not in (narrow, wide):
        raise TypeError(f"{name}: expected dtype {wide}, or that of out, {narrow}, got {tensor.dtype}; cast it")
    return tensor.to(wide)
