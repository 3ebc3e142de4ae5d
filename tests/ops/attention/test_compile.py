"""Every Triton kernel compiled ahead of time for every architecture, none of which need be present.

What is held: the tiles of every row fit the on-chip memory, registers spill no more than was measured when the rows
were chosen, the matrix products of Hopper run asynchronously, and every feature compiles.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch

from support.compilation import needs_triton  # noqa: F401

# isort: split
import triton

import flashtile
from flashtile._backends import devices
from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import KernelSource
from flashtile.ops.attention.call import TensorFacts
from flashtile.ops.attention.gpu.reductions import bias_sum_kernel, shares_kernel, without_shares
from flashtile.ops.attention.gpu.score_source import tile_reads
from flashtile.ops.attention.gpu.tile_tables import FLOAT32_SPLIT
from flashtile.ops.attention.spec import Origin
from flashtile.ops.common.tiles import tile_width
from flashtile.testing.cases import RelativeScore
from support.attention.attention_cases import parameters, score_mod_combined
from support.attention.width_mixes import (
    BACKWARD_MIXES,
    BIAS_MIXES,
    BIAS_REPEATS,
    DKDV_REPEATS,
    DQ_REPEATS,
    FORWARD_MIXES,
    FORWARD_REPEATS,
)
from support.compilation.checked_code import check_code
from support.compilation.machine_code import (
    Binary,
    Call,
    call_on,
    call_source,
    check_fit,
    check_products,
    check_spills,
    described,
    differing,
    family,
    once_for_each_family,
    plan,
    sass,
    split_options,
    with_news,
)
from support.compilation.spills import attention_spills
from support.running.covering import covering_choices

_KERNELS = ("forward", "dq", "dkdv")
_HOPPER = devices.KNOWN_DEVICES["sm_90"]
_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32
_DTYPES = {_FP16: "fp16", _BF16: "bf16", _FP32: "fp32"}

#: A bias `[1, 4, 4096, 4096]`, and what machine code needs to know of it.
_BIAS = TensorFacts(_BF16, (1, 4, 4096, 4096), (0, 2**24, 4096, 1), 0)

#: Head sizes, one for each row of a table, in float16. 256 columns only where on-chip memory is small, so that rows
#: shrink. One size for architectures that have the rows and the matrix instructions of sm_86. `test_tiles` computes for
#: all rows whether they fit.
_ROWS = (
    dict.fromkeys(devices.KNOWN_DEVICES, (128, 64, 512))
    | dict.fromkeys(("sm_75", "sm_86", "gfx1100"), (128, 64, 256, 512))
    | dict.fromkeys(("sm_89", "sm_120"), (128,))
)
#: The same in float32: each row of bfloat16 products and of IEEE products, and elsewhere the one that fills the most
#: registers.
_FP32_ROWS = {"sm_80": (128, 64, 256, 512), "sm_86": (128, 64, 256, 512), "sm_90": (128, 64, 512)}

#: (head_dim, head_dim_v) that fill their tiles only in part.
_ODD_HEADS = (80, 80)


class _Fit(NamedTuple):
    arch: str
    kernel: str
    dtype: torch.dtype
    heads: tuple[int, int]

    @property
    def source(self) -> KernelSource:
        bias = _BIAS._replace(dtype=self.dtype) if self.kernel == "dbias" else None
        call = Call(*self.heads, self.dtype, window_right=0, bias=bias)
        return plan(self.kernel, devices.KNOWN_DEVICES[self.arch], call).kernel.source

    @property
    def family(self) -> str:
        if self.dtype is _FP32 and self.arch.startswith("sm_"):
            return f"{self.arch} split" if self.arch in FLOAT32_SPLIT else "cuda"  # the others: no tensor cores
        return family(self.arch)


def _matrix() -> dict[_Fit, int]:
    """What is compiled, and the on-chip memory that it must fit.

    The rows of the tables in float16 and float32. bfloat16, which takes the tiles of float16, stands for it in the
    narrowest row where no other test compiles it. A source that architectures of one family share is compiled for the
    first of them, and must fit the least memory of theirs. dk/dv in float16 of 128 columns, which fills the most
    registers, is compiled for each architecture.
    """
    cases = [
        _Fit(arch, kernel, _BF16 if width == 64 and arch.startswith("gfx") else dtype, (width, width))
        for arch in _ROWS
        for dtype, widths in ((_FP16, _ROWS[arch]), (_FP32, _FP32_ROWS.get(arch, (128,))))
        for width in widths
        for kernel in _KERNELS
    ]
    cases.append(_Fit("sm_80", "forward", _FP16, _ODD_HEADS))
    cases += [
        _Fit(arch, "dbias", dtype, (width, width))
        for arch, dtype, widths in (
            ("sm_80", _FP16, (128, 64, 256, 512)),
            ("sm_90", _FP16, (128, 256)),
            ("sm_80", _FP32, (128,)),
            ("sm_90", _FP32, (64, 128, 256, 512)),
            ("gfx942", _FP16, (128,)),
        )
        for width in widths
    ]
    cases += [
        _Fit(arch, "column_sums", dtype, (width, width))
        for arch in ("sm_80", "sm_90", "gfx942")
        for dtype, width in ((_FP16, 64), (_FP16, 128), (_FP16, 512), (_FP32, 128))
        if (dtype, width) == (_FP16, 128) or arch != "gfx942"
    ]
    compiled = once_for_each_family({case: (case.family, case.arch, case.source) for case in cases})
    everywhere = [case for case in cases if case[1:] == ("dkdv", _FP16, (128, 128))]
    return {case: devices.KNOWN_DEVICES[case.arch].shared_memory for case in everywhere} | compiled


_MATRIX = _matrix()


_RELATIVE = flashtile.trace_score_mod(RelativeScore(torch.zeros(Call().heads, 33, requires_grad=True)))
_TABLE = {
    "side.bias": "*bf16 % 16", "numbers.bias.stride_row": "i64 % 8", "numbers.bias.rows": None,
    "numbers.bias.columns": None, "constants.BIAS_COLUMN": 1, "BATCH_FIRST": True, "SHARED_ROWS": False,
    "SHARED_COLUMNS": False, "MODIFIED": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "arch, kernel, dtype, heads",
    [
        pytest.param(*case, id=f"{case.arch}-{case.kernel}-{_DTYPES[case.dtype]}-{case.heads[0]}x{case.heads[1]}")
        for case in _MATRIX
    ],
)
def test_fits(arch, kernel, dtype, heads):
    case = _Fit(arch, kernel, dtype, heads)
    allowed = attention_spills(case.arch, case.dtype, case.kernel, tile_width(max(case.heads)))
    on_tensor_cores = case.source.constants["PRECISION"] == "bf16x6"
    check_code(case.source, arch, _check_row, _MATRIX[case], allowed, on_tensor_cores)


@pytest.mark.parametrize("kernel", ["forward", "dkdv"])
def test_heads_of_192_columns_fit_cards_of_99_kib(kernel):
    """FlexAttention runs out of shared memory there."""
    source = call_source(kernel, "sm_86", Call(192, 192, window_right=0))
    check_code(source, "sm_86", check_fit, 99 * 1024, attention_spills("sm_86", _BF16, kernel, 256))


def _check_row(binary: Binary, shared_memory: int, spilled: int, on_tensor_cores: bool) -> None:
    check_fit(binary, shared_memory, spilled)
    if on_tensor_cores:
        assert re.search(r"MMA\.\S*F32\.BF16", sass(binary)), "float32 on tensor cores"


def _check_memory(binary: Binary, shared_memory: int) -> None:
    assert binary.shared_memory <= shared_memory


_ONE_TILE = Call(32, 32, seq_q=49, seq_k=49, heads=6, heads_kv=6, batch=64)
_WINDOWS_BIAS = TensorFacts(torch.bfloat16, (1, 6, 49, 49), (6 * 49 * 49, 49 * 49, 49, 1), 0)
_WINDOWS_MASK = _WINDOWS_BIAS._replace(dtype=torch.bool)
_CAUSAL_64 = {"head_dim": 64, "head_dim_v": 64, "dtype": _FP16, "seq_q": 64, "seq_k": 64, "window_right": 0}
_LEARNED = {"softcap": 30.0, "alibi": 1, "sums_slopes": True, "sinks": True, "has_dlse": True, "window_right": -1}


@pytest.mark.parametrize(
    "arch, call",
    [
        pytest.param(arch, _ONE_TILE._replace(**changes), id=f"{name}-{arch}")
        for arch, name, changes in (
            ("sm_80", "causal-64", _CAUSAL_64),
            ("sm_90", "bias-dropout", {"bias": _WINDOWS_BIAS, "dropout_p": 0.1}),
            ("sm_90", "alibi-sinks", _LEARNED),
            ("sm_90", "mask-128", {"head_dim": 128, "head_dim_v": 128, "mask": _WINDOWS_MASK}),
        )
    ],
)  # fmt: skip
def test_dq_dk_and_dv_of_one_tile(arch, call):
    """Nothing is in a loop, so what spills, of a bias read by rows of 98 bytes most of all, does so once."""
    memory = devices.KNOWN_DEVICES[arch].shared_memory
    spilled = 320 if arch == "sm_80" else 256 if call.head_dim > 64 else 64
    check_code(call_source("dq", arch, call), arch, check_fit, memory, spilled)


def test_wide_heads_of_one_tile_take_two_kernels_where_warps_multiply():
    """With 128 columns and a bias, ptxas 12.8 makes wrong code of one kernel on sm_80; on sm_86 it takes 106,752 bytes
    of shared memory."""
    names = {
        (arch, width): plan("dq", devices.KNOWN_DEVICES[arch], Call(width, width, seq_q=32, seq_k=32)).name
        for arch in ("sm_80", "sm_86", "sm_120", "sm_90")
        for width in (64, 128)
    }
    assert {of for of, name in names.items() if name == "dq"} == {(arch, 128) for arch in ("sm_80", "sm_86", "sm_120")}


@pytest.mark.parametrize("arch, parts", [("sm_90", 2), ("gfx942", 86)])
def test_sum_of_the_parts_of_a_bias(arch, parts):
    total = bias_sum_kernel(parts, call_on(arch, _WINDOWS_BIAS))
    check_code(total.source, arch, check_fit, devices.KNOWN_DEVICES[arch].shared_memory)


@pytest.mark.parametrize(
    "arch, head_dim, head_dim_v, dtype",
    [("sm_90", 64, 64, _BF16), ("gfx942", 100, 512, _FP32)],
)
def test_sum_of_shares(arch, head_dim, head_dim_v, dtype):
    dk, dv = (contiguous((2, 300, 8, width), dtype) for width in (head_dim, head_dim_v))
    total = shares_kernel(dk, dv, 4)
    assert [without_shares(of, 4).shape for of in (dk, dv)] == [(2, 300, 2, head_dim), (2, 300, 2, head_dim_v)]
    check_code(total.source, arch, check_fit, devices.KNOWN_DEVICES[arch].shared_memory)


def _width_mixes() -> list[Any]:
    mixes = {"forward": FORWARD_MIXES, "dq": BACKWARD_MIXES, "dkdv": BACKWARD_MIXES, "dbias": BIAS_MIXES}
    repeats = {"forward": FORWARD_REPEATS, "dq": DQ_REPEATS, "dkdv": DKDV_REPEATS, "dbias": BIAS_REPEATS}
    return [
        pytest.param(kernel, call, id=f"{kernel}-{name}")
        for kernel in mixes
        for name, call in mixes[kernel].items()
        if name not in repeats[kernel]
    ]


@pytest.mark.parametrize("kernel, call", _width_mixes())
def test_heads_of_v_of_another_width(kernel, call):
    """Compiling searches the code for wrong addresses (`machine_code.compile_source`), which ptxas 12.8 wrote for some
    of these forwards. All pairs of 1, 7, 8, 16, 24, 32, 33, 40, 64, 72, 100 and 129 columns have layouts of tiles that
    are here: of 288 dense and packed forwards, 17 layouts."""
    bias = _BIAS._replace(dtype=call.dtype) if kernel == "dbias" else None
    source = call_source(kernel, "sm_90", call._replace(bias=bias))
    products = "MMA." if call.dtype is torch.float32 else "GMMA."
    check_code(source, "sm_90", _check_products, products, _HOPPER.shared_memory)


def _check_products(binary: Binary, products: str, shared_memory: int) -> None:
    assert products in sass(binary)
    assert binary.shared_memory <= shared_memory


@pytest.mark.parametrize("case", parameters(score_mod_combined())[:2])
def test_dq_of_a_score_function_with_another_feature(case):
    """In float32, where registers are the fewest: ptxas then saves uniform ones in others, which the search for wrong
    addresses must tell from registers without a value (`control_flow.unset_registers`). The other kernels and types of
    these cases are compiled by `tools/compile_versions.py`."""
    source = call_source("dq", "sm_90", split_options(case, _FP32))
    check_code(source, "sm_90", _check_memory, _HOPPER.shared_memory)


def test_reads_of_a_row_or_a_column_alone_are_no_tiles():
    table = torch.zeros(4, 4096)
    rows = flashtile.trace_score_mod(lambda s, b, h, q, k: s + table[h, q] * table[h, k])
    assert (tile_reads(_RELATIVE.program), tile_reads(rows.program), tile_reads(None)) == ((_FP32,), (), ())


#: An architecture, tables and a width for each kernel.
_FULL = (("sm_90", "tables", 256), ("sm_86", "tables", 128), ("sm_86", "all", 256), ("sm_90", "all", 128))


def _wide_tables() -> list[Any]:
    """Heads and tables that fill shared memory, where it is largest and where it is smallest."""
    calls = {
        "tables": Call(bias=_BIAS._replace(dtype=_FP32), mask=_BIAS._replace(dtype=torch.bool)),
        "all": Call(bias=_BIAS._replace(dtype=_FP32), mask=_BIAS._replace(dtype=torch.bool), block_tile=(128, 128)),
    }
    return [
        pytest.param(
            arch, kernel, calls[name]._replace(head_dim=width, head_dim_v=width), id=f"{arch}-{kernel}-{name}-{width}"
        )
        for kernel, (arch, name, width) in zip((*_KERNELS, "dbias"), _FULL)
    ]


@pytest.mark.parametrize("arch, kernel, call", _wide_tables())
def test_tables_fit(arch, kernel, call):
    check_code(call_source(kernel, arch, call), arch, _check_memory, devices.KNOWN_DEVICES[arch].shared_memory)


_SITUATIONS = {
    "full": Call(),
    "banded_short": Call(window_right=0, seq_q=1024, seq_k=1024),
    "banded_long": Call(window_right=0),
    # Bounds checks bring in instructions that ptxas may take for a reason to serialise.
    "banded_partial": Call(window_right=0, seq_q=4001, seq_k=4001),
}


def _on_hopper() -> list[Any]:
    """Every kernel, width and situation, each two of these; those that are compiled alike once."""
    cases = {
        f"{kernel}-{situation}-{width}": (kernel, _SITUATIONS[situation]._replace(head_dim=width, head_dim_v=width))
        for kernel, situation, width in covering_choices(_KERNELS, _SITUATIONS, (64, 128, 256))
    }
    sources = {name: plan(kernel, _HOPPER, call).kernel.source for name, (kernel, call) in cases.items()}
    return [pytest.param(*cases[name], id=name) for name in differing(sources)]


@pytest.mark.parametrize("kernel, call", _on_hopper())
def test_hopper_products_are_asynchronous(kernel, call):
    allowed = attention_spills("sm_90", _BF16, kernel, call.head_dim)
    check_code(call_source(kernel, "sm_90", call), "sm_90", _check_asynchronous, allowed)


def _check_asynchronous(binary: Binary, spilled: int) -> None:
    assert "HGMMA" in sass(binary)
    check_products(binary)
    check_spills(binary, spilled)


#: Tensors of which a loop fetches tiles into shared memory before their turn: k, v and the bias; q, dout, statistics
#: and the bias; for the gradient of the bias, which reads the bias once, both sides of its product. Triton 3.9 leaves
#: the bias of dk/dv out.
_FETCHED_AHEAD = {"forward": 3, "dq": 3, "dkdv": 3 if triton.__version__.startswith("3.9.") else 4, "dbias": 2}


@pytest.mark.parametrize("kernel, width", [*zip(_FETCHED_AHEAD, (64, 128, 64, 128))])
def test_hopper_fetches_a_bias_ahead(kernel, width):
    source = call_source(kernel, "sm_90", Call(head_dim=width, head_dim_v=width, bias=_BIAS))
    allowed = attention_spills("sm_90", _BF16, kernel, width)
    check_code(source, "sm_90", _check_fetched_ahead, _FETCHED_AHEAD[kernel], allowed)


def _check_fetched_ahead(binary: Binary, tensors: int, spilled: int) -> None:
    _, _, innermost_loop = str(binary.asm["ttgir"]).rpartition("scf.for")
    assert innermost_loop.count("ttg.async_copy_global_to_local") == tensors
    check_spills(binary, spilled)


#: A call, and what of the kernel's parameters shows that the feature is in it (`machine_code.described`).
_FEATURES: dict[str, tuple[Call, dict[str, Any]]] = {
    "all_visible": (Call(), {"WHOLE": True, "ALL_VISIBLE": True}),
    "whole": (Call(window_right=0), {"WHOLE": True, "ALL_VISIBLE": False}),
    "partial": (Call(seq_q=4001, seq_k=4001), {"WHOLE": False, "ALL_VISIBLE": False}),
    "window": (Call(window_left=99, window_right=9), {"constants.HAS_LEFT": True, "constants.HAS_RIGHT": True}),
    "left": (Call(window_left=99), {"constants.HAS_LEFT": True, "constants.HAS_RIGHT": False}),
    "top_left": (Call(window_right=0, top_left=True), {"TOP_LEFT": True}),
    "packed": (Call(sequences=3), {"PACKED": True, "side.cu_seqlens_q": "*i32", "side.cu_seqlens_k": "*i32"}),
    "packed_int64": (
        Call(sequences=3, index_dtypes=(torch.int32, torch.int64)),
        {"side.cu_seqlens_q": "*i32", "side.cu_seqlens_k": "*i64"},
    ),
    "key_lengths": (Call(key_lengths_dtype=torch.int32), {"side.key_lengths": "*i32"}),
    "dropout": (Call(dropout_p=0.1), {"side.dropout_seed": "*i64"}),
    "dlse": (Call(has_dlse=True), {"results.dlse": "*fp32"}),
    "wide_rows": (Call(row_stride=2**23), {"q_strides.batch": "i64 % 16", "q_strides.ROW": 2**23}),
    "misaligned": (Call(misalignment=2), {"q_ptr": "*bf16 % 2"}),
    "tf32": (Call(dtype=_FP32, allow_tf32=True), {"PRECISION": "tf32"}),
    "softcap": (Call(softcap=30.0), {"softcap": "fp32"}),
    "bias": (Call(bias=_BIAS), _TABLE),
    "bias_of_keys": (
        Call(bias=TensorFacts(_FP32, (2, 1, 1, 4096), (4096, 4096, 4096, 1), 4)),
        _TABLE
        | {"side.bias": "*fp32 % 4", "numbers.bias.stride_row": "i64 % 4", "BATCH_FIRST": False, "SHARED_ROWS": True},
    ),
    "bias_of_queries": (
        Call(bias=TensorFacts(_BF16, (1, 1, 4096, 1), (0, 0, 3, 0), 0)),
        _TABLE | {"numbers.bias.stride_row": "i64", "constants.BIAS_COLUMN": 0, "SHARED_COLUMNS": True},
    ),
    "mask": (
        Call(mask=_BIAS._replace(dtype=torch.bool)),
        {"side.mask": "*u8 % 16", "numbers.mask.stride_row": "i64 % 16", "constants.MASK_COLUMN": 1,
         "numbers.mask.columns": None},
    ),
    "alibi": (Call(alibi=2, sums_slopes=True), {"side.alibi_slopes": "*fp32", "slope_sums_ptr": "*fp32"}),
    "bias_past_its_end": (
        Call(bias=_BIAS, seq_q=4001),
        _TABLE | {"numbers.bias.rows": "i32", "numbers.bias.columns": "i32 % 16"},
    ),
    "sinks": (Call(sinks=True), {}),
    "hidden_rows": (Call(window_right=0, sequences=3, sinks=True, hides_rows=True), {}),
    "block_mask": (
        Call(block_tile=(128, 128)),
        {"constants.TILE_Q": 128, "constants.TILE_K": 128, "side.block_patterns": "*u8 % 16", "WHOLE": True},
    ),
    "block_mask_of_full_tiles": (Call(block_tile=(128, 64), patterns=False), {"side.block_patterns": None}),
    "block_mask_odd_tiles": (Call(block_tile=(192, 64), bias=_BIAS), {"constants.TILE_Q": 192, "constants.TILE_K": 64}),
    "packed_block_mask": (
        Call(block_tile=(128, 128), sequences=3, bias=_BIAS),
        {"constants.TILE_Q": 128, "PACKED": True, "WHOLE": False},
    ),
    "max_scores": (Call(max_scores=True, sinks=True), {}),
    # Triton loads a gathered tile ahead, as it does a tile of a bias.
    "score_mod": (Call(128, 128, score_mod=_RELATIVE), {"captured.tensor0": "*fp32", "captured_sizes.size0_1": "i32"}),
    "score_mod_and_more": (
        Call(score_mod=_RELATIVE, sequences=3, softcap=9.0, dropout_p=0.1, bias=_BIAS, key_lengths_dtype=torch.int32),
        {"captured.tensor0": "*fp32"},
    ),
    "ahead_of_the_diagonal": (Call(window_left=-99, window_right=900), {"constants.HAS_LEFT": True}),
    "part": (
        Call(dropout_p=0.1, alibi=2, sums_slopes=True, bias=_BIAS, origin=Origin(64, 128, 9, 3, 8)),
        {"numbers.origin.row": "i32", "ALIGNED": True},
    ),
    "odd_part": (
        Call(dropout_p=0.1, bias=_BIAS, origin=Origin(65, 3, 0, 3, 8)),
        {"numbers.origin.row": "i32", "ALIGNED": False},
    ),
    "everything": (
        Call(
            head_dim=40, head_dim_v=56, sequences=3, window_left=99, window_right=9, dropout_p=0.1, has_dlse=True,
            key_lengths_dtype=torch.int64, misalignment=2, row_stride=2**23 + 1, softcap=9.0, bias=_BIAS,
            mask=_BIAS._replace(dtype=torch.bool), alibi=1, sinks=True, sums_slopes=True,
        ),
        {"PACKED": True, "side.dropout_seed": "*i64", "q_ptr": "*bf16 % 2", "q_strides.ROW": 2**23 + 1, "WHOLE": False},
    ),
}  # fmt: skip


#: Several features at once, and those of them that need the most registers and memory.
_TOGETHER = ("block_mask_odd_tiles", "packed_block_mask", "everything")
_LARGE = ("block_mask_odd_tiles", "everything")


def _features() -> dict[tuple[str, str, str], tuple[KernelSource, dict[str, Any]]]:
    """(feature, kernel, architecture) -> what is compiled, and what of it shows the feature: every kernel with every
    feature, and the gradient of the bias where there is one."""
    return {
        (feature, kernel, arch): (plan(kernel, devices.KNOWN_DEVICES[arch], call).kernel.source, shows)
        for feature, (call, shows) in _FEATURES.items()
        for kernel in (*_KERNELS, "column_sums", *(("dbias",) if call.bias else ()))
        for arch in ("sm_80", "sm_90")
        if arch == "sm_90" or (kernel == "dkdv" and feature in _LARGE)
    }


def test_features_are_in_what_is_compiled():
    for (_, kernel, _), (source, shows) in _features().items():
        found = described(source)
        of_dropout = {"side.dropout_seed", "numbers.origin.row"} if kernel == "column_sums" else set()
        names = {*source.names, *source.constant_names} - of_dropout
        of_kernel = {name: value for name, value in shows.items() if name in names}
        assert {name: found[name] for name in of_kernel} == of_kernel


def _compiled_features() -> list[Any]:
    """Features at once in every kernel. A feature alone in one kernel, which is another from feature to feature, if it
    has a parameter or a value of one that none of those has: what applies it is the same function in all of them. On
    sm_80, which has less memory, those that need the most."""
    features = {case: source for case, (source, _) in _features().items()}
    on_hopper = {case: source for case, source in features.items() if case[-1] == "sm_90"}
    together = differing({case: source for case, source in on_hopper.items() if case[0] in _TOGETHER})
    alone = []
    for number, feature in enumerate(_FEATURES):
        mine = [case for case in on_hopper if case[0] == feature]
        alone += mine[number % len(mine) :] + mine[: number % len(mine)]
    found = together + with_news({case: on_hopper[case] for case in dict.fromkeys((*together, *alone))})
    found += differing({case: source for case, source in features.items() if case[-1] == "sm_80"})
    return [pytest.param(*case, id="-".join(case)) for case in dict.fromkeys(found)]


@pytest.mark.parametrize("feature, kernel, arch", _compiled_features())
def test_feature_compiles(feature, kernel, arch):
    source = call_source(kernel, arch, _FEATURES[feature][0])
    check_code(source, arch, _check_memory, devices.KNOWN_DEVICES[arch].shared_memory)


def test_only_a_call_that_may_hide_rows_has_dout_copied():
    """Into contiguous memory, as the kernels that read the copy are fastest; sinks are known then, and only then."""
    device = devices.KNOWN_DEVICES["sm_90"]
    plain, hiding = (plan("dq", device, Call(sinks=True, window_right=right)) for right in (0, -1))
    for found, of_dout, of_sinks in ((plain, None, None), (hiding, "*bf16 % 16", "*fp32")):
        parameters = described(found.kernel.source)
        assert (parameters["rows.quiet"], parameters["side.sinks"]) == (of_dout, of_sinks)
    assert [*plain.outputs] == ["dq", "statistics"]
    assert hiding.outputs["quiet"] == ((2, 4096, 4, 64), (4096 * 4 * 64, 4 * 64, 64, 1), _BF16)
    keys = [plan("dkdv", device, Call(window_right=right)).kernel.source for right in (0, -1)]
    assert keys[0] == keys[1]


def test_a_gradient_of_a_bias_that_two_to_the_31_tiles_share_compiles():
    call = Call(bias=TensorFacts(_BF16, (1, 1, 1, 1), (1, 1, 1, 1), 0), seq_q=2**20, seq_k=2**20, window_left=64)
    source = call_source("dbias", "sm_90", call)
    check_code(source, "sm_90", _check_memory, _HOPPER.shared_memory)
    assert described(source)["work.sharing"] == "i64"
    fewer = plan("dbias", devices.KNOWN_DEVICES["sm_90"], call._replace(seq_q=2**16)).kernel
    assert described(fewer.source)["work.sharing"] == "i32"


#: The instruction that multiplies q and k: in 8 bits, or on GPUs without one another.
_PRODUCTS_OF_8_BITS = {
    "sm_75": "FFMA", "sm_90": "QGMMA", "sm_100": "UTCQMMA", "sm_120": "QMMA", "gfx950": "f8f6f4",
}  # fmt: skip


@pytest.mark.parametrize("arch, product", _PRODUCTS_OF_8_BITS.items())
def test_8_bit_inputs_compile(arch, product):
    """Also for GPUs whose compiler does not know the type. In heads of 64 tiles of k and v have different swizzles."""
    width = 64 if arch == "sm_90" else 128
    call = Call(head_dim=width, head_dim_v=width, dtype=torch.float8_e4m3fn, window_right=0, descales=True)
    source = call_source("forward", arch, call)
    found = described(source)
    assert {found[f"side.descale_{of}"] for of in "qkv"} == {"*fp32"}
    check_code(source, arch, _check_8_bits, devices.KNOWN_DEVICES[arch].shared_memory, product)


def _check_8_bits(binary: Binary, shared_memory: int, product: str) -> None:
    assert binary.spilled == 0
    assert binary.shared_memory <= shared_memory
    assert product in (sass(binary) if "cubin" in binary.asm else binary.asm["amdgcn"])
