"""flash_attn.modules.embedding: the same in versions 1 and 2."""

from flashtile.compat.flash_attn.modules.embedding import (
    BertEmbeddings,
    ColumnParallelEmbedding,
    GPT2Embeddings,
    VocabParallelEmbedding,
)

__all__ = ["BertEmbeddings", "ColumnParallelEmbedding", "GPT2Embeddings", "VocabParallelEmbedding"]
