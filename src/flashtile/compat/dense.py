"""flash_attn.ops.fused_dense, ops.triton.linear and ops.triton.mlp over `flashtile.fused_dense` and `fused_mlp`. Layers
that processes share (`process_group`) are those of flashtile.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile import modules
from flashtile.compat.activations import gelu_bwd, gelu_fwd, sqrelu_bwd, sqrelu_fwd
from flashtile.compat.adapter import refuse
from flashtile.compat.signatures import VERSION_2

#: The activations of flash_attn in the words of flashtile.
_ACTIVATIONS = {"gelu_approx": "gelu_tanh", "relu": "relu", "sqrelu": "squared_relu"}
#: The activations of ops.triton.linear, and the gradient of the argument from (gradient of the result, argument).
_WITH_GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Any], Tensor]]] = {
    "id": (lambda x: x, lambda g, x: g),
    "gelu": (F.gelu, lambda g, x: torch.ops.aten.gelu_backward(g, x)),
    "gelu_approx": (gelu_fwd, gelu_bwd),
    "squared_relu": (sqrelu_fwd, sqrelu_bwd),
}


def _chosen(activation: str, known: dict[str, Any]) -> Any:
    if activation not in known:
        raise ValueError(f"activation: expected one of {', '.join(map(repr, known))}, got {activation!r}")
    return known[activation]


fused_dense_func = flashtile.fused_dense


def fused_mlp_func(
    save_pre_act: bool, activation: str, checkpoint_level: int, return_residual: bool, **tensors: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear layer, activation, linear layer.

    Args:
        x: `[..., in]`; weight1 `[hidden, in]`, weight2 `[out, hidden]`, and their biases.
        activation: "gelu_approx", "relu" or "sqrelu".
        save_pre_act: False says that there will be no backward; a gradient must not be wanted then.
        checkpoint_lvl: what is kept for the backward, 0 to 2; see `flashtile.fused_mlp`.
        heuristic, sequence_parallel: nothing depends on them here; process_group must be None.
    """
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors.values())
    if not save_pre_act and wanted:
        refuse("save_pre_act", "True where a gradient is wanted", False, "call it under torch.no_grad()")
    options: dict[str, Any] = {"activation": _chosen(activation, _ACTIVATIONS), "return_residual": return_residual}
    return flashtile.fused_mlp(**tensors, **options, checkpoint_level=checkpoint_level)


class FusedMLP(modules.FusedMlp):
    """`flashtile.modules.FusedMlp`: linear layer, activation, linear layer. `activation` and `heuristic` are those of
    `fused_mlp_func`, and `checkpoint_lvl` is `checkpoint_level` there."""

    def __init__(self, activation: str, heuristic: int | str, **given: Any) -> None:
        super().__init__(activation=_chosen(activation, _ACTIVATIONS), **given)
        self.heuristic = heuristic


@torch.no_grad()
def triton_linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_act_input: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`act(x weightᵀ + bias)`, which autograd does not record; with save_act_input also the argument of the activation.

    x is `[..., in]`, weight `[out, in]` in x's dtype, bias `[out]` or None for 0, and activation "id", "gelu",
    "gelu_approx" (the tanh approximation) or "squared_relu".
    """
    function, _ = _chosen(activation, _WITH_GRADIENTS)
    before = flashtile.fused_dense(x, weight, bias)
    out = function(before)
    return (out, before) if save_act_input else out


@torch.no_grad()
def triton_dgrad_act(grad_output: Tensor, weight: Tensor, activation: str, act_input: Tensor | None) -> Tensor:
    """`(grad_output weight) · act'(act_input)`: the gradient of what the activation before a linear layer was taken of.

    grad_output is `[..., out]`, weight `[out, in]`, activation as in `triton_linear_act`, and act_input `[..., in]`,
    which "id" does not need.
    """
    _, gradient = _chosen(activation, _WITH_GRADIENTS)
    if act_input is None and activation != "id":
        remedy = "it is what triton_linear_act returns with save_act_input=True"
        refuse("act_input", f"a tensor beside activation {activation!r}", None, remedy)
    return gradient(grad_output @ weight, act_input)


def fused_dense_sqrelu_dense_function(**given: Any) -> Any:
    """`relu(x weight1ᵀ + bias1)² weight2ᵀ + bias2`; shapes and checkpoint_lvl as in `fused_mlp_func`."""
    return flashtile.fused_mlp(**given, activation="squared_relu")


class FusedDenseSqreluDense(modules.FusedMlp):
    """`flashtile.modules.FusedMlp` with the square of ReLU; `bias1` and `bias2` must be True."""

    def __init__(self, **given: Any) -> None:
        super().__init__(activation="squared_relu", **given)


VERSION_2.serve(globals())
