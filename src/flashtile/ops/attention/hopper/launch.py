"""Host side of the Hopper kernels: the pipelines of forward and backward. The backend module that `select` names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import aligned
from flashtile._backends.allocate import Layout, contiguous, contiguous_strides
from flashtile._backends.launch import Plan, named_constants, plan_cache, pointer_to
from flashtile._backends.pipeline import ADDRESS, Kernel, Pipeline
from flashtile._backends.tma import TmaTensor, row_layout
from flashtile.ops.attention.call import Call, describe_backward, describe_call
from flashtile.ops.attention.gpu.parameters import (
    aux_buffers,
    aux_tensors,
    contiguous_on_16_bytes,
    positive_scale,
    side_parameters,
)
from flashtile.ops.attention.gpu.plan import plan_bias_gradient
from flashtile.ops.attention.gpu.reductions import (
    BackwardPlan,
    bias_sum_kernel,
    captured_sums,
    gradients_without_keys,
    lse_without_keys,
)
from flashtile.ops.attention.gpu.tile_configs import key_tile_shares
from flashtile.ops.attention.hopper.backward import main_kernel
from flashtile.ops.attention.hopper.backward_configs import bias_gradient_by
from flashtile.ops.attention.hopper.backward_dq import begin_kernel, end_kernel
from flashtile.ops.attention.hopper.backward_loads import (
    backward_pipeline,
    gradient_layouts,
    padded_strides,
    scratch_shapes,
)
from flashtile.ops.attention.hopper.bias_gradient import bias_gradient_kernel, cut_bias_work
from flashtile.ops.attention.hopper.captured_gradient import captured_gradient_kernel
from flashtile.ops.attention.hopper.configs import (
    CONSUMER_ROWS,
    PRODUCER_REGISTERS,
    SHORT,
    HopperConfig,
    value_parts,
)
from flashtile.ops.attention.hopper.convert import Operand, convert_kernel, split_operands
from flashtile.ops.attention.hopper.few_tiles import tiles_of_longest
from flashtile.ops.attention.hopper.float32_backward import attention_float32_dk_dq_kernel, attention_float32_dv_kernel
from flashtile.ops.attention.hopper.float32_forward import float32_forward_kernels
from flashtile.ops.attention.hopper.float32_wide_backward import (
    attention_float32_wide_dk_dq_kernel,
    attention_float32_wide_dv_kernel,
)
from flashtile.ops.attention.hopper.forward import forward_kernel, split_kernels
from flashtile.ops.attention.hopper.schedule import BackwardSchedule
from flashtile.ops.attention.hopper.separate_configs import (
    CHUNK,
    MAX_REGISTERS,
    REGISTERS,
    STATISTIC_ROWS,
    WIDTH,
    Float32WideConfig,
    WideBackwardConfig,
    is_wide,
    separate_cut,
)
from flashtile.ops.attention.hopper.splits import forward_splits
from flashtile.ops.attention.hopper.tuned_rows import forward_config
from flashtile.ops.attention.hopper.wide_backward import Problem, attention_wide_dk_dq_kernel, attention_wide_dv_kernel
from flashtile.ops.attention.spec import (
    FP8,
    AttentionSpec,
    Aux,
    AuxForm,
    BackwardInputs,
    Gradients,
    RunBackward,
    SideInputs,
    Wanted,
    out_dtype,
)
from flashtile.ops.common.checks import check_programs

#: From so many keys on programs take even tiles as they come too. A multiprocessor may be held by a kernel of another
#: stream, such as a transfer: the program that waits for it starts late, and nobody else would take its share.
_LONG_KEYS = 4096

#: Up to so many queries or keys they do too, because memory limits a call. Programs that take their shares in turn keep
#: step, and load at the same time. Then memory waits while they compute, and a line of 128 bytes that two heads have in
#: common is read twice. `_keep_keys_near` has the exception.
_SHORT_ROWS = 511


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Runs the forward kernels: (out, lse), or (out, lse, max_scores)."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    if not ends_by_rows(k, v, side):
        k, v = by_whole_rows(k), by_whole_rows(v)
    plan = plan_forward(describe_call("forward", (q, k, v), side, spec))
    side = with_aligned_lists(side)
    out, lse, *max_scores = plan.runner()(q, k, v, aux_tensors(side))
    if not plan.kernel.programs:
        nothing_seen = (scores.fill_(float("-inf")) for scores in max_scores)
        return out.zero_(), lse_without_keys(lse, side), *nothing_seen
    return out, lse, *max_scores


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor, Aux], tuple[Tensor, ...]] | None:
    """`forward` of all 16-bit calls that look like this one, from q, k, v and the tensors beside them; or None."""
    if not _preparable(k, v, side, spec):
        return None
    plan = plan_forward(describe_call("forward", (q, k, v), side, spec))
    return plan.runner() if plan.kernel.programs else None


def backward(inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> Gradients:
    """Runs the kernels. The portable one computes the gradient of a bias that the Hopper one does not serve. The sums
    of dq, and where walks meet dk and dv, are added up in no fixed order unless `spec.deterministic`; gradients of what
    a score function reads always are (`unsupported_reason` of the package)."""
    dout, dlse, q, k, v, out, lse = inputs
    if not q.numel() or not k.numel() or not v.numel():
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        learned = gradients_without_keys(dlse, lse, side, wanted)
        given = zip(side.captured, wanted.captured)
        captured = tuple(torch.zeros_like(of) if wants else None for of, wants in given)
        return Gradients(dq, dk, dv, **learned, captured=captured)
    sign = 1
    if spec.scale <= 0:
        q, spec, sign = positive_scale(q, spec)
    if not ends_by_rows(k, v, side):
        k, v = by_whole_rows(k), by_whole_rows(v)
    # dout comes from whatever followed; where TMA cannot read it as it lies, a copy is read.
    dout = dout if aligned(dout) else dout.clone(memory_format=torch.contiguous_format)
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    side = with_aligned_lists(side)
    out = contiguous_on_16_bytes(out)
    plan = plan_backward(describe_backward(BackwardInputs(dout, dlse, q, k, v, out, lse), side, spec, wanted))
    grads = plan.runner(AuxForm.from_side(side), wanted)(dout, dlse, (q, k, v, out, lse, *aux_tensors(side)))
    return grads if sign == 1 else grads._replace(q=grads.q.mul_(sign))


def prepare_backward(
    inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> RunBackward | None:
    """`backward` of all 16-bit calls that look like this one; or None."""
    dout, _, q, k, v, *_ = inputs
    if not (_preparable(k, v, side, spec) and q.numel() and k.numel() and v.numel() and aligned(dout)):
        return None
    return plan_backward(describe_backward(inputs, side, spec, wanted)).runner(AuxForm.from_side(side), wanted)


def _preparable(k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> bool:
    """Whether plans depend on no more than how tensors lie, and kernels read the tensors themselves."""
    return k.dtype is not torch.float32 and spec.scale > 0 and ends_by_rows(k, v, side)


def with_aligned_lists(side: SideInputs) -> SideInputs:
    """With the lists of the block mask at a multiple of 16 bytes: a copy of those that are not. Who passes on its
    addresses keeps it until the launch, or what is allocated meanwhile takes the place of the copy."""
    lists = side.block_lists
    return side if lists is None or lists.data_ptr() % 16 == 0 else side._replace(block_lists=lists.clone())


def by_whole_rows(tensor: Tensor) -> Tensor:
    """k or v whose batch entries lie whole rows apart, so that TMA can tell where the keys of each end."""
    batch_stride, row_stride, *_ = tensor.stride()
    one = tensor.shape[0] == 1 or tensor.shape[1] == 1 or not tensor.numel()
    return tensor if one or (row_stride and batch_stride % row_stride == 0) else tensor.contiguous()


def ends_by_rows(k: Tensor, v: Tensor, side: SideInputs) -> bool:
    """Whether TMA can tell where the keys of each batch entry end, as k and v lie; so it is without key lengths."""
    bounded = side.key_lengths is not None and side.cu_seqlens_k is None
    return not bounded or (by_whole_rows(k) is k and by_whole_rows(v) is v)


def tile_counter(device: torch.device) -> Tensor:
    """Two int32 zeros, which the last program of a launch sets back to zero.

    Launches that may run at the same time must not share them. Launches of one stream run one after the other; but a
    graph that is being captured may later run on any stream, beside eager calls on this one, so it gets its own.
    """
    if torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            return tile_counter(device)
    if torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    return _stream_counter(device, torch._C._cuda_getCurrentRawStream(device.index))


@functools.cache
def _stream_counter(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


class ForwardPlan(NamedTuple):
    """The launches of a forward. `pipeline`: its first outputs are out, lse and max_scores. `results`: how many of
    these a call returns. `dynamic`: programs take tiles as they come, and the launch needs counters."""

    pipeline: Pipeline
    results: int = 2
    dynamic: bool = False

    @property
    def kernel(self) -> Plan:
        """The launch of the kernel that computes out."""
        return self.pipeline.plans["forward"]

    def runner(self) -> Callable[[Tensor, Tensor, Tensor, Aux], tuple[Tensor, ...]]:
        """The function that enqueues the kernels, and returns what `forward` does."""
        run_kernels, results, dynamic, device = self.pipeline.run, self.results, self.dynamic, self.kernel.device

        def run(q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, ...]:
            counter = tile_counter(device) if dynamic else None  # held while results are allocated: not their memory
            of_counter = 0 if counter is None else ADDRESS(counter)
            made = run_kernels(ADDRESS(q), ADDRESS(k), ADDRESS(v), of_counter, *map(ADDRESS, aux))
            return (*made[:results],)

        return run


@plan_cache
def plan_forward(call: Call) -> ForwardPlan:
    """Everything that can be decided before the tensors' contents are known."""
    call.check_sizes()
    spec, dtype = call.spec, call.dtype
    given, rows = ("q", "k", "v", "counter", *aux_buffers(call)), contiguous(call.lse_shape, torch.float32)
    outputs: dict[str, Layout | None] = {"out": contiguous(call.out_shape, out_dtype(dtype)), "lse": rows}
    if dtype is torch.float32:
        kernels, parts = float32_forward_kernels(call)
        return ForwardPlan(Pipeline(call.device, kernels, given, {**outputs, **parts}))
    config = forward_config(call)
    splits = forward_splits(call, config)
    lines = value_parts(call.head_dims[1]) * call.lines * splits
    tiles, sizes = call.tiles(call.whole_sizes[0], config.block_m), (call.rows_q, call.rows_k)
    even, by_sequence = not call.bounded, _numbered_by_sequence(call, config.block_m)
    if by_sequence:
        tiles, lines = tiles_of_longest(call, config.block_m), lines * (call.batch + 1)
        if tuple(call.batch * longest for longest in call.max_seqlens) == sizes:
            even, sizes = call.aux.key_lengths is None, call.max_seqlens
    check_programs("q", tiles * lines)
    has_work = 0 not in call.q.shape and call.rows_k
    programs = min(tiles * lines, config.resident * call.multiprocessors) if has_work else 0
    # If tiles are alike, each program takes its share in turn, which needs no atomics.
    padded = call.aux.mask is not None and call.aux.mask.by_key
    uneven = not even or spec.banded or call.aux.block_lists is not None or padded
    short = min(sizes) <= _SHORT_ROWS and not _keep_keys_near(config, sizes[0])
    dynamic = (uneven or sizes[1] >= _LONG_KEYS or short) and tiles * lines > programs
    kernel = forward_kernel(
        call, config, programs, tiles, lines, dynamic=dynamic, splits=splits, by_sequence=by_sequence
    )
    kernels, scratch = {"forward": kernel}, None
    if splits > 1:
        kernels, scratch = split_kernels(call, kernel, splits)
    outputs["max_scores"] = rows if spec.returns_max_scores else None
    if dtype is FP8 and programs:
        values = Operand("v", call.v.shape, call.v.strides, call.head_dims[1])
        kernels = {"widen": convert_kernel("v", values, FP8, "wide_v"), **kernels}
        outputs["wide_v"] = contiguous(call.v.shape, torch.bfloat16)
    pipeline = Pipeline(call.device, kernels, given, outputs, scratch)
    return ForwardPlan(pipeline, 3 if spec.returns_max_scores else 2, dynamic and programs > 0)


