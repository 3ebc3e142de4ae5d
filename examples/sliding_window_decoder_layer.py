"""A pre-norm decoder layer with grouped heads and a sliding causal window, trained for a few steps.

python examples/sliding_window_decoder_layer.py
"""

import torch
from torch import Tensor, nn

import flashtile


class DecoderLayer(nn.Module):
    """Each token sees itself and the `window` tokens before it. x is `[batch, seq, width]`."""

    def __init__(self, width: int, heads: int, heads_kv: int, window: int):
        super().__init__()
        self.head_dim, self.heads, self.heads_kv, self.window = width // heads, heads, heads_kv, window
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * heads_kv) * self.head_dim)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(self.norm_attention(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = packed.split([self.heads, self.heads_kv, self.heads_kv], dim=2)  # views: nothing is copied
        attended = flashtile.attention(q, k, v, causal=True, window=(self.window, None))
        x = x + self.project(attended.flatten(2))
        return x + self.mlp(self.norm_mlp(x))


def main() -> None:
    torch.manual_seed(0)
    layer = DecoderLayer(width=64, heads=4, heads_kv=2, window=16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    x = torch.randn(4, 128, 64)
    target = x.roll(5, dims=1)  # what was five tokens ago
    for step in range(31):
        loss = (layer(x) - target)[:, 5:].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:2d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
