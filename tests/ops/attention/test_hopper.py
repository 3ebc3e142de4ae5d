"""The Hopper kernels: which calls they serve, how a launch is planned, and their machine code, all without a GPU."""

from __future__ import annotations

import bisect
import collections
import itertools
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from support.compilation import needs_triton  # noqa: F401

# isort: split
from flashtile._backends import alignment, devices, tma
from flashtile._backends import launch as backend_launch
from flashtile._backends.allocate import Layout, contiguous_strides
from flashtile._backends.launch import KernelSource
from flashtile.ops.attention import call as description
from flashtile.ops.attention import operator, select
from flashtile.ops.attention.call import Phase, TensorFacts
from flashtile.ops.attention.gpu import reductions
from flashtile.ops.attention.gpu.parameters import SidePointers, Window
from flashtile.ops.attention.hopper import (
    backward_configs,
    backward_loads,
    backward_pieces,
    backward_tiles,
    configs,
    forward,
    launch,
    primitives,
    schedule,
    splits,
    tuned_rows,
    unsupported_reason,
)
from flashtile.ops.attention.hopper.convert import Operand, convert_kernel
from flashtile.ops.attention.hopper.separate_configs import (
    choose_float32_forward_config,
    is_wide_float32,
    parts_pay,
    separate_cut,
    shared_rows_memory,
)
from flashtile.ops.attention.hopper.tuned_rows import forward_config
from flashtile.ops.attention.score_program import UNCHANGED
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, Gradients, Origin, SideInputs, Wanted
from support.attention.backend_calls import hopper_call, with_changes
from support.attention.hopper_forms import (
    BACKWARD_FEATURE_FORMS,
    BACKWARD_FORMS,
    BACKWARD_FUNCTION_FORMS,
    BIAS_GRADIENT_FORMS,
    BLOCK_FORMS,
    CAPTURED_GRADIENT_FORMS,
    FEATURE_FORMS,
    FLOAT32_BACKWARD_FORMS,
    FLOAT32_FORWARD_FORMS,
    FORMS,
    FP8_FORMS,
    FUNCTION_FORMS,
    REPEATS,
    SCORE_FORMS,
    SERIALISED,
    WIDE_BACKWARD_FORMS,
    BackwardForm,
)
from support.compilation import machine_code
from support.compilation.checked_code import check_code
from support.compilation.machine_code import (
    Binary,
    Call,
    apart_backward_sources,
    check_barriers,
    check_fit,
    check_products,
    described,
    float32_forward_sources,
    hopper_config,
    hopper_plan,
    passed_by,
    sass,
    serialises_products,
    shares_of,
    with_news,
)
from support.running.each_case import each_case

_SM_90 = devices.KNOWN_DEVICES["sm_90"]
_LIMIT = _SM_90.shared_memory
_CALL = Call(head_dim=128, head_dim_v=128)


# Which calls are served


def _call(phase: Phase) -> description.Call:
    q = torch.empty(1, 200, 1, 128, dtype=torch.bfloat16)
    return hopper_call(phase, q, q, q, SideInputs(), AttentionSpec(1.0))


_BIAS = TensorFacts(torch.bfloat16, (1, 1, 128, 128), (128 * 128, 128 * 128, 128, 1), 0)
_PADDING = TensorFacts(torch.bool, (2, 1, 1, 4096), (4096, 4096, 4096, 1), 0)


def _chosen(phase: Phase, backend: str = "auto", **changes) -> str | None:
    call = with_changes(_call(phase)._replace(requested=backend), **changes)
    return select.BACKENDS.choose(call).backend


_FP8, _FP32 = {"dtype": torch.float8_e4m3fn}, {"dtype": torch.float32}
_FP32_FORWARD = {**_FP32, "head_dim": 256, "rows": 1024}
#: What a backward of heads wider than 256 columns lacks.
_NARROW_ONLY: list[dict[str, Any]] = [
    {"bias": _BIAS}, {"mask": True}, {"alibi_slopes": True}, {"score_program": UNCHANGED}, {"dropout_p": 0.1},
    {"block_tile": (128, 128)},
]  # fmt: skip
_LARGE_BLOCKS = [
    {"block_tile": (128, 128)}, {"block_tile": (256, 384)}, {"block_tile": (128, 128), "head_dim": 192},
    {"head_dim_v": 256, "block_tile": (128, 64)},
]  # fmt: skip
_CAPTURED = {"score_program": UNCHANGED, "wanted": Wanted(captured=(True,))}
#: Changes of a call, by phase and by the backend that serves it unless another one is asked for.
_SERVED: dict[tuple[Phase, str], list[dict[str, Any]]] = {
    ("forward", "hopper"): [
        {}, {"dtype": torch.float16}, {**_FP8, "head_dim": 256}, {**_FP8, "head_dim_v": 136},
        {**_FP8, "block_tile": (64, 128)}, {"head_dim": 1}, {"head_dim": 256, "head_dim_v": 8}, {"head_dim": 257},
        {"head_dim_v": 512}, {**_FP32, "rows": 1024}, {"dropout_p": 0.1}, {"key_lengths": True}, {"bias": _BIAS},
        {"mask": True}, {"origin": Origin(0, 0, 0, 0, 1)}, {"origin": Origin(7, 0, 0, 0, 1)},
        {"origin": Origin(32, 16, 0, 0, 1), "dropout_p": 0.1}, {"score_program": UNCHANGED},
        {"score_program": UNCHANGED, "returns_max_scores": True}, {"block_tile": (64, 128)}, {"block_tile": (192, 64)},
        {"wanted": Wanted(alibi_slopes=True)}, *_LARGE_BLOCKS, _FP32_FORWARD, {**_FP32_FORWARD, "head_dim": 72},
        {**_FP32_FORWARD, "head_dim": 64, "head_dim_v": 512}, {**_FP32, "rows": 512, "head_dim": 72},
    ],
    ("forward", "triton"): [
        {**_FP8, "head_dim": 257}, {**_FP8, "head_dim_v": 264}, {"head_dim_v": 12}, {**_FP32, "softcap": 5.0},
        {"origin": Origin(7, 0, 0, 0, 1), "dropout_p": 0.1}, {**_FP8, "dropout_p": 0.1}, {**_FP8, "key_lengths": True},
        {**_FP8, "bias": _BIAS}, {**_FP8, "mask": True}, {**_FP8, "score_program": UNCHANGED}, {"aligned": False},
        {"arch": "sm_100"}, {"arch": "sm_89"}, {**_FP32_FORWARD, "head_dim": 64, "head_dim_v": 64},
        {**_FP32_FORWARD, "head_dim": 520}, {**_FP32_FORWARD, "tf32": True}, {**_FP32_FORWARD, "softcap": 5.0},
        {**_FP32_FORWARD, "cu_seqlens_q": True}, {**_FP32_FORWARD, "dropout_p": 0.1},
    ],
    ("backward", "hopper"): [
        {}, {"score_program": UNCHANGED}, _CAPTURED, {"wanted": Wanted(alibi_slopes=True)}, {"head_dim": 36},
        {"head_dim": 257},
        {"head_dim_v": 264}, *_LARGE_BLOCKS, *({"head_dim": 256, **change} for change in _NARROW_ONLY),
        {"head_dim": 320, "cu_seqlens_q": True}, {"head_dim": 320, "key_lengths": True},
        {"head_dim": 320, "softcap": 5.0}, _FP32, {**_FP32, "head_dim": 72},
        {**_FP32, "head_dim": 72, "head_dim_v": 8}, {**_FP32, "head_dim": 512},
        {**_FP32, "head_dim": 136, "head_dim_v": 8}, {**_FP32, "head_dim_v": 512},
    ],
    ("backward", "triton"): [
        {**_CAPTURED, "deterministic": True}, {**_CAPTURED, "batch_invariant": True},
        *({"head_dim": 320, **change} for change in _NARROW_ONLY), {**_FP32, "head_dim": 64},
        {**_FP32, "head_dim_v": 520}, {**_FP32, "tf32": True}, {**_FP32, "softcap": 5.0},
        {**_FP32, "cu_seqlens_q": True}, {**_FP32, "dropout_p": 0.1},
    ],
}  # fmt: skip


@each_case("phase, backend, changes", [(*key, change) for key, changes in _SERVED.items() for change in changes])
def test_who_serves_a_call(phase, backend, changes):
    """A backward that the Hopper kernels lack is the portable one, also where the forward was asked for by name: its
    out and lse are those of any backend. In float32 the forward lacks more."""
    assert _chosen(phase, **changes) == backend
    assert _chosen(phase, "triton", **changes) == "triton"
    if backend == "hopper":
        assert _chosen(phase, "hopper", **changes) == "hopper"
    elif phase == "forward" or changes.get("dtype") is not torch.float32:
        assert _chosen(phase, "hopper", **changes) == (None if phase == "forward" else "triton")


def test_many_short_rows_of_float32_have_hopper_kernels_only_if_asked_for():
    many = {**_FP32, "rows": 512, "head_dim": 72, "q_shape": (16, 512, 8)}
    assert (_chosen("forward", **many), _chosen("forward", "hopper", **many)) == ("triton", "hopper")


@each_case(
    "phase, changes, message",
    [
        *(("backward", {"head_dim": 320, **change}, "wider than 256 columns has no") for change in _NARROW_ONLY),
        ("backward", {**_CAPTURED, "deterministic": True}, "in no fixed order"),
        ("backward", {**_CAPTURED, "batch_invariant": True}, "in no fixed order"),
        ("backward", {**_FP32, "softcap": 5.0}, "backward of float32 has no softcap"),
        ("forward", {**_FP32_FORWARD, "cu_seqlens_q": True}, "forward of float32 has no packed sequences"),
        ("forward", {**_FP32_FORWARD, "returns_max_scores": True}, "forward of float32 has no max_scores"),
    ],
)
def test_why_a_call_is_not_served(phase, changes, message):
    assert message in (unsupported_reason(with_changes(_call(phase), **changes)) or "")


@pytest.mark.parametrize(
    "batch, rows, heads, keys, widest, pay",
    [
        (1, 512, 8, 512, 128, True), (4, 512, 8, 512, 128, True), (16, 512, 8, 512, 128, False),
        (8, 256, 8, 256, 128, False), (8, 256, 8, 256, 136, True), (16, 512, 8, 1024, 128, True),
    ],
)  # fmt: skip
def test_where_parts_of_float32_pay(batch, rows, heads, keys, widest, pay):
    call = Call(batch=batch, seq_q=rows, seq_k=keys, heads=heads, head_dim=widest, head_dim_v=widest)
    assert parts_pay(machine_code.described_on_hopper(call)) is pay


def test_the_interpreter_and_the_cpu_have_no_hopper_kernels():
    call = _call("forward")
    interpreting = call.machine._replace(interpreting=True)
    assert select.BACKENDS.choose(call._replace(machine=interpreting)).backend != "hopper"
    on_cpu = description.Machine("cpu", devices.INTERPRETER, 1)
    choice = select.BACKENDS.choose(call._replace(requested="hopper", machine=on_cpu))
    assert choice.backend is None and "sm_90" in choice.reason


def _spaced(*strides: int, shape: tuple[int, ...] = (2, 5, 3, 8)) -> torch.Tensor:
    return torch.zeros(4096, dtype=torch.bfloat16).as_strided(shape, (*strides, 1))


@pytest.mark.parametrize(
    "tensor, aligned",
    [
        (_spaced(120, 24, 8), True),
        (_spaced(0, 0, 0), True),
        (_spaced(121, 24, 8), False),
        (_spaced(120, 20, 8), False),
        (_spaced(120, 24, 12), False),
        (_spaced(24, 8, shape=(5, 3, 8)), True),
        (_spaced(24, 4, shape=(5, 3, 8)), False),
        (_spaced(120, 24, 8)[:, :, :, 4:], False),
        (_spaced(1, 24, 8, shape=(1, 5, 3, 8)), True),  # the stride of one batch entry leads nowhere
        (_spaced(24, 1, shape=(5, 1, 8)), True),
        (_spaced(1, 24, 4, shape=(1, 5, 3, 8)), False),
    ],
)
def test_what_tma_can_read(tensor, aligned):
    assert alignment.aligned(tensor) is aligned
    assert alignment.aligned(_spaced(120, 24, 8), tensor) is aligned


