"""BERT: padding has no effect, whether packed or whole; its loss is that of its logits."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from flashtile.models import Bert, BertConfig, BertForPreTraining
from flashtile.models.bert import IGNORED
from flashtile.testing import assert_same

SMALL = BertConfig(context=16, layers=2, heads=2, width=16, vocabulary=30, dropout=0.0, attention_dropout=0.0)


def make(cls=BertForPreTraining, config=SMALL, dtype=torch.float64):
    torch.manual_seed(0)
    return cls(config, dtype=dtype)


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens, segments = torch.randint(30, (3, 12), generator=generator), torch.randint(2, (3, 12), generator=generator)
    return tokens, torch.arange(12) < torch.tensor([[12], [5], [8]]), segments


def test_a_masked_batch_is_its_sequences_one_by_one():
    model, (tokens, mask, segments) = make(Bert), batch()
    hidden, pooled = model(tokens, mask, segments)
    for row, keep in enumerate(mask):
        alone, state = model(tokens[row, keep][None], segments=segments[row, keep][None])
        assert_same(hidden[row, keep], alone[0])
        assert_same(pooled[row], state[0])
    assert not hidden[~mask].any()
    other = tokens.masked_fill(~mask, 7)
    assert torch.equal(model(other, mask, segments)[0], hidden)


def test_loss_is_that_of_the_logits():
    model, (tokens, mask, segments) = make(), batch()
    labels = torch.where(torch.rand(3, 12, generator=torch.Generator().manual_seed(2)) < 0.4, tokens, IGNORED)
    follows = torch.tensor([0, 1, 1])
    for keep in (mask, None):
        logits, following = model(tokens, keep, segments)
        counted = labels if keep is None else labels.masked_fill(~keep, IGNORED)
        expected = F.cross_entropy(logits.flatten(0, 1), counted.flatten(), ignore_index=IGNORED)
        assert_same(model.loss(tokens, labels, mask=keep, segments=segments), expected)
        both = model.loss(tokens, labels, follows, keep, segments)
        expected = expected + F.cross_entropy(following, follows)
        assert_same(both, expected)
        grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in (both, expected)]
        for mine, theirs in zip(*grads, strict=True):
            assert_same(mine, theirs)


def test_dropout_in_training_only():
    tokens = batch()[0]
    plain = make(Bert)(tokens)[0]
    for kind in ("dropout", "attention_dropout"):
        model = make(Bert, replace(SMALL, **{kind: 0.5}))
        assert torch.equal(model.eval()(tokens)[0], plain)
        assert not torch.equal(model.train()(tokens)[0], plain)


@pytest.mark.slow
def test_with_the_number_of_kept_tokens_a_masked_batch_is_one_graph():
    """Nothing then waits for the GPU, with dropout neither."""
    model, (tokens, mask, segments) = make(config=replace(SMALL, layers=1), dtype=torch.float32), batch()
    labels, total = tokens.masked_fill(~mask, IGNORED), int(mask.sum())
    options = {"mask": mask, "segments": segments, "total": total}
    compiled = torch.compile(model.loss, fullgraph=True, backend="eager")
    assert_same(compiled(tokens, labels, **options), model.loss(tokens, labels, mask=mask, segments=segments))
    assert torch.equal(model(tokens, **options)[0], model(tokens, mask, segments)[0])
    dropping = make(config=replace(SMALL, layers=1, dropout=0.5, attention_dropout=0.5), dtype=torch.float32)
    compiled = torch.compile(dropping.loss, fullgraph=True, backend="eager")
    compiled(tokens, labels, **options).backward()
    assert compiled(tokens, labels, **options) != compiled(tokens, labels, **options)


def test_from_the_meta_device():
    model = BertForPreTraining(SMALL, device="meta", dtype=torch.float64)
    assert all(parameter.is_meta for parameter in model.parameters())
    model, ordinary = model.to_empty(device="cpu"), make()
    for each in (model, ordinary):
        torch.manual_seed(0)
        each.initialise()
    for mine, theirs in zip(model.parameters(), ordinary.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_empty_batch():
    hidden, pooled = make(Bert)(torch.zeros(0, 5, dtype=torch.long))
    assert hidden.shape == (0, 5, 16) and pooled.shape == (0, 16)


def test_mistakes_are_explained():
    model, (tokens, mask, segments) = make(), batch()
    with pytest.raises(ValueError, match="expected at most 16 in a row"):
        model(tokens.repeat(1, 2))
    with pytest.raises(ValueError, match=r"tokens: expected \[batch, seq\], got shape \(12,\)"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"segments: expected the shape of tokens, \(3, 12\), got \(3, 5\)"):
        model(tokens, mask, segments[:, :5])
    with pytest.raises(ValueError, match="total: expected None without a mask, got 36; it counts what a mask keeps"):
        model(tokens, total=36)
    with pytest.raises(ValueError, match="total: expected the number of True elements of the mask, 25, got 36"):
        model(tokens, mask, total=36)
    mask[1, 0] = False
    with pytest.raises(ValueError, match=r"mask: expected the first token .* to be kept, got False at \[1, 0\]"):
        model(tokens, mask, segments)
    with pytest.raises(ValueError, match=r"labels: expected the shape of tokens, \(3, 12\), got \(3, 5\)"):
        model.loss(tokens, tokens[:, :5])
    with pytest.raises(ValueError, match="activation: expected one of 'gelu', 'gelu_tanh', 'relu', got 'swiglu'"):
        BertConfig(activation="swiglu")
    with pytest.raises(ValueError, match="width: expected a multiple of heads, 5, got 16"):
        replace(SMALL, heads=5)
