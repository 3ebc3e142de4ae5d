"""Right results of a case in float64, and those of its formula in the dtype of the inputs, which set the tolerance.

The formula runs on as many rows at a time as fit into memory. What has no row of its own, such as the gradient of a
weight, is added up over them in float64. Comparisons go by pieces too, each of which must be within the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashtile import testing
from flashtile.bench.companions.case import Case, Inputs
from flashtile.bench.verify import Verdict

#: Elements of one float64 matrix that the check may hold at once, beside the results themselves.
_ELEMENTS = {"cuda": 2**28, "cpu": 2**22}


class Oracle:
    """Judges the results of a case."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case, self._inputs = case, inputs
        self._expected = self._evaluate(inputs.others)

    def judge(self, results: dict[str, Tensor], own_bits: bool) -> Verdict:
        """Compares outputs, and gradients where there are any.

        Args:
            results: tensors by name; read in the dtype of the formula's result.
            own_bits: the implementation dropped elements by random bits of its own.
        """
        expected = self._expected
        if own_bits:
            try:
                expected = self._evaluate(self._case.with_bits_of(results, self._inputs))
            except AssertionError as error:
                return Verdict(float("inf"), f"wrong result: {error}")
        exact, eager = expected
        worst, wrong = 0.0, []
        for name, found in results.items():
            try:
                assert found.shape == exact[name].shape, f"{name}: shape {found.shape}, expected {exact[name].shape}"
                for part, exact_part, eager_part in _pieces(found, exact[name], eager[name]):
                    worst = max(worst, _error(part, exact_part))
                    testing.assert_close(name, part, exact_part, eager_part)
            except AssertionError as error:
                wrong.append(str(error))
        return Verdict(worst, "wrong result: " + "; ".join(wrong) if wrong else None)

    def _evaluate(self, others: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return evaluate(self._case, self._inputs, others, torch.float64), evaluate(self._case, self._inputs, others)


def evaluate(
    case: Case, inputs: Inputs, others: dict[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients of the formula, in the dtype of the inputs or in another one."""
    first = next(t for name, t in inputs.leaves.items() if name in case.rowwise)
    # A power of two: the share of some rows in a mean over all is then exact in any dtype, where the rows are one too.
    step = 1 << max(1, _ELEMENTS[first.device.type] // case.width()).bit_length() - 1
    by_rows: dict[str, list[Tensor]] = {}
    sums: dict[str, Tensor] = {}
    for start in range(0, first.shape[0], step):
        for name, part in _evaluate_rows(case, inputs, others, slice(start, start + step), dtype).items():
            if name in case.rowwise or name.removeprefix("d") in case.rowwise:
                by_rows.setdefault(name, []).append(part)
            else:
                sums[name] = sums[name] + part.double() if name in sums else part.double()
    added = {name: value.to(dtype or case.torch_dtype) for name, value in sums.items()}
    return {name: torch.cat(parts) for name, parts in by_rows.items()} | added


def _evaluate_rows(
    case: Case, inputs: Inputs, others: dict[str, Tensor], rows: slice, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The same for some rows; means over all rows count with the share of these."""

    def pick(name: str, tensor: Tensor) -> Tensor:
        part = tensor[rows] if name in case.rowwise else tensor
        return part.to(dtype) if dtype is not None and part.is_floating_point() else part

    leaves = {name: pick(name, leaf).clone().requires_grad_() for name, leaf in inputs.leaves.items()}
    picked = {name: pick(name, tensor) for name, tensor in others.items()}
    outputs = dict(zip(case.outputs, case.formula(list(leaves.values()), picked), strict=True))
    total = next(t.shape[0] for name, t in inputs.leaves.items() if name in case.rowwise)
    share = next(t.shape[0] for name, t in leaves.items() if name in case.rowwise) / total
    shares = {name: 1.0 if name in case.rowwise else share for name in outputs}
    results = {name: out.detach() * shares[name] for name, out in outputs.items()}
    if not inputs.upstream:
        return results
    upstream = [pick(name, d) * shares[name] for name, d in zip(outputs, inputs.upstream, strict=True)]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), upstream)
    return results | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def _pieces(found: Tensor, exact: Tensor, eager: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What was found in the dtype of the formula's, beside the two others, some rows at a time."""
    if not found.dim():
        yield found.to(eager.dtype), exact, eager
        return
    step = max(1, _ELEMENTS[found.device.type] // max(1, found[0].numel() if len(found) else 1))
    for start in range(0, len(found), step):
        rows = slice(start, start + step)
        yield found[rows].to(eager.dtype), exact[rows], eager[rows]


def _error(found: Tensor, exact: Tensor) -> float:
    return testing.error(found, exact) if bool(found.isfinite().all()) else float("inf")
