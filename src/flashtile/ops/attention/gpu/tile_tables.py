"""The form of all tables of tiles, and those of the portable kernels: one per architecture and kind of call.

No call measures anything; `flashtile tune` does, on demand. Rows of the Hopper tables were measured (H200, bf16, 4
sequences of 4,096 tokens unless said otherwise, heads · head_dim = 2048); `Row.measured` has the reason. Rows of the
others follow from registers and shared memory. A row that does not fit a device's shared memory is shrunk until it
does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Config = TypeVar("Config")


@dataclass(frozen=True)
class Row(Generic[Config]):
    """A row of a table. Its name is that of the table, with its widths. `head_dim`, `head_dim_v`: of the widest heads
    that it holds. `config`: how kernels are cut. `measured`: the figures that justify it, beside those of the next
    best, in the units of the table; "" if it follows from registers and shared memory."""

    head_dim: int
    head_dim_v: int
    config: Config
    measured: str = ""

    def holds(self, head_dim: int, head_dim_v: int) -> bool:
        """Whether it is for such heads."""
        return head_dim <= self.head_dim and head_dim_v <= self.head_dim_v


def first_row(rows: Iterable[Row[Config]], head_dim: int, head_dim_v: int) -> Config:
    """The config of the first row that holds such heads."""
    return next(row.config for row in rows if row.holds(head_dim, head_dim_v))


class TileConfig(NamedTuple):
    """How a kernel is cut.

    Attributes:
        block_m: query rows of a tile.
        block_n: key columns of a tile.
        num_warps: warps per program.
        num_stages: tiles in flight from device memory.
        chunk: columns of the head that are multiplied at a time; 0 = all of them.
        max_registers: of a thread, so that more programs fit a multiprocessor; None = as many as it takes.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    chunk: int = 0
    max_registers: int | None = None


#: Rows by kernel.
Table = dict[str, tuple[Row[TileConfig], ...]]

# fmt: off

#: sm_90, no mask. Two programs or two warpgroups per multiprocessor, so that one multiplies while another
#: exponentiates. Measured: milliseconds of the row, and of the next best.
HOPPER_FULL: Table = {
    "forward": (
        Row(64, 64, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
            measured="1.22; 64 × 64 on 4 warps 1.22, slower at 8,192 tokens"),
        Row(128, 128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
            measured="491 TFLOP/s at 8,192 tokens; 256 × 64 on 16 warps 488, 128 × 128 on 8 457"),
        Row(256, 256, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=2),
            measured="1.01; 32 keys in 3 stages 1.19"),
        Row(512, 512, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2),
            measured="4 heads: 2.18; 64 keys in one stage 2.71, the head in chunks of 64 columns 6.98"),
    ),
    "dq": (
        Row(64, 64, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
            measured="1.28; 4 warps 1.33, 64 rows on 4 warps 1.35"),
        Row(128, 128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
            measured="1.37; 32 keys on 4 warps 1.43"),
        Row(256, 256, TileConfig(block_m=128, block_n=32, num_warps=8, num_stages=3),
            measured="1.40; 64 keys in 1 stage 1.81"),
        Row(512, 512, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1),
            measured="4 heads, with dk/dv: 14.5; in chunks 33.7"),
    ),
    "dkdv": (
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
            measured="1.97; 32 queries 1.97, slower at 8,192 tokens"),
        Row(128, 128, TileConfig(block_m=64, block_n=128, num_warps=8, num_stages=3),
            measured="1.74; 64 keys × 32 queries on 4 warps 1.88"),
        Row(256, 256, TileConfig(block_m=64, block_n=64, num_warps=8, num_stages=2),
            measured="3.61; 32 queries in 3 stages 4.35"),
        Row(512, 512, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=2),
            measured="4 heads at 2,048 tokens, causal, with dq: 1.92; one stage 2.09"),
    ),
}

#: sm_90, a causal mask or a window, long sequences.
HOPPER_BANDED: Table = {
    "forward": (
        Row(64, 64, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
            measured="0.71; 64 × 64 on 4 warps 0.73"),
        Row(128, 128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
            measured="0.65; 128 × 128 on 8 warps 0.67"),
        *HOPPER_FULL["forward"][2:],
    ),
    "dq": (
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3), measured="0.76; 128 rows 0.77"),
        Row(128, 128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
            measured="0.79; 64 × 64 on 4 warps 0.85"),
        *HOPPER_FULL["dq"][2:],
    ),
    "dkdv": HOPPER_FULL["dkdv"],  # (1.10, 1.97 at 8,192 tokens, 1.92; 64 keys × 32 queries 1.10, 2.13)
}

