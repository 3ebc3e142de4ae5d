"""The backend "hopper", kernels for sm_90: which calls it serves, and the kernels that it runs. No Triton here."""

from __future__ import annotations

import torch

from flashtile.ops.attention.call import Call, KernelChoice, summarise
from flashtile.ops.attention.gpu.score_source import unsupported_operation
from flashtile.ops.attention.gpu.tile_configs import SHORT, describe_kernel, kernel_tiles, length_class
from flashtile.ops.attention.hopper import backward_configs, configs
from flashtile.ops.attention.hopper import separate_configs as float32_configs
from flashtile.ops.attention.hopper.backward_configs import BackwardConfig, dq_epilogue
from flashtile.ops.attention.hopper.configs import MAX_HEAD_DIM, MAX_HEAD_DIM_8
from flashtile.ops.attention.hopper.separate_configs import (
    HALF_WIDE,
    NARROW,
    choose_float32_forward_config,
    is_wide,
    parts_pay,
    separate_cut,
    shared_rows_memory,
)
from flashtile.ops.attention.hopper.splits import forward_splits
from flashtile.ops.attention.hopper.tuned_rows import backward_config, forward_config, row_from
from flashtile.ops.attention.spec import FP8
from flashtile.ops.common.backends import Backend

#: The kernel ahead of those of float32.
_PARTS = KernelChoice("parts", backend="hopper", summary="each number as three of bfloat16")


def unsupported_reason(call: Call) -> str | None:
    """Why the Hopper kernels cannot serve a call; None where they can."""
    if call.phase == "column_sums":
        return "it has no kernel for column sums; backend='triton' has one, on sm_90 too"
    if call.device_type != "cuda":
        return f"its kernels are for sm_90, and the tensors are on {call.device_type}"
    if call.triton_missing:
        return call.triton_missing
    if call.interpreting:
        return "Triton's interpreter does not know the language of its kernels"
    if call.arch != "sm_90":
        return f"its kernels are for sm_90, and the tensors are on {call.arch}"
    if call.dtype is torch.float32:
        reason = _unserved_float32(call)
        if reason:
            return reason
    elif call.dtype not in (torch.float16, torch.bfloat16, FP8):
        dtype = str(call.dtype).removeprefix("torch.")
        return f"its kernels take float16, bfloat16, float32 and float8_e4m3fn, not {dtype}"
    return _unsupported_feature(call) or _unreadable(call) or _slower(call)


def _slower(call: Call) -> str | None:
    """The reason for which `backend="auto"` prefers the portable kernels. Milliseconds on an H200, hopper and triton:

    - 4,096 windows of 49 tokens, 6 heads of 32 (on an H100): 0.32 and 0.15, backward 0.59 and 0.32; with a bias that
      learns 0.52 and 0.23, backward 0.78 and 0.36. 512 sequences of 64 tokens, 12 heads of 64: 0.10 and 0.06, backward
      0.22 and 0.18.
    - A bias that TMA does not bring, 64 sequences of 768 tokens, 4 heads of 32: 0.13 and 0.11, backward 0.65 and 0.60.
      32 sequences of 512, 12 heads of 64: 0.12 and 0.10, but backward 0.45 and 0.48. (If TMA brings it, 0.09 instead of
      the 0.13, and backward 0.33 instead of the 0.65.)
    """
    widest = max(call.head_dims)
    if call.requested != "auto" or call.spec.batch_invariant:
        return None
    if call.dtype is torch.float32 and call.phase == "forward" and not parts_pay(call):
        return f"with heads of up to {HALF_WIDE} columns, parts of float32 numbers pay with more keys or fewer queries"
    if call.packed or widest > 64:
        return None
    if length_class(call.rows_q, call.rows_k) == "short":
        return f"with {SHORT} queries and keys or fewer the tiles of the portable kernels are less empty"
    bias = call.aux.bias
    has_each_score, moved = bias is not None and bias.has_each_score, configs.moves_by_tma(bias, call.dtype)
    if has_each_score and not moved and (call.phase == "forward" or widest <= 32):
        aligned = "unless it has q's dtype and rows at multiples of 16 bytes"
        return f"with so narrow heads the portable kernels add a bias faster, {aligned}"
    return None


