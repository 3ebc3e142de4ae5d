"""The one description of a call: all that may decide which backend serves it, which kernels run, and how.

A `Call` has no contents and no addresses of tensors, so it is hashable.

No backend computes keys of a dense call that its band hides from every query: their contents, NaN included, have no
effect, and no kernel loads them. A call over the other keys (`SeenCall`) is a part of the call: the sides of the window
are shifted, and `Origin` says where its columns lie.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flashtile._backends import devices, forgetters
from flashtile._backends.alignment import used_strides
from flashtile._backends.allocate import contiguous_strides
from flashtile._backends.devices import DeviceFacts
from flashtile.ops.attention.spec import (
    NOTHING_WANTED,
    AttentionSpec,
    AuxInputs,
    BackwardInputs,
    Gradients,
    Origin,
    SideInputs,
    Wanted,
    lse_shape,
)
from flashtile.ops.common.checks import MAX_POSITIONS, check_rows

#: Queries and keys of the one sequence by which kernels of the batch-invariant mode are cut: those of a long call.
_INVARIANT_ROWS = 8192

#: The functions that a backend's module may have.
Phase = Literal["forward", "backward", "column_sums"]


class TensorFacts(NamedTuple):
    """A tensor without its contents. `misalignment`: its address modulo 16."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    misalignment: int = 0

    @property
    def large(self) -> bool:
        """Whether it has more elements than 32 bits count."""
        return math.prod(self.shape) >= 2**31

    @property
    def by_key(self) -> bool:
        """Whether a mask is the same for all rows, as padding is."""
        return self.shape[2] == 1 and self.shape[3] > 1

    @property
    def has_each_score(self) -> bool:
        """Whether a bias or a mask has an element for each query and key."""
        return 1 not in self.shape[2:]


def tensor_facts(tensor: Tensor) -> TensorFacts:
    return TensorFacts(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() & 15)


class AuxFacts(AuxInputs[TensorFacts]):
    """`SideInputs` without contents."""

    __slots__ = ()


def aux_facts(side: SideInputs) -> AuxFacts:
    if side.plain:
        return AuxFacts(max_seqlen_q=side.max_seqlen_q, max_seqlen_k=side.max_seqlen_k)
    *single, captured = side
    facts = [tensor_facts(each) if isinstance(each, Tensor) else each for each in single]
    return AuxFacts._make((*facts, tuple(map(tensor_facts, captured))))


class Machine(NamedTuple):
    """The machine that kernels run on.

    Attributes:
        type: "cpu" or "cuda".
        facts: of the GPU; of the interpreter on a CPU.
        multiprocessors: of the GPU; 1 on a CPU.
        triton_missing: why Triton cannot be used; None where it can.
        interpreting: Triton's interpreter runs the kernels.
    """

    type: str
    facts: DeviceFacts
    multiprocessors: int
    triton_missing: str | None = None
    interpreting: bool = False


@functools.cache
def current_machine(device: torch.device) -> Machine:
    """The machine of a device that is present."""
    facts, multiprocessors = devices.device_facts(device), devices.multiprocessors(device)
    return Machine(device.type, facts, multiprocessors, devices.triton_missing(), devices.interpreting())


forgetters.append(current_machine.cache_clear)