#: sm_90, a causal mask or a window, short sequences: small tiles waste less at the diagonal.
HOPPER_BANDED_SHORT: Table = {
    "forward": (
        Row(128, 128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
            measured="1,024 tokens: 0.23 and 0.21; 128 rows 0.24 and 0.23"),
        *HOPPER_FULL["forward"][2:],
    ),
    "dq": HOPPER_BANDED["dq"],
    "dkdv": (
        Row(128, 128, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=3),
            measured="1,024 tokens: 0.35 and 0.34; the long rows 0.37 and 0.36"),
        *HOPPER_FULL["dkdv"][2:],
    ),
}

#: sm_90, all sequences in one tile, heads up to 64 columns: many small programs fill a multiprocessor. Milliseconds for
#: 4,096 sequences of 49 tokens, 6 heads of 32.
HOPPER_SHORT: Table = {
    "forward": (
        Row(64, 64, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2),
            measured="0.14; 128 × 64 on 8 warps 0.32"),
    ),
    # One tile of queries and one of keys, so that this kernel computes dk and dv too.
    "dq": (
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=1),
            measured="0.33; by two kernels 0.51, with the tiles of longer sequences 0.73"),
    ),
    "dkdv": (Row(64, 64, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=1)),),
}

#: sm_100, 16-bit.
SM_100: Table = {
    "forward": (
        Row(64, 64, TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=3)),
        Row(128, 128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
        Row(256, 256, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)),
        Row(512, 512, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1, chunk=64)),
    ),
    "dq": (
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
        Row(128, 128, TileConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)),
        Row(256, 256, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)),
        Row(512, 512, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
    "dkdv": (
        Row(64, 64, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=3),
            measured="64 queries spill under a causal mask (sm_80 2,680 bytes a thread, sm_86 312)"),
        Row(128, 128, TileConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)),
        Row(256, 256, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
}

#: sm_80, 16-bit: predictions (`tuning/predict.py`) from registers, spills and shared memory as Triton 3.6 compiles them
#: for a causal mask. Each warp takes 16 rows of the program's own, so eight warps would compute 64 rows twice. Beside
#: the rows: time by the model relative to the best candidate on an A100 and, shrunk, on an RTX 4090.
SM_80: Table = {
    "forward": (
        # 165 registers, no spills (1.00, 1.00). 128 queries: 255 registers, a score function spills 280 bytes.
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
        *SM_100["forward"][1:],
    ),
    "dq": (
        SM_100["dq"][0],
        # 176 registers, no spills (1.00, 1.00). 64 keys on 8 warps: 1.58.
        Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=3)),
        # 255 registers, no spills (1.00, 1.00). On 8 warps: 1.50.
        Row(256, 256, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)),
        SM_100["dq"][3],
    ),
    "dkdv": (
        SM_100["dkdv"][0],
        # 184 registers, no spills (1.14, 1.10). 64 keys spill, or take 8 warps.
        Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)),
        # 184 registers, no spills (1.00).
        Row(256, 256, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)),
        SM_100["dkdv"][3],
    ),
}

#: sm_86, sm_89 and sm_120, 16-bit: 99 KiB for a program. Other rows of sm_80 shrink to it. Predictions, as above.
SM_86: Table = {
    **SM_80,
    "dkdv": (
        SM_80["dkdv"][0],
        # 180 registers, 88,064 bytes, no spills with any feature (1.00).
        Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=3)),
        # 253 registers, 84,224 bytes, no spills (1.07). 32 × 32 on 8 warps, to which the row of sm_80 shrinks: 1.68.
        Row(256, 256, TileConfig(block_m=16, block_n=64, num_warps=8, num_stages=2)),
        SM_80["dkdv"][3],
    ),
}

#: AMD CDNA, 16-bit. Loads go through registers there, so more stages cost registers, not shared memory.
AMD: Table = {
    "forward": (
        Row(64, 64, TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=2)),
        Row(128, 128, TileConfig(block_m=128, block_n=32, num_warps=4, num_stages=2)),
        Row(256, 256, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1)),
        Row(512, 512, TileConfig(block_m=32, block_n=16, num_warps=4, num_stages=1, chunk=64)),
    ),
    "dq": (
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)),
        Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1)),
        Row(256, 256, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1, chunk=64)),
    ),
    "dkdv": (
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)),
        Row(128, 128, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=1)),
        Row(256, 256, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1, chunk=64)),
    ),
}

