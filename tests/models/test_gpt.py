"""The GPT: shapes, causality, learning, and the same loss and gradients with either attention."""

import pytest
import torch

import flashtile
from flashtile.models import GPT, GPTConfig, flashtile_attention, plain_attention

SMALL = GPTConfig(context=32, layers=2, heads=2, width=32)


def make(attention=flashtile_attention, config=SMALL, dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(config, attention).to(dtype)


def tokens(batch=2, length=33, seed=1):
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_shapes_and_first_loss():
    model = make()
    assert model(tokens(length=20)).shape == (2, 20, 256)
    assert model.loss(tokens()).item() == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.1)


@pytest.mark.parametrize("attention", [flashtile_attention, plain_attention])
def test_a_token_does_not_see_later_ones(attention):
    model, before = make(attention), tokens()[:, :-1]
    after = before.clone()
    after[:, 20] = (after[:, 20] + 1) % 256
    with torch.no_grad():
        first, second = model(before), model(after)
    torch.testing.assert_close(first[:, :20], second[:, :20])
    assert not torch.allclose(first[:, 20], second[:, 20])


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_flashtile_and_plain_give_the_same_loss_and_gradients(dtype, atol):
    ours, plain = make(flashtile_attention, dtype=dtype), make(plain_attention, dtype=dtype)
    batch = tokens()
    losses = [model.loss(batch) for model in (ours, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=0, atol=atol)
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def test_plain_attention_is_the_reference():
    q, k, v = (torch.randn(2, 9, 3, 8, dtype=torch.float64) for _ in range(3))
    expected = flashtile.attention(q, k, v, causal=True, backend="reference")
    torch.testing.assert_close(plain_attention(q, k, v), expected)


def test_loss_decreases_in_training():
    model, batch = make(), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_same_seed_same_weights_whatever_the_attention():
    for mine, theirs in zip(make(flashtile_attention).parameters(), make(plain_attention).parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match="width: expected a multiple of heads, 5, got 32"):
        GPTConfig(heads=5, width=32)
    with pytest.raises(ValueError, match="expected at most 32 in a row"):
        make()(tokens(length=40))
