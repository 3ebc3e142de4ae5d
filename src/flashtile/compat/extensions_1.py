"""The compiled extensions of flash_attn 1: halves of functions, over flashtile and PyTorch. Autograd records none.

- `flash_attn_cuda`: shapes, lse and weights are those of `flashtile.compat.flash_attn_1`.
- `fused_dense_lib`: input `[rows, in]`, weight `[out, in]`, bias `[out]`, of one dtype.
- `dropout_layer_norm`: rows `[rows, hidden]`. `mu` and `rsigma` are the mean and the reciprocal standard deviation of
  each row of x, float32 `[rows]` (float64 for float64); with is_rms_norm 0 and the reciprocal root mean square. Dropout
  masks are uint8, 1 = kept. These results are None: x where it equals x0, masks without dropout, gradients of what was
  not given, and partial sums, which are not needed here.
- `rotary_emb`, `xentropy_cuda_lib`, `scaled_masked_softmax_cuda` and `scaled_upper_triang_masked_softmax_cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.compat import calls, flash_attn_1
from flashtile.compat.activations import gelu_bwd, gelu_fwd, wide
from flashtile.compat.adapter import refuse
from flashtile.compat.losses import cross_entropy_of_lse
from flashtile.compat.norms import fused_norm
from flashtile.compat.signatures import EXTENSIONS

#: Queries and keys of a block of a block mask.
_TILE = (16, 256)
#: No label is ignored here: the loss around it does that.
_NO_LABEL = -(1 << 62)

Results = list[Tensor | None]
Gradients = tuple[Tensor | None, ...]


# flash_attn_cuda


def attention_fwd(**given: Any) -> list[Tensor]:
    """Attention, written to `out`: lse, rng_state, and with return_softmax the weights."""
    return [part for part in flash_attn_1._flash_attn_forward(**given)[1:] if part is not None]


def attention_bwd(**given: Any) -> list[Tensor]:
    """The gradients, written to dq, dk and dv: these and `rowsum(dout · out)`."""
    return list(flash_attn_1._flash_attn_backward(**given))


def attention_fwd_block(generator: torch.Generator | None, **given: Any) -> list[Tensor]:
    """Block-sparse attention: out `[total_q, heads, head_dim]` and lse. `blockmask`: what `convert_blockmask` makes of
    a layout `[ceil(max_seqlen_q / 16), ceil(max_seqlen_k / 256)]`, read on the host. `gen`: draws the dropout seed;
    None for torch's own generator. `return_softmax` must be False."""
    apart = calls.taken_apart(_with_blocks(**given), top_left=True)
    out, lse, *_ = calls.forward(apart, False, generator)
    return [out, flash_attn_1.padded_lse(lse, given["cu_seqlens_q"], given["max_seqlen_q"])]


def attention_bwd_block(generator: torch.Generator | None, **given: Any) -> list[Tensor]:
    """The gradients of `fwd_block`, written to dq, dk and dv: these and `rowsum(dout · out)`. With dropout, `gen` or
    torch's generator must be as it was before the forward."""
    seed = calls.drawn_seed(given["q"], given["dropout_p"], generator)
    return list(flash_attn_1.backward(rng_state=seed, generator=None, **_with_blocks(**given)))


