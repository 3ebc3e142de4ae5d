"""The names that are served of other libraries: the modules of each version, their names, and the arguments of these,
as they stood at the release and day that a version tells. `batch_invariant` of the attention modules is flashtile's
own."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashtile.compat.adapter import Names, tables


class Served(NamedTuple):
    """A version of another library.

    Attributes:
        version: the major version whose names and meanings are served.
        distribution: the name of the installed distribution that `importlib.metadata` tells.
        release: its version.
        read: the release whose arguments are in the tables, where they were read, and the day.
        modules: module -> names, below the name that is installed; "." is that one.
        shim: the distribution of `packaging/` that puts it on disk, where that has another name.
    """

    version: int
    distribution: str
    release: str
    read: tuple[str, str, str]
    modules: dict[str, Names]
    shim: str = ""

    def serve(self, home: dict[str, Any]) -> None:
        """Gives what a module of `flashtile.compat`, by its globals, has of these names their arguments."""
        for names in self.modules.values():
            if home["__name__"].rpartition(".")[2] in names.homes:
                names.serve(home)


_GATHERS = "it belongs to gather_kv_indices, which is not served; leave it out"
_BIASES = "flashtile.modules.FusedMlp also has layers without biases"
#: What to do instead of an argument that is not served, of which tables mark the default by "!".
_REMEDIES = {
    "attn_mask": "what is visible is said by sparsity_config, and padding by key_padding_mask",
    "bias1": _BIASES,
    "bias2": _BIASES,
    "gather_bwd_recompute_p": _GATHERS,
    "gather_bwd_token_chunk": _GATHERS,
    "gather_kv_indices": "show each query its keys by a mask_mod, or gather them and call attention for each query",
    "need_weights": "attention weights are never in memory as a whole",
    "pos_idx_in_fp32": "positions are always exact",
    "process_group": "these layers compute on one device",
    "return_softmax": "attention weights are never in memory as a whole",
    "seqlen_k_per_split": "flashtile chooses where keys are split; deterministic=True makes gradients repeatable",
    "virtual_batch_idx": "it says in which order a kernel takes the sequences; no result depends on it",
}
_FIRST_COMMITTED = "not recorded; the table is as first committed", "2026-11-21"
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_PLACE = "device=None, dtype=None"
_DROPOUT_ADD = "x0, residual, weight, bias, dropout_p, epsilon"
_PRENORM = "prenorm=False, residual_in_fp32=False, return_dropout_mask=False"
_SUBSET = "layerscale=None, x0_subset=None, out_subset=None, rowscale_const=1.0, out_numrows=0"
_PARALLEL = "x0, x1, residual, weight0, bias0, weight1, bias1, dropout_p, epsilon"
_DROPOUT_ADD_MODULE = f"hidden_size, prenorm=False, p=0.0, eps=1e-05, residual_in_fp32=False, {_PLACE}"
_BIAS = "bias=None, causal=False, softmax_scale=None"
_MLP = "in_features, hidden_features=None, out_features=None"
_FUSED_MLP = (
    f"{_MLP}, bias1=True, bias2=True, activation='gelu_approx', return_residual=False, "
    f"checkpoint_lvl->checkpoint_level=0, heuristic='auto', {_PLACE}"
)
_BLOCK = "dim, mixer_cls=None, mlp_cls=None, norm_cls=LayerNorm, dropout_cls=Dropout"
_BLOCK_END = "residual_in_fp32=False, sequence_parallel=False, mark_shared_params=False"
_INNER = "causal=False, softmax_scale=None, attention_dropout=0.0"
_MHA = (
    "cross_attn=False, qkv_proj_bias=True, out_proj_bias=True, dropout=0.0, softmax_scale=None, causal=False, "
    "layer_idx=None, dwconv=False, rotary_emb_dim=0, rotary_emb_base=10000.0, rotary_emb_scale_base=None, "
    "rotary_emb_interleaved=False"
)
_MHA_END = f"fused_bias_fc=False, use_flash_attn=False, return_residual=False, checkpointing=False, {_PLACE}"

#: Parts of modules that versions 1 and 2 have alike.
_INDICES = """
    index_first_axis(input, indices); index_put_first_axis(values, indices, first_axis_dim)
    index_first_axis_residual(input, indices); pad_input(hidden_states->x, indices, batch, seqlen)