def _numbered_by_sequence(call: Call, block_m: int) -> bool:
    """Whether each sequence of a packed call has as many numbers of tiles as the longest, as in a dense call: where
    sequences are about equally long, those are no more than its slots, and nobody looks for a tile's sequence. One that
    is longer than the caller said is computed too (`forward_producer.following_tile`). Not where there are more rows
    than sequences can have, because a single thread block would store what is past the last one, for each head."""
    if not call.packed or call.spec.block_shape is not None:
        return False
    fits = call.rows_q <= call.batch * call.max_seqlens[0]
    return fits and (call.batch + 1) * tiles_of_longest(call, block_m) <= call.tiles(call.rows_q, block_m)


def _keep_keys_near(config: HopperConfig, rows_q: int) -> bool:
    """Whether the tiles of a short sequence are full ones of a single consumer. If programs take them in turn, those of
    a head run on neighbouring multiprocessors. These are on the same side of the L2 cache, which keys reach once. Time
    of tiles as they come over that, on an H200 and an H100: 128 × 128 tokens, 32 heads of 64, 1.09 and 0.97; 64 × 128,
    12 heads, 1.11 and 1.00; 128 × 256, 16 heads, 1.02 and 1.04. But 416 × 96, whose second tiles are half full, 0.97
    and 0.91."""
    return config.resident > 1 and rows_q <= SHORT and rows_q % config.block_m == 0