#: AMD RDNA, 16-bit. A program of as many warps has half the threads of CDNA, and a thread half the registers: these
#: are the largest tiles that compile without spills, or (dq and dk/dv of 128 and 256 columns) with the fewest.
RDNA: Table = {
    "forward": (
        Row(64, 64, TileConfig(block_m=128, block_n=32, num_warps=8, num_stages=1)),
        Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1)),
        Row(256, 256, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=32)),
    ),
    "dq": (
        Row(64, 64, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1)),
        Row(128, 128, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1)),
        Row(256, 256, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=32)),
    ),
    "column_sums": (
        Row(64, 64, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1)),
        Row(256, 256, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=32)),
    ),
    "dkdv": (
        Row(64, 64, TileConfig(block_m=16, block_n=128, num_warps=8, num_stages=1)),
        Row(128, 128, TileConfig(block_m=16, block_n=32, num_warps=8, num_stages=1)),
        Row(256, 256, TileConfig(block_m=16, block_n=32, num_warps=8, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=32)),
    ),
}

#: sm_90, scores with a mask and no bias, heads up to 128 columns. Measured with a bias, as the rows of `HOPPER_BIAS`
#: were before they changed; a mask alone was not.
HOPPER_MASK: Table = {
    "forward": (
        Row(64, 64, TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=3)),
        Row(128, 128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
    ),
    "dq": (
        Row(64, 64, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=3)),
        Row(128, 128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
    ),
    "dkdv": (Row(128, 128, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=2)),),
}

#: sm_90, scores with a bias, heads up to 128 columns (4 sequences of 4,096 tokens, 16 heads, a bias shared by the
#: sequences).
HOPPER_BIAS: Table = {
    "forward": (
        Row(64, 64, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
            measured="0.785; 64 × 64 on 4 warps 0.804, 128 × 64 on 4 0.850"),
        Row(128, 128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
            measured="1.37; 64 × 64 on 4 warps in 2 stages 1.60, 128 × 128 on 8 1.65"),
    ),
    "dq": (
        Row(64, 64, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=3),
            measured="1.03; 128 × 32 on 8 warps 1.05, 64 keys 1.13"),
        Row(128, 128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
            measured="1.55; 64 × 64 on 4 warps in 2 stages 1.80"),
    ),
    "dkdv": (
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
            measured="1.37; 64 × 128 on 8 warps 1.45, 32 × 64 1.63"),
        Row(128, 128, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=3),
            measured="2.31; 32 × 128 on 8 warps 2.49, 2 stages 2.77"),
    ),
    "dbias": (
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2),
            measured="2.05; 3 stages 2.06, 128 × 64 on 8 warps of 128 registers 2.18"),
        Row(128, 128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=2, max_registers=128),
            measured="two programs on each multiprocessor 2.26; 64 × 64 on 4 warps 2.43, without the limit 3.34"),
    ),
}

#: sm_90, a block mask, heads up to 128 columns (4 sequences of 4,096 tokens, a quarter of the tiles, all partial).
HOPPER_BLOCKS: Table = {
    "forward": (
        Row(128, 128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
            measured="0.30 and 0.48; 128 queries on 8 warps 0.32 and 0.55"),
    ),
    "dq": (
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
            measured="0.26; 128 queries on 8 warps 0.36"),
        Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=3),
            measured="0.51; 128 × 64 on 8 warps 0.57"),
    ),
    "dkdv": HOPPER_FULL["dkdv"],  # (0.31 and 0.55; 32 queries 0.37 and 0.58)
}

#: The gradient of the bias, 16-bit, everywhere else: as many accumulators as dk/dv, and nothing resident.
BIAS_GRADIENT: Table = {
    "dbias": (
        Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)),
        Row(128, 128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)),
        Row(256, 256, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1)),
        Row(512, 512, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1, chunk=64)),
    ),
}

#: Column sums, 16-bit, everywhere but on RDNA; not measured. 64 rows of the product, the fewest that Hopper's take.
COLUMN_SUMS: Table = {
    "column_sums": (
        Row(128, 128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
        Row(256, 256, TileConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)),
        Row(512, 512, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1, chunk=64)),
    ),
}

#: float32 in IEEE products, which run on the ordinary units, out of registers. TF32 takes the same rows.
FLOAT32: Table = {
    "forward": (
        Row(64, 64, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)),
        Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)),
        Row(256, 256, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=2)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
    "dq": (
        Row(64, 64, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)),
        Row(128, 128, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)),
        Row(256, 256, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
    "dkdv": (
        Row(64, 64, TileConfig(block_m=32, block_n=64, num_warps=8, num_stages=2)),
        Row(128, 128, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)),
        Row(256, 256, TileConfig(block_m=16, block_n=32, num_warps=8, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
    "column_sums": (
        Row(64, 64, TileConfig(block_m=32, block_n=64, num_warps=8, num_stages=2)),
        Row(128, 128, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)),
        Row(256, 256, TileConfig(block_m=16, block_n=32, num_warps=8, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1, chunk=32)),
    ),
    "dbias": (
        Row(128, 128, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)),
        Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1, chunk=64)),
    ),
}