"""
_TURNS = """
    rotate_half(x, interleaved=False); apply_rotary_emb_torch(x, cos, sin, interleaved=False)
"""
_ATTENTION_MODULES = f"""
    FlashSelfAttention.forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None)
    FlashCrossAttention.forward(self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None,
        max_seqlen_k=None)
    SelfAttention({_INNER}); SelfAttention.forward(self, qkv, causal=None, key_padding_mask=None)
    CrossAttention({_INNER}); CrossAttention.forward(self, q, kv, causal=None, key_padding_mask=None)
    MHA.forward(self, x, x_kv=None, key_padding_mask=None, cu_seqlens=None, max_seqlen=None, mixer_subset=None,
        inference_params=None, **kwargs)
"""
_PERCEPTRONS = f"""
    Mlp({_MLP}, activation=gelu, bias1=True, bias2=True, return_residual=False, {_PLACE}); Mlp.forward(self, x)
    GatedMlp.forward(self, x); FusedMLP({_FUSED_MLP})
"""
_BLOCKS = f"""
    Block({_BLOCK}, prenorm=True, resid_dropout1=0.0, resid_dropout2=0.0, drop_path1=0.0, drop_path2=0.0,
        fused_dropout_add_ln=False, return_residual=False, {_BLOCK_END})
    Block.forward(self, hidden_states, residual=None, mixer_subset=None, mixer_kwargs=None)
    Block.allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs)
    ParallelBlock({_BLOCK}, resid_dropout1=0.0, resid_dropout2=0.0, tied_norm=False, fused_dropout_add_ln=False,
        {_BLOCK_END})
    ParallelBlock.forward(self, hidden_states1, hidden_states2=None, residual=None, mixer_kwargs=None)
    ParallelBlock.allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs)
"""
_ACTIVATIONS = """
    bias_gelu(y, bias); bias_gelu_back(g, y, bias); GeLUFunction.forward(ctx, input, bias)
    bias_gelu_impl(*args, **kwargs); gelu_fwd(x); gelu_bwd(g, x); FastGeLUFunction.forward(ctx, input)
    fast_gelu_impl(*args, **kwargs); relu_bwd(g, x); sqrelu_fwd(x); sqrelu_bwd(g, x)
"""
_BOTH = f"""
flash_attn_triton = padding
    flash_attn_func(q, k, v, {_BIAS}); flash_attn_kvpacked_func(q, kv, {_BIAS}); flash_attn_qkvpacked_func(qkv, {_BIAS})
    _flash_attn_forward(q, k, v, {_BIAS})
ops.fused_dense = dense, flashtile.modules
    fused_dense_func(x, weight, bias=None, return_residual=False, process_group=None!, sequence_parallel=True~)
    FusedDense(in_features, out_features, bias=True, return_residual=False, {_PLACE})
    FusedDense.forward(self, x->input, process_group=None!)
    fused_mlp_func(x, weight1, weight2, bias1=None, bias2=None, activation='gelu_approx', save_pre_act=True,
        return_residual=False, checkpoint_lvl->checkpoint_level=0, heuristic=0~, process_group=None!,
        sequence_parallel=True~)
    FusedMLP({_FUSED_MLP}); FusedMLP.forward(self, x, process_group=None!)
ops.layer_norm = norms, flashtile, flashtile.modules
    layer_norm(x, weight, bias, epsilon->eps)
    dropout_add_layer_norm({_DROPOUT_ADD}, rowscale=None, layerscale=None, {_PRENORM})
    dropout_add_layer_norm_subset({_DROPOUT_ADD}, {_SUBSET}, {_PRENORM})
    dropout_add_layer_norm_parallel_residual({_PARALLEL}, {_PRENORM}); DropoutAddLayerNorm({_DROPOUT_ADD_MODULE})
    DropoutAddLayerNorm.forward(self, x0, residual=None)
