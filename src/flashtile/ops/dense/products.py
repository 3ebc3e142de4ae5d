"""The matrix products: PyTorch's own on every device (cuBLAS on an NVIDIA GPU), each in one place.

A bias joins its product in cuBLAS's epilogue, and so does what is added to an input's gradient; both cost no pass over
memory and are rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.ops.dense.spec import compute_dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x weightᵀ + bias`: `[R, K]`, `[N, K]`, `[N]` -> `[R, N]`."""
    return F.linear(x, weight, bias)


def input_gradient(dout: Tensor, weight: Tensor, summand: Tensor | None = None) -> Tensor:
    """`dout weight + summand`: `[R, N]`, `[N, K]`, `[R, K]` -> `[R, K]`."""
    return torch.mm(dout, weight) if summand is None else torch.addmm(summand, dout, weight)


def weight_gradient(dout: Tensor, x: Tensor) -> Tensor:
    """`doutᵀ x`: `[R, N]`, `[R, K]` -> `[N, K]`."""
    return torch.mm(dout.t(), x)


def accumulate_weight_gradient(main_grad: Tensor, dout: Tensor, x: Tensor) -> None:
    """`main_grad += doutᵀ x`, added up in main_grad's dtype: that of x, or float32."""
    if main_grad.dtype is x.dtype:
        main_grad.addmm_(dout.t(), x)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, dout.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        # PyTorch has no product of narrow matrices with a wide result on a CPU.
        dtype = compute_dtype(x.dtype)
        main_grad.addmm_(dout.t().to(dtype), x.to(dtype))
