"""`flashtile.scaled_dot_product_attention` beside PyTorch's own, over the arguments that the latter takes."""

import inspect
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as pytorch_sdpa

import flashtile
from flashtile import scaled_dot_product_attention as sdpa
from flashtile.testing import Size, assert_close, assert_same, size


@dataclass(frozen=True)
class Call:
    """Shapes in PyTorch's layout, and the other arguments."""

    query: tuple[int, ...] = (2, 3, 7, 8)
    key: tuple[int, ...] = (2, 3, 9, 8)
    value: tuple[int, ...] = (2, 3, 9, 8)
    mask: tuple[int, ...] | None = None
    mask_dtype: torch.dtype | None = None  # None: that of query
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    dtype: torch.dtype = torch.float64

    def arguments(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "scale": self.scale, "enable_gqa": self.enable_gqa}


def make_tensors(call: Call) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {name: normal(getattr(call, name), call.dtype) for name in ("query", "key", "value")}
    if call.mask is not None:
        scores = normal(call.mask, torch.float32)
        visible = scores < 0.7
        if call.mask_dtype is torch.bool:
            tensors["attn_mask"] = visible
        else:
            tensors["attn_mask"] = scores.masked_fill(~visible, float("-inf")).to(call.mask_dtype or call.dtype)
    return tensors


def run(function: Any, call: Call, tensors: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """out, and the gradients of what has one."""
    leaves = {}
    for name, tensor in tensors.items():
        wanted = tensor.dtype if dtype is call.dtype else dtype
        leaves[name] = tensor.to(wanted).requires_grad_() if tensor.is_floating_point() else tensor
    out = function(**leaves, **call.arguments(), **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
    wanted = [name for name, leaf in leaves.items() if leaf.requires_grad]
    # PyTorch leaves unused what could not change an empty result.
    unused = function is pytorch_sdpa and not (out.numel() and leaves["key"].numel())
    inputs = [leaves[name] for name in wanted]
    grads = torch.autograd.grad(out, inputs, upstream, allow_unused=unused, materialize_grads=unused)
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(wanted, grads)}}


def check(call: Call, device: str = "cpu", **options: Any) -> dict[str, Tensor]:
    """Asserts results and gradients by the tolerance policy: the oracle and the eager computation are PyTorch's."""
    tensors = make_tensors(call)
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    actual = {name: value.cpu() for name, value in run(sdpa, call, moved, call.dtype, **options).items()}
    with sdpa_kernel(SDPBackend.MATH):
        oracle = run(pytorch_sdpa, call, tensors, torch.float64)
        eager = run(pytorch_sdpa, call, tensors, call.dtype)
    lost = _cancelled(call, tensors, oracle["out"])
    for name, value in actual.items():
        assert_close(f"{call}: {name}", value, oracle[name], eager[name], lost.get(name, Size()))
    return actual


def _cancelled(call: Call, tensors: dict[str, Tensor], out: Tensor) -> dict[str, Size]:
    """Size of the sums `rowsum(dout · out)`, which cancel within the gradients of the scores, times what they meet."""
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    delta = size((dout * out).norm(dim=-1))
    scale = 1 / math.sqrt(max(call.query[-1], 1)) if call.scale is None else abs(call.scale)
    # A row of key gets what all its queries give, as a head, a batch entry or a mask does that others share.
    shared = math.prod(out.shape[:-1]) / max(1, math.prod(call.key[:-2]))
    return {
        "dquery": Size(*(scale * a * b for a, b in zip(delta, size(tensors["key"])))),
        "dkey": Size(*(scale * shared * a * b for a, b in zip(delta, size(tensors["query"])))),
        "dattn_mask": delta,
    }


