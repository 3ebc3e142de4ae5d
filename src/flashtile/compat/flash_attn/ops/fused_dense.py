"""flash_attn.ops.fused_dense over `flashtile.fused_dense` and `fused_mlp`, on one device.

Layers that processes share (`process_group`) are those of flashtile.distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import flashtile
from flashtile import modules
from flashtile.compat.arguments import refuse, refuse_given

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The activations of flash_attn in the words of flashtile.
_ACTIVATIONS = {"gelu_approx": "gelu_tanh", "relu": "relu", "sqrelu": "squared_relu"}
_ONE_DEVICE = "these layers compute on one device"


def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: bool = False,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """A linear layer, `x weightᵀ + bias`; with return_residual also x. `sequence_parallel` belongs to process_group."""
    refuse_given(_ONE_DEVICE, process_group=process_group)
    return flashtile.fused_dense(x, weight, bias, return_residual=return_residual)


class FusedDense(modules.FusedDense):
    """`flashtile.modules.FusedDense`: a linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, return_residual, device, dtype)

    def forward(  # type: ignore[override]
        self, x: Tensor, process_group: ProcessGroup | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`[..., in_features] -> [..., out_features]`; with return_residual also x."""
        refuse_given(_ONE_DEVICE, process_group=process_group)
        return super().forward(x)


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int = 0,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear layer, activation, linear layer.

    Args:
        x: `[..., in]`; weight1 `[hidden, in]`, weight2 `[out, hidden]`, and their biases.
        activation: "gelu_approx", "relu" or "sqrelu".
        save_pre_act: False says that there will be no backward; a gradient must not be wanted then.
        return_residual: also return x.
        checkpoint_lvl: what is kept for the backward, 0 to 2; see `flashtile.fused_mlp`.
        heuristic: chose among matrix products of one library; PyTorch's own are used, and nothing depends on it.
        sequence_parallel: belongs to process_group, which must be None.
    """
    refuse_given(_ONE_DEVICE, process_group=process_group)
    given = (x, weight1, weight2, bias1, bias2)
    if not save_pre_act and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        refuse("save_pre_act", "True where a gradient is wanted", False, "call it under torch.no_grad()")
    return flashtile.fused_mlp(
        x,
        weight1,
        bias1,
        weight2,
        bias2,
        activation=_activation(activation),
        checkpoint_level=checkpoint_lvl,
        return_residual=return_residual,
    )


class FusedMLP(modules.FusedMlp):
    """`flashtile.modules.FusedMlp`: linear layer, activation, linear layer.

    Args:
        in_features: the last dimension of the input.
        hidden_features: four times in_features where left out.
        out_features: in_features where left out.
        bias1, bias2: the layers have biases.
        activation: "gelu_approx", "relu" or "sqrelu".
        return_residual: also returns the input.
        checkpoint_lvl: what is kept for the backward, 0 to 2.
        heuristic: as `fused_mlp_func`.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            hidden_features,
            out_features,
            bias1,
            bias2,
            _activation(activation),
            checkpoint_lvl,
            return_residual=return_residual,
            device=device,
            dtype=dtype,
        )
        self.heuristic = heuristic

    def forward(self, x: Tensor, process_group: ProcessGroup | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """`[..., in_features] -> [..., out_features]`; with return_residual also x."""
        refuse_given(_ONE_DEVICE, process_group=process_group)
        return super().forward(x)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(map(repr, _ACTIVATIONS))}, got {name!r}")
    return _ACTIVATIONS[name]
