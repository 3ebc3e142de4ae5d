"""The last linear layer and its cross-entropy, chunk by chunk of tokens: logits of one chunk at a time.

A chunk's logits become their own gradient in place, and that at once what it adds to the gradients of x and weight. A
pass thus costs three matrix products, as the separate layers do, and no logits are kept.

The dtype of sums over chunks: while there are at most `MAX_ROUNDINGS` chunks, the gradient of the weight is in its
own dtype, and each product adds to it, which rounds it once. With more chunks, and always in float16, whose range the
sum may leave, it is in float32. The gradient of the bias always is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.common import dispatch
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.checks import check_input, check_like, check_shape
from flashtile.ops.common.flops import product_flops
from flashtile.ops.common.operators import operator
from flashtile.ops.common.rows import compute_dtype
from flashtile.ops.cross_entropy import spec as reference
from flashtile.ops.cross_entropy.spec import MAX_COLUMNS, CrossEntropySpec, LossInputs, LossUpstream

_BACKENDS = standard_backends("cross_entropy")

#: Bytes of the logits of a chunk. On a GPU as many as make the products long; on a CPU few, to stay near its caches.
CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**25}
MAX_ROUNDINGS = 8

#: Columns of the weight whose gradients are made in float32 at a time.
_SLICE = 8192


class LinearOperands(NamedTuple):
    """x `[rows, features]`, weight `[vocabulary, features]`, bias `[vocabulary]` or None, labels `[rows]`, and None or
    the class weights with their sum, `[vocabulary + 1]`, of the vocabulary of all processes."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    class_weights: Tensor | None = None


class LinearUpstream(NamedTuple):
    """The tensors of a backward that makes the logits again: as `LossUpstream`, with the operands."""

    dloss: Tensor
    scale: Tensor | None
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    class_weights: Tensor | None
    normaliser: Tensor


class Wanted(NamedTuple):
    """The gradients that are asked for."""

    dx: bool
    dweight: bool
    dbias: bool


class LinearGradients(NamedTuple):
    """Gradients, None where not asked for. Until they are finished, that of the bias, and in float16 that of the
    weight, are in the dtype that computes."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class LinearResults(NamedTuple):
    """The results of a forward pass: `Results`, and the gradients of the reduced loss where they are asked for."""

    loss: Tensor
    z_loss: Tensor | None
    normaliser: Tensor
    scale: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None

    @property
    def gradients(self) -> LinearGradients:
        return LinearGradients(*self[4:])


def weight_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype the gradient of the weight leaves the operator."""
    return torch.float32 if dtype is torch.float16 else dtype


def forward(module: ModuleType, operands: LinearOperands, spec: CrossEntropySpec, wanted: Wanted) -> LinearResults:
    """The losses, and the gradients for a gradient of 1 from above; in float16 those of the sum even of a mean, because
    divided by the number of tokens much would be 0."""
    x, _, _, labels, weights = operands
    dtype = compute_dtype(x.dtype)
    scale = reference.weight_sum(labels, weights, spec).to(dtype).reciprocal() if spec.reduction == "mean" else None
    one, factor = torch.ones((), dtype=dtype, device=x.device), None if x.dtype is torch.float16 else scale
    each = spec._replace(reduction="none")
    sums = _Sums(operands, wanted, spec)
    normaliser = torch.empty(len(labels), 2, dtype=dtype, device=x.device)
    loss = torch.empty(len(labels), dtype=dtype, device=x.device)
    z_loss = torch.empty_like(loss) if spec.z_loss else None
    for rows, logits in _chunks(operands):
        found = reference.forward_on_group(module, LossInputs(logits, labels[rows], weights), each)
        loss[rows], normaliser[rows] = found.loss, found.normaliser
        if z_loss is not None and found.z_loss is not None:
            z_loss[rows] = found.z_loss
        if any(wanted):
            given = LossUpstream(one, factor, logits, labels[rows], weights, found.normaliser)
            module.backward(given, each, True)
            sums.add(rows, logits)
    if spec.reduction != "none":
        loss, z_loss = loss.sum(), None if z_loss is None else z_loss.sum()
    if scale is not None:
        loss, z_loss = loss * scale, None if z_loss is None else z_loss * scale
    return LinearResults(loss, z_loss, normaliser, scale, *sums.found())


