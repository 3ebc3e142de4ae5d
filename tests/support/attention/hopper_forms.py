"""Calls that together run each row of the tables of the Hopper kernels, with all that changes their machine code: for
the tests of that code.

A form's name is its description, in words between hyphens: the width of heads (`192x128`: of q and v), then what
`_FIELDS`, `_LOOPS` and `backward_form` say of each word. `rows512`, `queries1024` and `keys512` are lengths, and
`blocks_64x128` is a block mask of such tiles.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

import flashtile
from flashtile._backends.devices import KNOWN_DEVICES
from flashtile._backends.launch import KernelSource
from flashtile.bench import masks as bench_functions
from flashtile.ops.attention import call as description
from flashtile.ops.attention.call import TensorFacts
from flashtile.ops.attention.gpu.reductions import BiasWork
from flashtile.ops.attention.hopper.backward import main_kernel
from flashtile.ops.attention.hopper.backward_dq import begin_kernel, end_kernel
from flashtile.ops.attention.hopper.bias_gradient import bias_gradient_kernel
from flashtile.ops.attention.hopper.captured_gradient import captured_gradient_kernel
from flashtile.ops.attention.hopper.schedule import NO_LOOPS, BackwardSchedule
from flashtile.ops.attention.hopper.tuned_rows import backward_config
from flashtile.ops.attention.spec import Origin, Wanted
from support.compilation.machine_code import Call, described_call


def _traced(name: str, *captured: torch.Tensor) -> Any:
    return flashtile.trace_score_mod(bench_functions.SCORES[name].make(captured, 4096))


_EACH_PAIR = torch.zeros(64, 64)


def _table(dtype: torch.dtype, heads: int, rows: int, keys: int, batch: int = 1) -> TensorFacts:
    """A bias or a mask that is contiguous."""
    return TensorFacts(dtype, (batch, heads, rows, keys), (heads * rows * keys, rows * keys, keys, 1), 0)


_BF16 = torch.bfloat16
#: What a word says of a call.
_FIELDS: dict[str, dict[str, Any]] = {
    "causal": {"window_right": 0},
    "window": {"window_left": 127, "window_right": 0},
    "long_window": {"window_left": 4095, "window_right": 0},
    "left": {"window_left": 127},
    "hidden_rows": {"window_right": -1},
    "top_left": {"top_left": True},
    "packed": {"sequences": 2},
    "alike": {"sequences": 32, "longest": 128},  # packed sequences of about the same length
    "few": {"multiprocessors": 132},  # a single consumer: the GPU has more multiprocessors than the call has tiles
    "ordered": {"deterministic": True},
    "blocks": {"block_tile": (128, 128)},
    "no_patterns": {"patterns": False},  # tiles of the mask are whole
    "max_scores": {"max_scores": True},
    "softcap": {"softcap": 30.0},
    "slopes": {"alibi": 1},
    "slopes_of_batch": {"alibi": 2},
    "sinks": {"sinks": True},
    "dlse": {"has_dlse": True},
    "dropout": {"dropout_p": 0.1},
    "lengths": {"key_lengths_dtype": torch.int32},
    "lengths64": {"key_lengths_dtype": torch.int64},
    "bias": {"bias": _table(_BF16, 4, 4096, 4096)},
    "wide_bias": {"bias": _table(torch.float32, 4, 4096, 4096)},
    "unaligned_bias": {"bias": _table(_BF16, 4, 4096, 4097)},
    "windows": {"bias": _table(_BF16, 4, 49, 49), "seq_q": 49, "seq_k": 49, "batch": 4096},
    "stored": {"batch": 1},  # the main kernel stores the gradient of the bias
    "mask": {"mask": _table(torch.bool, 1, 4096, 4096, 2)},
    "padding": {"mask": _table(torch.bool, 1, 1, 4096, 2)},
    "origin": {"origin": Origin(32, 64, 3, 5, 8)},
    "descales": {"descales": True},
    "fp8": {"dtype": torch.float8_e4m3fn},
    # Functions that read an element for each score, one for each key, one for each head, and nothing.
    "relative": {"score_mod": _traced("relative", torch.zeros(4, 8191))},
    "waves": {"score_mod": _traced("waves", torch.zeros(4), torch.zeros(4, 4096))},
    "alibi_function": {"score_mod": _traced("alibi", torch.zeros(4))},
    "capped": {"score_mod": _traced("softcap")},
    # An element for each score, which others with the same distance do not share.
    "scattered": {"score_mod": flashtile.trace_score_mod(lambda s, b, h, q, k: s + _EACH_PAIR[q % 64, k % 64])},
}
#: And of the loops of a backward.
_LOOPS = {
    "no_masks": {"MASKS": False},
    "masks_last": {"MASKS_LAST": True},
    "single_tile": {"SINGLE_KEY_TILE": True},
    "whole_lines": {"WHOLE_LINES": True},
    "turns": {"REVERSES_WALKS": True},
    "meets": {"SHARES_PROGRESS": True},
    "rotated": {"ROTATES_WALKS": True},
    "same_way": {"REVERSES_LINES": False},
}
#: And what `backward_form` does by itself.
_OTHERS = {
    "learned", "reads_learn", "covered", "stores_dq", "any_order", "wide_strides", "shared_by_heads", "in_parts",
    "lone", "short", "bias_in_parts",
}  # fmt: skip


def forward_form(name: str, **fields: Any) -> Call:
    """The call that a name describes; `fields` are those of which no word says anything."""
    heads, *words = name.split("-")
    head_dim, _, head_dim_v = heads.partition("x")
    fields = {"head_dim": int(head_dim), "head_dim_v": int(head_dim_v or head_dim), **fields}
    for word in words:
        kind, numbers = re.fullmatch(r"(.+?)_?([0-9x]*)", word).groups()  # type: ignore[union-attr]
        if kind == "blocks" and numbers:
            fields["block_tile"] = tuple(map(int, numbers.split("x")))
        elif kind in ("rows", "queries", "keys"):
            fields |= dict.fromkeys(
                {"rows": ("seq_q", "seq_k"), "queries": ("seq_q",), "keys": ("seq_k",)}[kind], int(numbers)
            )
        elif word == "fp16":
            fields["dtype"] = torch.float16
        elif word in _FIELDS:
            fields |= _FIELDS[word]
        else:
            assert word in _LOOPS or word in _OTHERS, f"{name}: {word}"
    return Call(**fields)


def _forwards(names: str, **fields: Any) -> dict[str, Call]:
    return {name: forward_form(name, **fields) for name in names.split()}


FORMS = _forwards("""
    16 64 64-causal 64-window 64-packed-causal 64-rows256 64-causal-rows256 64-window-rows256
    64-packed-causal-rows256 64-rows512 80 96 80-rows320 96-rows320 112 224 224-causal 224-window
    224-packed-causal 64x128 128 128-causal 128-window 128-packed-causal 128-rows512 128-causal-rows512
    128-window-rows512 128-packed-causal-rows512 192x128 192x128-causal 192x128-window 192x128-packed-causal
    192x128-rows512 192 192-causal 192-window 192-packed-causal 256x192 256 256-causal 256-window
    256-packed-causal 256-rows512 192x512 320 512x384 512 512-causal 512-window 512-packed-causal 64-causal-fp16
    128-packed-causal-fp16 256-fp16 512-causal-fp16 64-causal-max_scores 128-max_scores-fp16 512-max_scores
    64-causal-rows1024-few 64-packed-causal-rows1024-few 128-rows1024-few 128-window-rows1024-few
    128-causal-alike 64-alike 256-alike-fp16
    192x128-causal-rows1024-few 192-rows1024-few 256-causal-rows1024-few 64-long_window 128-long_window
    192x128-long_window 256-long_window
