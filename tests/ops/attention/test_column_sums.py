"""How much attention each key receives, on every backend: against the weights of the float64 oracle."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashtile
from flashtile import BlockMask
from flashtile.testing import AttentionCase, assert_close, assert_same, make_inputs, with_arguments
from support.attention.attention_cases import BASE, COMBINED, EDGES, parameters
from support.attention.cpu_tiles import use_small_tiles
from support.running.covering import turns


def sums_of(case: AttentionCase, backend: str, device: str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
    """Column sums of a call, from its own lse."""
    inputs = make_inputs(case, device)
    q, k, v = (t.to(dtype or case.dtype) for t in (inputs.q, inputs.k, inputs.v))
    tensors = {
        name: t.to(dtype) if dtype and isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in inputs.tensors.items()
    }
    function = flashtile.attention_varlen if case.packed else flashtile.attention
    _, lse = function(q, k, v, **tensors, **case.keywords(), return_lse=True, backend=backend)
    # Sinks are in lse already, and the sums are those before dropout.
    given = {name: value for name, value in (tensors | case.keywords()).items() if "dropout" not in name}
    given.pop("sinks", None)
    return flashtile.attention_column_sums(q, k, lse, **given, backend=backend)


def check(case: AttentionCase, backend: str, device: str = "cpu") -> Tensor:
    actual = sums_of(case, backend, device)
    oracle = sums_of(case, "reference", device, torch.float64)
    assert_close(f"{case}: sums", actual, oracle, sums_of(case, "reference", device))
    return actual


@pytest.fixture
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch, 16)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", parameters(COMBINED | EDGES))
def test_agrees_with_the_oracle(case):
    check(case, "cpu")


#: Features alone, and some together: pairs of them meet in the pieces that all kernels share. With a block mask there
#: is a negative scale of hidden scores.
SOME = {
    name: case
    for name, case in COMBINED.items()
    if "+" not in name or "packed" in name or {"block_mask", "scale"} <= set(name.split("+"))
} | EDGES


@pytest.mark.interpreter
@pytest.mark.parametrize("case", parameters(SOME))
def test_interpreted_kernel_agrees_with_the_oracle(case):
    check(case, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("name, dtype", turns(COMBINED, [torch.float32, torch.bfloat16, torch.float16]), ids=str)
def test_kernel_agrees_with_the_oracle(name, dtype):
    check(replace(COMBINED[name], dtype=dtype), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(EDGES))
def test_kernel_at_the_edges(case):
    check(case, "triton", "cuda")


_LARGE = replace(BASE, seq_q=1517, seq_k=1643, heads=4, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head_dim, arguments",
    turns([64, 96, 128, 256, 512], [{}, {"causal": True}, {"window": (200, 30)}, {"softcap": 3.0}], 2),
    ids=str,
)
def test_kernel_over_many_tiles(head_dim, arguments):
    case = with_arguments(replace(_LARGE, head_dim=head_dim, head_dim_v=head_dim), **arguments)
    first = check(case, "triton", "cuda")
    assert all(torch.equal(first, sums_of(case, "triton", "cuda")) for _ in range(5))
    check(replace(case, bias="1hqk", mask="b1qk", alibi_slopes="bh", seq_q=1536, seq_k=1024), "triton", "cuda")


def example(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k = torch.randn(2, 9, 4, 8), torch.randn(2, 11, 2, 8)
    return q, k, flashtile.attention(q, k, k, return_lse=True, **options)[1]


def test_sums_of_the_weights_by_hand():
    q, k, lse = example(window=(3, 0))
    sums = flashtile.attention_column_sums(q, k, lse, window=(3, 0))
    assert_same(sums, flashtile.attention_probs(q, k, window=(3, 0)).sum(dim=-2))
    assert_same(sums.sum(dim=-1), torch.full((2, 4), 9.0))


def test_sinks_take_their_share_through_lse():
    sinks = torch.randn(4)
    q, k, lse = example(sinks=sinks)
    sums = flashtile.attention_column_sums(q, k, lse)
    assert_same(sums, flashtile.attention_probs(q, k, sinks=sinks).sum(dim=-2))
    assert_same(sums.sum(-1), 9 - torch.exp(sinks[:, None] - lse).sum(-1))


def test_parts_of_the_keys_with_the_lse_of_all():
    q, k, lse = example()
    whole = flashtile.attention_column_sums(q, k, lse)
    parts = [flashtile.attention_column_sums(q, part, lse) for part in (k[:, :4], k[:, 4:])]
    assert_same(torch.cat(parts, dim=-1), whole)


def test_packed_keys_past_the_end_receive_nothing():
    q, cu_seqlens = torch.randn(12, 2, 8), torch.tensor([0, 4, 4, 9])
    _, lse = flashtile.attention_varlen(q, q, q, cu_seqlens, return_lse=True)
    sums = flashtile.attention_column_sums(q, q, lse, cu_seqlens)
    assert not sums[:, 9:].any()
    _, alone = flashtile.attention(q[None, 4:9], q[None, 4:9], q[None, 4:9], return_lse=True)
    assert_same(sums[:, 4:9], flashtile.attention_column_sums(q[None, 4:9], q[None, 4:9], alone)[0])


def test_padded_keys_may_be_nan():
    q, k, _ = example()
    lengths = torch.tensor([3, 0])
    k[0, 3:] = k[1] = float("nan")
    _, lse = flashtile.attention(q, k, k, key_lengths=lengths, return_lse=True)
    sums = flashtile.attention_column_sums(q, k, lse, key_lengths=lengths)
    assert sums[0, :, :3].gt(0).all() and not sums[0, :, 3:].any() and not sums[1].any()


@pytest.mark.gpu
def test_nothing_waits_and_nothing_as_large_as_the_scores_is_made():
    q, k = (torch.randn(1, 16384, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    _, lse = flashtile.attention(q, k, k, causal=True, return_lse=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = flashtile.attention_column_sums(q, k, lse, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 2**22
    total = sums.sum(-1).to(q.dtype)
    assert_same(total, torch.full_like(total, 16384))


_Q, _K, _LSE = torch.randn(2, 9, 4, 8), torch.randn(2, 11, 2, 8), torch.randn(2, 4, 9)
_CU = torch.tensor([0, 9])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lse": _LSE.mT}, ValueError, r"lse: expected \[2, 4, 9\]"),
        ({"lse": _LSE.double()}, TypeError, "lse: expected dtype torch.float32.* got torch.float64"),
        ({"lse": _LSE.to("meta")}, ValueError, "lse: expected the device of q"),
        ({"lse": None}, TypeError, "lse: expected a torch.Tensor"),
        ({"cu_seqlens_k": _CU}, ValueError, "cu_seqlens_k: expected it beside cu_seqlens_q only"),
        ({"max_seqlen_q": 9}, ValueError, "max_seqlen_q: expected it beside cu_seqlens_q only"),
        ({"cu_seqlens_q": _CU}, ValueError, "q: expected 3 dimensions"),
        ({"key_lengths": torch.tensor([1])}, ValueError, "key_lengths: expected shape"),
        ({"q": _Q.clone().requires_grad_()}, ValueError, "expected tensors that want no gradient.*torch.no_grad"),
        ({"bias": torch.zeros(1, requires_grad=True)}, ValueError, "expected tensors that want no gradient"),
        ({"backend": "hopper"}, ValueError, "no kernel for column sums; backend='triton' has one"),
        ({"backend": "fast"}, ValueError, "backend: expected one of"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None if isinstance(value, type) else value[:40],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        flashtile.attention_column_sums(**{"q": _Q, "k": _K, "lse": _LSE, **arguments})


def test_errors_of_packed_calls():
    packed = {"q": _Q[0], "k": _K[0], "lse": _LSE[0], "cu_seqlens_q": _CU}
    with pytest.raises(ValueError, match="max_seqlen_q, max_seqlen_k: expected both beside bias, mask or block_mask"):
        flashtile.attention_column_sums(**packed, mask=torch.ones(9, 11) > 0)
    with pytest.raises(ValueError, match="max_seqlen_q, max_seqlen_k: expected both beside bias, mask or block_mask"):
        flashtile.attention_column_sums(**packed, block_mask=BlockMask.from_dense(torch.ones(9, 11) > 0))
    with pytest.raises(ValueError, match="expected its last value to be at most the packed total, 9, got 12"):
        flashtile.attention_column_sums(**{**packed, "cu_seqlens_q": torch.tensor([0, 12])})


def test_transforms_are_refused_instead_of_a_missing_derivative():
    with pytest.raises(NotImplementedError, match="it has no derivative"):
        torch.func.grad(lambda q: flashtile.attention_column_sums(q, _K, _LSE).sum())(_Q)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="it has no derivative"):
        flashtile.attention_column_sums(forward_ad.make_dual(_Q, _Q), _K, _LSE)
    with torch.no_grad():
        sums = flashtile.attention_column_sums(_Q.clone().requires_grad_(), _K, _LSE)
    assert not sums.requires_grad
