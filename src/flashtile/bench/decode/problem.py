"""A step of decoding with its tensors, as the runner asks for it. Some heads of it are held to the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile import testing
from flashtile.bench.companions.movement import Copy
from flashtile.bench.companions.problem import CompanionProblem
from flashtile.bench.decode.cases import OP, PHASE, DecodeCase, DecodeInputs, make_inputs
from flashtile.bench.decode.implementations import Implementation, Step
from flashtile.bench.problem import Problem, speed_of
from flashtile.bench.verify import Verdict

#: Elements of keys and values in float64 that the check may hold at once.
_ELEMENTS = {"cuda": 2**28, "cpu": 2**22}


def problem_of(case: DecodeCase | Copy, device: torch.device) -> Problem:
    """A step of decoding, or a copy beside it."""
    return CompanionProblem(case, device) if isinstance(case, Copy) else DecodeProblem(case, device)


class BoundStep:
    """The step of an implementation."""

    def __init__(self, step: Step) -> None:
        self._step = step

    @property
    def calls(self) -> Mapping[str, Callable[[], Any]]:
        """What is timed."""
        return {PHASE: self._run}

    def results(self, phase: str) -> dict[str, Tensor]:
        return {"out": self._run()}

    def facts(self, phase: str) -> dict[str, Any]:
        """No keys of a row beside those of its speed."""
        return {}

    @torch.no_grad()
    def _run(self) -> Tensor:
        return self._step()


class DecodeProblem:
    """A case on a device."""

    op = OP
    phases: tuple[str, ...] = (PHASE,)

    def __init__(self, case: DecodeCase, device: torch.device) -> None:
        self._case = case
        self._inputs = make_inputs(case, device)
        self._pairs = _chosen_pairs(case, device)
        self._exact, self._eager = (self._reference(dtype) for dtype in (torch.float64, case.torch_dtype))

    def offers(self, implementation: Any) -> bool:
        return isinstance(implementation, Implementation)

    def unsupported(self, implementation: Implementation, phase: str) -> str | None:
        return implementation.unsupported(self._case)

    def bind(self, implementation: Implementation) -> BoundStep:
        return BoundStep(implementation.build(self._inputs))

    def judge(self, bound: BoundStep, phase: str, results: dict[str, Tensor]) -> Verdict:
        found = self._of_pairs(results["out"])
        error = testing.error(found, self._exact) if bool(found.isfinite().all()) else float("inf")
        try:
            testing.assert_close("out", found, self._exact, self._eager)
        except AssertionError as wrong:
            return Verdict(error, f"wrong result: {wrong}")
        return Verdict(error, None)

    def speed(self, phase: str, ms: float) -> dict[str, Any]:
        return speed_of(self._case, phase, ms)

    @torch.no_grad()
    def _reference(self, dtype: torch.dtype) -> Tensor:
        """out of the chosen pairs, `[pairs, Sq, group, Dv]`: each a sequence of its own with one key/value head."""
        inputs = self._inputs
        k_cache, v_cache = (self._rows_of_pairs(cache).to(dtype) for cache in (inputs.k_cache, inputs.v_cache))
        k, v = (None if new is None else self._of_pairs(new).to(dtype) for new in (inputs.k, inputs.v))
        return flashtile.attention_with_kv_cache(
            self._of_pairs(inputs.q).to(dtype),
            k_cache,
            v_cache,
            k,
            v,
            cache_lengths=inputs.lengths[self._pairs[0]],
            rotary_cos=inputs.cos,
            rotary_sin=inputs.sin,
            backend="reference",
        )

    def _of_pairs(self, tensor: Tensor) -> Tensor:
        """`[B, Sq, heads, D]` to `[pairs, Sq, heads / Hkv, D]`."""
        batch, head = self._pairs
        return tensor.unflatten(2, (self._case.Hkv, -1)).transpose(1, 2)[batch, head]

    def _rows_of_pairs(self, cache: Tensor) -> Tensor:
        """`[pairs, S, 1, D]`, gathered from pages where there are any."""
        return torch.stack([_rows(self._inputs, cache, *pair) for pair in zip(*(t.tolist() for t in self._pairs))])


def _rows(inputs: DecodeInputs, cache: Tensor, sequence: int, head: int) -> Tensor:
    of_head = cache[:, :, head : head + 1]
    if inputs.block_table is None:
        return of_head[sequence]
    return of_head[inputs.block_table[sequence].long()].flatten(0, 1)


def _chosen_pairs(case: DecodeCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """(sequence, key/value head) of those that are checked: evenly spaced, the first and the last among them."""
    affordable = _ELEMENTS[device.type] // (case.S * (case.D + case.Dv))
    total = case.B * case.Hkv
    chosen = torch.linspace(0, total - 1, max(2, min(affordable, total, 64)), device=device).round().long().unique()
    return chosen // case.Hkv, chosen % case.Hkv