def test_a_copy_of_q_for_a_negative_scale_must_be_aligned_too():
    q, k = (torch.zeros(1, 70, 1, 24, dtype=torch.bfloat16)[..., :20] for _ in range(2))
    v, spec = torch.zeros(1, 70, 1, 24, dtype=torch.bfloat16), AttentionSpec(1.0)
    assert unsupported_reason(hopper_call("forward", q, k, v, SideInputs(), spec)) is None
    reason = unsupported_reason(hopper_call("forward", q, k, v, SideInputs(), spec._replace(scale=-1.0)))
    assert reason is not None and "multiples of 16 bytes" in reason


# Tiles and plans


@pytest.mark.parametrize(
    "chunks_of, least, widest", [(configs.column_chunks, 16, 512), (backward_configs.backward_chunks, 32, 256)]
)
def test_heads_are_padded_little(chunks_of, least, widest):
    """A tile has one power of two of columns or two, the fewest that hold the head; up to 64 there is one."""
    powers = [2**n for n in range(4, 9)]
    cuts = [(first, 0) for first in powers if first >= least] + [(256, 256)]
    cuts += [(first, second) for first in powers for second in powers if 64 <= first > second]
    for head_dim in range(1, widest + 1):
        holding = [cut for cut in cuts if sum(cut) >= head_dim]
        assert chunks_of(head_dim) == min(holding, key=lambda cut: (sum(cut), cut[1]))


def test_parts_of_wide_values_have_all_columns():
    for head_dim_v in range(8, 513, 8):
        parts, width = configs.value_parts(head_dim_v), sum(configs.value_chunks(head_dim_v))
        assert (parts - 1) * width < head_dim_v <= parts * width and width <= 256


#: Heads at both ends of each 16 columns, which is what tiles and products are made of; the widest leave few places.
_HEADS = list(itertools.product(sorted({*range(1, 257, 16), *range(16, 257, 16)}), (8, *range(16, 257, 16))))
_WIDE_HEADS = [heads for heads in itertools.product((8, *range(16, 513, 16)), repeat=2) if max(heads) > 256]
#: Lengths, and where there are none on either side, both sides of a band.
_LENGTHS_AND_BANDS = [
    {"seq_q": 512}, {"seq_q": 2048, "window_right": 0}, {"seq_q": 8192}, {"seq_q": 16384, "window_right": 0},
    {"seq_q": 8192, "window_left": 5000, "window_right": 0},
]  # fmt: skip


def _described(head_dim: int, head_dim_v: int, phase: Phase = "forward", **fields: Any) -> description.Call:
    return machine_code.described_on_hopper(Call(head_dim=head_dim, head_dim_v=head_dim_v, **fields), phase)


@pytest.mark.parametrize("dtype", [torch.bfloat16, configs.FP8], ids=str)
def test_every_head_fits_on_chip(dtype):
    found: set[configs.HopperConfig] = set()
    heads = _HEADS if dtype is configs.FP8 else [*_HEADS, *_WIDE_HEADS]
    biases = (False,) if dtype is configs.FP8 else (False, True)
    for (head_dim, head_dim_v), situation, moved in itertools.product(heads, _LENGTHS_AND_BANDS, biases):
        bias = TensorFacts(dtype, (2, 4, 4096, 4096), (2**26, 2**24, 4096, 1)) if moved else None
        call = _described(head_dim, head_dim_v, dtype=dtype, bias=bias, seq_k=situation["seq_q"], **situation)
        config = configs.choose_config(call)
        assert configs.shared_memory(config, head_dim, head_dim_v, dtype) <= configs.SHARED_MEMORY
        other = configs.choose_config(call, spills=True)
        assert configs.shared_memory(other, head_dim, head_dim_v, dtype) <= configs.SHARED_MEMORY
        small = configs.choose_config(call._replace(spec=call.spec._replace(block_shape=(1, 1, 64, 64))))
        assert (small.block_m, small.block_n) == (64, 64)
        assert configs.shared_memory(small, head_dim, head_dim_v, dtype) <= small.room
        if not configs.out_places(config, head_dim, head_dim_v, dtype):  # out takes the places of the queries' chunks
            chunks, chunks_v = configs.column_chunks(head_dim, dtype), configs.value_chunks(head_dim_v)
            assert all(width <= place for place, width in zip(chunks, chunks_v, strict=True))
        found |= {config, other, small}
    for config in found:  # the registers of a program are those of a multiprocessor
        partitions = config.consumers + 1  # Triton rounds the producer up to four warps
        assert config.resident * partitions * config.max_registers * 128 <= 65536
        assert config.consumers * config.registers + configs.PRODUCER_REGISTERS <= partitions * config.max_registers


#: A bias of two bytes that TMA does not bring.
_UNMOVED = TensorFacts(torch.bfloat16, (1, 1, 1024, 1023), (1, 1, 1023, 1))
_CAUSAL, _WINDOW = {"window_right": 0}, {"window_left": 99, "window_right": 0}
_TABLE = _PADDING._replace(shape=(1, 4, 4096, 4096), dtype=torch.bfloat16)
#: What the plan of a forward says, of which call; and for changes of that call, with one number of `d` for both widths
#: and of `s` for both lengths, what it says.
_FORWARDS: dict[tuple[str, ...], tuple[dict[str, Any], list[tuple]]] = {
    # Long 8-bit calls have a third consumer; neither in a window nor over a block mask, whose tiles 192 rows do not
    # divide.
    ("consumers", "block_n"): ({"dtype": configs.FP8}, [
        ({"seq_q": 2048}, 3, 64), ({"seq_q": 8191, **_CAUSAL}, 2, 128), ({"seq_q": 8192, "window_left": 5000}, 2, 128),
        ({"seq_q": 8192, "block_tile": (256, 128)}, 2, 128), ({"seq_q": 8192, "head_dim": 192}, 2, 128),
    ]),
    # Short calls and those in narrow windows have smaller tiles; unless tables or dropout need the larger ones, which
    # were measured so.
    ("CONSUMERS", "block_n"): ({}, [
        ({"d": 64, "s": 256}, 1, 128),
        ({"d": 40, "s": 256}, 2, 128),  # does not fill its tile
        ({"d": 64, "s": 257}, 1, 64), ({"d": 64, "s": 256, "seq_k": 257}, 2, 128), ({"d": 64, "s": 512}, 1, 128),
        ({"d": 64, "s": 384}, 3, 128), ({"d": 64, "s": 641}, 3, 128),
        ({"d": 64, "s": 256, "dtype": configs.FP8}, 2, 128), ({"d": 64, "s": 256, "mask": _PADDING}, 2, 128),
        ({"d": 64, "s": 256, **_CAUSAL}, 2, 64), ({"d": 64, "s": 1024, **_CAUSAL}, 1, 128),
        ({"d": 64, "s": 1025, **_CAUSAL}, 2, 128),
        ({"d": 64, "s": 8192, "window_right": 300, "window_left": 300}, 2, 128),
        ({"d": 128, "s": 8192, "window_right": 24, "window_left": 1000, "sequences": 5}, 2, 64),
        ({"d": 96, "s": 8192, "window_left": 64}, 2, 128),  # all keys behind a query
        ({"d": 64, "s": 256, **_CAUSAL, "window_left": 9, "dtype": configs.FP8}, 2, 128),
        ({"d": 256, "s": 8192, **_CAUSAL, "window_left": 128}, 2, 64),  # as always
        ({"d": 128, "s": 512}, 2, 64), ({"d": 128, "s": 513}, 2, 128),
    ]),
    # Order and end of tiles with tables.
    ("BATCH_FIRST", "MASK_ENDS_KEYS"): ({}, [
        ({}, False, False), ({"mask": _PADDING}, False, True),
        ({"mask": _PADDING._replace(shape=(1, 1, 1, 4096))}, False, True),
        ({"mask": _PADDING._replace(shape=(1, 1, 4096, 4096))}, True, False),
        ({"mask": _PADDING._replace(shape=(1, 1, 4096, 1))}, False, False), ({"bias": _TABLE}, True, False),
        ({"bias": _TABLE, "sequences": 2}, False, False),
        ({"bias": _TABLE._replace(shape=(2, 4, 4096, 4096))}, False, False),
    ]),
    ("programs", "dynamic"): ({"multiprocessors": 132}, [
        ({"seq_k": 4095}, 132, False),
        ({"seq_k": 511}, 132, True),  # memory limits it
        ({"batch": 200, "s": 128}, 132, True), ({"batch": 200, "s": 96, "d": 64}, 264, True),
        ({"batch": 200, "s": 128, "d": 64}, 264, False),  # keys stay near
        ({"seq_q": 1}, 256, False),  # 32 splits
        ({"batch": 1, "h": 1, "s": 8192, "d": 128, **_CAUSAL, "window_left": 200}, 128, False),  # few keys of a tile
        ({"seq_k": 4096}, 132, True),  # long enough to be beside a transfer
        (_CAUSAL, 132, True),
        ({**_CAUSAL, "seq_q": 500}, 256, False),  # each program has one of four splits of a tile
        ({"block_tile": (256, 128)}, 132, True),
        ({"block_tile": (256, 128), "seq_q": 129}, 16, False),  # whole tiles of the mask: two of each head
        ({"key_lengths_dtype": torch.int32}, 132, True), ({"sequences": 3, "seq_q": 100, "seq_k": 100}, 20, False),
        ({"batch": 0}, 0, False), ({"seq_k": 0}, 0, False),
    ]),
    # Few tiles have one consumer.
    ("block_m",): ({"multiprocessors": 132, "batch": 1}, [
        ({"d": 64, "h": 20, "s": 1500}, 64),  # 160 tiles of 192 queries are two rounds, and 480 of 64 less than two
        ({"d": 64, "h": 12, "s": 1500}, 192),  # 96 tiles fit one round
        ({"d": 64, "h": 12, "s": 2048, **_CAUSAL}, 64), ({"d": 64, "h": 64, "s": 4096, "dropout_p": 0.1}, 64),
        ({"d": 64, "h": 1, "s": 1024, "bias": _UNMOVED}, 128),
        ({"d": 40, "h": 8, "s": 1024}, 64),  # fewer tiles than multiprocessors
        ({"d": 128, "h": 16, "s": 1024, **_CAUSAL}, 64), ({"d": 128, "h": 400, "s": 73, "dropout_p": 0.1}, 64),
        ({"d": 96, "h": 400, "s": 73, "dropout_p": 0.1}, 128), ({"d": 256, "h": 400, "s": 512, **_CAUSAL}, 64),
        ({"d": 256, "h": 400, "s": 512}, 128), ({"d": 256, "h": 400, "s": 512, **_CAUSAL, "seq_k": 4096}, 128),
        ({"d": 224, "h": 400, "s": 256, **_CAUSAL}, 64), ({"d": 192, "h": 400, "s": 256, **_CAUSAL}, 128),
        ({"d": 512, "h": 1, "s": 1024}, 128),
        # And so have short sequences.
        ({"d": 256, "h": 400, "s": 16, "dropout_p": 0.1}, 64),
        ({"d": 192, "h": 400, "seq_q": 64, "seq_k": 4096, "mask": _PADDING}, 64),
        ({"d": 64, "h": 400, "s": 49, "window_left": 30, **_CAUSAL}, 128),
        # And those with an odd number of tiles of 64.
        ({"d": 96, "h": 400, "s": 513, **_CAUSAL}, 64), ({"d": 128, "h": 400, "s": 257}, 128),
        ({"d": 128, "h": 400, "s": 257, **_CAUSAL}, 64),
    ]),
    # An odd number of tiles of 64 keys.
    ("block_n",): ({}, [
        ({"d": 80, "s": 321}, 128), ({"d": 80, "s": 641, **_CAUSAL}, 128), ({"d": 80, "s": 448}, 64),
        ({"d": 96, "s": 576}, 128), ({"d": 128, "seq_q": 2048, "seq_k": 144}, 64),
    ]),
}  # fmt: skip
_BOTH = {"d": ("head_dim", "head_dim_v"), "s": ("seq_q", "seq_k"), "h": ("heads", "heads_kv")}


