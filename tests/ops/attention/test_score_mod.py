"""Score functions in plain Python: what they mean, their gradients, and what is refused with which words."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile.ops.attention.score_program import parse
from flashtile.testing import assert_same
from support.running.autograd import normal

HEADS, SEQ_Q, SEQ_K = 4, 9, 12


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


def qkv(seq_q: int = SEQ_Q, seq_k: int = SEQ_K, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (seq_q, HEADS), (seq_k, 2), (seq_k, 2)
    q, k, v = (leaf(2, *size, 8, seed=seed, dtype=dtype) for seed, size in enumerate(sizes))
    return q, k, v


def scores_of(score_mod: Callable[..., Any], batch: int = 1, **options: Any) -> Tensor:
    """The scores `[batch, heads, queries, keys]` that a function makes of products of 0, read off by unit vectors."""
    q = torch.zeros(batch, SEQ_Q, HEADS, 1, dtype=torch.float64)
    k = torch.ones(batch, SEQ_K, HEADS, 1, dtype=torch.float64)
    v = torch.eye(SEQ_K, dtype=torch.float64)[None, :, None].expand(batch, -1, HEADS, -1)
    out, lse = flashtile.attention(q, k, v, score_mod=score_mod, return_lse=True, **options)
    return out.transpose(1, 2).log() + lse.unsqueeze(-1)


def grid(*names: str) -> list[Tensor]:
    """Index tensors that broadcast to the scores."""
    sizes = {"b": 0, "h": 1, "q": 2, "k": 3}
    lengths = 2, HEADS, SEQ_Q, SEQ_K
    return [torch.arange(lengths[sizes[n]]).view([-1 if at == sizes[n] else 1 for at in range(4)]) for n in names]


def results(score_mod: Any, leaves: list[Tensor], **options: Any) -> list[Tensor]:
    """out, lse and gradients of q, k, v and further leaves."""
    inputs = qkv()
    out, lse = flashtile.attention(*inputs, score_mod=score_mod, return_lse=True, **options)
    finite = torch.where(lse.isneginf(), 0, lse)
    return [out, lse, *torch.autograd.grad(out.sin().sum() + finite.sin().sum(), (*inputs, *leaves))]


# --- what it means --------------------------------------------------------------------------------------------------


def test_arguments_are_the_numbers_of_batch_head_query_and_key():
    scores = scores_of(lambda score, b, h, q, k: score + 0.5 * b + 0.125 * h + 0.25 * q - k, batch=2)
    b, h, q, k = grid("b", "h", "q", "k")
    assert_same(scores, 0.5 * b + 0.125 * h + 0.25 * q - k + torch.zeros_like(scores))


def test_after_scale_and_softcap_before_bias_and_alibi():
    q, k, v = (torch.full((1, 1, 1, 1), value, dtype=torch.float64) for value in (2.0, 3.0, 1.0))
    _, lse = flashtile.attention(
        q, k, v, scale=0.5, softcap=1.5, score_mod=lambda score, b, h, q, k: 10 * score, return_lse=True,
        bias=torch.tensor(0.25, dtype=torch.float64),
    )  # fmt: skip
    assert lse.item() == pytest.approx(10 * 1.5 * math.tanh(0.5 * 6 / 1.5) + 0.25, rel=1e-12)


def test_indices_count_within_a_packed_sequence():
    lengths = [4, 0, 5]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    q, table, weights = leaf(9, 2, 8), leaf(2, 9, seed=3), normal(9, 2, 8, seed=4)

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return score * (batch + 1) + table[head, q_index - k_index]

    out = flashtile.attention_varlen(q, q, q, cu_seqlens, score_mod=score_mod, causal=True)
    found = torch.autograd.grad((out * weights).sum(), (q, table))
    parts = []
    for sequence, rows in ((0, slice(0, 4)), (2, slice(4, 9))):

        def alone(score: Tensor, batch: Tensor, *indices: Tensor, sequence: int = sequence) -> Tensor:
            return score_mod(score, batch + sequence, *indices)

        parts.append(flashtile.attention(*[q[None, rows]] * 3, score_mod=alone, causal=True)[0])
    expected = torch.cat(parts)
    assert_same([out, *found], [expected, *torch.autograd.grad((expected * weights).sum(), (q, table))])


def test_minus_infinity_hides_and_nothing_comes_from_there():
    documents = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2])
    table = leaf(SEQ_K)

    def by_function(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # The logarithm is NaN where the pair is hidden: its derivative there must not count.
        near = score + torch.log((q - k).to(score.dtype)) * table[k]
        return torch.where((documents[q] == documents[k]) & (k < q), near, -float("inf"))

    def by_mask(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + torch.log(torch.clamp(q - k, min=1).to(score.dtype)) * table[k]

    q, k = torch.arange(SEQ_Q)[:, None], torch.arange(SEQ_K)
    mask = (documents[q] == documents[k]) & (k < q)
    assert not mask.any(-1).all()  # some rows see nothing
    assert_same(results(by_function, [table]), results(by_mask, [table], mask=mask))


def test_reads_outside_of_a_tensor_are_nan_where_they_are_visible():
    table = normal(SEQ_Q)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[q - k]

    visible = scores_of(score_mod, causal=True, align="top_left")
    q, k = grid("q", "k")
    expected = torch.where(k <= q, table[(q - k).clamp(0)], float("-inf"))
    assert_same(visible[:1], expected.expand(1, HEADS, -1, -1))
    assert not scores_of(score_mod, window=(0, 8), align="top_left").isnan().any()  # from the end: table[-1]
    # Only the first query is 10 keys and more before some, and the second.
    assert scores_of(score_mod)[0, 0].isnan().any(-1).nonzero().flatten().tolist() == [0, 1]


def test_captured_in_parts_and_as_a_scalar():
    table, factor = leaf(HEADS, SEQ_Q, SEQ_K), leaf()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * factor + table[h][q, k].exp() + torch.sigmoid(table)[0, 0][3]

    by_hand = lambda: scores_of(lambda score, *_: score) * 0 + table.exp() + torch.sigmoid(table)[0, 0][3]  # noqa: E731
    assert_same(scores_of(score_mod), by_hand().detach())
    assert [grad.shape for grad in results(score_mod, [table, factor])[-2:]] == [table.shape, factor.shape]


def test_gradients_of_an_entry_that_a_number_names():
    table = leaf(HEADS, 5)
    by_tiles, by_hand = (
        results(lambda score, b, h, q, k: score * table[h, 3] + table[-1, k % 5], [table], backend=backend)
        for backend in ("cpu", "reference")
    )
    for found, expected in zip(by_tiles, by_hand, strict=True):
        assert_same(found, expected)


def _capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2)


def _rounded(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """No argument says the same."""
    return torch.sin(score)


# --- derivatives ----------------------------------------------------------------------------------------------------


def _learned(q: Tensor, k: Tensor, v: Tensor, table: Tensor, factor: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        changed = score + table[head, q_index - k_index] * torch.sin(score * factor)
        return torch.where((q_index + k_index) % 5 == 0, -float("inf"), changed)

    return flashtile.attention(q, k, v, score_mod=score_mod, causal=True, return_lse=True, **options)


def _small() -> tuple[Tensor, ...]:
    return leaf(1, 4, 2, 3), leaf(1, 5, 1, 3, seed=1), leaf(1, 5, 1, 3, seed=2), leaf(2, 9, seed=3), leaf(seed=4)


def test_first_second_and_forward_derivatives():
    torch.autograd.gradcheck(_learned, _small(), check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(_learned, _small(), fast_mode=True)


def test_under_checkpointing_and_torch_func():
    inputs = _small()
    expected = torch.autograd.grad(_learned(*inputs)[0].sum(), inputs)
    again: Any = checkpoint(_learned, *inputs, use_reentrant=False)
    assert_same(torch.autograd.grad(again[0].sum(), inputs), expected)
    by_func = torch.func.grad(lambda *given: _learned(*given)[0].sum(), argnums=tuple(range(5)))
    assert_same(by_func(*(tensor.detach() for tensor in inputs)), expected)
    with pytest.raises(NotImplementedError, match="score_mod"):
        torch.func.vmap(lambda q: flashtile.attention(q, q, q, score_mod=_rounded))(normal(3, 1, 4, 2, 3))


def test_gradients_in_the_dtype_of_the_tensor_and_zero_without_influence():
    narrow, unused = leaf(HEADS, dtype=torch.bfloat16), leaf(SEQ_K)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(unused[k] > 0, score * narrow[h], score)

    *_, dnarrow, dunused = results(score_mod, [narrow, unused])
    assert dnarrow.dtype is torch.bfloat16
    assert dnarrow.any()
    assert not dunused.any()


def test_gradients_of_captured_tensors_without_any_of_q_k_v():
    table = leaf(HEADS, SEQ_K)
    q, k, v = (tensor.detach() for tensor in qkv())
    out = flashtile.attention(q, k, v, score_mod=lambda s, b, h, q, k: s + table[h, k])
    expected = flashtile.attention(q, k, v, bias=table[:, None])
    assert_same(torch.autograd.grad(out.sin().sum(), table), torch.autograd.grad(expected.sin().sum(), table))


def test_autocast_and_no_grad():
    q, k, v = (tensor.float() for tensor in qkv())
    table = leaf(SEQ_K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = flashtile.attention(q, k, v, score_mod=lambda s, b, h, q, k: s + table[k].pow(2))
    assert out.dtype is torch.bfloat16
    with torch.no_grad():
        assert not flashtile.attention(q, k, v, score_mod=_capped).requires_grad


# --- the operator ---------------------------------------------------------------------------------------------------


def test_compiled_with_a_function_and_in_one_graph_with_a_traced_one():
    q, table = leaf(1, 8, 2, 4, dtype=torch.float32), leaf(2, 8, dtype=torch.float32)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[h, q - k]

    def model(x: Tensor, function: Any) -> Tensor:
        return flashtile.attention(x.sin(), x, x, score_mod=function, causal=True).cos()

    expected = torch.autograd.grad(model(q, score_mod).sum(), (q, table))
    if TorchVersion(torch.__version__) >= "2.12":  # 2.11 fails at that graph break
        broken = torch.compile(model, backend="eager")(q, score_mod)
        assert_same(torch.autograd.grad(broken.sum(), (q, table)), expected)
        torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = whole(q, flashtile.trace_score_mod(score_mod))
    assert_same(torch.autograd.grad(found.sum(), (q, table)), expected)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="trace_score_mod"):
        whole(q, score_mod)


# --- tracing --------------------------------------------------------------------------------------------------------


def test_a_function_is_traced_once_and_again_when_what_it_sees_changes():
    q = normal(1, 4, 2, 3)

    def made(table: Tensor, factor: float) -> Callable[..., Tensor]:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score * factor + table[k] / table.shape[0]

        return score_mod

    def traces(function: Callable[..., Tensor]) -> Tensor:
        return flashtile.attention(q, q, q, score_mod=function)

    first = traces(made(normal(4), 0.5))
    assert not torch.equal(first, traces(made(normal(4), 0.25)))
    assert not torch.equal(first, traces(made(normal(4, seed=1), 0.5)))  # the same program, another tensor
    assert not torch.equal(first, traces(made(torch.cat((normal(4), normal(1))), 0.5)))  # another shape
    assert torch.equal(first, traces(made(normal(4), 0.5)))

    sizes = [0.5]

    def by_list(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * sizes[0]

    second = traces(by_list)
    sizes[0] = 0.25
    assert not torch.equal(second, traces(by_list))


def test_the_program_of_a_function_is_short_and_canonical():
    table = normal(5)
    traced = flashtile.trace_score_mod(lambda s, b, h, q, k: s + table[q - k] + 0 * table[q - k])
    program = parse(traced.program)
    assert [step.operation for step in program.steps].count("load") == 1
    again = flashtile.trace_score_mod(lambda s, b, h, q, k: s + table[q - k] + 0 * table[q - k])
    assert again.program == traced.program
    assert again.captured[0] is table


# --- what is refused ------------------------------------------------------------------------------------------------

_table = torch.zeros(4, 8)


def _branches(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score if q >= k else -score


def _in_place(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score.mul_(2)


def _writes(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    _table[h, k] = score
    return score


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "branch": (_branches, ValueError, "data-dependent control flow in _branches .*torch.where"),
    "number": (lambda s, b, h, q, k: s * float(q), ValueError, "data-dependent"),
    "in place": (_in_place, ValueError, r"mul_.* in place in _in_place"),
    "writes": (_writes, ValueError, "writes to a tensor"),
    "sum": (lambda s, b, h, q, k: s + _table[h].sum(), ValueError, "index in each dimension"),
    "row": (lambda s, b, h, q, k: s + _table[h], ValueError, r"shape \[8\]"),
    "softmax": (lambda s, b, h, q, k: torch.softmax(s, 0), ValueError, "not elementwise"),
    "cumsum": (lambda s, b, h, q, k: torch.cumsum(s, 0), ValueError, "not elementwise"),
    "slice": (lambda s, b, h, q, k: s + _table[h, k : k + 1], (ValueError, TypeError), "index|score_mod"),
    "colon": (lambda s, b, h, q, k: s + _table[:, k][h], ValueError, "by slice"),
    "float index": (lambda s, b, h, q, k: s + _table[h, s], ValueError, "integer scalars"),
    "too many": (lambda s, b, h, q, k: s + _table[h, q, k], IndexError, "at most 2 indices"),
    "nothing": (lambda s, b, h, q, k: None, TypeError, "return the new score"),
    "bool": (lambda s, b, h, q, k: q >= k, TypeError, "torch.where"),
    "vector": (lambda s, b, h, q, k: _table[h], ValueError, r"shape \[8\]"),
    "elsewhere": (lambda s, b, h, q, k: s + _meta[k], ValueError, "device of q"),
    "no function": (2.0, TypeError, "expected a function"),
    "four parameters": (lambda s, b, h, q: s, TypeError, r"got one with the parameters \(s, b, h, q\)"),
}
_meta = torch.zeros(8, device="meta")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_operation_line_and_remedy(name):
    function, error, message = REFUSED[name]
    q = torch.zeros(1, 4, 4, 8)
    with pytest.raises(error, match=message) as caught:
        flashtile.attention(q, q, q, score_mod=function)
    assert "score_mod" in str(caught.value)


def test_a_traced_function_is_for_one_dtype():
    traced = flashtile.trace_score_mod(_capped)
    q = normal(1, 4, 2, 8)
    with pytest.raises(TypeError, match="float64"):
        flashtile.attention(q, q, q, score_mod=traced)
    flashtile.attention(q.float(), q.float(), q.float(), score_mod=traced)
    with pytest.raises(TypeError, match="dtype"):
        flashtile.trace_score_mod(_capped, dtype=torch.float16)


def test_other_functions_do_not_take_one():
    q = torch.zeros(1, 4, 2, 8)
    function: Callable[..., Any] = flashtile.attention_column_sums
    with pytest.raises(TypeError, match="score_mod"):
        function(q, q, torch.zeros(1, 2, 4), score_mod=_capped)