""")
#: With all that may change the scores of these kernels.
SCORE_FORMS = _forwards("""
    64-sinks-softcap-slopes_of_batch 64-packed-causal-sinks-softcap-slopes_of_batch
    128-sinks-softcap-slopes_of_batch 128-packed-causal-sinks-softcap-slopes_of_batch
    192x128-sinks-softcap-slopes_of_batch 192x128-packed-causal-sinks-softcap-slopes_of_batch
    256-sinks-softcap-slopes_of_batch 256-packed-causal-sinks-softcap-slopes_of_batch
    512-sinks-softcap-slopes_of_batch 512-packed-causal-sinks-softcap-slopes_of_batch
""")
#: With a block mask, and beside a band; and of whole tiles only.
BLOCK_FORMS = _forwards("""
    64-blocks 64-blocks-no_patterns 128-blocks_256x128-no_patterns 256-causal-blocks-no_patterns 64-blocks_64x64
    128-causal-blocks_64x128 128-packed-causal-blocks_128x64 192x128-blocks_64x64 256-causal-blocks_64x64
    512-blocks_64x64 512-causal-blocks 128-causal-blocks_256x128 64-packed-causal-blocks_256x128
    128-packed-causal-blocks_256x128 256-packed-causal-blocks_256x128 512-packed-blocks-lengths-fp16
