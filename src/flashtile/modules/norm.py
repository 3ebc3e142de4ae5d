"""Norms as modules: `LayerNorm` and `RMSNorm` in the place of PyTorch's, and those that drop and add first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import flashtile


class _Norm(nn.Module):
    """The parts that layer norm and RMS norm share: the normalised shape, and parameters of it."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    eps: Any

    def __init__(
        self, normalized_shape: int | Sequence[int], elementwise_affine: bool, bias: bool,
        device: torch.device | str | None, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.elementwise_affine = elementwise_affine
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            parameter = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _flat(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x with the normalised dimensions as one, and the parameters likewise."""
        dimensions = len(self.normalized_shape)
        if x.shape[-dimensions:] != self.normalized_shape:
            raise ValueError(
                f"input: expected the last dimensions {self.normalized_shape}, got shape {tuple(x.shape)}; "
                "normalized_shape says which they are"
            )
        if dimensions == 1:
            return x, self.weight, self.bias
        weight, bias = (None if p is None else p.flatten() for p in (self.weight, self.bias))
        return x.flatten(-dimensions), weight, bias

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class LayerNorm(_Norm):
    """`torch.nn.LayerNorm` by `flashtile.layer_norm`: the same arguments, the same state-dict keys.

    Args:
        normalized_shape: the last dimensions of the input, which are normalised together.
        eps: added to the variance.
        elementwise_affine: the norm has a weight.
        bias: the norm has a bias, if it has a weight.
        device: device of the parameters.
        dtype: dtype of the parameters; may differ from that of the input.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, elementwise_affine, bias, device, dtype)
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """The norm of `input` `[..., *normalized_shape]`, in its dtype."""
        x, weight, bias = self._flat(input)
        return flashtile.layer_norm(x, weight, bias, self.eps).view(input.shape)


class RMSNorm(_Norm):
    """`torch.nn.RMSNorm` by `flashtile.rms_norm`: the same arguments, the same state-dict keys.

    Args:
        normalized_shape: the last dimensions of the input, which are normalised together.
        eps: added to the mean square. None is the machine epsilon of the dtype of the arithmetic, which is float32 for
            16-bit inputs, as in PyTorch.
        elementwise_affine: the norm has a weight.
        device: device of the weight.
        dtype: dtype of the weight; may differ from that of the input.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float | None = None, elementwise_affine: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, elementwise_affine, False, device, dtype)
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """The norm of `input` `[..., *normalized_shape]`, in its dtype."""
        x, weight, _ = self._flat(input)
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
        return flashtile.rms_norm(x, weight, eps=eps).view(input.shape)


class DropoutAddLayerNorm(_Norm):
    """`flashtile.dropout_add_layer_norm` with weight and bias. It drops in training only.

    Args:
        hidden_size: last dimension of the input.
        prenorm: also return the sum, the residual of the next layer.
        p: probability that an element of x0 is dropped.
        eps: added to the variance.
        residual_in_fp32: without a residual, the sum is float32.
        device: device of the parameters.
        dtype: dtype of the parameters; may differ from that of the input.
    """

    _has_bias = True

    def __init__(
        self, hidden_size: int, prenorm: bool = False, p: float = 0.0, eps: float = 1e-5,
        residual_in_fp32: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, True, self._has_bias, device, dtype)
        self.prenorm, self.p, self.eps, self.residual_in_fp32 = prenorm, p, eps, residual_in_fp32

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """z, or with prenorm (z, x), where `x = dropout(x0) + residual` and z is the norm of x."""
        return flashtile.dropout_add_layer_norm(x0, residual, self.weight, self.bias, **self._options())

    def _options(self) -> dict:
        return {
            "dropout_p": self.p if self.training else 0.0,
            "epsilon": self.eps,
            "prenorm": self.prenorm,
            "residual_in_fp32": self.residual_in_fp32,
        }

    def extra_repr(self) -> str:
        return f"{self.normalized_shape[0]}, prenorm={self.prenorm}, p={self.p}, eps={self.eps}"


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    """`flashtile.dropout_add_rms_norm` with a weight. Arguments as for `DropoutAddLayerNorm`."""

    _has_bias = False

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """z, or with prenorm (z, x), where `x = dropout(x0) + residual` and z is the norm of x."""
        return flashtile.dropout_add_rms_norm(x0, residual, self.weight, **self._options())
