"""What a thread of a portable kernel may spill, in bytes: the one list that tests and `tools/compile_survey.py` hold.

Measured with Triton 3.6. Other versions assign registers in their own way (decisions/compilers.md).
"""

from __future__ import annotations

import torch

#: What a thread may spill, in bytes, by (kernel, columns of a tile), of a call that is dense or causal and has nothing
#: more; 0 where nothing stands. Measured with Triton 3.6 and rounded up to 64 bytes; dk/dv of 128 and 256 columns on
#: sm_90 with 3.9, which spills more (88 and 256).
_ATTENTION: dict[str, dict[tuple[str, int], int]] = {
    # dk/dv keeps two accumulators, two resident tiles and two score tiles; on sm_90 its rows were measured to be the
    # fastest in spite of these bytes.
    "cuda 16-bit": {
        ("dbias", 64): 64, ("dbias", 128): 64, ("dbias", 256): 64,
        ("dq", 512): 64, ("dkdv", 64): 64, ("dkdv", 128): 128, ("dkdv", 256): 256, ("dkdv", 512): 64,
        ("column_sums", 256): 64, ("short_backward", 32): 64, ("short_backward", 64): 384,
    },
    "cuda float32": {("dq", 512): 64},
    # No tensor-core products (see `choose_tiles`), and 64 KiB of on-chip memory: no tiles in flight either.
    "sm_75 16-bit": {
        ("dq", 128): 256, ("dq", 256): 64, ("dkdv", 128): 320, ("dkdv", 512): 64,
    },
    # Operands are split in registers.
    "sm_80 float32": {
        ("forward", 128): 128, ("forward", 256): 128, ("forward", 512): 128,
        ("dq", 128): 128, ("dq", 256): 64, ("dq", 512): 64,
        ("dkdv", 64): 64, ("dkdv", 128): 448, ("dkdv", 256): 320, ("dkdv", 512): 192,
        ("column_sums", 128): 64, ("column_sums", 256): 64,
    },
    "sm_90 float32": {
        ("forward", 128): 384, ("forward", 256): 256,
        ("dq", 64): 64, ("dq", 128): 128, ("dq", 256): 64, ("dq", 512): 64,
        ("dkdv", 64): 384, ("dkdv", 128): 448, ("dkdv", 256): 384, ("dkdv", 512): 192,
        ("column_sums", 128): 64, ("column_sums", 256): 64,
    },
    "sm_75 float32": {("dq", 128): 192, ("dkdv", 128): 256},
    # Half as many registers in a program as on CDNA.
    "gfx1100 16-bit": {
        ("dq", 128): 64, ("dq", 256): 960, ("dkdv", 64): 64, ("dkdv", 128): 256, ("dkdv", 256): 1216,
    },
    "gfx1100 float32": {
        ("column_sums", 64): 64, ("column_sums", 128): 704, ("column_sums", 256): 192, ("dkdv", 64): 2560,
        ("dkdv", 128): 1920, ("dkdv", 256): 2752, ("dkdv", 512): 384, ("dq", 64): 2240, ("dq", 128): 1792,
        ("dq", 256): 2624, ("forward", 64): 1408, ("forward", 128): 896, ("forward", 256): 512,
    },
    "gfx950 float32": {("dkdv", 64): 256, ("dkdv", 128): 1088},
}  # fmt: skip
# Forward: of 8-bit inputs, whose values are widened early in heads of 64 (`swizzles_differ`).
_ATTENTION["sm_120 16-bit"] = _ATTENTION["cuda 16-bit"] | {("dq", 128): 8, ("forward", 64): 8}


