"""Checks of tables of angles, which several operations take."""

from __future__ import annotations

from torch import Tensor


def check_table_pair(cos_name: str, cos: Tensor, sin_name: str, sin: Tensor, name: str, head_dim: int) -> None:
    """Shapes and dtypes of a pair of tables, for the tensor of the given name."""
    if cos.dim() != 2 or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"{cos_name}: expected shape (positions, rotary_dim / 2) with rotary_dim up to the head_dim of {name}, "
            f"{head_dim}, got {tuple(cos.shape)}; a table has one column for each pair of elements"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"{sin_name}: expected the shape of {cos_name}, {tuple(cos.shape)}, got {tuple(sin.shape)}")
    if sin.dtype is not cos.dtype:
        raise TypeError(f"{sin_name}: expected the dtype of {cos_name}, {cos.dtype}, got {sin.dtype}; cast one of them")
