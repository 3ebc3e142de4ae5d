"""The backward functions by themselves, of both versions: gradients from results, whole and of a part of the keys."""

import pytest
import torch

import flashtile
from flashtile.testing import assert_close
from support.attention.compat_cases import (
    Meaning,
    attention_by_definition,
    cumulative,
    normal,
    packed_by_definition,
    places,
    served,
)

interface = served(2, "flash_attn_interface")
interface_v1 = served(1, "flash_attn_interface")

SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
#: scale, causal, left, right, softcap, slopes, and what they mean.
OPTIONS = {
    "plain": ((0.3, False, -1, -1, 0.0, None), Meaning(scale=0.3)),
    "causal": ((0.3, True, -1, -1, 0.0, None), Meaning(scale=0.3, causal=True)),
    "scores": ((0.3, False, 4, 3, 2.0, SLOPES), Meaning(scale=0.3, window=(4, 3), softcap=2.0, alibi_slopes=SLOPES)),
}
calls = pytest.mark.parametrize(("call", "meaning"), OPTIONS.values(), ids=OPTIONS.keys())
LENGTHS_Q, LENGTHS_K = [5, 0, 9, 3], [7, 4, 9, 11]


def gradients(definition, inputs, dout):
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(definition(*leaves), leaves, dout.to(leaves[0]))


def check(results, definition, inputs, dout):
    oracle = gradients(definition, [x.double() for x in inputs], dout)
    eager = gradients(definition, inputs, dout)
    for name, got, exact, plain in zip(("dq", "dk", "dv"), results, oracle, eager, strict=True):
        assert_close(name, got, exact, plain)


def check_sums(sums, dout, out, laid_out):
    """The sums over columns of dout · out, which softmax takes away again."""
    oracle = (dout.double() * out.double()).sum(-1)
    assert_close("sums", sums, laid_out(oracle), laid_out((dout * out).sum(-1).to(sums)))


def on(device, call):
    return tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in call)


@places
@calls
def test_dense(call, meaning, device, dtype):
    q, k, v = (
        x.to(device, dtype) for x in (normal(2, 9, 4, 16), normal(2, 14, 2, 16, seed=1), normal(2, 14, 2, 16, seed=2))
    )
    dout, call = normal(2, 9, 4, 16, seed=3).to(q), on(device, call)
    out, lse, _, rng_state = interface._flash_attn_forward(q, k, v, 0.0, *call, return_softmax=False)
    grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    sums = interface._flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.0, *call, False, rng_state)
    check(grads, lambda q, k, v: attention_by_definition(q, k, v, meaning)[0], (q, k, v), dout)
    assert sums.shape == (2, 4, 128) and (sums[..., 9:] == 0).all()
    check_sums(sums[..., :9], dout, out, lambda x: x.transpose(1, 2))


@places
@calls
def test_packed(call, meaning, device, dtype):
    q, k, v = (x.to(device, dtype) for x in (normal(17, 4, 16), normal(31, 2, 16, seed=1), normal(31, 2, 16, seed=2)))
    dout, call = normal(17, 4, 16, seed=3).to(q), on(device, call)
    lengths = (cumulative(LENGTHS_Q, device), cumulative(LENGTHS_K, device), 9, 11)
    out, lse, _, rng_state = interface._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, *call)
    grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    sums = interface._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *lengths, 0.0, *call, True, rng_state)
    check(grads, lambda q, k, v: packed_by_definition(q, k, v, LENGTHS_Q, LENGTHS_K, meaning)[0], (q, k, v), dout)
    assert sums.shape == (4, 17 + 128 * 4)
    check_sums(sums[:, 128 * 2 + 5 : 128 * 2 + 14], dout[5:14], out[5:14], torch.t)


@places
def test_dropout_of_the_forward(device, dtype):
    q, dout = normal(2, 33, 2, 16).to(device, dtype), normal(2, 33, 2, 16, seed=1).to(device, dtype)
    p, call = 0.25, (0.3, True, -1, -1, 0.0, None)
    out, lse, weights, rng_state = interface._flash_attn_forward(q, q, q, p, *call, return_softmax=True)
    grads = [torch.empty_like(q) for _ in range(3)]
    interface._flash_attn_backward(dout, q, q, q, out, lse, *grads, p, *call, False, rng_state)
    kept = (weights >= 0)[:, :, :33, :33]
    meaning = Meaning(scale=0.3, causal=True, dropout_p=p)
    check(grads, lambda q, k, v: attention_by_definition(q, k, v, meaning, kept)[0], (q, q, q), dout)
    with pytest.raises(ValueError, match="rng_state"):
        interface._flash_attn_backward(dout, q, q, q, out, lse, *grads, p, *call, False)


def test_one_split_of_version_1_asks_for_the_same_gradients_in_every_run(monkeypatch):
    asked, ours = [], flashtile.attention_backward

    def watched(*tensors, **options):
        asked.append(options["deterministic"])
        return ours(*tensors, **options)

    monkeypatch.setattr(flashtile, "attention_backward", watched)
    q, ends = normal(17, 2, 16).float(), cumulative(LENGTHS_Q)
    rest = (ends, ends, 9, 9, 0.0, 0.3, False)
    out, lse, *_ = interface_v1._flash_attn_forward(q, q, q, torch.empty_like(q), *rest, False)
    for splits in (0, 1):
        grads = [torch.empty_like(q) for _ in range(3)]
        interface_v1._flash_attn_backward(q, q, q, q, out, lse, *grads, *rest, num_splits=splits)
    assert asked == [False, True]


def test_buffers():
    q = normal(1, 5, 2, 8).float()
    call = (0.3, False, -1, -1, 0.0, None)
    out, lse, _, _ = interface._flash_attn_forward(q, q, q, 0.0, *call, False)
    dk = torch.empty_like(q)
    interface._flash_attn_backward(out, q, q, q, out, lse, None, dk, None, 0.0, *call, False)
    assert dk.isfinite().all()
    with pytest.raises(ValueError, match="dq: expected"):
        interface._flash_attn_backward(out, q, q, q, out, lse, q.double(), None, None, 0.0, *call, False)
