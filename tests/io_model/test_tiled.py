"""The model of the tiled computation: what is moved once, what again, and what that depends on."""

from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile import io_model
from flashtile.io_model.tiled import tiled
from flashtile.ops.attention.cpu import tiles as cpu_tiles
from support.running.each_case import each_case

A100, H200 = io_model.DEVICES["A100"], io_model.DEVICES["H200"]
SHAPE = io_model.Shape(2, 4, 1024, 64, dropout_p=0.1)
#: No cache, and one program at a time: what programs ask for crosses device memory.
BARE = replace(H200, cache=0, multiprocessors=1, shared_memory=2**10)


def moved(work):
    return {(t.tensor, t.writes): t.passes for t in work.transfers}


def test_the_portable_kernels_read_and_write_what_their_signatures_say():
    forward, dq, dkdv = tiled(SHAPE, A100).kernels
    assert moved(forward) == {("q", False): 1, ("k", False): 1, ("v", False): 1, ("out", True): 1, ("lse", True): 1}
    reads = dict.fromkeys([(name, False) for name in ("q", "k", "v", "out", "dout", "lse")], 1)
    assert moved(dq) == reads | {("dq", True): 1, ("statistics of 16 bytes", True): 1}
    reads = dict.fromkeys([(name, False) for name in ("q", "k", "v", "dout", "statistics of 16 bytes")], 1)
    assert moved(dkdv) == reads | {("dk", True): 1, ("dv", True): 1}
    sizes = SHAPE.sizes
    assert dkdv.bytes == 6 * sizes["q"] + 2 * 4 * 1024 * 16  # four float32 numbers a row


def test_the_hopper_kernels_add_up_dq_in_float32():
    shape = replace(SHAPE, dropout_p=0.0, seq_q=1536)  # whole tiles of 192 and of 128 rows
    forward, begin, main, end = tiled(shape, H200).kernels
    assert "hopper" in forward.name and forward.phase == "fwd" and {begin.phase, main.phase, end.phase} == {"bwd"}
    sums = [t for work in (begin, main, end) for t in work.transfers if t.tensor == "sums of dq"]
    assert [t.writes for t in sums] == [True, False, True, False]  # zeros; added to; read for dq
    assert {t.size for t in sums} == {2 * shape.sizes["q"]}
    assert main.flops == 5 * 2 * shape.pairs * 64 and forward.flops == 2 * 2 * shape.pairs * 64
    rows = shape.batch * shape.heads * shape.seq_q
    for (head_dim, window), size in {(64, None): 64, (64, (127, 0)): 8, (192, None): 8}.items():
        works = tiled(replace(shape, head_dim=head_dim, window=window), H200).kernels[1:3]
        assert [t.size / rows for work in works for t in work.transfers if t.tensor == "statistics"] == [size, size]


@each_case("name", io_model.DEVICES)
@each_case("head_dim", [64, 128])
@each_case("causal", [False, True])
def test_tiles_move_a_fraction_of_the_standard_computation(name, head_dim, causal):
    device = io_model.DEVICES[name]
    for seq, least in ((1024, 3), (4096, 12)):
        shape = io_model.Shape(8, 16, seq, head_dim, causal=causal)
        standard, in_tiles = io_model.standard(shape), tiled(shape, device)
        assert standard.bytes > least * in_tiles.bytes
        assert in_tiles.intensity > 2 * standard.intensity


def test_recomputation_costs_products():
    """Seven instead of six with one backward kernel, nine with two."""
    shape = io_model.Shape(1, 1, 1536, 64)  # whole tiles of 192 and of 128 rows
    one, standard = tiled(shape, H200).flops, io_model.standard(shape).flops
    assert one == pytest.approx(standard * 7 / 6)
    assert tiled(shape, H200, backend="triton").flops == pytest.approx(standard * 9 / 6)


def test_hidden_tiles_are_neither_computed_nor_read():
    full, causal = (tiled(io_model.Shape(1, 1, 1024, 64, causal=c), A100, backend="triton") for c in (False, True))
    cut = io_model.Cut("forward", "triton", 128, 64, 4)
    forward = tiled(io_model.Shape(1, 1, 1024, 64, causal=True), A100, [cut]).kernels[0]
    tiles = sum(2 * row for row in range(1, 9))  # a tile of 128 rows sees two tiles of 64 keys more than that above
    assert forward.flops == 4 * 64 * tiles * 128 * 64
    assert causal.flops < 0.6 * full.flops and causal.bytes == full.bytes


