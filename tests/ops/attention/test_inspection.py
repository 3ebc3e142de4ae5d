"""What attention looks at: the weights of chosen rows and heads are those of the call."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import BlockMask, patterns
from flashtile.ops.common import checks
from flashtile.testing import AttentionCase, assert_close, assert_same, make_inputs
from support.attention.attention_cases import BASE, EDGES, PAIRS, combined, parameters
from support.attention.memory import LargestTensor
from support.running.covering import turns

DENSE = {name: case for name, case in (combined("packed") | EDGES).items() if not case.packed}


def weights_of_call(case: AttentionCase, dtype: torch.dtype | None = None, **more: Any) -> Tensor:
    """The weights `[batch, heads, rows, keys]` of a call of the reference, read off by values that are unit vectors."""
    inputs = make_inputs(case)
    q, k = (t.to(dtype or case.dtype) for t in (inputs.q, inputs.k))
    v = torch.eye(case.seq_k, dtype=q.dtype)[:, None].expand(case.batch, case.seq_k, case.heads_kv, case.seq_k)
    tensors = {
        name: t.to(dtype) if dtype and isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in (inputs.tensors | more).items()
    }
    return flashtile.attention(q, k, v, **tensors, **case.arguments, backend="reference").transpose(1, 2)


@pytest.mark.parametrize("case", parameters(DENSE))
def test_weights_are_those_that_multiply_the_values(case):
    case = replace(case, seq_k=max(1, min(case.seq_k, 40)), key_lengths=case.key_lengths and (40, 17))
    inputs = make_inputs(case)
    actual = flashtile.attention_probs(inputs.q, inputs.k, **inputs.tensors, **case.arguments)
    # Statistics are float32: of narrower inputs only the products are rounded, which the weights are not.
    eager = weights_of_call(case).to(actual.dtype)
    assert_close(f"{case}: weights", actual, weights_of_call(case, torch.float64), eager)


CHOICES: dict[str, tuple[Any, list[int]]] = {
    "slice": (slice(3, 30, 4), list(range(3, 30, 4))),
    "backwards": (slice(None, 4, -7), list(range(36, 4, -7))),
    "empty slice": (slice(5, 2), []),
    "list": ([36, 0, 5, 5], [36, 0, 5, 5]),
    "tensor": (torch.tensor([7, 2], dtype=torch.int32), [7, 2]),
    "range": (range(2, 4), [2, 3]),
    "none": ([], []),
}


_NAMES = ["bias full", "mask", "alibi", "sinks", "dropout", "band window", "key_lengths"]
_CHOSEN = [*zip(_NAMES, itertools.cycle((None, [3, 0], slice(1, 2), torch.tensor([2, 2]))))]


@pytest.mark.parametrize("choice, of", turns(CHOICES, _CHOSEN, 3), ids=str)
def test_chosen_rows_and_heads(choice, of):
    name, heads = of
    case = replace(PAIRS[name], heads=4)
    inputs = make_inputs(case)
    rows, numbers = CHOICES[choice]
    everything = flashtile.attention_probs(inputs.q, inputs.k, **inputs.tensors, **case.arguments)
    some = flashtile.attention_probs(inputs.q, inputs.k, rows=rows, heads=heads, **inputs.tensors, **case.arguments)
    of_heads = everything if heads is None else everything[:, heads]
    assert_same(some, of_heads[:, :, torch.tensor(numbers, dtype=torch.int64)])


def test_score_function_and_gradients():
    """Also where hidden pairs have no number, and where the function hides pairs."""
    generator = torch.Generator().manual_seed(0)
    q, k, table = (
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in ((2, 9, 4, 8), (2, 12, 2, 8), (4, 9))
    )
    v = torch.eye(12, dtype=torch.float64)[:, None].expand(2, 12, 2, 12)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return torch.where(k_index % 5 == 4, -float("inf"), score + table[h, k_index] * torch.sin(score))

    options: dict[str, Any] = {"score_mod": score_mod, "key_lengths": torch.tensor([9, 7])}
    found = flashtile.attention_probs(q, k, rows=[3, 1], heads=[2, 0], **options)
    of_call = flashtile.attention(q, k, v, backend="reference", **options).transpose(1, 2)
    expected = of_call[:, [2, 0]][:, :, [3, 1]]
    both = (torch.autograd.grad(weights.sin().sum(), (q, k, table)) for weights in (found, expected))
    assert_same((found, *next(both)), (expected, *next(both)))


@pytest.mark.parametrize("outer", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
def test_block_mask(outer):
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(*outer, 130, 200, generator=generator) < 0.5
    dense[:, :, 64:128, :64] = dense[:, :, 3] = False
    q, k = torch.randn(2, 130, 4, 8), torch.randn(2, 200, 2, 8)
    by_tiles = flashtile.attention_probs(
        q, k, rows=[129, 3, 70], heads=[2, 1], block_mask=BlockMask.from_dense(dense, (64, 64))
    )
    full = dense.expand(2, 4, -1, -1)
    assert_same(by_tiles, flashtile.attention_probs(q, k, rows=[129, 3, 70], heads=[2, 1], mask=full))
    assert not by_tiles[:, :, 1].any()
    assert (by_tiles[:, :, 0] != 0).equal(full[:, [2, 1], 129])


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_sizes_of_zero(sizes):
    batch, seq_q, seq_k = sizes
    q, k = torch.randn(batch, seq_q, 4, 8), torch.randn(batch, seq_k, 2, 8)
    weights = flashtile.attention_probs(q, k, dropout_p=0.1, dropout_seed=torch.tensor([1, 2]), sinks=torch.zeros(4))
    assert weights.shape == (batch, 4, seq_q, seq_k)


def test_padded_keys_may_be_nan():
    q, k = torch.randn(2, 3, 2, 8), torch.randn(2, 5, 2, 8)
    k[1, 2:] = float("nan")
    q.requires_grad_()
    weights = flashtile.attention_probs(q, k, key_lengths=torch.tensor([5, 2]))
    assert weights.isfinite().all() and not weights[1, ..., 2:].any()
    (dq,) = torch.autograd.grad(weights.square().sum(), q)
    assert dq.isfinite().all()


def test_autocast_rounds_q_and_k_and_nothing_else():
    q, k = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = flashtile.attention_probs(q, k)
    assert torch.equal(weights, flashtile.attention_probs(q.bfloat16(), k.bfloat16()))
    assert weights.dtype is torch.float32


def test_memory_is_that_of_the_rows():
    q = torch.randn(1, 2000, 2, 8)
    with LargestTensor() as seen:
        flashtile.attention_probs(q, q, rows=[5, 1999], causal=True, alibi_slopes=torch.ones(2), sinks=torch.zeros(2))
    assert 0 < seen.elements <= 2 * 2000 * 8


_Q, _K = torch.randn(2, 6, 4, 8), torch.randn(2, 5, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": _Q[0], "k": _K[0]}, ValueError, "got a packed shape .*cut out one sequence: q\\[None, start:end\\]"),
        ({"q": None}, TypeError, "q: expected a torch.Tensor"),
        ({"rows": 3}, TypeError, "rows: expected a slice, a sequence of ints or an int tensor, got 3"),
        ({"rows": "3"}, TypeError, "rows: expected a slice"),
        ({"rows": [0, 6]}, ValueError, "rows: expected numbers from 0 to seq_q - 1 = 5, got 6"),
        ({"rows": [0, 2.0]}, TypeError, "rows: expected a sequence of ints, got 2.0"),
        ({"rows": torch.tensor([-1])}, ValueError, "rows: expected numbers from 0 to seq_q - 1 = 5, got -1"),
        ({"rows": torch.tensor([[1]])}, ValueError, "rows: expected one dimension"),
        ({"rows": torch.ones(6, dtype=torch.bool)}, TypeError, "rows: .*use mask.nonzero"),
        ({"rows": torch.ones(1)}, TypeError, "rows: expected dtype int32 or int64, got torch.float32"),
        ({"rows": torch.ones(1, dtype=torch.int64, device="meta")}, ValueError, "rows: expected the device of q"),
        ({"heads": torch.tensor([4])}, ValueError, "heads: expected numbers from 0 to heads_q - 1 = 3, got 4"),
        ({"dropout_p": 0.1}, ValueError, "dropout_seed: expected the seed of the call"),
        ({"bias": torch.zeros(3, 3)}, ValueError, "bias: expected a shape that broadcasts"),
        ({"block_mask": patterns.causal(6, 6)}, ValueError, "block_mask: .*built for seq_k 6, the call has 5"),
        ({"key_lengths": torch.tensor([-1, 2])}, ValueError, "key_lengths: expected lengths of at least 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None if isinstance(value, type) else value[:40],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        flashtile.attention_probs(**{"q": _Q, "k": _K, **arguments})


@pytest.mark.parametrize("options", [{"causal": True}, {"rows": slice(-2, None), "heads": [3], "window": (2, 1)}])
def test_exports_with_any_batch_and_lengths(options):
    class Weights(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return flashtile.attention_probs(q, k, **options)

    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    inputs = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
    program = torch.export.export(Weights(), inputs, dynamic_shapes=(sizes, sizes))
    others = torch.randn(3, 9, 4, 16), torch.randn(3, 40, 2, 16)
    assert_same(program.module()(*others), Weights()(*others))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_on_a_gpu(dtype, monkeypatch):
    case = replace(BASE, heads=4, bias="1hqk", mask="b1qk", alibi_slopes="bh", sinks=True, dtype=dtype)
    inputs = make_inputs(replace(case, arguments={"dropout_p": 0.2}), "cuda")
    q, k, options = inputs.q, inputs.k, {"dropout_p": 0.2, "causal": True, **inputs.tensors}
    rows = torch.tensor([30, 2], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        weights = flashtile.attention_probs(q, k, rows=rows, heads=slice(1, 3), **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    v = torch.eye(case.seq_k, device="cuda")[:, None].expand(2, -1, 2, -1)
    tensors = {"q": q, "k": k, "v": v, **inputs.tensors}
    wide = [
        {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        for dtype in (torch.float64, torch.float32)
    ]
    oracle, eager = (
        flashtile.attention(**tensors, dropout_p=0.2, causal=True, backend="reference").transpose(1, 2)[:, 1:3, rows]
        for tensors in wide
    )
    assert_close("weights", weights, oracle, eager)
    monkeypatch.setattr(checks, "CHECK_VALUES", True)
    with pytest.raises(ValueError, match="rows: expected numbers"):
        flashtile.attention_probs(q, k, rows=rows + 100)
