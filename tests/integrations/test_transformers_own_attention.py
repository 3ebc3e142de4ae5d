"""Models of transformers with parts whose attention, or whose reading of masks, is their own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.testing import assert_same
from support.models import transformers_cases
from support.models.transformers_cases import SEQ, VOCABULARY, decoder, transformers
from support.running.each_case import each_case

IMAGES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
SAM_IMAGES = {**IMAGES, "output_channels": 16, "global_attn_indexes": [1], "window_size": 2, "num_pos_feats": 8}
#: Three packed sequences in one row.
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3]])


registered = transformers_cases.registered


def config_of(name: str, **sizes: Any) -> Any:
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    return getattr(transformers, name)(**sizes)


def git_config() -> Any:
    return config_of(
        "GitConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        vocab_size=VOCABULARY, max_position_embeddings=64,
        vision_config={**IMAGES, "intermediate_size": 48},
    )  # fmt: skip


def sam_config() -> Any:
    return config_of(
        "SamConfig", vision_config=dict(SAM_IMAGES),
        prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 8, "image_embedding_size": 4},
        mask_decoder_config={"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 32,
                             "iou_head_hidden_dim": 16},
    )  # fmt: skip


def spread(model: Any) -> Any:
    """Weights large enough that attention is far from even, and no dropout."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def check_switched(model: Any, inputs: dict[str, Any], real: Tensor | None = None) -> None:
    """Asserts that a model of eager attention gives the same when it is switched. `real`: rows that mean something."""
    ours = copy.deepcopy(spread(model))
    ours.set_attn_implementation("flashtile")
    torch.manual_seed(0)
    expected = model(**inputs)
    torch.manual_seed(0)
    actual = ours(**inputs)
    expected, actual = (out if isinstance(out, Tensor) else out[0] for out in (expected, actual))
    if real is not None:
        expected, actual = expected[real], actual[real]
    assert_same(actual, expected)


# --- classes that are chosen by the name of the implementation ------------------------------------------------------


def hybrid_config() -> Any:
    return config_of("DeepseekVLHybridConfig", high_res_vision_config={"model_type": "sam_vision_model", **SAM_IMAGES})


@each_case(
    "model, make_config, own",
    [
        ("GitModel", git_config, "GitSelfAttention"),
        ("SamModel", sam_config, "SamVisionAttention"),
        ("DeepseekVLHybridModel", hybrid_config, "SamVisionAttention"),
    ],
)
def test_a_part_whose_attention_is_its_own_is_named(model, make_config, own):
    config = make_config()
    with pytest.raises(ValueError, match=f"attn_implementation: expected 'eager' or 'sdpa' for {own}, which is"):
        getattr(transformers, model)._from_config(config, attn_implementation="flashtile")


def test_what_can_be_exchanged_of_such_a_model_is():
    model = transformers.SamModel._from_config(sam_config(), attn_implementation="eager")
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    check_switched(model, {"pixel_values": images, "input_points": torch.tensor([[[[3.0, 4.0], [20.0, 9.0]]]])})
    by_part = {"": "flashtile", "vision_config": "sdpa", "mask_decoder_config": "flashtile"}
    transformers.SamModel._from_config(sam_config(), attn_implementation=by_part)


# --- masks that models read themselves ------------------------------------------------------------------------------


@each_case("padded", [False, True])
def test_git_adds_its_mask_to_scores(padded):
    model = transformers.GitModel._from_config(git_config(), attn_implementation="eager")
    tokens = torch.arange(3, 3 + 2 * SEQ).view(2, SEQ)
    mask = torch.ones_like(tokens)
    mask[0, : 4 * padded] = 0
    check_switched(model, {"input_ids": tokens, "attention_mask": mask}, mask.bool())


def test_informer_wants_no_mask_where_it_hides_nothing():
    config = config_of(
        "InformerConfig", prediction_length=6, context_length=12, lags_sequence=[1, 2], d_model=16, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        num_time_features=1, sampling_factor=1,
    )  # fmt: skip
    model = transformers.InformerModel._from_config(config, attn_implementation="eager")
    past, future = (torch.linspace(0, 3, 2 * seq).sin().view(2, seq) for seq in (14, 6))
    check_switched(model, {
        "past_values": past, "past_time_features": past[..., None], "past_observed_mask": torch.ones(2, 14),
        "future_values": future, "future_time_features": future[..., None],
    })  # fmt: skip


def test_gemma4_cuts_the_mask_of_its_audio_into_blocks():
    config = config_of(
        "Gemma4AudioConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, attention_chunk_size=4,
        attention_context_left=5, attention_context_right=0, subsampling_conv_channels=(128, 8), output_proj_dims=16,
    )  # fmt: skip
    model = transformers.Gemma4AudioModel._from_config(config, attn_implementation="eager")
    features = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1))
    check_switched(model, {"input_features": features, "attention_mask": torch.arange(64) < torch.tensor([[64], [40]])})


def test_reading_order_of_documents_adds_its_mask_to_scores():
    path = "transformers.models.pp_doclayout_v2"
    models = pytest.importorskip(f"{path}.modeling_pp_doclayout_v2")
    configs = pytest.importorskip(f"{path}.configuration_pp_doclayout_v2")
    config = configs.PPDocLayoutV2ReadingOrderConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=2, intermediate_size=32
    )
    model = models.PPDocLayoutV2ReadingOrder._from_config(config, attn_implementation="eager")
    corners = torch.arange(24).view(2, 6, 2).float() * 30
    labels = torch.arange(12).view(2, 6) % 5
    found = torch.arange(6) < torch.tensor([[6], [3]])
    check_switched(model, {"boxes": torch.cat((corners, corners + 9), -1), "labels": labels, "mask": found})


# --- packed sequences -----------------------------------------------------------------------------------------------


def packed_tokens() -> dict[str, Any]:
    return {"input_ids": torch.arange(3, 3 + SEQ)[None], "position_ids": POSITIONS, "use_cache": False}


def test_indexers_that_read_the_mask_get_a_whole_one():
    config = config_of(
        "Qwen4ExpTextConfig", **decoder(), layer_types=["indexed_attention"] * 2, indexer_budget=4,
        indexer_compress_ratio=2, indexer_head_dim=16, indexer_kv_heads=1, indexer_n_heads=4, pad_token_id=0,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, hc_mult=2,
    )  # fmt: skip
    check_switched(transformers.AutoModel.from_config(config, attn_implementation="eager"), packed_tokens())


def test_keys_chosen_by_an_indexer_are_refused_by_name():
    config = config_of(
        "DeepseekV32Config", **decoder(num_key_value_heads=4), moe_intermediate_size=16, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_topk=4, index_n_heads=2,
        index_head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config, attn_implementation="flashtile")
    with pytest.raises(ValueError, match=r"indices: not served by .*; use attn_implementation='eager', or"):
        model(**packed_tokens())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_packed_sequences_with_a_position_bias(rows):
    config = config_of("InklingTextConfig", **decoder(num_key_value_heads=4), pad_token_id=0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    inputs = packed_tokens()
    for name in ("input_ids", "position_ids"):
        inputs[name] = inputs[name].expand(rows, -1).clone()
    inputs["position_ids"][1:] = torch.arange(SEQ)
    check_switched(model, inputs)