class Call(NamedTuple):
    """A call of attention.

    Attributes:
        requested: a backend by name, or "auto".
        phase: forward and backward are chosen and planned apart.
        q: `[batch, seq_q, heads_q, head_dim]`, or packed `[total_q, heads_q, head_dim]`; k and v likewise.
        device: where outputs are made.
        tf32: products of float32 may be of TF32.
        same_lengths: of a packed call, queries and keys have one tensor of offsets.
        dout: of a backward.
        has_dlse: a gradient comes through lse.
        wanted: the gradients of side inputs that the backward is to give.
    """

    requested: str
    phase: Phase
    spec: AttentionSpec
    q: TensorFacts
    k: TensorFacts
    v: TensorFacts
    aux: AuxFacts
    machine: Machine
    device: torch.device
    tf32: bool = False
    same_lengths: bool = False
    dout: TensorFacts | None = None
    has_dlse: bool = False
    wanted: Wanted = NOTHING_WANTED

    @property
    def device_type(self) -> str:
        return self.machine.type

    @property
    def triton_missing(self) -> str | None:
        return self.machine.triton_missing

    @property
    def interpreting(self) -> bool:
        return self.machine.interpreting

    @property
    def arch(self) -> str:
        return self.machine.facts.arch

    @property
    def multiprocessors(self) -> int:
        return self.machine.multiprocessors

    @property
    def label(self) -> str:
        where = self.arch if self.device_type == "cuda" else self.device_type
        return f"attention {self.phase}, {self.dtype} on {where}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return self.q.dtype

    @property
    def packed(self) -> bool:
        """Whether sequences lie one behind another."""
        return self.aux.packed

    @property
    def bounded(self) -> bool:
        """Whether the keys of each sequence end where its length says."""
        return self.packed or self.aux.key_lengths is not None

    @property
    def batch(self) -> int:
        """Batch entries, or sequences of a packed call."""
        return self.q.shape[0] if self.aux.cu_seqlens_q is None else self.aux.cu_seqlens_q.shape[0] - 1

    @property
    def rows_q(self) -> int:
        """Queries of a sequence; of a packed call all of them."""
        return self.q.shape[-3]

    @property
    def rows_k(self) -> int:
        """Keys, likewise."""
        return self.k.shape[-3]

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def heads_kv(self) -> int:
        return self.k.shape[-2]

    @property
    def lines(self) -> int:
        """(batch, head) pairs of queries; of a packed call the heads."""
        return self.heads if self.packed else self.batch * self.heads

    @property
    def lines_kv(self) -> int:
        """The same of keys."""
        return self.heads_kv if self.packed else self.batch * self.heads_kv

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.heads_kv

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head_dim of q and k, and that of v."""
        return self.q.shape[-1], self.v.shape[-1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of out and of its gradient."""
        return *self.q.shape[:-1], self.v.shape[-1]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of lse."""
        return lse_shape(self.q)

    @property
    def by_position(self) -> bool:
        """Whether scores depend on where their query and key are: in a band, by key lengths, by ALiBi."""
        return self.spec.banded or self.aux.key_lengths is not None or self.aux.by_distance

    @property
    def max_seqlens(self) -> tuple[int, int]:
        """Upper bounds of the lengths of queries and keys."""
        return self.aux.max_seqlen_q, self.aux.max_seqlen_k

    @property
    def aligned(self) -> bool:
        """Whether all addresses and strides of q, k and v are multiples of 16 bytes, and the last stride is 1."""
        bits = 0
        for tensor in (self.q, self.k, self.v):
            bits |= tensor.misalignment
            for stride in used_strides(tensor.shape[:-1], tensor.strides):
                bits |= tensor.dtype.itemsize * stride
        return bits % 16 == 0

    @property
    def misalignment(self) -> int:
        """The addresses of q, k, v and dout modulo 16, combined by `|`."""
        bits = self.q.misalignment | self.k.misalignment | self.v.misalignment
        return bits if self.dout is None else bits | self.dout.misalignment

    @property
    def block_tile(self) -> tuple[int, int]:
        """Queries and keys of the tiles of a block mask; 0 and 0 without one."""
        return (0, 0) if self.spec.block_shape is None else self.spec.block_shape[2:]

    @property
    def whole_sizes(self) -> tuple[int, int]:
        """Queries and keys that kernels for sm_90 walk through: with a dense block mask, whole tiles of it."""
        if self.packed or self.spec.block_shape is None:
            return self.rows_q, self.rows_k
        tile_q, tile_k = self.block_tile
        return -(-self.rows_q // tile_q) * tile_q, -(-self.rows_k // tile_k) * tile_k

    def is_covered(self, block_m: int, block_n: int) -> bool:
        """Whether tiles divide the call, so that none ends past a bias or a mask."""
        divided = self.rows_q % block_m == 0 and self.rows_k % block_n == 0
        return not self.packed and divided and self.whole_sizes == (self.rows_q, self.rows_k)

    @property
    def may_hide_rows(self) -> bool:
        """Whether a row may see no key, as far as the host knows. A sink does not count."""
        spec, aux = self.spec, self.aux
        if spec.score_program is not None or not (aux.key_lengths is aux.mask is aux.bias is aux.block_lists is None):
            return True
        left, right = spec.window_left, spec.window_right
        if left is not None and right is not None and left + right < 0:
            return True
        if self.packed:
            # Sequences with as many queries as keys: each row sees the key on its diagonal, unless a side is negative.
            return not self.same_lengths or (left or 0) < 0 or (right or 0) < 0
        return self.band_hides_rows

    @property
    def band_hides_rows(self) -> bool:
        """Whether a band hides all keys from the first or the last rows of a dense call."""
        left, right = self.spec.window_left, self.spec.window_right
        shift = 0 if self.spec.top_left else self.rows_k - self.rows_q
        return (right is not None and shift + right < 0) or (
            left is not None and self.rows_q - 1 + shift - left >= self.rows_k
        )

    @property
    def cut_by(self) -> Call:
        """The call by whose sizes kernels are cut. In the batch-invariant mode it is always one long sequence of the
        same heads, dtypes and features, whatever the batch, the lengths and the layout are, on a GPU that nobody tuned;
        else the call itself."""
        if not self.spec.batch_invariant:
            return self
        aux = self.aux._replace(
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            max_seqlen_q=_INVARIANT_ROWS,
            max_seqlen_k=_INVARIANT_ROWS,
            key_lengths=None,
            bias=_single_sequence_facts(self.aux.bias),
            mask=_single_sequence_facts(self.aux.mask),
        )
        q, k, v = (_in_one_sequence(of) for of in (self.q, self.k, self.v))
        dout = None if self.dout is None else _in_one_sequence(self.dout)
        machine = self.machine._replace(facts=self.machine.facts._replace(tuned=None))
        return self._replace(q=q, k=k, v=v, dout=dout, aux=aux, same_lengths=False, machine=machine)

    def tiles(self, rows: int, block: int) -> int:
        """Tiles of a sequence; of a packed call the slots of all its sequences, whose lengths the host does not know:
        each has as many as it has tiles, or one more."""
        return rows // block + self.batch + 1 if self.packed else -(-rows // block)

    def check_sizes(self) -> None:
        """Raises ValueError if there are more queries or keys than kernels count."""
        check_rows("q", self.rows_q, MAX_POSITIONS)
        check_rows("k", self.rows_k, MAX_POSITIONS)


def _in_one_sequence(of: TensorFacts) -> TensorFacts:
    """Rows of all sequences as those of one long sequence."""
    shape = (1, _INVARIANT_ROWS, *of.shape[-2:])
    return TensorFacts(of.dtype, shape, contiguous_strides(shape))


def _single_sequence_facts(table: TensorFacts | None) -> TensorFacts | None:
    """A bias or a mask likewise, at an address from which TMA does not read: whether it could depends on the layout."""
    if table is None:
        return None
    rows, columns = (1 if size == 1 else _INVARIANT_ROWS for size in table.shape[2:])
    shape = (1, table.shape[1], rows, columns)
    return TensorFacts(table.dtype, shape, contiguous_strides(shape), misalignment=2)


def describe_call(
    phase: Phase,
    qkv: tuple[Tensor, Tensor, Tensor],
    side: SideInputs,
    spec: AttentionSpec,
    requested: str = "auto",
    wanted: Wanted = NOTHING_WANTED,
    machine: Machine | None = None,
) -> Call:
    """The description of a call. `machine`: where it is not that of q's device."""
    q, k, v = qkv
    cu_q, cu_k = side.cu_seqlens_q, side.cu_seqlens_k
    return Call(
        requested,
        phase,
        spec,
        q=tensor_facts(q),
        k=tensor_facts(k),
        v=tensor_facts(v),
        aux=aux_facts(side),
        machine=machine or current_machine(q.device),
        device=q.device,
        tf32=q.dtype is torch.float32 and torch._C._get_cublas_allow_tf32(),
        same_lengths=cu_q is not None and cu_k is not None and cu_q.data_ptr() == cu_k.data_ptr(),
        wanted=wanted,
    )


