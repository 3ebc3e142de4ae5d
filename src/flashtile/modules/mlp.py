"""Linear layers and perceptrons as modules: fused ones over public functions, and plain ones for any activation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile.modules.layers import check_sizes, computes_only

#: The activations of `flashtile.fused_mlp`, for layers that are called.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}

#: Hidden features are rounded up to it where they are not given: matrix products like multiples of their tiles.
_MULTIPLE_OF = 128


class FusedDense(nn.Linear):
    """`torch.nn.Linear` by `flashtile.fused_dense`: the same arguments, the same state-dict keys.

    Args:
        in_features: last dimension of the input.
        out_features: last dimension of the output.
        bias: the layer has a bias.
        return_residual: also return the input. Its gradient is added inside the product of the layer's backward.
        device: device of the parameters.
        dtype: dtype of the parameters, which is that of the input, or a wider one under `torch.autocast`.
        accumulate_main_grad: the backward adds the weight's gradient to the buffer `weight.main_grad`, which must exist
            by then, and leaves `weight.grad` unchanged.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, return_residual: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, accumulate_main_grad: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.return_residual = return_residual
        self.accumulate_main_grad = accumulate_main_grad

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """`[..., in_features]` -> `[..., out_features]`; with return_residual the pair of it and the input."""
        main_grad = _main_grad("weight", self.weight) if self.accumulate_main_grad else None
        return flashtile.fused_dense(
            input, self.weight, self.bias, return_residual=self.return_residual, main_grad=main_grad
        )


