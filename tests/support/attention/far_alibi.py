"""ALiBi of keys far away in 16-bit kernels, whose results are those of near keys."""

from __future__ import annotations

import torch

import flashtile
from flashtile.testing import assert_close


def _results(backend: str, dtype: torch.dtype, head_dim: int, seq_k: int, device: str) -> dict[str, torch.Tensor]:
    """70 queries, whose keys of `seq_k` end after 40. lse and the largest scores as if they ended with the others."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (1, 70, 1, head_dim), "k": (1, 40, 1, head_dim), "v": (1, 40, 1, head_dim)}
    leaves = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    dout = torch.randn(shapes["q"], generator=generator).to(device, dtype)
    for name in "kv":
        leaves[name] = torch.nn.functional.pad(leaves[name], (0, 0, 0, 0, 0, seq_k - 40))
    leaves = {name: leaf.to(device, dtype).requires_grad_() for name, leaf in leaves.items()}
    apart, wide = 4.0 * (seq_k - 110), torch.promote_types(dtype, torch.float32)
    slopes, sinks = (torch.full((1,), value, dtype=wide, device=device) for value in (4.0, -apart))
    out, *statistics = flashtile.attention(
        **leaves, alibi_slopes=slopes, sinks=sinks, key_lengths=torch.tensor([40], device=device), return_lse=True,
        return_max_scores=True, backend=backend,
    )  # fmt: skip
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    found = {f"d{name}": grad[:, :70] for name, grad in zip(leaves, grads)}
    return found | {"out": out, "lse": statistics[0] + apart, "max_scores": statistics[1] + apart}


def check(backend: str, head_dim: int, device: str = "cpu") -> None:
    """Scores near -60,000 are differences of small numbers, and only what is added to lse for it is rounded."""
    near, far = (_results(backend, torch.float16, head_dim, seq_k, device) for seq_k in (110, 15_110))
    eager, oracle = (_results("reference", dtype, head_dim, 110, device) for dtype in (torch.float16, torch.float64))
    for name in ("lse", "max_scores"):
        assert (far.pop(name) - near[name]).abs().max() <= 2.0**-8  # the distance of float32 there
    if device == "cpu":  # a GPU may have other tiles for longer calls
        assert torch.equal(far["out"], near["out"])
    for name, value in far.items():
        assert_close(name, value, oracle[name], eager[name])
