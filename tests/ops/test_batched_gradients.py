"""Several gradients in one backward, as `torch.autograd.functional.jacobian(vectorize=True)` asks for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same
from support.running.each_case import each_case

_LABELS = torch.tensor([1, 2, -100, 0])
_SUBSET = torch.tensor([0, 2, 1, 4, 3])
_MASK = flashtile.BlockMask.from_dense(torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) < 0.8, (16, 16))
_STARTS = torch.tensor([0, 3, 7])
_SEED = torch.tensor([1, 2])
_TABLES = flashtile.rotary_tables(20, 6)

Call = Callable[..., Tensor | tuple[Tensor, ...]]

#: name -> (call, shapes of its arguments).
CALLS: dict[str, tuple[Call, list[tuple[int, ...]]]] = {
    "attention": (
        lambda q, k, v: flashtile.attention(q, k, v, window=(3, 1), return_lse=True),
        [(2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)],
    ),
    "what changes scores": (
        lambda q, k, v, bias, slopes, sinks: flashtile.attention(
            q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, softcap=2.0, dropout_p=0.3, dropout_seed=_SEED
        ),
        [(2, 7, 4, 8), (2, 9, 4, 8), (2, 9, 4, 6), (4, 7, 9), (4,), (4,)],
    ),
    "block_mask": (
        lambda q, k, v: flashtile.attention(q, k, v, block_mask=_MASK, key_lengths=torch.tensor([5, 9])),
        [(2, 7, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8)],
    ),
    "packed": (lambda q, k, v: flashtile.attention_varlen(q, k, v, _STARTS, causal=True), [(7, 4, 8)] * 3),
    "layer_norm": (flashtile.layer_norm, [(4, 6), (6,), (6,)]),
    "rms_norm": (flashtile.rms_norm, [(4, 6), (6,)]),
    "layerscale": (
        lambda x, residual, weight, scale: flashtile.dropout_add_layer_norm(
            x, residual, weight, None, layerscale=scale, prenorm=True
        ),
        [(4, 6), (4, 6), (6,), (6,)],
    ),
    "two branches": (
        lambda x, x1, weight, weight1: flashtile.dropout_add_rms_norm(x, None, weight, x1=x1, weight1=weight1),
        [(4, 6), (4, 6), (6,), (6,)],
    ),
    "subsets": (
        lambda x, residual: flashtile.dropout_add_layer_norm(
            x, residual, None, None, x0_subset=_SUBSET, out_subset=_SUBSET, out_numrows=4, rowscale_const=0.5
        ),
        [(4, 6), (5, 6)],
    ),
    "rotary": (lambda x: flashtile.apply_rotary(x, *_TABLES, seqlen_offsets=3), [(2, 4, 2, 8)]),
    "softmax": (lambda x: flashtile.scaled_causal_softmax(x, 0.5), [(2, 4, 5)]),
    "cross_entropy": (lambda x: flashtile.cross_entropy(x, _LABELS, label_smoothing=0.1), [(4, 9)]),
    "each cross_entropy": (lambda x: flashtile.cross_entropy(x, _LABELS, reduction="none"), [(4, 9)]),
    "linear_cross_entropy": (
        lambda x, weight, bias: flashtile.linear_cross_entropy(x, weight, _LABELS, bias),
        [(4, 5), (9, 5), (9,)],
    ),
    "dense": (
        lambda x, weight, bias: flashtile.fused_dense(x, weight, bias, return_residual=True),
        [(4, 5), (3, 5), (3,)],
    ),
    "mlp": (
        lambda x, *weights: flashtile.fused_mlp(x, *weights, activation="silu", gated=True, checkpoint_level=2),
        [(4, 5), (6, 5), (6,), (2, 3), (2,)],
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@each_case("name", CALLS)
def test_several_gradients_are_those_of_one_after_another(name):
    call, shapes = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    arguments = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    call(*arguments)  # The next one is a call like an earlier one.
    found = call(*arguments)
    results = found if isinstance(found, tuple) else (found,)
    upstream = [torch.randn(3, *result.shape, generator=generator) for result in results]
    options = {"retain_graph": True, "allow_unused": True}
    together = torch.autograd.grad(results, arguments, upstream, is_grads_batched=True, **options)
    for place in range(3):
        alone = torch.autograd.grad(results, arguments, [u[place] for u in upstream], **options)
        for several, one in zip(together, alone, strict=True):
            assert_same(several[place], one)


def test_a_sum_in_place_takes_one_gradient():
    weight = torch.randn(3, 5, requires_grad=True)
    out = flashtile.fused_dense(torch.randn(4, 5), weight, main_grad=torch.zeros(3, 5))
    with pytest.raises(ValueError, match="main_grad: expected None under is_grads_batched=True"):
        torch.autograd.grad(out, weight, torch.randn(2, 4, 3), is_grads_batched=True)