def backward(module: ModuleType, given: LinearUpstream, spec: CrossEntropySpec, wanted: Wanted) -> LinearGradients:
    """The gradients for any gradient of the loss from above; the logits are made again."""
    dloss, scale, normaliser = given.dloss.expand_as(given.labels), given.scale, given.normaliser
    operands = LinearOperands(*given[2:-1])
    sums = _Sums(operands, wanted, spec)
    for rows, logits in _chunks(operands):
        labels, weights = operands.labels[rows], operands.class_weights
        of_rows = LossUpstream(dloss[rows], scale, logits, labels, weights, normaliser[rows])
        module.backward(of_rows, spec, True)
        sums.add(rows, logits)
    return sums.found()


def finish(found: LinearGradients, dtype: torch.dtype) -> LinearGradients:
    """The gradients in the dtype of their tensors."""
    return LinearGradients(*(None if t is None else t.to(dtype) for t in found))


def chunk_rows(rows: int, columns: int, itemsize: int, device_type: str) -> int:
    """Rows of a chunk: all of about one size, in whole tiles of the products where they are that many."""
    limit = max(1, CHUNK_BYTES[device_type] // (columns * itemsize))
    if rows <= limit:
        return max(rows, 1)
    even = -(-rows // -(-rows // limit))
    return min(limit, -(-even // 128) * 128)


def _cut(operands: LinearOperands) -> tuple[int, int]:
    """Rows of a chunk, and how far apart they are: on whole vectors, as odd rows make products and kernels slower."""
    x, weight, *_ = operands
    padded = -(-weight.shape[0] // 64) * 64
    return chunk_rows(x.shape[0], padded, x.element_size(), x.device.type), padded


def _chunks(operands: LinearOperands) -> Iterator[tuple[slice, Tensor]]:
    """The rows of each chunk, and its logits, in memory that the next chunk takes."""
    x, weight, bias, *_ = operands
    (rows, _), columns = x.shape, weight.shape[0]
    step, padded = _cut(operands)
    memory = torch.empty(min(step, rows), padded, dtype=x.dtype, device=x.device)
    if x.device.type == "cpu":
        # oneDNN's bfloat16 products on CPUs with AMX multiply what lies behind a row by 0, and NaN times 0 is NaN.
        memory[:, columns:] = 0
    memory = memory[:, :columns]
    for first in range(0, rows, step):
        chunk = slice(first, min(first + step, rows))
        logits = memory[: chunk.stop - first]
        if bias is None:
            torch.mm(x[chunk], weight.t(), out=logits)
        else:
            torch.addmm(bias, x[chunk], weight.t(), out=logits)
        yield chunk, logits


class _Sums:
    """The gradients that are asked for, added up over chunks."""

    def __init__(self, operands: LinearOperands, wanted: Wanted, spec: CrossEntropySpec) -> None:
        x, weight, *_ = operands
        self._operands, self._spec, self._started = operands, spec, False
        step, _ = _cut(operands)
        narrow = x.element_size() < 4
        self._wide = x.dtype is torch.float16 or (narrow and x.shape[0] > MAX_ROUNDINGS * step)
        dtype = torch.float32 if self._wide else x.dtype
        self._dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted.dx else None
        self._dweight = torch.empty(weight.shape, dtype=dtype, device=x.device) if wanted.dweight else None
        self._dbias = x.new_zeros(weight.shape[0], dtype=compute_dtype(x.dtype)) if wanted.dbias else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        x, weight, _, labels, _ = self._operands
        if self._dx is not None:
            torch.mm(dlogits, weight, out=self._dx[rows])
        if self._dweight is not None:
            # A row that is ignored may hold NaN, and its gradient of 0 times that would be NaN for the whole weight.
            ignored = labels[rows, None] == self._spec.ignore_index
            self._add_to_weight(self._dweight, dlogits.t(), x[rows].masked_fill(ignored, 0))
        if self._dbias is not None:
            self._dbias += dlogits.sum(dim=0, dtype=self._dbias.dtype)
        self._started = True

    def _add_to_weight(self, dweight: Tensor, dlogits: Tensor, x: Tensor) -> None:
        """Adds the product of dlogits `[vocabulary, rows]` and x `[rows, features]`; the first is put in its place."""
        if not self._wide:
            if self._started:
                dweight.addmm_(dlogits, x)
            else:
                torch.mm(dlogits, x, out=dweight)
            return
        for first in range(0, len(dlogits), _SLICE):
            part = slice(first, first + _SLICE)
            product = _float32_product(dlogits[part], x)
            if self._started:
                dweight[part].add_(product)
            else:
                dweight[part].copy_(product)

    def found(self) -> LinearGradients:
        reference.add_up(self._dx, self._spec)  # each process has the part of its columns
        dweight = self._dweight
        if dweight is not None:
            dweight = dweight.to(weight_sum_dtype(self._operands.x.dtype))
            if not self._started:
                dweight.zero_()
        return LinearGradients(self._dx, dweight, self._dbias)


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two 16-bit matrices, not rounded to 16 bits."""
    if a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Checks the operands of the linear layer."""
    check_input("x", x, "(..., features)", "unsqueeze it")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight: expected shape (vocabulary, {x.shape[-1]}), with the last dimension of x, got "
            f"{tuple(weight.shape)}; as that of torch.nn.Linear"
        )
    check_vocabulary("weight", "first dimension", weight.shape[0])
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1], "the first dimension of weight")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_like(name, tensor, x, "x", "cast one, or use torch.autocast")


def check_vocabulary(name: str, dimension: str, size: int) -> None:
    if not 1 <= size <= MAX_COLUMNS:
        raise ValueError(
            f"{name}: expected a {dimension} from 1 to {MAX_COLUMNS}, got {size}; it is what labels choose from"
        )


# --- operators and autograd ------------------------------------------------------------------------------------------


def run_linear_cross_entropy(
    operands: LinearOperands, spec: CrossEntropySpec, backend: str
) -> tuple[Tensor, Tensor | None]:
    """Runs the operator, recorded by autograd where a gradient is wanted. Returns loss and z_loss.

    A reduced loss has a scalar gradient, so the forward pass makes the gradients already, for a gradient of 1, and the
    backward multiplies. Losses of each token have one each: the backward makes their logits again. A second backward
    through the same graph does so too, as the first has given its memory away.
    """
    transformed = dispatch.transformed()
    if transformed:
        dispatch.refuse_named_backend(backend)
        refuse_transformed(spec, False)
    if transformed or (backend == "reference" and not spec.group):
        # PyTorch's own operations compute the call, and differentiate it.
        results = reference.linear(operands, spec)
        z_loss = None if results.z_loss is None else results.z_loss.detach()
        return results.loss, z_loss
    if dispatch.recorded(operands):
        loss, *z_losses = _LinearCrossEntropy.apply(*operands, *spec, backend)
        return loss, z_losses[0] if z_losses else None
    found = _forward(operands, spec, _NOTHING, backend)
    return found.loss, found.z_loss


def refuse_transformed(spec: CrossEntropySpec, inplace: bool) -> None:
    if spec.group:
        raise ValueError("process_group: expected None under torch.func transforms, which know no communication")
    if inplace:
        raise ValueError("inplace_backward: expected False under torch.func transforms, which may use the logits again")


def refuse_second_order(spec: CrossEntropySpec, inplace: bool) -> None:
    if inplace:
        raise RuntimeError(
            "inplace_backward: expected a backward without create_graph, which needs the logits again; "
            "use inplace_backward=False"
        )
    if spec.group:
        raise RuntimeError(
            "process_group: expected a backward without create_graph; second derivatives need the whole vocabulary"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """The forward pass recorded for a backward. Returns the loss, and z_loss where it is asked for."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, class_weights, *arguments):
        operands = LinearOperands(x, weight, bias, labels, class_weights)
        spec, backend = CrossEntropySpec(*arguments[:_SPEC]), arguments[-1]
        needs = ctx.needs_input_grad
        wanted = Wanted(needs[0], needs[1], needs[2])
        now = _NOTHING if spec.reduction == "none" else wanted
        results = _forward(operands, spec, now, backend)
        # A compiled graph saves the gradients; else they are kept where the backward can give them away.
        compiling = torch.compiler.is_compiling()
        ctx.save_for_backward(*operands, results.normaliser, results.scale, *(results.gradients if compiling else ()))
        ctx.gradients = None if compiling or spec.reduction == "none" else results.gradients
        ctx.scalars = spec, wanted, backend
        if results.z_loss is None:
            return (results.loss,)
        ctx.mark_non_differentiable(results.z_loss)
        return results.loss, results.z_loss

    @staticmethod
    def backward(ctx, dloss, *rest):
        spec, wanted, backend = ctx.scalars
        saved = ctx.saved_tensors
        operands, normaliser, scale = LinearOperands(*saved[:5]), saved[5], saved[6]
        compiling = torch.compiler.is_compiling()
        if dispatch.batched(dloss):
            if spec.group:
                raise RuntimeError(
                    "process_group: expected a backward of one gradient, got several (is_grads_batched=True); ask for "
                    "one after another"
                )
            with torch.enable_grad():
                found = _differentiable_backward(dloss, operands, spec, wanted)
        elif torch.is_grad_enabled() and not compiling:
            refuse_second_order(spec, False)
            found = _differentiable_backward(dloss, operands, spec, wanted)
        elif spec.reduction == "none" or (ctx.gradients is None and not compiling):
            found = _backward(LinearUpstream(dloss, scale, *operands, normaliser), spec, wanted, backend)
        else:
            factor = dloss
            if scale is not None and operands.x.dtype is torch.float16:
                factor = dloss * scale.nan_to_num(posinf=0.0)  # where no row counts, all gradients are 0
            found = LinearGradients(*saved[7:]) if compiling else ctx.gradients
            ctx.gradients = None
            found = _multiplied(found, factor, operands, backend)
        return *found, None, None, *(None,) * (_SPEC + 1)


def _differentiable_backward(
    dloss: Tensor, operands: LinearOperands, spec: CrossEntropySpec, wanted: Wanted
) -> LinearGradients:
    """The gradients as functions of all that they depend on, through the reference, which holds all logits."""
    # Operands are viewed: if one was made from another (x from a weight that is the embedding too), the gradient of the
    # latter would have that of the former in it, which autograd adds as well.
    x, weight, bias, labels, class_weights = operands
    bias = None if bias is None else bias.view_as(bias)
    operands = LinearOperands(x.view_as(x), weight.view_as(weight), bias, labels, class_weights)
    loss = reference.linear(operands, spec).loss
    inputs = [t for t, there in zip(operands, wanted) if there and t is not None]
    grads = iter(torch.autograd.grad(loss, inputs, dloss, create_graph=True))
    return LinearGradients(*(next(grads) if there else None for there in wanted))


def _multiplied(found: LinearGradients, factor: Tensor, operands: LinearOperands, backend: str) -> LinearGradients:
    """The gradients that the forward made, multiplied by that from above: in place where nothing looks on."""
    dtype = compute_dtype(operands.x.dtype)
    if not dispatch.unobserved(factor, *(t for t in found if t is not None)):
        return finish(LinearGradients(*(None if t is None else t.to(dtype) * factor for t in found)), operands.x.dtype)
    module = _BACKENDS.implementation(backend, operands.x.device, operands.x.dtype)
    for gradient in found:
        if gradient is not None:
            module.multiply(gradient, factor)
    return finish(found, operands.x.dtype)


def _run(function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs `forward` or `backward` with the module of a backend."""

    def run(given: LinearOperands | LinearUpstream, *scalars: Any) -> Any:
        *rest, backend = scalars
        module = _BACKENDS.implementation(backend, given.x.device, given.x.dtype)
        # Kernels read labels as a vector without gaps; products take x and weight as they are.
        given = given._replace(labels=given.labels.contiguous())
        with torch.no_grad(), dispatch.without_autocast(given.x):  # under autocast, the operands are cast before
            return function(module, given, *rest)

    return run


def _fake(operands: LinearOperands, spec: CrossEntropySpec, wanted: Wanted) -> list[Tensor | None]:
    x, weight, bias, *_ = operands
    dtype = compute_dtype(x.dtype)
    gradients = zip((x, weight, bias), (x.dtype, weight_sum_dtype(x.dtype), dtype))
    return [
        *(x.new_empty(shape, dtype=dtype) for shape in reference.result_shapes(x.shape[0], spec)),
        *(None if t is None else t.new_empty(t.shape, dtype=of) for t, of in gradients),
    ]


def _flops(operands: LinearOperands | LinearUpstream, spec: CrossEntropySpec, wanted: Wanted) -> int:
    """The logits, and the gradients of x and weight that are made beside them."""
    (rows, features), vocabulary = operands.x.shape, operands.weight.shape[0]
    return (1 + wanted.dx + wanted.dweight) * product_flops(rows, features, vocabulary)


_NOTHING = Wanted(False, False, False)
_SPEC = len(CrossEntropySpec._fields)
_forward = operator(
    "linear_cross_entropy_forward",
    LinearOperands,
    (CrossEntropySpec, Wanted),
    LinearResults,
    run=_run(lambda *call: forward(*call)),
    fake=_fake,
    present=lambda operands, spec, wanted: (*reference.results_present(spec), *wanted),
    flops=_flops,
).call
_backward = operator(
    "linear_cross_entropy_backward",
    LinearUpstream,
    (CrossEntropySpec, Wanted),
    LinearGradients,
    run=_run(lambda module, given, *rest: finish(backward(module, given, *rest), given.x.dtype)),
    fake=lambda given, spec, wanted: [
        None if t is None else t.new_empty(t.shape) for t in (given.x, given.weight, given.bias)
    ],
    present=lambda given, spec, wanted: wanted,
    flops=_flops,
).call
