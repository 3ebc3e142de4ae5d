"""The kernels over a cache compiled ahead of time for every architecture, none of which need be present."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from support.compilation import needs_triton  # noqa: F401

# isort: split
from flashtile._backends import devices
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.launch import KernelSource
from flashtile.ops.common.split_keys import plan as split_plans
from flashtile.ops.common.split_keys.configs import AttendTiles, TileKey, resident_programs
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.ops.kv_cache.triton import launch as plan
from support.compilation.checked_code import check_code
from support.compilation.machine_code import (
    Binary,
    call_on,
    check_fit,
    check_products,
    family,
    once_for_each_family,
    registers,
    sass,
)
from support.compilation.spills import companion_spills

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_HOPPER = devices.KNOWN_DEVICES["sm_90"]


class Call(NamedTuple):
    """A call as the launch sees it: contiguous, aligned."""

    batch: int = 8
    seq_q: int = 1
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: torch.dtype = _BF16
    capacity: int = 32768
    page_size: int | None = None
    seq_new: int | None = 1
    half: int = 64
    table_dtype: torch.dtype = _FP32
    index_dtypes: tuple[torch.dtype | None, ...] = (torch.int32, None, None, None)
    spec: CacheSpec = CacheSpec(0, 0.1, None, 0)
    slope_dims: int = 0
    sinks: bool = False
    misalignment: int = 0
    allow_tf32: bool = False
    odd_rows: bool = False  # strides of the rows of q and of the new keys and values are 1
    cache_dtype: torch.dtype | None = None
    factors: tuple[int, int, int] | None = None  # strides of those of an 8-bit cache
    tree: tuple[int, int, int] | None = None  # strides of the tree, and its columns
    total_q: int | None = None  # queries of a packed call, whose sequences have up to seq_q
    latent: bool = False  # values are the first columns of the keys


def plan_of(call: Call, device: devices.DeviceFacts = _HOPPER, multiprocessors: int = 132) -> plan.CachePlan:
    """The plan of a call."""
    outer, rows, pages = call.batch, call.capacity, None
    if call.page_size is not None:
        pages = call.capacity // call.page_size
        outer, rows = call.batch * pages, call.page_size
    packed = call.total_q is not None
    q_rows, new_rows = ((call.total_q,),) * 2 if packed else ((call.batch, call.seq_q), (call.batch, call.seq_new))
    q, k, v = (
        (*q_rows, call.heads, call.head_dim),
        (outer, rows, call.heads_kv, call.head_dim),
        (outer, rows, call.heads_kv, call.head_dim_v),
    )
    new = {} if call.seq_new is None else {"k": (*new_rows, *k[2:]), "v": (*new_rows, *v[2:])}
    angles = (65536, call.half) if new and call.half else None
    starts = (call.batch + 1,) if packed else None
    shapes = {
        "q": q, "k_cache": k, "v_cache": v, **new, "rotary_cos": angles, "rotary_sin": angles,
        "block_table": pages and (call.batch, pages), "alibi_slopes": (1,) * call.slope_dims or None,
        "sinks": (call.heads,) if call.sinks else None, "cu_seqlens_q": starts, "cu_seqlens_new": new and starts,
    }  # fmt: skip
    of_angles = dict.fromkeys(("rotary_cos", "rotary_sin"), call.table_dtype)
    of_indices = dict.fromkeys(("block_table", "cu_seqlens_q", "cu_seqlens_new"), torch.int32)
    of_caches = dict.fromkeys(("k_cache", "v_cache"), call.cache_dtype or call.dtype)
    dtypes = {**of_angles, **of_indices, **of_caches}
    tensors = {name: contiguous(shape, dtypes.get(name, call.dtype)) for name, shape in shapes.items() if shape}
    for name in {"q", "k", "v"} & tensors.keys():
        if call.odd_rows and tensors[name].shape[1] == 1:
            batch_stride, _, *rest = tensors[name].strides
            tensors[name] = tensors[name]._replace(strides=(batch_stride, 1, *rest))
    indices = ("cache_lengths", "cache_batch_indices", "cache_left_padding")
    tensors |= {name: contiguous((call.batch,), of) for name, of in zip(indices, call.index_dtypes) if of}
    if call.factors is not None:
        tensors |= dict.fromkeys(("descale_k", "descale_v"), Layout((outer, rows, call.heads_kv), call.factors, _FP32))
    if call.tree is not None:
        *strides, columns = call.tree
        tensors["tree_mask"] = Layout((call.batch, call.seq_q, columns), (*strides, 1), torch.bool)
    spec = call.spec._replace(max_seqlen_q=call.seq_q) if packed else call.spec
    layouts: Any = CacheCall(**tensors)

    with (
        mock.patch.object(plan, "device_facts", return_value=device),
        mock.patch.object(split_plans, "device_facts", return_value=device),
        mock.patch.object(plan, "multiprocessors", return_value=multiprocessors),
        mock.patch.object(split_plans, "multiprocessors", return_value=multiprocessors),
        mock.patch.object(plan, "chunks_unsupported_reason", return_value="the portable kernels are meant"),
    ):
        addresses = call.misalignment, 0, call.latent, True
        facts = plan.CacheFacts(layouts, spec, addresses, call.allow_tf32, torch.device("cuda", 0))
        return plan._plan.__wrapped__(facts)


def test_latent_pages_that_would_change_bits_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "latent_unsupported_reason", lambda call, _: None if call.moves_pages else "its pages")
    spec = CacheSpec(0, 0.1, None, 0, batch_invariant=True)
    latent = Call(page_size=4, spec=spec)
    with pytest.raises(ValueError, match="block_table: expected latent rows in pages of a multiple of 8 rows"):
        plan_of(latent)
    assert plan_of(latent._replace(spec=spec._replace(batch_invariant=False))).split is not None


_INVARIANT = CacheSpec(0, 0.1, 999, 0, batch_invariant=True)
_OF_ROWS = Call().spec._replace(factors_of_rows=True)
_CALLS = {
    "decode": Call(),
    "decode_paged_16": Call(page_size=16),
    "decode_paged_256": Call(page_size=256),
    "one_split": Call(batch=128),
    "chunk_of_64": Call(seq_q=64, seq_new=64),
    "head_64": Call(head_dim=64, head_dim_v=64, half=32),
    "head_80": Call(head_dim=80, head_dim_v=80, half=16),
    "head_192_128": Call(head_dim=192, head_dim_v=128),
    "head_256": Call(head_dim=256, head_dim_v=256),
    "head_512": Call(head_dim=512, head_dim_v=512),
    "float32": Call(dtype=_FP32),
    "float32_512": Call(dtype=_FP32, head_dim=512, head_dim_v=512, seq_q=64),
    "tf32": Call(dtype=_FP32, allow_tf32=True),
    "multi_query": Call(heads=32, heads_kv=1, head_dim=64, head_dim_v=64, half=32),
    "everything": Call(
        seq_q=7, seq_new=3, heads=12, heads_kv=4, head_dim=40, head_dim_v=56, page_size=48, capacity=4800, half=10,
        index_dtypes=(torch.int64, None, torch.int64, None), slope_dims=2, sinks=True, misalignment=2,
        spec=CacheSpec(0, 0.1, 99, 9, 30.0, True, 5),
    ),
    "packed_decode": Call(batch=64, total_q=64, page_size=16),
    "packed_chunks": Call(seq_q=512, total_q=1100, page_size=16),
    "packed_one_row_pages": Call(seq_q=512, total_q=1100, page_size=1),
    "fp8": Call(cache_dtype=torch.float8_e4m3fn, factors=(0, 0, 1), page_size=16),
    "fp8_chunk": Call(cache_dtype=torch.float8_e4m3fn, factors=(0, 0, 1), seq_q=64, seq_new=64),
    "fp8_head_256": Call(cache_dtype=torch.float8_e4m3fn, factors=(0, 0, 1), head_dim=256, head_dim_v=256),
    "latent": Call(heads=128, heads_kv=1, head_dim=576, head_dim_v=512, seq_new=None, page_size=64),
    "int8_rows": Call(cache_dtype=torch.int8, factors=(128, 8, 1), page_size=16, spec=_OF_ROWS),
    "int8_rows_packed": Call(
        cache_dtype=torch.int8, factors=(128, 8, 1), page_size=16, spec=_OF_ROWS, seq_q=512, total_q=1100
    ),
    "e5m2_pages": Call(cache_dtype=torch.float8_e5m2, factors=(8, 0, 1), page_size=128),
    "tree": Call(seq_q=16, seq_new=16, tree=(256, 16, 16), half=0, spec=CacheSpec(0, 0.1)),
    "invariant": Call(spec=_INVARIANT, page_size=16, slope_dims=1, sinks=True),
    "invariant_256": Call(spec=_INVARIANT, head_dim=256, head_dim_v=256),
    "invariant_float32": Call(spec=_INVARIANT, dtype=_FP32, page_size=16),
    "entries": Call(index_dtypes=(None, torch.int64, torch.int32, None), seq_new=None),
}  # fmt: skip


def _kernels(arch: str, name: str) -> dict[str, Any]:
    """The kernels that a call launches."""
    made = plan_of(call_on(arch, _CALLS[name]), devices.KNOWN_DEVICES[arch])
    return {**(made.append.plans if made.append else {}), **made.split.plans}


def sources(arch: str) -> dict[tuple[str, str], KernelSource]:
    """What is compiled of every call here, by kernel and call (also for `tools/compile_survey.py`)."""
    unknown = () if devices.KNOWN_DEVICES[arch].has_fp8_products else (torch.float8_e4m3fn,)
    names = [name for name, call in _CALLS.items() if call.cache_dtype not in unknown]
    return {(kernel, name): plan.source for name in names for kernel, plan in _kernels(arch, name).items()}


def _matrix() -> dict[tuple[str, str, str], int]:
    """What is compiled, and the on-chip memory that it must fit. Kernels that several calls share are compiled for the
    first of these. The kernel with products is compiled for one architecture of each family, and for sm_120; the others
    only where a GPU has other instructions: for sm_80, sm_90 and gfx1100."""
    everywhere = ("decode", "chunk_of_64", "head_512", "float32", "float32_512", "everything")
    calls = [(arch, name) for arch in devices.KNOWN_DEVICES for name in everywhere]
    calls += [("sm_90", name) for name in _CALLS if name not in everywhere]
    return once_for_each_family(
        {
            (arch, kernel, name): (arch if arch == "sm_120" else family(arch), arch, launch.source)
            for arch, name in calls
            for kernel, launch in _kernels(arch, name).items()
            if (kernel == "attend" and (arch != "sm_120" or name == "decode"))
            or arch == "sm_90"
            or (arch in ("sm_80", "gfx1100") and name in ("decode", "everything"))
        }
    )


_MATRIX = _matrix()


@pytest.mark.parametrize("arch, kernel, name", [pytest.param(*case, id="-".join(case)) for case in _MATRIX])
def test_fits(arch: str, kernel: str, name: str) -> None:
    source = _kernels(arch, name)[kernel].source
    check_code(source, arch, check_fit, _MATRIX[arch, kernel, name], companion_spills(arch, "kv_cache", kernel, name))


@pytest.mark.parametrize(
    "heads, page_size",
    [((15, 31), None), ((31, 63), 16), ((63, 15), None)],
    ids=lambda of: f"{of[0]}x{of[1]}" if isinstance(of, tuple) else str(of),
)
def test_heads_of_v_of_another_width(heads: tuple[int, int], page_size: int | None) -> None:
    """With enough rows for the products of Hopper, whose code is searched for faults of ptxas when it is compiled."""
    call = Call(seq_q=64, seq_new=None, head_dim=heads[0], head_dim_v=heads[1], page_size=page_size)
    check_code(plan_of(call).split.plans["attend"].source, "sm_90", _check_products)


def _check_products(binary: Binary) -> None:
    assert "GMMA" in sass(binary)


@pytest.mark.parametrize("name", ["chunk_of_64", "tree"])
def test_products_do_not_wait_for_one_another(name: str) -> None:
    check_code(plan_of(_CALLS[name]).split.plans["attend"].source, "sm_90", check_products)


@pytest.mark.parametrize("name", ["decode", "decode_paged_16", "chunk_of_64"])
def test_the_cache_goes_to_shared_memory_16_bytes_at_a_time(name: str) -> None:
    """And two tiles of keys and of values are on their way while one is computed, with pages too."""
    call = _CALLS[name]
    source = plan_of(call).split.plans["attend"].source
    tile = source.constants["BLOCK_N"] * (call.head_dim + call.head_dim_v) * 2
    check_code(source, "sm_90", _check_copies, tile * (source.num_stages - 1))


def _check_copies(binary: Binary, tiles: int) -> None:
    code = sass(binary)
    assert code.count("LDGSTS.E.BYPASS.128") == code.count("LDGSTS") > 0
    assert binary.shared_memory >= tiles


@pytest.mark.parametrize("name", ["fp8", "e5m2_pages", "int8_rows"])
def test_numbers_of_8_bits_take_few_instructions(name: str) -> None:
    """They come to registers 32 bits at a time, and none takes a conversion, of which a multiprocessor does 16 in a
    cycle."""
    check_code(plan_of(_CALLS[name]).split.plans["attend"].source, "sm_90", _check_widening)


def _check_widening(binary: Binary) -> None:
    code = sass(binary)
    assert "LDS.U8" not in code and "F2F." not in code and "I2F.F16" not in code


@pytest.mark.parametrize("name", ["decode_paged_16", "head_256", "head_512", "fp8_chunk"])
def test_as_many_programs_as_are_counted_on_fit_a_multiprocessor(name: str) -> None:
    call = _CALLS[name]
    rows = call.seq_q * call.heads // call.heads_kv
    eight_bits = call.cache_dtype is not None
    tile_key = TileKey(call.dtype, call.head_dim, call.head_dim_v, rows, eight_bits=eight_bits)
    source = plan_of(call).split.plans["attend"].source
    cut = source.constants["BLOCK_M"], source.constants["BLOCK_N"], source.num_warps, source.num_stages
    resident = resident_programs(_HOPPER, AttendTiles(*cut, source.constants["CHUNK"]), tile_key)
    check_code(source, "sm_90", _check_resident, resident, source.num_warps)


def _check_resident(binary: Binary, resident: int, num_warps: int) -> None:
    """Registers are given out to a warp 256 at a time; of shared memory each program takes 1 KiB more."""
    assert resident * num_warps * -(-registers(binary) * 32 // 256) * 256 <= 65536
    assert resident * (binary.shared_memory + 1024) <= 228 * 1024


@pytest.mark.parametrize(("capacity", "page_size", "keys"), [(1024, None, 64), (32768, None, 128), (32768, 16, 64)])
def test_many_programs_have_small_tiles_of_few_keys(capacity: int, page_size: int | None, keys: int) -> None:
    source = plan_of(Call(batch=32, capacity=capacity, page_size=page_size)).split.plans["attend"].source
    assert source.constants["BLOCK_N"] == keys


@pytest.mark.parametrize(
    "change",
    [{"batch": 9, "capacity": 40000}, {"heads": 64, "heads_kv": 16, "batch": 4}, {"seq_q": 3, "seq_new": 1}],
    ids=["batch", "heads", "queries"],
)
def test_other_sizes_need_no_other_attending_binary_but_for_the_row_stride(change: dict[str, Any]) -> None:
    several = Call(seq_q=2, seq_new=2)  # a single query needs no mask for causal
    other, plain = (plan_of(call).split.plans["attend"].source for call in (several._replace(**change), several))
    no_rows = {"k_strides.row": 0, "v_strides.row": 0}
    assert other._replace(constants=other.constants | no_rows) == plain._replace(constants=plain.constants | no_rows)


@pytest.mark.parametrize("half", [0, 64])
def test_strides_of_single_rows_do_not_count(half: int) -> None:
    odd, plain = (plan_of(Call(half=half, odd_rows=odd_rows)) for odd_rows in (True, False))
    assert odd.append is not None and plain.append is not None
    assert (
        odd.append.plans["append"].source == plain.append.plans["append"].source
        and odd.split.plans["attend"].source == plain.split.plans["attend"].source
    )
    scalars = odd.append.plans["append"].scalars
    assert scalars[1] == scalars[4] == 0


def test_lengths_are_no_part_of_a_plan() -> None:
    """A plan is looked up without the length, which goes with every launch."""
    longer = Call(spec=Call().spec._replace(length=77))
    assert plan_of(Call()).split.plans["attend"].scalars == plan_of(longer).split.plans["attend"].scalars
    for launch in (plan_of(Call()).append.plans["append"], plan_of(Call()).split.plans["attend"]):
        names = launch.source.names
        assert names.index("length") == len(names) - len(launch.scalars) - 1, "the last that a launch is given"


@pytest.mark.parametrize(
    "call, append, attend, combine",
    [
        (Call(), 8 * 2, 8 * 8 * 2, 8 * 32),
        (Call(seq_new=None), None, 8 * 8 * 2, 8 * 32),
        (Call(half=0), 8, 8 * 8 * 2, 8 * 32),
        (Call(batch=0), 0, 0, None),
        (Call(seq_q=0), 8, 0, None),
        (Call(spec=CacheSpec(0, 0.1, num_splits=1)), 16, 64, None),
        (Call(spec=CacheSpec(0, 0.1, num_splits=3)), 16, 192, 256),
        (Call(capacity=200, spec=CacheSpec(0, 0.1, num_splits=128)), 16, 128, 256),  # two tiles of keys
        (Call(seq_q=64, seq_new=64), 8 * 128, 8 * 8 * 4, None),
        (Call(batch=8, seq_q=64, total_q=80), 80 * 2, 8 * (5 + 8 + 1) * 5, 80 * 32 // 8),  # eight rows each
        (Call(batch=0, seq_q=0, total_q=0), 0, 0, None),
    ],
)
def test_programs(call: Call, append: int | None, attend: int, combine: int | None) -> None:
    made = plan_of(call)
    appending = made.append and made.append.plans["append"]
    assert (appending and appending.programs, made.split.plans["attend"].programs) == (append, attend)
    combining = made.split.plans.get("combine")
    assert (combining and combining.programs) == combine