ops.rms_norm = norms, flashtile, flashtile.modules
    rms_norm(x, weight, epsilon->eps); dropout_add_rms_norm({_DROPOUT_ADD}, rowscale=None, layerscale=None, {_PRENORM})
    dropout_add_rms_norm_subset({_DROPOUT_ADD}, {_SUBSET}, {_PRENORM})
    dropout_add_rms_norm_parallel_residual({_PARALLEL}, {_PRENORM})
    RMSNorm(hidden_size->normalized_shape, eps=1e-05, {_PLACE}); RMSNorm.forward(self, x->input)
    DropoutAddRMSNorm({_DROPOUT_ADD_MODULE})
    DropoutAddRMSNorm.forward(self, x0, residual=None)
ops.triton.linear = dense
    triton_linear_act(x, weight, bias=None, activation='id', save_act_input=False)
    triton_dgrad_act(grad_output, weight, activation='id', act_input=None)
ops.triton.mlp = dense
    fused_dense_sqrelu_dense_function(x, weight1, bias1, weight2, bias2, checkpoint_lvl->checkpoint_level=0)
    FusedDenseSqreluDense({_MLP}, bias1=True!, bias2=True!, checkpoint_lvl->checkpoint_level=0, {_PLACE})
    FusedDenseSqreluDense.forward(self, x)
modules.embedding = embedding
    GPT2Embeddings(embed_dim, vocab_size, max_position_embeddings, padding_idx=None, word_embed_proj_dim=None,
        {_PLACE})
    GPT2Embeddings.forward(self, input_ids, position_ids=None)
    BertEmbeddings(embed_dim, vocab_size, max_position_embeddings, type_vocab_size, padding_idx=None, {_PLACE})
    BertEmbeddings.forward(self, input_ids, position_ids=None, token_type_ids=None)
    VocabParallelEmbedding(num_embeddings, *args, process_group=None, padding_idx=None, **kwargs)
    ColumnParallelEmbedding(num_embeddings, embedding_dim, *args, process_group=None, **kwargs)
layers.patch_embed = embedding
    PatchEmbed(img_size=224, patch_size=16, in_chans=3, embed_dim=768, norm_layer=None, flatten=True, bias=True,
        fused_bias_fc=False)
    PatchEmbed.forward(self, x)
"""

_V2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_V2_RAW = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
#: is_grad_enabled is required there; earlier releases of version 2 did without.
_V2_CLASS = "dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_softmax"
_V2_FUNCTIONS = f"""
    flash_attn_func(q, k, v, {_V2}); flash_attn_kvpacked_func(q, kv, {_V2}); flash_attn_qkvpacked_func(qkv, {_V2})
    flash_attn_varlen_func(q, k, v, {_LENGTHS}, {_V2}, block_table=None)
    flash_attn_varlen_kvpacked_func(q, kv, {_LENGTHS}, {_V2})
    flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, {_V2})
    flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens->cache_lengths=None, cache_batch_idx->cache_batch_indices=None,
        cache_leftpad->cache_left_padding=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse->return_lse=False)
"""
_ROTARY = "interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
_NORM = (
    "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, rowscale=None, "
    "prenorm=False"
)
_NORM_END = "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None"
_NORM_REF = f"{_NORM}, zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, upcast=False"
_MODULES_2 = f"""{_BOTH}
. = flash_attn_2
    {_V2_FUNCTIONS}
