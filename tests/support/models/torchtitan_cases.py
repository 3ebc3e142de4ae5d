"""What processes do with the example of torchtitan: each gets a mesh of all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_mask


def train_both(mesh: DeviceMesh) -> dict[str, tuple[list[float], list[float]]]:
    """Losses of the example, and those with a whole mask and PyTorch's SDPA, whose gradients PyTorch computes."""
    from trainers import torchtitan_llama as example

    class Plain(example.FlexAttention):  # type: ignore[name-defined,misc]
        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, **options: Any) -> Tensor:
            sizes = (q.shape[0], 1, q.shape[1], k.shape[1])
            mask = create_mask(attention_masks.mask_mod, *sizes, device="cpu")
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, scale=options.get("scale"), enable_gqa=options.get("enable_gqa", False)
            )
            return out.transpose(1, 2)

    class Config(example.FlexAttention.Config):  # type: ignore[name-defined,misc]
        def build(self, **_: Any) -> Plain:
            return Plain(self)

    Plain.Config = Config
    example.STEPS = 3
    return {"flashtile": example.train(), "plain": example.train(Plain)}
