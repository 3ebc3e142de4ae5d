"""The kernels' parameters that soft cap, ALiBi and sinks need: what the launches of forward and backward pass alike."""

from __future__ import annotations

from typing import NamedTuple

from flashtile.ops.attention.spec import AttentionSpec, SideInputs

LOG2_E = 1.4426950408889634


class ScoreVariant(NamedTuple):
    """What of the scores decides machine code."""

    softcap: bool = False
    alibi: bool = False
    sinks: bool = False


def score_scalars(spec: AttentionSpec, heads: int, alibi: int) -> tuple[float | int | None, ...]:
    """`scale_log2`, `cap_scale` and `stride_alibi_batch`, as `scores` has them. `alibi`: dimensions of the slopes."""
    stride_alibi_batch = heads if alibi == 2 else 0
    if spec.softcap:
        return spec.softcap * LOG2_E, spec.scale / spec.softcap, stride_alibi_batch
    return spec.scale * LOG2_E, None, stride_alibi_batch


def alibi_dimensions(side: SideInputs) -> int:
    """Of the slopes, `[heads]` or `[batch, heads]`; 0 without."""
    return 0 if side.alibi_slopes is None else side.alibi_slopes.dim()


def parameter_types(variant: ScoreVariant) -> dict[str, str]:
    """Types of the run-time parameters; "constexpr" for one that is None."""
    optional = {
        "alibi_slopes_ptr": ("*fp32", variant.alibi),
        "stride_alibi_batch": ("i32", variant.alibi),
        "sinks_ptr": ("*fp32", variant.sinks),
        "cap_scale": ("fp32", variant.softcap),
    }
    return {"scale_log2": "fp32"} | {name: of if there else "constexpr" for name, (of, there) in optional.items()}
