"""`flashtile.flex_attention` against PyTorch's function of this name, on a CPU."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask

import flashtile
from flashtile.ops.attention import pytorch as flex
from flashtile.testing import assert_same
from support.running.covering import turns

HEADS, SEQ = 4, 150


def inputs(heads_kv: int = HEADS, seq_k: int = SEQ) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, rows: int) -> Tensor:
        return torch.randn(2, heads, rows, 16, generator=generator, dtype=torch.float64)

    return normal(HEADS, SEQ), normal(heads_kv, seq_k), normal(heads_kv, seq_k)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k <= 30)


TABLE = torch.linspace(-1, 1, 2 * SEQ, dtype=torch.float64)


def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + TABLE[q - k + SEQ]


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 0.7 * torch.tanh(score / 0.7)


DOCUMENTS, STARTS = torch.arange(SEQ) // 40, torch.tensor([0, 40, 80, 120])


def in_documents(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Positions count from the start of a document."""
    return relative(score, b, h, q - STARTS[DOCUMENTS[q]], k - STARTS[DOCUMENTS[k]])


def weighted(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    return torch.nn.functional.silu(score) * weights[b, q]


class Buckets(torch.nn.Module):
    """T5's buckets of distances."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.table = torch.nn.Parameter(torch.randn(16, HEADS, generator=generator, dtype=torch.float64))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = torch.abs(q - k)
        large = 8 + (torch.log(distance.clamp(min=1) / 8) / 2 * 8).to(torch.int32)
        return score + self.table[torch.where(distance < 8, distance, large.clamp(max=15)), h]


#: As users of FlexAttention write them, unchanged.
SCORES: dict[str, Callable[..., Tensor] | None] = {
    "none": None, "relative": relative, "capped": capped, "in documents": in_documents, "module": Buckets(),
    "partial": functools.partial(weighted, weights=torch.linspace(0, 1, 2 * SEQ, dtype=torch.float64).view(2, SEQ)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, mask_mod", turns(SCORES, [None, causal, sliding, None, causal]), ids=lambda of: getattr(of, "__name__", of)
)
def test_agrees_with_pytorch(name, mask_mod):
    score_mod, (query, key, value) = SCORES[name], inputs()
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, SEQ, SEQ, device="cpu")
    found = flashtile.flex_attention(query, key, value, score_mod, block_mask, 0.3)
    expected = torch_flex.flex_attention(query, key, value, score_mod, block_mask, 0.3)
    assert_same(found.detach(), expected.detach())


def test_statistics_as_asked_for():
    query, key, value = inputs(seq_k=70)
    scores = query @ key.transpose(-1, -2) / 4 * 0.5
    half: Callable[..., Tensor] = lambda score, b, h, q, k: 0.5 * score  # noqa: E731
    out, lse = flashtile.flex_attention(query, key, value, half, return_lse=True)
    assert_same((out, lse), (scores.softmax(-1) @ value, scores.logsumexp(-1)))
    _, aux = flashtile.flex_attention(query, key, value, half, return_aux=AuxRequest(lse=True, max_scores=True))
    assert_same((aux.lse, aux.max_scores), (scores.logsumexp(-1), scores.amax(-1)))
    _, aux = flashtile.flex_attention(query, key, value, half, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None
    assert_same(aux.max_scores, scores.amax(-1))
    _, aux = flashtile.flex_attention(query, key, value, return_aux=AuxRequest())
    assert aux.lse is None
    assert aux.max_scores is None


def test_grouped_heads_and_gradients():
    query, key, value = (tensor.requires_grad_() for tensor in inputs(heads_kv=2))
    table = torch.randn(HEADS, 2 * SEQ, dtype=torch.float64, requires_grad=True)

    def learned(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[h, q - k + SEQ]

    out: Any = flashtile.flex_attention(query, key, value, learned, enable_gqa=True)
    place = torch.arange(SEQ)[:, None] - torch.arange(SEQ) + SEQ
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 4 + table[:, place]
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    leaves = query, key, value, table
    assert_same(
        (out, *torch.autograd.grad(out.sin().sum(), leaves)),
        (expected, *torch.autograd.grad(expected.sin().sum(), leaves)),
    )
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flashtile.flex_attention(query, key, value)


@pytest.fixture
def conversions(monkeypatch):
    """The masks of PyTorch that have been converted, by their ids."""
    found: list[int] = []
    convert = flashtile.BlockMask.from_flex
    monkeypatch.setattr(flashtile.BlockMask, "from_flex", lambda mask: (found.append(id(mask)), convert(mask))[1])
    return found


def masked(mask_mod: Callable[..., Tensor], **options: Any) -> torch_flex.BlockMask:
    return create_block_mask(mask_mod, None, None, SEQ, SEQ, device="cpu", **options)


def assert_as_pytorch(block_mask: torch_flex.BlockMask) -> None:
    query, key, value = inputs()
    expected = torch_flex.flex_attention(query, key, value, block_mask=block_mask)
    assert_same(flashtile.flex_attention(query, key, value, block_mask=block_mask), expected)


def test_a_mask_of_pytorch_is_converted_once(conversions):
    documents, size = torch.arange(SEQ) // 40, 30

    def document_entries(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[q] == documents[k]

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor, size: int) -> Tensor:
        return q - k <= size

    mask_mod = and_masks(causal, document_entries, functools.partial(near, size=size))
    remembered = len(flex._CONVERSIONS)
    block_mask = masked(mask_mod)
    for _ in range(3):
        assert_as_pytorch(block_mask)
    assert len(conversions) == 1
    block_mask.mask_mod = and_masks(causal, document_entries, functools.partial(near, size=30))
    assert_as_pytorch(block_mask)
    assert len(conversions) == 1
    assert len(flex._CONVERSIONS) == remembered + 1
    del block_mask
    assert len(flex._CONVERSIONS) == remembered


NEWEST = 149


class Holder:
    newest = 149


def test_a_mask_of_pytorch_is_what_its_function_reads_now(conversions):
    """A captured tensor that is changed in place, variables, a list, a dictionary, and another mask_mod."""
    newest, last, lasts, named = torch.tensor(149), 149, [149], {"last": 149}
    block_mask = masked(
        and_masks(
            lambda b, h, q, k: k <= newest,
            lambda b, h, q, k: k <= last,
            lambda b, h, q, k: k <= lasts[0],
            lambda b, h, q, k: k <= named["last"],
            lambda b, h, q, k: k <= NEWEST,
        )
    )

    def assert_converted(times: int) -> None:
        assert_as_pytorch(block_mask)
        flashtile.flex_attention(*inputs(), block_mask=block_mask)  # the same mask once more
        assert len(conversions) == times

    assert_converted(1)
    newest.fill_(145)
    assert_converted(2)
    last = 144
    assert_converted(3)
    lasts[0] = 143
    assert_converted(4)
    named["last"] = 142
    assert_converted(5)
    globals()["NEWEST"] = 141
    assert_converted(6)
    globals()["NEWEST"] = 149
    newest = torch.tensor(140)
    assert_converted(7)
    block_mask.mask_mod = lambda b, h, q, k: k <= 130
    assert_converted(8)


def test_a_mask_of_pytorch_has_the_blocks_that_are_listed_now():
    """PyTorch's function looks at them only under `torch.compile`, so it is not asked."""
    query, key, value = inputs()
    block_mask = masked(lambda b, h, q, k: k <= 140)

    def found() -> Any:
        """The first tile of queries, which alone has full blocks of 128 by 128."""
        out: Any = flashtile.flex_attention(query, key, value, block_mask=block_mask)
        return out[:, :, :128]

    query_in_tile = query[:, :, :128]
    assert_same(found(), flashtile.flex_attention(query_in_tile, key[:, :, :141], value[:, :, :141]))
    block_mask.kv_num_blocks.zero_()
    assert_same(found(), flashtile.flex_attention(query_in_tile, key[:, :, :128], value[:, :, :128]))
    assert block_mask.full_kv_num_blocks is not None
    block_mask.full_kv_num_blocks = torch.zeros_like(block_mask.full_kv_num_blocks)
    assert_same(found(), torch.zeros_like(query_in_tile))


def test_a_mask_that_reads_an_object_is_converted_in_each_call(conversions):
    holder = Holder()
    block_mask = masked(lambda b, h, q, k: k <= holder.newest)
    assert_as_pytorch(block_mask)
    holder.newest = 140
    assert_as_pytorch(block_mask)
    assert len(conversions) == 2


def test_a_mask_of_inference_mode_is_what_its_tensors_hold(conversions):
    """They count no changes."""
    with torch.inference_mode():
        newest = torch.tensor(149)
        block_mask = masked(lambda b, h, q, k: k <= newest)
        for number in (149, 140, 140):
            newest.fill_(number)
            assert_as_pytorch(block_mask)
    assert len(conversions) == 2


@pytest.mark.slow
def test_a_compiled_mask_of_pytorch_is_what_its_function_reads_now():
    query, key, value = inputs()
    newest = torch.tensor(149)
    block_mask = masked(lambda b, h, q, k: k <= newest)

    def model(query: Tensor, block_mask: Any) -> Any:
        return flashtile.flex_attention(2 * query, key, value, block_mask=block_mask)

    compiled = torch.compile(model, backend="aot_eager")
    for number in (149, 140):
        newest.fill_(number)
        assert_same(compiled(query, block_mask), model(query, block_mask))
        assert_same(model(query, block_mask), torch_flex.flex_attention(2 * query, key, value, block_mask=block_mask))
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"flashtile\.BlockMask\.from_flex"):
        whole(query, block_mask)
    assert_same(whole(query, flashtile.BlockMask.from_flex(block_mask)), model(query, block_mask))


