"""The public norms, which check a call and flatten it to rows, and their operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashtile.ops.common import dtensor
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.checks import check_tensors, finite_float, raise_not_bool, resolve_dropout
from flashtile.ops.common.operators import Differentiable, OnBackend, operator
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.philox import draw_dropout_seed, keep_rows, next_dropout_seed
from flashtile.ops.common.repeated import RepeatedCall, Run, call_table
from flashtile.ops.common.rows import compute_dtype, last_contiguous
from flashtile.ops.layer_norm import checks
from flashtile.ops.layer_norm import spec as reference
from flashtile.ops.layer_norm.spec import Gradients, Normalised, NormSpec, Operands, Upstream, Wanted

_BACKENDS = standard_backends("layer_norm")
_CALLS = call_table()


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_weight: bool = False,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor:
    """Layer norm over the last dimension: `(x - mean) / sqrt(variance + eps) · weight + bias`.

    Statistics and arithmetic are float32 (float64 for float64), whatever the dtypes of the tensors are.

    Args:
        x: `[..., hidden]`, hidden from 1 to 65536; float16, bfloat16, float32, or float64 (CPU and reference only).
        weight: `[hidden]` in any of these dtypes, float64 exactly where x is; or None for 1.
        bias: `[hidden]`, or None for 0.
        eps: added to the variance.
        zero_centered_weight: multiply by `1 + weight`.
        backend: "auto" chooses by device; "triton", "cpu" or "reference" run that backend or raise.

    Returns:
        `[..., hidden]` in x's dtype.

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, or the named backend cannot serve the call.

    Reference:
        Ba, Kiros, Hinton, "Layer Normalization" (2016).
    """
    if other_names:
        refuse_other_names(layer_norm, other_names)
    return _plain(x, weight, bias, eps, False, zero_centered_weight, backend)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_weight: bool = False,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor:
    """RMS norm over the last dimension: `x / sqrt(mean(x²) + eps) · weight + bias`.

    x is `[..., hidden]`; arguments, result and errors are those of `layer_norm`. `eps` is added to the mean square.

    Reference:
        Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    if other_names:
        refuse_other_names(rms_norm, other_names)
    return _plain(x, weight, bias, eps, True, zero_centered_weight, backend)