@each_case("names, base, row", [(names, base, row) for names, (base, rows) in _FORWARDS.items() for row in rows])
def test_plans_of_the_forward(names, base, row, monkeypatch):
    monkeypatch.setattr(tuned_rows, "triton_version", lambda: (3, 6))
    change, *expected = row
    both = {name: change[short] for short, names in _BOTH.items() if short in change for name in names}
    call = _CALL._replace(**base | both | {name: value for name, value in change.items() if name not in _BOTH})
    config, plan = hopper_config(call), hopper_plan(call)
    source = plan.kernel.source
    found = {"programs": plan.kernel.programs, "dynamic": plan.dynamic, **config._asdict(), **source.constants}
    found["block_m"] = config.block_m
    assert [found[name] for name in names] == expected
    assert found["CONSUMERS"] == config.consumers
    assert configs.shared_memory(config, call.head_dim, call.head_dim_v, call.dtype) <= config.room
    assert f"1, {config.block_n}, 1, " in dict(zip(source.function.arg_names, source.types, strict=False))["k_desc"]


@pytest.mark.parametrize("sequences, count", [(1, 4), (60, 1)])
def test_each_packed_sequence_has_a_tile(sequences, count):
    """Queries alone would be eight tiles of each head."""
    call = Call(head_dim=128, head_dim_v=128, heads=8, seq_q=512, seq_k=32768, sequences=sequences, multiprocessors=132)
    described = machine_code.described_on_hopper(call)
    assert splits.forward_splits(described, configs.choose_config(described)) == count


@pytest.mark.parametrize(
    "change, keys",
    [
        ({}, 64),
        ({"head_dim": 40, "head_dim_v": 40, "window_right": 0, "sequences": 2}, 64),
        ({"dtype": configs.FP8}, 64),
        ({"dtype": torch.float16}, 128),
        ({"window_left": 100}, 128),
        ({"head_dim": 128, "head_dim_v": 128}, 128),
    ],
    ids=str,
)
def test_heads_of_64_have_half_the_keys_where_ptxas_would_spill(change, keys, monkeypatch):
    """With Triton 3.8 and later; not in float16, nor where two consumers serve."""
    call = _CALL._replace(**{"head_dim": 64, "head_dim_v": 64, **change})
    monkeypatch.setattr(tuned_rows, "triton_version", lambda: (3, 7))
    assert hopper_config(call).block_n == 128
    monkeypatch.setattr(tuned_rows, "triton_version", lambda: (3, 8))
    config = hopper_config(call)
    assert config.block_n == keys and config.ahead == (32 if keys == 64 else config.ahead)


@pytest.mark.parametrize(
    "change",
    [{"seq_q": 5001, "seq_k": 1777}, {"batch": 7}, {"heads": 8}, {"row_stride": 8192}, {"window_right": 5}],
    ids=str,
)
def test_other_sizes_and_strides_need_no_other_binary(change):
    call = _CALL._replace(window_right=0)
    assert hopper_plan(call._replace(**change)).kernel.source == hopper_plan(call).kernel.source


def test_windows_and_sizes_are_run_time_arguments():
    call = _CALL._replace(batch=3, heads=6, heads_kv=2, seq_q=1000, seq_k=200, window_left=2**40, window_right=7)
    given = passed_by(hopper_plan(call).kernel)
    names = ("batch", "heads", "group", "rows_q", "rows_k", "tiles", "lines", "window.left", "window.right")
    assert [given[f"problem.{name}"] for name in names] == [3, 6, 3, 1000, 200, 8, 18, 2**29, 7]
    assert given["problem.units.scale_log2"] == pytest.approx(128**-0.5 * 1.4426950408889634)


_WIDTHS = (64, 128, 256)
#: Why a backward has a loop: rows, keys, heads and key/value heads; widths; what the spec has; the constant's value.
_LOOPS: dict[str, list[tuple[tuple[int, int, int, int], tuple[int, ...], dict[str, Any], bool]]] = {
    # Masked steps have a loop of their own in long walks.
    "loops.MASKS_LAST": [
        ((8192, 8192, 2, 2), (128,), _CAUSAL, True),
        ((8191, 8192, 2, 2), (128,), _CAUSAL, False),
        ((1024, 512, 8, 1), (128,), _CAUSAL, True),
        ((1024, 512, 8, 1), (128,), _CAUSAL | {"deterministic": True}, True),
        ((8192, 8100, 2, 2), (128,), {}, False),  # there is no mask
        ((8192, 8192, 2, 2), (128,), {}, False),
        ((8192, 8192, 2, 2), (128,), _WINDOW, False),
        ((8192, 8192, 2, 2), (128,), _CAUSAL | {"softcap": 9.0}, False),
        ((8192, 8192, 2, 2), (64, 192, 256), _CAUSAL, False),
    ],
    # Keys past the end need no mask where statistics are operands.
    "loops.MASKS": [
        ((8192, 8100, 2, 2), (64, 128), {}, False),
        ((8192, 8192, 2, 2), (128,), _CAUSAL, True),
        ((8192, 8100, 2, 2), (64,), {"window_left": 9}, True),
        ((8192, 8100, 2, 2), (192,), {}, True),  # statistics are subtracted, not multiplied
        ((8192, 8100, 2, 2), (64,), {"softcap": 9.0}, True),
    ],
    # Long walks of heads that share keys are reversed.
    "loops.REVERSES_WALKS": [
        ((8192, 8192, 16, 2), _WIDTHS, _CAUSAL, True),
        ((1024, 512, 8, 1), _WIDTHS, _CAUSAL, True),
        ((1023, 512, 8, 1), _WIDTHS, _CAUSAL, False),
        ((8192, 8192, 2, 2), _WIDTHS, _CAUSAL, False),
        ((8192, 8192, 16, 2), _WIDTHS, {}, False),
        ((8192, 8192, 16, 2), _WIDTHS, _WINDOW, False),
        ((8192, 8192, 16, 2), _WIDTHS, _CAUSAL | {"deterministic": True}, False),
    ],
    # Key tiles begin together in a window of heads that share keys.
    "loops.ROTATES_WALKS": [
        ((8192, 8192, 16, 2), (128,), _WINDOW, True),
        ((8192, 8192, 16, 2), (128,), {"window_left": 99, "window_right": 9}, True),
        ((8192, 8192, 2, 2), (128,), _WINDOW, False),
        ((8192, 8192, 16, 2), (128,), {"window_left": 99}, False),
        ((8192, 8192, 16, 2), (128,), _CAUSAL, False),
        ((8192, 8192, 16, 2), (128,), _WINDOW | {"deterministic": True}, False),
    ],
}


@pytest.mark.parametrize("constant", _LOOPS)
def test_loops_of_the_backward(constant, monkeypatch):
    """Masked steps beside ALiBi, and with a Triton that makes products wait there, never have a loop of their own."""
    for sizes, widths, spec, value in _LOOPS[constant]:

        def chosen(head_dim: int, sizes: tuple[int, ...] = sizes, spec: dict[str, Any] = spec, **changes: Any) -> bool:
            return _main_constants(*sizes, head_dim, AttentionSpec(0.1, **spec), monkeypatch, **changes)[constant]

        for width in widths:
            if constant == "loops.MASKS_LAST":
                monkeypatch.setattr(schedule, "SUMS_PASS_LOOPS", False)
                assert not chosen(width)
                monkeypatch.setattr(schedule, "SUMS_PASS_LOOPS", True)
                assert not chosen(width, alibi=2)
            assert chosen(width) is value, (sizes, width, spec)
            if constant == "loops.MASKS":
                assert chosen(width, key_lengths_dtype=torch.int32) is value, (sizes, width, spec)


#: Batch, queries, keys, heads, key/value heads, head_dim, band, and whether thread blocks take whole lines.
#: Microseconds on an H100 with lines divided and whole: 125 and 83; 216 and 172; 174 and 159; 236 and 210; 239 and 190.
#: What stays divided: 124 and 158; 442 and 477; 288 and 401; 332 and 354.
_LINES = [
    (28, 251, 251, 16, 16, 64, "full", True),
    (33, 256, 256, 16, 4, 128, "full", True),
    (32, 300, 300, 12, 12, 80, "full", True),
    (32, 512, 512, 16, 16, 64, "causal", True),
    (16, 1024, 1024, 16, 16, 64, "window", True),
    (128, 128, 128, 8, 8, 256, "causal", True),  # wide heads were not timed
    (64, 100, 128, 10, 10, 192, "full", True),
    (32, 512, 512, 16, 16, 64, "full", False),
    (33, 257, 257, 16, 16, 128, "full", False),
    (32, 512, 512, 16, 16, 128, "causal", False),
    (16, 1024, 1024, 16, 16, 64, "causal", False),
    (32, 300, 300, 32, 8, 64, "full", False),
    (4, 197, 197, 12, 12, 64, "full", False),  # 48 lines for 132 thread blocks
]


@pytest.mark.parametrize("batch, rows, keys, heads, heads_kv, head_dim, band, whole", _LINES)
def test_thread_blocks_take_whole_lines_whose_sums_stay_in_the_cache(
    batch, rows, keys, heads, heads_kv, head_dim, band, whole
):
    spec = {"causal": {"window_right": 0}, "window": {"window_left": 128, "window_right": 0}, "full": {}}[band]
    for deterministic in (False, True):
        of = AttentionSpec(0.1, deterministic=deterministic, **spec)
        plan = _main_plan(rows, keys, heads, heads_kv, head_dim, of, batch)
        constants = plan.pipeline.plans["main"].source.constants
        assert constants["loops.WHOLE_LINES"] is whole and ("end" not in plan.pipeline.plans) is whole
        assert ("semaphores" in plan.pipeline.scratch.parts) is (deterministic and not whole)
        if whole:
            assert plan.pipeline.plans["main"].programs == min(batch * heads_kv, 132)
            kept = plan.pipeline.plans["main"].programs * heads // heads_kv * -(-rows // 128) * 128 * head_dim
            assert plan.pipeline.scratch.parts.get("sums", (0, 0))[1] <= kept


@pytest.mark.parametrize(
    "rows, heads, heads_kv, spec, shares_progress",
    [
        (262144, 2, 2, {}, True), (32768, 16, 2, {}, True), (32767, 16, 2, {}, False),
        (262144, 2, 2, {"window_right": 0}, False), (262144, 2, 2, {"window_left": 9000}, False),
        (262144, 2, 2, {"deterministic": True}, False),
    ],
    ids=str,
)  # fmt: skip
def test_walks_beyond_the_cache_begin_where_others_are(rows, heads, heads_kv, spec, shares_progress):
    for head_dim in (64, 128, 256):
        plan = _main_plan(rows, 8192, heads, heads_kv, head_dim, AttentionSpec(0.1, **spec))
        for kernel in map(plan.pipeline.plans.get, ("begin", "main")):
            constants = kernel.source.constants
            assert constants.get("SHARES_PROGRESS", constants.get("loops.SHARES_PROGRESS")) is shares_progress
        # Of 64 sequences.
        assert plan.pipeline.scratch.parts["counter"][1] >= (1 + 64 * heads_kv if shares_progress else 1)