def describe_backward(inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> Call:
    """The description of the backward of a call."""
    dout, dlse, q, k, v, *_ = inputs
    call = describe_call("backward", (q, k, v), side, spec, wanted=wanted)
    return call._replace(dout=tensor_facts(dout), has_dlse=dlse is not None)


class SeenCall(NamedTuple):
    """A call over the keys that some query sees, `[first, last)` of those given. Fields as in `attention`."""

    k: Tensor
    v: Tensor
    side: SideInputs
    spec: AttentionSpec
    first: int
    last: int


def visible_keys(
    seq_q: int, seq_k: int, spec: AttentionSpec, first_row: int = 0, last_row: int | None = None
) -> tuple[int, int]:
    """First key that the band shows some query, and one past the last. The queries: from `first_row` to before
    `last_row`, which may be all."""
    diagonal = first_row + (0 if spec.top_left else seq_k - seq_q)
    rows = (seq_q if last_row is None else last_row) - first_row
    first, last = 0, seq_k
    if spec.window_left is not None:
        first = min(max(first, diagonal - spec.window_left), seq_k)
    if spec.window_right is not None:
        last = min(last, diagonal + rows + spec.window_right)
    return first, max(first, last)


def seen_call(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> SeenCall | None:
    """The call over the keys that some query sees; None where these are all, or where it would be another call.

    A block mask has the length of all keys. Dropout bits, score functions and the tiles of the batch-invariant mode
    depend on the number of a key, so such calls leave out only keys at the end.
    """
    if not spec.banded or side.packed or spec.block_shape is not None:
        return None
    seq_q, seq_k = q.shape[1], k.shape[1]
    first, last = visible_keys(seq_q, seq_k, spec)
    if spec.dropout_p or spec.score_program is not None or spec.batch_invariant:
        first = 0
    if not seq_q or last - first == seq_k:
        return None
    # The key of query 0's diagonal, counted from `first`, less where the shorter call would have it.
    shift = -first if spec.top_left else seq_k - last
    spec = spec.shifted(shift)
    if last < seq_k and side.by_distance:
        origin = Origin(0, 0, 0, 0, q.shape[2]) if spec.origin is None else spec.origin
        spec = spec._replace(origin=origin._replace(diagonal=origin.diagonal + seq_k - last))
    lengths = side.key_lengths
    side = side._replace(
        max_seqlen_k=last - first,
        key_lengths=lengths if lengths is None or not first else (lengths - first).clamp(min=0),
        bias=_columns(side.bias, first, last),
        mask=_columns(side.mask, first, last),
    )
    return SeenCall(k[:, first:last], v[:, first:last], side, spec, first, last)


def _columns(table: Tensor | None, first: int, last: int) -> Tensor | None:
    return table if table is None or table.shape[3] == 1 else table[..., first:last]


def unseen_gradients(found: Gradients, k: Tensor, v: Tensor, bias: Tensor | None, call: SeenCall) -> Gradients:
    """The gradients of a call from those of its `seen_call`. `k`, `v`, `bias`: as they were given."""
    dbias = found.bias
    if dbias is not None and bias is not None and bias.shape[3] > 1:
        dbias = _with_zeros(dbias, bias, 3, call)
    return found._replace(k=_with_zeros(found.k, k, 1, call), v=_with_zeros(found.v, v, 1, call), bias=dbias)


def _with_zeros(gradient: Tensor, of: Tensor, dim: int, call: SeenCall) -> Tensor:
    """A gradient in the shape of the whole tensor, 0 for keys that no query sees."""
    whole = torch.zeros(of.shape, dtype=gradient.dtype, device=gradient.device)
    whole.narrow(dim, call.first, call.last - call.first).copy_(gradient)
    return whole


@dataclass(frozen=True)
class KernelChoice:
    """A kernel that a call runs.

    Attributes:
        name: "forward", "dq", "dkdv", "short_backward" where one kernel computes all gradients, or "dbias" for the
            gradient of a bias; on Hopper "forward" or "backward", "dv", "dk" and "dq" where each is a kernel,
            "dcaptured" for the gradients of tensors that a score function reads, and before them "widen" for 8-bit
            values and "parts" for float32; on the CPU a description of what computes the call.
        tiles: block sizes, warps and stages; None if the kernel has no tiles of flashtile's.
        shared_memory: estimate of the shared memory of one thread block in bytes; 0 if it uses none.
        backend: the backend of the kernel. Forward and backward may have different ones.
        parts: into how many parts the keys of a sequence are split.
        summary: the tiles in words.
        tiles_from: "tuned" by `flashtile tune` on this GPU, "measured" on such a GPU, or "predicted" from registers and
            shared memory; "" where nobody chose.
    """

    name: str
    tiles: Any = None
    shared_memory: int = 0
    backend: str = ""
    parts: int = 1
    summary: str = ""
    tiles_from: str = ""

    def __str__(self) -> str:
        remark = {"tuned": "; tuned on this GPU", "predicted": "; predicted (flashtile tune measures)"}
        summary = self.summary + remark.get(self.tiles_from, "")
        return f"{self.name} ({self.backend}): {summary}" if self.summary else self.name


def summarise(
    block: tuple[int, int], warps: str, stages: int, shared_memory: int, rows: str = "queries", more: str = "",
    parts: int = 1,
) -> str:  # fmt: skip
    """Tiles in words, for `KernelChoice.summary`. `block`: rows and keys of a tile; `parts`: of the keys."""
    tile, in_stages = f"{block[0]} {rows} × {block[1]} keys", "1 stage" if stages == 1 else f"{stages} stages"
    more += f", keys in {parts} parts" if parts > 1 else ""
    return f"{tile}, {warps}, {in_stages}, about {shared_memory // 1024} KiB of shared memory{more}"