flash_attn_interface = flash_attn_2
    {_V2_FUNCTIONS}
    _get_block_size_n(device, head_dim, is_dropout, is_causal); _flash_attn_forward(q, k, v, {_V2_RAW}, return_softmax)
    _flash_attn_varlen_forward(q, k, v, {_LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None,
        seqused_k=None, zero_tensors=False~)
    _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, {_V2_RAW}, deterministic, rng_state=None)
    _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, {_LENGTHS}, {_V2_RAW}, deterministic,
        rng_state=None, zero_tensors=False~)
    FlashAttnFunc.forward(ctx, q, k, v, {_V2_CLASS}, is_grad_enabled=True)
    FlashAttnKVPackedFunc.forward(ctx, q, kv, {_V2_CLASS}, is_grad_enabled=True)
    FlashAttnQKVPackedFunc.forward(ctx, qkv, {_V2_CLASS}, is_grad_enabled=True)
    FlashAttnVarlenFunc.forward(ctx, q, k, v, {_LENGTHS}, {_V2_CLASS}, block_table, is_grad_enabled=True)
    FlashAttnVarlenKVPackedFunc.forward(ctx, q, kv, {_LENGTHS}, {_V2_CLASS}, is_grad_enabled=True)
    FlashAttnVarlenQKVPackedFunc.forward(ctx, qkv, cu_seqlens, max_seqlen, {_V2_CLASS}, is_grad_enabled=True)
bert_padding = padding, flashtile.modules
    {_INDICES}
    unpad_input(hidden_states, attention_mask, unused_mask=None)
    unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length)
layers.rotary = rotary, flashtile.modules
    {_TURNS}
    apply_rotary_emb(x, cos, sin, {_ROTARY}); apply_rotary_emb_func(x, cos, sin, {_ROTARY})
    apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0,
        num_heads_q=None)
    apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0)
    RotaryEmbedding(dim, base=10000.0, interleaved=False, scale_base=None, device=None)
    RotaryEmbedding.forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None)
ops.triton.rotary = rotary, flashtile
    apply_rotary(x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False,
        conjugate=False)
ops.triton.layer_norm = norms: Triton
    layer_norm_fn({_NORM}, residual_in_fp32=False, zero_centered_weight=False, is_rms_norm=False, {_NORM_END})
    rms_norm_fn({_NORM}, residual_in_fp32=False, zero_centered_weight=False, {_NORM_END}); layer_norm_ref({_NORM_REF})
    rms_norm_ref({_NORM_REF})
    layer_norm_linear_fn(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-06,
        prenorm=False, residual_in_fp32=False, is_rms_norm=False)
    RMSNorm(hidden_size, eps=1e-05, dropout_p=0.0, zero_centered_weight=False, {_PLACE})
    RMSNorm.forward(self, x, residual=None, prenorm=False, residual_in_fp32=False)
ops.triton.cross_entropy = losses
    cross_entropy_loss(logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0,
        lse_square_scale=0.0, ignore_index=-100, inplace_backward=False, process_group=None)
losses.cross_entropy = losses
    CrossEntropyLoss(ignore_index=-100, reduction='mean', label_smoothing=0.0, logit_scale=1.0,
        lse_square_scale=0.0, inplace_backward=False, process_group=None, return_z_loss=False)
    CrossEntropyLoss.forward(self, input, target, precomputed_lse=None)
ops.activations = activations
    {_ACTIVATIONS}
    swiglu_fwd(x, y); swiglu_bwd(x, y, g); SwiGLUFunction.forward(ctx, x, y); swiglu(*args, **kwargs)
modules.mha = mha, flashtile.modules
    {_ATTENTION_MODULES}
    FlashSelfAttention({_INNER}, window_size=(-1, -1), alibi_slopes=None, deterministic=False, batch_invariant=False)
    FlashCrossAttention({_INNER}, alibi_slopes=None, window_size=(-1, -1), deterministic=False, batch_invariant=False)
    MHA(embed_dim, num_heads, num_heads_kv=None, {_MHA}, use_alibi=False, window_size=(-1, -1), {_MHA_END})
    MHA.allocate_inference_cache(self, batch_size, max_seqlen, dtype=None); get_alibi_slopes(nheads)
modules.mlp = dense, flashtile.modules
    {_PERCEPTRONS}
    GatedMlp({_MLP}, activation=sigmoid, bias1=True, bias2=True, multiple_of=128, return_residual=False, {_PLACE})
