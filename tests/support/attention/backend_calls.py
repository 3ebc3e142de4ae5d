"""Descriptions of calls, as backends of attention are asked about them, on a GPU that need not be here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile._backends import devices
from flashtile._backends.allocate import contiguous_strides
from flashtile.ops.attention.call import AuxFacts, Call, Machine, Phase, TensorFacts, describe_call
from flashtile.ops.attention.spec import NOTHING_WANTED, AttentionSpec, SideInputs, Wanted

#: An H200.
HOPPER = Machine("cuda", devices.KNOWN_DEVICES["sm_90"], 132)


def hopper_call(
    phase: Phase, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec,
    wanted: Wanted = NOTHING_WANTED,
) -> Call:  # fmt: skip
    """A call of "auto" on an H200, with tensors that may be on a CPU."""
    return describe_call(phase, (q, k, v), side, spec, wanted=wanted, machine=HOPPER)._replace(tf32=False)


#: Side inputs of which a backend asks only whether they are there.
_THERE = {
    "key_lengths": TensorFacts(torch.int32, (1,), (1,)),
    "mask": TensorFacts(torch.bool, (1, 1, 128, 128), (128 * 128, 128 * 128, 128, 1)),
    "alibi_slopes": TensorFacts(torch.float32, (1,), (1,)),
    "cu_seqlens_q": TensorFacts(torch.int32, (2,), (1,)),
}


def with_changes(
    call: Call,
    arch: str = "sm_90",
    head_dim: int = 128,
    head_dim_v: int = 128,
    block_tile: tuple[int, int] | None = None,
    q_shape: tuple[int, ...] = (1, 200, 1),
    rows: int | None = None,
    dtype: torch.dtype | None = None,
    aligned: bool = True,
    **fields: Any,
) -> Call:
    """The call on another architecture, with other heads, a block mask, or so many queries and keys. `fields`: of the
    call, of its spec or of its side inputs, of which True says that they are there."""
    spec = {name: fields.pop(name) for name in list(fields) if name in call.spec._fields}
    aux = {name: fields.pop(name) for name in list(fields) if name in AuxFacts._fields}
    if block_tile is not None:
        spec["block_shape"] = (1, 1, *block_tile)
    batch, own_rows, heads = q_shape[:3]
    tensors = {}
    for name, width in (("q", head_dim), ("k", head_dim), ("v", head_dim_v)):
        shape = (batch if name == "q" else 1, rows or own_rows, heads if name == "q" else 1, width)
        padded = (*shape[:-1], -(-width // 16) * 16)
        tensors[name] = TensorFacts(dtype or call.dtype, shape, contiguous_strides(padded), 0 if aligned else 2)
    return call._replace(
        machine=call.machine._replace(facts=devices.KNOWN_DEVICES[arch]),
        spec=call.spec._replace(**spec),
        aux=call.aux._replace(**{name: _THERE[name] if given is True else given for name, given in aux.items()}),
        **{**tensors, **fields},
    )
