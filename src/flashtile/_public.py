"""The public names of `flashtile`, which its `__init__` hands on. Type checkers and editors see `_public.pyi`, which
`python tools/public_stub.py --write` writes."""

from inspect import isfunction

from flashtile.ops.attention import patterns
from flashtile.ops.attention.api import attention, attention_varlen, quantize_fp8
from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.inspection import Explanation, attention_column_sums, attention_probs, explain
from flashtile.ops.attention.options import AttentionOptions
from flashtile.ops.attention.partial import AttentionPart, attention_backward, attention_part
from flashtile.ops.attention.philox import draw_dropout_seed, dropout_mask
from flashtile.ops.attention.pytorch import flex_attention, scaled_dot_product_attention
from flashtile.ops.attention.score_program import ScoreFunction
from flashtile.ops.attention.score_tracing import trace_score_mod
from flashtile.ops.common.batch_invariance import batch_invariant_mode
from flashtile.ops.common.other_names import hide_collected
from flashtile.ops.cross_entropy.api import cross_entropy, linear_cross_entropy
from flashtile.ops.decompositions import decompositions
from flashtile.ops.dense.api import fused_dense, fused_mlp, linear_bias_wgrad
from flashtile.ops.kv_cache.api import attention_with_kv_cache, tree_mask
from flashtile.ops.layer_norm.api import dropout_add_layer_norm, dropout_add_rms_norm, layer_norm, rms_norm
from flashtile.ops.rotary.api import apply_rotary, apply_rotary_kv, apply_rotary_qkv
from flashtile.ops.rotary.tables import RotaryScaling, rotary_frequencies, rotary_tables, xpos_scale
from flashtile.ops.softmax.api import scaled_causal_softmax, scaled_masked_softmax
from flashtile.ops.softmax.merge import (
    OnlineSoftmax,
    finish_attention,
    logsumexp_merge,
    merge_attention_,
    online_softmax,
)

__all__ = [
    "AttentionOptions",
    "AttentionPart",
    "BlockMask",
    "Explanation",
    "OnlineSoftmax",
    "RotaryScaling",
    "ScoreFunction",
    "apply_rotary",
    "apply_rotary_kv",
    "apply_rotary_qkv",
    "attention",
    "attention_backward",
    "attention_column_sums",
    "attention_part",
    "attention_probs",
    "attention_varlen",
    "attention_with_kv_cache",
    "batch_invariant_mode",
    "cross_entropy",
    "decompositions",
    "draw_dropout_seed",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "dropout_mask",
    "explain",
    "finish_attention",
    "flex_attention",
    "fused_dense",
    "fused_mlp",
    "layer_norm",
    "linear_bias_wgrad",
    "linear_cross_entropy",
    "logsumexp_merge",
    "merge_attention_",
    "online_softmax",
    "patterns",
    "quantize_fp8",
    "rms_norm",
    "rotary_frequencies",
    "rotary_tables",
    "scaled_causal_softmax",
    "scaled_dot_product_attention",
    "scaled_masked_softmax",
    "trace_score_mod",
    "tree_mask",
    "xpos_scale",
]

for _public in map(globals().__getitem__, __all__):
    if isfunction(_public):
        hide_collected(_public)