modules.block = block
    {_BLOCKS}
"""
VERSION_2 = Served(2, "flash_attn", "2.8.3", ("2.8.3", *_FIRST_COMMITTED), tables(_MODULES_2, _REMEDIES))

_V1 = "dropout_p, softmax_scale=None, causal=False, return_attn_probs=False, deterministic=False"
_V1_LOSS = "ignore_index=-100, reduction='mean', label_smoothing=0.0, inplace_backward=False, process_group=None"
_MODULES_1 = f"""{_BOTH}
flash_attn_interface = flash_attn_1
    flash_attn_unpadded_func(q, k, v, {_LENGTHS}, {_V1}); flash_attn_unpadded_kvpacked_func(q, kv, {_LENGTHS}, {_V1})
    flash_attn_unpadded_qkvpacked_func(qkv, cu_seqlens, max_seqlen, {_V1})
    flash_attn_unpadded_qkvpacked_split_func(qkv, cu_seqlens, max_seqlen0, max_seqlen1, batch_size0, {_V1})
    flash_attn_func(qkv, cu_seqlens, dropout_p, max_s->max_seqlen, softmax_scale=None, causal=False,
        return_attn_probs=False)
    _get_block_size(device, head_dim, is_dropout)
    _flash_attn_forward(q, k, v, out, {_LENGTHS}, dropout_p, softmax_scale, causal, return_softmax, num_splits=0~,
        generator=None)
    _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, {_LENGTHS}, dropout_p, softmax_scale, causal,
        rng_state=None, num_splits=0, generator=None)
flash_attention = flash_attn_1, flashtile.modules
    FlashAttention(softmax_scale=None, attention_dropout=0.0)
    FlashAttention.forward(self, qkv, key_padding_mask=None, causal=False, cu_seqlens=None, max_s=None,
        need_weights=False!)
    FlashMHA(embed_dim, num_heads, bias=True, batch_first=True, attention_dropout=0.0, causal=False, {_PLACE})
    FlashMHA.forward(self, x, key_padding_mask=None, need_weights=False)
flash_blocksparse_attn_interface = flash_attn_1
    convert_blockmask(blockmask, causal)
    flash_blocksparse_attn_func(qkv, cu_seqlens, blockmask, dropout_p, max_s, softmax_scale=None, causal=False,
        return_attn_probs=False, convert_mask=True)
flash_blocksparse_attention = flash_attn_1
    FlashBlocksparseAttention(sparsity_config, softmax_temp->softmax_scale=None, attention_dropout=0.0,
        max_seq_length=2048, {_PLACE})
    FlashBlocksparseAttention.forward(self, qkv, attn_mask=None!, key_padding_mask=None, causal=False,
        cu_seqlens=None, max_s=None, need_weights=False, convert_mask=True~)
    FlashBlocksparseMHA(embed_dim, num_heads, sparsity_config, bias=True, batch_first=True, attention_dropout=0.0,
        causal=False, max_seq_length=2048, {_PLACE}, **kwargs)
    FlashBlocksparseMHA.forward(self, x, x_ignored_, x_ignored_1_, attn_mask=None!, key_padding_mask=None,
        need_weights=False)
fused_softmax = flash_attn_1, flashtile
    scaled_upper_triang_masked_softmax(inputs, _, scale); scaled_masked_softmax(inputs->x, mask, scale)
bert_padding = flash_attn_1, padding
    {_INDICES}
    unpad_input(hidden_states, attention_mask)
layers.rotary = flash_attn_1, rotary
    {_TURNS}
    apply_rotary_emb_func(x, cos, sin, interleaved=False, inplace=False)
    apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False)
    RotaryEmbedding(dim, base=10000.0, interleaved=False, scale_base=None, pos_idx_in_fp32=True!, device=None)
    RotaryEmbedding.forward(self, qkv, seqlen_offset=0)