#: The same for NVIDIA's cards but sm_90, as compiled with Triton 3.6: predictions. Beside the rows: spilled bytes of a
#: thread on sm_86 with a causal mask, here and as above.
FLOAT32_CUDA: Table = {
    **FLOAT32,
    "forward": (
        Row(64, 64, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)),  # 0, and 96 without the mask
        *FLOAT32["forward"][1:],
    ),
    # With a second stage tiles come to shared memory, with one through registers.
    "dq": (
        *FLOAT32["dq"][:2],
        Row(256, 256, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=2)),  # 0 and 2,216
        FLOAT32["dq"][3],
    ),
    "dkdv": (
        *FLOAT32["dkdv"][:2],
        Row(256, 256, TileConfig(block_m=16, block_n=32, num_warps=8, num_stages=2)),  # 0 and 1,968
        FLOAT32["dkdv"][3],
    ),
}

#: float32 and 16-bit on sm_75, where nothing comes to shared memory but through registers: as compiled, predictions.
FLOAT32_SM_75: Table = {
    **FLOAT32_CUDA,
    "dq": (
        Row(64, 64, TileConfig(block_m=64, block_n=16, num_warps=8, num_stages=1)),  # 0 and 200
        *FLOAT32["dq"][1:],
    ),
    "dkdv": (
        Row(64, 64, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1)),  # 0 and 296
        *FLOAT32["dkdv"][1:],
    ),
}

#: float32 as six products of bfloat16, on the architectures where that is faster than IEEE products: on sm_90 4 to 6
#: times. Milliseconds for 4 sequences of 2,048 tokens and 16 heads on an H100, full / causal, beside the next best
#: tiles. Past 128 columns: the tiles with the fewest spills, because operands are split in registers. Rows of sm_80 are
#: predictions (`tuning.predict`) among tiles that spill as little: the six products have 2.7 times the rate of ordinary
#: units. On sm_86, sm_89 and sm_120 they have a third of it, and on sm_100 their accumulators do not fit tensor memory.
FLOAT32_SPLIT: dict[str, Table] = {
    "sm_80": {
        "forward": (
            Row(64, 64, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)),
            Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1, chunk=64)),
            Row(256, 256, TileConfig(block_m=64, block_n=16, num_warps=4, num_stages=1, chunk=64)),
            Row(512, 512, TileConfig(block_m=64, block_n=16, num_warps=8, num_stages=1, chunk=64)),
        ),
        "dq": (
            Row(64, 64, TileConfig(block_m=64, block_n=16, num_warps=4, num_stages=2)),
            Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1, chunk=32)),
            Row(256, 256, TileConfig(block_m=32, block_n=16, num_warps=4, num_stages=1, chunk=64)),
            Row(512, 512, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1, chunk=64)),
        ),
        "dkdv": (
            Row(64, 64, TileConfig(block_m=16, block_n=64, num_warps=4, num_stages=2)),
            Row(128, 128, TileConfig(block_m=16, block_n=64, num_warps=4, num_stages=1, chunk=64)),
            Row(256, 256, TileConfig(block_m=16, block_n=64, num_warps=8, num_stages=1, chunk=64)),
            Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
        ),
        "column_sums": FLOAT32["column_sums"],
        "dbias": (
            Row(64, 64, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1)),
            Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1, chunk=32)),
            Row(512, 512, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1, chunk=64)),
        ),
    },
    "sm_90": {
        "forward": (
            Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=1),
                measured="1.23 / 0.71; a second stage 1.27 / 0.73"),
            Row(128, 128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=1),
                measured="2.10 / 1.22; twice the queries 2.15 / 1.32"),
            Row(256, 256, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1, chunk=64)),
            Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
        ),
        "dq": (
            Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=1),
                measured="1.49 / 0.88; twice the queries 1.59 / 0.96"),
            Row(128, 128, TileConfig(block_m=128, block_n=32, num_warps=8, num_stages=1),
                measured="3.45 / 2.01; 64 × 16 4.98 / 2.79"),
            Row(256, 256, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1, chunk=64)),
            Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
        ),
        "dkdv": (
            Row(64, 64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=1),
                measured="2.31 / 1.31; twice the keys the same"),
            Row(128, 128, TileConfig(block_m=16, block_n=64, num_warps=4, num_stages=1),
                measured="6.68 / 4.16; twice the keys 7.09 / 4.71"),
            Row(256, 256, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1, chunk=64)),
            Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
        ),
        "column_sums": FLOAT32["column_sums"],
        "dbias": (
            Row(64, 64, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)),
            Row(128, 128, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1, chunk=64)),
            Row(512, 512, TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1, chunk=64)),
        ),
    },
}
