"""Attention over several processes: each strategy with each feature gives the results of one process, both ways."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashtile.testing import AttentionCase
from support.distributed.processes import Parallel, check_ranks, start
from support.running.covering import turns
from support.running.each_case import each_case

_BASE = AttentionCase(seq_q=96, seq_k=96, batch=2, heads=4, heads_kv=2, head_dim=16, head_dim_v=24)
_PACKED = replace(_BASE, lengths_q=(5, 0, 40, 17, 26, 8), batch=1)
_CAUSAL: dict[str, Any] = {"causal": True}
_FEATURES: dict[str, Any] = {
    "plain": Parallel(_BASE),
    "causal": Parallel(replace(_BASE, arguments=_CAUSAL)),
    "more-keys": Parallel(replace(_BASE, seq_q=48, arguments=_CAUSAL)),
    "more-queries": Parallel(replace(_BASE, seq_k=48, arguments=_CAUSAL)),
    "top-left": Parallel(replace(_BASE, seq_q=48, arguments={"causal": True, "align": "top_left"})),
    "window": Parallel(replace(_BASE, arguments={"window": (13, 5)})),
    "narrow": Parallel(replace(_BASE, arguments={"window": (3, None), "causal": True})),
    "scale": Parallel(replace(_BASE, arguments={"scale": -0.3, "softcap": 3.0, "causal": True})),
    "key-lengths": Parallel(replace(_BASE, key_lengths=(77, 9), arguments=_CAUSAL)),
    "one-head": Parallel(replace(_BASE, heads_kv=1, arguments=_CAUSAL)),
    "bf16": Parallel(replace(_BASE, dtype=torch.bfloat16, arguments={"causal": True, "deterministic": True})),
    "fp64": Parallel(replace(_BASE, dtype=torch.float64, arguments=_CAUSAL)),
    "alibi": Parallel(replace(_BASE, alibi_slopes="bh", arguments=_CAUSAL)),
    "sinks": Parallel(replace(_BASE, sinks=True, arguments=_CAUSAL)),
    "bias": Parallel(replace(_BASE, bias="1hqk")),
    "bias-of-keys": Parallel(replace(_BASE, bias="b11k", arguments=_CAUSAL)),
    "mask": Parallel(replace(_BASE, mask="b1qk", sinks=True)),
    "dropout": Parallel(replace(_BASE, arguments={"dropout_p": 0.3, "causal": True})),
    "much": Parallel(
        replace(_BASE, alibi_slopes="h", bias="11qk", sinks=True, key_lengths=(90, 60),
                arguments={"dropout_p": 0.2, "window": (40, 7), "softcap": 4.0})
    ),
    "max-scores": Parallel(replace(_BASE, sinks=True, arguments={"causal": True, "return_max_scores": True})),
    "packed-max-scores": Parallel(
        replace(_PACKED, key_lengths=(5, 3, 31, 17, 2, 0), arguments={"return_max_scores": True})
    ),
    "packed": Parallel(replace(_PACKED, arguments=_CAUSAL)),
    "packed-full": Parallel(_PACKED),
    "packed-window": Parallel(
        replace(_PACKED, alibi_slopes="bh", arguments={"window": (12, 3), "dropout_p": 0.3})
    ),
    "packed-bias": Parallel(replace(_PACKED, bias="1hqk", mask="11qk", arguments=_CAUSAL)),
    "packed-lengths": Parallel(replace(_PACKED, key_lengths=(5, 3, 31, 17, 2, 0), sinks=True)),
    "score-mod": Parallel(replace(_BASE, score_mod=True, arguments=_CAUSAL)),
    "score-mod-of-much": Parallel(
        replace(_BASE, score_mod=True, alibi_slopes="bh", sinks=True, key_lengths=(90, 60), block_mask=(64, 64),
                arguments={"dropout_p": 0.2, "window": (40, 7), "softcap": 4.0, "deterministic": True})
    ),
    "block-mask": Parallel(replace(_BASE, block_mask=(64, 64))),
    "block-mask-heads": Parallel(replace(_BASE, seq_q=288, seq_k=288, batch=1, block_mask=(64, 64), arguments=_CAUSAL)),
    "packed-score-mod": Parallel(replace(_PACKED, score_mod=True, arguments=_CAUSAL)),
    "packed-block-mask": Parallel(replace(_PACKED, block_mask=(64, 64), score_mod=True, sinks=True)),
    "packed-rest": Parallel(replace(_PACKED, arguments=_CAUSAL), rest=True),
    "packed-rest-sinks": Parallel(replace(_PACKED, sinks=True), rest=True),
}  # fmt: skip
_ROW_SHARDED = {
    "bias-rows": Parallel(replace(_BASE, bias="bhqk", arguments=_CAUSAL), row_sharded=True),
    "mask-rows": Parallel(replace(_BASE, mask="11qk", alibi_slopes="h"), row_sharded=True),
}
#: Two runs of heads on each of four ranks: key/value heads of their own, and all that has heads or is of all of them.
_HEADS = replace(_BASE, heads=16, heads_kv=8, head_dim=8, head_dim_v=12)
_IN_RUNS = {
    "causal": Parallel(replace(_HEADS, sinks=True, arguments=_CAUSAL)),
    "bf16": Parallel(replace(_HEADS, dtype=torch.bfloat16, bias="11qk", alibi_slopes="bh")),
    "dropout": Parallel(replace(_HEADS, bias="bhqk", arguments={"dropout_p": 0.3, "window": (20, 5)})),
    "packed": Parallel(replace(_HEADS, lengths_q=_PACKED.lengths_q, batch=1, mask="1hqk", arguments=_CAUSAL)),
}
_STRATEGIES = {
    "ring": ("ring", "zigzag"),
    "all_to_all": ("all_to_all", "zigzag"),
    "all_gather": ("all_gather", "zigzag"),
    "ring-contiguous": ("ring", "contiguous"),
    "all_to_all-contiguous": ("all_to_all", "contiguous"),
    "ring_all_to_all": ("ring_all_to_all", "zigzag"),
}


def _jobs(ranks: int) -> dict[str, Parallel]:
    """Every feature meets all plain strategies: two on four ranks, the third on three ranks or in a strategy that is
    made of it."""
    features = _FEATURES | _ROW_SHARDED
    if ranks == 3:
        pairs = turns(features, ("all_gather", "ring", "ring"))
    else:
        plain, others = list(_STRATEGIES)[:3], list(_STRATEGIES)[3:]
        pairs = [*turns(features, plain, 2), *turns(features, others)]
    jobs = {}
    for key, name in pairs:
        strategy, layout = _STRATEGIES[name]
        if key not in _ROW_SHARDED or "all_to" not in strategy:
            jobs[f"{name}-{key}"] = replace(features[key], strategy=strategy, layout=layout)
    if ranks == 4:
        jobs |= {f"runs-{key}": replace(job, strategy="all_to_all", in_runs=True) for key, job in _IN_RUNS.items()}
    return jobs


_JOBS = {ranks: _jobs(ranks) for ranks in (3, 4)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """For each number of ranks, what each of them got."""
    found: dict[int, list[dict[str, Any]]] = {}

    def of(ranks: int) -> list[dict[str, Any]]:
        if ranks not in found:
            found[ranks] = start(_JOBS[ranks], ranks, tmp_path_factory.mktemp("ranks"))
        return found[ranks]

    return of


@each_case("name", _JOBS[3])
def test_three_ranks_get_what_one_gets(name, results):
    check_ranks(_JOBS[3][name], name, results(3))


@pytest.mark.slow
@each_case("name", _JOBS[4])
def test_four_ranks_get_what_one_gets(name, results):
    check_ranks(_JOBS[4][name], name, results(4))
