"""The portable kernels against the fp64 oracle: in Triton's interpreter (small), and on a GPU (the same and larger).

Every feature alone and every pair of features, forward and backward, with odd sizes that no tile divides. In the
interpreter a case has four features.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import flashtile
from flashtile._backends import clear_plans
from flashtile.ops.attention import checks
from flashtile.ops.attention.gpu import plan as triton_plan
from flashtile.ops.attention.gpu import reductions
from flashtile.ops.attention.triton import launch
from flashtile.testing import AttentionCase, assert_close, assert_same, check, make_inputs, run, with_arguments
from support.attention.attention_cases import (
    BASE,
    COMBINED,
    EDGES,
    PAIRS,
    changed,
    check_again,
    check_forward,
    combined,
    parameters,
)
from support.running.covering import turns
from support.running.places import places


@pytest.mark.interpreter
@pytest.mark.parametrize("case", parameters(COMBINED | EDGES))
def test_interpreted_kernels_agree_with_the_oracle(case):
    check(case, "triton")


#: Ways in which a bias shares its entries, of sequences that one tile holds.
_SHARED_BY_SHORT = {
    f"bias {name}": replace(BASE, bias=name, batch=3, heads=4) for name in ("1h1k", "b1q1", "111k", "11qk", "bhqk")
}


def _short(case: AttentionCase) -> bool:
    return not (case.packed or case.block_mask or case.seq_q > 64)


_SHORT = combined(*(name for name, case in PAIRS.items() if not _short(case)))
_SHORT_CASES = {name: case for name, case in _SHORT.items() if _short(case)} | _SHARED_BY_SHORT


@pytest.mark.interpreter
@pytest.mark.parametrize("name, programs", turns(_SHORT_CASES, [1, 512]))
def test_interpreted_kernel_of_short_sequences(name, programs, monkeypatch):
    """One kernel computes all gradients; in 16 bits, so that there is one. With few programs each goes through several
    heads or sequences."""
    plan_kernel = triton_plan.plan_kernel

    def whole(*arguments: Any) -> Any:
        found = plan_kernel(*arguments)
        assert found.name in ("forward", "short_backward")
        return found

    monkeypatch.setattr(launch, "plan_kernel", whole)
    monkeypatch.setattr(reductions, "_FILLING", programs)
    clear_plans()
    check(replace(_SHORT_CASES[name], dtype=torch.float16), "triton")
    clear_plans()


@pytest.mark.interpreter
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_interpreted_kernels_take_lengths_beyond_the_keys_for_all_keys(packed, monkeypatch):
    """On a GPU nobody reads the lengths before the kernels do."""
    monkeypatch.setattr(checks, "check_values", lambda *_: None)
    case = with_arguments(PAIRS["packed"] if packed else BASE, causal=True)
    inputs = make_inputs(case)
    expected = run(case, inputs, "triton")
    inputs.tensors["key_lengths"] = torch.full((case.batch,), 10**6)
    for name, value in run(case, inputs, "triton").items():
        assert torch.equal(value, expected[name]), name


_GROUPED = {name: case for name, case in COMBINED.items() if case.heads_kv < case.heads}
#: Features that ask which head or sequence it is.
_OF_HEADS = ("packed", "bias shared", "alibi", "sinks", "block_mask", "dropout")
_GROUPED_BY_HEADS = {
    name: case for name, case in _GROUPED.items() if "+" not in name or not set(_OF_HEADS).isdisjoint(name.split("+"))
}


@pytest.mark.interpreter
@pytest.mark.parametrize("case", parameters(_GROUPED_BY_HEADS))
def test_interpreted_kernels_with_the_heads_that_share_keys_divided(case, monkeypatch):
    """As where there are too few key tiles for all multiprocessors: two shares of two heads each. One sequence and one
    head of keys, unless sequences are packed."""
    monkeypatch.setattr(triton_plan, "key_tile_shares", lambda call, *_: call.group // 2)
    clear_plans()
    if not case.packed:
        case = replace(case, batch=1, heads_kv=1, key_lengths=case.key_lengths and case.key_lengths[:1])
    check(replace(case, heads=4 * case.heads_kv), "triton")
    clear_plans()


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(_GROUPED))
def test_kernels_with_the_heads_that_share_keys_divided(case, monkeypatch):
    monkeypatch.setattr(triton_plan, "key_tile_shares", lambda call, *_: call.group)
    clear_plans()
    check(replace(case, dtype=torch.bfloat16), "triton", "cuda")
    clear_plans()


@pytest.mark.gpu
@pytest.mark.parametrize("name, dtype", turns(COMBINED, [torch.bfloat16, torch.float32, torch.float16]), ids=str)
def test_kernels_agree_with_the_oracle(name, dtype):
    check(replace(COMBINED[name], dtype=dtype), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(EDGES))
def test_kernels_at_the_edges(case):
    check(case, "triton", "cuda")


_LARGE = replace(BASE, seq_q=517, seq_k=643, heads=4, dtype=torch.bfloat16)


_WIDTHS = [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 512), (512, 512)]
#: What a call has more; each meets three pairs of widths.
_MORE: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window": (200, 30)}, {"dropout_p": 0.2}, {"softcap": 1.5, "dtype": torch.float32},
    {"bias": "bhqk", "causal": True}, {"alibi_slopes": "bh", "causal": True}, {"mask": "b1qk", "dtype": torch.float32},
    {"sinks": True, "window": (100, 0)}, {"block_mask": (128, 128)}, {"block_mask": (16, 256), "bias": "1hqk"},
    {
        "bias": "1hqk", "mask": "b11k", "alibi_slopes": "h", "sinks": True, "key_lengths": (643, 300), "softcap": 3.0,
        "dropout_p": 0.2,
    },
    {
        "batch": 3, "lengths_q": (517, 0, 130), "lengths_k": (643, 64, 200), "bias": "1hqk", "mask": "111k",
        "sinks": True, "causal": True,
    },
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("more, widths", turns(_MORE, _WIDTHS, 3), ids=str)
def test_kernels_over_many_tiles(more, widths):
    check(changed(_LARGE, *widths, **more), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head_dim, feature", turns([32, 80, 128, 129, 256, 272, 512], ["plain", "mask", "bias shared"], 2)
)
def test_kernels_over_one_tile(head_dim, feature):
    few = replace(PAIRS[feature], seq_q=36, seq_k=20, head_dim=head_dim, head_dim_v=head_dim, dtype=torch.bfloat16)
    check(few, "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_float32_kernels_over_many_tiles(head_dim):
    case = replace(_LARGE, dtype=torch.float32, head_dim=head_dim, head_dim_v=head_dim, seq_q=200, seq_k=300, batch=1)
    check(with_arguments(case, causal=True), "triton", "cuda")


@places("interpreted", "gpu")
def test_float32_kernels_pass_on_nan_and_infinity(backend, device):
    q, k, v = (torch.randn(1, 70, 5, 32, device=device) for _ in range(3))
    q[0, 40, 0, 3] = k[0, 7, 1, 5] = v[0, 9, 2, 1] = torch.inf
    k[0, 8, 3, 5] = v[0, 11, 4, 0] = torch.nan
    oracle = flashtile.attention(q.double(), k.double(), v.double(), backend="reference")
    eager = flashtile.attention(q, k, v, backend="reference")
    assert eager.isinf().any() and eager.isnan().any()
    assert_close("out", flashtile.attention(q, k, v, backend=backend), oracle, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [None, "bhqk", "11qk", "1h1k", "1111"])
def test_runs_give_the_same_bits(bias):
    more = {"alibi_slopes": "h", "sinks": True, "softcap": 3.0, "head_dim": 64} if bias else {"causal": True}
    check_again(changed(_LARGE, heads_kv=2, bias=bias, dropout_p=0.1, deterministic=True, **more), "triton", 9)


#: The portable kernels, and on Hopper its own.
_BACKENDS = pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])


@pytest.mark.gpu
@_BACKENDS
def test_strided_and_expanded_inputs(backend):
    storage = torch.randn(2, 3, 300, 3, 8, 96, device="cuda", dtype=torch.bfloat16)
    q, k, v = storage[:, 1].unbind(2)  # heads interleaved, a batch stride three times too wide
    k = k[..., 16:80].transpose(1, 2).contiguous().transpose(1, 2)
    first = 3 if backend == "triton" else 8  # TMA reads from multiples of 16 bytes
    q, v = q[..., first : first + 64], v[:, :, :1].expand(-1, -1, 8, -1)
    check_forward(q, k, v, backend, causal=True)
    if backend == "hopper":
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            flashtile.attention(storage[:, 1, :, 0, :, 3:67], k, v, backend="hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.2, 0.0])
def test_a_cuda_graph_reads_its_tensors_and_draws_dropout_in_each_replay(dropout_p):
    q, k, v = (torch.randn(2, 128, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 128, 128, device="cuda", requires_grad=True)
    slopes, sinks = (torch.rand(2, device="cuda", requires_grad=True) for _ in range(2))

    def step() -> tuple[torch.Tensor, ...]:
        options = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks, "softcap": 5.0, "dropout_p": dropout_p}
        out = flashtile.attention(q, k, v, causal=True, backend="triton", **options)
        return out, *torch.autograd.grad(out, (q, k, v, bias, slopes, sinks), torch.ones_like(out))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    first = [result.clone() for result in results]
    with torch.no_grad():
        bias.mul_(1 if dropout_p else -2)
    graph.replay()
    assert not torch.equal(first[0], results[0])
    assert all(result.isfinite().all() for result in results)
    assert dropout_p or all(map(torch.equal, results, step()))


@pytest.mark.gpu
def test_autocast_and_checkpointing_with_dropout():
    q, k, v = (torch.randn(2, 100, 2, 64, device="cuda", requires_grad=True) for _ in range(3))

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(q, k, v, dropout_p=0.3)

    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = (
                torch.utils.checkpoint.checkpoint(function, q, k, v, use_reentrant=False)
                if checkpointed
                else function(q, k, v)
            )
        assert out.dtype is torch.bfloat16
        gradients.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.multi_gpu
@_BACKENDS
def test_inputs_on_a_device_that_is_not_current(backend):
    case = with_arguments(replace(_LARGE, head_dim=64, head_dim_v=64), causal=True)
    inputs = make_inputs(case, "cuda:1")
    with torch.cuda.device(0):
        check(case, backend, "cuda:1", inputs=inputs)


@places("interpreted", "gpu")
def test_side_inputs_of_any_layout(backend, device):
    case = replace(BASE, lengths_q=(5, 0, 37), lengths_k=(33, 9, 20), key_lengths=(9, 9, 9))
    inputs = make_inputs(with_arguments(case, dropout_p=0.2), device)
    expected = run(with_arguments(case, dropout_p=0.2), inputs, backend)
    tensors = inputs.tensors
    tensors["cu_seqlens_q"] = tensors["cu_seqlens_q"].repeat_interleave(2)[::2]
    tensors["cu_seqlens_k"] = tensors["cu_seqlens_k"].long()
    tensors["key_lengths"] = tensors["key_lengths"][:1].expand(3)
    tensors["dropout_seed"] = tensors["dropout_seed"].repeat_interleave(3)[::3]
    actual = run(with_arguments(case, dropout_p=0.2), inputs, backend)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@places("interpreted", "gpu")
@pytest.mark.parametrize("splits", [False, True])
def test_lengths_past_32_bits_show_all_keys(splits, backend, device, monkeypatch):
    """In 32 bits the first would be 0, and the second negative. On a GPU nobody asks for them before the kernels do."""
    monkeypatch.setattr(checks, "check_values", lambda *_: None)
    backend = "split" if splits else backend
    q, k = torch.randn(2, 3, 2, 16, device=device), torch.randn(2, 300, 2, 16, device=device)
    q.requires_grad_()
    lengths = torch.tensor([2**40, 2**31 + 7], device=device)
    out, lse = flashtile.attention(q, k, k, key_lengths=lengths, return_lse=True, backend=backend)
    expected = flashtile.attention(q, k, k, return_lse=True, backend="reference")
    assert_same((out, lse), expected)
    (grad,), (wanted,) = (torch.autograd.grad(o.sin().sum(), q) for o in (out, expected[0]))
    assert_same(grad, wanted)


@places("interpreted", "gpu")
@pytest.mark.parametrize("scale", [0.0, -0.5], ids=str)
def test_scale_of_expanded_queries(scale, backend, device):
    """PyTorch's copies of them, in a batch of one and with an odd stride, have heads innermost."""
    q = torch.randn(50, device=device).as_strided((1, 20, 2, 8), (1, 0, 0, 1)).requires_grad_()
    k, v = torch.randn(2, 1, 20, 2, 8, device=device)
    results = []
    for given in (q, q.contiguous()):
        out = flashtile.attention(given, k, v, scale=scale, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), given)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
