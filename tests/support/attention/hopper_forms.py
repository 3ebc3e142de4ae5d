"""Calls that together run each row of the tables of the Hopper kernels, with all that changes their machine code: for
the tests of that code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import flashtile
from flashtile._backends.devices import KNOWN_DEVICES
from flashtile._backends.launch import KernelSource
from flashtile.bench import masks as bench_functions
from flashtile.ops.attention import call as description
from flashtile.ops.attention.call import AuxFacts, TensorFacts
from flashtile.ops.attention.gpu.reductions import BiasWork
from flashtile.ops.attention.hopper.backward_configs import backward_config
from flashtile.ops.attention.hopper.backward_kernels import (
    begin_kernel,
    bias_gradient_kernel,
    end_kernel,
    lse_unit,
    main_kernel,
)
from flashtile.ops.attention.hopper.schedule import NO_LOOPS, BackwardSchedule, Loops
from flashtile.ops.attention.spec import Origin, Wanted
from support.compilation.machine_code import Call, aux_of, described_call

_HEADS = {
    "16": Call(head_dim=16, head_dim_v=16),
    "64": Call(),
    "64-short": Call(seq_q=256, seq_k=256),
    "64-middle": Call(seq_q=512, seq_k=512),
    "80": Call(head_dim=80, head_dim_v=80),
    "96": Call(head_dim=96, head_dim_v=96),
    "80-odd": Call(head_dim=80, head_dim_v=80, seq_q=320, seq_k=320),
    "96-odd": Call(head_dim=96, head_dim_v=96, seq_q=320, seq_k=320),
    "112": Call(head_dim=112, head_dim_v=112),
    "224": Call(head_dim=224, head_dim_v=224),
    "64x128": Call(head_dim=64, head_dim_v=128),
    "128": Call(head_dim=128, head_dim_v=128),
    "128-short": Call(head_dim=128, head_dim_v=128, seq_q=512, seq_k=512),
    "192x128": Call(head_dim=192, head_dim_v=128),
    "192x128-short": Call(head_dim=192, head_dim_v=128, seq_q=512, seq_k=512),
    "192": Call(head_dim=192, head_dim_v=192),
    "256x192": Call(head_dim=256, head_dim_v=192),
    "256": Call(head_dim=256, head_dim_v=256),
    "256-short": Call(head_dim=256, head_dim_v=256, seq_q=512, seq_k=512),
    "192x512": Call(head_dim=192, head_dim_v=512),
    "320": Call(head_dim=320, head_dim_v=320),
    "512x384": Call(head_dim=512, head_dim_v=384),
    "512": Call(head_dim=512, head_dim_v=512),
}
_MASKS = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 127, "window_right": 0},
    "packed": {"window_right": 0, "sequences": 5},
}
_LONG_WINDOW = {"window_left": 4095, "window_right": 0}

#: Heads that share a row of the table with one that is compiled with every mask; a band adds the same to each.
_SHARE_A_ROW = (
    "16",
    "64-middle",
    "80",
    "96",
    "80-odd",
    "96-odd",
    "112",
    "64x128",
    "192x128-short",
    "256x192",
    "256-short",
    "192x512",
    "320",
    "512x384",
)

#: "<head>-<mask>" -> call.
FORMS = (
    {
        f"{head}-{mask}": call._replace(**changes)
        for head, call in _HEADS.items()
        for mask, changes in _MASKS.items()
        if head not in _SHARE_A_ROW or mask == "full"
    }
    | {
        f"{head}-{mask}-fp16": _HEADS[head]._replace(**_MASKS[mask], dtype=torch.float16)
        for head, mask in (("64", "causal"), ("128", "packed"), ("256", "full"), ("512", "causal"))
    }
    | {
        "64-causal-max-scores": _HEADS["64"]._replace(window_right=0, max_scores=True),
        "128-full-max-scores": _HEADS["128"]._replace(max_scores=True, dtype=torch.float16),
        "512-full-max-scores": _HEADS["512"]._replace(max_scores=True),
    }
    | {
        # A single consumer, on a GPU that has more multiprocessors than the call has tiles.
        f"{name}-few": _HEADS[name.partition("-")[0]]._replace(
            seq_q=1024, seq_k=1024, multiprocessors=132, **_MASKS[name.partition("-")[2]]
        )
        for name in ("64-causal", "64-packed", "128-full", "128-window", "192x128-causal", "192-full", "256-causal")
    }
    | {f"{head}-long-window": _HEADS[head]._replace(**_LONG_WINDOW) for head in ("64", "128", "192x128", "256")}
)
#: With all that may change the scores of these kernels.
SCORE_FORMS = {
    f"{head}-{mask}-scores": _HEADS[head]._replace(**_MASKS[mask], softcap=30.0, alibi=2, sinks=True)
    for head in ("64", "128", "192x128", "256", "512")
    for mask in ("full", "packed")
}
#: With a block mask, and beside a band; and of whole tiles only.
BLOCK_FORMS = {
    "64-blocks": _HEADS["64"]._replace(block_tile=(128, 128)),
    "64-whole-blocks": _HEADS["64"]._replace(block_tile=(128, 128), patterns=False),
    "128-whole-blocks": _HEADS["128"]._replace(block_tile=(256, 128), patterns=False),
    "256-causal-whole-blocks": _HEADS["256"]._replace(window_right=0, block_tile=(128, 128), patterns=False),
    "64-small-blocks": _HEADS["64"]._replace(block_tile=(64, 64)),
    "128-causal-small-blocks": _HEADS["128"]._replace(window_right=0, block_tile=(64, 128)),
    "128-packed-small-blocks": _HEADS["128"]._replace(**_MASKS["packed"], block_tile=(128, 64)),
    "192x128-small-blocks": _HEADS["192x128"]._replace(block_tile=(64, 64)),
    "256-causal-small-blocks": _HEADS["256"]._replace(window_right=0, block_tile=(64, 64)),
    "512-small-blocks": _HEADS["512"]._replace(block_tile=(64, 64)),
    "512-causal-blocks": _HEADS["512"]._replace(window_right=0, block_tile=(128, 128)),
    "128-causal-blocks": _HEADS["128"]._replace(window_right=0, block_tile=(256, 128)),
    **{
        f"{head}-packed-blocks": _HEADS[head]._replace(**_MASKS["packed"], block_tile=(256, 128))
        for head in ("64", "128", "256")
    },
    "512-packed-blocks": _HEADS["512"]._replace(
        sequences=5, key_lengths_dtype=torch.int32, block_tile=(128, 128), dtype=torch.float16
    ),
}
#: 8-bit operands: each row of their table, and all that a call may have.
FP8_FORMS = {
    "fp8-64": _HEADS["64"]._replace(dtype=torch.float8_e4m3fn),
    "fp8-64-window": _HEADS["64"]._replace(**_MASKS["window"], dtype=torch.float8_e4m3fn),
    "fp8-64-packed": _HEADS["64"]._replace(**_MASKS["packed"], dtype=torch.float8_e4m3fn, descales=True),
    "fp8-128-short": _HEADS["128"]._replace(seq_q=1024, dtype=torch.float8_e4m3fn),
    "fp8-128": _HEADS["128"]._replace(dtype=torch.float8_e4m3fn),
    "fp8-128-few-keys": _HEADS["128"]._replace(seq_k=512, dtype=torch.float8_e4m3fn),
    "fp8-128-causal": _HEADS["128"]._replace(window_right=0, seq_q=8192, seq_k=8192, dtype=torch.float8_e4m3fn),
    "fp8-96-packed-scores": _HEADS["96"]._replace(
        **_MASKS["packed"], seq_q=20000, seq_k=20000, dtype=torch.float8_e4m3fn, descales=True,
        softcap=30.0, alibi=2, sinks=True,
    ),
    "fp8-128-causal-blocks": _HEADS["128"]._replace(
        window_right=0, dtype=torch.float8_e4m3fn, descales=True, block_tile=(256, 128)
    ),
    "fp8-128-small-blocks": _HEADS["128"]._replace(dtype=torch.float8_e4m3fn, block_tile=(64, 64)),
    "fp8-64-short": _HEADS["64-short"]._replace(dtype=torch.float8_e4m3fn),
    "fp8-192x128": _HEADS["192x128"]._replace(dtype=torch.float8_e4m3fn),
    "fp8-192": _HEADS["192"]._replace(dtype=torch.float8_e4m3fn),
    "fp8-256": _HEADS["256"]._replace(dtype=torch.float8_e4m3fn),
    "fp8-256x128-window-scores": Call(
        head_dim=256, head_dim_v=128, dtype=torch.float8_e4m3fn, descales=True, **_MASKS["window"],
        softcap=30.0, alibi=2, sinks=True,
    ),
}  # fmt: skip

_DENSE_MASK = TensorFacts(torch.bool, (2, 1, 4096, 4096), (4096 * 4096, 4096 * 4096, 4096, 1), 0)
_PADDING_MASK = TensorFacts(torch.bool, (2, 1, 1, 4096), (4096, 4096, 4096, 1), 0)
_BIAS = TensorFacts(torch.bfloat16, (1, 4, 4096, 4096), (4 * 4096 * 4096, 4096 * 4096, 4096, 1), 0)
_WIDE_BIAS = _BIAS._replace(dtype=torch.float32)
_UNALIGNED_BIAS = TensorFacts(torch.bfloat16, (1, 4, 4096, 4097), (4 * 4096 * 4097, 4096 * 4097, 4097, 1), 0)
_WINDOW_BIAS = TensorFacts(torch.bfloat16, (1, 4, 49, 49), (4 * 49 * 49, 49 * 49, 49, 1), 0)
#: With dropout, tables and key lengths: each alone, odd sizes whose neighbours are not read together, and all at once.
FEATURE_FORMS = {
    **{
        f"{head}-{name}": _HEADS[head]._replace(**changes)
        for head in ("64", "128", "192x128", "192", "256", "512")
        for name, changes in {
            "key-lengths": {"key_lengths_dtype": torch.int32},
            "padding-mask": {"mask": _PADDING_MASK},
            "mask": {"mask": _DENSE_MASK},
            "bias": {"bias": _BIAS},
            "dropout": {"dropout_p": 0.1},
        }.items()
    },
    "96-wide-bias-fp16": _HEADS["96"]._replace(bias=_WIDE_BIAS, dtype=torch.float16),
    "128-wide-bias-and-mask": _HEADS["128"]._replace(bias=_WIDE_BIAS, mask=_DENSE_MASK),
    "16-windows": _HEADS["16"]._replace(bias=_WINDOW_BIAS, seq_q=49, seq_k=49, batch=4096),
    "64-packed-all": _HEADS["64"]._replace(
        **_MASKS["packed"], bias=_BIAS, mask=_DENSE_MASK, key_lengths_dtype=torch.int64, dropout_p=0.1, softcap=30.0,
        alibi=2, sinks=True,
    ),
    "128-causal-all-fp16": _HEADS["128"]._replace(
        **_MASKS["causal"], bias=_BIAS, mask=_PADDING_MASK, key_lengths_dtype=torch.int32, dropout_p=0.1,
        dtype=torch.float16, origin=Origin(32, 64, 3, 5, 8), alibi=1,
    ),
    "128-blocks-dropout": _HEADS["128"]._replace(block_tile=(256, 128), dropout_p=0.1, key_lengths_dtype=torch.int32),
}  # fmt: skip

_WAVES = bench_functions.SCORES["waves"].make((torch.zeros(4), torch.zeros(4, 4096)), 4096)
_RELATIVE = bench_functions.SCORES["relative"].make((torch.zeros(4, 8191),), 4096)
_CAPPED = bench_functions.SCORES["softcap"].make((), 4096)
_ALIBI_FUNCTION = bench_functions.SCORES["alibi"].make((torch.zeros(4),), 4096)
#: With functions of scores: that read an element for each score, one for each key, one for each head, and nothing.
FUNCTION_FORMS = {
    f"{head}-{mask}-{name}": _HEADS[head]._replace(**_MASKS[mask], score_mod=flashtile.trace_score_mod(function))
    for head, mask, functions in (
        ("64", "causal", {"relative": _RELATIVE, "capped": _CAPPED}),
        ("128", "causal", {"relative": _RELATIVE, "waves": _WAVES, "alibi": _ALIBI_FUNCTION, "capped": _CAPPED}),
        ("128", "packed", {"relative": _RELATIVE}),
        ("256", "full", {"alibi": _ALIBI_FUNCTION}),
    )
    for name, function in functions.items()
}


_ALIBI = aux_of(alibi=1)


class BackwardForm(NamedTuple):
    """A call of a backward, and how its work is divided, that for the gradient of a bias in so many parts."""

    call: description.Call
    schedule: BackwardSchedule
    bias_parts: int = 1

    def but(self, **changes: Any) -> BackwardForm:
        """With another dtype, other loops by their names in small letters, or other decisions."""
        call, schedule, parts = self
        for name, value in changes.items():
            if name.upper() in Loops._fields:
                schedule = schedule._replace(loops=schedule.loops._replace(**{name.upper(): value}))
            elif name == "dtype":
                tensors = {of: getattr(call, of)._replace(dtype=value) for of in ("q", "k", "v", "dout")}
                call = call._replace(**tensors)
            elif name in ("top_left", "deterministic"):
                call = call._replace(spec=call.spec._replace(**{name: value}))
            elif name == "sinks":
                call = call._replace(aux=call.aux._replace(sinks=TensorFacts(torch.float32, (call.heads,), (1,))))
            elif name == "wide_strides":
                call = call._replace(dout=call.dout._replace(strides=(2**35, *call.dout.strides[1:])))
            elif name == "bias_shared_by_heads":
                bias = call.aux.bias
                bias = bias._replace(shape=(bias.shape[0], 1, *bias.shape[2:]))
                call = call._replace(aux=call.aux._replace(bias=bias))
            elif name == "divides_queries":
                schedule = schedule._replace(shares=2, parts=2)
            elif name == "lone_tiles":
                schedule = schedule._replace(lone_tiles=value)
            elif name == "bias_in_parts":
                parts = 2
            elif name == "stores_dq":
                schedule = schedule._replace(config=schedule.config._replace(sums_by_tma=True))
            else:
                call = call._replace(**{name: value})
        return BackwardForm(call, schedule, parts)

    def source(self, kernel: str) -> KernelSource:
        """The specialisation of a kernel: "begin", "main", "end" or "bias"."""
        call, schedule, parts = self
        if kernel == "begin":
            portable = call.aux.bias is not None and not schedule.config.bias_stored
            tile, tiles, unit = schedule.config.block_m, schedule.query_tiles, lse_unit(call, schedule)
            return begin_kernel(call, tile, tiles, unit=unit, schedule=schedule, row_statistics=portable).source
        if kernel == "bias":
            return bias_gradient_kernel(call, schedule, BiasWork(1, parts, parts)).source
        return (main_kernel if kernel == "main" else end_kernel)(call, schedule).source


def _backward(
    head_dim: int,
    head_dim_v: int,
    packed: bool,
    left: bool,
    ordered: bool,
    softcap: bool = False,
    right: bool = True,
    block_tile: tuple[int, int] | None = None,
    side: AuxFacts | None = None,
    slope_sums: bool = False,
    stored_bias: bool = False,
    score_mod: Callable[..., Any] | None = None,
    covered: bool = False,
) -> BackwardForm:
    side = side or aux_of()
    rows = 4096 if covered else 4095
    shape = Call(
        head_dim,
        head_dim_v,
        seq_q=rows,
        seq_k=rows,
        batch=1 if stored_bias else 2,
        window_left=127 if left else None,
        window_right=0 if right else None,
        dropout_p=0.1 if side.dropout_seed else 0.0,
        sequences=2 if packed else None,
        softcap=30.0 if softcap else 0.0,
        block_tile=block_tile,
        score_mod=None if score_mod is None else flashtile.trace_score_mod(score_mod),
        deterministic=ordered,
    )
    call = described_call("backward", shape, KNOWN_DEVICES["sm_90"])
    own = {name: given for name, given in side._asdict().items() if name in _OF_SCORES}
    wanted = Wanted(bias=stored_bias, alibi_slopes=slope_sums)
    call = call._replace(aux=call.aux._replace(**own), wanted=wanted)
    loops = NO_LOOPS._replace(MASKS=True, REVERSES_LINES=ordered and right and block_tile is None)
    return BackwardForm(call, BackwardSchedule(backward_config(call), loops, query_tiles=64, key_tiles=32))


#: What `_backward` takes of the side inputs that it is given; the rest follows from its other arguments.
_OF_SCORES = ("key_lengths", "dropout_seed", "bias", "mask", "alibi_slopes")


#: Each row of the backward's table, plain and with all features: packed, a window, dq in order.
BACKWARD_FORMS = {
    "64": _backward(64, 64, False, False, False),
    "64-packed-window-ordered": _backward(64, 64, True, True, True),
    "32": _backward(32, 32, False, False, False),
    "32-packed-window-ordered": _backward(32, 32, True, True, True),
    "32-uncut-fp16": _backward(32, 32, False, False, False, right=False).but(masks=False, dtype=torch.float16),
    "32x64": _backward(32, 64, False, False, False),
    "64x32-ordered": _backward(64, 32, False, False, True),
    "32x64-single-tile": _backward(32, 64, False, False, False, right=False).but(single_key_tile=True),
    "128": _backward(128, 128, False, False, False),
    "128-long": _backward(128, 128, False, False, False).but(masks_last=True),
    "128-turns": _backward(128, 128, False, False, False).but(masks_last=True, reverses_walks=True),
    "128-turns-fp16": _backward(128, 128, False, False, False).but(
        masks_last=True, reverses_walks=True, dtype=torch.float16
    ),
    "64-meets": _backward(64, 64, False, False, False, right=False).but(masks=False, shares_progress=True),
    "128-meets": _backward(128, 128, False, False, False, right=False).but(masks=False, shares_progress=True),
    "128-meets-fp16": _backward(128, 128, False, False, False, right=False).but(
        masks=False, shares_progress=True, dtype=torch.float16
    ),
    "256-meets": _backward(256, 256, False, False, False, right=False).but(masks=False, shares_progress=True),
    "128-meets-alibi": _backward(128, 128, False, False, False, right=False, side=_ALIBI).but(shares_progress=True),
    "64-turns": _backward(64, 64, False, False, False).but(reverses_walks=True),
    "128-long-grouped-ordered": _backward(128, 128, False, False, True).but(masks_last=True, reverses_lines=False),
    **{
        f"{name}-ordered": _backward(*heads, False, False, True)
        for name, heads in (("64", (64, 64)), ("128", (128, 128)), ("192x128", (192, 128)), ("256", (256, 256)))
    },
    "128-ordered-fp16": _backward(128, 128, False, False, True).but(dtype=torch.float16),
    **{
        f"{width}-uncut-ordered": _backward(width, width, False, False, True, right=False).but(masks=False)
        for width in (64, 128, 256)
    },
    "128-packed-window-ordered": _backward(128, 128, True, True, True),
    "256": _backward(256, 256, False, False, False),
    "256-packed-window-ordered": _backward(256, 256, True, True, True),
    "192x128": _backward(192, 128, False, False, False),
    "64-window": _backward(64, 64, False, True, False),
    "128-window": _backward(128, 128, False, True, False),
    **{
        f"{width}-window-rotated": _backward(width, width, False, True, False).but(rotates_walks=True)
        for width in (64, 128, 256)
    },
    "128-window-rotated-fp16": _backward(128, 128, False, True, False).but(rotates_walks=True, dtype=torch.float16),
    "128-packed-window-rotated-fp16": _backward(128, 128, True, True, False).but(
        rotates_walks=True, dtype=torch.float16
    ),
    "192x128-window-rotated": _backward(192, 128, False, True, False).but(rotates_walks=True),
    **{
        f"{name}-uncut": _backward(*heads, False, False, False, right=False).but(masks=False)
        for name, heads in (("64", (64, 64)), ("128", (128, 128)), ("192x128", (192, 128)), ("256", (256, 256)))
    },
    "128-uncut-fp16": _backward(128, 128, False, False, False, right=False).but(masks=False, dtype=torch.float16),
    "192x128-packed-window-ordered": _backward(192, 128, True, True, True),
    **{f"{width}": _backward(width, width, False, False, False) for width in (80, 96, 160, 192)},
    **{f"{width}-packed-window-ordered": _backward(width, width, True, True, True) for width in (80, 96, 160)},
    **{
        f"{name}-uncut": _backward(*heads, False, False, False, right=False).but(masks=False)
        for name, heads in (("80", (80, 80)), ("96", (96, 96)), ("96x80", (96, 80)), ("64x96", (64, 96)))
    },
    **{
        f"{width}-long-fp16": _backward(width, width, False, False, False).but(
            masks_last=True, reverses_walks=True, dtype=torch.float16
        )
        for width in (80, 96)
    },
    "96-softcap": _backward(96, 96, False, False, False, softcap=True),
    **{
        f"{width}-{name}": _backward(width, width, False, False, False, **changes)
        for width in (64, 128, 256)
        for name, changes in (("softcap", {"softcap": True}), ("alibi", {"side": _ALIBI}))
    },
    **{
        f"{width}-fp16": _backward(width, width, False, False, False).but(dtype=torch.float16)
        for width in (64, 128, 256)
    },
    **{
        f"{width}-single-tile": _backward(width, width, False, False, False, right=False).but(single_key_tile=True)
        for width in (64, 80, 96, 128)
    },
    **{f"{width}-lone": _backward(width, width, False, False, False).but(lone_tiles=1) for width in (32, 80, 96)},
    **{
        f"{width}-whole": _backward(width, width, False, False, False).but(whole_lines=True)
        for width in (32, 64, 80, 96, 128)
    },
    **{
        f"{width}-whole-uncut": _backward(width, width, False, False, False, right=False).but(
            whole_lines=True, masks=False
        )
        for width in (64, 96, 128)
    },
    **{
        f"{name}-single-tile": _backward(*heads, False, False, False, right=False).but(
            stores_dq=True, single_key_tile=True
        )
        for name, heads in (("160", (160, 160)), ("192x128", (192, 128)), ("256", (256, 256)))
    },
    **{
        f"{name}-single-tile-causal-fp16": _backward(*heads, False, False, False).but(
            stores_dq=True, single_key_tile=True, dtype=torch.float16
        )
        for name, heads in (("160", (160, 160)), ("192x128", (192, 128)))
    },
    "192x128-ordered-fp16": _backward(192, 128, False, False, True).but(dtype=torch.float16),
    "192x128-window-rotated-fp16": _backward(192, 128, False, True, False).but(rotates_walks=True, dtype=torch.float16),
    "192-whole": _backward(192, 192, False, False, False).but(stores_dq=True, whole_lines=True),
    "256-whole": _backward(256, 256, False, False, False).but(stores_dq=True, whole_lines=True),
    "256-whole-uncut-fp16": _backward(256, 256, False, False, False, right=False).but(
        stores_dq=True, whole_lines=True, masks=False, dtype=torch.float16
    ),
    "256-whole-softcap": _backward(256, 256, False, False, False, softcap=True).but(stores_dq=True, whole_lines=True),
    "64-whole-window": _backward(64, 64, False, True, False).but(whole_lines=True),
    "64-whole-fp16": _backward(64, 64, False, False, False).but(whole_lines=True, dtype=torch.float16),
    "128-whole-window-fp16": _backward(128, 128, False, True, False).but(whole_lines=True, dtype=torch.float16),
    "64-whole-softcap": _backward(64, 64, False, False, False, softcap=True).but(whole_lines=True),
    "128-whole-softcap": _backward(128, 128, False, False, False, softcap=True).but(whole_lines=True),
    **{
        f"{name}-packed-uncut": _backward(*heads, True, False, False, right=False).but(masks=False)
        for name, heads in (("64", (64, 64)), ("96", (96, 96)), ("128", (128, 128)), ("192x128", (192, 128)))
    },
    "128-packed-uncut-ordered-fp16": _backward(128, 128, True, False, True, right=False).but(
        masks=False, dtype=torch.float16
    ),
    "64-lone-rotated": _backward(64, 64, False, False, False).but(lone_tiles=1, rotates_walks=True),
    "64-lone-fp16": _backward(64, 64, False, False, False).but(lone_tiles=1, dtype=torch.float16),
    "128-lone": _backward(128, 128, False, False, False).but(lone_tiles=1, top_left=True),
    "128-lone-rotated-fp16": _backward(128, 128, False, False, False).but(
        lone_tiles=1, rotates_walks=True, dtype=torch.float16
    ),
    "64x128-lone": _backward(64, 128, False, False, False).but(lone_tiles=1),
    "64-single-tile-in-parts": _backward(64, 64, False, False, False, right=False).but(
        single_key_tile=True, divides_queries=True
    ),
    "128-in-parts-fp16": _backward(128, 128, False, False, False, right=False).but(
        masks_last=True, divides_queries=True, dtype=torch.float16
    ),
    "256-in-parts-ordered": _backward(256, 256, False, False, True, right=False).but(divides_queries=True),
    "128-single-tile-fp16": _backward(128, 128, False, False, False).but(
        single_key_tile=True, masks_last=True, dtype=torch.float16
    ),
    "64x96-single-tile-fp16": _backward(64, 96, False, False, False).but(single_key_tile=True, dtype=torch.float16),
    "256-single-tile-ordered": _backward(256, 256, False, False, True).but(single_key_tile=True, deterministic=False),
    "128-fp16-packed": _backward(128, 128, True, False, False).but(dtype=torch.float16),
    "128-long-fp16": _backward(128, 128, False, False, False).but(masks_last=True, dtype=torch.float16),
    "64-wide-strides": _backward(64, 64, False, False, False).but(wide_strides=True),
    "64-sinks": _backward(64, 64, False, False, False).but(sinks=True, has_dlse=True),
    "64-packed-sinks": _backward(64, 64, True, False, False).but(sinks=True, has_dlse=True),
    "64-blocks": _backward(64, 64, False, False, False, block_tile=(128, 128)),
    "128-blocks-ordered": _backward(128, 128, False, False, True, block_tile=(128, 256)),
    "64-small-blocks": _backward(64, 64, False, False, False, block_tile=(64, 64)),
    "64-blocks-of-64-queries": _backward(64, 64, False, False, False, block_tile=(64, 128)),
    "128-packed-small-blocks-ordered": _backward(128, 128, True, False, True, block_tile=(128, 64)),
    "192x128-small-blocks": _backward(192, 128, False, False, False, right=False, block_tile=(64, 64)),
    "64-packed-blocks": _backward(64, 64, True, False, False, block_tile=(128, 128)),
    "128-packed-blocks": _backward(128, 128, True, False, False, block_tile=(128, 128)),
    "128-packed-blocks-ordered-fp16": _backward(128, 128, True, True, True, block_tile=(256, 256)).but(
        dtype=torch.float16
    ),
    "192x128-packed-blocks": _backward(192, 128, True, False, False, right=False, block_tile=(128, 128)),
    "256-packed-blocks-ordered": _backward(256, 256, True, False, True, block_tile=(128, 128)),
    "160-blocks": _backward(160, 160, False, False, False, right=False, block_tile=(128, 128)),
    "192x128-blocks": _backward(192, 128, False, False, False, right=False, block_tile=(128, 128)),
    "256-blocks": _backward(256, 256, False, False, False, block_tile=(128, 128)),
}
_DROPOUT = aux_of(dropout=True)
_LENGTHS = aux_of(key_lengths_dtype=torch.int32)
_ALIBI_AND_PADDING = aux_of(key_lengths_dtype=torch.int64, mask=_PADDING_MASK, alibi=2)
_ALL = aux_of(key_lengths_dtype=torch.int64, dropout=True, bias=_BIAS, mask=_DENSE_MASK, alibi=1)
#: The backward with dropout, tables and key lengths: each alone, and all at once.
BACKWARD_FEATURE_FORMS = {
    **{
        f"{name}-{feature}": _backward(*heads, False, False, False, side=side)
        for name, heads in (("64", (64, 64)), ("128", (128, 128)), ("192x128", (192, 128)), ("256", (256, 256)))
        for feature, side in {
            "key-lengths": _LENGTHS,
            "padding-mask": aux_of(mask=_PADDING_MASK),
            "mask": aux_of(mask=_DENSE_MASK),
            "bias": aux_of(bias=_BIAS),
            "dropout": _DROPOUT,
        }.items()
    },
    "32-bias": _backward(32, 32, False, False, False, side=aux_of(bias=_BIAS)),
    "32-all": _backward(32, 32, True, True, False, side=_ALL),
    "32-stored-bias-ordered": _backward(32, 32, False, False, True, side=aux_of(bias=_BIAS), stored_bias=True),
    "96-bias": _backward(96, 96, False, False, False, right=False, side=aux_of(bias=_BIAS)),
    "80-bias-slopes-ordered": _backward(80, 80, False, False, True, side=aux_of(bias=_BIAS, alibi=2)),
    "128-bias": _backward(128, 128, False, False, False, right=False, side=aux_of(bias=_BIAS)),
    "128-bias-fp16-lengths-slopes": _backward(
        128, 128, False, True, False, side=aux_of(bias=_BIAS, alibi=1, key_lengths_dtype=torch.int32)
    ).but(dtype=torch.float16),
    "128-packed-bias-ordered": _backward(128, 128, True, False, True, side=aux_of(bias=_BIAS)),
    "128-unaligned-bias": _backward(128, 128, False, False, False, side=aux_of(bias=_UNALIGNED_BIAS)),
    **{
        f"{name}-stored-bias": _backward(*heads, False, False, False, side=aux_of(bias=_BIAS), stored_bias=True)
        for name, heads in (("64", (64, 64)), ("128", (128, 128)))
    },
    "96-blocks-stored-bias-ordered": _backward(
        96, 96, False, False, True, block_tile=(128, 128), side=aux_of(bias=_BIAS), stored_bias=True
    ),
    "64-key-lengths-ordered": _backward(64, 64, False, True, True, side=_LENGTHS),
    **{
        f"{width}-key-lengths-uncut": _backward(width, width, False, False, False, right=False, side=_LENGTHS).but(
            masks=False
        )
        for width in (64, 128)
    },
    "128-whole-dropout": _backward(128, 128, False, False, False, side=_DROPOUT).but(whole_lines=True),
    "256-whole-dropout": _backward(256, 256, False, False, False, side=_DROPOUT).but(stores_dq=True, whole_lines=True),
    "64-whole-stored-bias": _backward(
        64, 64, False, False, False, right=False, side=aux_of(bias=_BIAS), stored_bias=True
    ).but(whole_lines=True),
    "64-whole-learned-slopes": _backward(64, 64, False, False, False, side=_ALIBI, slope_sums=True).but(
        whole_lines=True
    ),
    "128-key-lengths-fp16": _backward(128, 128, False, False, False, side=_LENGTHS).but(dtype=torch.float16),
    "128-packed-dropout-softcap": _backward(128, 128, True, False, False, softcap=True, side=_DROPOUT),
    "128-blocks-dropout": _backward(128, 128, False, False, False, block_tile=(128, 128), side=_DROPOUT),
    **{
        f"{width}-single-tile-bias-and-dropout": _backward(
            width, width, False, False, False, right=False, side=aux_of(bias=_BIAS, dropout=True)
        ).but(single_key_tile=True)
        for width in (64, 128)
    },
    **{
        f"{name}-learned-slopes": _backward(*heads, False, False, False, side=_ALIBI, slope_sums=True)
        for name, heads in (("64", (64, 64)), ("96", (96, 96)), ("128", (128, 128)), ("192x128", (192, 128)))
    },
    "128-packed-learned-slopes-fp16": _backward(128, 128, True, False, False, side=_ALIBI, slope_sums=True).but(
        dtype=torch.float16
    ),
    "128-full-learned-slopes": _backward(128, 128, False, False, False, right=False, side=_ALIBI, slope_sums=True).but(
        masks=False
    ),
    "64-packed-blocks-learned-slopes-ordered": _backward(
        64, 64, True, False, True, block_tile=(128, 128), side=_ALIBI_AND_PADDING, slope_sums=True
    ),
    "128-blocks-learned-slopes-ordered": _backward(
        128, 128, False, False, True, block_tile=(128, 128), side=_ALIBI, slope_sums=True
    ),
    "256-learned-slopes": _backward(256, 256, False, False, False, side=_ALIBI, slope_sums=True),
    "256-blocks-learned-slopes": _backward(
        256, 256, False, False, False, block_tile=(128, 128), side=_ALIBI, slope_sums=True
    ),
    **{
        f"{width}-softcap-learned-slopes": _backward(
            width, width, False, False, False, softcap=True, side=aux_of(alibi=1, dropout=True), slope_sums=True
        )
        for width in (64, 128, 256)
    },
    "256-softcap-learned-slopes-ordered": _backward(
        256, 256, True, True, True, softcap=True, side=_ALIBI, slope_sums=True
    ),
    "64-all": _backward(64, 64, True, True, False, side=_ALL),
    "128-all-ordered": _backward(128, 128, False, False, True, side=_ALL),
    "256-all": _backward(256, 256, False, False, False, side=_ALL),
}
#: The backward with functions of scores: some have derivatives, and these are handed on apart or with the weights.
BACKWARD_FUNCTION_FORMS = {
    "64-alibi-function": _backward(64, 64, False, False, False, score_mod=_ALIBI_FUNCTION, covered=True),
    "64-capped-fp16-function": _backward(64, 64, False, False, False, score_mod=_CAPPED).but(dtype=torch.float16),
    "64-waves-dropout-function": _backward(64, 64, False, False, False, score_mod=_WAVES, side=_DROPOUT),
    "128-relative-function": _backward(128, 128, False, False, False, score_mod=_RELATIVE, covered=True),
    "128-relative-packed-ordered-function": _backward(128, 128, True, True, True, score_mod=_RELATIVE),
    "128-capped-bias-function": _backward(128, 128, False, False, False, score_mod=_CAPPED, side=aux_of(bias=_BIAS)),
    "192x128-capped-blocks-function": _backward(
        192, 128, False, False, False, score_mod=_CAPPED, block_tile=(128, 128)
    ),
    "256-waves-function": _backward(256, 256, False, False, False, score_mod=_WAVES),
    "256-capped-learned-slopes-dropout-function": _backward(
        256, 256, False, False, False, softcap=True, score_mod=_CAPPED, slope_sums=True,
        side=aux_of(alibi=1, dropout=True),
    ),
}  # fmt: skip
#: The gradient of a bias that scores share: each cut, and what changes its code.
BIAS_GRADIENT_FORMS = {
    "32-parts": _backward(32, 32, False, False, False, right=False, side=aux_of(bias=_BIAS)).but(
        masks=False, bias_in_parts=True
    ),
    "24x32-window-shared": _backward(24, 32, False, True, False, side=aux_of(bias=_BIAS)).but(
        bias_shared_by_heads=True
    ),
    "64-causal": _backward(64, 64, False, False, False, side=aux_of(bias=_BIAS)),
    "96-parts": _backward(96, 96, False, False, False, right=False, side=aux_of(bias=_BIAS)).but(
        masks=False, bias_in_parts=True
    ),
    "64-padding-dropout-fp16": _backward(
        64, 64, False, False, False, right=False, side=aux_of(bias=_BIAS, mask=_PADDING_MASK, dropout=True)
    ).but(masks=False, dtype=torch.float16),
    "128-slopes-window-shared": _backward(128, 128, False, True, False, side=aux_of(bias=_BIAS, alibi=2)).but(
        bias_shared_by_heads=True
    ),
    "192x128-key-lengths": _backward(
        192, 128, False, False, False, right=False, side=aux_of(bias=_BIAS, key_lengths_dtype=torch.int64)
    ),
    "256-softcap": _backward(256, 256, False, False, False, softcap=True, right=False, side=aux_of(bias=_BIAS)),
    "256-mask": _backward(256, 256, False, False, False, side=aux_of(bias=_BIAS, mask=_DENSE_MASK)),
    "64-packed": _backward(64, 64, True, False, False, right=False, side=aux_of(bias=_BIAS)).but(bias_in_parts=True),
    "32-packed-window-shared-lengths": _backward(
        32, 32, True, True, False, side=aux_of(bias=_BIAS, alibi=1, key_lengths_dtype=torch.int32)
    ).but(bias_shared_by_heads=True),
    "128-packed-fp16": _backward(128, 128, True, False, False, side=aux_of(bias=_BIAS)).but(dtype=torch.float16),
    "64-blocks": _backward(
        64, 64, False, False, False, right=False, block_tile=(128, 128), side=aux_of(bias=_BIAS)
    ).but(masks=False),
    "64-small-blocks": _backward(
        64, 64, False, False, False, right=False, block_tile=(64, 64), side=aux_of(bias=_BIAS)
    ).but(masks=False),
    "256-causal-small-blocks-mask": _backward(
        256, 256, False, False, False, block_tile=(64, 64), side=aux_of(bias=_BIAS, mask=_DENSE_MASK)
    ),
    "192x128-causal-blocks-dropout": _backward(
        192, 128, False, False, False, block_tile=(64, 256), side=aux_of(bias=_BIAS, dropout=True)
    ),
    "256-packed-blocks-shared": _backward(
        256, 256, True, False, False, block_tile=(128, 128), side=aux_of(bias=_BIAS)
    ).but(bias_shared_by_heads=True),
    "64-waves-function": _backward(64, 64, False, False, False, score_mod=_WAVES, side=aux_of(bias=_BIAS)).but(
        masks=False
    ),
    "128-capped-function-fp16": _backward(
        128, 128, False, False, False, score_mod=_CAPPED, side=aux_of(bias=_BIAS)
    ).but(dtype=torch.float16),
    "256-relative-packed-blocks-function": _backward(
        256, 256, True, False, False, score_mod=_RELATIVE, block_tile=(128, 128), side=aux_of(bias=_BIAS)
    ),
}

#: Backwards of heads wider than 256 columns: all that changes their machine code.
WIDE_BACKWARD_FORMS = {
    "512": _HEADS["512"],
    "512-fp16-sinks-lse": _HEADS["512"]._replace(dtype=torch.float16, sinks=True, has_dlse=True, window_right=-1),
    "512-causal": _HEADS["512"]._replace(window_right=0),
    "512-window": _HEADS["512"]._replace(**_MASKS["window"], dtype=torch.float16),
    "512-window-top-left": _HEADS["512"]._replace(window_left=127, top_left=True),
    "512-cut-keys": _HEADS["512"]._replace(seq_k=1000),
    "320": _HEADS["320"],
    "320-causal-fp16": _HEADS["320"]._replace(window_right=0, dtype=torch.float16),
    "320-window": _HEADS["320"]._replace(**_MASKS["window"]),
    "512x64": Call(head_dim=512, head_dim_v=64),
    "512x64-window": Call(head_dim=512, head_dim_v=64, **_MASKS["window"]),
    "128x512": Call(head_dim=128, head_dim_v=512),
    "128x512-window-fp16": Call(head_dim=128, head_dim_v=512, **_MASKS["window"], dtype=torch.float16),
    "64x320": Call(head_dim=64, head_dim_v=320),
    "64x320-causal": Call(head_dim=64, head_dim_v=320, window_right=0),
    "512-packed": _HEADS["512"]._replace(**_MASKS["packed"]),
    "512-packed-full-lengths": _HEADS["512"]._replace(
        sequences=5, key_lengths_dtype=torch.int64, sinks=True, dtype=torch.float16
    ),
    "512-lengths": _HEADS["512"]._replace(key_lengths_dtype=torch.int32),
    "512-window-softcap": _HEADS["512"]._replace(**_MASKS["window"], softcap=30.0),
    "320-packed": _HEADS["320"]._replace(**_MASKS["packed"]),
    "320-packed-window-softcap-fp16": _HEADS["320"]._replace(
        **_MASKS["window"], sequences=5, softcap=30.0, dtype=torch.float16
    ),
    "320-lengths-softcap": _HEADS["320"]._replace(key_lengths_dtype=torch.int32, softcap=30.0),
    "512x64-packed-full": Call(head_dim=512, head_dim_v=64, sequences=5),
    "512x64-packed-window": Call(head_dim=512, head_dim_v=64, sequences=5, **_MASKS["window"]),
    "128x512-lengths-window": Call(head_dim=128, head_dim_v=512, key_lengths_dtype=torch.int32, **_MASKS["window"]),
    "64x320-packed-lengths-softcap": Call(
        head_dim=64, head_dim_v=320, **_MASKS["packed"], key_lengths_dtype=torch.int32, softcap=30.0
    ),
}

#: Forwards of float32: all that changes their machine code.
FLOAT32_FORWARD_FORMS = {
    name: call._replace(dtype=torch.float32)
    for name, call in {
        "256": _HEADS["256"],
        "256-sinks": _HEADS["256"]._replace(sinks=True),
        "128-causal": _HEADS["128"]._replace(window_right=0),
        "96": _HEADS["96"],
        "256-causal": _HEADS["256"]._replace(window_right=0),
        "256-window": _HEADS["256"]._replace(**_MASKS["window"]),
        "256-window-top-left": _HEADS["256"]._replace(window_left=127, top_left=True),
        "256-cut-keys": _HEADS["256"]._replace(seq_k=1000),
        "512": _HEADS["512"],
        "512-causal": _HEADS["512"]._replace(window_right=0),
        "512-window": _HEADS["512"]._replace(**_MASKS["window"]),
        "192x128-causal": _HEADS["192x128"]._replace(window_right=0),
        "320": _HEADS["320"],
        "64x512": Call(head_dim=64, head_dim_v=512),
        "512x64-causal": Call(head_dim=512, head_dim_v=64, window_right=0),
    }.items()
}

#: Backwards of float32: all that changes their machine code.
FLOAT32_BACKWARD_FORMS = {
    name: call._replace(dtype=torch.float32)
    for name, call in {
        "128": _HEADS["128"],
        "128-sinks-lse": _HEADS["128"]._replace(sinks=True, has_dlse=True, window_right=-1),
        "128-causal": _HEADS["128"]._replace(window_right=0),
        "128-window": _HEADS["128"]._replace(**_MASKS["window"]),
        "128-window-top-left": _HEADS["128"]._replace(window_left=127, top_left=True),
        "128-cut-keys": _HEADS["128"]._replace(seq_k=1000),
        "96": _HEADS["96"],
        "96-causal": _HEADS["96"]._replace(window_right=0),
        "72x128-causal": Call(head_dim=72, head_dim_v=128, window_right=0),
        "128x64": Call(head_dim=128, head_dim_v=64),
        "128x8-window": Call(head_dim=128, head_dim_v=8, **_MASKS["window"]),
        "256": _HEADS["256"],
        "256-causal": _HEADS["256"]._replace(window_right=0),
        "256-window": _HEADS["256"]._replace(**_MASKS["window"]),
        "256-cut-keys": _HEADS["256"]._replace(seq_k=1000),
        "192": _HEADS["192"],
        "192-causal": _HEADS["192"]._replace(window_right=0),
        "144-window": Call(head_dim=144, head_dim_v=144, **_MASKS["window"]),
        "192x128-causal": _HEADS["192x128"]._replace(window_right=0),
        "192x64": Call(head_dim=192, head_dim_v=64),
        "192x256": Call(head_dim=192, head_dim_v=256),
        "256x192-causal": _HEADS["256x192"]._replace(window_right=0),
        "256x128": Call(head_dim=256, head_dim_v=128),
        "256x64-window": Call(head_dim=256, head_dim_v=64, **_MASKS["window"]),
        "128x192": Call(head_dim=128, head_dim_v=192),
        "128x256-causal": Call(head_dim=128, head_dim_v=256, window_right=0),
        "512": _HEADS["512"],
        "512-window": _HEADS["512"]._replace(**_MASKS["window"]),
        "512-cut-keys": _HEADS["512"]._replace(seq_k=1000),
        "320-causal": _HEADS["320"]._replace(window_right=0),
        "384": Call(head_dim=384, head_dim_v=384),
        "512x64-causal": Call(head_dim=512, head_dim_v=64, window_right=0),
        "72x512": Call(head_dim=72, head_dim_v=512),
    }.items()
}

#: Forms whose products ptxas serialises, because dk and dv beside a producer leave too few registers
#: (decisions/hopper_backward.md).
SERIALISED = {"192x128-blocks", "192x128-packed-blocks"}