class _Perceptron(nn.Module):
    """Two linear layers, `fc1` with a row or two for each hidden feature, and `fc2`."""

    activation: Any

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None, biases: tuple[bool, bool], gated: bool,
        return_residual: bool, **where: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        out_features = in_features if out_features is None else out_features
        check_sizes(in_features=in_features, hidden_features=hidden_features, out_features=out_features)
        self.gated, self.return_residual = gated, return_residual
        rows = 2 * hidden_features if gated else hidden_features
        self.fc1 = nn.Linear(in_features, rows, bias=biases[0], **where)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=biases[1], **where)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """`[..., in_features]` -> `[..., out_features]`; with return_residual the pair of it and x."""
        out = self._layers(x, self.activation)
        return (out, x) if self.return_residual else out

    def _layers(self, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        hidden = self.fc1(x)
        if not self.gated:
            return self.fc2(activation(hidden))
        values, gates = _halves(self.fc1, hidden)
        return self.fc2(values * activation(gates))


class Mlp(_Perceptron):
    """Linear layer, any activation, linear layer, by PyTorch's own layers `fc1` and `fc2`.

    Args:
        in_features: last dimension of the input.
        hidden_features: width between the layers; default four times in_features.
        out_features: last dimension of the output; default in_features.
        activation: a function of a tensor.
        bias1: fc1 has a bias.
        bias2: fc2 has a bias.
        return_residual: also return the input.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu, bias1: bool = True, bias2: bool = True,
        return_residual: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        hidden = _hidden_features(in_features, False) if hidden_features is None else hidden_features
        biases = bias1, bias2
        super().__init__(in_features, hidden, out_features, biases, False, return_residual, device=device, dtype=dtype)
        self.activation = activation


class GatedMlp(_Perceptron):
    """A perceptron with gates, `fc2(values · activation(gates))`, by PyTorch's own layers.

    The first half of the rows of `fc1` computes the values, the second half the gates, as in `torch.nn.functional.glu`.

    Args:
        in_features: last dimension of the input.
        hidden_features: width between the layers, rounded up to multiple_of. The default is 8/3 of in_features, which
            has as many parameters as four times in_features without gates.
        out_features: last dimension of the output; default in_features.
        activation: activation of the gates, a function of a tensor; `F.silu` makes it SwiGLU, `F.gelu` GEGLU.
        bias1: fc1 has a bias.
        bias2: fc2 has a bias.
        multiple_of: the hidden features are rounded up to a multiple of it.
        return_residual: also return the input.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Reference:
        Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.sigmoid, bias1: bool = True, bias2: bool = True,
        multiple_of: int = _MULTIPLE_OF, return_residual: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        hidden = _rounded_up(8 * in_features // 3 if hidden_features is None else hidden_features, multiple_of)
        biases = bias1, bias2
        super().__init__(in_features, hidden, out_features, biases, True, return_residual, device=device, dtype=dtype)
        self.activation = activation


class FusedMlp(_Perceptron):
    """A perceptron by `flashtile.fused_mlp`, with the keys of `Mlp`, or with gates the keys and rows of `GatedMlp`.

    `fc1` and `fc2` hold the parameters, and are not called as long as both are linear layers and nothing else. If one
    has hooks (as under FSDP), or another layer is in its place (such as an adapter), the module calls both, as `Mlp`
    and `GatedMlp` do. A checkpoint_level above 0 then computes everything again in the backward.

    Args:
        in_features: last dimension of the input.
        hidden_features: width between the layers. The default is four times in_features, and with gates 8/3 of it
            rounded up to a multiple of 128.
        out_features: last dimension of the output; default in_features.
        bias1: fc1 has a bias.
        bias2: fc2 has a bias.
        activation: a name that `flashtile.fused_mlp` knows.
        checkpoint_level: what is kept for the backward: 0 = everything, 1 = no activation, 2 = nothing between the
            layers.
        gated: use gates.
        return_residual: also return the input. Its gradient is added inside the product of the first layer's backward.
        device: device of the parameters.
        dtype: dtype of the parameters, which is that of the input, or a wider one under `torch.autocast`.
        accumulate_main_grad: as for `FusedDense`, for both weights.
    """

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None, bias1: bool = True,
        bias2: bool = True, activation: str = "gelu_tanh", checkpoint_level: int = 0, gated: bool = False,
        return_residual: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        accumulate_main_grad: bool = False,
    ) -> None:  # fmt: skip
        hidden = _hidden_features(in_features, gated) if hidden_features is None else hidden_features
        biases = bias1, bias2
        super().__init__(in_features, hidden, out_features, biases, gated, return_residual, device=device, dtype=dtype)
        self.activation = activation
        self.checkpoint_level = checkpoint_level
        self.accumulate_main_grad = accumulate_main_grad

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """`[..., in_features]` -> `[..., out_features]`; with return_residual the pair of it and x."""
        fc1, fc2 = self.fc1, self.fc2
        if not all(computes_only(layer, nn.Linear, FusedDense) for layer in (fc1, fc2)):
            return self._called(x)
        buffers: dict[str, Any] = {}
        if self.accumulate_main_grad:
            buffers["main_grad1"] = _main_grad("fc1.weight", fc1.weight)
            buffers["main_grad2"] = _main_grad("fc2.weight", fc2.weight)
        return flashtile.fused_mlp(
            x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, activation=self.activation, gated=self.gated,
            checkpoint_level=self.checkpoint_level, return_residual=self.return_residual, **buffers,
        )  # fmt: skip

    def _called(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The same by calls of both layers."""
        if self.accumulate_main_grad:
            raise TypeError(
                "fc1, fc2: expected torch.nn.Linear without hooks with accumulate_main_grad=True, got "
                f"{type(self.fc1).__qualname__} and {type(self.fc2).__qualname__}; what is called has its gradients in "
                "grad"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {tuple(ACTIVATIONS)}, got {self.activation!r}")
        activation = ACTIVATIONS[self.activation]
        level = self.checkpoint_level and torch.is_grad_enabled()
        out = checkpoint(self._layers, x, activation, use_reentrant=False) if level else self._layers(x, activation)
        return (out, x) if self.return_residual else out

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, checkpoint_level={self.checkpoint_level}, gated={self.gated}"


def _halves(fc1: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    """Values and gates of what fc1 returned."""
    if isinstance(fc1, nn.Linear) and hidden.shape[-1] != fc1.out_features:
        raise ValueError(
            f"fc1: expected all {fc1.out_features} values and gates, got {hidden.shape[-1]}, of which a plan with "
            "ColwiseParallel makes values of some features and gates of others; use flashtile.distributed.MlpParallel"
        )
    return hidden.chunk(2, dim=-1)


def _hidden_features(in_features: int, gated: bool) -> int:
    return _rounded_up(8 * in_features // 3, _MULTIPLE_OF) if gated else 4 * in_features


def _rounded_up(features: int, multiple_of: int) -> int:
    return -(-features // multiple_of) * multiple_of


def _main_grad(name: str, weight: Tensor) -> Tensor | None:
    """The buffer of a weight that takes a gradient."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            f"{name}: expected an attribute main_grad with accumulate_main_grad=True, got none; set it to a buffer, "
            "such as torch.zeros_like(weight, dtype=torch.float32)"
        )
    return main_grad