_TILED = {"window_left": 1024, "window_right": 0}
_DETERMINISTIC = {**_CAUSAL, "deterministic": True}
#: Batch, queries, keys, heads, key/value heads, head_dim, band; into how many shares the walks are divided, of which
#: so many are parts of the queries; and how many thread blocks there are, None where that follows.
_DIVISIONS = [
    # Few walks are divided.
    (2, 4096, 4096, 64, 8, 128, _CAUSAL, 1, None, None),
    (2, 2048, 2048, 64, 8, 128, _CAUSAL, 1, None, None),  # 256 walks
    (1, 2048, 2048, 64, 8, 128, _CAUSAL, 2, None, None),  # 128 walks, of which one takes as long as sixteen others
    (1, 2048, 2048, 64, 8, 128, {}, 1, None, None),  # 128 walks of one length
    (1, 8192, 8192, 8, 1, 128, _CAUSAL, 4, None, None),  # 64 walks
    (1, 8192, 8192, 8, 1, 128, {}, 2, None, None), (1, 8192, 8192, 1, 1, 128, _WINDOW, 1, None, None),
    (1, 8192, 8192, 8, 1, 128, _WINDOW, 2, None, None),
    (1, 8192, 8192, 2, 1, 128, {**_CAUSAL, "window_left": 49}, 2, None, None),
    (1, 8192, 8192, 8, 1, 128, {**_CAUSAL, "window_left": 999}, 2, None, None),
    (1, 8192, 8192, 8, 1, 128, _DETERMINISTIC, 4, None, None),
    (1, 1024, 1024, 12, 1, 128, _CAUSAL, 12, None, None),  # 8 walks
    # Long walks of one length take no more thread blocks than each round needs: of 24 rounds, 12, 4; the next is short.
    (1, 32760, 32760, 12, 12, 128, {}, 1, None, 128), (1, 16384, 16384, 12, 12, 128, {}, 1, None, 128),
    (2, 4096, 4096, 64, 8, 128, {}, 1, None, 128), (1, 8192, 8192, 12, 12, 128, {}, 1, None, 132),
    # Few walks over many queries are in parts.
    (4, 4096, 77, 10, 10, 64, {"deterministic": True, "softcap": 9.0}, 3, 3, None),
    (4, 8192, 256, 2, 2, 128, {}, 8, 8, None),
    (4, 4096, 128, 6, 1, 128, {}, 30, 5, None),  # six shares of the heads, and five parts of the queries
    (4, 4096, 77, 10, 10, 64, _CAUSAL, 1, None, None),
    # Heads that share keys are divided for the cache. Microseconds on an H100 as before and so: 885 and 649; 487 and
    # 375; 1,914 and 1,525; 554 and 525. With more shares not better: 1,883 and 1,982; 439 and 456; 1,583 and 1,616.
    *(
        (batch, rows, rows, heads, heads_kv, head_dim, band, shares, None, None)
        for batch, rows, heads, heads_kv, head_dim, band, shares in (
            (6, 1383, 32, 4, 128, _CAUSAL, 4), (3, 1700, 24, 4, 112, _CAUSAL, 3), (4, 4096, 32, 4, 128, _TILED, 4),
            (8, 1024, 32, 8, 128, _CAUSAL, 2), (3, 4096, 32, 8, 128, _CAUSAL, 1), (6, 1408, 32, 8, 80, _CAUSAL, 1),
            (6, 1383, 32, 4, 128, {}, 1), (4, 4096, 32, 8, 128, _TILED, 1),
        )
    ),
]  # fmt: skip


