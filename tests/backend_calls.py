"""Descriptions of calls, as backends of attention are asked about them, on a GPU that need not be here."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile._backends import devices
from flashtile._backends.alignment import aligned
from flashtile.ops.attention.backend import AttentionCall, Phase, facts_of_side
from flashtile.ops.attention.spec import NOTHING_WANTED, AttentionSpec, SideInputs, Wanted


def hopper_call(
    phase: Phase, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec,
    wanted: Wanted = NOTHING_WANTED,
) -> AttentionCall:  # fmt: skip
    """A call of "auto" on an H200, with tensors that may be on a CPU."""
    return AttentionCall(
        "auto", phase, "cuda", devices.KNOWN_DEVICES["sm_90"], 132, None, False, q.dtype, q.shape, k.shape, v.shape,
        aligned(q, k, v), *facts_of_side(side), wanted, spec,
    )  # fmt: skip


def with_changes(
    call: AttentionCall,
    arch: str = "sm_90",
    head_dim: int = 128,
    head_dim_v: int = 128,
    block_tile: tuple[int, int] | None = None,
    rows: int | None = None,
    **fields: Any,
) -> AttentionCall:
    """The call on another architecture, with other heads, a block mask, or so many queries and keys. `fields`: of the
    call or of its spec."""
    of_spec = {name: fields.pop(name) for name in list(fields) if name in AttentionSpec._fields}
    if block_tile is not None:
        of_spec["block_shape"] = (1, 1, *block_tile)
    batch, own_rows, heads, _ = call.q_shape
    outer = (batch, rows or own_rows, heads)
    shapes = {"q_shape": (*outer, head_dim), "k_shape": (*outer, head_dim), "v_shape": (*outer, head_dim_v)}
    spec = call.spec._replace(**of_spec)
    return call._replace(device=devices.KNOWN_DEVICES[arch], spec=spec, **{**shapes, **fields})
