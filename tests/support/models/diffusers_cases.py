"""Tiny transformers of diffusers' pipelines with random weights, their inputs, and what processes do with them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

diffusers = pytest.importorskip("diffusers", minversion="0.42")

from diffusers.models import attention_dispatch  # noqa: E402


def flux() -> tuple[Any, dict[str, Any]]:
    """Text and image in one sequence; heads of 64."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=64, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    image = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(5.0))
    return model, {
        "hidden_states": drawn(1, 20, 4), "encoder_hidden_states": drawn(1, 8, 16), "pooled_projections": drawn(1, 16),
        "timestep": torch.tensor([0.5]), "img_ids": image, "txt_ids": torch.zeros(8, 3),
    }  # fmt: skip


def wan() -> tuple[Any, dict[str, Any]]:
    """A video that also attends to 512 tokens of text; heads of 128."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=128, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=1, rope_max_seq_len=16,
    )  # fmt: skip
    return model, {
        "hidden_states": drawn(1, 4, 2, 6, 4), "encoder_hidden_states": drawn(1, 512, 16), "timestep": torch.tensor([5])
    }  # fmt: skip


def qwen_image() -> tuple[Any, dict[str, Any]]:
    """Text of different lengths, padded and masked, and image in one sequence; heads of 64."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=1, attention_head_dim=64, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    return model, {
        "hidden_states": drawn(2, 20, 16), "encoder_hidden_states": drawn(2, 8, 16), "timestep": torch.ones(2),
        "encoder_hidden_states_mask": mask, "img_shapes": [[(1, 4, 5)]] * 2,
    }  # fmt: skip


MODELS = {"flux": flux, "wan": wan, "qwen-image": qwen_image}


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def build(name: str, backend: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """A model that is the same in each call, and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.set_attention_backend(backend)
    given = {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    return model.to(dtype).eval(), given


# --- processes ------------------------------------------------------------------------------------------------------

STRATEGIES = {
    "ring": {"ring_degree": 2},
    "ulysses": {"ulysses_degree": 2},
    "ring anything": {"ring_degree": 2, "ring_anything": True},
    "ulysses anything": {"ulysses_degree": 2, "ulysses_anything": True},
}
#: On four processes.
BOTH = {"ring_degree": 2, "ulysses_degree": 2}
SEQ, HEADS, DIM = 12, 4, 64


def parallel_config(strategy: str, mesh: DeviceMesh) -> Any:
    given = diffusers.ContextParallelConfig(**STRATEGIES.get(strategy, BOTH))
    config = diffusers.ParallelConfig(context_parallel_config=given)
    square = init_device_mesh(mesh.device_type, given.mesh_shape, mesh_dim_names=given.mesh_dim_names)
    config.setup(mesh.get_rank(), mesh.size(), torch.device("cpu"), mesh=square)
    return config


def qkv() -> list[Tensor]:
    return [drawn(2, SEQ, HEADS, DIM, seed=seed) for seed in range(4)]  # and the gradient of the result


def mask_of_keys() -> Tensor:
    return torch.arange(SEQ) < torch.tensor([[SEQ], [7]])


def over_shards(mesh: DeviceMesh) -> dict[str, Any]:
    """This rank's part of results and gradients of attention by each strategy."""
    from flashtile.integrations.diffusers import register

    register()

    def shard(tensor: Tensor) -> Tensor:
        return tensor.chunk(mesh.size(), dim=1)[mesh.get_rank()].contiguous()

    found: dict[str, Any] = {}
    for strategy in STRATEGIES if mesh.size() == 2 else ["both"]:
        config = parallel_config(strategy, mesh)
        for masked in (False, True):
            q, k, v, dout = map(shard, qkv())
            leaves = [t.requires_grad_(not strategy.endswith("anything")) for t in (q, k, v)]
            given = {"attn_mask": shard(mask_of_keys())} if masked else {}
            name = f"{strategy}, masked" if masked else strategy
            try:
                out = attention_dispatch.dispatch_attention_fn(
                    *leaves, **given, backend="flashtile", parallel_config=config
                )
            except ValueError as error:
                found[name] = str(error)
                continue
            found[name] = [out.detach(), *(torch.autograd.grad(out, leaves, dout) if out.requires_grad else ())]
    with torch.autocast("cpu", torch.bfloat16):
        strategy = "ring" if mesh.size() == 2 else "both"
        found["autocast"] = attention_dispatch.dispatch_attention_fn(
            *map(shard, qkv()[:3]), backend="flashtile", parallel_config=parallel_config(strategy, mesh)
        )
    return found


def model_over_shards(mesh: DeviceMesh) -> dict[str, Tensor]:
    """The output of models whose sequences are cut over ranks. diffusers asks for the number of accelerators."""
    from flashtile.integrations.diffusers import register

    register()
    found = {}
    for name in ("flux", "wan"):
        for strategy in ("ring", "ulysses"):
            model, inputs = build(name, "flashtile")
            with mock.patch.object(torch.accelerator, "device_count", return_value=2):
                model.enable_parallelism(config=diffusers.ContextParallelConfig(**STRATEGIES[strategy]))
            with torch.no_grad():
                found[f"{name}, {strategy}"] = model(**inputs, return_dict=False)[0]
    return found


JOBS = {"attention": over_shards, "models": model_over_shards}
