"""Host side of the forward over a cache, and of steps of a few sequences in the batch-invariant mode (`steps`): the
launches of a call that is described as for the portable kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.allocate import allocator
from flashtile._backends.devices import multiprocessors
from flashtile._backends.launch import pointer, pointers
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile._backends.tma import TmaTensor, strided_layout
from flashtile.ops.attention.call import AuxFacts, Call, TensorFacts, current_machine
from flashtile.ops.attention.hopper.cache import CachedRows, Tokens
from flashtile.ops.attention.hopper.configs import (
    CONSUMER_ROWS,
    HopperConfig,
    shared_memory,
    value_parts,
)
from flashtile.ops.attention.hopper.forward import forward_kernel, split_kernels
from flashtile.ops.attention.hopper.launch import tile_counter
from flashtile.ops.attention.hopper.splits import count_splits
from flashtile.ops.attention.hopper.steps import step_kernels
from flashtile.ops.attention.hopper.tuned_rows import forward_config
from flashtile.ops.attention.spec import AttentionSpec
from flashtile.ops.common.checks import check_programs
from flashtile.ops.common.split_keys.configs import MAX_SPLITS, choose_splits
from flashtile.ops.common.split_keys.plan import Segments, SplitCall, shaped_results


class CacheForward(NamedTuple):
    """The launch of a call.

    Attributes:
        pipeline: its kernel, and one that puts splits of the keys together.
        allocate: makes out and lse, where no other kernel has made them.
        dynamic: thread blocks take tiles as they come, and the launch needs counters.
    """

    pipeline: Pipeline
    allocate: Callable[[], list[Tensor]]
    dynamic: bool

    def run(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        results: tuple[Tensor, Tensor] | None,
        others: tuple[Tensor | None, ...],
        length: int,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse). `tensors`: q, k and v. `results`: where to write them. `others`: offsets of packed queries,
        slopes, sinks, lengths, entries, table, offsets of new rows, factors of k and v, and the tree. `length`: of all
        sequences, where no tensor has them."""
        out, lse = results or self.allocate()
        counter = tile_counter(out.device) if self.dynamic else None
        self.pipeline.run(*pointers(tensors), pointer(counter), *pointers((out, lse, *others)), length)
        return out, lse


def plan_chunks(
    call: SplitCall,
    outer: int,
    most_left: int,
    device: torch.device,
    flags: int | None = None,
    by_sequence: bool = False,
    some: bool = False,
) -> CacheForward:
    """Everything that can be decided before the tensors' contents are known.

    Args:
        call: q dense or packed; k and v are the caches.
        outer: entries or pages of these.
        most_left: packed sequences of up to so many queries are left to another kernel.
        flags: the launch is given so many numbers of each query, last before the length, and computes those sequences
            that have another than 0 there; None: all.
        by_sequence: only the packed sequences of one query, whose heads of a group are the rows of a tile.
        some: sequences with a negative entry are left out.
    """
    starts = call.index_dtypes[4]
    results = shaped_results(call)
    described = describe_over_cache(call, outer, device)
    described.check_sizes()
    # A tree hides keys on the right, as a causal mask does.
    right = described.spec.window_right if call.tree is None else 0
    config = forward_config(described._replace(spec=described.spec._replace(window_right=right)))
    tokens = None
    if by_group := by_sequence or (call.shape[1] == 1 and call.cut is not None and call.heads_may_be_rows):
        tokens = None if starts is None else Tokens(starts, call.shape[0], by_sequence)
        call = _heads_as_rows(call)
        described = describe_over_cache(call, outer, device)
        config = _single_consumer_with_stages(config, *described.head_dims)
    tiles = described.tiles(described.rows_q, config.block_m)
    lines = value_parts(described.head_dims[1]) * described.lines
    if tokens is not None and by_sequence:
        lines = lines // described.batch * tokens.sequences
    splits = count_splits(described, config, call.visible, call.shape[0] - call.few_sequences)
    lines *= splits
    check_programs("q", tiles * lines)
    if config.resident > 1 and tiles * lines <= described.multiprocessors:
        # Each has a multiprocessor for itself. Time for 4 × 64 queries over 16,384 rows, an H100: pages of 16 210 to
        # 171 µs, of 64 193 to 170.
        config = _single_consumer_with_stages(config, *described.head_dims)
    programs = min(tiles * lines, config.resident * described.multiprocessors)
    rows = CachedRows.from_call(call, config.block_n, most_left, flags, tokens, some)
    dynamic = tiles * lines > programs
    kernel = forward_kernel(described, config, programs, tiles, lines, dynamic=dynamic, splits=splits, cache=rows)
    buffers = dict.fromkeys(("cu_seqlens_k", "token_starts"), "cu_seqlens_q")
    kernel = kernel._replace(buffers={**buffers, "k_rows": "k", "v_rows": "v"})
    if by_group:
        kernel = kernel._replace(parameters={**kernel.parameters, **_moved_by_group(described, kernel)})
    lengths, entries, _, table, _, new_starts, tree = call.index_dtypes
    factors = [strides is not None for strides in call.descale_strides]
    optional = {
        "cu_seqlens_q": starts, "alibi_slopes": call.slope_dims, "sinks": call.row_logits, "lengths": lengths,
        "entries": entries, "table": table, "new_starts": new_starts, "k_factors": factors[0], "v_factors": factors[1],
        "tree": tree, "flags": flags,
    }  # fmt: skip
    given = "q", "k", "v", "counter", "out", "lse", *(name for name, there in optional.items() if there), "length"
    kernels, scratch = {"forward": kernel}, None
    if splits > 1:
        served = None if starts is None else (starts, call.shape[0], most_left)
        kernels, scratch = split_kernels(described, kernel, splits, served)
    return CacheForward(Pipeline(device, kernels, given, {}, scratch), allocator(results, device), dynamic)