def dropout_add_layer_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, dropout_p: float = 0.0,
    epsilon: float = 1e-5, rowscale: Tensor | None = None, layerscale: Tensor | None = None, prenorm: bool = False,
    residual_in_fp32: bool = False, return_dropout_mask: bool = False, *, x1: Tensor | None = None,
    weight1: Tensor | None = None, bias1: Tensor | None = None, zero_centered_weight: bool = False,
    x0_subset: Tensor | None = None, out_subset: Tensor | None = None, rowscale_const: float = 1.0,
    out_numrows: int = 0, dropout_seed: Tensor | None = None, backend: str = "auto", **other_names: NoReturn,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Dropout, addition and layer norm in one pass over memory.

    ::

        x = dropout(x0 · rowscale · rowscale_const · layerscale) + dropout(x1) + residual
        z = layer_norm(x) · weight + bias          z1 = layer_norm(x) · weight1 + bias1

    Differentiable in x0, x1, residual, layerscale, weights and biases, also through the returned x. The sum is rounded
    to its dtype before it is normalised, so z is the norm of the x that is returned.

    Args:
        x0: `[..., hidden]`, hidden from 1 to 65536; float16, bfloat16, float32, or float64 (CPU and reference only).
        residual: `[..., hidden]` in any of these dtypes, which becomes the dtype of x; or None for 0. It is float64
            exactly where x0 is, as the other tensors are.
        weight: `[hidden]` in any of these dtypes, or None for 1.
        bias: `[hidden]`, or None for 0.
        dropout_p: probability, in [0, 1), that an element is dropped; the others are scaled by 1/(1 - p).
        epsilon: added to the variance.
        rowscale: `[...]`, a factor for each row of x0 (stochastic depth, Huang et al., 2016); it has no gradient.
        layerscale: `[hidden]`, a factor for each column of x0 (Touvron et al., 2021).
        prenorm: also return x, the residual of the next layer. If x is x0 as it came (nothing is added, dropped or
            scaled, and its dtype stays), x is x0 itself or a view of it, not a copy: what writes to one changes both.
        residual_in_fp32: without a residual, x is float32.
        return_dropout_mask: also return which elements of x0 (and of x1) were kept.
        x1: `[..., hidden]` in x0's dtype: a second branch (parallel residual). Not together with scales or x0_subset.
        weight1: `[hidden]`: a second output from the same x.
        bias1: `[hidden]`, only with weight1.
        zero_centered_weight: multiply by `1 + weight` and `1 + weight1`.
        x0_subset: integers, one for each row of x: the row takes row `i - 1` of x0, or 0 if `i = 0`. x has the shape of
            this tensor (and `hidden`).
        out_subset: integers, one for each row of x: the row goes to row `i - 1` of z, or nowhere if `i = 0`. In both
            subsets a row is named at most once. Rows of z that are not named are 0.
        rowscale_const: a factor on all of x0.
        out_numrows: rows of z, with out_subset.
        dropout_seed: `[2]` int64 tensor from `flashtile.draw_dropout_seed`, on x0's device. Without it, the seed is
            drawn from torch's generator, so that `torch.manual_seed` makes a run reproducible.
        backend: "auto" chooses by device; "triton", "cpu" or "reference" run that backend or raise.

    Returns:
        z `[..., hidden]` in x0's dtype, or `[out_numrows, hidden]` with out_subset. If you ask for more, a tuple in
        this order: z, z1 (with weight1), x (with prenorm), the dropout mask of x0 and that of x1 (bool, True = kept).

    Raises:
        TypeError, ValueError: as `layer_norm`. The numbers in subsets are always checked on a CPU, on a GPU with the
            environment variable `FLASHTILE_CHECK_VALUES=1` only, because reading them there synchronises.
    """
    if other_names:
        refuse_other_names(dropout_add_layer_norm, other_names)
    operands = Operands(
        x0, residual, x1, weight, bias, weight1, bias1, rowscale=rowscale, layerscale=layerscale, x0_subset=x0_subset,
        out_subset=out_subset, dropout_seed=dropout_seed,
    )  # fmt: skip
    scalars = (False, epsilon, dropout_p, rowscale_const, zero_centered_weight, residual_in_fp32, out_numrows, prenorm)
    return _dropout_add_norm(operands, (*scalars, backend), return_dropout_mask)


def dropout_add_rms_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None = None, dropout_p: float = 0.0,
    epsilon: float = 1e-5, rowscale: Tensor | None = None, layerscale: Tensor | None = None, prenorm: bool = False,
    residual_in_fp32: bool = False, return_dropout_mask: bool = False, *, x1: Tensor | None = None,
    weight1: Tensor | None = None, bias1: Tensor | None = None, zero_centered_weight: bool = False,
    x0_subset: Tensor | None = None, out_subset: Tensor | None = None, rowscale_const: float = 1.0,
    out_numrows: int = 0, dropout_seed: Tensor | None = None, backend: str = "auto", **other_names: NoReturn,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Dropout, addition and RMS norm in one pass over memory: `dropout_add_layer_norm` with `rms_norm` in it.

    Arguments, results and errors are those of `dropout_add_layer_norm`; `epsilon` is added to the mean square.
    """
    if other_names:
        refuse_other_names(dropout_add_rms_norm, other_names)
    operands = Operands(
        x0, residual, x1, weight, bias, weight1, bias1, rowscale=rowscale, layerscale=layerscale, x0_subset=x0_subset,
        out_subset=out_subset, dropout_seed=dropout_seed,
    )  # fmt: skip
    scalars = (True, epsilon, dropout_p, rowscale_const, zero_centered_weight, residual_in_fp32, out_numrows, prenorm)
    return _dropout_add_norm(operands, (*scalars, backend), return_dropout_mask)


