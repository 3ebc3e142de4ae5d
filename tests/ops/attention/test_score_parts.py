"""Score functions that arguments of attention say as well: which are recognised, and that they mean the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile._backends import clear_plans
from flashtile.ops.attention import options
from flashtile.ops.attention.score_arguments import add_program, add_score_mod, function_parts
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.testing import assert_same

_HEADS, _SEQ = 4, 9


def _leaf(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


_SLOPES, _BY_BATCH, _BIAS = _leaf(_HEADS, seed=1), _leaf(2, _HEADS, seed=2), _leaf(_HEADS, _SEQ + 3, _SEQ + 1, seed=3)
_SQUARE, _TABLE = _leaf(_HEADS, _SEQ, _SEQ, seed=4), _leaf(_HEADS, 2 * _SEQ, seed=5)
_Function = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _cap(score: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2)


#: The functions, and by name what they are made of.
_FUNCTIONS: dict[str, tuple[_Function, set[str]]] = {
    "cap": (lambda s, b, h, i, j: 2 * torch.tanh(s / 2), {"softcap"}),
    "cap, multiplied": (lambda s, b, h, i, j: torch.tanh(s * 0.5) * 2.0, {"softcap"}),
    "no cap: other factors": (lambda s, b, h, i, j: 2 * torch.tanh(s / 3), set()),
    "no cap: changed before": (lambda s, b, h, i, j: 2 * torch.tanh((s + 1) / 2), set()),
    "alibi": (lambda s, b, h, i, j: s + _SLOPES[h] * (j - i), {"slopes"}),
    "alibi, subtracted": (lambda s, b, h, i, j: s - (i - j) * _SLOPES[h], {"slopes"}),
    "alibi, absolute": (lambda s, b, h, i, j: s - _SLOPES[h] * torch.abs(i - j), {"slopes"}),
    "alibi, negative": (lambda s, b, h, i, j: s + -(_SLOPES[h] * (i - j).abs().float()), {"slopes"}),
    "alibi, computed": (lambda s, b, h, i, j: s + torch.exp2(-((h + 1) * 8.0 / _HEADS)) * (j - i), {"slopes"}),
    "alibi of batch entries": (lambda s, b, h, i, j: s - 3 * _BY_BATCH[b, h] * (i - j) * 0.5, {"slopes"}),
    "distance": (lambda s, b, h, i, j: s + (j - i), {"slopes"}),
    "no alibi: depends on the query": (lambda s, b, h, i, j: s + i * (j - i), set()),
    "no alibi: a square": (lambda s, b, h, i, j: s + (j - i) * (j - i), set()),
    "bias": (lambda s, b, h, i, j: s + _BIAS[h, i, j], {"bias"}),
    "bias, transposed": (lambda s, b, h, i, j: _SQUARE[h, j, i] + s, {"bias"}),
    "bias of keys": (lambda s, b, h, i, j: s + _BIAS[h, 0, 0] + _BIAS[0][0, 0] + _TABLE[h, j], {"bias", "rest"}),
    "no bias: subtracted": (lambda s, b, h, i, j: s - _BIAS[h, i, j], set()),
    "no bias: by distance": (lambda s, b, h, i, j: s + _TABLE[h, i - j + _SEQ], set()),
    "no bias: multiplied": (lambda s, b, h, i, j: s * _BIAS[h, i, j], set()),
    "all, and more": (
        lambda s, b, h, i, j: _cap(s) + _TABLE[h, i - j] - _SLOPES[h] * (i - j) + _BIAS[h, i, j] - 0.5,
        {"softcap", "slopes", "bias", "rest"},
    ),
    "a product of a sum": (lambda s, b, h, i, j: (_cap(s) + _BIAS[h, i, j]) * 2, set()),
}


def _made_of(function: _Function, **arguments: Any) -> set[str]:
    """What becomes of a function in a call with as many queries as keys."""
    spec, side = AttentionSpec(1.0, None, 0), SideInputs(max_seqlen_q=_SEQ, max_seqlen_k=_SEQ)
    spec = spec._replace(**{name: value for name, value in arguments.items() if name in spec._fields})
    side = side._replace(**{name: value for name, value in arguments.items() if name in side._fields})
    q = torch.zeros(2, side.max_seqlen_q, _HEADS, 3, dtype=torch.float64)
    new_side, new_spec = add_score_mod(side, spec, q, function)
    found = {
        "softcap": new_spec.softcap != spec.softcap,
        "slopes": new_side.alibi_slopes is not side.alibi_slopes,
        "bias": new_side.bias is not side.bias,
        "rest": new_spec.score_program is not None,
    }
    return {name for name, there in found.items() if there}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_what_is_recognised(name):
    function, expected = _FUNCTIONS[name]
    assert _made_of(function) == (expected or {"rest"})


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_the_parts_mean_what_the_function_does(name, monkeypatch):
    q, k, v = (_leaf(2, _SEQ, heads, 3, seed=seed) for seed, heads in ((6, _HEADS), (7, 2), (8, 2)))
    inputs = q, k, v, _SLOPES, _BY_BATCH, _BIAS, _SQUARE, _TABLE
    function, _ = _FUNCTIONS[name]

    def results() -> list[Tensor | None]:
        out, lse = flashtile.attention(q, k, v, score_mod=function, causal=True, return_lse=True)
        gradients = torch.autograd.grad((out.sin().sum(), lse.cos().sum()), inputs, allow_unused=True)
        return [out, lse, *gradients]

    found = results()

    def whole(side: SideInputs, spec: AttentionSpec, q: Tensor, score_mod: Any) -> tuple[SideInputs, AttentionSpec]:
        return add_program(side, spec, flashtile.trace_score_mod(score_mod, dtype=q.dtype))

    monkeypatch.setattr("flashtile.ops.attention.options.add_score_mod", whole)
    for one, other in zip(found, results(), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_same(one, other)


#: Functions whose parts are tensors that they read, or views of these, or constants; and how often four calls of three
#: kinds of tensors take one apart.
_REPEATED: dict[str, tuple[Callable[..., Any], int]] = {
    "alibi": (lambda s, b, h, i, j, slopes, bias, table: s - slopes[h] * (i - j), 1),
    "alibi, computed": (lambda s, b, h, i, j, *_: s + torch.exp2(-((h + 1) * 8.0 / _HEADS)) * (j - i), 1),
    "bias": (lambda s, b, h, i, j, slopes, bias, table: s + bias[h, j, i], 1),
    "all, and more": (
        lambda s, b, h, i, j, slopes, bias, table: (
            _cap(s) + bias[h, i, j] - slopes[h] * (i - j) + table[h] * torch.sin(j)
        ), 1,
    ),
    "slopes from a tensor": (lambda s, b, h, i, j, slopes, bias, table: s - 2 * slopes[h] * (i - j), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", _REPEATED)
def test_repeated_calls_take_a_function_apart_once(name, monkeypatch):
    """Whatever the tensors of the later calls hold, and wherever in their memory they begin."""
    function, expected = _REPEATED[name]
    taken: list[Any] = []
    monkeypatch.setattr(options, "add_score_mod", lambda *given: taken.append(0) or add_score_mod(*given))
    clear_plans()

    def run(seed: int, backend: str) -> list[Tensor | None]:
        whole = [_leaf(*shape, seed=seed) for shape in ((_HEADS + 1,), (_HEADS + 1, _SEQ, _SEQ), (_HEADS + 1,))]
        tensors = [each[seed % 2 :][:_HEADS] for each in whole]
        qkv = [_leaf(2, _SEQ, _HEADS, 8, seed=seed + place) for place in (3, 4, 5)]
        mod = lambda *given: function(*given, *tensors)  # noqa: E731
        out = flashtile.attention(*qkv, causal=True, score_mod=mod, backend=backend)
        return [out, *torch.autograd.grad(out.square().sum(), [*qkv, *whole], allow_unused=True)]

    found = [run(seed, "cpu") for seed in range(4)]
    assert len(taken) == expected
    for seed, results in enumerate(found):
        assert_same(results, run(seed, "reference"), name)


def test_where_a_call_cannot_take_the_parts_the_function_stays_whole():
    alibi, absolute, cap, bias = (_FUNCTIONS[name][0] for name in ("alibi", "alibi, absolute", "cap", "bias"))
    assert _made_of(cap, softcap=3.0) == _made_of(alibi, alibi_slopes=_SLOPES) == {"rest"}
    assert _made_of(bias, bias=_BIAS[None, :, :_SEQ, :_SEQ]) == {"rest"}
    # Distances count from the last query and key, and are positive.
    assert _made_of(alibi, window_right=None) == _made_of(alibi, window_right=1) == {"rest"}
    assert _made_of(absolute, window_right=None) == {"slopes"}
    assert _made_of(alibi, max_seqlen_q=4) == _made_of(absolute, max_seqlen_q=4) == {"rest"}
    # A pair outside of the table has the score NaN.
    assert _made_of(bias, max_seqlen_q=_SEQ + 4) == {"rest"}
    cumulative = torch.tensor([0, 3, 9], dtype=torch.int32)
    packed = {"cu_seqlens_q": cumulative, "cu_seqlens_k": cumulative}
    assert _made_of(alibi, **packed) == {"slopes"} and _made_of(bias, **packed) == {"rest"}
    assert _made_of(alibi, **{**packed, "cu_seqlens_k": cumulative.clone()}) == {"rest"}


def test_the_parts_of_an_old_function_are_new_ones():
    """What is left reads its own tensors alone, in its own order."""
    function = flashtile.trace_score_mod(_FUNCTIONS["all, and more"][0], dtype=torch.float64)
    parts = function_parts(function.program, "float64")
    assert parts is not None and parts.slopes is not None and parts.bias is not None
    assert [function.captured[number] is _TABLE for number in parts.captured] == [True]
    assert function.captured[parts.bias.captured] is _BIAS
    assert [function.captured[number] is _SLOPES for number in parts.slopes.captured] == [True]


def test_the_order_of_captured_gradients_of_a_part_stays():
    """`attention_backward` returns them by the order in which the function reads its tensors."""
    q = _leaf(1, 4, _HEADS, 3, seed=0).detach()
    function = flashtile.trace_score_mod(lambda s, b, h, i, j: s + _SLOPES[h] * (j - i), dtype=q.dtype)
    out, lse = flashtile.attention(q, q, q, score_mod=function, causal=True, return_lse=True)
    gradients = flashtile.attention_backward(out, q, q, q, out, lse, score_mod=function, causal=True)
    assert [gradient.shape for gradient in gradients.captured] == [_SLOPES.shape]
