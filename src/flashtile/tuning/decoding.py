"""The choice of attention over a key/value cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

import flashtile
from flashtile._backends.devices import DeviceFacts, multiprocessors
from flashtile.ops.common.split_keys.configs import AttendTiles, TileKey, shared_memory
from flashtile.tuning.choice import Choice, Problem, UntunableError, normal

#: Bytes of keys and values that a problem reads at most, and rows of a sequence where there are many.
_CACHE_BYTES, _CACHE_ROWS = 256 * 2**20, 1024
_HEADS_KV = 8


def _candidates(device: DeviceFacts, key: TileKey, shipped: AttendTiles) -> Iterator[AttendTiles]:
    for block_n, num_warps, num_stages in itertools.product((16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4, 5)):
        tiles = shipped._replace(block_n=block_n, num_warps=num_warps, num_stages=num_stages)
        if tiles != shipped and shared_memory(device, tiles, key) <= device.shared_memory:
            yield tiles


def _problem(key: TileKey, device: torch.device, tokens: int) -> Problem:
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

    def attend() -> list[torch.Tensor]:
        out = flashtile.attention_with_kv_cache(q, k, v, cache_lengths=lengths, block_table=table, backend="triton")
        assert isinstance(out, torch.Tensor)
        return [out]

    return attend


CHOICES = {"decoding": Choice(_candidates, _problem)}