def _plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, zero_centered: bool, backend: str
) -> Tensor:
    given, scalars = (x, weight, bias), (rms, eps, zero_centered, backend)
    found = _CALLS.run(given, scalars)
    if found is not None:
        return found
    checks.check_input("x", x)
    checks.check_parameter("weight", weight, x, "x")
    checks.check_parameter("bias", bias, x, "x")
    _BACKENDS.check(backend)
    raise_not_bool(zero_centered_weight=zero_centered)
    if dtensor.present(x, weight, bias):
        return dtensor.call(
            lambda _, x, weight, bias: _plain(x, weight, bias, eps, rms, zero_centered, backend),
            {"x": (x, "*."), "weight": (weight, "."), "bias": (bias, ".")}, "*.", ("weight", "bias"),
        )  # fmt: skip
    operands = Operands(x, weight=weight, bias=bias)
    flat = operands._replace(x0=x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    spec = NormSpec(rms, checks.resolve_epsilon("eps", eps), 0.0, 1.0, zero_centered, x.dtype, flat.x0.shape[0])
    repeated = _norm.repeat(operands, flat, spec, backend) if x.dim() > 1 else None
    if repeated is not None and (kept := _CALLS.keep_call(given, scalars, lambda present: repeated(present)[0])):
        return repeated(kept)[0]
    z = _norm(flat, spec, backend).z
    return z if x.dim() == 2 else z.view(x.shape)


def _dropout_add_norm(
    operands: Operands, scalars: tuple[Any, ...], return_dropout_mask: bool
) -> Tensor | tuple[Tensor, ...]:
    given = operands
    found = None if return_dropout_mask else _CALLS.run(given, scalars)
    if found is not None:
        return found
    rms, epsilon, dropout_p, rowscale_const, zero_centered, residual_in_fp32, out_numrows, prenorm, backend = scalars
    _BACKENDS.check(backend)
    raise_not_bool(zero_centered_weight=zero_centered, residual_in_fp32=residual_in_fp32)
    raise_not_bool(prenorm=prenorm, return_dropout_mask=return_dropout_mask)
    check_tensors(x0=operands.x0)
    rowscale_const = finite_float("rowscale_const", rowscale_const, "1.0 changes nothing", dtype=operands.x0.dtype)
    shape = checks.check_operands(operands, rowscale_const)
    dropout_p = resolve_dropout(dropout_p, operands.dropout_seed, operands.x0.device, "elements", "x0")
    if not dropout_p:
        operands = operands._replace(dropout_seed=None)
    elif operands.dropout_seed is None:
        operands = operands._replace(dropout_seed=draw_dropout_seed(operands.x0.device))
    if dtensor.present(*operands):
        return _sharded(operands, scalars, return_dropout_mask)
    flat = reference.flattened(operands)
    spec = NormSpec(
        rms, checks.resolve_epsilon("epsilon", epsilon), dropout_p, rowscale_const, zero_centered,
        checks.resolve_sum_dtype(operands, residual_in_fp32),
        checks.resolve_out_rows(operands.out_subset, out_numrows, flat.rows),
    )  # fmt: skip
    if not return_dropout_mask and operands.x0_subset is operands.out_subset is None and len(shape) > 1:
        repeated = _norm.repeat(operands, flat, spec, backend)
        if repeated is not None:
            seed, sums = operands.dropout_seed, reference.makes_sum(flat, spec)
            drawn = [] if seed is None or seed is given.dropout_seed else [seed]
            kept = _CALLS.keep_call(given, scalars, _again(repeated, prenorm, sums, bool(drawn)))
            if kept is not None:
                return _again(repeated, prenorm, sums, False)([*kept, *drawn])
    z, z1, x, _, _ = _norm(flat, spec, backend)
    out_shape = shape if operands.out_subset is None else z.shape
    results = [z.view(out_shape)]
    if z1 is not None:
        results.append(z1.view(out_shape))
    if prenorm:
        results.append((flat.x0 if x is None else x).view(shape))
    if return_dropout_mask:
        results += _masks(operands, flat, dropout_p)
    return results[0] if len(results) == 1 else tuple(results)


def _again(repeated: RepeatedCall, prenorm: bool, sums: bool, draws_seed: bool) -> Run:
    """A function that runs calls that lie alike. `prenorm`: x is returned; `sums`: it is not x0."""

    def run(present: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        found = repeated([*present, next_dropout_seed(present[0])] if draws_seed else present)
        results = (*found[: len(found) - sums], *([found[-1] if sums else present[0]] if prenorm else ()))
        return results[0] if len(results) == 1 else results

    return run


def _sharded(operands: Operands, *arguments: Any) -> Any:
    """`_dropout_add_norm` with DTensors. Rows are not sharded if their numbers matter: for dropout bits and subsets."""

    def function(division: dtensor.Division, *parts: Tensor | None) -> Any:
        own = Operands(*parts)  # type: ignore[arg-type]
        if own.dropout_seed is not None:
            own = own._replace(dropout_seed=division.agree(own.dropout_seed))
        return _dropout_add_norm(own, *arguments)

    rows = {"x0": "*.", "residual": "*.", "x1": "*.", "rowscale": "*"}
    if not (operands.dropout_seed is operands.x0_subset is operands.out_subset is None):
        rows = {}
    given = {
        name: (tensor, rows.get(name, "." * (0 if tensor is None else tensor.dim())))
        for name, tensor in operands._asdict().items()
    }
    return dtensor.call(function, given, "*.", ("weight", "bias", "weight1", "bias1", "layerscale"))


def _masks(operands: Operands, flat: Operands, dropout_p: float) -> list[Tensor]:
    """The kept elements of x0, and of x1 if there is one: bool, of their shapes."""
    tensors = [operands.x0] if operands.x1 is None else [operands.x0, operands.x1]
    if flat.dropout_seed is None:
        return [torch.ones_like(tensor, dtype=torch.bool) for tensor in tensors]
    rows, columns = flat.x0.shape
    bits = (keep_rows(flat.dropout_seed, dropout_p, stream, rows, columns) for stream in range(len(tensors)))
    return [kept.view(tensor.shape) for kept, tensor in zip(bits, tensors)]


# --- operators -------------------------------------------------------------------------------------------------------


def _fake_forward(operands: Operands, spec: NormSpec) -> list[Tensor]:
    x0, rows, columns = operands.x0, operands.rows, operands.x0.shape[1]
    statistics = compute_dtype(spec.sum_dtype)
    outputs = [x0.new_empty(spec.out_rows, columns) for _ in ("z", "z1")]
    x = x0.new_empty(rows, columns, dtype=spec.sum_dtype)
    return [*outputs, x, *(x0.new_empty(rows, dtype=statistics) for _ in ("mean", "rstd"))]


def _fake_backward(given: Upstream, spec: NormSpec, wanted: Wanted) -> list[Tensor | None]:
    (rows, columns), dz = given.x.shape, given.dz
    parameters = (given.weight, given.bias, given.weight1, given.bias1, given.layerscale)
    return [
        dz.new_empty(rows, columns, dtype=spec.sum_dtype),
        dz.new_empty(wanted.x0_rows, columns),
        dz.new_empty(rows, columns),
        *(None if parameter is None else parameter.new_empty(columns) for parameter in parameters),
    ]


def _decomposed(operands: Operands, spec: NormSpec) -> Normalised:
    if operands.dropout_seed is not None:
        raise ValueError(
            "dropout_p: expected 0 in a graph of PyTorch's operations, which draw other bits; call model.eval() before "
            "it is exported"
        )
    return reference.forward(operands, spec)


def _save(operands: Operands, results: Normalised, spec: NormSpec, ctx: Any) -> Any:
    x = operands.x0 if results.x is None else results.x
    x0 = None if operands.layerscale is None else operands.x0
    weights = any(ctx.needs_input_grad[3 : len(operands)])
    wanted = Wanted(operands.x0.shape[0], operands.residual is not None, operands.x1 is not None, weights)
    ctx.dtype = operands.x0.dtype
    return (x, x0, results.mean, results.rstd, *operands[3:]), (spec, wanted)


def _complete(given: Upstream, ctx: Any, spec: NormSpec, wanted: Wanted) -> Upstream:
    """Zeros for the gradient of z, or of z1, if only others are differentiated."""
    if given.dz is None:
        given = given._replace(dz=given.x.new_zeros(spec.out_rows, given.x.shape[1], dtype=ctx.dtype))
    if given.dz1 is None and given.weight1 is not None:
        given = given._replace(dz1=torch.zeros_like(given.dz))
    return given


def _input_gradients(found: Gradients, spec: NormSpec, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """The gradients in the order of `Operands`. Summands that nothing changed on the way share that of the sum."""
    dsum, dx0, dx1, *of_weights, dlayerscale = found
    own = dx0 is not None
    dresidual = dsum if wanted.residual else None
    dx1 = dsum if wanted.x1 and not own else dx1
    return dx0 if own else dsum, dresidual, dx1, *of_weights, None, dlayerscale


_norm = Differentiable(
    operator(
        "layer_norm_forward",
        Operands,
        (NormSpec,),
        Normalised,
        run=OnBackend(
            _BACKENDS, "forward", dtype=lambda operands, spec: spec.sum_dtype, arrange=last_contiguous,
            check=checks.check_values, checked=lambda operands: (operands.x0_subset, operands.out_subset),
        ),
        fake=_fake_forward,
        present=reference.present_results,
        decomposition=_decomposed,
    ),
    operator(
        "layer_norm_backward",
        Upstream,
        (NormSpec, Wanted),
        Gradients,
        run=OnBackend(_BACKENDS, "backward", dtype=lambda given, spec, wanted: spec.sum_dtype, arrange=last_contiguous),
        fake=_fake_backward,
        present=reference.present_gradients,
    ),
    reference,
    _save,
    outputs=3,
    complete=_complete,
    gradients=_input_gradients,
)  # fmt: skip
