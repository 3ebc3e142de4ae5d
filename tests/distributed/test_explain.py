"""The explanation of a context-parallel call: schedule, sizes and kernels, without processes."""

import pytest
import torch

import flashtile
from flashtile.distributed import explain_context_parallel
from support.running.each_case import each_case


def _shards(rows: int = 8192, heads: int = 32, heads_kv: int = 8) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(1, rows, h, 128, dtype=torch.bfloat16, device="meta") for h in (heads, heads_kv, heads_kv))


def test_a_causal_ring_runs_on_the_hopper_kernels():
    found = explain_context_parallel(*_shards(), ranks=4, causal=True, device="sm_90")
    assert found.schedule.ranks == 4
    assert found.kernels.backend == "hopper"
    assert found.heads == 32
    text = str(found)
    assert "ring over 4 ranks: 32,768 queries × 32,768 keys, zigzag; balance 1.00" in text
    assert "rank 2: keys 0:4096 of rank 1" in text
    assert "the largest call:\nbackend: hopper on sm_90" in text


def test_bytes_of_the_strategies():
    """A key has two tensors of 8 heads of 128 columns of 2 bytes. With heads also queries and outputs travel."""
    of_key = 2 * 8 * 128 * 2
    received = {
        strategy: explain_context_parallel(*_shards(), ranks=4, strategy=strategy, device="sm_90").received
        for strategy in ("ring", "all_gather", "all_to_all")
    }
    assert received["ring"] == received["all_gather"] == 3 * 8192 * of_key
    assert received["all_to_all"] == 3 * 8192 * (2 * 8 * 128 * 2 + 2 * 2 * 128 * 2)


def test_heads_and_features():
    found = explain_context_parallel(
        *_shards(), ranks=(2, 4), strategy="ring_all_to_all", causal=True, dropout_p=0.1, softcap=3.0, device="sm_90",
        alibi_slopes=torch.empty(32, device="meta"), key_lengths=torch.empty(1, dtype=torch.int32, device="meta"),
        bias=torch.empty(65536, 65536, dtype=torch.bfloat16, device="meta"),
    )  # fmt: skip
    assert (found.heads, found.heads_kv, found.schedule.ranks) == (8, 2, 2)
    assert _names(found.kernels) == ["hopper forward", "hopper backward"]


def test_runs_of_heads():
    found = explain_context_parallel(*_shards(16384), ranks=4, strategy="all_to_all", causal=True, device="sm_90")
    assert (found.heads, found.heads_kv, found.runs) == (4, 1, 2)
    assert "4 query heads and 1 key/value heads at a time, 2 times" in str(found)
    assert explain_context_parallel(*_shards(), ranks=4, strategy="all_to_all", causal=True, device="sm_90").runs == 1


def test_functions_and_block_masks():
    mask, table = flashtile.patterns.causal(1024, device="cpu"), torch.zeros(32, device="meta", requires_grad=True)
    masked = explain_context_parallel(*_shards(256), ranks=4, block_mask=mask.to("meta"), device="sm_90")
    assert _names(masked.kernels) == ["hopper forward", "hopper backward"]
    changed = explain_context_parallel(
        *_shards(256), ranks=4, score_mod=lambda score, b, h, q, k: score + table[h] * (q - k), device="sm_90"
    )
    assert _names(changed.kernels) == ["hopper forward", "hopper backward", "hopper dcaptured"]


def _names(found: flashtile.Explanation) -> list[str]:
    return [f"{kernel.backend} {kernel.name}" for kernel in found.kernels]


@each_case("learned", [False, True])
def test_slopes_that_learn_stay_on_the_same_kernels(learned):
    slopes = torch.empty(32, device="meta", requires_grad=learned)
    found = explain_context_parallel(*_shards(), ranks=4, causal=True, alibi_slopes=slopes, device="sm_90")
    whole = flashtile.explain(*_shards(), causal=True, alibi_slopes=slopes, device="sm_90")
    assert _names(found.kernels) == _names(whole) == ["hopper forward", "hopper backward"]


@each_case("learned", [False, True])
def test_the_gradient_of_a_bias_has_a_kernel(learned):
    bias = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta", requires_grad=learned)
    shards = _shards(2048)
    found = explain_context_parallel(*shards, ranks=4, causal=True, bias=bias, device="sm_90")
    whole = flashtile.explain(*_shards(), causal=True, bias=bias, device="sm_90")
    expected = ["hopper forward", "hopper backward", *(["hopper dbias"] if learned else [])]
    assert _names(found.kernels) == _names(whole) == expected


@each_case("rows, backend", [(2048, "hopper"), (2056, "triton")])
def test_the_kernels_are_those_of_a_part_of_the_sequence(rows, backend):
    """The Hopper kernels have dropout where a part begins at a multiple of 16 rows and keys. The largest one here
    begins half a shard into the sequence."""
    found = explain_context_parallel(*_shards(rows), ranks=2, causal=True, dropout_p=0.1, device="sm_90")
    assert {kernel.backend for kernel in found.kernels.kernels} == {backend}


def test_documents():
    shards = tuple(t[0] for t in _shards(rows=64))
    found = explain_context_parallel(*shards, ranks=2, cu_seqlens=(0, 20, 20, 30, 128), causal=True, device="sm_90")
    assert "queries 0:30 × keys 0:30 (3 documents)" in str(found)


@each_case(
    "arguments, message",
    [
        ({"ranks": 4, "strategy": "rung"}, "strategy: expected one of ring"),
        ({"ranks": 4, "strategy": "ring_all_to_all"}, "ranks: expected a pair"),
        ({"ranks": (2, 2)}, "ranks: expected a number"),
        ({"ranks": 0}, "ranks: expected a number of at least 1"),
        ({"ranks": 3, "strategy": "all_to_all"}, "expected a number of query heads"),
        ({"ranks": 4, "window": (-1, 0)}, "window: expected left from 0"),
        ({"ranks": 4, "bias": torch.empty(8, 8, device="meta")}, "bias: expected the 32768 rows"),
        ({"ranks": 4, "sinks": torch.empty(7, device="meta")}, "sinks: expected shape"),
        ({"ranks": 4, "sofcap": 3.0}, "has no argument sofcap; did you mean softcap"),
    ],
)
def test_what_a_call_would_refuse(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        explain_context_parallel(*_shards(), device="sm_90", **arguments)