@plan_cache
def plan_backward(call: Call) -> BackwardPlan:
    """The launches of a backward. Wide heads, and float32, have a kernel for each gradient."""
    call.check_sizes()
    if call.dtype is torch.float32 or is_wide(*call.head_dims):
        return BackwardPlan(separate_pipeline(call), by_key=True)
    schedule = BackwardSchedule.from_call(call)
    config, by = schedule.config, bias_gradient_by(schedule.config, call)
    tile, query_tiles = config.block_m, schedule.query_tiles
    begin = begin_kernel(call, tile, query_tiles, schedule=schedule, row_statistics=by == "portable")
    kernels = {"begin": begin, "main": main_kernel(call, schedule)}
    if schedule.adds_up:
        kernels["end"] = end_kernel(call, schedule)
    of_bias, stored = _bias_gradient(call, schedule)
    # The main kernel stores the gradients of the scores that it computes.
    all_stored = not (call.spec.banded or call.aux.key_lengths is not None or call.spec.block_shape is not None)
    sizes = {name: math.prod(shape) for name, shape in scratch_shapes(call, schedule).items()}
    if config.statistics_multiplied:
        sizes["statistics"] //= 2  # in 16 bits
    sizes |= {
        "counter": 1 + (call.lines if schedule.loops.SHARES_PROGRESS else 0),
        "semaphores": begin.programs if schedule.is_ordered(call) else 0,
        "order": 2 * call.batch + 3 if call.packed else 0,
    }
    zeroed = {"slope_sums"} if all_stored or not config.bias_stored else {"slope_sums", "dbias"}
    of_captured, sums = _captured_gradients(call, schedule)
    gradients, kernels = gradient_layouts(call, schedule.shares), {**kernels, **of_bias, **of_captured}
    pipeline = backward_pipeline(
        call, kernels, gradients, schedule.shares, sizes, {**stored, **sums}, zeroed | sums.keys()
    )
    return BackwardPlan(pipeline, by_key=True)


