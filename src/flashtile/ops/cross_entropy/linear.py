"""The last linear layer and its cross-entropy, chunk by chunk of tokens: logits of one chunk at a time.

A chunk's logits become their own gradient in place, and that at once what it adds to the gradients of x and weight. So
a pass costs three matrix products, as the separate layers do, and no logits are kept.

Where sums over chunks are held: while there are at most `MAX_ROUNDINGS` chunks, the gradient of the weight is in its
own dtype, and each product adds to it, which rounds it once. With more chunks, and always in float16, whose range the
sum may leave, it is in float32. The gradient of the bias always is.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.cross_entropy import parallel
from flashtile.ops.cross_entropy.losses import mean_scale
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, compute_dtype

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


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    bias: bool


class LinearGradients(NamedTuple):
    """Gradients, None where not asked for.

    Until they are finished, that of the bias, and in float16 that of the weight, are in the dtype that computes.
    """

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class LinearResults(NamedTuple):
    """What a forward pass gives: `Results`, and the gradients of the reduced loss where they are asked for."""

    loss: Tensor
    z_loss: Tensor | None
    normaliser: Tensor
    scale: Tensor | None
    gradients: LinearGradients


def weight_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype the gradient of the weight leaves the operator."""
    return torch.float32 if dtype is torch.float16 else dtype


def forward(module: ModuleType, operands: LinearOperands, spec: CrossEntropySpec, wanted: Wanted) -> LinearResults:
    """The losses, and the gradients for a gradient of 1 from above.

    In float16 those are of the sum even where the mean is asked for: divided by the number of tokens, much would be 0.
    """
    x, _, _, labels, weights = operands
    dtype = compute_dtype(x.dtype)
    scale = mean_scale(labels, spec, dtype, weights) if spec.reduction == "mean" else None
    one, factor = torch.ones((), dtype=dtype, device=x.device), None if x.dtype is torch.float16 else scale
    each = spec._replace(reduction="none")
    sums = _Sums(operands, wanted, spec)
    normaliser = torch.empty(len(labels), 2, dtype=dtype, device=x.device)
    loss = torch.empty(len(labels), dtype=dtype, device=x.device)
    z_loss = torch.empty_like(loss) if spec.z_loss else None
    for rows, logits in _chunks(operands):
        found = parallel.forward(module, logits, labels[rows], each, weights)
        loss[rows], normaliser[rows] = found.loss, found.normaliser
        if z_loss is not None and found.z_loss is not None:
            z_loss[rows] = found.z_loss
        if any(wanted):
            sums.add(rows, module.backward(one, factor, logits, labels[rows], found.normaliser, each, True, weights))
    if spec.reduction != "none":
        loss, z_loss = _total(loss, scale), None if z_loss is None else _total(z_loss, scale)
    return LinearResults(loss, z_loss, normaliser, scale, sums.found())


def backward(
    module: ModuleType,
    dloss: Tensor,
    scale: Tensor | None,
    operands: LinearOperands,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    wanted: Wanted,
) -> LinearGradients:
    """The gradients for any gradient of the loss from above; the logits are made again."""
    sums = _Sums(operands, wanted, spec)
    dloss = dloss.expand_as(operands.labels)
    for rows, logits in _chunks(operands):
        labels, weights = operands.labels[rows], operands.class_weights
        sums.add(rows, module.backward(dloss[rows], scale, logits, labels, normaliser[rows], spec, True, weights))
    return sums.found()


def finish(found: LinearGradients, operands: LinearOperands) -> LinearGradients:
    """The gradients in the dtypes of their tensors."""
    dtype = operands.x.dtype
    return LinearGradients(*(None if t is None else t.to(dtype) for t in found))


def _total(losses: Tensor, scale: Tensor | None) -> Tensor:
    return losses.sum() if scale is None else losses.sum() * scale


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
        self._dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted.x else None
        self._dweight = torch.empty(weight.shape, dtype=dtype, device=x.device) if wanted.weight else None
        self._dbias = x.new_zeros(weight.shape[0], dtype=compute_dtype(x.dtype)) if wanted.bias else None

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
        parallel.add_up(self._dx, self._spec)  # each process has the part of its columns
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