""")
#: 8-bit operands: each row of their table, and all that a call may have.
FP8_FORMS = _forwards("""
    64-fp8 64-window-fp8 64-packed-causal-descales-fp8 128-queries1024-fp8 128-fp8 128-keys512-fp8
    128-causal-rows8192-fp8 96-packed-causal-rows20000-descales-sinks-softcap-slopes_of_batch-fp8
    128-causal-blocks_256x128-descales-fp8 128-blocks_64x64-fp8 64-rows256-fp8 192x128-fp8 192-fp8 256-fp8
    256x128-window-descales-sinks-softcap-slopes_of_batch-fp8
""")
#: With dropout, tables and key lengths: each alone, odd sizes whose neighbours are not read together, and all at once.
FEATURE_FORMS = _forwards("""
    64-lengths 64-padding 64-mask 64-bias 64-dropout 128-lengths 128-padding 128-mask 128-bias 128-dropout
    192x128-lengths 192x128-padding 192x128-mask 192x128-bias 192x128-dropout 192-lengths 192-padding 192-mask
    192-bias 192-dropout 256-lengths 256-padding 256-mask 256-bias 256-dropout 512-lengths 512-padding 512-mask
    512-bias 512-dropout 96-wide_bias-fp16 128-wide_bias-mask 16-windows
    64-packed-causal-sinks-softcap-slopes_of_batch-dropout-lengths64-bias-mask
    128-causal-slopes-dropout-lengths-bias-padding-origin-fp16 128-blocks_256x128-dropout-lengths
""")
FUNCTION_FORMS = _forwards("""
    64-causal-relative 64-causal-capped 128-causal-relative 128-causal-waves 128-causal-alibi_function
    128-causal-capped 128-packed-causal-relative 256-alibi_function
""")
#: Backwards of heads wider than 256 columns: all that changes their machine code.
WIDE_BACKWARD_FORMS = _forwards("""
    512 512-hidden_rows-sinks-dlse-fp16 512-causal 512-window-fp16 512-left-top_left-lengths 512-keys1000 320
    320-causal-fp16 320-window 512x64 512x64-window 128x512 128x512-window-fp16 64x320 64x320-causal
    512-packed-causal 512-packed-window-sinks-softcap-lengths64-fp16 512-window-softcap 320-packed-causal
    320-packed-window-softcap-fp16 320-softcap-lengths 512x64-packed 512x64-packed-window 128x512-window-lengths
    64x320-packed-causal-softcap-lengths
""")
#: Forwards and backwards of float32, likewise.
FLOAT32_FORWARD_FORMS = _forwards(
    """
    256 128-causal 96 256-causal 256-window 256-left-top_left-sinks 256-keys1000 512 512-causal 512-window
    192x128-causal 320 64x512 512x64-causal
""",
    dtype=torch.float32,
)
FLOAT32_BACKWARD_FORMS = _forwards(
    """
    128 128-hidden_rows-sinks-dlse 128-causal 128-left 128-window-top_left 128-keys1000 96 96-causal
    72x128-causal 128x64 128x8-window 256 256-causal 256-window 256-keys1000 192 192-causal 144-window
    192x128-causal 192x64 192x256 256x192-causal 256x128 256x64-window 128x192 128x256-causal 512 512-window
    512-keys1000 320-causal 384 512x64-causal 72x512