def test_without_a_cache_traffic_follows_the_size_of_tiles():
    """Theorem 2 of the paper: with M bytes on chip, N² D² / M."""
    shape = io_model.Shape(1, 1, 4096, 64)
    points = io_model.sweep(shape, BARE, block_q=(32, 64, 128, 256))
    keys = 2 * shape.sizes["k"]
    assert [point.bytes for point in points] == [
        shape.sizes["q"] + shape.sizes["out"] + shape.sizes["lse"] + keys * 4096 // rows for rows in (32, 64, 128, 256)
    ]


def test_a_cache_that_holds_the_keys_lets_them_pass_once():
    shape = io_model.Shape(1, 1, 2**18, 64)  # 64 MiB of keys and values, 2,048 tiles of queries
    cut = io_model.Cut("forward", "triton", 128, 64, 8)

    def passes(device):
        return {t.passes for t in tiled(shape, device, [cut]).kernels[0].transfers if t.tensor in "kv"}

    assert passes(replace(H200, cache=128 * 2**20)) == {1}  # either half of the cache has a copy
    assert passes(replace(H200, cache=100 * 2**20)) == {2048 / (2 * 132)}
    assert passes(replace(H200, cache=100 * 2**20, split_cache=False)) == {1}


def test_query_heads_that_share_keys_read_them_together():
    alone, grouped = (io_model.Shape(1, 8, 4096, 64, heads_kv=kv) for kv in (8, 1))
    cut = io_model.Cut("forward", "triton", 128, 64, 8)
    first, second = (tiled(shape, A100, [cut]).kernels[0] for shape in (alone, grouped))
    assert first.bytes - second.bytes == 14 * grouped.sizes["k"]
    assert first.requested == second.requested


def test_the_cpu_has_the_tiles_of_its_backend():
    device = replace(A100, name="a CPU", arch="cpu", flops={torch.float32: 1e11}, shared_memory=0, cache=2**20)
    shape = io_model.Shape(1, 2, 1024, 64, dtype=torch.float32)
    forward, backward = tiled(shape, device).kernels
    assert f"{cpu_tiles._TILE_ROWS} × {cpu_tiles._TILE_KEYS}" in forward.name
    assert backward.flops == 2.5 * forward.flops
    assert {t.passes for t in forward.transfers if t.tensor == "k"} == {1}  # a head's keys and values fit: 512 KiB
    small = tiled(shape, replace(device, cache=2**18)).kernels[0]
    assert {t.passes for t in small.transfers if t.tensor == "k"} == {4}


def test_the_tiles_are_those_of_explain():
    q = torch.empty(2, 1024, 4, 64, dtype=torch.bfloat16, device="meta")
    explained = flashtile.explain(q, q, q, dropout_p=0.1, device="sm_90").kernels
    found = io_model.kernels_of(SHAPE, "sm_90")
    assert [(c.name, c.block_q, c.block_k, c.shared_memory) for c in found] == [
        (k.name, k.tiles.block_m, k.tiles.block_n, k.shared_memory) for k in explained
    ]


def test_what_no_kernel_serves_is_refused():
    with pytest.raises(ValueError, match="no kernels for it on sm_90"):
        tiled(replace(SHAPE, dtype=torch.float64), H200)
    with pytest.raises(ValueError, match="expected one with tiles, got 'reference'"):
        tiled(SHAPE, H200, backend="reference")
    with pytest.raises(ValueError, match="cut: expected one of"):
        io_model.Cut("dkdv", "hopper", 64, 64)
    with pytest.raises(ValueError, match="at least 1 × 1"):
        io_model.Cut("forward", "triton", 0, 64)


def test_split_keys_are_read_once_for_the_heads_of_a_group():
    """A few queries: keys and values cross the caches once, where a program for each head asks for them four times."""
    shape = io_model.Shape(1, 32, 1, 128, seq_k=8192, heads_kv=8)
    asked = {}
    for backend in ("split", "hopper"):
        (work,) = tiled(shape, H200, backend=backend, backward=False).kernels
        asked[backend] = next(transfer.requests for transfer in work.transfers if transfer.tensor == "k")
    assert asked["split"] == 1.0 and asked["hopper"] == 4.0