@each_case("batch, rows, keys, heads, heads_kv, head_dim, band, shares, parts, programs", _DIVISIONS)
def test_walks_are_divided(batch, rows, keys, heads, heads_kv, head_dim, band, shares, parts, programs):
    plan = _main_plan(rows, keys, heads, heads_kv, head_dim, AttentionSpec(0.1, **band), batch)
    main = plan.pipeline.plans["main"]
    given = passed_by(main)
    assert (shares_of(plan), given["problem.shares"], given.get("problem.parts")) == (shares, shares, parts)
    assert (given["problem.batch"], given["problem.heads_kv"]) == (batch, heads_kv * shares)
    assert given["problem.group"] == heads // heads_kv * (parts or 1) // shares
    assert main.programs == (programs or min(132, batch * heads_kv * shares * -(-keys // 128)))
    dq, *others = gradients_of(plan)
    assert dq.shape == (batch, rows, heads, head_dim)
    assert all(other.shape == (batch, keys, heads_kv * shares, head_dim) for other in others)


@pytest.mark.parametrize(
    "sequences, longest, heads, heads_kv, shares",
    [(400, 100, 32, 4, 1), (100, 300, 32, 8, 1), (8, 1500, 8, 1, 4), (4, 30000, 8, 1, 4), (16, 3987, 32, 8, 2)],
)
def test_walks_of_packed_sequences_are_divided_by_the_longest(sequences, longest, heads, heads_kv, shares):
    """A walk visits the queries of its sequence, not all of the call. In steps of 64 queries, a model of 132 thread
    blocks takes 234 for 400 sequences of 100 rows, in four shares 400."""
    call = _packed_backward(sequences * longest * 3 // 4, longest, heads, heads_kv, 128, sequences, window_right=0)
    assert schedule.BackwardSchedule.from_call(call).shares == shares


def _packed_backward(
    rows: int, longest: int, heads: int, heads_kv: int, head_dim: int, sequences: int, **spec: Any
) -> description.Call:
    sizes = {"seq_q": rows, "seq_k": rows, "heads": heads, "heads_kv": heads_kv, "sequences": sequences}
    call = _described(head_dim, head_dim, "backward", **sizes)
    aux = call.aux._replace(max_seqlen_q=longest, max_seqlen_k=longest)
    return call._replace(spec=AttentionSpec(0.1, **spec), aux=aux)


@pytest.mark.parametrize(
    "rows, longest, heads, heads_kv, head_dim, sequences, spec, short_rows",
    [
        (43000, 400, 12, 12, 64, 200, {}, 384),
        (43000, 400, 12, 12, 64, 200, {"window_right": 0}, 768),
        (43000, 400, 12, 12, 64, 200, {"window_left": 128, "window_right": 0}, 1024),
        (43000, 400, 16, 16, 128, 200, {}, 256),
        (43000, 400, 32, 8, 128, 200, {"window_right": 0}, 256),
        (43000, 400, 12, 12, 64, 200, {"window_right": 0, "deterministic": True}, 0),
        (43000, 400, 12, 12, 64, 200, {"window_right": 0, "batch_invariant": True}, 0),
        (43000, 400, 12, 12, 64, 200, {"window_left": 5, "window_right": -1}, 0),
        (43000, 400, 2, 2, 64, 200, {}, 0),  # 400 lines for 132 multiprocessors
        (100000, 1000, 16, 16, 64, 100, {}, 0),  # most are longer
    ],
)
def test_thread_blocks_take_whole_lines_of_short_packed_sequences(
    rows, longest, heads, heads_kv, head_dim, sequences, spec, short_rows
):
    call = _packed_backward(rows, longest, heads, heads_kv, head_dim, sequences, **spec)
    chosen = schedule.BackwardSchedule.from_call(call)
    assert chosen.short_rows == short_rows and chosen.adds_up and not chosen.loops.WHOLE_LINES
    kept = chosen.programs(call) * chosen.group(call) * -(-short_rows // chosen.config.block_m)
    assert chosen.summed_tiles(call) == chosen.query_tiles * heads + kept


@pytest.mark.parametrize("scale, multiplied", [(1.0, True), (1e-18, True), (1e-20, False)])
def test_statistics_in_units_of_a_tiny_scale_are_no_operands(scale, multiplied, monkeypatch):
    """Divided by it lse might be more than a bfloat16 holds."""
    constants = _main_constants(512, 512, 2, 2, 128, AttentionSpec(scale), monkeypatch)
    assert constants["STATISTICS_MULTIPLIED"] is multiplied


def _main_constants(
    rows: int, keys: int, heads: int, heads_kv: int, head_dim: int, spec: AttentionSpec,
    monkeypatch: pytest.MonkeyPatch, **changes: int,
) -> dict[str, Any]:  # fmt: skip
    """What a backward compiles for its main kernel, if the heads that share keys are not divided."""
    monkeypatch.setattr(schedule, "shares_in_cache", lambda call, schedule, shares, steps: shares)
    plan = _main_plan(rows, keys, heads, heads_kv, head_dim, spec, **changes)
    return plan.pipeline.plans["main"].source.constants


def _main_plan(
    rows: int, keys: int, heads: int, heads_kv: int, head_dim: int, spec: AttentionSpec, batch: int = 512,
    **changes: int,
) -> reductions.BackwardPlan:  # fmt: skip
    """By default so many walks that none is divided."""
    sizes = {"batch": batch, "seq_q": rows, "seq_k": keys, "heads": heads, "heads_kv": heads_kv}
    call = _described(head_dim, head_dim, "backward", **sizes, **changes)._replace(spec=spec)
    return launch.plan_backward.__wrapped__(call)


def gradients_of(plan: reductions.BackwardPlan) -> list[Layout]:
    """Layouts of dq, dk and dv as the main kernel stores them."""
    outputs = plan.pipeline.outputs
    return [outputs.get(f"{name}_shares") or outputs[name] for name in ("dq", "dk", "dv")]


#: What the kernels' arithmetic uses of Gluon, for Python's numbers.
_NUMBERS = SimpleNamespace(
    maximum=max, minimum=min, where=lambda condition, x, y: x if condition else y, cdiv=lambda x, y: -(-x // y)
)


@pytest.mark.parametrize(
    "tiles, lines, first, together", [(128, 16, 1, 2), (64, 9, 2, 4), (3, 200, 1, 8), (2, 5, 2, 8)]
)
def test_order_of_the_listed_key_tiles_of_the_backward(tiles, lines, first, together, monkeypatch):
    """Every key tile of every line once: the first of all lines, and then those of a few lines side by side."""
    monkeypatch.setattr(schedule, "gl", _NUMBERS)
    _number_lines(monkeypatch)
    assert schedule._lines_together(tiles) == together
    order = [schedule.column_in_order.fn(number, tiles, lines, together, first) for number in range(tiles * lines)]
    assert sorted(order) == [(tile, line) for tile in range(tiles) for line in range(lines)]
    ahead, others = order[: first * lines], order[first * lines :]
    assert all(tile < first for tile, _ in ahead)
    whole = together * (tiles - first)
    assert all(line // together == number // whole for number, (_, line) in enumerate(others))
    assert others[:whole] == sorted(others[:whole])


@pytest.mark.parametrize(
    "tiles, lines, closing, last",
    [
        (128, 16, 2, 8), (64, 9, 4, 0), (16, 128, 16, 112), (3, 200, 85, 112), (2, 5, 128, 0), (8, 40, 1, 32),
        (8, 41, 1, 40),
    ],
)  # fmt: skip
def test_order_of_uneven_tiles(tiles, lines, closing, last, monkeypatch):
    """Every tile of every line once: of eight lines side by side, and at the end of at least `closing`, each time from
    the last tile to the first."""
    _number_lines(monkeypatch)
    assert closing in (1, schedule.closing_lines(tiles))
    numbers = range(tiles * lines)
    order = [schedule.tile_in_order.fn(number, tiles, lines, 8, closing, True) for number in numbers]
    assert sorted(order) == [(tile, line) for tile in range(tiles) for line in range(lines)]
    begins = [*range(0, last, 8), last, lines]
    for begin, end in itertools.pairwise(begins):
        turn = order[begin * tiles : end * tiles]
        assert turn == [(tile, line) for tile in reversed(range(tiles)) for line in range(begin, end)]
        assert {schedule.line_group(line, lines, 8, closing) for line in range(begin, end)} == {(begin, end - begin)}


@pytest.mark.parametrize("tiles", [1, 4, 8, 11, 12, 16, 24, 32, 40, 64, 144, 256])
def test_what_is_known_of_the_turns_of_lines(tiles, monkeypatch):
    """Which walks take two rounds: no group of lines is more than that, and none before the last less. And how many
    tiles come before those of the last group."""
    numbers = (1, 3, 8, 9, 12, 16, 24, 32, 64, 200)
    in_two_rounds = {lines: schedule.take_two_rounds(tiles, lines, 132) for lines in numbers}
    before = {(lines, group): schedule.tiles_before_last(tiles, lines, group) for lines in numbers for group in (1, 8)}
    _number_lines(monkeypatch)
    for lines, two in in_two_rounds.items():
        *others, last = _turns(tiles, lines, 8)
        assert two is (last[1] * tiles <= 264 and all(132 < many * tiles <= 264 for _, many in others)), lines
    assert before == {case: _turns(tiles, *case)[-1][0] * tiles for case in before}


def _turns(tiles: int, lines: int, group: int) -> list[tuple[int, int]]:
    """The first line of each group that takes turns in the kernel, and how many they are."""
    together, closing = schedule._lines_together(tiles), schedule._closing_lines(tiles, group)
    return sorted({schedule.line_group(line, lines, together, closing) for line in range(lines)})


@pytest.mark.parametrize("tiles, lines", [(64, 16), (128, 16), (256, 16), (16, 16), (64, 1), (4, 32)])
def test_key_tiles_of_a_line_visit_the_same_queries(tiles, lines, monkeypatch):
    """Thread blocks that take the longest key tile that is left, of a causal square: at any time those of a line are at
    no more than two query tiles, one on the way down and one on the way up."""
    _number_lines(monkeypatch)
    _, together = schedule.line_group(0, lines, schedule._lines_together(tiles), schedule._closing_lines(tiles, 1))
    ends, places = [0] * (132 // together), {}
    for tile in range(tiles):  # of one line; the others have as many programs
        program = min(range(len(ends)), key=ends.__getitem__)
        steps = range(tile, tiles)
        if not schedule.reverses_walk.fn(tile, tiles, 0, lines, 1, 132):
            steps = steps[::-1]
        for time, step in enumerate(steps, ends[program]):
            places.setdefault(time, set()).add(step)
        ends[program] += len(steps)
    assert max(map(len, places.values())) <= 2


_BANDS = [(None, None), (None, 0), (None, 70), (0, 0), (127, 0), (200, 30), (5, None)]
_LENGTHS = [(1, 1), (192, 192), (500, 333), (333, 500), (700, 64), (130, 0), (64, 1000)]


def _visible(query: int, keys: int, shift: int, left: int | None, right: int | None) -> range:
    """The keys that a query sees."""
    begin = 0 if left is None else max(0, query + shift - left)
    return range(begin, keys if right is None else min(keys, query + shift + right + 1))


@pytest.mark.parametrize("left, right", [band for band in _BANDS if band[0] is None])
@pytest.mark.parametrize("rows, keys", _LENGTHS)
def test_unmasked_steps_of_the_backward(rows, keys, left, right, monkeypatch):
    """The first ones, as many as there are: each of their queries sees all keys of the tile."""
    for module in (backward_pieces, schedule):
        monkeypatch.setattr(module, "gl", _NUMBERS)
    for shift, first in itertools.product({0, keys - rows}, range(0, keys, 128)):
        ranges = backward_pieces.query_tile_ranges.fn(
            first, keys, shift, rows, 0, right or 0, 128, 64, False, right is not None
        )
        begin, _, _, end = ranges
        unmasked = schedule.unmasked_tiles.fn(*ranges)
        whole = [
            all(
                {first, first + 127} <= set(_visible(query, keys, shift, left, right))
                for query in range(tile * 64, min(tile * 64 + 64, rows))
            )
            for tile in range(end - 1, begin - 1, -1)
        ]
        assert whole[:unmasked] == [True] * unmasked and not any(whole[unmasked:])


@pytest.mark.parametrize("rows, keys", [(4096, 4096), (3900, 4200), (4200, 3900), (2100, 5000)])
@pytest.mark.parametrize("m, n", [(64, 128), (128, 128), (64, 64)])
def test_walks_visit_each_tile_of_queries_once(rows, keys, m, n, monkeypatch):
    """Under a causal mask, in either direction: all query tiles that see some of the keys, first those that see all of
    them, and whose number a mask asks for is the one that is visited."""
    _number_work(monkeypatch)
    config = _config_of_work(m, n, REVERSES_WALKS=True)
    group, shift, directions = 2, keys - rows, set()
    problem = _problem(rows, keys, m, n, heads_kv=8, group=group)
    for first in range(0, keys, n):
        work = backward_tiles.tile_work.fn(backward_tiles.KeyTile(first, 0, 3), problem, config)
        steps = [backward_tiles.key_tile_step.fn(work, it, config) for it in range(work.steps)]
        tiles = [(head, backward_tiles.visited_tile.fn(work, tile, config)) for head, tile in steps]
        last = min(first + n, keys) - 1
        seeing = [tile for tile in range(-(-rows // m)) if min(rows, (tile + 1) * m) - 1 + shift >= first]
        assert sorted(tiles) == sorted((head, tile) for tile in seeing for head in range(group))
        unmasked = work.unmasked_steps
        assert all(tile * m + shift >= last and last == first + n - 1 for _, tile in tiles[:unmasked])
        assert tiles[unmasked:] == steps[unmasked:]
        directions |= {after - before for (_, before), (_, after) in itertools.pairwise(tiles[:unmasked])}
    assert directions == {-1, 0, 1}


@pytest.mark.parametrize("rows, keys", [(4096, 4096), (3900, 4200)])
@pytest.mark.parametrize("offset", [0, 1, 17, 60])
def test_a_key_tile_may_begin_anywhere(rows, keys, offset, monkeypatch):
    """Without a mask: from there down, and behind the first query tile from the last one on."""
    _number_work(monkeypatch)
    config = _config_of_work(64, 128, right=False, SHARES_PROGRESS=True)
    problem = _problem(rows, keys, 64, 128, heads_kv=8, group=2)
    tiles = problem.query_tiles
    work = backward_tiles.tile_work.fn(backward_tiles.KeyTile(256, 0, 3, start_offset=offset), problem, config)
    steps = [backward_tiles.key_tile_step.fn(work, it, config) for it in range(work.steps)]
    visited = [(head, backward_tiles.visited_tile.fn(work, tile, config)) for head, tile in steps]
    begin = tiles - 1 - offset
    assert visited == [(head, tile % tiles) for tile in range(begin, begin - tiles, -1) for head in range(2)]


@pytest.mark.parametrize("rows, keys", [(4096, 4096), (3900, 4200), (4200, 3900), (700, 4096)])
@pytest.mark.parametrize("left, right", [(1024, 0), (1023, 0), (200, 30), (64, -3), (5000, 0)])
@pytest.mark.parametrize("m, n", [(64, 128), (128, 128), (64, 64)])
@pytest.mark.parametrize("group", [1, 4])
def test_key_tiles_in_a_window_meet(rows, keys, left, right, m, n, group, monkeypatch):
    """Each visits every query tile that sees it once, all heads of each, in the same order found either way. Those that
    start together and see a whole window are at few query tiles at any time."""
    _number_work(monkeypatch)
    config = _config_of_work(m, n, left=True, ROTATES_WALKS=True)
    problem = _problem(rows, keys, m, n, heads_kv=8, group=group, band=(left, right))
    at_once: collections.defaultdict = collections.defaultdict(set)
    whole = 0
    for first in range(0, keys, n):
        work = backward_tiles.tile_work.fn(backward_tiles.KeyTile(first, 0, 3), problem, config)
        steps = [backward_tiles.key_tile_step.fn(work, it, config) for it in range(work.steps)]
        seeing = range(work.begin, work.begin + work.tiles)
        assert sorted(steps) == [(head, tile) for head in range(group) for tile in seeing]
        if not steps:
            continue
        step = backward_tiles.Step(*steps[0])
        for expected in steps[1:]:
            step = backward_tiles.step_after.fn(work, step, config)
            assert step == expected
        if work.tiles >= (left + right + n) // m and (left + n) % m == 0:
            whole += 1
            for time, step in enumerate(steps):
                at_once[time].add(step)
    if whole > 1:
        apart = n * (whole - 1) // (left + right + n) + 3
        aligned = (keys - rows) % m == 0 and right % m == 0  # else each sees one tile more than a window has
        assert max(map(len, at_once.values())) <= (apart if aligned else 2 * apart)


def _number_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tile_work` for Python's numbers, with all that it calls."""
    numbers = SimpleNamespace(**vars(_NUMBERS), to_tensor=lambda x: x, num_programs=lambda axis: 132)
    _number_lines(monkeypatch)
    for module in (backward_tiles, backward_pieces, primitives, schedule):
        monkeypatch.setattr(module, "gl", numbers)
    monkeypatch.setattr(backward_tiles, "query_tile_ranges", backward_pieces.query_tile_ranges.fn)
    called = ("unmasked_tiles", "reverses_walk", "_lines_at_once", "reverses_line", "rotated_start", "_rotated")
    _call_plainly(monkeypatch, *called, "line_in_turn", "adding_tiles", "tile_in_order", "locate_tile", "_locate_line")


def _problem(
    rows: int, keys: int, m: int, n: int, heads_kv: int, group: int = 1, batch: int = 1, band: tuple[int, int] = (0, 0)
) -> backward_tiles.Problem:
    """A dense call."""
    nothing = backward_tiles.Problem(*(None,) * len(backward_tiles.Problem._fields))
    return nothing._replace(
        side=SidePointers(*(None,) * len(SidePointers._fields)),
        batch=batch,
        heads_kv=heads_kv,
        group=group,
        shares=1,
        rows_q=rows,
        rows_k=keys,
        key_tiles=-(-keys // n),
        query_tiles=-(-rows // m),
        window=Window(*band),
        scale=1.0,
    )


def _number_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells which lines take turns, for Python's numbers."""
    for module in (primitives, backward_tiles, schedule):
        monkeypatch.setattr(module, "gl", _NUMBERS)
    for name in ("PAIRS_TOGETHER", "TILES_AT_ONCE", "TILES_AT_THE_END", "TILES_TOGETHER"):
        monkeypatch.setattr(schedule, name, getattr(schedule, name).value)
    _call_plainly(monkeypatch, "line_group", "closing_lines", "_lines_together", "_closing_lines")


def _call_plainly(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Functions of kernels that call one another, for Python's numbers."""
    for name in names:
        modules = [module for module in (schedule, backward_tiles) if hasattr(module, name)]
        function = getattr(modules[0], name).fn
        for module in modules:
            monkeypatch.setattr(module, name, function)


def _config_of_work(m: int, n: int, left: bool = False, right: bool = True, **changes: Any) -> SimpleNamespace:
    """What the work of dense calls asks of a `KernelConfig`."""
    absent = dict.fromkeys(
        (
            "PACKED", "TOP_LEFT", "ORDERED", "REVERSES_LINES", "REVERSES_WALKS", "SHARES_PROGRESS", "ROTATES_WALKS",
            "WHOLE_LINES", "TILE_K", "KEY_LENGTHS",
        ),
        False,
    )  # fmt: skip
    return SimpleNamespace(**{**absent, "KEYS": n, "M": m, "HAS_LEFT": left, "HAS_RIGHT": right, **changes})


@pytest.mark.parametrize("left, right", _BANDS)
@pytest.mark.parametrize("rows, keys", [*(of for of in _LENGTHS if of[1]), (4100, 4100)])
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("m, n", [(64, 128), (128, 128), (64, 64)])
def test_key_tiles_add_in_one_order(rows, keys, left, right, heads, m, n, monkeypatch):
    """To each tile of queries, each waiting for those that were taken before it alone: so all of them end. Lines that
    are reversed visit what the others do: whatever a query sees."""
    _number_work(monkeypatch)
    flags = left is not None, right is not None
    config = _config_of_work(m, n, *flags, ORDERED=True, REVERSES_LINES=right is not None)
    problem = _problem(rows, keys, m, n, heads_kv=heads, batch=3, band=(left or 0, right or 0))
    tiles = problem.key_tiles
    added: collections.defaultdict = collections.defaultdict(list)
    directions = set()
    for number in range(3 * heads * tiles):
        key_tile = backward_tiles._locate_key_tile.fn(number, problem, None, config)
        work = backward_tiles.tile_work.fn(key_tile, problem, config)
        directions |= {work.direction} if work.steps else set()
        for it in range(work.steps):
            tile = backward_tiles.key_tile_step.fn(work, it, config).tile
            adders = added[key_tile.sequence, key_tile.head_kv, tile]
            assert backward_tiles.dq_turn.fn(work, tile, problem, config) == len(adders)
            adders.append(work.first_key // n)
    assert backward_tiles._locate_key_tile.fn(3 * heads * tiles, problem, None, config).first_key < 0
    assert directions == ({-1, 1} if right is not None else {-1})
    for tile in range(-(-rows // m)):
        seen = (_visible(query, keys, keys - rows, left, right) for query in range(tile * m, min((tile + 1) * m, rows)))
        needed = {key // n for of_a_query in seen for key in of_a_query}
        visiting = {tuple(sorted(added[sequence, head, tile])) for sequence in range(3) for head in range(heads)}
        assert len(visiting) == 1 and needed <= set(*visiting) and len(*visiting) == len(set(*visiting))


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("lengths", [(0, 300, 5, 300, 129, 0, 1000, 64), (7,), (4096, 4096, 128, 3000)])
def test_key_tiles_of_packed_sequences(lengths, right, monkeypatch):
    """Each once, those of the sequences with the most queries first, and the rows past the last sequence last. Under a
    causal mask a sequence begins with the keys that most queries see."""
    heads, batch, starts = 3, len(lengths), [sum(lengths[:which]) for which in range(len(lengths) + 1)]
    rows = starts[-1] + 200
    tiles = [-(-length // 128) for length in (*lengths, 200)]
    ranked = [*sorted(range(batch), key=lambda which: (-lengths[which], which)), batch]
    before = [sum(tiles[which] for which in ranked[:place]) for place in range(batch + 2)]
    memory = [*before, *ranked]
    _number_work(monkeypatch)
    monkeypatch.setattr(backward_tiles.gl, "load", lambda place: memory[place], raising=False)

    def place_of(order: int, batch: int, number: int) -> int:
        return bisect.bisect_right(before, number, hi=batch + 1) - 1

    monkeypatch.setattr(backward_tiles, "place_in_order", place_of)
    rows_of = [(start, end - start) for start, end in itertools.pairwise((*starts, rows))]
    monkeypatch.setattr(backward_tiles, "sequence_rows", lambda pointer, sequence, batch, rows: rows_of[sequence])
    config = _config_of_work(64, 128, right=right, PACKED=True)
    problem = _problem(rows, rows, 64, 128, heads, batch=batch)._replace(order_ptr=0, key_tiles=None)
    found = []
    while (tile := backward_tiles._locate_key_tile.fn(len(found), problem, None, config)).first_key >= 0:
        assert (tile.begin_k, tile.seq_k) == rows_of[tile.sequence]
        assert (tile.begin_q, tile.seq_q) == (tile.begin_k, tile.seq_k if tile.sequence < batch else 0)
        found.append((tile.sequence, tile.head_kv, tile.first_key))
    whole = [
        (which, head, 128 * at) for which in range(batch + 1) for head in range(heads) for at in range(tiles[which])
    ]
    assert sorted(found) == whole
    assert [which for which, _ in itertools.groupby(found, lambda tile: tile[0])] == [
        each for each in ranked if tiles[each]
    ]
    for which in range(batch + 1):
        for head in range(heads):
            firsts = [first for sequence, of, first in found if (sequence, of) == (which, head)]
            assert firsts == sorted(firsts)


# Coordinates of packed sequences


@pytest.mark.parametrize("divisor, apart", [(1, 0), (64, 1)])
@pytest.mark.parametrize("last", [0, 1, 31, 32, 33, 1023, 1024, 1025, 40000])
def test_a_warp_finds_the_last_place_with_a_number(last, divisor, apart, monkeypatch):
    lengths = torch.randint(0, 200, (last,), generator=torch.Generator().manual_seed(last))
    memory = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    numbers = memory // divisor + apart * torch.arange(last + 1)
    warp = SimpleNamespace(
        BlockedLayout=lambda *_: None, num_warps=lambda: 1, arange=lambda first, end, layout: torch.arange(first, end),
        to_tensor=int, cdiv=lambda x, y: -(-x // y), int32=torch.int32, minimum=min, sum=lambda x, axis: int(x.sum()),
        load=lambda places, mask, other: torch.where(mask, memory[places.clamp(max=last)], other),
    )  # fmt: skip
    monkeypatch.setattr(schedule, "gl", warp)
    for most in {0, 1, *numbers[:: max(1, last // 9)].tolist(), int(numbers[-1]), int(numbers[-1]) + 5}:
        assert schedule._last_at_most.fn(0, most, last, divisor, apart) == int((numbers <= most).sum()) - 1


@pytest.mark.parametrize("begin, length", [(0, 0), (0, 7), (5, 1), (1000, 129), (2**30 - 9, 9)])
@pytest.mark.parametrize("row_stride", [8, 24, 4096, 2**20])
def test_coordinates_of_a_packed_row(begin, length, row_stride):
    """In bounds exactly inside the sequence, and the bytes that the coordinates add up to are those of the row."""
    layout = tma.packed_layout((2**30, 3, 8), (row_stride, 8, 1))
    for row in {0, 1, length - 1, length, length + 127} - {-1}:
        place = (tma.PACKED_ROWS, begin + length, tma.PACKED_ROWS - length + row)  # as `primitives.coordinates`
        assert all(0 <= coordinate < 2**31 for coordinate in place)
        inside = all(coordinate < size for coordinate, size in zip(place, layout.shape))
        assert inside == (row < length)
        offset = 2 * sum(coordinate * stride for coordinate, stride in zip(place, layout.strides)) % 2**64
        assert offset == 2 * (begin + row) * row_stride
    assert all(2 * stride % 16 == 0 and 2 * stride < 2**40 for stride in layout.strides[:-1])


# Machine code


#: Bytes of a thread that may lie in device memory, by consumers: scalars that the loop seldom uses, and what lives in
#: one of its branches. Three consumers have 160 registers each.
_SPILLS = {3: 168, 2: 96, 1: 96}

#: The same with all that changes scores: addresses of tiles that the loop reads again.
_SPILLS_OF_SCORES = 144
#: Half the keys, as in narrower heads, would leave products of 32 columns, which take as long as those of 64.
_SPILLS_OF_FEATURES = {"192-dropout": 120, "256-bias": 144, "256-dropout": 296, "256-alibi_function": 272}


def _instructions(binary: Binary) -> list[str]:
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", sass(binary))


_ALL_FORMS = FORMS | SCORE_FORMS | BLOCK_FORMS | FP8_FORMS


_EVERY_FORWARD = _ALL_FORMS | FEATURE_FORMS | FUNCTION_FORMS
_EVERY_BACKWARD = BACKWARD_FORMS | BACKWARD_FEATURE_FORMS | BACKWARD_FUNCTION_FORMS


def _compiled(kernel: str, sources: dict[str, KernelSource], rows: dict[str, Any] | None = None) -> list[str]:
    """The forms of a kernel that the tests compile."""
    return [form for form in with_news(sources, rows) if (kernel, form) not in REPEATS]


_COMPILED_FORWARD = _compiled(
    "forward",
    {form: hopper_plan(call).kernel.source for form, call in _EVERY_FORWARD.items()},
    {form: hopper_config(call) for form, call in _EVERY_FORWARD.items()},
)
_COMPILED_BACKWARD = _compiled(
    "main",
    {form: of.source("main") for form, of in _EVERY_BACKWARD.items()},
    {form: of.schedule.config for form, of in _EVERY_BACKWARD.items()},
)


def _forward_forms(forms: dict[str, Call]) -> list[str]:
    """Those that are compiled."""
    return [form for form in _COMPILED_FORWARD if form in forms]


@pytest.mark.parametrize("form", _forward_forms(_ALL_FORMS))
def test_machine_code(form):
    call = _ALL_FORMS[form]
    config = hopper_config(call)
    allowed = _SPILLS_OF_SCORES if call.softcap else 0
    band = call.window_left is not None or call.window_right is not None
    expected = _Loop(
        config,
        call.dtype,
        skips=band and call.block_tile is None and config.block_m > config.block_n,
        in_one_piece=not band and call.block_tile is None,
        blocks=call.block_tile is not None,
        votes=form in FORMS,
        without_maxima=form in _WITHOUT_MAXIMA,
    )
    limits = _Limits(_shared_memory(call), max(_SPILLS[config.consumers], allowed))
    check = _check_8_bit_forward if form in _8_BIT_SCORES else _check_forward
    check_code(hopper_plan(call).kernel.source, "sm_90", check, limits, expected)


def _shared_memory(call: Call) -> int:
    bytes_used = configs.shared_memory(hopper_config(call), call.head_dim, call.head_dim_v, call.dtype)
    assert bytes_used <= _LIMIT
    return bytes_used


class _Limits(NamedTuple):
    """Of a kernel, in bytes."""

    shared_memory: int
    spilled: int


class _Loop(NamedTuple):
    """What a forward is, and what its machine code has."""

    config: configs.HopperConfig
    dtype: torch.dtype
    skips: bool
    in_one_piece: bool
    blocks: bool
    votes: bool
    without_maxima: bool


def _check_forward(binary: Binary, limits: _Limits, loop: _Loop) -> None:
    config, lines = loop.config, _instructions(binary)
    check_fit(binary, *limits)
    check_products(binary)
    if serialises_products(binary):
        return  # as another Triton does: there is no order of products then
    _assert_softmax_overlaps_products(lines, config, loop.dtype)
    _assert_consumers_take_turns(lines, config, loop.skips)
    if loop.in_one_piece:
        _assert_loops_without_a_band_are_in_one_piece(lines, config, loop.dtype)
    if loop.blocks:
        _assert_bits_of_a_row_come_at_once(lines, config)
    if loop.votes:
        _assert_warps_vote_for_themselves(sass(binary))
    if loop.without_maxima:
        _assert_a_loop_has_no_maxima(lines, config.block_n)


@pytest.mark.parametrize("form", _forward_forms(FEATURE_FORMS | FUNCTION_FORMS))
def test_machine_code_of_features(form):
    call = (FEATURE_FORMS | FUNCTION_FORMS)[form]
    consumers = hopper_config(call).consumers
    limits = _Limits(_shared_memory(call), _SPILLS_OF_FEATURES.get(form, _SPILLS[consumers]))
    tables = bool(call.bias or call.mask) or form.endswith(("relative", "waves"))
    check_code(hopper_plan(call).kernel.source, "sm_90", _check_features, limits, consumers, tables)


def _check_features(binary: Binary, limits: _Limits, consumers: int, tables: bool) -> None:
    check_fit(binary, *limits)
    check_products(binary)
    _assert_warps_vote_for_themselves(sass(binary))
    if tables:
        _assert_tables_are_read_before_scores_are_there(_instructions(binary), consumers)


def _assert_tables_are_read_before_scores_are_there(instructions: list[str], consumers: int) -> None:
    """In the loop of each consumer, loads of tables come between the products and the wait for scores."""
    signs = {"GMMA": "H", "LDG": "L", "WARPGROUP.DEPBAR": "W"}
    events = "".join(sign for line in instructions for name, sign in signs.items() if name in line)
    assert len(re.findall("HL+W", events)) >= consumers


def _assert_softmax_overlaps_products(
    instructions: list[str], config: configs.HopperConfig, dtype: torch.dtype
) -> None:
    """In the loop over key tiles, the exponentials that the row says stand before the wait for `p v`, and after that
    for the scores. ptxas may move one or two more there.

    Of its two waits for products the first leaves `p v` in flight, the second none. A thread has a quarter of two rows:
    half as many exponentials as columns, and with float16 weights two that rescale. Each consumer has its own copy of
    the code. With a single stage there is a wait more, for the products of the first chunk of the keys.
    """
    waits = "WW" if config.stages == 1 else "W"
    signs = {"GMMA": "H", "MUFU.EX2": "e", "WARPGROUP.DEPBAR": "W"}
    events = "".join(sign for line in instructions for name, sign in signs.items() if name in line)
    found = [len(before) for before in re.findall(rf"H+{waits}(e*)W", events)]
    least = config.ahead // 2 + (2 if dtype is torch.float16 else 0)
    assert len(found) == config.consumers
    assert not config.ahead or all(least <= count <= least + 2 for count in found)


def _assert_consumers_take_turns(instructions: list[str], config: configs.HopperConfig, skips: bool) -> None:
    """Where they do, each opens the next one's barrier once in a loop, as soon as its products are under way, and the
    last the first one's before it; with a band also where it leaves out key tiles."""
    signs = {"GMMA": "H", "BAR.ARV": "t", "WARPGROUP.DEPBAR": "W"}
    events = "".join(sign for line in instructions for name, sign in signs.items() if name in line)
    loops = config.consumers * config.in_turn
    assert len(re.findall("HtW", events)) == loops
    once = loops + config.in_turn
    assert events.count("t") > once if skips and config.in_turn else events.count("t") == once


def _assert_loops_without_a_band_are_in_one_piece(
    instructions: list[str], config: configs.HopperConfig, dtype: torch.dtype
) -> None:
    """Between their products (scores, a wait for values, `p v`) and the exponentials there is no branch. With float16
    weights there is one, for references that rise. With a single stage there is a wait among the products of scores
    too, for the second chunk of the keys."""
    signs = {"GMMA": "H", "WARPGROUP.DEPBAR": "W", "MUFU.EX2": "e", "BRA": "b"}
    events = "".join(sign for line in instructions for name, sign in signs.items() if name in line)
    scores = "HbH+" if config.stages == 1 else "H"
    piece = f"{scores}bH+Wb" if dtype is torch.float16 else f"{scores}bH+W+e"
    assert len(re.findall(piece, events)) == config.consumers


#: Forms whose loop is looked at for maxima of scores.
_WITHOUT_MAXIMA = ("64", "64-causal", "128", "256")


def _assert_a_loop_has_no_maxima(instructions: list[str], keys: int) -> None:
    """From the wait for its scores to the vote of its warps, a thread of a consumer compares sums of its two rows, not
    their `keys / 2` scores, and exchanges nothing with others."""
    waits = [number for number, line in enumerate(instructions) if "WARPGROUP.DEPBAR.LE gsb0, 0x1" in line]
    for number in waits:
        loop = list(itertools.takewhile(lambda line: "VOTE.ANY" not in line, instructions[number:]))
        assert sum("FMNMX" in line for line in loop) < keys // 8
        assert not any("SHFL" in line for line in loop)


def _assert_warps_vote_for_themselves(text: str) -> None:
    """Behind the vote, and until the way is the common one again, no warp waits for another: they may go either way."""
    votes = list(re.finditer(r"VOTE\.ANY P\d, P\d ;.*?@!(P\d) BRA `\((\.L_x_\d+)\)", text, re.DOTALL))
    assert votes
    for vote in votes:
        apart = text[vote.end() : text.index(f"\n{vote[2]}:")]
        assert not re.search(r"\bBAR\.|SYNCS|GMMA|WARPGROUP", apart)


def _assert_bits_of_a_row_come_at_once(instructions: list[str], config: configs.HopperConfig) -> None:
    """Each consumer reads those of its first tile and, in the loop, those of the others: for each of a thread's two
    rows a load of as many bits as the tile has keys."""
    loads = sum(f"LDG.E.{config.block_n}" in line for line in instructions)
    assert loads >= 4 * config.consumers


#: Forms of which products of 8 and 16 bits are counted.
_8_BIT_SCORES = ("128-queries1024-fp8", "128-fp8")


def _check_8_bit_forward(binary: Binary, limits: _Limits, loop: _Loop) -> None:
    """Scores of 8-bit products are the operands of 16-bit ones, and no weight moves to another thread."""
    _check_forward(binary, limits, loop)
    lines = _instructions(binary)
    depths = {"QGMMA": 32, "HGMMA": 16}  # of one instruction: columns of q kᵀ, keys of p v
    of_scores, of_values = (depth * sum(name in line for line in lines) for name, depth in depths.items())
    assert of_scores * loop.config.block_n == of_values * 128, "as many products of 8 bits as of 16"
    assert not any("PRMT" in line for line in lines)


def test_widened_values_are_written_16_bytes_at_a_time():
    shape = torch.Size((2, 100, 4, 256))
    values = Operand("v", shape, contiguous_strides(shape), 256)
    check_code(convert_kernel("v", values, torch.float8_e4m3fn, "wide_v").source, "sm_90", _check_widening)


def _check_widening(binary: Binary) -> None:
    assert binary.spilled == 0
    moves = re.findall(r"(LDG|STG)\.E\.(\w+)", sass(binary))
    assert set(moves) == {("LDG", "64"), ("STG", "128")}


#: Bytes of a thread of the main kernel in device memory; what the loop over query tiles uses of them is a few scalars,
#: and with dk of 192 columns some twenty addresses.
_BACKWARD_SPILLS = 248


def _backward_forms(forms: dict[str, BackwardForm]) -> list[str]:
    """Those that are compiled."""
    return [form for form in _COMPILED_BACKWARD if form in forms]


@pytest.mark.parametrize("form", _backward_forms(BACKWARD_FORMS))
def test_machine_code_of_the_backward(form):
    of = BACKWARD_FORMS[form]
    config = of.schedule.config
    memory = backward_configs.backward_shared_memory(config, of.call)
    assert memory <= _LIMIT
    limits = _Limits(memory, _BACKWARD_SPILLS)
    source = of.source("main")
    check_code(source, "sm_90", _check_backward, limits, form in SERIALISED)


def _check_backward(binary: Binary, limits: _Limits, serialised: bool) -> None:
    check_fit(binary, *limits)
    check_products(binary, serialised)
    assert any("HGMMA" in line for line in _instructions(binary))


#: Spilled bytes of a thread in the backward with heads of 256: a bias has a register for each score. With all features
#: at once a mask and random words have theirs too, and so have the steps of a score function.
_SPILLS_OF_WIDE_FEATURES, _SPILLS_OF_ALL_FEATURES = 256, 600
_MANY_FEATURES = (
    "256-causal-lengths64-dropout-bias-mask-slopes", "256-causal-softcap-dropout-slopes-learned",
    "256-packed-window-ordered-softcap-slopes-learned",
)  # fmt: skip


@pytest.mark.parametrize("form", _backward_forms(BACKWARD_FEATURE_FORMS | BACKWARD_FUNCTION_FORMS))
def test_machine_code_of_features_of_the_backward(form):
    of = (BACKWARD_FEATURE_FORMS | BACKWARD_FUNCTION_FORMS)[form]
    config, heads = of.schedule.config, of.call.head_dims
    memory = backward_configs.backward_shared_memory(config, of.call)
    assert memory <= _LIMIT
    many = of.call.spec.score_program is not None or form in _MANY_FEATURES
    wide = _SPILLS_OF_ALL_FEATURES if many else _SPILLS_OF_WIDE_FEATURES
    limits = _Limits(memory, wide if max(heads) > 128 else _BACKWARD_SPILLS)
    assert not (of.call.aux.dropout_seed and config.statistics_multiplied)
    additions = None
    if of.call.wanted.slopes and config.sums_by_tma:
        # A thread adds for two keys in each step, and no other additions are its own.
        owners = 1 if config.split_roles else 2
        additions = 2 * owners * config.parts
    source = of.source("main")
    check_code(source, "sm_90", _check_backward_features, limits, additions)


def _check_backward_features(binary: Binary, limits: _Limits, additions: int | None) -> None:
    check_fit(binary, *limits)
    check_products(binary)
    assert additions in (None, sum("REDG.E.ADD.F32" in line for line in _instructions(binary)))


def _compiled_kernels(sources: dict[Any, dict[str, KernelSource]]) -> dict[Any, list[str]]:
    """For each form, those of its kernels that are compiled. dk and dq are one kernel. The first one is compiled by
    `test_first_and_last_kernel_of_the_backward_spill_nothing`."""
    named = {(form, kernel): source for form, of in sources.items() for kernel, source in of.items()}
    found: dict[Any, list[str]] = {}
    for function in {source.function: None for (_, kernel), source in named.items() if kernel != "begin"}:
        for form, kernel in with_news({case: of for case, of in named.items() if of.function is function}):
            if ("float32 forward" if kernel == "forward" else kernel, form[1]) not in REPEATS:
                found.setdefault(form, []).append(kernel)
    return {form: found[form] for form in sources if form in found}


_SEPARATE = _compiled_kernels(
    {("wide", form): apart_backward_sources(call) for form, call in WIDE_BACKWARD_FORMS.items()}
    | {("float32 forward", form): float32_forward_sources(call) for form, call in FLOAT32_FORWARD_FORMS.items()}
    | {("float32", form): apart_backward_sources(call) for form, call in FLOAT32_BACKWARD_FORMS.items()}
)
_WIDE_BACKWARD, _FLOAT32_FORWARD, _FLOAT32_BACKWARD = (
    {form: kernels for (group, form), kernels in _SEPARATE.items() if group == of}
    for of in ("wide", "float32 forward", "float32")
)


@pytest.mark.parametrize("form", _WIDE_BACKWARD)
def test_machine_code_of_the_backward_of_wide_heads(form):
    call = WIDE_BACKWARD_FORMS[form]
    sources = apart_backward_sources(call)
    of_values, of_scores = separate_cut(call.head_dim, call.head_dim_v, call.dtype).memory
    assert max(of_values, of_scores) <= _LIMIT
    spills = _SPILLS_OF_WIDE_HEADS + (_SPILLS_OF_A_SOFT_CAP if call.softcap else 0)
    for kernel in _WIDE_BACKWARD[form]:
        limits = _Limits(of_values if kernel == "dv" else of_scores, spills)
        check_code(sources[kernel], "sm_90", _check_wide_backward, limits)


@pytest.mark.parametrize("form", _FLOAT32_FORWARD)
def test_machine_code_of_the_forward_of_float32(form):
    call = FLOAT32_FORWARD_FORMS[form]
    sources = float32_forward_sources(call)
    memory = shared_rows_memory(choose_float32_forward_config(call.head_dim, call.head_dim_v))
    if "forward" in _FLOAT32_FORWARD[form]:
        check_code(sources["forward"], "sm_90", _check_wide_backward, _Limits(memory, _SPILLS_OF_FLOAT32_FORWARD))
    if "parts" in _FLOAT32_FORWARD[form]:
        check_code(sources["parts"], "sm_90", check_fit, 1024)


def test_every_forward_of_float32_fits_on_chip():
    """Also each warpgroup has a chunk of queries and one of keys on chip."""
    widths = (8, *range(16, 513, 16))
    for head_dim, head_dim_v in itertools.product(widths, widths):
        cut = choose_float32_forward_config(head_dim, head_dim_v)
        assert shared_rows_memory(cut) <= configs.SHARED_MEMORY
        assert cut.places >= 6


def _is_wide_float32(form: str) -> bool:
    call = FLOAT32_BACKWARD_FORMS[form]
    return is_wide_float32(call.head_dim, call.head_dim_v)


# The first case of each test compiles in every run, so kernels of their own have tests of their own.


@pytest.mark.parametrize("form", [form for form in _FLOAT32_BACKWARD if not _is_wide_float32(form)])
def test_machine_code_of_the_backward_of_float32(form):
    _check_float32_backward(form)


@pytest.mark.parametrize("form", [*filter(_is_wide_float32, _FLOAT32_BACKWARD)])
def test_machine_code_of_the_backward_of_float32_with_wide_heads(form):
    _check_float32_backward(form)


def _check_float32_backward(form: str) -> None:
    call = FLOAT32_BACKWARD_FORMS[form]
    sources = apart_backward_sources(call)
    of_values, of_scores = separate_cut(call.head_dim, call.head_dim_v, call.dtype).memory
    assert max(of_values, of_scores) <= _LIMIT
    for kernel in _FLOAT32_BACKWARD[form]:
        if kernel == "parts":
            check_code(sources[kernel], "sm_90", check_fit, 1024)
        else:
            limits = _Limits(of_values if kernel == "dv" else of_scores, _SPILLS_OF_FLOAT32[_is_wide_float32(form)])
            check_code(sources[kernel], "sm_90", _check_wide_backward, limits)


def _check_wide_backward(binary: Binary, limits: _Limits) -> None:
    check_fit(binary, *limits)
    check_barriers(binary)
    check_products(binary)


def test_every_backward_of_wide_heads_fits_on_chip():
    """Also at least one chunk of values is ahead of the products."""
    widths = (8, *range(16, 513, 16))
    for head_dim, head_dim_v in itertools.product(widths, widths):
        config, _, _, memory = separate_cut(head_dim, head_dim_v, torch.bfloat16)
        assert max(memory) <= configs.SHARED_MEMORY
        assert config.score_places >= config.chunks
        assert config.value_places >= min(3, config.value_chunks)


def test_every_backward_of_float32_fits_on_chip():
    """Also there is more than the tiles that products wait for."""
    for head_dim, head_dim_v in itertools.product(range(72, 513, 8), (8, *range(16, 513, 16))):
        if is_wide_float32(head_dim, head_dim_v):
            cut, _, _, memory = separate_cut(head_dim, head_dim_v, torch.float32)
            assert max(memory) <= configs.SHARED_MEMORY
            assert cut.places > 5
            assert cut.weight_places > (2 if cut.staying_scores == cut.chunks else 5)
            assert cut.gradient_places > (2 if cut.staying_values == cut.value_chunks else 5)


def test_every_gradient_of_a_bias_fits_on_chip():
    modified, by_position = ({}, {"dropout_p": 0.1}), ({}, {"window_right": 0})
    leaves_out = ({}, {"sequences": 3}, {"block_tile": (64, 64)}, {"block_tile": (256, 256)})
    for (head_dim, head_dim_v), *fields in itertools.product(_HEADS, modified, by_position, leaves_out):
        call = _described(head_dim, head_dim_v, "backward", **fields[0], **fields[1], **fields[2])
        cut = backward_configs.bias_config(call)
        assert call.block_tile[1] % cut.keys == 0
        assert backward_configs.bias_shared_memory(cut, head_dim, head_dim_v) <= configs.SHARED_MEMORY
        assert backward_configs.bias_programs_together(cut, head_dim, head_dim_v) >= 1
        assert not ((fields[0] or fields[2]) and cut.query_tiles > 1)


@pytest.mark.parametrize(
    "changes, moved",
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"shape": (1, 1, 1, 64)}, False),
        ({"shape": (4, 2, 64, 1)}, False),
        ({"strides": (0, 0, 64, 1)}, True),  # expanded
        ({"strides": (8192, 4096, 0, 1)}, False),
        ({"strides": (8192, 4096, 1, 64)}, False),  # transposed
        ({"strides": (8192, 4096, 72, 1)}, True),  # a slice
        ({"strides": (8192, 4096, 65, 1)}, False),
        ({"strides": (8192, 4100, 64, 1)}, False),
        ({"shape": (4, 1, 64, 64), "strides": (8192, 3, 64, 1)}, True),
        ({"misalignment": 8}, False),
    ],
    ids=str,
)
def test_which_biases_come_by_tma(changes, moved):
    bias = TensorFacts(torch.bfloat16, (4, 2, 64, 64), (8192, 4096, 64, 1), 0)
    assert configs.moves_by_tma(bias._replace(**changes), torch.bfloat16) is moved


#: Spilled bytes of a thread in a backward of wide heads: of dq some twenty addresses at most, and a few scalars of its
#: producers, which have 24 registers.
_SPILLS_OF_WIDE_HEADS = 112

#: What a soft cap adds: some twenty addresses more, because it has a second number of each score for a while.
_SPILLS_OF_A_SOFT_CAP = 88

#: In a forward of float32: registers of four chunks of the output, which change places at the end of a step.
_SPILLS_OF_FLOAT32_FORWARD = 192

#: In a backward of float32, scalars of the producers of dv; in one of wider heads sums of dv of 256 columns, which cost
#: no time that was seen.
_SPILLS_OF_FLOAT32 = {False: 8, True: 352}

#: Spilled bytes of a thread that holds the sums of two tiles of queries, and of one.
_SPILLS_OF_BIAS_GRADIENTS = {2: 192, 1: 16}


@pytest.mark.parametrize(
    "form", _compiled("bias", {form: of.source("bias") for form, of in BIAS_GRADIENT_FORMS.items()})
)
def test_machine_code_of_the_gradient_of_a_bias(form):
    of = BIAS_GRADIENT_FORMS[form]
    cut, heads = backward_configs.bias_config(of.call), of.call.head_dims
    memory = backward_configs.bias_shared_memory(cut, *heads)
    assert memory <= _LIMIT
    limits = _Limits(memory, _SPILLS_OF_BIAS_GRADIENTS[cut.query_tiles])
    check_code(of.source("bias"), "sm_90", _check_bias_gradient, limits)


def _check_bias_gradient(binary: Binary, limits: _Limits) -> None:
    """Both products are in flight at once, and the bias comes four times two numbers at a time."""
    check_fit(binary, *limits)
    check_products(binary)
    assert sum("LDSM.16.MT88.4" in line for line in _instructions(binary)) > 0


#: The additions in memory of both warpgroups that compute gradients of what a score function reads: no thread adds a
#: number twice.
_ADDITIONS = {"relative": 2 * 3, "waves": 2 * (1 + 2), "scattered": 2 * 32}

#: Bytes that these spill with a block mask, or dropout, a soft cap and a bias: of what stays the same in the loop.
_SPILLS_OF_CAPTURED_GRADIENTS = 400


@pytest.mark.parametrize("form", CAPTURED_GRADIENT_FORMS)
def test_machine_code_of_the_gradients_of_what_a_score_function_reads(form):
    of = CAPTURED_GRADIENT_FORMS[form]
    config = of.schedule.config
    cut = backward_configs.captured_gradient_config(config, of.call)
    memory = backward_configs.captured_gradient_memory(cut, config, of.call.head_dims)
    assert memory <= _LIMIT
    additions = next(count for name, count in _ADDITIONS.items() if name in form)
    limits = _Limits(memory, 0 if form.startswith("64-causal") else _SPILLS_OF_CAPTURED_GRADIENTS)
    check_code(of.source("captured"), "sm_90", _check_backward_features, limits, additions)


def _first_and_last_kernels() -> dict[tuple[str, str], KernelSource]:
    """Neither multiplies matrices, so what changes their code adds up: each change is compiled once."""
    summed = {form: of for form, of in _EVERY_BACKWARD.items() if not of.schedule.loops.SINGLE_KEY_TILE}
    calls = {
        "wide-512-packed-causal": WIDE_BACKWARD_FORMS["512-packed-causal"],
        "float32-128-hidden_rows-sinks-dlse": FLOAT32_BACKWARD_FORMS["128-hidden_rows-sinks-dlse"],
    }
    sources = {
        "begin": {form: of.source("begin") for form, of in _EVERY_BACKWARD.items()}
        | {form: apart_backward_sources(call)["begin"] for form, call in calls.items()},
        "end": {form: of.source("end") for form, of in summed.items()},
    }
    return {(kernel, form): of[form] for kernel, of in sources.items() for form in _compiled(kernel, of)}


_FIRST_AND_LAST = _first_and_last_kernels()


@pytest.mark.parametrize("kernel, form", _FIRST_AND_LAST)
def test_first_and_last_kernel_of_the_backward_spill_nothing(kernel, form):
    check_code(_FIRST_AND_LAST[kernel, form], "sm_90", _check_nothing_is_spilled)


def _check_nothing_is_spilled(binary: Binary) -> None:
    assert binary.spilled == 0


@pytest.mark.parametrize("sinks", [False, True])
def test_the_first_kernel_weighs_sinks_where_there_are_some(sinks):
    """Nothing else in it takes an exponential. A branch on a parameter that is None by mistake would be left out."""
    with_sinks = FLOAT32_BACKWARD_FORMS["128-hidden_rows-sinks-dlse"]
    source = apart_backward_sources(with_sinks)["begin"] if sinks else BACKWARD_FORMS["64-causal"].source("begin")
    check_code(source, "sm_90", _check_exponentials, sinks)


def _check_exponentials(binary: Binary, present: bool) -> None:
    assert any("MUFU.EX2" in line for line in _instructions(binary)) is present


def test_what_a_kernel_does_not_take_states_nothing(monkeypatch):
    """From Triton 3.7 on a multiple of a parameter without a value is an error."""
    stated = []
    monkeypatch.setattr(backend_launch, "_gluon_source", lambda: lambda *_, attrs, **__: stated.extend(attrs))
    monkeypatch.setattr(backend_launch.triton, "compile", lambda *_, **__: None)
    source = BACKWARD_FORMS["64-causal"].source("main")
    backend_launch.compile_kernel(source, _SM_90)
    backend_launch.compile_kernel(BACKWARD_FORMS["64-causal"].source("end"), _SM_90)
    sums = source.function.arg_names.index("sums_ptr")
    assert "constexpr" in source.types and stated == [(sums,), (0,), (1,)]  # the last two are the pointers of `end`


@pytest.mark.parametrize("blocks", [None, (64, 64), (64, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_every_head_of_the_backward_fits_on_chip(softcap, blocks, left, ordered):
    for head_dim, head_dim_v in _HEADS:
        fields: dict[str, Any] = {"softcap": 30.0 * softcap, "block_tile": blocks, "deterministic": ordered}
        call = _described(head_dim, head_dim_v, "backward", window_left=127 if left else None, **fields)
        config = backward_configs.choose_backward_config(call)
        if softcap:
            learned = call._replace(wanted=Wanted(alibi_slopes=True))
            apart = backward_configs.choose_backward_config(learned)
            assert backward_configs.backward_shared_memory(apart, learned) <= configs.SHARED_MEMORY
            assert apart.sum_columns in (32, 64)
            if apart.block_n < config.block_n:  # with more keys a thread would spill more
                assert 96 < max(head_dim, head_dim_v) <= 128 and apart.split_roles
            else:
                assert apart == config._replace(sum_columns=apart.sum_columns)
        assert config.sums_by_tma or not ordered
        assert not (softcap and config.statistics_multiplied)  # lse comes off behind the soft cap
        assert backward_configs.backward_shared_memory(config, call) <= configs.SHARED_MEMORY
        assert config.producer or not blocks
        assert not blocks or blocks[0] % config.block_m == blocks[1] % config.block_n == 0
        warpgroups = 4 if config.producer else 3
        assert warpgroups * config.max_registers <= 512
        # The sums' warpgroup needs 72 of what is left.
        others = 2 * config.registers + (configs.PRODUCER_REGISTERS if config.producer else 0)
        assert others + 72 <= warpgroups * config.max_registers


@pytest.mark.parametrize("shape", [(2, 5, 3, 65), (5, 3, 36), (2, 5, 3, 64), (5, 1, 1)], ids=str)
def test_rows_of_gradients_can_be_written_by_tma(shape):
    gradient = torch.empty_strided(shape, backward_loads.padded_strides(shape), dtype=torch.bfloat16)
    assert alignment.aligned(gradient) and gradient.stride(-1) == 1
    assert gradient.is_contiguous() == (shape[-1] % 8 == 0)


def test_the_operator_returns_gradients_as_its_fake_says(monkeypatch):
    q, out = (torch.zeros(2, 5, 3, width, dtype=torch.bfloat16) for width in (65, 64))
    padded = torch.empty_strided(q.shape, backward_loads.padded_strides(q.shape), dtype=q.dtype).fill_(3)
    monkeypatch.setattr(operator, "serve_backward", lambda *_: Gradients(padded, padded, out))
    arguments = (out, None, q, q, out, out, torch.zeros(2, 3, 5), *SideInputs(None, None, 5, 5), *AttentionSpec(1.0))
    dq, dk, _, *_ = torch.ops.flashtile.attention_backward(*arguments, *Wanted(), "hopper")
    assert dq.is_contiguous() and dk.is_contiguous() and torch.equal(dq, padded)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_without_a_key_rows_see_their_sink(packed):
    """Nothing is launched, so that it needs no GPU. Rows past the last sequence have no sink."""
    q, k = (torch.randn(*((rows,) if packed else (2, rows)), 2, 64).bfloat16() for rows in (5, 0))
    offsets = torch.tensor([0, 1, 3])
    side = SideInputs(offsets, torch.zeros(3, dtype=torch.int32), 2, 0) if packed else SideInputs(None, None, 5, 0)
    side = side._replace(sinks=torch.tensor([0.5, -torch.inf]))
    out, lse = launch.forward(q, k, k, side, AttentionSpec(0.125))
    seen = 3 if packed else 5
    assert not out.any() and (lse[..., 0, :seen] == 0.5).all()
    assert lse[..., 1, :].isneginf().all() and lse[..., seen:].isneginf().all()
    for dlse, expected in ((None, 0), (torch.ones_like(lse), seen if packed else 2 * seen)):
        grads = launch.backward(
            BackwardInputs(out, dlse, q, k, k, out, lse), side, AttentionSpec(0.125), Wanted(sinks=True)
        )
        assert grads.sinks.tolist() == [expected, 0]


def test_indices_of_both_widths_compile():
    index_dtypes = (torch.int32, torch.int64)
    call = _CALL._replace(dtype=torch.float16, sequences=3, index_dtypes=index_dtypes, top_left=True, window_right=3)
    source = hopper_plan(call).kernel.source
    check_code(source, "sm_90", check_fit, _shared_memory(call), _SPILLS[hopper_config(call).consumers])
    found = described(source)
    assert [found[f"problem.side.cu_seqlens_{of}"] for of in "qk"] == ["*i32", "*i64"]
    assert found["TOP_LEFT"]


@pytest.mark.parametrize(
    "form", ["16", "96-packed-causal-rows20000-descales-sinks-softcap-slopes_of_batch-fp8", "128-bias"]
)
def test_descriptors_are_encoded_as_the_kernel_expects(form, monkeypatch):
    """What is told to the driver is what Triton itself would tell it, were it to encode the descriptors."""
    told = []
    monkeypatch.setattr(tma, "_encode", lambda *arguments: told.append(arguments) or "descriptor")
    plan, call = hopper_plan(_EVERY_FORWARD[form]), machine_code.described_on_hopper(_EVERY_FORWARD[form])
    described = forward._moved_tensors(call, forward_config(call), None).values()
    made = [moved.maker()(4096)[0] for moved in described if moved.box is not None]
    assert made and set(made) == {"descriptor"}
    monkeypatch.undo()
    check_code(plan.kernel.source, "sm_90", _check_descriptors, [(how[1], how[2], list(how[4])) for how in told])


def _check_descriptors(binary: Binary, told: list[tuple[Any, ...]]) -> None:
    wanted = [(meta["swizzle"], meta["elem_size"], list(meta["block_size"])) for meta in binary.descriptors]
    assert told == wanted
