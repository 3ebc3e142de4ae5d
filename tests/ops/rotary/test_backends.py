"""The backends of the rotation against the fp64 oracle: in Triton's interpreter, and on a GPU."""

from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.testing import assert_same
from support.companions.rotary_cases import COMBINED, EDGES, RotaryCase, check, parameters
from support.running.places import places

_DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@places("interpreted", "gpu")
@pytest.mark.parametrize("case", parameters(COMBINED | EDGES))
def test_kernels_agree_with_the_oracle(case, backend, device):
    check(case, backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (80, 32), (96, 96), (128, 128), (128, 64), (256, 256)])
def test_gpu_over_many_rows(head_dim, rotary_dim, interleaved, inplace, dtype):
    case = RotaryCase("qkv", 3, 61, 13, head_dim, rotary_dim, dtype, interleaved=interleaved, inplace=inplace)
    check(case, "triton", "cuda")
    check(replace(case, lengths=(40, 0, 63), table_dtype=dtype), "triton", "cuda")


@pytest.mark.gpu
def test_gpu_offsets_pass_2_to_the_31():
    heads, head_dim = 32, 128
    rows = 2**31 // (heads * head_dim) + 5
    cos, sin = flashtile.rotary_tables(rows, head_dim, device="cuda")
    x = torch.zeros(1, rows, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    x[0, -1] = torch.randn(heads, head_dim, device="cuda").bfloat16()
    expected = flashtile.apply_rotary(x[:, -1:], cos, sin, seqlen_offsets=rows - 1, backend="triton")
    out = flashtile.apply_rotary(x, cos, sin, backend="triton")
    assert torch.equal(out[:, -1:], expected)


@pytest.mark.gpu
def test_gpu_compiled_equals_eager():
    cos, sin = flashtile.rotary_tables(32, 64, device="cuda")
    x = torch.randn(2, 32, 3, 4, 64, device="cuda", requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return flashtile.apply_rotary_qkv(x * 2, cos, sin, inplace=True, backend="triton").sin()

    compiled = torch.compile(function, fullgraph=True)
    assert_same(compiled(x), function(x))
    dout = torch.randn_like(x)
    assert_same(torch.autograd.grad(compiled(x), x, dout), torch.autograd.grad(function(x), x, dout))