class PrefixPlan(NamedTuple):
    """The launches of a call behind a common prefix, whose segments the forward computes among them."""

    pipeline: Pipeline
    dynamic: bool

    def run(self, tensors: tuple[Tensor | None, ...], length: int) -> tuple[Tensor, Tensor]:
        """(out, lse). `tensors`, q first, and `length`: what `kv_cache.triton.prefix.plan_behind_prefix` is given."""
        q = tensors[0]
        assert q is not None
        counter = tile_counter(q.device) if self.dynamic else None
        out, lse, *_ = self.pipeline.run(*pointers(tensors), pointer(counter), length)
        return out, lse


def plan_segments(call: SplitCall, outer: int, device: torch.device) -> Segments:
    """The forward of all queries over the first rows of sequence 0, which they all see, in segments that fill a GPU.

    Args:
        call: of one sequence, whose rows are query heads of a group and queries; q `[segments, heads, rows, head_dim]`
            and out `[segments, heads, rows, head_dim_v]` are contiguous.
        outer: entries or pages of the caches.
    """
    _, rows, heads, _, head_dim, head_dim_v = call.shape
    many = describe_over_cache(call._replace(shape=(MAX_SPLITS, *call.shape[1:])), outer, device)
    config = forward_config(many)
    # Keys are long, and come from far. Time for 256 rows of 8 heads of 128, 32,768 keys in pages of 16, an H200: three
    # stages of keys instead of two 56.1 to 50.2 µs.
    config = (_single_consumer_with_stages if rows <= CONSUMER_ROWS else _with_all_stages)(config, head_dim, head_dim_v)
    key_tiles = -(-call.capacity // config.block_n)
    lines = value_parts(head_dim_v) * heads
    slots = config.resident * many.multiprocessors
    segments = choose_splits(many.tiles(rows, config.block_m) * lines, key_tiles, slots)
    whole = math.lcm(config.block_n, call.page_size or 1)
    segment = -(-call.capacity // (segments * whole)) * whole
    segments = -(-call.capacity // segment)
    q_strides = heads * rows * head_dim, head_dim, rows * head_dim
    caches = call.strides[1:]
    if not call.page_size:
        caches = tuple((segment * row, row, head) for _, row, head in caches)
        outer = segments
    call = call._replace(
        shape=(segments, *call.shape[1:]), strides=(q_strides, *caches), capacity=segment,
        stride_table=segment // call.page_size if call.page_size else 0,
    )  # fmt: skip
    described = describe_over_cache(call, outer, device)
    described.check_sizes()
    tiles = described.tiles(rows, config.block_m)
    check_programs("q", tiles * lines * segments)
    programs = min(tiles * lines * segments, slots)
    dynamic = tiles * lines * segments > programs
    cached = CachedRows.from_call(call, config.block_n, 0)
    kernel = forward_kernel(described, config, programs, tiles, lines * segments, dynamic=dynamic, cache=cached)
    buffers = {"q": "rows", "k": "k_cache", "v": "v_cache", "out": "prefix_out"}
    moved = {**kernel.parameters, **_moved_by_group(described, kernel)}
    parameters = {
        name: of._replace(buffer=buffers.get(of.buffer, of.buffer)) if isinstance(of, TmaTensor) else of
        for name, of in moved.items()
    }
    kernel = kernel._replace(
        parameters=parameters,
        buffers={
            "lse_ptr": "prefix_lse", "lengths": "prefix_lengths", "k_rows": "k_cache", "v_rows": "v_cache",
        },
    )  # fmt: skip
    return Segments(kernel, segments, segment, dynamic)


def _heads_as_rows(call: SplitCall) -> SplitCall:
    """The call of each query by itself, with so many of fewer heads. Each sees all keys, behind the same comparison as
    in a chunk."""
    batch, _, heads, heads_kv, head_dim, head_dim_v = call.shape
    group = heads // heads_kv
    (batch_stride, row_stride, head_stride), *others = call.strides
    token_stride = batch_stride if call.total_q is None else row_stride
    strides = (token_stride, head_stride, group * head_stride), *others
    right = None if call.window_right is None else max(call.window_right, group - 1)
    shape = (call.total_q or batch, group, heads_kv, heads_kv, head_dim, head_dim_v)
    lengths, entries, left, table, _, new_starts, tree = call.index_dtypes
    return call._replace(
        shape=shape, strides=strides, window_right=right, total_q=None,
        index_dtypes=(lengths, entries, left, table, None, new_starts, tree),
    )  # fmt: skip


def _moved_by_group(described: Call, kernel: Kernel) -> dict[str, TmaTensor]:
    """The descriptors of out, whose heads of a group lie side by side."""
    _, group, heads_kv, head_dim_v = described.out_shape
    row, line = head_dim_v, group * head_dim_v
    layout = strided_layout(described.out_shape, (heads_kv * line, row, line, 1))
    names = "out_desc", "out_tail_desc"
    return {name: kernel.parameters[name]._replace(layout=layout) for name in names}


def describe_over_cache(call: SplitCall, outer: int, device: torch.device) -> Call:
    """The call as attention of its queries, packed or dense, to entries or pages."""
    batch, seq_q, heads, heads_kv, head_dim, head_dim_v = call.shape
    packed = call.total_q is not None
    queries = (batch, seq_q) if call.total_q is None else (call.total_q,)
    rows = call.page_size or call.capacity
    starts = call.index_dtypes[4]
    q_strides, k_strides, v_strides = ((*strides, 1) for strides in call.strides)

    def facts(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorFacts:
        return TensorFacts(call.dtype, shape, strides, call.misalignment)

    offsets = None if starts is None else TensorFacts(starts, (batch + 1,), (1,))
    by_head = {"alibi_slopes": (batch, heads)[2 - call.slope_dims :], "sinks": (heads,)[not call.row_logits :]}
    modifiers: Any = {name: TensorFacts(torch.float32, of, (1,) * len(of)) for name, of in by_head.items() if of}
    return Call(
        "auto",
        "forward",
        AttentionSpec(
            call.scale,
            window_left=call.window_left,
            window_right=call.window_right,
            softcap=call.softcap,
            batch_invariant=call.cut is not None,
        ),
        q=facts((*queries, heads, head_dim), q_strides[packed:]),
        k=facts((outer, rows, heads_kv, head_dim), k_strides),
        v=facts((outer, rows, heads_kv, head_dim_v), v_strides),
        aux=AuxFacts(offsets, offsets, seq_q, call.capacity)._replace(**modifiers),
        machine=current_machine(device),
        device=device,
    )


#: The indices that a run of steps is given, in order.
_STEP_INDICES = ("starts", "lengths", "entries", "table", "new_starts")


class StepsPlan(NamedTuple):
    """The launches of a call.

    Attributes:
        pipeline: weights, and sums of values.
        again: the forward, of the sequences that need it.
    """

    pipeline: Pipeline
    again: CacheForward

    def run(
        self, tensors: tuple[Tensor, Tensor, Tensor], others: tuple[Tensor | None, ...], length: int
    ) -> tuple[Tensor, Tensor]:
        """(out, lse). `tensors`, `others`, `length`: as in `CacheForward.run`."""
        starts, _, _, *rows = others
        given = pointers((*tensors, starts, *rows))
        out, lse, flags, *_ = self.pipeline.run(*given, length)
        return self.again.run(tensors, (out, lse), (*others, flags), length)


def plan_steps(call: SplitCall, outer: int, device: torch.device) -> StepsPlan:
    """Everything that can be decided before the tensors' contents are known. `outer`: entries or pages of the
    caches."""
    described = describe_over_cache(call, outer, device)
    config = forward_config(described)
    rows = CachedRows.from_call(call, config.block_n, 0)
    kernels, outputs, scratch = step_kernels(call, described, config, rows, multiprocessors(device))
    given = "q", "k", "v", *(name for name in _STEP_INDICES if name in call.indices), "length"
    pipeline = Pipeline(device, kernels, given, outputs, scratch)
    return StepsPlan(pipeline, plan_chunks(call, outer, 0, device, flags=outputs["flags"].shape[1]))


def _single_consumer_with_stages(config: HopperConfig, head_dim: int, head_dim_v: int) -> HopperConfig:
    """One consumer, and as many stages as fit: for few rows and many 16-bit keys. The bits of a row stay."""
    alone = config._replace(consumers=1, in_turn=False, registers=240, max_registers=168, resident=1)
    return _with_all_stages(alone, head_dim, head_dim_v)


def _with_all_stages(config: HopperConfig, head_dim: int, head_dim_v: int) -> HopperConfig:
    """As many stages as there is room for, of keys of 16 bits."""
    cuts = [config._replace(stages=stages) for stages in range(config.stages, 2 * config.stages + 3)]
    return next((cut for cut in reversed(cuts) if shared_memory(cut, head_dim, head_dim_v) <= cut.room), config)
