"""Small, readable reference models over the public functions of flashtile."""

from flashtile.models.gpt import GPT, GPTConfig, flashtile_attention, plain_attention

__all__ = ["GPT", "GPTConfig", "flashtile_attention", "plain_attention"]
