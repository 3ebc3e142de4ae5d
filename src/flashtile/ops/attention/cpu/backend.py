"""The backend "cpu": which calls it serves, and what computes them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from flashtile.ops.attention.call import Call, KernelChoice
from flashtile.ops.attention.spec import FP8, AttentionSpec, AuxInputs, Wanted
from flashtile.ops.common.backends import Backend, cpu_unsupported_reason


def describe(call: Call) -> tuple[KernelChoice, ...]:
    """The code that computes the forward, or the backward."""
    dtype = torch.float32 if call.dtype is FP8 else call.dtype
    wanted = call.wanted if call.phase == "backward" else None
    _, computed_by = served_by_torch(call.spec, call.aux, call.q.shape, call.k.shape, call.v.shape, dtype, wanted)
    return (KernelChoice(computed_by, backend="cpu"),)


BACKEND = Backend("cpu", "flashtile.ops.attention.cpu", cpu_unsupported_reason, describe)


# The choice between PyTorch's own CPU flash attention and the tiles here.
#
# PyTorch's is faster if it computes the same. It takes modifiers of scores as a table that it adds to them.


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
    if reason is None:
        reason = _slow_reason(dtype) if wanted is None else _backward_reason(dtype, wanted)
    if reason is not None:
        return False, f"flashtile tiles: {reason}"
    of = " of each packed sequence" if side.packed else ""
    if side.changes_scores or is_windowed(spec, side, q_shape[-3]):
        return True, f"PyTorch's CPU flash attention, on rectangles{of} with tables of what changes the scores"
    return True, f"PyTorch's CPU flash attention: nothing changes the scores, and rectangles{of} are visible"


def is_windowed(spec: AttentionSpec, side: AuxInputs, seq_q: int) -> bool:
    """Whether the left side of a window hides keys from some rows only; a single row sees a slice of the keys."""
    return spec.window_left is not None and (side.packed or seq_q != 1)


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


def _slow_reason(dtype: torch.dtype) -> str | None:
    """Why the tiles compute a forward faster; None where they do not."""
    if dtype is torch.float16 and not (multiplies_float16() or has_x86_vectors()):
        return "PyTorch's CPU flash attention takes several times longer in float16 on a CPU without its products"
    return None


def _backward_reason(dtype: torch.dtype, wanted: Wanted) -> str | None:
    """Why the tiles compute a backward, or compute it faster; None where neither is so."""
    if any(wanted.flags[:2]):
        return "PyTorch's CPU flash attention gives no gradients of a bias or of ALiBi's slopes"
    if dtype is torch.float16 and not multiplies_float16():
        return "PyTorch's CPU flash attention takes some forty times longer in float16 on a CPU without its products"
    if dtype is torch.bfloat16 and emulates_bfloat16():
        return "PyTorch's CPU flash attention takes over twice as long in bfloat16 on a CPU without its products"
    return None


@functools.cache
def multiplies_float16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


@functools.cache
def has_x86_vectors() -> bool:
    """Whether PyTorch uses AVX, and so MKL's products of 16-bit matrices that give float32, as its forward wants."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


@functools.cache
def emulates_bfloat16() -> bool:
    """Whether PyTorch multiplies bfloat16 by float32 on an x86 processor, which has no such products."""
    return has_x86_vectors() and not torch.cpu._is_avx512_bf16_supported()


@functools.cache
def packs_16_bits() -> bool:
    """Whether PyTorch's kernel packs 16-bit keys and values for AMX; else single rows go element by element."""
    return torch.cpu._is_amx_tile_supported()


@functools.cache
def loses_infinite_scores() -> bool:
    """Whether PyTorch's kernels are those for any processor, whose lse of a row with an infinite score is NaN."""
    return torch.backends.cpu.get_cpu_capability() == "DEFAULT"
