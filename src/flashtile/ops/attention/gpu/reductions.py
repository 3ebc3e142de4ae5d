"""Sums that follow a backward kernel: dk and dv of several shares, gradients of a bias in parts, of slopes and sinks.
Both GPU backends store partial gradients and add them up in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.launch import int32, int64, pointer_to
from flashtile._backends.pipeline import ADDRESS, Kernel, Pipeline
from flashtile.ops.attention.call import Call, TensorFacts
from flashtile.ops.attention.gpu.scores import wave_starts
from flashtile.ops.attention.spec import AuxForm, Gradients, RunBackward, SideInputs, Wanted
from flashtile.ops.common.checks import check_programs


@triton.jit
def attention_shares_kernel(
    dk_shares_ptr, dv_shares_ptr, dk_ptr, dv_ptr, lines, shares, tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, APART: tl.constexpr, APART_V: tl.constexpr,
    LINES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv `[lines, head_dim]`, sums of `[lines, shares, head_dim]`, in a fixed order.

    The first `tiles` programs have `LINES` lines of dk each, the others of dv. `APART`, `APART_V`: numbers from a line
    of a share to the next. `D`, `E`: powers of two that hold a line."""
    program = tl.program_id(0)
    if program < tiles:
        _add_up(dk_shares_ptr, dk_ptr, program, lines, shares, HEAD_DIM, APART, LINES=LINES, WIDTH=D)
    else:
        _add_up(dv_shares_ptr, dv_ptr, program - tiles, lines, shares, HEAD_DIM_V, APART_V, LINES=LINES, WIDTH=E)