def _bias_gradient(call: Call, schedule: BackwardSchedule) -> tuple[dict[str, Kernel], dict[str, Layout]]:
    """The kernels of the gradient of a bias that follow the main one, and what all store for it."""
    bias, by = call.aux.bias, bias_gradient_by(schedule.config, call)
    if bias is None or by is None:
        return {}, {}
    if by == "backward":
        return {}, {"dbias": Layout(bias.shape, padded_strides(bias.shape), bias.dtype)}
    if by == "portable":
        read = "masked_dout" if call.may_hide_rows else "dout"
        found = plan_bias_gradient(call, statistics_ptr="row_statistics", dout_ptr=read)
        return found.kernels, {**found.outputs, "row_statistics": contiguous((*call.lse_shape, 4), torch.float32)}
    work = cut_bias_work(call)
    kernels = {"bias": bias_gradient_kernel(call, schedule, work)}
    stored = {"dbias": contiguous(bias.shape, bias.dtype)}
    if work.parts > 1:
        kernels["bias_sum"] = bias_sum_kernel(work.parts, bias)
        stored["bias_parts"] = contiguous((work.parts, *bias.shape), torch.float32)
    return kernels, stored


def _captured_gradients(call: Call, schedule: BackwardSchedule) -> tuple[dict[str, Kernel], dict[str, Layout]]:
    """The kernel of the gradients of tensors that a score function reads, and what is zero before it: its sums, and the
    number of tiles that are taken."""
    if not any(call.wanted.captured):
        return {}, {}
    counter = contiguous((1,), torch.int32)
    return {"captured": captured_gradient_kernel(call, schedule)}, {**captured_sums(call), "captured_counter": counter}


