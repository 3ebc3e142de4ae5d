"""The cases that every backend of the cross-entropy must get right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_close

IGNORED = -100


@dataclass(frozen=True)
class CrossEntropyCase:
    """One call.

    Attributes:
        layout: of the logits: "contiguous"; "padded", a view of longer rows; "offset", the same that begins at an odd
            element; "expanded", one row for all; "transposed", whose last dimension is not contiguous.
        low: how many of the logits of a row are -inf.
        size: of the logits.
        shift: what is added to all logits.
    """

    shape: tuple[int, ...] = (3, 5, 37)
    dtype: torch.dtype = torch.float32
    label_dtype: torch.dtype = torch.int64
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    lse_square_scale: float = 0.0
    reduction: str = "mean"
    inplace_backward: bool = False
    layout: str = "contiguous"
    ignore_index: int = IGNORED
    low: int = 0
    size: float = 3.0
    shift: float = 0.0
    softcap: float | None = None
    weighted: bool = False

    def options(self) -> dict[str, Any]:
        names = ("label_smoothing", "logit_scale", "lse_square_scale", "reduction", "ignore_index", "softcap")
        return {name: getattr(self, name) for name in names}


def make_logits(case: CrossEntropyCase, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(case.shape, generator=generator, dtype=torch.float64) * case.size + case.shift
    if case.low:
        values[..., : case.low] = float("-inf")
    values = values.to(case.dtype).to(dtype).to(device)
    columns = case.shape[-1]
    if case.layout in ("padded", "offset"):
        first = 1 if case.layout == "offset" else 0
        longer = torch.full((*case.shape[:-1], columns + 11), float("nan"), dtype=dtype, device=device)
        view = longer[..., first : first + columns]
        return view.copy_(values)
    if case.layout == "expanded":
        return values[:1].expand(case.shape)
    if case.layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    return values


def make_labels(case: CrossEntropyCase, device: str) -> Tensor:
    """Some of the rows are ignored; labels reach the last column."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(case.low, case.shape[-1], case.shape[:-1], generator=generator)
    flat = labels.view(-1)
    flat[2::4] = case.ignore_index
    flat[1::4] = case.shape[-1] - 1
    return labels.to(case.label_dtype).to(device)


def make_weights(case: CrossEntropyCase, dtype: torch.dtype | None, device: str) -> Tensor:
    """Class weights; that of the first class is 0."""
    weights = torch.rand(case.shape[-1], generator=torch.Generator().manual_seed(3)) * 2
    weights[0] = 0
    return weights.to(torch.float64 if torch.float64 in (dtype, case.dtype) else torch.float32).to(device)


