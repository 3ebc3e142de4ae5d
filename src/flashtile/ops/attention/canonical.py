"""A call of attention in its canonical form, from the arguments of the public functions: checks, spec and side inputs.

`attention` and `attention_varlen`, whose host time counts, put the first steps together themselves. The other functions
take theirs from a call's options (`options.Taken`). One place adds modifiers of scores for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.ops.attention import checks, select
from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.options import Taken, Window
from flashtile.ops.attention.philox import draw_dropout_seed
from flashtile.ops.attention.score_arguments import add_score_mod, check_derivative
from flashtile.ops.attention.spec import FP8, AttentionSpec, SideInputs
from flashtile.ops.common.batch_invariance import MODE, check_attention

DENSE_LAYOUT = ("batch", "seq", "heads", "head_dim")
PACKED_LAYOUT = ("total", "heads", "head_dim")
ALIGNMENTS = ("bottom_right", "top_left")

#: A scale below it might be 0 in float32, in which scores are computed, and hidden ones times 0 are NaN; so it is one
#: of 0, for which backends are made.
_LEAST_SCALE = 2.0**-126


def checked_qkv(
    q: Tensor, k: Tensor, v: Tensor, layout: tuple[str, ...], eight_bits: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v after the checks of their shapes, dtypes and devices, under autocast in its dtype."""
    try:
        q, k, v = checks.autocast(q, k, v)
        checks.check_qkv(q, k, v, layout, eight_bits)
    except AttributeError:
        # Looked into only now, so that a call with tensors does not pay for it.
        checks.check_tensors(q=q, k=k, v=v)
        raise
    checks.warn_swapped_layout(q, layout)
    return q, k, v


def deterministic_mode() -> bool:
    """Whether the program asked all of PyTorch for results that are the same in every run."""
    return torch.are_deterministic_algorithms_enabled()


def build_spec(
    q: Tensor,
    causal: bool,
    align: str,
    window: Window | None,
    scale: float | None,
    dropout_p: float,
    deterministic: bool,
    backend: str,
    softcap: float | None = None,
    batch_invariant: bool = False,
) -> AttentionSpec:
    checks.check_choice("align", align, ALIGNMENTS, "'bottom_right' ends the diagonal at the last key")
    select.BACKENDS.check(backend)
    if not (isinstance(causal, bool) and isinstance(deterministic, bool) and isinstance(batch_invariant, bool)):
        checks.raise_not_bool(causal=causal, deterministic=deterministic, batch_invariant=batch_invariant)
    left, right = checks.resolve_window(causal, window)
    scale = checks.resolve_scale(scale, q.shape[-1], q.dtype)
    scale = representable_scale(scale, q.dtype)
    softcap = 0.0 if softcap is None else checks.resolve_softcap(softcap, scale, q.dtype)
    batch_invariant = batch_invariant or MODE.enabled
    if batch_invariant:
        check_attention(q.dtype, dropout_p)
    deterministic = deterministic or batch_invariant or deterministic_mode()
    return AttentionSpec(
        scale, left, right, align == "top_left", dropout_p, deterministic, softcap, batch_invariant=batch_invariant
    )


def make_spec(q: Tensor, given: Taken, dropout_p: float) -> AttentionSpec:
    """The spec of a call's options. `dropout_p`: as it was checked."""
    band = given.causal, given.align, given.window, given.scale
    return build_spec(q, *band, dropout_p, given.deterministic, given.backend, given.softcap, given.batch_invariant)


def representable_scale(scale: float, dtype: torch.dtype) -> float:
    """0 for a scale that float32 flushes."""
    return 0.0 if -_LEAST_SCALE < scale < _LEAST_SCALE and dtype is not torch.float64 else scale


def resolve_lengths(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    key_lengths: Tensor | None,
) -> tuple[SideInputs, int]:
    """The lengths of a call that is packed where it has `cu_seqlens_q`, and how many batch entries or sequences it has.

    For functions that serve both; `attention` and `attention_varlen` know which they are.
    """
    if cu_seqlens_q is None:
        given = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        for name, argument in given.items():
            if argument is not None:
                raise ValueError(
                    f"{name}: expected it beside cu_seqlens_q only, got {argument!r}; leave it out of a dense call"
                )
        batch, rows_q, rows_k = q.shape[0], q.shape[1], k.shape[1]
    else:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        batch, rows_q, rows_k = checks.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q.device), q.shape[0], k.shape[0]
        checks.check_max_seqlen("max_seqlen_q", max_seqlen_q)
        checks.check_max_seqlen("max_seqlen_k", max_seqlen_k)
    if key_lengths is not None:
        checks.check_lengths("key_lengths", key_lengths, batch, q.device, "one length for each batch entry or sequence")
    longest_q = rows_q if max_seqlen_q is None else max_seqlen_q
    longest_k = rows_k if max_seqlen_k is None else max_seqlen_k
    return SideInputs(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, key_lengths), batch


def resolve_dropout(dropout_p: float, dropout_seed: Tensor | None, device: torch.device) -> tuple[float, Tensor | None]:
    """The probability as a float, and the seed that goes with it: None where nothing is dropped."""
    dropout_p = checks.resolve_dropout(dropout_p, dropout_seed, device)
    if not dropout_p:
        return 0.0, None
    return dropout_p, draw_dropout_seed(device) if dropout_seed is None else dropout_seed


def add_scores(
    side: SideInputs, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, batch: int, given: Taken
) -> tuple[SideInputs, AttentionSpec]:
    """Side inputs and spec with all that changes scores. `side` has the lengths of the call; `batch` counts its batch
    entries or packed sequences."""
    packed = side.cu_seqlens_q is not None
    if packed and not (given.bias is given.mask is None and given.block_mask is None):
        checks.check_longest(given.max_seqlen_q, given.max_seqlen_k)
    sizes = 1 if packed else batch, q.shape[-2], side.max_seqlen_q, side.max_seqlen_k
    side = checks.resolve_modifiers(side, given, q, sizes, batch)
    if given.block_mask is not None:
        side, spec = _add_block_mask(side, spec, q, batch, given.block_mask)
    if given.score_mod is not None:
        side, spec = add_score_mod(side, spec, q, given.score_mod)
        check_derivative(side, spec, q, k, v)
    if q.dtype is FP8 or not (given.descale_q is given.descale_k is given.descale_v is None):
        factors = {"descale_q": given.descale_q, "descale_k": given.descale_k, "descale_v": given.descale_v}
        resolved: dict[str, Any] = {
            name: checks.resolve_descale(name, factor, batch, k.shape[-2], q)
            for name, factor in factors.items()
            if factor is not None
        }
        side = side._replace(**resolved)
        checks.check_forward_only(q, k, v, side)
    return side, spec


def _add_block_mask(
    side: SideInputs, spec: AttentionSpec, q: Tensor, sequences: int, block_mask: BlockMask
) -> tuple[SideInputs, AttentionSpec]:
    """Side inputs and spec of a call with a block mask. A packed one has both bounds of the lengths."""
    checks.check_block_mask(block_mask, q, (sequences, q.shape[-2], side.max_seqlen_q, side.max_seqlen_k))
    side = side._replace(block_lists=block_mask.lists, block_patterns=block_mask.tile_masks)
    return side, spec._replace(block_shape=(*block_mask.shape[:2], *block_mask.tile))
