"""The rows by which calls are cut on Hopper: those of a user's table (`flashtile tune`), else the shipped ones.

A tuned row is one that flashtile ships, for other calls or with another number of stages, so that its registers are
known to be enough.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile._backends.devices import triton_version
from flashtile._backends.tuned import choose, cut_from
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.hopper import configs
from flashtile.ops.attention.hopper.backward_configs import (
    LEAST_SCALE,
    BackwardConfig,
    choose_backward_config,
    row_shared_memory,
    rows_for,
)
from flashtile.ops.attention.hopper.configs import HopperConfig, choose_config
from flashtile.ops.common.tiles import power_of_two


class HopperKey(NamedTuple):
    """What a tuned row is for; numbers of rows and heads are the next powers of two.

    Attributes:
        dtype: of q.
        head_dim: of q and k.
        head_dim_v: of v.
        right: whether a causal mask or a window hides keys on the right.
        window: keys visible on the left; None = all.
        dropout: whether there is dropout.
        softcap: whether there is a soft cap.
        deterministic: whether gradients are the same in every run.
        rows_q: queries of a sequence.
        rows_k: keys of a sequence.
        heads: query heads of all sequences.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    right: bool
    window: int | None
    dropout: bool
    softcap: bool
    deterministic: bool
    rows_q: int
    rows_k: int
    heads: int


def hopper_key(call: Call) -> HopperKey | None:
    """The key of a dense call without tensors beside q, k and v, but a seed; None of other calls, which are not tuned,
    and of a scale with which statistics cannot be multiplied."""
    spec, aux = call.spec, call.aux
    if not aux._replace(dropout_seed=None).plain or spec.score_program is not None or abs(spec.scale) < LEAST_SCALE:
        return None
    return HopperKey(
        dtype=call.dtype,
        head_dim=call.head_dims[0],
        head_dim_v=call.head_dims[1],
        right=spec.window_right is not None,
        window=None if spec.window_left is None else power_of_two(spec.window_left),
        dropout=spec.dropout_p > 0,
        softcap=spec.softcap > 0,
        deterministic=spec.deterministic,
        rows_q=power_of_two(call.rows_q),
        rows_k=power_of_two(call.rows_k),
        heads=power_of_two(call.lines),
    )


def forward_config(call: Call) -> HopperConfig:
    """The row of a forward."""
    call = call.cut_by
    row, key = choose_config(call, spills=triton_version() >= configs.SPILLS_FROM), hopper_key(call)
    return row if key is None else choose("attention.hopper.forward", call.machine.facts, key, row)


def backward_config(call: Call) -> BackwardConfig:
    """The row of the main kernel of a backward."""
    call = call.cut_by
    row, key = choose_backward_config(call), hopper_key(call)
    return row if key is None else choose("attention.hopper.backward", call.machine.facts, key, row)


def row_from(call: Call) -> str:
    """Where the row of a call comes from: "tuned" or "measured"."""
    call = call.cut_by
    return cut_from(f"attention.hopper.{call.phase}", call.machine.facts, hopper_key(call))


def forward_candidates(key: HopperKey, shipped: HopperConfig) -> list[HopperConfig]:
    """Other rows that a call may be cut by."""
    sizes = key.head_dim, key.head_dim_v, key.dtype
    rows = configs.rows_for(*sizes)
    rows += [row._replace(ahead=ahead) for row in rows for ahead in (0, row.block_n // 2)]
    return [row for row in dict.fromkeys(rows) if row != shipped and configs.shared_memory(row, *sizes) <= row.room]


def backward_candidates(key: HopperKey, shipped: BackwardConfig) -> list[BackwardConfig]:
    """Other rows that a call may be cut by."""
    rows = [
        row._replace(sum_columns=min(row.sum_columns, shipped.sum_columns), stages=stages, sums_by_tma=by_tma)
        for row in rows_for(key.head_dim, key.head_dim_v, capped=key.dropout or key.softcap)
        for stages in {row.stages, max(2, row.stages - 1)}
        for by_tma in ({True} if key.deterministic else {True, False})
    ]
    memory = {row: row_shared_memory(row, key.head_dim, key.head_dim_v, apart=False) for row in rows}
    return [row for row in memory if row != shipped and memory[row] <= configs.SHARED_MEMORY]