def test_a_slice_of_a_mask_needs_a_function_of_its_own():
    query, key, value = inputs()
    block_mask = create_block_mask(causal, 2, None, SEQ, SEQ, device="cpu", BLOCK_SIZE=64)
    part = block_mask[1:]
    with pytest.raises(ValueError, match=r"block_mask: expected a mask with a mask_mod, got a slice.*part\.mask_mod"):
        flashtile.flex_attention(query, key, value, block_mask=part)
    part.mask_mod = causal
    expected = torch_flex.flex_attention(query[1:], key[1:], value[1:], block_mask=part)
    assert_same(flashtile.flex_attention(query[1:], key[1:], value[1:], block_mask=part), expected)
    first = block_mask[:, :, :2]
    first.mask_mod = causal
    first.seq_lengths = (SEQ, SEQ)  # as torch 2.13 slices; 2.15 counts the rows
    with pytest.raises(ValueError, match=r"block_mask: expected blocks for 150 queries, 3 rows of 64, got 2"):
        flashtile.flex_attention(query[:, :, :128], key, value, block_mask=first)
    first.seq_lengths = (128, SEQ)
    expected = torch_flex.flex_attention(query[:, :, :128], key, value, block_mask=first)
    assert_same(flashtile.flex_attention(query[:, :, :128], key, value, block_mask=first), expected)