# Separate kernels for dv, dk and dq: wide heads, and float32

#: Rows of a program of dk or dq.
_ROWS = CONSUMER_ROWS

#: Tiles of statistics that a product reads at once.
_STATISTICS_TOGETHER = CONSUMER_ROWS // STATISTIC_ROWS

#: The descriptors that each kernel takes, and the tensors that they are of.
_MOVED = {
    "dv": {"k_desc": "k", "q_desc": "q", "dout_desc": "dout", "dv_desc": "dv"},
    "dk": {
        "own_scores_desc": "k",
        "own_values_desc": "v",
        "visited_scores_desc": "q",
        "visited_values_desc": "dout",
        "gradient_desc": "dk",
    },
    "dq": {
        "own_scores_desc": "q",
        "own_values_desc": "dout",
        "visited_scores_desc": "k",
        "visited_values_desc": "v",
        "gradient_desc": "dq",
    },
}


class _Family(NamedTuple):
    """The kernels that serve a call.

    Attributes:
        of_dv, of_dk_dq: constants of either kernel, of its own.
        dv_parts: thread blocks among which a tile of dv is divided.
        moved: what TMA moves, by name; dq, dk and dv too if it stores them.
        gradients: layouts of dq, dk and dv, of these in shares.
        splits: kernels that write the parts of the operands, and `parts`: the layouts of these.
    """

    dv: Any
    dk_dq: Any
    of_dv: dict[str, Any]
    of_dk_dq: dict[str, Any]
    moved: dict[str, TmaTensor]
    gradients: dict[str, Layout]
    dv_parts: int = 1
    splits: Mapping[str, Kernel] = {}
    parts: Mapping[str, Layout | None] = {}


def separate_pipeline(call: Call) -> Pipeline:
    """The pipeline of a backward."""
    spec, packed = call.spec, call.packed
    cut = separate_cut(*call.head_dims, call.dtype)
    own_rows = {"dv": (call.rows_k, cut.keys_of_dv), "dk": (call.rows_k, _ROWS), "dq": (call.rows_q, _ROWS)}
    tiles = {name: call.tiles(*rows) for name, rows in own_rows.items()}
    shares = key_tile_shares(call, _ROWS, cut.keys_of_dv, uneven=spec.banded or call.cut_by.bounded)
    if isinstance(cut.config, WideBackwardConfig):
        family = _wide_family(call, shares, cut.config)
    else:
        family = _float32_family(call, shares, cut.config)
    statistic_tiles = tiles["dq"] * _STATISTICS_TOGETHER
    together = _STATISTICS_TOGETHER if packed else 1
    # Tiles of `STATISTIC_ROWS` queries, of which every 64 are whole.
    kernels = {"begin": begin_kernel(call, STATISTIC_ROWS, statistic_tiles, together=together), **family.splits}
    side = side_parameters(call, covered=False, by_column=True, staged=True)
    lengths = call.aux.key_lengths is not None
    masks = {
        **dict.fromkeys(("dv", "dk"), spec.banded or lengths),
        "dq": spec.banded or call.bounded or call.rows_k % _ROWS != 0,
    }
    for name, moved in _MOVED.items():
        lines = call.lines if name == "dq" else call.lines_kv * shares
        programs = tiles[name] * lines * (family.dv_parts if name == "dv" else 1)
        check_programs("q", programs)
        stored = name if name == "dq" or shares == 1 else f"{name}_shares"
        parameters = {
            **{parameter: family.moved[of] for parameter, of in moved.items() if of in family.moved},
            **dict.fromkeys(("dv_ptr", "gradient_ptr"), pointer_to(torch.float32, 16)),
            "statistics_ptr": pointer_to(torch.float32, 16),
            "problem": Problem.from_call(call, side.pointers, shares, tiles[name], statistic_tiles),
        }
        constants = {
            "REGISTERS": REGISTERS,
            "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
            "HAS_LEFT": spec.window_left is not None,
            "HAS_RIGHT": spec.window_right is not None,
            "TOP_LEFT": spec.banded and spec.top_left,
            "MASKS": masks[name],
            "OF_KEYS": name == "dk",
            **(family.of_dv if name == "dv" else family.of_dk_dq),
        }
        function = family.dv if name == "dv" else family.dk_dq
        buffers = {"dv_ptr": stored, "gradient_ptr": stored}
        kernels[name] = Kernel(function, parameters, constants, programs, buffers, max_registers=MAX_REGISTERS)
    scratch = {"statistics": 2 * STATISTIC_ROWS * statistic_tiles * call.lines, "counter": 1}
    return backward_pipeline(call, kernels, family.gradients, shares, scratch, family.parts)


