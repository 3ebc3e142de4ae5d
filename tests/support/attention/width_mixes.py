"""Calls in which heads of q and k differ in width from those of v, for the machine code of the portable kernels.

Three things decide how a tile lies in shared memory: its width up to 64 columns, which is its swizzle; whether it is
wider than that; and whether it is copied there asynchronously or goes through registers. Tiles go through registers if
rows do not begin at multiples of 4 bytes, which odd widths, strides and addresses cause. They also do if operands have
8 bits, and if float32 is split into three parts.
"""

from __future__ import annotations

from itertools import permutations

import torch

from support.compilation.machine_code import Call

_CAUSAL = Call(window_right=0)
#: Heads of one column less than tiles of 32, 64 and 128 bytes, and of several times 128.
_ODD = (15, 31, 63, 129)
_NARROW = _ODD[:3]


def _calls(pairs: list[tuple[int, int]], call: Call = _CAUSAL) -> dict[str, Call]:
    return {f"{d}x{e}": call._replace(head_dim=d, head_dim_v=e) for d, e in pairs}


def _prefixed(name: str, calls: dict[str, Call]) -> dict[str, Call]:
    return {f"{name}-{pair}": call for pair, call in calls.items()}


_MOVED = _CAUSAL._replace(misalignment=2)
_PACKED = _CAUSAL._replace(sequences=3)
_FP8 = _CAUSAL._replace(dtype=torch.float8_e4m3fn)
_FP32 = _CAUSAL._replace(dtype=torch.float32)
_TF32 = _FP32._replace(allow_tf32=True)

#: Mixes of the forward: every combination through registers, dense and packed, and every swizzle for copies.
FORWARD_MIXES = (
    _calls(list(permutations(_ODD, 2)))
    | _prefixed("packed", _calls(list(permutations(_NARROW, 2)), _PACKED))
    | _prefixed("copied", _calls(list(permutations((16, 32, 64), 2))))
    | _prefixed("moved", _calls([(64, 32), (16, 64)], _MOVED))
    | _prefixed("fp8", _calls([(64, 16), (32, 128)], _FP8))
    | _prefixed("tf32", _calls([(64, 16), (16, 64)], _TF32))
    | _prefixed("fp32", _calls([(15, 31), (63, 15), (24, 129)], _FP32))
)
#: Mixes of dq and dk/dv, which keep all tiles of a step on chip together: each width on either side.
BACKWARD_MIXES = (
    _calls([(15, 31), (31, 63), (63, 15), (15, 129), (129, 15), (255, 63)])
    | _prefixed("tf32", _calls([(63, 15)], _TF32))
    | _prefixed("fp32", _calls([(24, 40), (63, 15), (15, 129)], _FP32))
)
#: Mixes of the gradient of the bias, likewise.
BIAS_MIXES = _calls([(15, 63), (63, 15), (129, 31)]) | _prefixed("fp32", _calls([(24, 40), (129, 31)], _FP32))

#: Mixes that `tools/compile_versions.py` compiles and the tests do not. In Triton's intermediate code almost all their
#: tiles lie as those of another mix, and another is packed, copied or moved as they are.
FORWARD_REPEATS = {
    *("15x129", "31x129", "63x31", "129x15", "129x31", "129x63"),
    *("packed-15x31", "packed-15x63", "packed-63x15", "packed-31x15", "packed-31x63", "packed-63x31"),
    *("copied-16x32", "copied-32x64", "copied-64x16", "copied-64x32"),
    *("moved-16x64", "moved-64x32", "copied-16x64", "fp8-64x16", "tf32-16x64", "fp32-15x31"),
}
_BACKWARD_REPEATS = {"129x15", "fp32-24x40"}
#: dq and dk/dv load the same tiles: what one of them is compiled for is left out of the other.
DQ_REPEATS = _BACKWARD_REPEATS | {"31x63", "15x129", "fp32-63x15", "tf32-63x15"}
DKDV_REPEATS = _BACKWARD_REPEATS | {"15x31", "255x63", "fp32-15x129"}
BIAS_REPEATS = {"15x63", "63x15", "fp32-24x40", "fp32-129x31"}