_GROUPED = Call((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8), enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [None, (3, 7, 9)], ids=["plain", "mask"])
def test_equals_pytorch_in_narrow_dtypes(dtype, mask):
    check(replace(_GROUPED, dtype=dtype))
    for mask_dtype in (None, torch.float32, torch.bool):
        check(Call(mask=mask, mask_dtype=mask_dtype, dtype=dtype))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any call that PyTorch serves: ranks, broadcasting, groups, masks, sizes of 0 and 1, no heads."""
    rank = draw(st.integers(2, 5))
    sizes = st.sampled_from((0, 1, 2, 3, 5, 17))
    seq_q, seq_k, head_dim, head_dim_v = draw(sizes), draw(sizes), draw(sizes), draw(sizes)
    heads = draw(st.sampled_from((1, 2, 3, 4, 4, 0))) if rank > 2 else 1
    enable_gqa = rank > 2 and heads > 0 and draw(st.booleans())
    batch = tuple(draw(st.integers(0, 3)) for _ in range(rank - 3))

    def leading(*of_heads: int) -> tuple[int, ...]:
        lead = tuple(draw(st.sampled_from((1, number))) for number in batch)
        return (*lead, draw(st.sampled_from(of_heads))) if rank > 2 else ()

    shared = [number for number in (1, 2, 3, 4) if heads % number == 0] if enable_gqa else [1, heads]
    query = (*batch, *((heads,) if rank > 2 else ()), seq_q, head_dim)
    key, value = (*leading(*shared), seq_k, head_dim), (*leading(*shared), seq_k, head_dim_v)
    mask = None
    if draw(st.booleans()):
        full = (*query[:-2], seq_q, seq_k)
        mask = tuple(draw(st.sampled_from((1, number))) for number in full)[-draw(st.integers(2, rank)) :]
    return Call(
        *(query, key, value, mask),
        mask_dtype=draw(st.sampled_from((torch.bool, torch.float64, torch.float32))),
        is_causal=mask is None and draw(st.booleans()),
        scale=draw(st.sampled_from((None, 0.5, -1.0, 0.0))),
        enable_gqa=enable_gqa,
    )


@example(Call(mask=(2, 1, 7, 9), mask_dtype=torch.bool))
@given(calls())
def test_equals_pytorch_over_its_argument_space(call):
    check(call)


def test_the_signature_is_pytorchs_with_two_more_arguments():
    documented = re.search(r"scaled_dot_product_attention\((.*?)\)", pytorch_sdpa.__doc__ or "", re.DOTALL)
    assert documented
    names = re.findall(r"\b(\w+)(?==|,)", documented.group(1).replace("0.0", "x").replace("None", "x"))
    parameters = [
        name
        for name, parameter in inspect.signature(sdpa).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    assert parameters[:-2] == [name for name in names if name in parameters]
    assert parameters[-2:] == ["backend", "deterministic"]
    query, key, value = make_tensors(Call()).values()
    assert torch.equal(sdpa(query, key, value, None, 0.0, True), sdpa(query, key, value, is_causal=True))


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right], ids=lambda make: make.__name__)
@pytest.mark.parametrize("seq_q", [7, 9, 12])
def test_causal_biases_of_pytorch(make, seq_q):
    call = Call((2, 3, seq_q, 8))
    tensors = make_tensors(call)
    bias = make(seq_q, 9)
    corner = 0 if make is causal_upper_left else 9 - seq_q
    visible = torch.ones(seq_q, 9, dtype=torch.bool).tril(corner)
    assert torch.equal(sdpa(**tensors, attn_mask=bias), sdpa(**tensors, attn_mask=bias, backend="cpu"))
    expected = pytorch_sdpa(**tensors, attn_mask=visible)
    assert_close("out", sdpa(**tensors, attn_mask=bias), expected, expected)
    with pytest.raises(ValueError, match="attn_mask: expected a causal bias for"):
        sdpa(**tensors, attn_mask=make(seq_q + 1, 9))


def test_dropout_follows_the_manual_seed():
    """Which weights it drops is tested of `attention`."""
    query = torch.randn(2, 3, 64, 8)
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs += [sdpa(query, query, query, dropout_p=0.25) for _ in range(2)]
    assert torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1])
    kept = sdpa(torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 64, 8), torch.eye(64)[None, None], dropout_p=0.25) != 0
    assert 0.7 < kept.double().mean() < 0.8


def test_dropping_everything_leaves_zeros_as_in_pytorch():
    tensors = make_tensors(Call())
    results = run(sdpa, Call(), tensors, torch.float64, dropout_p=1.0)
    assert all((value == 0).all() for value in results.values())
    assert (pytorch_sdpa(**tensors, dropout_p=1.0) == 0).all()


@pytest.mark.parametrize("mask_dtype", [None, torch.float32, torch.float16, torch.bool], ids=str)
def test_under_autocast_it_runs_in_that_dtype(mask_dtype):
    tensors = make_tensors(Call(dtype=torch.float32, mask=(7, 9) if mask_dtype else None, mask_dtype=mask_dtype))
    tensors["query"] = tensors["query"].half()
    with torch.autocast("cpu", torch.bfloat16):
        out = sdpa(**tensors)
        assert out.dtype is pytorch_sdpa(**tensors).dtype is torch.bfloat16
    eager = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    oracle = {name: t.double() if t.is_floating_point() else t for name, t in eager.items()}
    if mask_dtype is torch.float32:
        oracle["attn_mask"] = tensors["attn_mask"].double()
    with sdpa_kernel(SDPBackend.MATH):
        assert_close("out", out, pytorch_sdpa(**oracle), pytorch_sdpa(**eager))


def test_compiles_whole_with_dynamic_shapes():
    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def compiled(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return sdpa(query, key, value, attn_mask=mask, enable_gqa=True)

    for seq in (7, 11):
        query, key, value = (torch.randn(2, h, seq, 8, requires_grad=True) for h in (4, 2, 2))
        mask = torch.randn(seq, seq, requires_grad=True)
        results = []
        for function in (compiled, lambda *tensors: sdpa(*tensors, enable_gqa=True)):
            out = function(query, key, value, mask)
            results.append([out, *torch.autograd.grad(out.sum(), (query, key, value, mask))])
        assert_same(*results)


def test_keys_of_few_heads_are_not_copied(monkeypatch):
    seen: list[tuple[int, ...]] = []
    attention = flashtile.attention

    def watch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.extend((tuple(k.shape), tuple(v.shape)))
        assert k.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
        return attention(q, k, v, **options)

    monkeypatch.setattr("flashtile.ops.attention.pytorch.attention", watch)
    query, key = torch.randn(2, 4, 7, 8), torch.randn(2, 1, 9, 8)
    sdpa(query, key, key)
    key = torch.randn(1, 2, 9, 8)
    sdpa(query, key, key, enable_gqa=True)
    assert seen == [(2, 9, 1, 8)] * 2 + [(2, 9, 2, 8)] * 2


# --- errors ---------------------------------------------------------------------------------------------------------

ones = torch.ones


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": [1.0]}, TypeError, "query: expected a torch.Tensor"),
        ({"query": ones(8)}, ValueError, "query: expected at least 2 dimensions"),
        ({"query": ones(2, 3, 7, 8, dtype=torch.int64)}, TypeError, "query: expected dtype float16"),
        ({"key": ones(2, 3, 9, 8).double()}, TypeError, "key: expected the dtype of query"),
        ({"key": ones(2, 3, 9, 8, device="meta")}, ValueError, "key: expected the device of query"),
        ({"key": ones(2, 3, 9, 7)}, ValueError, "key: expected the head_dim of query, 8, got 7"),
        ({"value": ones(2, 3, 8, 8)}, ValueError, "value: expected as many rows as key, 9, got 8"),
        ({"key": ones(2, 2, 9, 8)}, ValueError, "pass enable_gqa=True"),
        ({"key": ones(2, 2, 9, 8), "enable_gqa": True}, ValueError, "key: expected a number of heads that divides"),
        ({"value": ones(3, 3, 9, 8)}, ValueError, "leading dimensions that broadcast"),
        ({"attn_mask": ones(9)}, ValueError, "attn_mask: expected at least 2 dimensions"),
        ({"attn_mask": ones(7, 8)}, ValueError, "attn_mask: expected at least 2 dimensions that broadcast"),
        ({"attn_mask": ones(1, 2, 3, 7, 9)}, ValueError, "attn_mask: expected at least 2 dimensions that broadcast"),
        ({"attn_mask": ones(7, 9, dtype=torch.int64)}, TypeError, "attn_mask: expected dtype bool, float32 or"),
        ({"attn_mask": ones(7, 9, dtype=torch.float16)}, TypeError, "attn_mask: expected dtype bool, float32 or"),
        ({"attn_mask": ones(7, 9, device="meta")}, ValueError, "attn_mask: expected the device of query"),
        ({"attn_mask": ones(7, 9), "is_causal": True}, ValueError, "attn_mask, is_causal: expected one of them"),
        ({"is_causal": 1}, TypeError, "is_causal: expected True or False"),
        ({"enable_gqa": "no"}, TypeError, "enable_gqa: expected True or False, got 'no'"),
        ({"dropout_p": True}, TypeError, "dropout_p: expected a float, got True"),
        ({"dropout_p": torch.ones(())}, TypeError, "dropout_p: expected a float, got a Tensor"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p: expected a probability"),
        ({"query": ones(1, 1, 3, 600), "key": ones(1, 1, 9, 600)}, ValueError, "query: expected head_dim up to 512"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors_name_the_argument(change, error, message):
    arguments = {"query": ones(2, 3, 7, 8), "key": ones(2, 3, 9, 8), "value": ones(2, 3, 9, 8), **change}
    with pytest.raises(error, match=re.escape(message)):
        sdpa(**arguments)


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([ones(3, 2, 4), ones(5, 2, 4)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(TypeError, match="pass its values and offsets to"):
        sdpa(nested, nested, nested)


# --- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.interpreter
@pytest.mark.parametrize("mask", [None, (3, 7, 9)], ids=["plain", "mask"])
def test_kernels_equal_pytorch(mask):
    check(Call((1, 4, 7, 16), (1, 2, 9, 16), (1, 2, 9, 16), enable_gqa=True, dtype=torch.float32), backend="triton")
    check(Call((1, 3, 7, 16), (1, 3, 9, 16), (1, 3, 9, 16), mask=mask, dtype=torch.float32), backend="triton")


_ON_A_GPU = {
    "plain": Call((2, 3, 90, 64), (2, 3, 130, 64), (2, 3, 130, 64)),
    "mask": Call((2, 3, 90, 64), (2, 3, 130, 64), (2, 3, 130, 64), mask=(3, 90, 130)),
    "grouped": Call((2, 4, 90, 64), (2, 2, 130, 64), (2, 2, 130, 64), enable_gqa=True),
    "one key head": Call((2, 3, 7, 8), (2, 1, 9, 8), (2, 1, 9, 8)),
    "causal, more queries": Call((2, 3, 9, 8), (2, 3, 5, 8), (2, 3, 5, 8), is_causal=True),
    "no keys": Call((2, 3, 7, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", _ON_A_GPU)
def test_equals_pytorch_on_a_gpu(name, dtype):
    check(replace(_ON_A_GPU[name], dtype=dtype), device="cuda")