def run(case: CrossEntropyCase, backend: str, dtype: torch.dtype | None, device: str) -> dict[str, Tensor]:
    """loss, z_loss and dlogits; the gradient from above is random."""
    logits, labels = make_logits(case, dtype or case.dtype, device), make_labels(case, device)
    leaf = logits.detach().requires_grad_()
    weights = make_weights(case, dtype, device) if case.weighted else None
    loss, z_loss = flashtile.cross_entropy(
        leaf,
        labels,
        **case.options(),
        class_weights=weights,
        return_z_loss=True,
        inplace_backward=case.inplace_backward,
        backend=backend,
    )
    dloss = torch.randn(loss.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (dlogits,) = torch.autograd.grad(loss, leaf, dloss.to(loss.dtype).to(device))
    if case.inplace_backward:
        assert dlogits.data_ptr() == leaf.data_ptr()
    if case.layout == "padded":
        assert logits._base is not None and logits._base[..., case.shape[-1] :].isnan().all(), "the rest is untouched"
    return {"loss": loss.detach(), "z_loss": z_loss, "dlogits": dlogits}


def check(case: CrossEntropyCase, backend: str, device: str = "cpu") -> None:
    """Asserts that a backend's forward and backward of a case agree with the fp64 oracle."""
    actual = run(case, backend, None, device)
    oracle = run(case, "reference", torch.float64, device)
    eager = run(case, "reference", None, device)
    for name, value in actual.items():
        assert_close(f"{case}: {name}", value, oracle[name], eager[name])


_BASE = CrossEntropyCase()
CASES = {
    "mean": _BASE,
    "sum": replace(_BASE, reduction="sum"),
    "none": replace(_BASE, reduction="none"),
    "smoothing": replace(_BASE, label_smoothing=0.1),
    "smoothing_all": replace(_BASE, label_smoothing=1.0, reduction="none"),
    "scale": replace(_BASE, logit_scale=0.3, label_smoothing=0.1),
    "negative_scale": replace(_BASE, logit_scale=-1.7, label_smoothing=0.2, reduction="sum"),
    "zero_scale": replace(_BASE, logit_scale=0.0),
    "z_loss": replace(_BASE, lse_square_scale=0.01),
    "everything": replace(
        _BASE, label_smoothing=0.1, logit_scale=0.7, lse_square_scale=0.02, label_dtype=torch.int32, reduction="none"
    ),
    "fp16": replace(_BASE, dtype=torch.float16, label_smoothing=0.1),
    "fp16_none": replace(_BASE, dtype=torch.float16, reduction="none", lse_square_scale=0.01),
    "inplace": replace(_BASE, inplace_backward=True),
    "inplace_fp16": replace(_BASE, inplace_backward=True, dtype=torch.float16, shape=(7, 1001), reduction="sum"),
    "inplace_padded": replace(_BASE, inplace_backward=True, dtype=torch.float16, shape=(7, 90), layout="padded"),
    "capped": replace(_BASE, softcap=2.0),
    "capped_smoothing": replace(_BASE, softcap=30.0, label_smoothing=0.1, shape=(3, 4400), logit_scale=-0.7, size=60.0),
    "capped_z_loss_fp16": replace(_BASE, softcap=5.0, lse_square_scale=0.02, dtype=torch.float16, reduction="none"),
    "capped_low": replace(_BASE, softcap=5.0, low=9, label_smoothing=0.1, inplace_backward=True),
    "weighted": replace(_BASE, weighted=True),
    "weighted_none": replace(_BASE, weighted=True, reduction="none", lse_square_scale=0.01),
    "weighted_sum": replace(_BASE, weighted=True, reduction="sum", label_smoothing=0.1, ignore_index=3),
    "weighted_smoothing": replace(_BASE, weighted=True, label_smoothing=0.1, shape=(3, 12301), dtype=torch.float16),
    "weighted_shifted": replace(_BASE, weighted=True, label_smoothing=0.3, shift=1e4, layout="offset", shape=(6, 45)),
    "weighted_capped": replace(
        _BASE,
        weighted=True,
        softcap=3.0,
        label_smoothing=0.1,
        logit_scale=0.7,
        lse_square_scale=0.01,
        label_dtype=torch.int32,
    ),
    "weighted_no_rows": replace(_BASE, weighted=True, shape=(0, 5)),
    "padded": replace(_BASE, layout="padded", label_smoothing=0.1),
    "padded_fp16": replace(_BASE, layout="padded", dtype=torch.float16),
    "offset": replace(_BASE, layout="offset", shape=(6, 45), label_smoothing=0.1),
    "offset_fp16": replace(_BASE, layout="offset", dtype=torch.float16, shape=(6, 45)),
    "expanded": replace(_BASE, layout="expanded"),
    "transposed": replace(_BASE, layout="transposed"),
    "low": replace(_BASE, low=9),
    "low_tiles": replace(_BASE, shape=(2, 4400), low=4200, dtype=torch.float16),
    "all_low_but_one": replace(_BASE, low=36),
    "large": replace(_BASE, size=60.0),
    "shifted": replace(_BASE, shift=1e4, reduction="none"),
    "shifted_everything": replace(_BASE, shift=-1e4, label_smoothing=0.1, logit_scale=0.7, shape=(5, 4400), size=1.0),
    "shifted_negative": replace(_BASE, shift=1e4, label_smoothing=0.1, logit_scale=-0.3, reduction="none"),
    "ignore_a_label": replace(_BASE, ignore_index=3),
    "one_column": replace(_BASE, shape=(5, 1)),
    "one_row": replace(_BASE, shape=(19,), ignore_index=-1, layout="contiguous"),
    "no_rows": replace(_BASE, shape=(0, 5), reduction="none"),
    "no_rows_sum": replace(_BASE, shape=(2, 0, 5), reduction="sum"),
    "no_rows_mean": replace(_BASE, shape=(0, 5)),
    "columns_8": replace(_BASE, shape=(9, 8), dtype=torch.float16),
    "columns_4096": replace(_BASE, shape=(3, 4096), dtype=torch.float16),
    "columns_4097": replace(_BASE, shape=(3, 4097), dtype=torch.float16, label_smoothing=0.1),
    "columns_8191": replace(_BASE, shape=(3, 8191), label_smoothing=0.1, lse_square_scale=0.01),
    "columns_12301": replace(_BASE, shape=(3, 12301), dtype=torch.float16, reduction="none"),
}


def parameters() -> list:
    return [pytest.param(case, id=name) for name, case in CASES.items()]