def _with_blocks(blockmask: Tensor, **given: Any) -> dict[str, Any]:
    """The same arguments with a block mask of flashtile."""
    sizes = given["max_seqlen_q"], given["max_seqlen_k"]
    tiles = [-(-size // of) for size, of in zip(sizes, _TILE)]
    layout = flash_attn_1.blockmask_layout(blockmask)[: tiles[0], : tiles[1]]
    return given | {"block_mask": flashtile.BlockMask.from_layout(layout, _TILE, *sizes)}


# fused_dense_lib


linear_bias_forward: Callable[..., Tensor] = torch.no_grad()(flashtile.fused_dense)
linear_bias_wgrad: Callable[..., tuple[Tensor, Tensor | None]] = torch.no_grad()(flashtile.linear_bias_wgrad)


@torch.no_grad()
def linear_bias_backward(input: Tensor, weight: Tensor, d_output: Tensor) -> Gradients:
    """The gradients of input, weight and bias."""
    return d_output @ weight, *linear_bias_wgrad(input, d_output)


@torch.no_grad()
def linear_bias_residual_backward(input: Tensor, weight: Tensor, d_output: Tensor, d_input: Tensor) -> Gradients:
    """As `linear_bias_backward`; the gradient of input is added to d_input, in place."""
    return d_input.addmm_(d_output, weight), *linear_bias_wgrad(input, d_output)


def linear_gelu_forward(save_gelu_in: bool, **layer: Tensor) -> list[Tensor]:
    """`gelu(input weightᵀ + bias)` by the tanh formula, and with save_gelu_in what it was taken of."""
    before = linear_bias_forward(**layer)
    return [gelu_fwd(before), before] if save_gelu_in else [gelu_fwd(before)]


def linear_act_forward(is_gelu: bool, save_pre_act: bool, **layer: Tensor) -> list[Tensor]:
    """As `linear_gelu_forward`; without is_gelu ReLU, of which nothing can be saved here (it was a mask of bits)."""
    if save_pre_act and not is_gelu:
        refuse("save_pre_act", "False with ReLU", True, "use flashtile.fused_mlp with activation='relu'")
    before = linear_bias_forward(**layer)
    after = gelu_fwd(before) if is_gelu else before.relu_()
    return [after, before] if save_pre_act else [after]


@torch.no_grad()
def bias_act_linear_dgrad_bgrad(
    weight: Tensor, d_output: Tensor, pre_act: Tensor, is_gelu: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of what the activation was taken of, and of the bias before it."""
    if not is_gelu:
        refuse("is_gelu", "True", False, "use flashtile.fused_mlp with activation='relu'")
    before = gelu_bwd(d_output @ weight, pre_act)
    return before, wide(before).sum(0).to(before.dtype)


@torch.no_grad()
def linear_residual_gelu_linear_backward(
    input: Tensor, gelu_in: Tensor, output1: Tensor, weight1: Tensor, weight2: Tensor, d_output2: Tensor,
    d_input: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of input, weight1, bias1, weight2 and bias2 of a perceptron; that of input is added to d_input, in
    place, where it is given."""
    before, of_second = gelu_bwd(d_output2 @ weight2, gelu_in), linear_bias_wgrad(output1, d_output2)
    if d_input is None:
        return *linear_bias_backward(input, weight1, before), *of_second
    return *linear_bias_residual_backward(input, weight1, before, d_input), *of_second


linear_gelu_linear_backward = linear_residual_gelu_linear_backward


# dropout_layer_norm


def dropout_add_ln_fwd(**given: Any) -> Results:
    """z, x, mask, mu and rsigma::

        x = dropout(input · rowscale · rowscale_const · colscale) + residual        z = norm(x)

    Args:
        x0_subset, z_subset: as `x0_subset` and `out_subset` of `flashtile.dropout_add_layer_norm`, with z_numrows rows.
        gen: draws the dropout seed; None for torch's own generator.
    """
    a = SimpleNamespace(**given)
    z, x, *mask, mu, rsigma = _forward(
        a, a.input, a.gamma, a.beta, rowscale=a.rowscale, layerscale=a.colscale, x0_subset=a.x0_subset,
        out_subset=a.z_subset, rowscale_const=a.rowscale_const, out_numrows=a.z_numrows,
    )  # fmt: skip
    changed = any(one is not None for one in (a.rowscale, a.colscale, a.x0_subset)) or a.rowscale_const != 1.0
    return [z, x if changed else _unless_same(x, a.input, a), *(mask or [None]), mu, rsigma]


@torch.no_grad()
def dropout_add_ln_bwd(**given: Any) -> Results:
    """The gradients of x0, residual, gamma and beta, two None, and with colscale its gradient and None. `dx` is None
    where x goes nowhere else. `x0`: needed beside colscale. `x0_numrows`: rows of x0, beside x0_subset."""
    a = SimpleNamespace(**given)
    dz = a.dz
    if a.z_subset is not None:  # for each number `i` row `i - 1` of dz, 0 where `i` is 0
        dz = torch.cat((dz.new_zeros(1, dz.shape[1]), dz)).index_select(0, a.z_subset)
    total, dgamma, dbeta = _norm_gradient(a, dz, a.gamma)
    total = total if a.dx is None else total + a.dx
    dresidual = total.to(a.x.dtype) if a.has_residual else None
    if a.x0_subset is not None:  # the other way: each row goes to row `i - 1`, or nowhere
        total = total.new_zeros(a.x0_numrows + 1, total.shape[1]).index_copy(0, a.x0_subset.long(), total)[1:]
    of_x0 = _kept(total, a.dmask, a.dropout_p) * a.rowscale_const
    of_x0 = of_x0 if a.rowscale is None else of_x0 * a.rowscale[:, None]
    if a.colscale is None:
        return [of_x0.to(a.dz.dtype), dresidual, dgamma, dbeta, None, None]
    if a.x0 is None:
        raise ValueError("x0: expected a tensor beside colscale, got None; its gradient is a sum over x0")
    dcolscale = (of_x0 * a.x0).sum(0).to(a.colscale.dtype)
    return [(of_x0 * a.colscale).to(a.dz.dtype), dresidual, dgamma, dbeta, None, None, dcolscale, None]


def dropout_add_ln_parallel_residual_fwd(**given: Any) -> Results:
    """z0, z1, x, two masks, mu and rsigma of `x = dropout(input0) + dropout(input1) + residual`."""
    a = SimpleNamespace(**given)
    z0, *rest = _forward(a, a.input0, a.gamma0, a.beta0, x1=a.input1, weight1=a.gamma1, bias1=a.beta1)
    z1 = None if a.gamma1 is None else rest.pop(0)
    x, *masks, mu, rsigma = rest
    masks += [None] * (2 - len(masks))
    return [z0, z1, x if a.input1 is not None else _unless_same(x, a.input0, a), *masks, mu, rsigma]


@torch.no_grad()
def dropout_add_ln_parallel_residual_bwd(**given: Any) -> Results:
    """The gradients of x0, x1, residual, gamma0, beta0, gamma1 and beta1, and four None."""
    a = SimpleNamespace(**given)
    total, dgamma0, dbeta0 = _norm_gradient(a, a.dz0, a.gamma0)
    dgamma1 = dbeta1 = None
    if a.gamma1 is not None and a.dz1 is not None:
        second, dgamma1, dbeta1 = _norm_gradient(a, a.dz1, a.gamma1)
        total = total + second
    total = total if a.dx is None else total + a.dx
    dx0 = _kept(total, a.dmask0, a.dropout_p).to(a.dz0.dtype)
    dx1 = _kept(total, a.dmask1, a.dropout_p).to(a.dz0.dtype) if a.has_x1 else None
    dresidual = total.to(a.x.dtype) if a.has_residual else None
    return [dx0, dx1, dresidual, dgamma0, dbeta0, dgamma1, dbeta1, None, None, None, None]


@torch.no_grad()
def _forward(a: SimpleNamespace, x0: Tensor, weight: Tensor, bias: Tensor | None, **more: Any) -> list[Any]:
    """flashtile's results with the sum and masks of bytes, mu and rsigma."""
    z, *rest = fused_norm(a.is_rms_norm)(
        x0, a.residual, weight, bias, a.dropout_p, a.epsilon, prenorm=True, residual_in_fp32=a.residual_in_fp32,
        return_dropout_mask=a.dropout_p > 0, dropout_seed=calls.drawn_seed(x0, a.dropout_p, a.gen), **more,
    )  # fmt: skip
    rest = [one.to(torch.uint8) if one.dtype is torch.bool else one for one in rest]
    x = wide(rest[0] if more.get("weight1") is None else rest[1])
    if a.is_rms_norm:
        return [z, *rest, x.new_zeros(x.shape[0]), (x.square().mean(-1) + a.epsilon).rsqrt()]
    variance, mean = torch.var_mean(x, -1, correction=0)
    return [z, *rest, mean, (variance + a.epsilon).rsqrt()]


def _unless_same(x: Tensor, x0: Tensor, a: SimpleNamespace) -> Tensor | None:
    """The sum, None where it is the input."""
    return x if a.residual is not None or a.dropout_p or x.dtype is not x0.dtype else None


def _norm_gradient(a: SimpleNamespace, dz: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, in float32, and of weight and bias (an RMS norm has no `mean(w)`)::

    dx = rsigma · (w - mean(w) - n · mean(w · n))        w = dz · gamma        n = (x - mu) · rsigma
    """
    normed = (wide(a.x) - a.mu[:, None]) * a.rsigma[:, None]
    weighted = wide(dz) * gamma
    inner = weighted - normed * (weighted * normed).mean(-1, keepdim=True)
    inner = inner if a.is_rms_norm else inner - weighted.mean(-1, keepdim=True)
    dgamma, dbeta = (wide(dz) * normed).sum(0), wide(dz).sum(0)
    return inner * a.rsigma[:, None], dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


def _kept(gradient: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    return gradient if mask is None else gradient * mask / (1 - dropout_p)


# rotary_emb, xentropy_cuda_lib, scaled_masked_softmax_cuda, scaled_upper_triang_masked_softmax_cuda


@torch.no_grad()
def apply_rotary(x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor, out1: Tensor, out2: Tensor, conj: bool) -> None:
    """Writes `x1 cos - x2 sin` to out1 and `x1 sin + x2 cos` to out2, with conj the rotation back.

    All have one shape, or broadcast to it; out1 and out2 may be x1 and x2. Arithmetic is float32 (float64 for float64).
    """
    a, b, cos, sin = (wide(x) for x in (x1, x2, cos, -sin if conj else sin))
    first, second = a * cos - b * sin, a * sin + b * cos
    out1.copy_(first)
    out2.copy_(second)


@torch.no_grad()
def entropy_forward(logits: Tensor, labels: Tensor, smoothing: float, total_classes: int) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exp of each row of logits `[rows, classes]`, float32."""
    _check_classes(logits, total_classes)
    lse = wide(logits).logsumexp(1)
    return cross_entropy_of_lse(logits, labels, lse, label_smoothing=smoothing, ignore_index=_NO_LABEL)[0], lse


@torch.enable_grad()
def entropy_backward(
    grad_loss: Tensor, logits: Tensor, max_log_sum_exp: Tensor, labels: Tensor, smoothing: float, inplace: bool,
    total_classes: int,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, with inplace in their memory."""
    _check_classes(logits, total_classes)
    leaf = logits.detach().requires_grad_()
    losses, _ = cross_entropy_of_lse(
        leaf, labels, max_log_sum_exp, label_smoothing=smoothing, ignore_index=_NO_LABEL, inplace_backward=bool(inplace)
    )
    return torch.autograd.grad(losses, leaf, grad_loss.to(losses.dtype))[0]


def _check_classes(logits: Tensor, total_classes: int) -> None:
    if total_classes not in (-1, logits.shape[1]):
        expected = f"-1 or {logits.shape[1]}, the columns of logits"
        refuse("total_classes", expected, total_classes, "flashtile.cross_entropy takes a process_group")


masked_forward = torch.no_grad()(flashtile.scaled_masked_softmax)
causal_forward = torch.no_grad()(flashtile.scaled_causal_softmax)


@torch.no_grad()
def masked_backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """Gradient of a scaled softmax from its result y: `scale · y · (dy - Σ dy y)` along the last dimension, 0 where
    masked."""
    dy, y = wide(output_grads), wide(softmax_results)
    return (scale_factor * y * (dy - (dy * y).sum(-1, keepdim=True))).to(softmax_results.dtype)


causal_backward = masked_backward


def masked_get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int) -> int:
    """Rows that must go together: 1, because numbers of rows that no power of two divides are served as well."""
    return 1


for _names in EXTENSIONS.values():
    _names.serve(globals())
