"""What a backend of attention is asked about, and what it tells: the facts of a call, and the kernels it would run.

The package of each backend has a `backend.py` with `unsupported_reason` and `describe`, which need no Triton; `BACKEND`
puts them together with the name and with the module of `forward` and `backward`. `select` has the list of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, Table, Wanted, table_of

#: The functions that a backend's module may have.
Phase = Literal["forward", "backward", "column_sums"]


class AttentionCall(NamedTuple):
    """What decides which backend serves a call, and what it runs there.

    Attributes:
        requested: a backend by name, or "auto".
        phase: the forward and the backward are chosen apart.
        device_type: "cpu" or "cuda".
        device: the GPU; that of the interpreter on a CPU.
        multiprocessors: of the GPU; 1 on a CPU.
        triton_missing: why Triton cannot be used; None where it can.
        interpreting: Triton's interpreter runs the kernels.
        dtype: of q, k and v.
        q_shape: of q; `[batch, seq_q, heads_q, head_dim]`, or without batch where the call is packed.
        aligned: all addresses and strides of q, k and v are multiples of 16 bytes, except for the last stride, which is
            1, and those of dimensions of one.
        packed: sequences lie one behind another.
        key_lengths: there are key lengths.
        bias: what a plan needs to know of the bias; None without one.
        mask: there is a mask.
        alibi: there are slopes of ALiBi.
        wanted: the gradients of side inputs that the backward is to give.
        tf32: products of float32 may be of TF32.
        side: the tensors beside q, k and v, for `describe`. None while a backend is chosen: the choice is remembered by
            the other fields.
    """

    requested: str
    phase: Phase
    device_type: str
    device: DeviceFacts
    multiprocessors: int
    triton_missing: str | None
    interpreting: bool
    dtype: torch.dtype
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    aligned: bool
    packed: bool
    key_lengths: bool
    bias: Table | None
    mask: bool
    alibi: bool
    wanted: Wanted
    spec: AttentionSpec
    tf32: bool = False
    side: SideInputs | None = None

    @property
    def label(self) -> str:
        where = self.device.arch if self.device_type == "cuda" else self.device_type
        return f"attention {self.phase}, {self.dtype} on {where}"

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head_dim of q and k, and that of v."""
        return self.q_shape[-1], self.v_shape[-1]

    @property
    def tables(self) -> bool:
        """Whether there is a bias or a mask."""
        return self.bias is not None or self.mask

    @property
    def has_whole_bias(self) -> bool:
        """Whether the bias has a number for each query and key."""
        return self.bias is not None and 1 not in self.bias.shape[2:]


def facts_of_side(side: SideInputs) -> tuple[bool, bool, Table | None, bool, bool]:
    """The fields of an `AttentionCall` that tell of the tensors beside q, k and v: from `packed` to `alibi`."""
    return (
        side.cu_seqlens_q is not None,
        side.key_lengths is not None,
        table_of(side.bias),
        side.mask is not None,
        side.alibi_slopes is not None,
    )


@dataclass(frozen=True)
class KernelChoice:
    """A kernel that a call runs.

    Attributes:
        name: "forward", "dq", "dkdv", "short_backward" where one kernel computes all gradients, or "dbias" for the
            gradient of a bias; on Hopper "forward" or "backward", "dv", "dk" and "dq" where each is a kernel, and
            before them "widen" for 8-bit values and "parts" for float32; on the CPU a description of what computes the
            call.
        tiles: block sizes, warps and stages; None if the kernel has no tiles of flashtile's.
        shared_memory: estimate of the shared memory of one thread block in bytes; 0 if it uses none.
        backend: the backend of the kernel. Forward and backward may have different ones.
        parts: into how many parts the keys of a sequence are split.
        summary: the tiles in words.
    """

    name: str
    tiles: Any = None
    shared_memory: int = 0
    backend: str = ""
    parts: int = 1
    summary: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.backend}): {self.summary}" if self.summary else self.name


def summary_of(
    block: tuple[int, int], warps: str, stages: int, shared_memory: int, rows: str = "queries", more: str = ""
) -> str:
    """Tiles in words, for `KernelChoice.summary`. `block`: rows and keys of a tile; `more`: what else there is."""
    return (
        f"{block[0]} {rows} × {block[1]} keys, {warps}, {stages} stages, about {shared_memory // 1024} KiB of shared "
        f"memory{more}"
    )
