"""flash_attn.ops.triton.mlp over `flashtile.fused_mlp`: a perceptron with the square of ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile import modules
from flashtile.compat.arguments import refuse


def fused_dense_sqrelu_dense_function(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    checkpoint_lvl: int = 0,
) -> Tensor:
    """`relu(x weight1ᵀ + bias1)² weight2ᵀ + bias2`.

    Args:
        x: `[..., in]`; weight1 `[hidden, in]`, weight2 `[out, hidden]`, and their biases.
        checkpoint_lvl: what is kept for the backward, 0 to 2; see `flashtile.fused_mlp`.
    """
    out = flashtile.fused_mlp(
        x, weight1, bias1, weight2, bias2, activation="squared_relu", checkpoint_level=checkpoint_lvl
    )
    assert isinstance(out, Tensor)
    return out


class FusedDenseSqreluDense(modules.FusedMlp):
    """`flashtile.modules.FusedMlp` with the square of ReLU.

    Args:
        in_features: the last dimension of the input.
        hidden_features: four times in_features where left out.
        out_features: in_features where left out.
        bias1, bias2: must be True.
        checkpoint_lvl: what is kept for the backward, 0 to 2.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        checkpoint_lvl: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, bias in (("bias1", bias1), ("bias2", bias2)):
            if not bias:
                refuse(name, "True", bias, "flashtile.modules.FusedMlp also has layers without biases")
        super().__init__(
            in_features, hidden_features, out_features, activation="squared_relu", checkpoint_level=checkpoint_lvl,
            device=device, dtype=dtype,
        )  # fmt: skip