#: The same of a call with packed sequences, a mask, a bias, dropout, a score function, or several of these, where it is
#: more. A score function's own numbers are in registers.
_WITH_FEATURES: dict[str, dict[tuple[str, int], int]] = {
    "cuda 16-bit": {
        ("column_sums", 128): 64, ("column_sums", 512): 64, ("dkdv", 64): 256, ("dkdv", 128): 320, ("dkdv", 256): 128,
        ("dkdv", 512): 64, ("dq", 64): 768, ("dq", 128): 192, ("dq", 256): 768, ("forward", 64): 640,
        ("forward", 128): 64, ("forward", 256): 64,
    },
    "cuda float32": {
        ("column_sums", 256): 64, ("column_sums", 512): 64, ("dbias", 128): 384, ("dbias", 256): 64,
        ("dbias", 512): 64, ("dkdv", 64): 704, ("dkdv", 128): 896, ("dkdv", 256): 384, ("dkdv", 512): 512,
        ("dq", 64): 576, ("dq", 128): 448, ("dq", 256): 64, ("forward", 128): 384, ("forward", 256): 64,
    },
    "sm_80 float32": {
        ("forward", 64): 64, ("forward", 128): 384, ("forward", 256): 576, ("forward", 512): 512,
        ("dq", 64): 64, ("dq", 128): 256, ("dq", 256): 128, ("dq", 512): 128,
        ("dkdv", 128): 576, ("dkdv", 256): 448, ("dkdv", 512): 320,
        ("column_sums", 128): 128, ("dbias", 64): 64, ("dbias", 256): 64, ("dbias", 512): 64,
    },
    "sm_75 float32": {
        ("dkdv", 128): 320, ("dkdv", 512): 384, ("dq", 128): 256, ("dq", 256): 64, ("dq", 512): 64,
        ("forward", 256): 64,
    },
    "sm_75 16-bit": {
        ("dbias", 64): 320, ("dbias", 128): 2176, ("dkdv", 128): 448, ("dkdv", 512): 448, ("dq", 128): 320,
    },
    "gfx1100 16-bit": {
        ("column_sums", 256): 192, ("dbias", 64): 64, ("dbias", 256): 384, ("dkdv", 64): 128, ("dkdv", 128): 448,
        ("dkdv", 256): 1344, ("dq", 128): 192, ("dq", 256): 1088, ("forward", 128): 256, ("forward", 256): 512,
    },
    "gfx1100 float32": {
        ("column_sums", 64): 128, ("column_sums", 128): 768, ("dbias", 64): 320, ("dbias", 128): 1472,
        ("dbias", 256): 768, ("dkdv", 64): 3648, ("dkdv", 128): 1984, ("dkdv", 256): 2880, ("dkdv", 512): 1088,
        ("dq", 128): 1856, ("dq", 256): 2688, ("forward", 64): 1920, ("forward", 256): 1280,
    },
}  # fmt: skip

#: The same of other operations, by (operation, kernel, call of its `test_compile.py`) and architecture; "cuda" and
#: "hip" are those that are not named.
_COMPANIONS: dict[tuple[str, str, str], dict[str, int]] = {
    ("dense", "activate_backward", "misaligned"): {"sm_100": 8},
    ("kv_cache", "attend", "e5m2_pages"): {"gfx1100": 8},
    ("kv_cache", "attend", "int8_rows"): {"gfx1100": 396},
    ("kv_cache", "attend", "int8_rows_packed"): {"cuda": 120, "sm_90": 32, "sm_100": 240},
    ("kv_cache", "attend", "invariant"): {"sm_80": 24},
    ("kv_cache", "attend", "invariant_256"): {"cuda": 80, "sm_90": 128},
    ("kv_cache", "attend", "invariant_float32"): {"cuda": 344, "sm_90": 464, "gfx1100": 924},
    ("kv_cache", "attend", "packed_chunks"): {"sm_120": 8},
    ("kv_cache", "attend", "packed_one_row_pages"): {"sm_120": 8},
    ("layer_norm", "backward", "dropout"): {"cuda": 16},
    ("layer_norm", "backward", "everything"): {"cuda": 16, "sm_120": 32},
    ("layer_norm", "backward", "everything_looped"): {"cuda": 96, "sm_90": 64, "hip": 140},
    ("layer_norm", "backward", "fp32_looped"): {"cuda": 80, "sm_90": 16},
    ("layer_norm", "backward", "odd"): {"sm_80": 8},
    ("softmax", "backward", "causal_looped"): {"sm_100": 8},
}


def attention_spills(arch: str, dtype: torch.dtype, kernel: str, width: int, with_features: bool = False) -> int:
    """Bytes that a kernel of attention may spill. `width`: columns of its tiles."""
    precision = "float32" if dtype is torch.float32 else "16-bit"

    def stated(table: dict[str, dict[tuple[str, int], int]]) -> int:
        of_family = table.get(f"{_family(arch)} {precision}", {})
        return table.get(f"{arch} {precision}", of_family).get((kernel, width), 0)

    return max(stated(_ATTENTION), stated(_WITH_FEATURES) if with_features else 0)


def companion_spills(arch: str, operation: str, kernel: str, call: str) -> int:
    """Bytes that a kernel of another operation may spill."""
    found = _COMPANIONS.get((operation, kernel, call), {})
    return found.get(arch, found.get(_family(arch), 0))


def _family(arch: str) -> str:
    return "cuda" if arch.startswith("sm_") else "hip"