def _read(call: Call) -> dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Buffers, shapes and strides of the rows that kernels read, by name."""
    assert call.dout is not None
    given = {"q": call.q, "k": call.k, "v": call.v, "dout": call.dout._replace(shape=call.out_shape)}
    read = {name: (name, of.shape, of.strides) for name, of in given.items()}
    if call.may_hide_rows:
        read["dout"] = "masked_dout", call.out_shape, contiguous_strides(call.out_shape)
    return read


def _wide_family(call: Call, shares: int, config: WideBackwardConfig) -> _Family:
    """Heads wider than 256 columns."""
    gradients = gradient_layouts(call, shares)
    stored = {
        name: (name if name == "dq" or shares == 1 else f"{name}_shares", of.shape, of.strides)
        for name, of in gradients.items()
    }
    moved = {}
    for name, (buffer, shape, strides) in {**_read(call), **stored}.items():
        ends = call.packed if name in ("q", "dout", "dq") else call.bounded
        box = (1,) * (1 + ends) + (CONSUMER_ROWS, 1, CHUNK)
        moved[name] = TmaTensor(buffer, call.dtype, box, row_layout(shape, strides, ends))
    constants = named_constants(config)
    dv, dk_dq = attention_wide_dv_kernel, attention_wide_dk_dq_kernel
    return _Family(dv, dk_dq, constants, constants, moved, gradients, config.parts)


def _float32_family(call: Call, shares: int, config: Float32WideConfig | None) -> _Family:
    """Products of parts in bfloat16. `config`: of wide heads."""
    head_dim, head_dim_v = call.head_dims
    dv, dk_dq, columns = attention_float32_dv_kernel, attention_float32_dk_dq_kernel, WIDTH
    width, value_width, cut = WIDTH, WIDTH, {}
    if config is not None:
        dv, dk_dq, columns = attention_float32_wide_dv_kernel, attention_float32_wide_dk_dq_kernel, CHUNK
        width, value_width, cut = config.chunks * CHUNK, config.value_chunks * CHUNK, named_constants(config)
    widths = {"q": width, "k": width, "v": value_width, "dout": value_width}
    operands = {name: Operand(*read, widths[name]) for name, read in _read(call).items()}
    kernels, parts, moved = split_operands(operands, CONSUMER_ROWS, columns)
    gradients = {name: contiguous(of.shape, call.dtype) for name, of in gradient_layouts(call, shares).items()}
    of_dv, of_dk_dq = {"HEAD_DIM_V": head_dim_v, **cut}, {"HEAD_DIM": head_dim, **cut}
    return _Family(dv, dk_dq, of_dv, of_dk_dq, moved, gradients, splits=kernels, parts=parts)
