"""The portable kernels with soft cap, bias, ALiBi, masks and sinks: many tiles, shared biases, memory of any layout.

Pairs of features on small shapes are in `test_triton`.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same, check, make_inputs, run, with_arguments
from support.attention.attention_cases import BASE, parameters
from support.running.places import places

#: Every way in which a bias shares its entries; those that `attention_cases` has are not repeated.
SHARED = {
    **{name: replace(BASE, bias=name) for name in ("1111", "b111", "1h11", "111k", "bh1k", "b1q1")},
    **{
        f"packed {name}": replace(BASE, bias=name, batch=3, lengths_q=(5, 0, 37), lengths_k=(33, 4, 20))
        for name in ("1111", "1h1k", "11q1")
    },
}


@pytest.mark.interpreter
@pytest.mark.parametrize("case", parameters(SHARED))
def test_interpreted_gradient_of_a_shared_bias(case):
    check(case, "triton")


@places("interpreted", "gpu")
def test_tables_of_any_layout(backend, device):
    """Bias and mask read by columns, from an odd address, and expanded: the same numbers, so the same results."""
    case = replace(BASE, bias="bhqk", mask="bhqk")
    inputs = make_inputs(case, device)
    bias, mask = inputs.tensors["bias"], inputs.tensors["mask"][:1, :, :1]
    inputs.tensors["mask"] = mask.expand(2, 2, 37, 53).contiguous()
    expected = run(case, inputs, "triton")
    for layout in (
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.cat((t[..., :1], t), dim=-1)[..., 1:],
        lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    ):
        inputs.tensors.update(bias=layout(bias), mask=layout(mask).expand(2, 2, 37, 53))
        actual = run(case, inputs, "triton")
        for name, value in expected.items():
            assert_same(actual[name], value)


@places("interpreted", "gpu")
def test_bias_without_columns(backend, device):
    """The sequences have no keys, but there are rows past the last: nothing is read of a bias that has no columns."""
    q, k = (torch.randn(rows, 2, 16, device=device, requires_grad=True) for rows in (40, 5))
    bias = torch.empty(1, 2, 33, 0, device=device, requires_grad=True)
    offsets_q, offsets_k = (torch.tensor(offsets, device=device) for offsets in ([0, 33], [0, 0]))
    longest = {"max_seqlen_q": 33, "max_seqlen_k": 0}
    out = flashtile.attention_varlen(q, k, k, offsets_q, offsets_k, bias=bias, backend="triton", **longest)
    for gradient in torch.autograd.grad(out.sum(), (q, k, bias)):
        assert not gradient.any()


@pytest.mark.interpreter
def test_interpreted_tables_of_whole_tiles():
    """Sizes that all tiles divide: no bounds checks."""
    case = replace(BASE, batch=1, seq_q=128, seq_k=128, heads=2, heads_kv=1, bias="1hqk", mask="b1qk")
    check(with_arguments(case, causal=True), "triton")


LARGE = replace(BASE, seq_q=517, seq_k=643, heads=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", ["1hqk", "b11k", "11qk", "1111", "b1q1", "1h11"])
def test_gradient_of_a_shared_bias_over_many_tiles(shape, dtype):
    case = replace(LARGE, bias=shape, heads=6, heads_kv=2, head_dim=64, head_dim_v=64, dtype=dtype)
    check(with_arguments(case, causal=True), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", ["1hqk", "bhqk", "1h1k"])
def test_bias_and_mask_of_whole_tiles(shape, head_dim, causal):
    """Where no tile goes past the end of the tables, they are read without a bounds check."""
    case = replace(LARGE, seq_q=512, seq_k=768, batch=3, bias=shape, mask="b1qk", dtype=torch.bfloat16)
    case = replace(case, head_dim=head_dim, head_dim_v=head_dim)
    check(with_arguments(case, causal=causal), "triton", "cuda")


def _strided(table: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The same numbers in memory of other strides."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(table.shape, strides))
    return table.new_zeros(length).as_strided(table.shape, strides).copy_(table)


@pytest.mark.interpreter
@pytest.mark.unpoisoned
def test_interpreted_mask_whose_columns_lie_past_two_to_the_31_elements():
    """They lie within a tile. Little of the memory is touched."""
    q, k = (torch.randn(1, rows, 1, 16) for rows in (18, 20))
    mask = torch.rand(1, 1, 18, 20) < 0.6
    apart = torch.empty(19 * 2**27 + 18, dtype=torch.bool).as_strided(mask.shape, (1, 1, 1, 2**27)).copy_(mask)
    actual, expected = (flashtile.attention(q, k, k, mask=given, backend="triton") for given in (apart, mask))
    assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("far", ["batch", "row", "column"])
def test_bias_and_mask_past_two_to_the_31_elements(far):
    case = replace(BASE, batch=3, seq_q=128, seq_k=136, bias="b1qk", mask="b1qk", dtype=torch.bfloat16)
    inputs = make_inputs(case, "cuda")
    # The last batch entry, or the last rows or columns, lie past 2³¹ elements.
    strides = {
        "batch": (2**30 + 4096, 128 * 136, 136, 1),
        "row": (136, 3 * 136, 2**31 // 120, 1),
        "column": (128, 3 * 128, 1, 2**31 // 120),
    }[far]
    for name in ("bias", "mask"):
        inputs.tensors[name] = _strided(inputs.tensors[name], strides)
    check(case, "triton", "cuda", inputs=inputs)
