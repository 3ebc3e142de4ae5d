"""Beyond one GPU, on torch.distributed: attention over a sequence that is cut over ranks, and layers cut over ranks."""

from flashtile.distributed.context_parallel import context_parallel_attention
from flashtile.distributed.explain import ContextParallelExplanation, explain_context_parallel
from flashtile.distributed.models import (
    AttentionParallel,
    BlockParallel,
    MlpParallel,
    VocabularyParallel,
    context_parallel,
    row_orders,
    tensor_parallel_plan,
    vocabulary_loss,
)
from flashtile.distributed.sharding import mean_over_shards, sequence_positions, shard_sequence, unshard_sequence
from flashtile.distributed.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

__all__ = [
    "AttentionParallel",
    "BlockParallel",
    "ColumnParallelLinear",
    "ContextParallelExplanation",
    "MlpParallel",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabularyParallel",
    "context_parallel",
    "context_parallel_attention",
    "explain_context_parallel",
    "mean_over_shards",
    "row_orders",
    "sequence_positions",
    "shard_sequence",
    "tensor_parallel_plan",
    "unshard_sequence",
    "vocabulary_loss",
]