def test_a_function_that_changes_nothing_costs_nothing():
    query, key, value = (tensor.float().transpose(1, 2) for tensor in inputs())
    answer = flashtile.explain(query, key, value, score_mod=lambda score, *_: score)
    assert "PyTorch's CPU flash attention" in answer.kernels[0].name


def test_keys_that_all_sequences_share():
    """As PyTorch serves them: beside a block mask."""
    query, key, value = (tensor.requires_grad_() for tensor in inputs())
    mask = create_block_mask(lambda b, h, q, k: q + b >= k, 2, None, SEQ, SEQ, device="cpu")
    shared = query, key[:1], value[:1]
    out = flashtile.flex_attention(*shared, block_mask=mask)
    assert_same(out.detach(), torch_flex.flex_attention(*(t.detach() for t in shared), block_mask=mask))
    expected = flashtile.flex_attention(query, *(t[:1].expand_as(t) for t in (key, value)), block_mask=mask)
    leaves = query, key, value
    assert_same(*(torch.autograd.grad(found.sin().sum(), leaves) for found in (out, expected)))


def test_refusals():
    query, key, value = inputs()
    for wrong, message in (
        ((query, key[:1], value[:1]), "key: expected the batch size of query, 2, or 1 beside a block_mask, got 1"),
        ((query, key, value[:1]), "value: expected the batch size and heads of key"),
        ((query, key[:, :3], value[:, :3]), "key: expected the number of heads of query"),
        ((query, key[..., :5], value), "key: expected the head_dim of query"),
        ((query, key, value[:, :, :5]), "value: expected as many rows as key"),
        ((query, key.float(), value), "key: expected the dtype of query"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            flashtile.flex_attention(*wrong)
    with pytest.raises(ValueError, match="key: expected a number of heads that divides query's"):
        flashtile.flex_attention(query, key[:, :3], value[:, :3], enable_gqa=True)
    with pytest.raises(ValueError, match="kernel_options: expected None"):
        flashtile.flex_attention(query, key, value, kernel_options={"BLOCK_M": 32})
    with pytest.raises(ValueError, match="return_lse, return_aux"):
        flashtile.flex_attention(query, key, value, return_lse=True, return_aux=AuxRequest(lse=True))
    with pytest.raises(ValueError, match="query: expected 4 dimensions"):
        flashtile.flex_attention(query[0], key, value)
    with pytest.raises(TypeError, match="enable_gqa"):
        flashtile.flex_attention(query, key, value, enable_gqa=1)  # type: ignore[arg-type]
