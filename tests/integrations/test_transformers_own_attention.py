"""Models of transformers with parts whose attention, or whose reading of masks, is their own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.integrations.transformers import register, unregister
from transformers_cases import VOCABULARY, transformers

IMAGES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
SAM_IMAGES = {**IMAGES, "output_channels": 16, "global_attn_indexes": [1], "window_size": 2, "num_pos_feats": 8}


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    register()
    yield
    unregister()


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
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# --- classes that are chosen by the name of the implementation ------------------------------------------------------


def hybrid_config() -> Any:
    return config_of("DeepseekVLHybridConfig", high_res_vision_config={"model_type": "sam_vision_model", **SAM_IMAGES})


@pytest.mark.parametrize(
    ("model", "make_config", "own"),
    [
        ("GitModel", git_config, "GitSelfAttention"),
        ("SamModel", sam_config, "SamVisionAttention"),
        ("DeepseekVLHybridModel", hybrid_config, "SamVisionAttention"),
    ],
)
def test_a_part_whose_attention_is_its_own_is_named(model: str, make_config: Any, own: str) -> None:
    config = make_config()
    with pytest.raises(ValueError, match=f"attn_implementation: expected 'eager' or 'sdpa' for {own}, which is"):
        getattr(transformers, model)._from_config(config, attn_implementation="flashtile")


def test_what_can_be_exchanged_of_such_a_model_is() -> None:
    model = transformers.SamModel._from_config(sam_config(), attn_implementation="eager")
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    check_switched(model, {"pixel_values": images, "input_points": torch.tensor([[[[3.0, 4.0], [20.0, 9.0]]]])})
    by_part = {"": "flashtile", "vision_config": "sdpa", "mask_decoder_config": "flashtile"}
    transformers.SamModel._from_config(sam_config(), attn_implementation=by_part)
