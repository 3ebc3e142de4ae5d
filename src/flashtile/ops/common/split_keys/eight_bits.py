"""Numbers of 8 bits on their way to products: in float16, which has each of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(values, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Numbers of 8 bits in float16 or float32; others have DTYPE already. PTX: as in `split_pairs`."""
    if values.dtype == tl.int8:
        # The bits of 1152 + value: a multiprocessor converts a quarter as many integers as it adds.
        if PTX:
            wide = tl.inline_asm_elementwise(
                "{ .reg .b32 all, low, high, offset; xor.b32 all, $2, 0x80808080; mov.b32 offset, 0x64806480;"
                "prmt.b32 low, all, 0x64646464, 0x4140; prmt.b32 high, all, 0x64646464, 0x4342;"
                "sub.f16x2 $0, low, offset; sub.f16x2 $1, high, offset; }",
                "=r,=r,r", [values], dtype=tl.float16, is_pure=True, pack=4,
            ).to(DTYPE)  # fmt: skip
        else:
            bits = values.to(tl.uint8, bitcast=True).to(tl.uint16) ^ 0x6480
            wide = (bits.to(tl.float16, bitcast=True) - 1152.0).to(DTYPE)
    else:
        wide = values.to(DTYPE)
    return wide


@triton.jit
def split_pairs(pairs, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The first and the second of two numbers of 8 bits that were loaded together as a uint16. NVIDIA has an
    instruction for that, which the compiler does not find."""
    if PTX:
        first, second = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=r,=r,r,r", [pairs],
            dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        first = (pairs & 0xFF).to(tl.uint8)
        second = (pairs >> 8).to(tl.uint8)
    return first.to(DTYPE, bitcast=True), second.to(DTYPE, bitcast=True)


@triton.jit
def powers_of_two(largest):
    """Powers of two `[M]`: what numbers up to `largest` `[M]`, float32, are multiples of, and what they are multiplied
    by, so that in float16 the largest is between 4096 and 8192, and others down to 2⁻³⁷ of it are not 0."""
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 13), 253)
    unit = ((exponent - 12) << 23).to(tl.float32, bitcast=True)
    factor = ((266 - exponent) << 23).to(tl.float32, bitcast=True)
    return unit, factor
