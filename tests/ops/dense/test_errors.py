"""Bad input: each error names the argument, what was expected, what came and the remedy."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from support.running.each_case import each_case

_FP64, _BF16 = torch.float64, torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=grad)


_DENSE: dict[str, Any] = {"x": zeros(3, 4), "weight": zeros(5, 4, grad=True), "bias": zeros(5)}
BAD_DENSE = [
    (TypeError, {"x": [1.0]}, "x: expected a torch.Tensor", "got list"),
    (TypeError, {"x": zeros(3, 4, dtype=torch.int32)}, "x: expected dtype float16", "int32", "cast"),
    (ValueError, {"x": zeros()}, "x: expected shape (..., features)", "got ()"),
    (TypeError, {"weight": [1.0]}, "weight: expected a torch.Tensor"),
    (ValueError, {"weight": zeros(4, 5)}, "weight: expected shape (rows, 4)", "got (4, 5)"),
    (ValueError, {"weight": zeros(4)}, "weight: expected shape (rows, 4)", "got (4,)"),
    (TypeError, {"weight": zeros(5, 4, dtype=_BF16)}, "weight: expected the dtype of x", "autocast"),
    (ValueError, {"weight": zeros(5, 4, device="meta")}, "weight: expected the device of x"),
    (ValueError, {"bias": zeros(4)}, "bias: expected shape (5,), one for each row", "got (4,)"),
    (TypeError, {"bias": zeros(5, dtype=_FP64)}, "bias: expected the dtype of x"),
    (TypeError, {"return_residual": 1}, "return_residual: expected True or False, got 1"),
    (ValueError, {"main_grad": zeros(4, 5)}, "main_grad: expected shape (5, 4), that of its weight"),
    (TypeError, {"main_grad": zeros(5, 4, dtype=_BF16)}, "main_grad: expected the dtype", "float32"),
    (ValueError, {"main_grad": zeros(5, 4, grad=True)}, "main_grad:", "no gradient", "detach"),
    (ValueError, {"main_grad": zeros(5, 4, device="meta")}, "main_grad: expected the device"),
    (ValueError, {"main_grad": zeros(5, 4), "weight": zeros(5, 4)},
     "main_grad: expected None for a weight that wants no gradient", "requires_grad"),
    (ValueError, {"backend": "cuda"}, "backend: expected one of 'auto'", "got 'cuda'"),
    (ValueError, {"backend": "triton"}, "backend: 'triton' cannot serve this call", "needs a GPU"),
]  # fmt: skip

_MLP: dict[str, Any] = {
    "x": zeros(3, 4), "weight1": zeros(6, 4), "bias1": zeros(6), "weight2": zeros(2, 6), "bias2": zeros(2),
}  # fmt: skip
BAD_MLPS = [
    (TypeError, {"x": zeros(3, 4, dtype=torch.int64)}, "x: expected dtype float16"),
    (ValueError, {"weight1": zeros(6, 3)}, "weight1: expected shape (rows, 4)", "got (6, 3)"),
    (ValueError, {"bias1": zeros(5)}, "bias1: expected shape (6,)", "got (5,)"),
    (ValueError, {"weight2": zeros(2, 5)}, "weight2: expected 6 columns", "gated=False", "got shape (2, 5)"),
    (ValueError, {"weight2": zeros(6)}, "weight2: expected shape (rows, columns)"),
    (ValueError, {"gated": True}, "weight2: expected 3 columns", "gated=True"),
    (ValueError, {"gated": True, "weight1": zeros(5, 4), "bias1": None},
     "weight1: expected an even number of rows with gated=True", "got 5"),
    (ValueError, {"bias2": zeros(6)}, "bias2: expected shape (2,)", "got (6,)"),
    (ValueError, {"activation": "tanh"}, "activation: expected one of 'gelu_tanh'", "got 'tanh'"),
    (TypeError, {"gated": "yes"}, "gated: expected True or False, got 'yes'"),
    (ValueError, {"checkpoint_level": 3}, "checkpoint_level: expected 0", "got 3"),
    (ValueError, {"checkpoint_level": True}, "checkpoint_level: expected 0", "got True"),
    (ValueError, {"checkpoint_level": 1.0}, "checkpoint_level: expected 0", "got 1.0"),
    (ValueError, {"main_grad1": zeros(2, 6)}, "main_grad1: expected shape (6, 4), that of its weight"),
    (ValueError, {"main_grad2": zeros(2, 6)}, "main_grad2: expected None for a weight"),
    (TypeError, {"return_residual": None}, "return_residual: expected True or False"),
    (ValueError, {"backend": ""}, "backend: expected one of"),
]  # fmt: skip

_WGRAD: dict[str, Any] = {"x": zeros(3, 4), "dout": zeros(3, 5)}
BAD_WGRADS = [
    (ValueError, {"dout": zeros(2, 5)}, "dout: expected shape (3, 5), with the rows of x", "got (2, 5)"),
    (TypeError, {"dout": zeros(3, 5, dtype=_BF16)}, "dout: expected the dtype of x", "cast"),
    (ValueError, {"dout": zeros(3, 5, device="meta")}, "dout: expected the device of x"),
    (ValueError, {"x": zeros(3, 4, grad=True)}, "x: expected a tensor that wants no gradient", "no_grad"),
    (ValueError, {"dout": zeros(3, 5, grad=True)}, "dout: expected a tensor that wants no gradient"),
    (ValueError, {"main_grad": zeros(4, 5)}, "main_grad: expected shape (5, 4), that of its weight"),
    (TypeError, {"bias": 1}, "bias: expected True or False, got 1"),
    (ValueError, {"backend": "gpu"}, "backend: expected one of"),
]  # fmt: skip

_CASES = [
    (function, valid, row)
    for function, valid, rows in (
        (flashtile.fused_dense, _DENSE, BAD_DENSE),
        (flashtile.fused_mlp, _MLP, BAD_MLPS),
        (flashtile.linear_bias_wgrad, _WGRAD, BAD_WGRADS),
    )
    for row in rows
]


@each_case("function, valid, row", _CASES)
def test_bad_input(function, valid, row):
    error, changes, *parts = row
    function(**valid)
    with pytest.raises(error) as raised:
        function(**{**valid, **changes})
    assert all(part in str(raised.value) for part in parts), str(raised.value)


def test_double_buffers_take_no_narrow_products_nor_float_buffers_double_ones():
    for narrow, wide in ((torch.float32, _FP64), (_FP64, torch.float32)):
        x, dout = zeros(3, 4, dtype=narrow), zeros(3, 5, dtype=narrow)
        with pytest.raises(TypeError, match="main_grad: expected the dtype of the products"):
            flashtile.linear_bias_wgrad(x, dout, main_grad=zeros(5, 4, dtype=wide))


def test_additions_to_a_buffer_have_no_derivative():
    x, weight = zeros(3, 4, grad=True), zeros(5, 4, grad=True)
    out = flashtile.fused_dense(x, weight, main_grad=zeros(5, 4))
    with pytest.raises(ValueError, match="main_grad: expected None under create_graph=True"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(ValueError, match=r"main_grad: expected None under torch\.func transforms"):
        torch.func.vmap(lambda x: flashtile.fused_dense(x, weight, main_grad=zeros(5, 4)))(x)
    with pytest.raises(ValueError, match=r"backend: expected 'auto' or 'reference' under torch\.func transforms"):
        torch.func.vmap(lambda x: flashtile.fused_dense(x, weight, backend="cpu"))(x)