losses.cross_entropy = flash_attn_1
    CrossEntropyLoss({_V1_LOSS}); CrossEntropyLoss.forward(self, input, target); CrossEntropyLossApex({_V1_LOSS})
losses.cross_entropy_apex = flash_attn_1
    CrossEntropyLoss({_V1_LOSS}); CrossEntropyLossApex({_V1_LOSS})
ops.activations = activations
    {_ACTIVATIONS}
modules.mha = flash_attn_1, mha
    {_ATTENTION_MODULES}
    FlashSelfAttention({_INNER}, triton=False); FlashCrossAttention({_INNER}, triton=False)
    MHA(embed_dim, num_heads, {_MHA}, {_MHA_END})
    MHA.allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, fused_ft_kernel=True~)
modules.mlp = flash_attn_1, dense, flashtile.modules
    {_PERCEPTRONS}
    GatedMlp({_MLP}, activation=sigmoid, bias1=True, bias2=True, multiple_of=256, return_residual=False, {_PLACE})
modules.block = flash_attn_1
    {_BLOCKS}
"""
VERSION_1 = Served(1, "flash_attn", "1.0.9", ("1.0.9", *_FIRST_COMMITTED), tables(_MODULES_1, _REMEDIES))

_FACTORS = "q_descale=None, k_descale=None, v_descale=None"
_V3 = (
    f"softmax_scale=None, causal=False, qv=None, {_FACTORS}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1~, pack_gqa=None~, deterministic=False, sm_margin=0~, return_attn_probs=False"
)
_MODULES_3 = f"""
. = flash_attn_3
    flash_attn_func(q, k, v, {_V3}); flash_attn_varlen_func(q, k, v, {_LENGTHS}, seqused_q=None, seqused_k=None, {_V3})
    flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, {_FACTORS}, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0~, return_attn_probs=False)
    flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
        cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {_FACTORS}, softmax_scale=None, causal=False,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None~,
        num_splits=0, pack_gqa=None~, sm_margin=0~, return_softmax_lse=False)
    flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None)
    get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim,
        cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0,
        has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0)
"""
VERSION_3 = Served(3, "flash_attn_3", "3.0.0b1", ("3.0.0b1", *_FIRST_COMMITTED), tables(_MODULES_3, _REMEDIES))

_V4 = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1~, "
    "pack_gqa=None~, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
)
_V4_GATHER = "gather_bwd_recompute_p=False!, gather_bwd_token_chunk=None!"
_V4_INTERFACE = f"""
    flash_attn_func(q, k, v, qv=None, gather_kv_indices=None!, {_V4}, aux_tensors=None, aux_scalars=None,
        block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False~, {_V4_GATHER})
    flash_attn_varlen_func(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None~, seqused_q=None, seqused_k=None, gather_kv_indices=None!, page_table=None,
        {_V4}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False~,
        scheduler_metadata=None~, seqlen_k_per_split=None!, disable_scheduler_metadata=False~, {_V4_GATHER})
    flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None,
        virtual_batch_idx=None!, return_lse=True)
    get_scheduler_metadata(max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None,
        pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None,
        cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None,
        seqlen_k_per_split=None!)
"""
_MODULES_4 = f"""
. = flash_attn_4
    {_V4_INTERFACE}
interface = flash_attn_4
    {_V4_INTERFACE}
block_sparsity = functions
    BlockSparseTensorsTorch(mask_block_cnt, mask_block_idx, full_block_cnt=None, full_block_idx=None, block_size=None)
"""
# get_scheduler_metadata was read in a public annotated copy of flash_attn/cute/interface.py that names no release; its
# private `_arch` is left out.
_READ_4 = "4.0.0b36", "a list of the signatures of flash_attn.cute at that version", "2026-11-28"
VERSION_4 = Served(4, "flash_attn_4", "4.0.0", _READ_4, tables(_MODULES_4, _REMEDIES))

_PARAMETERS = (
    "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout->dropout_p, softmax_scale, zero_tensors~, "
    "is_causal->causal"
)
_BLOCKMASK = (
    "cu_seqlens_q, cu_seqlens_k, blockmask, max_seqlen_q, max_seqlen_k, p_dropout->dropout_p, softmax_scale, "
    "is_causal->causal"
)
_GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
_SECOND_LAYER = "input, gelu_in, output1, weight1, weight2, d_output2"
#: The compiled extensions of flash_attn 1 that programs import by themselves.
EXTENSIONS = tables(
    f"""
