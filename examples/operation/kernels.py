"""The backend for GPUs: the kernels of the gate, and their launches. N = BLOCK_N elements of a tile."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import float32, int64, pointer_to
from flashtile._backends.pipeline import Kernel, Pipeline, launched
from flashtile.ops.common.kernels import tanh
from flashtile.ops.gate.spec import GateGradients, GateSpec

#: Elements of a tile: 16 for each thread of 4 warps, two loads of 16 bytes of a 16-bit tensor.
_BLOCK_N = 2048


@triton.jit
def gate_forward_kernel(x_ptr, y_ptr, out_ptr, size, scale, BLOCK_N: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    x = tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (tanh(x * scale, True) * y).to(out_ptr.dtype.element_ty), mask=place < size)


@triton.jit
def gate_backward_kernel(dout_ptr, x_ptr, y_ptr, dx_ptr, dy_ptr, size, scale, BLOCK_N: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    dout = tl.load(dout_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    gate = tanh(tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32) * scale, True)
    y = tl.load(y_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    dx = dout * y * (1.0 - gate * gate) * scale
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=place < size)
    tl.store(dy_ptr + place, (dout * gate).to(dy_ptr.dtype.element_ty), mask=place < size)


@launched(Tensor)
def forward(inputs: Any, spec: GateSpec, *, at: int, device: torch.device) -> Pipeline:
    return _pipeline("forward", inputs, spec, at, device)


@launched(GateGradients)
def backward(given: Any, spec: GateSpec, *, at: int, device: torch.device) -> Pipeline:
    return _pipeline("backward", given, spec, at, device)


def _pipeline(step: str, tensors: Any, spec: GateSpec, misalignment: int, device: torch.device) -> Pipeline:
    shape, _, dtype = tensors.x
    tensor, size = pointer_to(dtype, power_of_two_factor(misalignment)), torch.Size(shape).numel()
    names = ("x_ptr", "y_ptr", "out_ptr", "dout_ptr", "dx_ptr", "dy_ptr")
    parameters = {**dict.fromkeys(names, tensor), "size": int64(size), "scale": float32(spec.scale)}
    function = gate_forward_kernel if step == "forward" else gate_backward_kernel
    kernel = Kernel(function, parameters, {"BLOCK_N": _BLOCK_N}, programs=-(-size // _BLOCK_N))
    results = ("out",) if step == "forward" else ("dx", "dy")
    return Pipeline(device, {step: kernel}, tensors, dict.fromkeys(results, contiguous(shape, dtype)))
