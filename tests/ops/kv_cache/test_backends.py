"""The backends against the fp64 oracle: on the CPU, in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.testing import assert_close, assert_same
from support.attention.kv_cache_cases import (
    BASE,
    COMBINED,
    EDGES,
    PAIRS,
    CacheCase,
    CacheInputs,
    check,
    make_inputs,
    parameters,
    run,
)
from support.running.covering import turns
from support.running.each_case import each_case
from support.running.places import of_kernels


@each_case("case", (COMBINED | EDGES).values())
def test_cpu(case: CacheCase) -> None:
    check(case, "cpu")


@each_case("dtype", [torch.float16, torch.bfloat16, torch.float64])
@each_case("name", ["append", "rotary halves", "everything"])
def test_cpu_dtypes(name: str, dtype: torch.dtype) -> None:
    check(replace(PAIRS[name], dtype=dtype), "cpu")


def _interpreted(case: CacheCase) -> bool:
    """Triton's interpreter rounds to 8-bit floats wrongly, and is refused."""
    return case.seq_new is None or case.cache_dtype in (None, torch.int8)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", parameters({n: case for n, case in (COMBINED | EDGES).items() if _interpreted(case)}))
def test_interpreted(case: CacheCase) -> None:
    check(case, "triton")


@pytest.mark.interpreter
def test_the_interpreter_does_not_round_to_8_bit_floats() -> None:
    with pytest.raises(ValueError, match=r"Triton's interpreter rounds to .*e4m3fn wrongly"):
        check(EDGES["fp8"], "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("name, dtype", turns(COMBINED, [torch.float32, torch.bfloat16, torch.float16], 2), ids=str)
def test_gpu(name: str, dtype: torch.dtype) -> None:
    check(replace(COMBINED[name], dtype=dtype), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(EDGES))
def test_gpu_at_the_edges(case: CacheCase) -> None:
    check(case, "triton", "cuda")


@pytest.mark.parametrize("layout", ["expanded", "sliced", "transposed"])
@of_kernels
def test_slopes_of_sequences_may_have_any_strides(device: str, layout: str) -> None:
    inputs = make_inputs(replace(EDGES["one_query"], alibi=True), device)
    slopes = inputs.tensors["alibi_slopes"]  # [batch, heads]
    apart = {
        "expanded": slopes[:1].expand_as(slopes),
        "sliced": slopes.repeat(1, 2)[:, : slopes.shape[1]],
        "transposed": slopes.T.contiguous().T,
    }[layout]
    results = []
    for given in (apart, apart.contiguous()):
        inputs.tensors["alibi_slopes"] = given
        results.append(run(BASE, inputs, "triton"))
    assert all(torch.equal(first.nan_to_num(), results[1][name].nan_to_num()) for name, first in results[0].items())


_LONG = CacheCase(
    batch=3, seq_q=1, seq_new=1, capacity=1100, lengths=(1003, 0, 517), heads=8, head_dim=128, head_dim_v=128,
    dtype=torch.bfloat16, rotary_dim=64,
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16, 48, 64, 256], ids=str)
@pytest.mark.parametrize("seq_q", [1, 5, 100])
@pytest.mark.parametrize("change", [{}, {"window": (300, 0)}, {"causal": False}, {"num_splits": 1}], ids=str)
def test_gpu_over_many_tiles(change: dict, seq_q: int, page_size: int | None) -> None:
    new = min(seq_q, 9)
    check(replace(_LONG, seq_q=seq_q, seq_new=new, page_size=page_size, arguments=change), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 64], ids=str)
@pytest.mark.parametrize("queries", [(1, 1, 1, 0), (100, 1, 0, 3), (5, 300, 1, 0)], ids=str)
@pytest.mark.parametrize("change", [{}, {"window": (300, 0)}, {"causal": False}, {"num_splits": 1}], ids=str)
def test_gpu_packed(change: dict, queries: tuple[int, ...], page_size: int | None) -> None:
    case = replace(_LONG, capacity=1400, queries=queries, page_size=page_size, arguments=change)
    check(case, "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seq_q", [1, 40])
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (80, 80), (192, 128), (256, 256), (64, 512), (512, 512)])
def test_gpu_head_dims(head_dim: int, head_dim_v: int, seq_q: int, dtype: torch.dtype) -> None:
    case = replace(_LONG, head_dim=head_dim, head_dim_v=head_dim_v, seq_q=seq_q, dtype=dtype)
    check(case, "triton", "cuda")
    check(replace(case, heads=4, heads_kv=1, page_size=32), "triton", "cuda")


