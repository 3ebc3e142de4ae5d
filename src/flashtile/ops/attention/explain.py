"""What a call would run, told without running it: the same choices that a call makes, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from flashtile._backends import devices
from flashtile.ops.attention import checks, cpu, select
from flashtile.ops.attention.api import (
    DENSE_LAYOUT,
    PACKED_LAYOUT,
    Align,
    Window,
    add_block_mask,
    add_descales,
    add_score_inputs,
    build_spec,
    checked_qkv,
    lengths_of,
)
from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.hopper import configs as hopper
from flashtile.ops.attention.hopper.configs import BackwardConfig, HopperConfig, Phase
from flashtile.ops.attention.spec import FP8, AttentionSpec, SideInputs
from flashtile.ops.attention.split import configs as split
from flashtile.ops.attention.triton.configs import (
    Kernel,
    TileConfig,
    choose_tiles,
    is_long,
    shared_memory,
    situation_of,
)
from flashtile.ops.common.backends import BackendChoice
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.split_keys.configs import AttendTiles, Situation, choose_cut
from flashtile.ops.common.split_keys.configs import shared_memory as split_memory


@dataclass(frozen=True)
class KernelChoice:
    """A kernel that a call runs.

    Attributes:
        name: "forward", "dq" or "dkdv"; on Hopper "forward" or "backward", and "widen" before them for 8-bit values; on
            the CPU a description of what computes the call.
        tiles: block sizes, warps and stages; None if the kernel has no tiles of flashtile's.
        shared_memory: estimate of the shared memory of one thread block in bytes; 0 if it uses none.
        backend: the backend of the kernel. Forward and backward may have different ones.
        parts: into how many parts the keys of a sequence are split.
    """

    name: str
    tiles: TileConfig | HopperConfig | BackwardConfig | AttendTiles | None = None
    shared_memory: int = 0
    backend: str = ""
    parts: int = 1

    def __str__(self) -> str:
        tiles = self.tiles
        if tiles is None:
            return self.name
        chunk = ""
        if isinstance(tiles, HopperConfig):
            warps, stages = f"{tiles.consumers} computing warpgroups and a loading warp", tiles.stages
        elif isinstance(tiles, BackwardConfig):
            loading = "and a loading warp" if tiles.producer else "of which one loads"
            warps, stages = f"3 computing warpgroups {loading}", tiles.stages
        else:
            warps, stages = f"{tiles.num_warps} warps", tiles.num_stages
            chunk = f", {tiles.chunk} columns of the head at a time" if tiles.chunk else ""
        parts = f", keys in {self.parts} parts" if self.parts > 1 else ""
        rows = "queries and heads" if isinstance(tiles, AttendTiles) else "queries"
        return (
            f"{self.name} ({self.backend}): {tiles.block_m} {rows} × {tiles.block_n} keys, {warps}, "
            f"{stages} stages, about {self.shared_memory // 1024} KiB of shared memory{chunk}{parts}"
        )


@dataclass(frozen=True)
class Explanation:
    """The answer of `flashtile.explain`.

    Attributes:
        backend: the backend of the forward: "split", "hopper", "triton", "cpu" or "reference"; None if no backend can
            serve the call. `kernels` has the backend of the backward.
        reason: why this backend, or why none.
        kernels: the kernels that the call runs, forward and backward.
        rejected: other backend -> why not.
        device: the architecture or device that was asked about.
    """

    backend: str | None
    reason: str
    kernels: tuple[KernelChoice, ...]
    rejected: dict[str, str] = field(default_factory=dict)
    device: str = ""

    def __str__(self) -> str:
        # Where no backend serves the call, the reasons are those of the backends below.
        reason = f" ({self.reason})" if self.backend else ", no backend serves this call"
        lines = [f"backend: {self.backend or 'none'} on {self.device}{reason}"]
        lines += [f"  {kernel}" for kernel in self.kernels]
        by_reason: dict[str, list[str]] = {}
        for name, why in self.rejected.items():
            by_reason.setdefault(why, []).append(name)
        lines += [f"not {', '.join(names)}: {why}" for why, names in by_reason.items()]
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    align: Align = "bottom_right",
    window: Window | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    key_lengths: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    sinks: Tensor | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    device: torch.device | str | None = None,
    **other_names: NoReturn,
) -> Explanation:
    """Says which backend, kernels and tiles a call would use, why, and why not the others. Runs nothing.

    Args:
        q: as for `attention`, or for `attention_varlen` if `cu_seqlens_q` is given. Tensors on the meta device work,
            because only shapes, strides, dtypes and addresses are read.
        k: the same.
        v: the same.
        cu_seqlens_q: as for `attention_varlen`.
        cu_seqlens_k: the same.
        device: the device to ask about, present or not: "cpu", "cuda", or an architecture such as "sm_90" or "gfx942".
            Default: q's device.

    The other arguments are those of `attention` and `attention_varlen`. `return_lse` does not change the choice. With
    `deterministic`, the gradients come from kernels that sum in a fixed order. Under `torch.autocast` the answer is for
    the autocast dtype, and q, k and v are cast to it.

    Raises:
        TypeError, ValueError: as the call itself, and for an unknown device.
    """
    if other_names:
        refuse_other_names(explain, other_names)
    packed = cu_seqlens_q is not None
    q, k, v = checked_qkv(q, k, v, PACKED_LAYOUT if packed else DENSE_LAYOUT, eight_bits=True)
    dropout_p = checks.resolve_dropout(
        dropout_p, dropout_seed, dropout_seed.device if isinstance(dropout_seed, Tensor) else q.device
    )
    spec = build_spec(q, causal, align, window, scale, dropout_p, deterministic, backend, softcap)
    tables = not (bias is None and mask is None)
    side, batch = lengths_of(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, key_lengths, tables)
    side = side._replace(dropout_seed=dropout_seed)
    if any(tensor is not None for tensor in (bias, mask, alibi_slopes, sinks)):
        sizes = 1 if packed else batch, q.shape[-2], side.max_seqlen_q, side.max_seqlen_k
        side = add_score_inputs(side, q, sizes, bias, mask, alibi_slopes, sinks, batch)
    if block_mask is not None:
        side, spec = add_block_mask(side, spec, q, block_mask)
    if q.dtype is FP8 or not (descale_q is descale_k is descale_v is None):
        side = add_descales(side, q, k, v, batch, descale_q, descale_k, descale_v)
    name, device_type, facts, multiprocessors = _resolve_device(q.device if device is None else device)
    interpreting = device_type == "cpu" and devices.interpreting()
    rows_of_q, rows_of_k, rows_of_v = (_rows_contiguous(t) for t in (q, k, v))

    def choose(phase: Phase) -> BackendChoice:
        call = None
        if device_type == "cuda":
            learned = side.alibi_slopes is not None and side.alibi_slopes.requires_grad
            call = select.hopper_call(phase, facts.arch, rows_of_q, rows_of_k, rows_of_v, side, spec, learned)
        asked = "auto" if backend == "split" and phase == "backward" else backend
        why_not = select.split_obstacle(phase, q, k, side, spec, asked, multiprocessors)
        return select.choose_backend(asked, device_type, q.dtype, devices.triton_missing(), interpreting, call, why_not)

    forward, backward = choose("forward"), choose("backward")
    kernels: tuple[KernelChoice, ...] = ()
    if forward.backend == "split":
        first = _split_kernel(q, k, v, spec, facts, multiprocessors)
        kernels = first, *_kernels("triton", backward.backend, q, k, v, side, spec, facts)[1:]
    elif forward.backend:
        kernels = _kernels(forward.backend, backward.backend, q, k, v, side, spec, facts)
    return Explanation(forward.backend, forward.reason, kernels, forward.rejected, name)


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The layout that kernels get: the operator makes a last dimension contiguous which is not."""
    return tensor if tensor.stride(-1) == 1 else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _resolve_device(device: torch.device | str) -> tuple[str, str, devices.DeviceFacts, int]:
    """Name, device type, facts and multiprocessors of a device or of an architecture."""
    if isinstance(device, str) and device in devices.KNOWN_DEVICES:
        facts = devices.KNOWN_DEVICES[device]
        return device, "cuda", facts, devices.typical_multiprocessors(facts)
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type == "cuda" and torch.cuda.is_available():
        index = found.index if found.index is not None else torch.cuda.current_device()
        here = torch.device("cuda", index)
        facts = devices.device_facts(here)
        return f"{torch.cuda.get_device_name(index)} ({facts.arch})", "cuda", facts, devices.multiprocessors(here)
    if found.type == "cpu":
        return "the CPU", "cpu", devices.INTERPRETER, 1
    raise ValueError(
        f"device: expected 'cpu', a GPU that is present, or one of {', '.join(devices.KNOWN_DEVICES)}, got {device}; "
        "name the architecture to ask about a GPU that is not here"
    )