""",
    dtype=torch.float32,
)


class BackwardForm(NamedTuple):
    """A call of a backward, and how its work is divided, that for the gradient of a bias in so many parts."""

    call: description.Call
    schedule: BackwardSchedule
    bias_parts: int = 1

    def source(self, kernel: str) -> KernelSource:
        """The specialisation of a kernel: "begin", "main", "end", "bias" or "captured"."""
        call, schedule, parts = self
        if kernel == "begin":
            portable = call.aux.bias is not None and not schedule.config.bias_stored
            tile, tiles = schedule.config.block_m, schedule.query_tiles
            return begin_kernel(call, tile, tiles, schedule=schedule, row_statistics=portable).source
        if kernel == "bias":
            return bias_gradient_kernel(call, schedule, BiasWork(1, parts, parts)).source
        if kernel == "captured":
            return captured_gradient_kernel(call, schedule).source
        return (main_kernel if kernel == "main" else end_kernel)(call, schedule).source


def backward_form(name: str) -> BackwardForm:
    """The form that a name describes, of lengths that no tile divides unless it is `covered`."""
    words = name.split("-")
    rows = 4096 if "covered" in words else 4095
    shape = forward_form(name.replace("-fp16", ""), seq_q=rows, seq_k=rows)
    call = described_call("backward", shape, KNOWN_DEVICES["sm_90"])
    captured = ("reads_learn" in words,) * len(call.aux.captured)
    call = call._replace(wanted=Wanted("stored" in words, "learned" in words, captured=captured))
    config = backward_config(call)
    if "stores_dq" in words:
        config = config._replace(sums_by_tma=True)
    if "fp16" in words:
        call = call._replace(**{of: getattr(call, of)._replace(dtype=torch.float16) for of in ("q", "k", "v", "dout")})
    if "any_order" in words:
        call = call._replace(spec=call.spec._replace(deterministic=False))
    if "wide_strides" in words:
        call = call._replace(dout=call.dout._replace(strides=(2**35, *call.dout.strides[1:])))
    if "shared_by_heads" in words:
        bias = call.aux.bias
        call = call._replace(aux=call.aux._replace(bias=bias._replace(shape=(bias.shape[0], 1, *bias.shape[2:]))))
    reverses = "ordered" in words and shape.window_right is not None and shape.block_tile is None
    loops = NO_LOOPS._replace(MASKS=True, REVERSES_LINES=reverses)
    for word in words:
        loops = loops._replace(**_LOOPS.get(word, {}))
    schedule = BackwardSchedule(config, loops, query_tiles=64, key_tiles=32)
    if "in_parts" in words:
        schedule = schedule._replace(shares=2, parts=2)
    if "lone" in words:
        schedule = schedule._replace(lone_tiles=1)
    if "short" in words:
        schedule = schedule._replace(short_rows=512)
    return BackwardForm(call, schedule, 2 if "bias_in_parts" in words else 1)


def _backwards(names: str) -> dict[str, BackwardForm]:
    return {name: backward_form(name) for name in names.split()}


#: Each row of the backward's table, plain and with all features: packed, a window, dq in order.
BACKWARD_FORMS = _backwards("""
    64-causal 64-packed-window-ordered 32-causal 32-packed-window-ordered 32-no_masks-fp16 32x64-causal
    64x32-causal-ordered 32x64-single_tile 128-causal 128-causal-masks_last 128-causal-masks_last-turns
    128-causal-masks_last-turns-fp16 64-no_masks-meets 128-no_masks-meets 128-no_masks-meets-fp16
    256-no_masks-meets 128-slopes-meets 64-causal-turns 128-causal-ordered-masks_last-same_way 64-causal-ordered
    128-causal-ordered 192x128-causal-ordered 256-causal-ordered 128-causal-ordered-fp16 64-ordered-no_masks
    128-ordered-no_masks 256-ordered-no_masks 128-packed-window-ordered 256-causal 256-packed-window-ordered
    192x128-causal 64-window 128-window 64-window-rotated 128-window-rotated 256-window-rotated
    128-window-rotated-fp16 128-packed-window-rotated-fp16 192x128-window-rotated 64-no_masks 128-no_masks
    192x128-no_masks 256-no_masks 128-no_masks-fp16 192x128-packed-window-ordered 80-causal 96-causal 160-causal
    192-causal 80-packed-window-ordered 96-packed-window-ordered 160-packed-window-ordered 80-no_masks
    96-no_masks 96x80-no_masks 64x96-no_masks 80-causal-masks_last-turns-fp16 96-causal-masks_last-turns-fp16
    96-causal-softcap 64-causal-softcap 64-causal-slopes 128-causal-softcap 128-causal-slopes 256-causal-softcap
    256-causal-slopes 64-causal-fp16 128-causal-fp16 256-causal-fp16 64-single_tile 80-single_tile
    96-single_tile 128-single_tile 32-causal-lone 80-causal-lone 96-causal-lone 32-causal-whole_lines
    64-causal-whole_lines 80-causal-whole_lines 96-causal-whole_lines 128-causal-whole_lines
    64-whole_lines-no_masks 96-whole_lines-no_masks 128-whole_lines-no_masks 160-stores_dq-single_tile
    192x128-stores_dq-single_tile 256-stores_dq-single_tile 160-causal-stores_dq-single_tile-fp16
    192x128-causal-stores_dq-single_tile-fp16 192x128-causal-ordered-fp16 192x128-window-rotated-fp16
    192-causal-stores_dq-whole_lines 256-causal-stores_dq-whole_lines 256-stores_dq-whole_lines-no_masks-fp16
    256-causal-softcap-stores_dq-whole_lines 64-window-whole_lines 64-causal-whole_lines-fp16
    128-window-whole_lines-fp16 64-causal-softcap-whole_lines 128-causal-softcap-whole_lines 64-packed-no_masks
    96-packed-no_masks-short 128-packed-no_masks 192x128-packed-no_masks 128-packed-ordered-no_masks-fp16
    64-causal-lone-rotated 64-causal-lone-fp16 128-causal-lone-top_left 128-causal-lone-rotated-fp16
    64x128-causal-lone 64-single_tile-in_parts 128-masks_last-in_parts-fp16 256-ordered-in_parts
    128-causal-single_tile-masks_last-fp16 64x96-causal-single_tile-fp16
    256-causal-ordered-single_tile-any_order 128-packed-causal-short-fp16 128-causal-masks_last-fp16
    64-causal-wide_strides 64-causal-sinks-dlse 64-packed-causal-sinks-dlse 64-causal-blocks
    128-causal-ordered-blocks_128x256 64-causal-blocks_64x64 64-causal-blocks_64x128
    128-packed-causal-ordered-blocks_128x64 192x128-blocks_64x64 64-packed-causal-blocks
    128-packed-causal-blocks 128-packed-window-ordered-blocks_256x256-fp16 192x128-packed-blocks
    256-packed-causal-ordered-blocks 160-blocks 192x128-blocks 256-causal-blocks