dropout_layer_norm = extensions_1
    dropout_add_ln_fwd(input, residual, gamma, beta, rowscale, colscale, x0_subset, z_subset, dropout_p, epsilon,
        rowscale_const, z_numrows, gen, residual_in_fp32=False, is_rms_norm=False)
    dropout_add_ln_bwd(dz, dx, x, x0, dmask, mu, rsigma, gamma, rowscale, colscale, x0_subset, z_subset, dropout_p,
        rowscale_const, x0_numrows, has_residual, is_rms_norm=False)
    dropout_add_ln_parallel_residual_fwd(input0, input1, residual, gamma0, beta0, gamma1, beta1, dropout_p, epsilon,
        gen, residual_in_fp32=False, is_rms_norm=False)
    dropout_add_ln_parallel_residual_bwd(dz0, dz1, dx, x, dmask0, dmask1, mu, rsigma, gamma0, gamma1, dropout_p,
        has_x1, has_residual, is_rms_norm=False)
flash_attn_cuda = extensions_1: attention_
    fwd(q, k, v, out, {_PARAMETERS}, return_softmax, num_splits, gen->generator=None)
    bwd({_GRADIENTS}, {_PARAMETERS}, num_splits, gen->generator=None, rng_state=None)
    fwd_block(q, k, v, {_BLOCKMASK}, return_softmax!, gen->generator=None)
    bwd_block({_GRADIENTS}, {_BLOCKMASK}, gen->generator=None)
fused_dense_lib = extensions_1
    linear_bias_forward(input->x, weight, bias); linear_bias_wgrad(input->x, d_output->dout, has_d_bias->bias=True)
    linear_bias_backward(input, weight, d_output); linear_bias_residual_backward(input, weight, d_output, d_input)
    linear_gelu_forward(input, weight, bias, save_gelu_in, heuristic~)
    linear_gelu_linear_backward({_SECOND_LAYER}, heuristic~)
    linear_residual_gelu_linear_backward({_SECOND_LAYER}, d_input, heuristic~)
    linear_act_forward(input, weight, bias, is_gelu, save_pre_act, heuristic~)
    bias_act_linear_dgrad_bgrad(weight, d_output, pre_act, is_gelu, heuristic~)
rotary_emb = extensions_1
    apply_rotary(x1, x2, cos, sin, out1, out2, conj)
scaled_masked_softmax_cuda = extensions_1: masked_
    forward(inputs->x, mask, scale_factor->scale); backward(output_grads, softmax_results, scale_factor)
    get_batch_per_block(query_seq_len, key_seq_len, batches, attn_heads)
scaled_upper_triang_masked_softmax_cuda = extensions_1: causal_
    forward(inputs->x, scale_factor->scale); backward(output_grads, softmax_results, scale_factor)
xentropy_cuda_lib = extensions_1: entropy_
    forward(logits, labels, smoothing, total_classes=-1)
    backward(grad_loss, logits, max_log_sum_exp, labels, smoothing, inplace, total_classes=-1)
""",
    _REMEDIES,
)

#: For each module name that can be installed, its versions; the first is the default.
SERVED: dict[str, tuple[Served, ...]] = {
    "flash_attn": (VERSION_2, VERSION_1),
    "flash_attn_interface": (VERSION_3,),
    "flash_attn.cute": (VERSION_4,),
    **{
        name: (Served(1, name, "1.0.9", ("1.0.9", *_FIRST_COMMITTED), {".": names}, "flash-attn-extensions"),)
        for name, names in EXTENSIONS.items()
    },
}
