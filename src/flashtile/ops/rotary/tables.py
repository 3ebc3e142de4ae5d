"""Tables of cosines and sines: frequencies, their scaling to longer contexts, the decay of xPos, and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flashtile.ops.common import checks
from flashtile.ops.common.sizes import differ, exceeds, known


@dataclass(frozen=True)
class RotaryScaling:
    """How angles are computed for contexts that are longer than those of training.

    With `f[i] = base ** (-2i / dim)` the angle of pair `i` at position `p` is `p · f[i]`. The scaling changes `f`:

    - `"linear"`: `f / factor` (Chen et al., "Extending Context Window of Large Language Models via Positional
      Interpolation", 2023);
    - `"ntk"`: the base becomes `base · factor ** (dim / (dim - 2))`: high frequencies stay, the lowest is divided by
      `factor`;
    - `"yarn"`: pairs that turn more than `beta_fast` times over `original_length` keep `f`. Pairs that turn less than
      `beta_slow` times get `f / factor`, with a ramp between the two. cos and sin are multiplied by `attention_factor`
      (Peng, Quesnelle, Fan, Shippole, "YaRN", 2023).

    Attributes:
        kind: which of these methods.
        factor: how many times longer the context is.
        original_length: the context of training (YaRN).
        beta_fast: number of turns above which a pair keeps its frequency (YaRN).
        beta_slow: number of turns below which a pair's frequency is divided by `factor` (YaRN).
        attention_factor: factor on cos and sin (YaRN); None = `0.1 · ln(factor) + 1`.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a value is wrong.
    """

    kind: Literal["linear", "ntk", "yarn"]
    factor: float
    original_length: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "ntk", "yarn"):
            raise ValueError(f"kind: expected 'linear', 'ntk' or 'yarn', got {self.kind!r}")
        if not 1 <= checks.as_float("factor", self.factor) < math.inf:
            raise ValueError(f"factor: expected at least 1, got {self.factor}; it says how many times longer")
        if self.kind != "yarn":
            return
        length = self.original_length
        if length is None or not 0 < checks.as_float("original_length", length) < math.inf:
            raise ValueError(
                f"original_length: expected a positive number for 'yarn', got {length}; it is the context trained on"
            )
        fast, slow = checks.as_float("beta_fast", self.beta_fast), checks.as_float("beta_slow", self.beta_slow)
        if not 0 < slow <= fast < math.inf:
            raise ValueError(
                f"beta_slow, beta_fast: expected turns above 0, the slow ones no more than the fast, got {slow} and "
                f"{fast}; 1 and 32 are usual"
            )
        if self.attention_factor is not None:
            checks.finite_float("attention_factor", self.attention_factor, "leave it out for the usual one")

    @property
    def magnitude(self) -> float:
        """The factor on cos and sin."""
        if self.kind != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor


def rotary_frequencies(
    dim: int, base: float = 10000.0, scaling: RotaryScaling | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Radians per position of each pair: float32 `[dim / 2]`, computed in float64.

    Args:
        dim: elements of a head that are rotated; even.
        base: base of the frequencies `base ** (-2i / dim)`.
        scaling: for longer contexts; see `RotaryScaling`.
        device: device of the result.

    Returns:
        float32 `[dim / 2]`.

    Raises:
        TypeError: base is not a number, or scaling is no `RotaryScaling`.
        ValueError: a value is wrong.

    Reference:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), section 3.2.
    """
    _check_dim(dim)
    base = checks.as_float("base", base)
    if not 0 < base < math.inf:
        raise ValueError(f"base: expected a positive number, got {base}; 10000 is usual")
    if scaling is not None and not isinstance(scaling, RotaryScaling):
        raise TypeError(f"scaling: expected a RotaryScaling or None, got {type(scaling).__name__}")
    if scaling is not None and scaling.kind == "yarn" and base <= 1:
        raise ValueError(f"base: expected more than 1 for 'yarn', got {base}; later pairs have to turn more slowly")
    if scaling is not None and scaling.kind == "ntk":
        base = base * scaling.factor ** (dim / (dim - 2)) if dim > 2 else base
    pair = torch.arange(dim // 2, dtype=torch.float64, device=device)
    frequencies = base ** (-2 * pair / dim) if dim else pair
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    if scaling is not None and scaling.kind == "yarn" and dim:
        frequencies = torch.lerp(frequencies, frequencies / scaling.factor, _yarn_ramp(pair, dim, base, scaling))
    return frequencies.float()


def _check_dim(dim: int) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0 or dim % 2:
        raise ValueError(f"dim: expected an even number of elements, got {dim!r}; pairs of them rotate")


def _yarn_ramp(pair: Tensor, dim: int, base: float, scaling: RotaryScaling) -> Tensor:
    """How far each pair is slowed down, from 0 to 1."""
    assert scaling.original_length is not None
    length = scaling.original_length

    def pair_index(turns: float) -> float:
        """The pair that turns so many times over the original length."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_index(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_index(scaling.beta_slow)), dim - 1)
    return ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)


def rotary_tables(
    positions: int,
    dim: int,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin for every position: each `[positions, dim / 2]`.

    Args:
        positions: length of the tables.
        dim: elements of a head that are rotated; even.
        base: base of the frequencies `base ** (-2i / dim)`.
        scaling: for longer contexts; see `RotaryScaling`.
        device: device of the tables.
        dtype: dtype of the tables. Angles are computed in float32. Keep the tables in float32 too, because 16-bit
            tables round the cosines and sines.

    Returns:
        cos and sin, each `[positions, dim / 2]` in that dtype.

    Raises:
        TypeError: as `rotary_frequencies`; or positions is no int, or dtype is no floating-point dtype.
        ValueError: as `rotary_frequencies`; or positions is negative.

    Reference:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    checks.check_count("positions", positions, "pass the length of the table")
    checks.check_float_dtype("dtype", dtype)
    frequencies = rotary_frequencies(dim, base, scaling, device)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies)
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def xpos_scale(positions: int, dim: int, scale_base: float, *, device: torch.device | str | None = None) -> Tensor:
    """The decay of xPos: multiply the tables of q by it, and divide the tables of k by it.

    Pair `i` at position `p` has `((2i + 0.4 dim) / 1.4 dim) ** ((p - positions // 2) / scale_base)`. The value is 1 in
    the middle of the table, so q and k must use tables of the same length.

    Args:
        positions: length of the table.
        dim: elements of a head that are rotated; even.
        scale_base: positions over which the decay applies once; positive, usually 512.
        device: device of the result.

    Returns:
        float32 `[positions, dim / 2]`.

    Raises:
        TypeError: positions or scale_base is not a number.
        ValueError: a value is wrong.

    Reference:
        Sun et al., "A Length-Extrapolatable Transformer" (2022).
    """
    checks.check_count("positions", positions, "pass the length of the table")
    _check_dim(dim)
    scale_base = checks.as_float("scale_base", scale_base)
    if not 0 < scale_base < math.inf:
        raise ValueError(f"scale_base: expected a positive number, got {scale_base}; 512 is usual")
    step = (torch.arange(0, dim, 2, dtype=torch.float32, device=device) + 0.4 * dim) / (1.4 * dim)
    power = (torch.arange(positions, dtype=torch.float32, device=device) - positions // 2) / scale_base
    return step ** power[:, None]


def check_table_length(cos: Tensor, rows: int, offset: int, remedy: str) -> None:
    if exceeds(rows + offset, cos.shape[0]):
        raise ValueError(
            f"cos: expected at least {rows + offset} positions, {rows} rows from position {offset} on, "
            f"got {cos.shape[0]}; {remedy}"
        )


def check_positions(
    position_ids: Tensor, name: str, x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> None:
    """Checks type, shape and device of a position for each row, and that nothing else says where rows are."""
    checks.check_index("position_ids", position_ids)
    checks.check_device("position_ids", position_ids, x.device, name)
    given = offsets if isinstance(offsets, Tensor) or not known(offsets == 0) else None
    checks.refuse(
        "beside position_ids", "add it to position_ids",
        seqlen_offsets=given, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
    )  # fmt: skip
    rows = tuple(x.shape[:-2])
    found = tuple(position_ids.shape)
    alike = len(found) == len(rows) == 2 and known(found[0] == 1)
    if differ(found[alike:], rows[alike:]):
        also = f" or {(1, rows[1])}" if len(rows) == 2 else ""
        raise ValueError(
            f"position_ids: expected shape {rows}{also}, a position for each row of {name}, got {found}; reshape it"
        )