""")
#: The backward with dropout, tables and key lengths: each alone, and all at once.
BACKWARD_FEATURE_FORMS = _backwards("""
    64-causal-lengths 64-causal-padding 64-causal-mask 64-causal-bias 64-causal-dropout 128-causal-lengths
    128-causal-padding 128-causal-mask 128-bias 128-causal-dropout 192x128-causal-lengths 192x128-causal-padding
    192x128-causal-mask 192x128-causal-bias 192x128-causal-dropout 256-causal-lengths 256-causal-padding
    256-causal-mask 256-causal-bias 256-causal-dropout 32-causal-bias
    32-packed-window-lengths64-dropout-bias-mask-slopes 32-causal-ordered-bias-stored 96-bias
    80-causal-ordered-bias-slopes_of_batch 128-window-lengths-bias-slopes-fp16 128-packed-causal-ordered-bias
    128-causal-unaligned_bias 64-causal-bias-stored 128-causal-bias-stored 96-causal-ordered-blocks-bias-stored
    64-window-ordered-lengths 64-lengths-no_masks 128-lengths-no_masks 128-causal-dropout-whole_lines
    256-causal-dropout-stores_dq-whole_lines 64-bias-stored-whole_lines 64-causal-slopes-learned-whole_lines
    128-causal-lengths-fp16 128-packed-causal-softcap-dropout 128-causal-blocks-dropout
    64-dropout-bias-single_tile 128-dropout-bias-single_tile 64-causal-slopes-learned 96-causal-slopes-learned
    128-causal-slopes-learned 192x128-causal-slopes-learned 128-packed-causal-slopes-learned-fp16
    128-slopes-learned-no_masks 64-packed-causal-ordered-blocks-lengths64-padding-slopes_of_batch-learned
    128-causal-ordered-blocks-slopes-learned 256-causal-slopes-learned 256-causal-blocks-slopes-learned
    64-causal-softcap-dropout-slopes-learned 128-causal-softcap-dropout-slopes-learned
    256-causal-softcap-dropout-slopes-learned 256-packed-window-ordered-softcap-slopes-learned
    64-packed-window-lengths64-dropout-bias-mask-slopes 128-causal-ordered-lengths64-dropout-bias-mask-slopes
    256-causal-lengths64-dropout-bias-mask-slopes