@triton.jit
def _add_up(
    shares_ptr, sum_ptr, tile, lines, shares,
    COLUMNS: tl.constexpr, APART: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    line = tile.to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    exists = (line < lines) & (column < COLUMNS)
    total = tl.zeros((LINES, WIDTH), tl.float32)
    for share in range(shares):
        numbers = tl.load(shares_ptr + (line * shares + share) * APART + column, mask=exists, other=0.0)
        total += numbers.to(tl.float32)
    tl.store(sum_ptr + line * COLUMNS + column, total.to(sum_ptr.dtype.element_ty), mask=exists)


@triton.jit
def attention_bias_parts_kernel(parts_ptr, sum_ptr, size, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up float32 `[parts, size]` in a fixed order, into the bias's dtype, `BLOCK` of `PARTS` parts at a time."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        pointers = parts_ptr + part.to(tl.int64)[:, None] * size + place[None, :]
        total += tl.load(pointers, mask=(part < parts)[:, None] & inside[None, :], other=0.0)
    tl.store(sum_ptr + place, tl.sum(total, 0).to(sum_ptr.dtype.element_ty), mask=inside)


_LOG2_E = math.log2(math.e)
#: Numbers of a share that a program reads at a time.
_AT_ONCE = 2048


def shares_kernel(dk: Layout, dv: Layout, shares: int) -> Kernel:
    """Adds up "dk_shares" and "dv_shares", `[..., heads_kv · shares, head_dim]` in lines that lie one after another."""
    (head_dim, head_dim_v), heads = (dk.shape[-1], dv.shape[-1]), dk.shape[-2] // shares
    width, width_v = triton.next_power_of_2(head_dim), triton.next_power_of_2(head_dim_v)
    together = max(_AT_ONCE // max(width, width_v), 1)
    lines = math.prod(dk.shape[:-2]) * heads
    tiles = -(-lines // together)
    check_programs("k", 2 * tiles)
    number = pointer_to(dk.dtype, 16)
    parameters = {
        **dict.fromkeys(("dk_shares_ptr", "dv_shares_ptr", "dk_ptr", "dv_ptr"), number),
        "lines": int64(lines),
        "shares": int32(shares),
        "tiles": int32(tiles),
    }
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "APART": dk.strides[-2],
        "APART_V": dv.strides[-2],
        "LINES": together,
        "D": width,
        "E": width_v,
    }
    return Kernel(attention_shares_kernel, parameters, constants, 2 * tiles)


def without_shares(of: Layout, shares: int) -> Layout:
    """The layout of dk or dv, from that of its shares."""
    return contiguous((*of.shape[:-2], of.shape[-2] // shares, of.shape[-1]), of.dtype)


#: Programs that fill any GPU.
_FILLING = 512


class BiasWork(NamedTuple):
    """The cut of one call.

    Attributes:
        own: tiles of the bias itself: of a direction in which it broadcasts, one.
        sharing: tiles of scores that share one of them.
        parts: programs that share these, so that even a small bias fills a GPU.
        longest: how many queries and keys a sequence has at most, as far as a bias tells.
    """

    own: int = 1
    sharing: int = 1
    parts: int = 1
    longest: tuple[int, int] = (0, 0)

    @property
    def many(self) -> bool:
        """Whether the kernel's loop, of two steps for each of those that share, counts past 32 bits."""
        return self.sharing >= 2**30

    def numbers(self, shape: tuple[int, ...] | None) -> WorkNumbers:
        """As the kernel takes it. `shape`: of the bias."""
        batch, heads, rows, columns = shape or (None,) * 4
        longest_q, longest_k = self.longest
        return WorkNumbers(
            batch=int32(batch),
            heads=int32(heads),
            rows=int32(rows),
            columns=int32(columns),
            longest_q=int32(longest_q),
            longest_k=int32(longest_k),
            sharing=(int64 if self.many else int32)(self.sharing),
            parts=int32(self.parts),
        )


class WorkNumbers(NamedTuple):
    """Sizes of the bias, and `BiasWork`, for a kernel. `sharing` is in 64 bits if the loop counts past 32."""

    batch: Any
    heads: Any
    rows: Any
    columns: Any
    longest_q: Any
    longest_k: Any
    sharing: Any
    parts: Any


def cut_matrices(shape: tuple[int, ...], matrices: int) -> BiasWork:
    """The cut of a call whose sequences are one tile each. `shape`: of the bias. `matrices`: sequences times heads."""
    own = shape[0] * shape[1]
    sharing = matrices // max(own, 1)
    return BiasWork(own, sharing, max(1, min(sharing, -(-_FILLING // max(own, 1)))))


def cut_work(bias: TensorFacts, call: Call, block: tuple[int, int]) -> BiasWork:
    """The cut of a call. `block`: queries and keys of a tile of scores."""
    longest = call.rows_q, call.rows_k
    if call.packed:
        longest_q, longest_k = (size if size != 1 else rows for size, rows in zip(bias.shape[2:], longest))
        longest = longest_q, longest_k
    blocks = -(-longest[0] // block[0]), -(-longest[1] // block[1])
    own_blocks = (1 if size == 1 else count for size, count in zip(bias.shape[2:], blocks))
    own = bias.shape[0] * bias.shape[1] * math.prod(own_blocks)
    sharing = call.batch * call.heads * math.prod(blocks) // max(own, 1)
    return BiasWork(own, sharing, max(1, min(sharing, -(-_FILLING // max(own, 1)))), longest)


#: Numbers that a program reads at a time, of some parts, and parts at most.
_AT_ONCE_OF_PARTS, _PARTS_AT_ONCE = 1024, 32


def bias_sum_kernel(parts: int, bias: TensorFacts) -> Kernel:
    """Adds up "bias_parts", so many parts of the gradient of a bias, float32 `[parts, *shape]`, into "dbias"."""
    together = min(_PARTS_AT_ONCE, triton.next_power_of_2(parts))
    block, size = _AT_ONCE_OF_PARTS // together, math.prod(bias.shape)
    parameters = {
        "parts_ptr": pointer_to(torch.float32, 16),
        "sum_ptr": pointer_to(bias.dtype, 16),
        "size": int64(size),
        "parts": int32(parts),
    }
    constants = {"PARTS": together, "BLOCK": block}
    buffers = {"parts_ptr": "bias_parts", "sum_ptr": "dbias"}
    return Kernel(attention_bias_parts_kernel, parameters, constants, -(-size // block), buffers)


def sum_layouts(call: Call, rows: int, programs: int | None = None) -> dict[str, Layout]:
    """Layouts of the sums that kernels store for `learned_gradients`: by row or key, of which there are `rows`. If a
    kernel of so many `programs` sums the gradient of the sinks, also its parts `[batch, heads, tiles]`, packed `[heads,
    tiles]`."""
    layouts = {}
    if call.wanted.slopes:
        layouts["slope_sums"] = contiguous((*call.lse_shape[:-1], rows), torch.float32)
    if call.aux.has_row_logit and programs is not None:
        heads = call.lse_shape[:-1]
        layouts["logit_sums"] = contiguous((*heads, programs // math.prod(heads)), torch.float32)
    return layouts


def captured_sums(call: Call, slots: tuple[int, ...] = ()) -> dict[str, Layout]:
    """Layouts of the sums of the gradients of tensors that a score function reads, zeros at the start: float32, so many
    of each."""
    each = enumerate(zip(call.aux.captured, call.wanted.captured))
    return {f"sum{number}": contiguous((*slots, *of.shape), torch.float32) for number, (of, wants) in each if wants}


def learned_gradients(
    found: dict[str, Tensor], side: SideInputs, wanted: Wanted, cu_seqlens: Tensor | None, own_delta: bool = False
) -> dict[str, Tensor | None]:
    """The gradients of side inputs that follow from what kernels stored, by the fields of `Gradients`. `found`: what
    kernels stored, by name. `cu_seqlens`: the offsets of the sequences among the rows of "slope_sums". `own_delta`:
    "statistics" have a delta for the sinks, beside that of the keys."""
    gradients: dict[str, Tensor | None] = {"bias": found.get("dbias")}
    if "slope_sums" in found:
        gradients["alibi_slopes"] = slope_gradient(found["slope_sums"], side, cu_seqlens)
    if wanted.sinks and "logit_sums" in found:
        sums = found["logit_sums"]
        gradients["sinks"] = sums.sum((0, -1) if sums.dim() == 3 else -1).neg_()
    elif wanted.sinks and side.sinks is not None and "statistics" in found:
        gradients["sinks"] = _sink_gradient(found["statistics"], side.sinks, own_delta)
    return gradients


class BackwardPlan(NamedTuple):
    """The launches of a backward.

    Attributes:
        pipeline: is given q, k, v, out, lse, the tensors beside them, dout and dlse. Its first outputs are dq, dk and
            dv.
        by_key: "slope_sums" has a number for each key, else for each row.
        own_delta: as in `learned_gradients`.
        waves: launches of the dq kernel, as (thread blocks of each, of all); None if there is one launch.
    """

    pipeline: Pipeline
    by_key: bool = False
    own_delta: bool = False
    waves: tuple[int, int] | None = None

    def runner(self, form: AuxForm, wanted: Wanted) -> RunBackward:
        """The function that enqueues the kernels. Gradients that are not wanted are None."""
        run_kernels, waves, learns = self.pipeline.run, self.waves, any(wanted.flags)
        unlearned = None, None, None, (None,) * len(wanted.captured)

        def run(dout: Tensor, dlse: Tensor | None, saved: Sequence[Tensor]) -> Gradients:
            given = *map(ADDRESS, saved), ADDRESS(dout), 0 if dlse is None else ADDRESS(dlse)
            if waves is None:
                made = run_kernels(*given)
            else:
                starts = wave_starts(*waves, dout.device)  # has a name, so that its memory is not reused before
                made = run_kernels(*given, [*map(ADDRESS, starts)])
            if not learns:
                return Gradients._make((made[0], made[1], made[2], *unlearned))
            return self._with_learned(made, form.side(saved[5:]), wanted)

        return run

    def _with_learned(self, made: list[Tensor], side: SideInputs, wanted: Wanted) -> Gradients:
        """With the gradients of side inputs. `made`: as of `Pipeline.run`."""
        found = dict(zip(self.pipeline.outputs, made))
        offsets = side.cu_seqlens_k if self.by_key else side.cu_seqlens_q
        learned = learned_gradients(found, side, wanted, offsets, self.own_delta)
        captured = tuple(self._captured_gradient(found, number, of) for number, of in enumerate(side.captured))
        return Gradients(made[0], made[1], made[2], **learned, captured=captured)

    def _captured_gradient(self, found: dict[str, Tensor], number: int, of: Tensor) -> Tensor | None:
        total = found.get(f"sum{number}")
        if total is None:
            return None
        return (total if self.waves is None else total.sum(0)).to(of.dtype)


def gradients_without_keys(
    dlse: Tensor | None, lse: Tensor, side: SideInputs, wanted: Wanted
) -> dict[str, Tensor | None]:
    """The gradients of side inputs of a call without queries, keys or columns. A gradient through lse to rows that see
    a sink is all the sink's."""
    zeros = {
        name: torch.zeros_like(tensor)
        for name, wants, tensor in zip(wanted._fields, wanted, side.learnable)
        if wants and tensor is not None
    }
    if "sinks" in zeros and dlse is not None:
        by_head = torch.where(lse.isneginf(), 0.0, dlse).sum(-1)
        zeros["sinks"] = by_head.sum(0) if by_head.dim() == 2 else by_head
    return {**zeros}


def lse_without_keys(lse: Tensor, side: SideInputs) -> Tensor:
    """The lse of rows that see no key: their sink if there is one, else -inf. Past the last sequence it is -inf."""
    if side.row_logits is None:
        return lse.fill_(float("-inf"))
    lse.copy_(side.row_logits[:, None].expand_as(lse))
    if side.cu_seqlens_q is not None:
        row = torch.arange(lse.shape[-1], device=lse.device)
        lse.masked_fill_(row >= side.cu_seqlens_q[-1], float("-inf"))
    return lse


def _sink_gradient(statistics: Tensor, sinks: Tensor, own_delta: bool) -> Tensor:
    """The gradient of the sinks: minus the sum over rows of what the sink weighs times delta."""
    lse, delta = statistics[..., 0], statistics[..., 1 + own_delta]  # [batch, heads, seq_q], packed [heads, total_q]
    weights = torch.exp2((sinks * _LOG2_E)[:, None] - lse)
    # Rows past the last sequence have no sink, whatever their delta is.
    by_head = torch.where(weights == 0, 0.0, weights * delta).sum(-1)
    return -(by_head if by_head.dim() == 1 else by_head.sum(0))


def slope_gradient(slope_sums: Tensor, side: SideInputs, cu_seqlens: Tensor | None) -> Tensor:
    """The gradient of ALiBi's slopes from minus each row's or key's part, `[batch, heads_q, rows]`, packed `[heads_q,
    rows]` with offsets `cu_seqlens`."""
    if cu_seqlens is None:
        by_sequence = slope_sums.sum(-1)
    elif side.slope_dims == 1:
        by_sequence = slope_sums.sum(-1)[None]
    else:
        offsets = cu_seqlens.long()
        by_sequence = torch.segment_reduce(slope_sums.t().contiguous(), "sum", offsets=offsets, initial=0, unsafe=True)
    return -(by_sequence if side.slope_dims == 2 else by_sequence.sum(0))
