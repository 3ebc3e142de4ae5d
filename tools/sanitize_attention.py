"""Small attention calls in both directions, for compute-sanitizer, which takes seconds for what takes microseconds.

    compute-sanitizer --tool memcheck --kernel-name kns=attention python tools/sanitize_attention.py [--backend hopper]

All rows of the kernels' tables, with and without masks, a soft cap, a fixed order of sums, packing, 8-bit inputs, and
tiles that are computed once more; and what changes scores, block masks with tiles of both sizes, the largest scores,
and sequences of one tile.
A run without compute-sanitizer before it fills the cache of compiled kernels. Racecheck reports two pairs, both false:
the producer's queue, where a warp writes as a whole and one thread arrives, and the state byte of Triton's partitions,
between two `bar.sync`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import flashtile
from flashtile import BlockMask

_HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
_WIDE_HEADS = ((320, 320), (512, 512), (128, 512))


def run(backend: str, head_dim: int, head_dim_v: int, seq: int, heads_kv: int = 2, group: int = 1, **options) -> None:
    """One dense call. `dtype` beside the options of `flashtile.attention`."""
    dtype = options.pop("dtype", torch.bfloat16)
    shapes = ((group * heads_kv, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v))
    q, k, v = (_random(1, seq, *shape, dtype=dtype) for shape in shapes)
    _backward(flashtile.attention(q, k, v, backend=backend, **options), q, k, v)
    print("dense", head_dim, head_dim_v, seq, options, flush=True)


def run_packed(backend: str, head_dim: int, lengths: tuple[int, ...]) -> None:
    """One causal call with packed sequences."""
    cu_seqlens = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k, v = (_random(sum(lengths), 2, head_dim) for _ in range(3))
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    _backward(flashtile.attention_varlen(q, k, v, cu_seqlens, causal=True, backend=backend, **longest), q, k, v)
    print("packed", head_dim, lengths, flush=True)


def run_repeated(backend: str, head_dim: int, head_dim_v: int) -> None:
    """One call long enough to take chances, which fail for one of its two heads."""
    q, k = (_random(1, 1100, 2, head_dim).detach() for _ in range(2))
    v = _random(1, 1100, 2, head_dim_v).detach()
    q[..., 0] = 50.0
    k[..., 0] = 0.0
    k[:, :9, 1, 0] = 50.0
    assert flashtile.attention(q, k, v, backend=backend).isfinite().all()
    print("repeated", head_dim, head_dim_v, flush=True)


def run_8_bit(backend: str, head_dim: int, head_dim_v: int, seq: int) -> None:
    """One forward with 8-bit inputs."""
    shapes = ((1, seq, 2, columns) for columns in (head_dim, head_dim, head_dim_v))
    q, k, v = (_random(*shape).detach().to(torch.float8_e4m3fn) for shape in shapes)
    assert flashtile.attention(q, k, v, backend=backend).isfinite().all()
    print("8 bits", head_dim, head_dim_v, seq, flush=True)


def run_features(backend: str, head_dim: int, seq: int = 200) -> None:
    """Calls with what changes scores, hides them, or drops weights."""
    bias = {heads: _random(1, heads, seq, seq) for heads in (1, 2)}
    slopes = _random(2, dtype=torch.float32)
    mask = torch.rand(1, 1, seq, seq, device="cuda") < 0.7
    table = _random(2, seq, dtype=torch.float32)
    lists = [BlockMask.from_dense(torch.rand(seq, seq) < 0.5, tile=(tile, tile)).to("cuda") for tile in (64, 128)]
    for options in (
        {"dropout_p": 0.2},
        {"bias": bias[2]},
        {"bias": bias[1], "causal": True},
        {"bias": bias[2].detach(), "deterministic": True},
        {"mask": mask, "key_lengths": torch.tensor([seq - 70], device="cuda")},
        {"alibi_slopes": slopes, "causal": True, "sinks": _random(2, dtype=torch.float32)},
        {"score_mod": lambda score, b, h, i, j: score * torch.sigmoid(score) + table.detach()[h, i], "causal": True},
        *({"block_mask": block_mask} for block_mask in lists),
    ):
        run(backend, head_dim, head_dim, seq, **options)
    q, k, v = (_random(1, seq, 2, head_dim).detach() for _ in range(3))
    out, largest = flashtile.attention(q, k, v, causal=True, return_max_scores=True, backend=backend)
    assert out.isfinite().all() and largest.isfinite().all()


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def _backward(out: Tensor, *inputs: Tensor) -> None:
    grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
    assert all(tensor.isfinite().all() for tensor in (out, *grads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hopper")
    backend = parser.parse_args().backend
    torch.manual_seed(0)
    for heads in _HEADS:
        run(backend, *heads, 333)
        run(backend, *heads, 333, causal=True)
        run(backend, *heads, 260, group=2, causal=True, deterministic=True)
        run(backend, *heads, 260, 1, causal=True, deterministic=True)
        run(backend, *heads, 260, 1, 2, causal=True, window=(70, None), dtype=torch.float16)
        run(backend, *heads, 260, 1, 2, softcap=5.0)
        run_repeated(backend, *heads)
        run_8_bit(backend, *heads, 400)
        run_features(backend, heads[0])
    for heads in _WIDE_HEADS:
        run(backend, *heads, 333)
        run(backend, *heads, 260, 1, 2, causal=True, window=(70, None), dtype=torch.float16)
    for heads in ((128, 128), (96, 72)):
        run("auto", *heads, 333, dtype=torch.float32)
        run("auto", *heads, 260, 1, 2, causal=True, window=(70, None), dtype=torch.float32)
    run("triton", 32, 32, 49, bias=_random(1, 2, 49, 49))
    run("triton", 64, 64, 64, dropout_p=0.2)
    run_8_bit(backend, 128, 128, 2100)
    for head_dim in (64, 128):
        run_packed(backend, head_dim, (1, 130, 0, 200))


if __name__ == "__main__":
    main()