""")
#: The backward with functions of scores: some have derivatives, and these are handed on apart or with the weights.
BACKWARD_FUNCTION_FORMS = _backwards("""
    64-causal-alibi_function-covered 64-causal-capped-fp16 64-causal-dropout-waves 128-causal-relative-covered
    128-packed-window-ordered-relative 128-causal-bias-capped 192x128-causal-blocks-capped 256-causal-waves
    256-causal-softcap-dropout-slopes-learned-capped
""")
#: The gradient of a bias that scores share: each cut, and what changes its code.
BIAS_GRADIENT_FORMS = _backwards("""
    32-bias-no_masks-bias_in_parts 24x32-window-bias-shared_by_heads 64-causal-bias
    96-bias-no_masks-bias_in_parts 64-dropout-bias-padding-no_masks-fp16
    128-window-bias-slopes_of_batch-shared_by_heads 192x128-lengths64-bias 256-softcap-bias 256-causal-bias-mask
    64-packed-bias-bias_in_parts 32-packed-window-lengths-bias-slopes-shared_by_heads
    128-packed-causal-bias-fp16 64-blocks-bias-no_masks 64-blocks_64x64-bias-no_masks
    256-causal-blocks_64x64-bias-mask 192x128-causal-blocks_64x256-dropout-bias
    256-packed-causal-blocks-bias-shared_by_heads 64-causal-bias-waves-no_masks 128-causal-bias-capped-fp16
    256-packed-causal-blocks-bias-relative
""")
#: The gradients of what a score function reads, two warpgroups for 128 keys and for 64: an entry for each diagonal, one
#: for each head and one for each key, and one for each score.
CAPTURED_GRADIENT_FORMS = _backwards("""
    64-causal-relative-covered-reads_learn 128-packed-window-short-softcap-dropout-bias-waves-reads_learn
    256-causal-blocks_64x64-scattered-reads_learn
""")

#: Forms whose products ptxas serialises, because dk and dv beside a producer leave too few registers
#: (decisions/hopper_backward.md).
SERIALISED = {"192x128-blocks", "192x128-packed-blocks"}

#: Kernels and forms that `tools/compile_versions.py` compiles and the tests do not: nothing is new in them but a width
#: or a tile of which another form has a larger one, and they spill no more than that one.
REPEATS = {
    *(("forward", form) for form in ("128-packed-causal", "224-packed-causal", "128-packed-causal-blocks_128x64")),
    *(("main", form) for form in ("32-packed-window-ordered", "80-packed-window-ordered")),
    ("bias", "64-blocks_64x64-bias-no_masks"),
    ("end", "128-causal"),
    ("float32 forward", "96"),
    *(("dv", form) for form in ("96", "128x8-window", "128x192", "192x64")),
    *(("dk", form) for form in ("96", "72x128-causal", "192", "72x512")),
    *(("parts", form) for form in ("96", "128-causal", "512")),
}
