"""dropout_layer_norm: dropout, addition and norm, and their gradients, by themselves. Autograd records none of them.

Tensors are `[rows, hidden]`. `mu` and `rsigma` are the mean and the reciprocal standard deviation of each row of x,
float32 `[rows]` (float64 for float64). With is_rms_norm, mu is 0 and rsigma the reciprocal root mean square. Dropout
masks are uint8, 1 = kept. These results are None: x where it equals x0, masks without dropout, gradients of what was
not given, and partial sums, which are not needed here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.compat.shared.calls import drawn_seed
from flashtile.compat.shared.norms import fused_norm

Results = list[Tensor | None]


@torch.no_grad()
def dropout_add_ln_fwd(
    input: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor | None,
    rowscale: Tensor | None,
    colscale: Tensor | None,
    x0_subset: Tensor | None,
    z_subset: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale_const: float,
    z_numrows: int,
    gen: torch.Generator | None,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Results:
    """z, x, mask, mu and rsigma::

        x = dropout(input · rowscale · rowscale_const · colscale) + residual        z = norm(x)

    Args:
        x0_subset, z_subset: as `x0_subset` and `out_subset` of `flashtile.dropout_add_layer_norm`, with z_numrows rows.
        gen: draws the dropout seed; None for torch's own generator.
    """
    z, x, *mask = fused_norm(is_rms_norm)(
        input, residual, gamma, beta, dropout_p, epsilon, rowscale, colscale, True, residual_in_fp32, dropout_p > 0,
        x0_subset=x0_subset, out_subset=z_subset, rowscale_const=rowscale_const, out_numrows=z_numrows,
        dropout_seed=drawn_seed(input, dropout_p, gen),
    )  # fmt: skip
    changed = any(given is not None for given in (residual, rowscale, colscale, x0_subset))
    same = not (changed or dropout_p or rowscale_const != 1.0) and x.dtype is input.dtype
    mu, rsigma = _statistics(x, epsilon, is_rms_norm)
    return [z, None if same else x, mask[0].to(torch.uint8) if mask else None, mu, rsigma]


@torch.no_grad()
def dropout_add_ln_bwd(
    dz: Tensor,
    dx: Tensor | None,
    x: Tensor,
    x0: Tensor | None,
    dmask: Tensor | None,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    rowscale: Tensor | None,
    colscale: Tensor | None,
    x0_subset: Tensor | None,
    z_subset: Tensor | None,
    dropout_p: float,
    rowscale_const: float,
    x0_numrows: int,
    has_residual: bool,
    is_rms_norm: bool = False,
) -> Results:
    """The gradients of x0, residual, gamma and beta, two None, and with colscale its gradient and None.

    Args:
        dz, dx: those of z and of x; dx is None where x goes nowhere else.
        x0: needed beside colscale.
        x0_numrows: rows of x0, beside x0_subset.
    """
    of_z = dz if z_subset is None else _rows(dz, z_subset)
    total, dgamma, dbeta = _norm_gradient(of_z, x, mu, rsigma, gamma, is_rms_norm)
    total = total if dx is None else total + dx
    dresidual = total.to(x.dtype) if has_residual else None
    if x0_subset is not None:
        total = _spread(total, x0_subset, x0_numrows)
    of_x0 = _kept(total, dmask, dropout_p) * rowscale_const
    if rowscale is not None:
        of_x0 = of_x0 * rowscale[:, None]
    if colscale is None:
        return [of_x0.to(dz.dtype), dresidual, dgamma, dbeta, None, None]
    if x0 is None:
        raise ValueError("x0: expected a tensor beside colscale, got None; its gradient is a sum over x0")
    dcolscale = (of_x0 * x0).sum(0).to(colscale.dtype)
    return [(of_x0 * colscale).to(dz.dtype), dresidual, dgamma, dbeta, None, None, dcolscale, None]


@torch.no_grad()
def dropout_add_ln_parallel_residual_fwd(
    input0: Tensor,
    input1: Tensor | None,
    residual: Tensor | None,
    gamma0: Tensor,
    beta0: Tensor | None,
    gamma1: Tensor | None,
    beta1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    gen: torch.Generator | None,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Results:
    """z0, z1, x, two masks, mu and rsigma of `x = dropout(input0) + dropout(input1) + residual`."""
    z0, *rest = fused_norm(is_rms_norm)(
        input0, residual, gamma0, beta0, dropout_p, epsilon, None, None, True, residual_in_fp32, dropout_p > 0,
        x1=input1, weight1=gamma1, bias1=beta1, dropout_seed=drawn_seed(input0, dropout_p, gen),
    )  # fmt: skip
    z1 = None if gamma1 is None else rest.pop(0)
    x, *kept = rest
    masks = [mask.to(torch.uint8) for mask in kept] + [None] * (2 - len(kept))
    same = residual is None and input1 is None and not dropout_p and x.dtype is input0.dtype
    return [z0, z1, None if same else x, *masks, *_statistics(x, epsilon, is_rms_norm)]


@torch.no_grad()
def dropout_add_ln_parallel_residual_bwd(
    dz0: Tensor,
    dz1: Tensor | None,
    dx: Tensor | None,
    x: Tensor,
    dmask0: Tensor | None,
    dmask1: Tensor | None,
    mu: Tensor,
    rsigma: Tensor,
    gamma0: Tensor,
    gamma1: Tensor | None,
    dropout_p: float,
    has_x1: bool,
    has_residual: bool,
    is_rms_norm: bool = False,
) -> Results:
    """The gradients of x0, x1, residual, gamma0, beta0, gamma1 and beta1, and four None."""
    total, dgamma0, dbeta0 = _norm_gradient(dz0, x, mu, rsigma, gamma0, is_rms_norm)
    dgamma1 = dbeta1 = None
    if gamma1 is not None and dz1 is not None:
        second, dgamma1, dbeta1 = _norm_gradient(dz1, x, mu, rsigma, gamma1, is_rms_norm)
        total = total + second
    total = total if dx is None else total + dx
    dx0 = _kept(total, dmask0, dropout_p).to(dz0.dtype)
    dx1 = _kept(total, dmask1, dropout_p).to(dz0.dtype) if has_x1 else None
    dresidual = total.to(x.dtype) if has_residual else None
    return [dx0, dx1, dresidual, dgamma0, dbeta0, dgamma1, dbeta1, None, None, None, None]


def _statistics(x: Tensor, epsilon: float, rms: bool) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    if rms:
        return wide.new_zeros(x.shape[0]), (wide.square().mean(-1) + epsilon).rsqrt()
    variance, mean = torch.var_mean(wide, -1, correction=0)
    return mean, (variance + epsilon).rsqrt()


def _norm_gradient(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, in float32, and of weight and bias::

    dx = rsigma · (w - mean(w) - n · mean(w · n))        w = dz · gamma        n = (x - mu) · rsigma

    where an RMS norm has no `mean(w)`.
    """
    normed = (_wide(x) - mu[:, None]) * rsigma[:, None]
    weighted = _wide(dz) * gamma
    inner = weighted - normed * (weighted * normed).mean(-1, keepdim=True)
    if not rms:
        inner = inner - weighted.mean(-1, keepdim=True)
    dgamma, dbeta = (_wide(dz) * normed).sum(0), _wide(dz).sum(0)
    return inner * rsigma[:, None], dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


def _kept(gradient: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    return gradient if mask is None else gradient * mask / (1 - dropout_p)


def _rows(x: Tensor, subset: Tensor) -> Tensor:
    """For each number `i` of a subset row `i - 1` of x, 0 where `i` is 0."""
    padded = torch.cat((x.new_zeros(1, x.shape[1]), x))
    return padded.index_select(0, subset)


def _spread(x: Tensor, subset: Tensor, rows: int) -> Tensor:
    """What `_rows` undoes: each row of x goes to row `i - 1` of so many, or nowhere."""
    return x.new_zeros(rows + 1, x.shape[1]).index_copy(0, subset.long(), x)[1:]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