def _unsupported_feature(call: Call) -> str | None:
    widest = max(call.head_dims)
    if call.phase == "backward" and is_wide(*call.head_dims) and (unserved := _unserved_wide(call)):
        return f"its backward of heads wider than {4 * configs.CONSUMER_ROWS} columns has no {unserved}"
    if call.dtype is FP8 and widest > MAX_HEAD_DIM_8:
        return f"8-bit heads have up to {MAX_HEAD_DIM_8} columns, and these {widest}"
    if widest > MAX_HEAD_DIM:
        return f"its heads have up to {MAX_HEAD_DIM} columns, and these {widest}"
    if call.spec.score_program is not None:
        fixed = call.spec.deterministic or call.spec.batch_invariant
        if fixed and call.phase == "backward" and any(call.wanted.captured):
            return "it adds up gradients of the tensors that a score function reads in no fixed order"
        operation = unsupported_operation(call.spec.score_program, with_derivative=call.phase == "backward")
        if operation is not None:
            return f"its kernels have no {operation}, which score_mod uses; write it with other operations"
    origin = call.spec.origin
    if call.spec.dropout_p and origin is not None and (origin.row | origin.column) % 16:
        return "its random bits belong to 16 rows and keys, and this part of a larger call begins between"
    function = call.spec.score_program is not None
    if call.dtype is FP8 and (
        call.spec.dropout_p or call.aux.key_lengths or call.aux.bias or call.aux.mask or function
    ):
        return "with 8-bit inputs it has no dropout, key_lengths, bias, mask or score function"
    return None


def _unserved_float32(call: Call) -> str | None:
    """Why the kernels cannot serve a call in float32."""
    if not float32_configs.serves_float32(call):
        if call.phase == "forward":
            return f"its forward of float32 is for heads of {NARROW + 1} to {MAX_HEAD_DIM} columns"
        least = float32_configs.NARROW_BACKWARD + 1
        return f"its backward of float32 is for a head_dim from {least} to {MAX_HEAD_DIM}"
    if call.tf32:
        return "its products have the error of float32, and PyTorch's setting allows TF32, which is faster"
    unserved = _first_asked({
        "batch-invariant mode, because it has no packed sequences": call.spec.batch_invariant,
        "max_scores": call.spec.returns_max_scores,
        "packed sequences": call.packed,
        "key_lengths": call.aux.key_lengths is not None,
        "softcap": call.spec.softcap > 0,
    }) or _unserved_wide(call)  # fmt: skip
    return f"its {call.phase} of float32 has no {unserved}" if unserved else None


def _unserved_wide(call: Call) -> str | None:
    """The first thing that a call asks and that the kernels of `wide_backward` and of float32 cannot do."""
    spec = call.spec
    return _first_asked({
        "bias": call.aux.bias is not None,
        "mask": call.aux.mask is not None,
        "alibi_slopes": call.aux.by_distance,
        "score_mod": spec.score_program is not None,
        "dropout": spec.dropout_p > 0,
        "block_mask": spec.block_shape is not None,
    })  # fmt: skip


def _first_asked(asked: dict[str, bool]) -> str | None:
    return next((name for name, present in asked.items() if present), None)


def _unreadable(call: Call) -> str | None:
    """Why TMA cannot read or write the tensors."""
    head_dim, head_dim_v = call.head_dims
    if head_dim_v % 8:
        return f"TMA writes rows of whole 16 bytes: head_dim_v must be a multiple of 8, and is {head_dim_v}"
    if call.spec.batch_invariant:  # other tensors are copied (`calls.readable_rows`)
        return None if head_dim % 8 == 0 else f"in the batch-invariant mode it takes multiples of 8, not {head_dim}"
    # If the scale is not positive, its sign goes into a copy of q, whose rows lie side by side.
    copied_rows_aligned = call.spec.scale > 0 or head_dim * call.dtype.itemsize % 16 == 0
    if not (call.aligned and copied_rows_aligned):
        return "TMA reads addresses and strides that are multiples of 16 bytes, and those of q, k or v are not"
    return None


def describe(call: Call) -> tuple[KernelChoice, ...]:
    """The kernels of a phase, with their tiles."""
    return _describe_backward(call) if call.phase == "backward" else _describe_forward(call)


