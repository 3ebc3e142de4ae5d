"""The backends of the softmax against the fp64 oracle: in Triton's interpreter, and on a GPU."""

from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.testing import assert_close
from support.companions.softmax_cases import SoftmaxCase, check, parameters
from support.running.places import places


@places("interpreted", "gpu")
@pytest.mark.parametrize("case", parameters())
def test_kernels_agree_with_the_oracle(case, backend, device):
    check(case, backend, device)


@places("cpu", "interpreted", "gpu")
def test_the_largest_numbers(backend, device):
    """Rows of the smallest number, as added masks write it, and of the largest, beside others."""
    limits = torch.finfo(torch.float32)
    for width in (5, 9000):
        x = torch.randn(2, 4, 4, width, device=device)
        x[:, 0], x[:, 1, :, 1] = limits.min, limits.max
        x[:, 2, :, 2:] = limits.min
        out = flashtile.scaled_masked_softmax(x, None, scale=1.0, backend=backend)
        assert_close("out", out, x.double().softmax(-1), x.softmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 128, 1000, 1024, 2048, 4096, 8192, 16384, 40000])
def test_gpu_over_many_rows(width, dtype):
    check(SoftmaxCase((2, 3, 211, width), dtype, mask=(2, 1, 211, width)), "triton", "cuda")
    check(SoftmaxCase((5, 211, width), dtype, causal=True), "triton", "cuda")


@pytest.mark.gpu
def test_gpu_causal_square():
    check(replace(SoftmaxCase(causal=True), shape=(3, 2048, 2048), dtype=torch.bfloat16), "triton", "cuda")


@pytest.mark.gpu
def test_gpu_offsets_pass_2_to_the_31():
    rows = 2**31 // 4096 + 3
    x = torch.zeros(1, 1, rows, 4096, dtype=torch.bfloat16, device="cuda")
    x[..., -1, :] = torch.randn(4096, device="cuda").bfloat16()
    out = flashtile.scaled_masked_softmax(x, None, backend="triton")
    assert torch.equal(out[..., -1:, :], flashtile.scaled_masked_softmax(x[..., -1:, :], None, backend="triton"))
