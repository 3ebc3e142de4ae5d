"""Choices of norms, losses, and attention over a key/value cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile._backends.devices import DeviceFacts, multiprocessors
from flashtile.ops.common.split_keys.configs import AttendTiles, shared_memory
from flashtile.ops.common.split_keys.configs import TileKey as AttendKey
from flashtile.ops.common.tiles import RowTile, power_of_two
from flashtile.ops.cross_entropy.kernels import TileConfig, TileKey
from flashtile.ops.layer_norm.kernels import BackwardKey, ForwardKey
from flashtile.tuning.choice import Choice, Problem, UntunableError, normal

#: Columns of the rows of which a problem has as many as tokens; of wider rows it has fewer.
_COLUMNS = 4096
#: Elements of a thread: fewer leave too little in flight, more spill.
_ELEMENTS = range(4, 65)
#: Bytes of keys and values that a problem reads at most, and rows of a sequence where there are many.
_CACHE_BYTES, _CACHE_ROWS = 256 * 2**20, 1024
_HEADS_KV = 8


def _row_tiles(width: int, device: DeviceFacts) -> Iterator[RowTile]:
    """Whole rows, several short ones together; and loops."""
    whole = power_of_two(width)
    sizes = [(rows, whole) for rows in (1, 2, 4, 8, 16)] + [(1, 4096), (2, 2048), (4, 1024), (1, 1024)]
    for (rows, block_n), num_warps in itertools.product(dict.fromkeys(sizes), (1, 2, 4, 8, 16)):
        if block_n <= whole and rows * block_n // (num_warps * device.warp_size) in _ELEMENTS:
            yield RowTile(rows, block_n, num_warps)


def _forward_candidates(device: DeviceFacts, key: ForwardKey, shipped: RowTile) -> Iterator[RowTile]:
    return (tile for tile in _row_tiles(key.width, device) if tile != shipped)


def _backward_candidates(device: DeviceFacts, key: BackwardKey, shipped: RowTile) -> Iterator[RowTile]:
    for tile, stages, programs in itertools.product(_row_tiles(key.width, device), (2, 3), (1, 2, 4, 8)):
        in_flight = tile.rows * tile.block_n * key.bytes_per_column * (stages - 1) * programs
        # Programs stay: together they have 8 to 32 warps of a multiprocessor, and its shared memory.
        if 8 <= tile.num_warps * programs <= 32 and in_flight <= device.shared_memory:
            cut = tile._replace(num_stages=stages, programs_per_multiprocessor=programs)
            if cut != shipped:
                yield cut


def _forward_problem(key: ForwardKey, device: torch.device, tokens: int) -> Problem:
    x, weight = _norm_inputs(key.width, torch.bfloat16, device, tokens)
    return lambda: [_tensor(flashtile.rms_norm(x, weight, backend="triton"))]


#: `bytes_per_column` of a problem, its dtype, and whether a residual stream has a gradient.
_LOADED = {
    4: (torch.bfloat16, False),
    6: (torch.bfloat16, True),
    8: (torch.float32, False),
    12: (torch.float32, True),
}


def _backward_problem(key: BackwardKey, device: torch.device, tokens: int) -> Problem:
    if key.sums not in (1, 2) or key.dropout or key.bytes_per_column not in _LOADED:
        raise UntunableError("norms with dropout, layer scale, or a residual of another dtype")
    dtype, prenorm = _LOADED[key.bytes_per_column]
    x, weight = _norm_inputs(key.width, dtype, device, tokens)
    bias = torch.zeros_like(weight) if key.sums == 2 else None
    residual = torch.randn_like(x) if prenorm else None
    leaves = [leaf.requires_grad_() for leaf in (x, residual, weight, bias) if leaf is not None]
    norm = flashtile.dropout_add_rms_norm if bias is None else flashtile.dropout_add_layer_norm
    found = norm(x, residual, weight, bias, prenorm=prenorm, backend="triton")
    outputs = [found] if isinstance(found, Tensor) else list(found)
    upstream = [torch.randn_like(out) for out in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)


def _norm_inputs(width: int, dtype: torch.dtype, device: torch.device, tokens: int) -> tuple[Tensor, Tensor]:
    return normal(device, dtype, _rows(width, tokens), width), normal(device, dtype, width)


def _rows(width: int, tokens: int) -> int:
    return max(1, min(tokens, tokens * _COLUMNS // width))


def _tensor(found: Any) -> Tensor:
    assert isinstance(found, Tensor)
    return found


def _loss_candidates(device: DeviceFacts, key: TileKey, shipped: TileConfig) -> Iterator[TileConfig]:
    for block_n, num_warps in itertools.product((1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16)):
        cut, elements = TileConfig(block_n, key.vector, num_warps), block_n // (num_warps * device.warp_size)
        if key.vector <= elements <= _ELEMENTS[-1] and block_n <= power_of_two(key.width) and cut != shipped:
            yield cut


def _loss_problem(key: TileKey, device: torch.device, tokens: int) -> Problem:
    if key.vector * key.itemsize != 16:
        raise UntunableError("logits whose rows do not begin at multiples of 16 bytes")
    dtype = torch.float32 if key.itemsize == 4 else torch.bfloat16
    padded = -(-key.width // key.vector) * key.vector
    logits = normal(device, dtype, 4 * _rows(key.width, tokens), padded)[:, : key.width]
    labels = torch.randint(key.width, logits.shape[:1], device=device)
    if not key.backward:
        return lambda: [_tensor(flashtile.cross_entropy(logits, labels, backend="triton"))]
    loss = _tensor(flashtile.cross_entropy(logits.requires_grad_(), labels, backend="triton"))
    return lambda: torch.autograd.grad(loss, [logits], retain_graph=True)


def _decoding_candidates(device: DeviceFacts, key: AttendKey, shipped: AttendTiles) -> Iterator[AttendTiles]:
    for block_n, num_warps, num_stages in itertools.product((16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4, 5)):
        tiles = shipped._replace(block_n=block_n, num_warps=num_warps, num_stages=num_stages)
        if tiles != shipped and shared_memory(device, tiles, key) <= device.shared_memory:
            yield tiles


def _decoding_problem(key: AttendKey, device: torch.device, tokens: int) -> Problem:
    if not key.whole_words or key.head_dim != key.head_dim_v:
        raise UntunableError("latent rows, and rows that begin between words")
    dtype = torch.float8_e4m3fn if key.eight_bits else key.dtype
    page = key.page_size or 1
    total = min(_CACHE_BYTES // (2 * _HEADS_KV * key.head_dim * dtype.itemsize), 16 * tokens)
    batch = max(-(-multiprocessors(device) // _HEADS_KV), total // _CACHE_ROWS) if key.many else 1
    rows = max(1, total // batch // page) * page
    outer = (batch * rows // page, page) if key.page_size else (batch, rows)
    k, v = (normal(device, torch.float32, *outer, _HEADS_KV, key.head_dim).to(dtype) for _ in range(2))
    q = normal(device, key.dtype, batch, 1, _HEADS_KV * key.rows, key.head_dim)
    lengths = torch.full((batch,), rows, dtype=torch.int32, device=device)
    table = torch.randperm(outer[0], device=device).view(batch, -1).int() if key.page_size else None

    def attend() -> list[Tensor]:
        out = flashtile.attention_with_kv_cache(q, k, v, cache_lengths=lengths, block_table=table, backend="triton")
        assert isinstance(out, Tensor)
        return [out]

    return attend


CHOICES = {
    "decoding": Choice(_decoding_candidates, _decoding_problem),
    "norm.forward": Choice(_forward_candidates, _forward_problem),
    "norm.backward": Choice(_backward_candidates, _backward_problem),
    "cross_entropy": Choice(_loss_candidates, _loss_problem),
}
