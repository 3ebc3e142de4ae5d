"""Attention with DTensors: batch and heads are sharded, or the heads of packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.attention.score_program import UNCHANGED, moved
from flashtile.ops.attention.spec import SINGLE, AttentionSpec, Origin, SideInputs, Wanted, saved_side, side_tensors
from flashtile.ops.common import dtensor


def run_sharded(
    run: Callable[..., tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    backend: str,
) -> tuple[Tensor, ...]:
    """`run`, which is `operator.run_attention`, on each rank's batch entries and heads."""
    batch = "b" if spec.block_shape is None or spec.block_shape[0] == 1 else "."
    heads = "h" if spec.block_shape is None or spec.block_shape[1] == 1 else "."
    rows = "." if side.packed else batch + "."
    of_sequences = "." if side.packed else batch
    letters = {
        "key_lengths": of_sequences, "sinks": heads, "bias": f"{of_sequences}{heads}..",
        "mask": f"{of_sequences}{heads}..", "descale_q": of_sequences + heads, "descale_k": of_sequences + heads,
        "descale_v": of_sequences + heads,
        "alibi_slopes": of_sequences + heads,
    }  # fmt: skip
    operands: dict[str, tuple[Any, str]] = {
        name: (tensor, f"{rows}{heads}.") for name, tensor in (("q", q), ("k", k), ("v", v))
    }
    names = *SINGLE, *(f"captured[{place}]" for place in range(len(side.captured)))
    for name, tensor in zip(names, side_tensors(side), strict=True):
        dims = 0 if tensor is None else tensor.dim()
        operands[name] = tensor, letters.get(name, "." * dims)[-dims:]
    all_heads, sequences = q.shape[-2], q.shape[0]

    def function(division: dtensor.Division, q: Tensor, k: Tensor, v: Tensor, *aux: Any) -> tuple[Tensor, ...]:
        own = saved_side(aux, (side.max_seqlen_q, side.max_seqlen_k))
        if own.dropout_seed is not None:
            own = own._replace(dropout_seed=division.agree(own.dropout_seed))
        if "b" in division.letters or "h" in division.letters:
            place = division.start("b", sequences), division.start("h", all_heads)
            own, placed = _placed(own, spec, place, all_heads, q.device)
            return run(q, k, v, own, placed, backend)
        return run(q, k, v, own, spec, backend)

    lse = f"{'' if side.packed else batch}{heads}."
    results = (f"{rows}{heads}.", lse, lse)[: 2 + spec.returns_max_scores]
    learned = {*Wanted._fields, *names[len(SINGLE) :]}
    return dtensor.call(function, operands, results, learned)


def _placed(
    side: SideInputs, spec: AttentionSpec, place: tuple[int, int], all_heads: int, device: torch.device
) -> tuple[SideInputs, AttentionSpec]:
    """Side inputs and spec of a rank, whose dropout bits and score function count batch entries and heads in the whole
    call. `place`: the rank's first of both."""
    if spec.dropout_p:
        origin = Origin(0, 0, 0, 0, all_heads) if spec.origin is None else spec.origin
        spec = spec._replace(origin=origin._replace(matrix=origin.matrix + place[0] * origin.heads + place[1]))
    if spec.score_program not in (None, UNCHANGED):
        program, used = moved(spec.score_program)
        starts = *place, 0, 0
        numbers = tuple(torch.full((), starts[index], dtype=torch.int32, device=device) for index in used)
        side, spec = side._replace(captured=side.captured + numbers), spec._replace(score_program=program)
    return side, spec