def _describe_forward(call: Call) -> tuple[KernelChoice, ...]:
    if call.dtype is torch.float32:
        return _describe_float32_forward(*call.head_dims)
    config = forward_config(call)
    memory = configs.shared_memory(config, *call.head_dims, call.dtype)
    splits = forward_splits(call, config)
    block = config.block_m, config.block_n
    summary = summarise(block, _warps(config.consumers), config.stages, memory, parts=splits)
    forward = KernelChoice("forward", config, memory, "hopper", splits, summary, row_from(call))
    return (KernelChoice("widen", backend="hopper"), forward) if call.dtype is FP8 else (forward,)


def _describe_backward(call: Call) -> tuple[KernelChoice, ...]:
    if call.dtype is torch.float32:
        return _PARTS, *_describe_gradients(call)
    if is_wide(*call.head_dims):
        return _describe_gradients(call)
    cut = dq_epilogue(backward_config(call), call).config
    memory = backward_configs.backward_shared_memory(cut, call)
    warps = f"3 computing warpgroups {'and a loading warp' if cut.producer else 'of which one loads'}"
    summary = summarise((cut.block_m, cut.block_n), warps, cut.stages, memory)
    main = KernelChoice("backward", cut, memory, "hopper", summary=summary, tiles_from=row_from(call))
    kernels, by = [main], backward_configs.bias_gradient_by(cut, call)
    if by == "portable":
        kernels.append(describe_kernel(*kernel_tiles("dbias", call), call))
    elif by == "hopper":
        kernels.append(_describe_bias_gradient(call))
    if any(call.wanted.captured):
        kernels.append(_describe_captured_gradient(cut, call))
    return (*kernels,)


def _warps(consumers: int) -> str:
    """The roles of a kernel, in words."""
    computing = "a computing warpgroup" if consumers == 1 else f"{consumers} computing warpgroups"
    return f"{computing} and a loading warp"


def _describe_float32_forward(head_dim: int, head_dim_v: int) -> tuple[KernelChoice, ...]:
    """A stage is a part of 64 rows and columns."""
    cut = choose_float32_forward_config(head_dim, head_dim_v)
    memory, rows = shared_rows_memory(cut), configs.CONSUMER_ROWS
    summary = summarise((rows, rows), "2 computing warpgroups and 2 loading warps", cut.places, memory)
    return _PARTS, KernelChoice("forward", cut, memory, "hopper", summary=summary)


def _describe_gradients(call: Call) -> tuple[KernelChoice, ...]:
    """The kernels of dv, dk and dq. A stage is a chunk of 64 rows and columns; in float32 it is a part of 64 rows, in
    wide heads of 64 columns."""
    cut, rows = separate_cut(*call.head_dims, call.dtype), configs.CONSUMER_ROWS
    blocks = {"dv": (rows, cut.keys_of_dv), "dk": (rows, rows), "dq": (rows, rows)}
    choices = []
    for name, block in blocks.items():
        which = 0 if name == "dv" else 1
        memory = cut.memory[which]
        summary = summarise(block, "2 computing warpgroups and a loading warp", cut.stages[which], memory)
        choices.append(KernelChoice(name, cut.config, memory, "hopper", summary=summary))
    return tuple(choices)


def _describe_bias_gradient(call: Call) -> KernelChoice:
    cut = backward_configs.bias_config(call)
    memory = backward_configs.bias_shared_memory(cut, *call.head_dims)
    block = cut.query_tiles * backward_configs.BIAS_QUERIES, cut.keys
    summary = summarise(block, _warps(cut.warpgroups), cut.stages, memory)
    return KernelChoice("dbias", cut, memory, "hopper", summary=summary)


def _describe_captured_gradient(config: BackwardConfig, call: Call) -> KernelChoice:
    """`config`: of the main kernel."""
    cut = backward_configs.captured_gradient_config(config, call)
    memory = backward_configs.captured_gradient_memory(cut, config, call.head_dims)
    summary = summarise((config.block_m, config.block_n), _warps(2), cut.stages, memory)
    return KernelChoice("dcaptured", cut, memory, "hopper", summary=summary)


BACKEND = Backend("hopper", "flashtile.ops.attention.hopper.launch", unsupported_reason, describe)
