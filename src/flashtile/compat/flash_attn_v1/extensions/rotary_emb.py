"""rotary_emb: the rotation of two halves, by PyTorch operations."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def apply_rotary(x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor, out1: Tensor, out2: Tensor, conj: bool) -> None:
    """Writes `x1 cos - x2 sin` to out1 and `x1 sin + x2 cos` to out2, with conj the rotation back.

    All have one shape, or broadcast to it; out1 and out2 may be x1 and x2. Arithmetic is float32 (float64 for float64).
    """
    wide = torch.promote_types(x1.dtype, torch.float32)
    a, b, cos, sin = (t.to(wide) for t in (x1, x2, cos, sin))
    sin = -sin if conj else sin
    first, second = a * cos - b * sin, a * sin + b * cos
    out1.copy_(first)
    out2.copy_(second)