def _split_kernel(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, facts: devices.DeviceFacts, multiprocessors: int
) -> KernelChoice:
    """The kernel that attends to a part of the keys, and how many parts there are."""
    group = q.shape[2] // max(k.shape[2], 1)
    first, last = split.visible_keys(q.shape[1], k.shape[1], spec)
    rows = q.shape[0] * k.shape[2], q.shape[1] * group
    situation = Situation(q.dtype, q.shape[-1], v.shape[-1], rows[1])
    tiles, splits = choose_cut(situation, rows[0], last - first, facts, multiprocessors)
    return KernelChoice("forward", tiles, split_memory(facts, tiles, situation), "split", splits)


def _kernels(
    forward: str,
    backward: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    facts: devices.DeviceFacts,
) -> tuple[KernelChoice, ...]:
    """The kernels of the backends that serve forward and backward; of 8-bit inputs there is a forward only."""
    if forward == "cpu":
        dtype = torch.float32 if q.dtype is FP8 else q.dtype
        return (KernelChoice(cpu.served_by_torch(spec, side, q.shape, k.shape, v.shape, dtype)[1]),)
    if forward == "reference":
        return (KernelChoice("eager PyTorch, with the whole score matrix in memory"),)
    heads = q.shape[-1], v.shape[-1]
    long = is_long(side.max_seqlen_q, side.max_seqlen_k)
    tables = [table.dtype for table in (side.bias, side.mask) if table is not None]
    situation = situation_of(q.dtype, heads, spec, long, tables)

    def portable(kernel: Kernel) -> KernelChoice:
        tiles = choose_tiles(kernel, facts, situation)
        return KernelChoice(kernel, tiles, shared_memory(kernel, tiles, situation), "triton")

    blocks = spec.block_shape is not None
    if forward == "hopper":
        left, right = spec.window_left is not None, spec.window_right is not None
        config = hopper.choose_config(*heads, side.max_seqlen_q, left, right, blocks, q.dtype)
        first = KernelChoice("forward", config, hopper.shared_memory(config, *heads, q.dtype), forward)
    else:
        first = portable("forward")
    if q.dtype is FP8:
        return (KernelChoice("widen", backend=forward), first) if forward == "hopper" else (first,)
    if backward == "hopper":
        cut = hopper.backward_config_of(*heads, spec)
        return first, KernelChoice("backward", cut, hopper.backward_shared_memory(cut, *heads), backward)
    last = (portable("dbias"),) if side.bias is not None and side.bias.requires_grad else ()
    return first, portable("dq"), portable("dkdv"), *last