def _windowed(head_dim: int, seq_q: int, page_size: int | None, left: bool) -> CacheCase:
    """A window over caches in which all rows that no query sees are NaN, of the left padding and left of it too."""
    case = replace(_LONG, head_dim=head_dim, head_dim_v=head_dim, seq_q=seq_q, page_size=page_size, heads=4)
    padding = (0, 0, 500) if left else None
    return replace(case, heads_kv=2, rotary_dim=None, left=padding, arguments={"window": (200, 0)})


@pytest.mark.gpu
@pytest.mark.parametrize("left", [False, True], ids=["", "left_padding"])
@pytest.mark.parametrize("page_size", [None, 16, 256], ids=str)
@pytest.mark.parametrize("seq_q", [1, 5, 70])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gpu_rows_that_no_query_sees_have_no_effect(
    head_dim: int, seq_q: int, page_size: int | None, left: bool
) -> None:
    check(_windowed(head_dim, seq_q, page_size, left), "triton", "cuda")


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim, seq_q, page_size", [(64, 1, None), (128, 5, 16), (256, 2, 256)])
def test_interpreted_rows_that_no_query_sees_have_no_effect(head_dim: int, seq_q: int, page_size: int | None) -> None:
    case = replace(_windowed(head_dim, seq_q, page_size, True), dtype=torch.float32, heads=2, heads_kv=1)
    check(
        replace(case, batch=2, capacity=300, lengths=(299, 130), left=(0, 120), arguments={"window": (40, 0)}), "triton"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("num_splits", [1, 4, None])
def test_gpu_pages_of_whole_tiles_give_the_bits_of_a_cache_in_one_piece(num_splits: int | None, page_size: int) -> None:
    """Smaller pages have tiles of their own, and so another order of summation."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in ((4, 1, 8, 128), (4, 1024, 2, 128), (4, 1024, 2, 128))
    )
    lengths = torch.tensor([1024, 700, 3, 0], dtype=torch.int32, device="cuda")
    pages = 1024 // page_size
    table = torch.randperm(4 * pages, generator=generator, device="cuda").view(4, pages).int()
    paged = []
    for cache in (k, v):
        pool = torch.empty(4 * pages, page_size, 2, 128, device="cuda", dtype=torch.bfloat16)
        pool[table.flatten().long()] = cache.view(4 * pages, page_size, 2, 128)
        paged.append(pool)
    options = {"cache_lengths": lengths, "num_splits": num_splits, "return_lse": True, "backend": "triton"}
    expected = flashtile.attention_with_kv_cache(q, k, v, **options)
    actual = flashtile.attention_with_kv_cache(q, *paged, block_table=table, **options)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16], ids=["one_piece", "pages"])
def test_gpu_graph_is_replayed_with_other_lengths(page_size: int | None) -> None:
    """Captured once with one length, replayed with others: the same as calls of their own, caches included."""
    case = replace(_LONG, page_size=page_size, lengths=(0, 0, 0))
    inputs = make_inputs(case, "cuda")
    for cache in (inputs.k_cache, inputs.v_cache):
        cache.normal_()
    eager = inputs.cast(case.dtype)
    lengths = inputs.tensors["cache_lengths"] = torch.zeros(3, dtype=torch.int32, device="cuda")
    eager.tensors = {**inputs.tensors, "cache_lengths": torch.zeros_like(lengths)}
    eager_lengths = eager.tensors["cache_lengths"]
    inputs.cast(case.dtype).call(backend="triton")  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = inputs.call(backend="triton", return_lse=True)
        lengths += 1
    for values in ([0, 0, 0], [1000, 3, 517], [64, 1098, 63]):
        lengths.copy_(torch.tensor(values))
        eager_lengths.copy_(torch.tensor(values))
        for _ in range(2):
            graph.replay()
            expected, expected_lse = eager.call(backend="triton", return_lse=True)
            eager_lengths += 1
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert torch.equal(inputs.k_cache, eager.k_cache) and torch.equal(inputs.v_cache, eager.v_cache)


@pytest.mark.gpu
def test_gpu_graph_is_replayed_with_other_packed_sequences() -> None:
    """Which sequence a row belongs to, how many there are of each, and where their keys lie, is read on the device."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = normal(100, 8, 128), normal(100, 2, 128), normal(100, 2, 128)
    pages = normal(40, 16, 2, 128), normal(40, 16, 2, 128)
    table, starts, lengths = (torch.zeros(*shape, dtype=torch.int32, device="cuda") for shape in ((4, 10), (5,), (4,)))

    def step(*caches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flashtile.attention_with_kv_cache(
            q, *caches, k, v, cache_lengths=lengths, block_table=table, cu_seqlens_q=starts, max_seqlen_q=100,
            return_lse=True,
        )  # fmt: skip

    step(*pages)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step(*pages)
    for counts, before in (([1, 1, 1, 1], [9, 60, 159, 0]), ([0, 90, 3, 5], [0, 60, 20, 1]), ([0, 0, 0, 100], [0] * 4)):
        starts[1:] = torch.tensor(counts).cumsum(0)
        lengths.copy_(torch.tensor(before))
        table.copy_(torch.randperm(40, generator=generator, device="cuda").view(4, 10))
        copies = pages[0].clone(), pages[1].clone()
        graph.replay()
        expected, expected_lse = step(*copies)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        assert torch.equal(pages[0], copies[0]) and torch.equal(pages[1], copies[1])
        assert not out[sum(counts) :].any()


@pytest.mark.gpu
def test_gpu_runs_give_the_same_bits() -> None:
    inputs = make_inputs(_LONG, "cuda")
    first = run(_LONG, inputs, "triton")
    for _ in range(20):
        again = run(_LONG, inputs, "triton")
        assert all(torch.equal(first[name].nan_to_num(), again[name].nan_to_num()) for name in first)


@pytest.mark.gpu
def test_gpu_rows_past_the_capacity_are_not_written_and_not_read() -> None:
    cache = torch.zeros(3, 32, 2, 64, device="cuda", dtype=torch.bfloat16)
    new = torch.ones(2, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([30, -2], device="cuda")
    out = flashtile.attention_with_kv_cache(
        new[:, :1], cache[:2], cache.clone()[:2], new, new, cache_lengths=lengths, backend="triton"
    )
    assert out.isfinite().all()
    written = cache.amax((2, 3)).bool()
    assert written[0].tolist() == [False] * 30 + [True] * 2
    assert written[1].tolist() == [True] * 2 + [False] * 30 and not written[2].any()


@of_kernels
def test_left_padding_past_32_bits_hides_all_rows(device: str) -> None:
    """In 32 bits the first would be 1, and the second negative."""
    q, cache = (torch.randn(2, rows, 2, 16, device=device) for rows in (1, 40))
    left = torch.tensor([2**32 + 1, 2**31 + 7], device=device)
    out, lse = flashtile.attention_with_kv_cache(
        q, cache, cache, cache_left_padding=left, return_lse=True, backend="triton"
    )
    assert not out.any() and (lse == float("-inf")).all()


@of_kernels
def test_a_small_weight_times_a_small_factor_counts_in_float16(device: str) -> None:
    """One key has most of the weight and a value of 0; all others, each of little weight, have values of 1."""
    k_cache, v_cache = torch.zeros(1, 300, 1, 16), torch.full((1, 300, 1, 16), 57344.0)
    k_cache[0, 0], v_cache[0, 0] = 32.0, 0.0
    k_cache, v_cache = (cache.to(torch.float8_e5m2).to(device) for cache in (k_cache, v_cache))
    ones = torch.ones(1, 300, 1, device=device)
    out = flashtile.attention_with_kv_cache(
        torch.ones(1, 1, 1, 16, device=device).half(), k_cache, v_cache, descale_k=ones, descale_v=ones / 57344,
        scale=8 / 512, backend="triton",
    )  # fmt: skip
    assert_same(out, torch.full_like(out, 299 / (math.exp(8) + 299)))


@of_kernels
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_queries_of_any_size_meet_8_bits(size: float, dtype: torch.dtype, device: str) -> None:
    """They are multiplied in float16, which has a smaller range than bfloat16. Values of odd width are not in pairs."""
    for head_dim_v in (64, 33):
        q = (torch.randn(1, 3, 4, 64) * size).bfloat16()
        k_cache, v_cache = (torch.randint(-96, 97, (1, 50, 2, width)).to(dtype) for width in (64, head_dim_v))
        arguments = {"causal": True, "scale": 1 / (size * 400)}
        given = [tensor.to(device) for tensor in (q, k_cache, v_cache)]
        found = flashtile.attention_with_kv_cache(*given, **arguments, backend="triton").cpu()
        exact, eager = (
            flashtile.attention_with_kv_cache(
                q.to(of), k_cache.to(of), v_cache.to(of), **arguments, backend="reference"
            )
            for of in (torch.float64, torch.bfloat16)
        )
        assert_close("out", found, exact, eager)


@pytest.mark.interpreter
@pytest.mark.unpoisoned
def test_interpreted_offsets_within_a_page_pass_2_to_the_31() -> None:
    """Tiles of keys do not divide the page, so that its rows are counted from its first. Only the last rows
    are touched, which alone are visible."""
    rows, stride = 272, 2**23 - 16
    q, page = torch.randn(1, 1, 1, 16).half(), torch.randn(1, rows, 1, 16).half()
    apart = torch.empty((rows - 1) * stride + 16, dtype=torch.half).as_strided(page.shape, (16, stride, 16, 1))
    apart[:, -10:] = page[:, -10:]
    table, length, left = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([rows]), torch.tensor([rows - 10])
    actual, expected = (
        flashtile.attention_with_kv_cache(
            q, cache, cache, cache_lengths=length, block_table=table, cache_left_padding=left, backend="triton",
            num_splits=1,
        )
        for cache in (apart, page)
    )  # fmt: skip
    assert torch.equal(actual, expected)


@pytest.mark.gpu
def test_gpu_offsets_pass_2_to_the_31() -> None:
    """The last entry and the last page begin past 2**31 elements."""
    rows, heads, head_dim = 2**21, 8, 128
    caches = [torch.zeros(2, rows, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    q, new_k, new_v = (torch.randn(1, 1, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for lengths, (k_cache, v_cache) in (
        ({"cache_batch_indices": torch.tensor([1], device="cuda")}, caches),
        (
            {"block_table": torch.tensor([[2**18 - 1]], device="cuda")},
            [cache.view(2**18, 16, heads, head_dim) for cache in caches],
        ),
    ):
        for cache in caches:
            cache.zero_()
        out = flashtile.attention_with_kv_cache(
            q, k_cache, v_cache, new_k, new_v, cache_lengths=torch.zeros(1, dtype=torch.int32, device="cuda"),
            backend="triton", **lengths,
        )  # fmt: skip
        assert torch.equal(out, new_v), "one key: its value"
        assert torch.equal(k_cache[-1, 0], new_k[0, 0]) and torch.equal(v_cache[-1, 0], new_v[0, 0])


@pytest.mark.gpu
def test_gpu_compiled_equals_eager() -> None:
    def step(inputs: CacheInputs) -> tuple[torch.Tensor, ...]:
        return inputs.call(backend="triton", return_lse=True)

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        inputs = make_inputs(_LONG, "cuda").cast(_LONG.dtype)
        results.append((*function(inputs), inputs.k_cache, inputs.v_cache))
    for eager, traced in zip(*results, strict=True):
        assert_same(traced, eager)


@pytest.mark.multi_gpu
def test_on_a_device_that_is_not_current() -> None:
    with torch.cuda.device(0):
        check(_LONG, "triton", "cuda:1")
