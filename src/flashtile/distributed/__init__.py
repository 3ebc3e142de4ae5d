"""Beyond one GPU, on torch.distributed: attention over a sequence that is cut over ranks."""

from flashtile.distributed.context_parallel import context_parallel_attention
from flashtile.distributed.explain import ContextParallelExplanation, explain_context_parallel
from flashtile.distributed.models import context_parallel
from flashtile.distributed.sharding import mean_over_shards, sequence_positions, shard_sequence, unshard_sequence

__all__ = [
    "ContextParallelExplanation",
    "context_parallel",
    "context_parallel_attention",
    "explain_context_parallel",
    "mean_over_shards",
    "sequence_positions",
    "shard_sequence",
    "unshard_sequence",
]
