"""`nn.Module`s over the public functions of flashtile, with PyTorch's argument names and state-dict keys."""

from flashtile.modules.attention import FlashCrossAttention, FlashSelfAttention, alibi_slopes
from flashtile.modules.block import Block, ParallelBlock, add_norm, add_parallel_norm, add_prenorm
from flashtile.modules.blocksparse import (
    FlashBlocksparseAttention,
    FlashBlocksparseMHA,
    flash_blocksparse_attn_func,
)
from flashtile.modules.cross_entropy import CrossEntropyLoss, LinearCrossEntropyLoss
from flashtile.modules.mha import MHA, FlashMHA, KVCache
from flashtile.modules.mlp import FusedDense, FusedMlp, GatedMlp, Mlp
from flashtile.modules.norm import DropoutAddLayerNorm, DropoutAddRMSNorm, LayerNorm, RMSNorm
from flashtile.modules.padding import Unpadded, pad_input, unpad_input
from flashtile.modules.rotary import RotaryEmbedding

__all__ = [
    "MHA",
    "Block",
    "CrossEntropyLoss",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "FlashBlocksparseAttention",
    "FlashBlocksparseMHA",
    "FlashCrossAttention",
    "FlashMHA",
    "FlashSelfAttention",
    "FusedDense",
    "FusedMlp",
    "GatedMlp",
    "KVCache",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "Mlp",
    "ParallelBlock",
    "RMSNorm",
    "RotaryEmbedding",
    "Unpadded",
    "add_norm",
    "add_parallel_norm",
    "add_prenorm",
    "alibi_slopes",
    "flash_blocksparse_attn_func",
    "pad_input",
    "unpad_input",
]
