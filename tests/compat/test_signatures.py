"""The names that are served have the arguments and defaults of the versions in `READ_AT`."""

from __future__ import annotations

import datetime
import importlib

import pytest

from compat_cases import arguments_of

_V2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_V2_RAW = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
_V2_CLASS = "dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_softmax"
#: Required there; earlier releases of version 2 did without.
_V2_CLASS_END = "is_grad_enabled=True"
_V1 = "dropout_p, softmax_scale=None, causal=False, return_attn_probs=False, deterministic=False"
_SEQLENS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_DROPOUT_ADD = "x0, residual, weight, bias, dropout_p, epsilon"
_PRENORM = "prenorm=False, residual_in_fp32=False, return_dropout_mask=False"
_NORM = (
    "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, rowscale=None, "
    "prenorm=False"
)
_NORM_OUT = "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None"
_NORM_REF = f"{_NORM}, zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, upcast=False"
_SUBSET = "layerscale=None, x0_subset=None, out_subset=None, rowscale_const=1.0, out_numrows=0"
_PARALLEL = "x0, x1, residual, weight0, bias0, weight1, bias1, dropout_p, epsilon"
_PLACE = "device=None, dtype=None"
_DROPOUT_ADD_MODULE = f"hidden_size, prenorm=False, p=0.0, eps=1e-05, residual_in_fp32=False, {_PLACE}"
_DENSE = {
    "fused_dense_func": "x, weight, bias=None, return_residual=False, process_group=None, sequence_parallel=True",
    "FusedDense": f"in_features, out_features, bias=True, return_residual=False, {_PLACE}",
    "FusedDense.forward": "self, x, process_group=None",
    "fused_mlp_func": "x, weight1, weight2, bias1=None, bias2=None, activation='gelu_approx', save_pre_act=True, "
    "return_residual=False, checkpoint_lvl=0, heuristic=0, process_group=None, sequence_parallel=True",
    "FusedMLP": "in_features, hidden_features=None, out_features=None, bias1=True, bias2=True, "
    f"activation='gelu_approx', return_residual=False, checkpoint_lvl=0, heuristic='auto', {_PLACE}",
    "FusedMLP.forward": "self, x, process_group=None",
}
_LAYER_NORM = {
    "layer_norm": "x, weight, bias, epsilon",
    "dropout_add_layer_norm": f"{_DROPOUT_ADD}, rowscale=None, layerscale=None, {_PRENORM}",
    "dropout_add_layer_norm_subset": f"{_DROPOUT_ADD}, {_SUBSET}, {_PRENORM}",
    "dropout_add_layer_norm_parallel_residual": f"{_PARALLEL}, {_PRENORM}",
    "DropoutAddLayerNorm": _DROPOUT_ADD_MODULE,
    "DropoutAddLayerNorm.forward": "self, x0, residual=None",
}
_RMS_NORM = {
    "rms_norm": "x, weight, epsilon",
    "dropout_add_rms_norm": f"{_DROPOUT_ADD}, rowscale=None, layerscale=None, {_PRENORM}",
    "dropout_add_rms_norm_subset": f"{_DROPOUT_ADD}, {_SUBSET}, {_PRENORM}",
    "dropout_add_rms_norm_parallel_residual": f"{_PARALLEL}, {_PRENORM}",
    "RMSNorm": f"hidden_size, eps=1e-05, {_PLACE}",
    "RMSNorm.forward": "self, x",
    "DropoutAddRMSNorm": _DROPOUT_ADD_MODULE,
    "DropoutAddRMSNorm.forward": "self, x0, residual=None",
}
_INDICES = {
    "index_first_axis": "input, indices",
    "index_put_first_axis": "values, indices, first_axis_dim",
    "index_first_axis_residual": "input, indices",
    "pad_input": "hidden_states, indices, batch, seqlen",
}
_TRITON = {
    "flash_attn_func": "q, k, v, bias=None, causal=False, softmax_scale=None",
    "flash_attn_kvpacked_func": "q, kv, bias=None, causal=False, softmax_scale=None",
    "flash_attn_qkvpacked_func": "qkv, bias=None, causal=False, softmax_scale=None",
    "_flash_attn_forward": "q, k, v, bias=None, causal=False, softmax_scale=None",
}
_ATTENTION = {
    "flash_attn_func": f"q, k, v, {_V2}",
    "flash_attn_kvpacked_func": f"q, kv, {_V2}",
    "flash_attn_qkvpacked_func": f"qkv, {_V2}",
    "flash_attn_varlen_func": f"q, k, v, {_SEQLENS}, {_V2}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_SEQLENS}, {_V2}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_V2}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}

_MLP = "in_features, hidden_features=None, out_features=None, activation={}, bias1=True, bias2=True, "
_PERCEPTRONS = {
    "Mlp": f"{_MLP.format('gelu')}return_residual=False, {_PLACE}",
    "Mlp.forward": "self, x",
    "GatedMlp": f"{_MLP.format('sigmoid')}multiple_of=128, return_residual=False, {_PLACE}",
    "GatedMlp.forward": "self, x",
}
_BLOCK = "dim, mixer_cls=None, mlp_cls=None, norm_cls=LayerNorm, dropout_cls=Dropout, "
_BLOCKS = {
    "Block": f"{_BLOCK}prenorm=True, resid_dropout1=0.0, resid_dropout2=0.0, drop_path1=0.0, drop_path2=0.0, "
    "fused_dropout_add_ln=False, return_residual=False, residual_in_fp32=False, sequence_parallel=False, "
    "mark_shared_params=False",
    "Block.forward": "self, hidden_states, residual=None, mixer_subset=None, mixer_kwargs=None",
    "Block.allocate_inference_cache": "self, batch_size, max_seqlen, dtype=None, **kwargs",
    "ParallelBlock": f"{_BLOCK}resid_dropout1=0.0, resid_dropout2=0.0, tied_norm=False, fused_dropout_add_ln=False, "
    "residual_in_fp32=False, sequence_parallel=False, mark_shared_params=False",
    "ParallelBlock.forward": "self, hidden_states1, hidden_states2=None, residual=None, mixer_kwargs=None",
}
_INNER = "causal=False, softmax_scale=None, attention_dropout=0.0"
_ATTENTION_MODULES = {
    "FlashSelfAttention.forward": "self, qkv, causal=None, cu_seqlens=None, max_seqlen=None",
    "FlashCrossAttention.forward": "self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None, "
    "max_seqlen_k=None",
    "SelfAttention": _INNER,
    "SelfAttention.forward": "self, qkv, causal=None, key_padding_mask=None",
    "CrossAttention": _INNER,
    "CrossAttention.forward": "self, q, kv, causal=None, key_padding_mask=None",
    "MHA.forward": "self, x, x_kv=None, key_padding_mask=None, cu_seqlens=None, max_seqlen=None, mixer_subset=None, "
    "inference_params=None, **kwargs",
}
_MHA = (
    "cross_attn=False, qkv_proj_bias=True, out_proj_bias=True, dropout=0.0, softmax_scale=None, causal=False, "
    "layer_idx=None, dwconv=False, rotary_emb_dim=0, rotary_emb_base=10000.0, rotary_emb_scale_base=None, "
    "rotary_emb_interleaved=False"
)
_MHA_END = f"fused_bias_fc=False, use_flash_attn=False, return_residual=False, checkpointing=False, {_PLACE}"
_EMBEDDINGS = {
    "GPT2Embeddings": "embed_dim, vocab_size, max_position_embeddings, padding_idx=None, word_embed_proj_dim=None, "
    f"{_PLACE}",
    "GPT2Embeddings.forward": "self, input_ids, position_ids=None",
    "BertEmbeddings": f"embed_dim, vocab_size, max_position_embeddings, type_vocab_size, padding_idx=None, {_PLACE}",
    "BertEmbeddings.forward": "self, input_ids, position_ids=None, token_type_ids=None",
    "VocabParallelEmbedding": "num_embeddings, *args, process_group=None, padding_idx=None, **kwargs",
    "ColumnParallelEmbedding": "num_embeddings, embedding_dim, *args, process_group=None, **kwargs",
}
_PATCHES = {
    "PatchEmbed": "img_size=224, patch_size=16, in_chans=3, embed_dim=768, norm_layer=None, flatten=True, bias=True, "
    "fused_bias_fc=False",
    "PatchEmbed.forward": "self, x",
}
_TRITON_LINEAR = {
    "triton_linear_act": "x, weight, bias=None, activation='id', save_act_input=False",
    "triton_dgrad_act": "grad_output, weight, activation='id', act_input=None",
}
_TRITON_MLP = {
    "fused_dense_sqrelu_dense_function": "x, weight1, bias1, weight2, bias2, checkpoint_lvl=0",
    "FusedDenseSqreluDense": "in_features, hidden_features=None, out_features=None, bias1=True, bias2=True, "
    f"checkpoint_lvl=0, {_PLACE}",
    "FusedDenseSqreluDense.forward": "self, x",
}
_ACTIVATIONS = {
    "bias_gelu": "y, bias",
    "bias_gelu_back": "g, y, bias",
    "GeLUFunction.forward": "ctx, input, bias",
    "gelu_fwd": "x",
    "gelu_bwd": "g, x",
    "FastGeLUFunction.forward": "ctx, input",
    "relu_bwd": "g, x",
    "sqrelu_fwd": "x",
    "sqrelu_bwd": "g, x",
}

#: Module -> name -> arguments, of a class those of its constructor.
VERSION_2 = {
    "": _ATTENTION,
    "flash_attn_interface": _ATTENTION
    | {
        "_get_block_size_n": "device, head_dim, is_dropout, is_causal",
        "_flash_attn_forward": f"q, k, v, {_V2_RAW}, return_softmax",
        "_flash_attn_varlen_forward": f"q, k, v, {_SEQLENS}, dropout_p, softmax_scale, causal, window_size_left=-1, "
        "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
        "seqused_k=None, zero_tensors=False",
        "_flash_attn_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {_V2_RAW}, deterministic, "
        "rng_state=None",
        "_flash_attn_varlen_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {_SEQLENS}, {_V2_RAW}, "
        "deterministic, rng_state=None, zero_tensors=False",
        "FlashAttnFunc.forward": f"ctx, q, k, v, {_V2_CLASS}, {_V2_CLASS_END}",
        "FlashAttnKVPackedFunc.forward": f"ctx, q, kv, {_V2_CLASS}, {_V2_CLASS_END}",
        "FlashAttnQKVPackedFunc.forward": f"ctx, qkv, {_V2_CLASS}, {_V2_CLASS_END}",
        "FlashAttnVarlenFunc.forward": f"ctx, q, k, v, {_SEQLENS}, {_V2_CLASS}, block_table, {_V2_CLASS_END}",
        "FlashAttnVarlenKVPackedFunc.forward": f"ctx, q, kv, {_SEQLENS}, {_V2_CLASS}, {_V2_CLASS_END}",
        "FlashAttnVarlenQKVPackedFunc.forward": f"ctx, qkv, cu_seqlens, max_seqlen, {_V2_CLASS}, {_V2_CLASS_END}",
    },
    "flash_attn_triton": _TRITON,
    "bert_padding": _INDICES
    | {
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    },
    "layers.rotary": {
        "rotate_half": "x, interleaved=False",
        "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
        "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "max_seqlen=None",
        "apply_rotary_emb_func": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "max_seqlen=None",
        "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
        "num_heads_q=None",
        "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
        "RotaryEmbedding.forward": "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
    },
    "ops.triton.rotary": {
        "apply_rotary": "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, "
        "inplace=False, conjugate=False",
    },
    "ops.triton.layer_norm": {
        "layer_norm_fn": f"{_NORM}, residual_in_fp32=False, zero_centered_weight=False, is_rms_norm=False, {_NORM_OUT}",
        "rms_norm_fn": f"{_NORM}, residual_in_fp32=False, zero_centered_weight=False, {_NORM_OUT}",
        "layer_norm_ref": _NORM_REF,
        "rms_norm_ref": _NORM_REF,
        "layer_norm_linear_fn": "x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-06, "
        "prenorm=False, residual_in_fp32=False, is_rms_norm=False",
        "RMSNorm": f"hidden_size, eps=1e-05, dropout_p=0.0, zero_centered_weight=False, {_PLACE}",
        "RMSNorm.forward": "self, x, residual=None, prenorm=False, residual_in_fp32=False",
    },
    "ops.triton.cross_entropy": {
        "cross_entropy_loss": "logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0, "
        "lse_square_scale=0.0, ignore_index=-100, inplace_backward=False, process_group=None",
    },
    "losses.cross_entropy": {
        "CrossEntropyLoss": "ignore_index=-100, reduction='mean', label_smoothing=0.0, logit_scale=1.0, "
        "lse_square_scale=0.0, inplace_backward=False, process_group=None, return_z_loss=False",
        "CrossEntropyLoss.forward": "self, input, target, precomputed_lse=None",
    },
    "ops.fused_dense": _DENSE,
    "ops.layer_norm": _LAYER_NORM,
    "ops.rms_norm": _RMS_NORM,
    "modules.mha": _ATTENTION_MODULES
    | {
        "get_alibi_slopes": "nheads",
        "FlashSelfAttention": f"{_INNER}, window_size=(-1, -1), alibi_slopes=None, deterministic=False",
        "FlashCrossAttention": f"{_INNER}, alibi_slopes=None, window_size=(-1, -1), deterministic=False",
        "MHA": f"embed_dim, num_heads, num_heads_kv=None, {_MHA}, use_alibi=False, window_size=(-1, -1), {_MHA_END}",
        "MHA.allocate_inference_cache": "self, batch_size, max_seqlen, dtype=None",
    },
    "modules.mlp": _PERCEPTRONS | {"FusedMLP": _DENSE["FusedMLP"]},
    "modules.block": _BLOCKS,
    "modules.embedding": _EMBEDDINGS,
    "layers.patch_embed": _PATCHES,
    "ops.activations": _ACTIVATIONS
    | {"swiglu_fwd": "x, y", "swiglu_bwd": "x, y, g", "SwiGLUFunction.forward": "ctx, x, y"},
    "ops.triton.linear": _TRITON_LINEAR,
    "ops.triton.mlp": _TRITON_MLP,
}
VERSION_1 = {
    "flash_attn_interface": {
        "flash_attn_unpadded_func": f"q, k, v, {_SEQLENS}, {_V1}",
        "flash_attn_unpadded_kvpacked_func": f"q, kv, {_SEQLENS}, {_V1}",
        "flash_attn_unpadded_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_V1}",
        "flash_attn_unpadded_qkvpacked_split_func": f"qkv, cu_seqlens, max_seqlen0, max_seqlen1, batch_size0, {_V1}",
        "flash_attn_func": "qkv, cu_seqlens, dropout_p, max_s, softmax_scale=None, causal=False, "
        "return_attn_probs=False",
        "_get_block_size": "device, head_dim, is_dropout",
        "_flash_attn_forward": f"q, k, v, out, {_SEQLENS}, dropout_p, softmax_scale, causal, return_softmax, "
        "num_splits=0, generator=None",
        "_flash_attn_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {_SEQLENS}, dropout_p, softmax_scale, "
        "causal, rng_state=None, num_splits=0, generator=None",
    },
    "flash_attention": {
        "FlashAttention": "softmax_scale=None, attention_dropout=0.0",
        "FlashAttention.forward": "self, qkv, key_padding_mask=None, causal=False, cu_seqlens=None, max_s=None, "
        "need_weights=False",
        "FlashMHA": f"embed_dim, num_heads, bias=True, batch_first=True, attention_dropout=0.0, causal=False, {_PLACE}",
        "FlashMHA.forward": "self, x, key_padding_mask=None, need_weights=False",
    },
    "flash_attn_triton": _TRITON,
    "flash_blocksparse_attn_interface": {
        "convert_blockmask": "blockmask, causal",
        "flash_blocksparse_attn_func": "qkv, cu_seqlens, blockmask, dropout_p, max_s, softmax_scale=None, "
        "causal=False, return_attn_probs=False, convert_mask=True",
    },
    "flash_blocksparse_attention": {
        "FlashBlocksparseAttention": "sparsity_config, softmax_temp=None, attention_dropout=0.0, max_seq_length=2048, "
        f"{_PLACE}",
        "FlashBlocksparseAttention.forward": "self, qkv, attn_mask=None, key_padding_mask=None, causal=False, "
        "cu_seqlens=None, max_s=None, need_weights=False, convert_mask=True",
        "FlashBlocksparseMHA": "embed_dim, num_heads, sparsity_config, bias=True, batch_first=True, "
        f"attention_dropout=0.0, causal=False, max_seq_length=2048, {_PLACE}, **kwargs",
        "FlashBlocksparseMHA.forward": "self, x, x_ignored_, x_ignored_1_, attn_mask=None, key_padding_mask=None, "
        "need_weights=False",
    },
    "fused_softmax": {
        "scaled_upper_triang_masked_softmax": "inputs, _, scale",
        "scaled_masked_softmax": "inputs, mask, scale",
    },
    "bert_padding": _INDICES | {"unpad_input": "hidden_states, attention_mask"},
    "layers.rotary": {
        "rotate_half": "x, interleaved=False",
        "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
        "apply_rotary_emb_func": "x, cos, sin, interleaved=False, inplace=False",
        "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False",
        "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, pos_idx_in_fp32=True, device=None",
        "RotaryEmbedding.forward": "self, qkv, seqlen_offset=0",
    },
    "losses.cross_entropy": {
        "CrossEntropyLoss": "ignore_index=-100, reduction='mean', label_smoothing=0.0, inplace_backward=False, "
        "process_group=None",
        "CrossEntropyLoss.forward": "self, input, target",
    },
    "losses.cross_entropy_apex": {
        "CrossEntropyLossApex": "ignore_index=-100, reduction='mean', label_smoothing=0.0, inplace_backward=False, "
        "process_group=None",
    },
    "ops.fused_dense": _DENSE,
    "ops.layer_norm": _LAYER_NORM,
    "ops.rms_norm": _RMS_NORM,
    "modules.mha": _ATTENTION_MODULES
    | {
        "FlashSelfAttention": f"{_INNER}, triton=False",
        "FlashCrossAttention": f"{_INNER}, triton=False",
        "MHA": f"embed_dim, num_heads, {_MHA}, {_MHA_END}",
        "MHA.allocate_inference_cache": "self, batch_size, max_seqlen, dtype=None, fused_ft_kernel=True",
    },
    "modules.mlp": _PERCEPTRONS
    | {
        "GatedMlp": f"{_MLP.format('sigmoid')}multiple_of=256, return_residual=False, {_PLACE}",
        "FusedMLP": _DENSE["FusedMLP"],
    },
    "modules.block": _BLOCKS,
    "modules.embedding": _EMBEDDINGS,
    "layers.patch_embed": _PATCHES,
    "ops.activations": _ACTIVATIONS,
    "ops.triton.linear": _TRITON_LINEAR,
    "ops.triton.mlp": _TRITON_MLP,
}
_V3 = (
    "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False"
)
VERSION_3 = {
    "flash_attn_interface": {
        "flash_attn_func": f"q, k, v, {_V3}",
        "flash_attn_varlen_func": f"q, k, v, {_SEQLENS}, seqused_q=None, seqused_k=None, {_V3}",
        "flash_attn_qkvpacked_func": "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, "
        "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
        "sm_margin=0, return_attn_probs=False",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
        "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, "
        "v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False",
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    },
}
_V4 = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False"
)
_V4_GATHER = "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
VERSION_4 = {
    "cute": {
        "flash_attn_func": f"q, k, v, qv=None, gather_kv_indices=None, {_V4}, score_mod=None, score_mod_bwd=None, "
        "mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, "
        f"return_lse=False, {_V4_GATHER}",
        "flash_attn_varlen_func": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, "
        f"page_table=None, {_V4}, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, "
        "aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
        f"disable_scheduler_metadata=False, {_V4_GATHER}",
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
        "virtual_batch_idx=None, return_lse=True",
        "get_scheduler_metadata": "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, "
        "pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, "
        "cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None, "
        "seqlen_k_per_split=None",
    },
    "cute.block_sparsity": {
        "BlockSparseTensorsTorch": "mask_block_cnt, mask_block_idx, full_block_cnt=None, full_block_idx=None, "
        "block_size=None",
    },
}
#: Tree -> the version whose signatures the table has, where they were read, and the day. What is not known says so.
READ_AT = {
    "flash_attn": ("2.8.3", "not recorded; the table is as first committed", "2026-11-21"),
    "flash_attn_v1": ("1.0.9", "not recorded; the table is as first committed", "2026-11-21"),
    "flash_attn_3": ("3.0.0b1", "not recorded; the table is as first committed", "2026-11-21"),
    # get_scheduler_metadata was read in a public annotated copy of flash_attn/cute/interface.py that names no release;
    # its private `_arch` is left out.
    "flash_attn_4": ("4.0.0b36", "a list of the signatures of flash_attn.cute at that version", "2026-11-28"),
}
SERVED = {"flash_attn": VERSION_2, "flash_attn_v1": VERSION_1, "flash_attn_3": VERSION_3, "flash_attn_4": VERSION_4}
NAMES = [
    (".".join(part for part in ("flashtile.compat", tree, module) if part), name, arguments)
    for tree, modules in SERVED.items()
    for module, names in modules.items()
    for name, arguments in names.items()
]


def test_each_table_says_where_it_was_read():
    assert READ_AT.keys() == SERVED.keys()
    for version, where, day in READ_AT.values():
        assert version and where and datetime.date.fromisoformat(day)


@pytest.mark.parametrize(("module", "name", "arguments"), NAMES, ids=[f"{m[17:]}.{n}" for m, n, _ in NAMES])
def test_arguments(module, name, arguments):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert arguments_of(found) == arguments
    assert found.__doc__ or name.startswith("Flash") or name.endswith("Function.forward")
