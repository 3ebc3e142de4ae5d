"""Attention without projections as modules: q, k, v apart, packed as qkv, or q and packed kv; dense or varlen."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import flashtile
from flashtile import BlockMask

#: Queries of a sequence up to which they are a step of decoding, not a prompt.
_FEW_QUERIES = 16


class _Attention(nn.Module):
    """`flashtile.attention`, or `attention_varlen` with cu_seqlens, and its options; dropout in training only."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0,
        window_size: tuple[int | None, int | None] = (-1, -1), alibi_slopes: Tensor | None = None,
        deterministic: bool = False, batch_invariant: bool = False, **other_names: NoReturn,
    ) -> None:  # fmt: skip
        if other_names:
            refuse_other_names(self, _Attention.__init__, other_names)
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.attention_dropout = attention_dropout
        self.window_size = window_size
        self.window = _window(window_size)
        self.deterministic = deterministic
        self.batch_invariant = batch_invariant
        if alibi_slopes is not None and alibi_slopes.requires_grad:
            raise ValueError(
                "alibi_slopes: expected constants, got a tensor with a gradient; flashtile.attention learns slopes"
            )
        # No buffer, because slopes stay float32 when a module is cast.
        self._alibi_slopes = alibi_slopes

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool | None = None, cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None,
        block_mask: BlockMask | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of q `[B, Sq, Hq, D]` to k and v `[B, Sk, Hkv, D]`, or with cu_seqlens `[total, H, D]`. `causal`,
        where given, comes before the module's own."""
        options = self.options(q, causal)
        if block_mask is not None:
            options["block_mask"] = block_mask
        if cu_seqlens_q is not None:
            options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
            return flashtile.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
        for name, given in (
            ("max_seqlen", max_seqlen_q), ("cu_seqlens_k", cu_seqlens_k), ("max_seqlen_k", max_seqlen_k),
        ):  # fmt: skip
            if given is not None:
                raise ValueError(f"{name}: expected None without cu_seqlens, got a value; it belongs to packed inputs")
        return flashtile.attention(q, k, v, **options)

    def options(self, q: Tensor, causal: bool | None = None) -> dict[str, Any]:
        """The keyword arguments of `flashtile.attention`; `causal`, where given, comes before the module's."""
        options: dict[str, Any] = {
            "causal": self.causal if causal is None else causal,
            "window": self.window,
            "scale": self.softmax_scale,
            "dropout_p": self.attention_dropout if self.training else 0.0,
            "deterministic": self.deterministic,
        }
        if self.batch_invariant:
            options["batch_invariant"] = True
        if self._alibi_slopes is not None:
            options["alibi_slopes"] = self._slopes_for(q)
        return options

    def _slopes_for(self, q: Tensor) -> Tensor | None:
        """The slopes on q's device, where they stay; but for a device, or a q, that holds no values."""
        if self._alibi_slopes is None:
            return None
        wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        slopes = self._alibi_slopes.to(q.device, wide)
        if type(slopes) is Tensor and not slopes.is_meta:
            self._alibi_slopes = slopes
        return slopes

    def extra_repr(self) -> str:
        return f"causal={self.causal}, window_size={self.window_size}, attention_dropout={self.attention_dropout}"


class InnerAttention(_Attention):
    """Attention of queries, keys and values, each a tensor; arguments as `FlashSelfAttention`."""

    forward = _Attention._attend

    def decodes(self, q: Tensor) -> bool:
        """Whether `decode` serves queries: it has no dropout, and splits the keys, which pays with few queries."""
        return q.shape[1] <= _FEW_QUERIES and not (self.training and self.attention_dropout)

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, length: int | Tensor, **more: Any) -> Tensor:
        """Attention of the last queries to the first `length` rows of a cache `[B, capacity, Hkv, D]`; `more` are
        further arguments of `flashtile.attention_with_kv_cache`."""
        return flashtile.attention_with_kv_cache(
            q, k_cache, v_cache, cache_lengths=length, causal=self.causal, window=self.window, scale=self.softmax_scale,
            alibi_slopes=self._slopes_for(q), batch_invariant=self.batch_invariant, **more,
        )  # fmt: skip


class FlashSelfAttention(_Attention):
    """Attention of packed queries, keys and values, by `flashtile.attention` or `attention_varlen`.

    Args:
        causal: hide the keys right of the diagonal, which ends at the last key.
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
        attention_dropout: probability that an attention weight is dropped, in training.
        window_size: (left, right) number of keys visible on each side of the diagonal, -1 or None = unlimited.
        alibi_slopes: float32 `[heads]` or `[batch, heads]`.
        deterministic: the gradients are the same in every run.
        batch_invariant: as in `flashtile.attention`.
    """

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
        **other_names: NoReturn,
    ) -> Tensor:  # fmt: skip
        """Attention of qkv to itself.

        Args:
            qkv: `[batch, seq, 3, heads, head_dim]`; with cu_seqlens `[total, 3, heads, head_dim]`.
            causal: overrides the module's own setting.
            cu_seqlens: `[batch + 1]` cumulative lengths of packed sequences.
            max_seqlen: upper bound of the lengths; it helps to choose tiles.

        Returns:
            `[batch, seq, heads, head_dim]`, or `[total, heads, head_dim]`.
        """
        if other_names:
            refuse_other_names(self, FlashSelfAttention.forward, other_names)
        q, k, v = unpacked("qkv", qkv, 3, cu_seqlens is not None)
        return self._attend(q, k, v, causal, cu_seqlens, max_seqlen, max_seqlen_k=max_seqlen)


class FlashCrossAttention(_Attention):
    """Attention of queries to packed keys and values. Arguments as for `FlashSelfAttention`."""

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None,
        **other_names: NoReturn,
    ) -> Tensor:  # fmt: skip
        """Attention of q to kv.

        Args:
            q: `[batch, seq_q, heads_q, head_dim]`; with cu_seqlens `[total_q, heads_q, head_dim]`.
            kv: `[batch, seq_k, 2, heads_kv, head_dim]`, or `[total_k, 2, heads_kv, head_dim]`; `heads_kv` divides
                `heads_q`.
            causal: overrides the module's own setting.
            cu_seqlens: `[batch + 1]` cumulative lengths of packed queries.
            max_seqlen: upper bound of their lengths.
            cu_seqlens_k: cumulative lengths of packed keys; default cu_seqlens.
            max_seqlen_k: upper bound of their lengths.

        Returns:
            A tensor of the shape of q.
        """
        if other_names:
            refuse_other_names(self, FlashCrossAttention.forward, other_names)
        k, v = unpacked("kv", kv, 2, cu_seqlens is not None)
        of_keys = cu_seqlens_k, max_seqlen_k
        return self._attend(q, k, v, causal, cu_seqlens, max_seqlen, *of_keys)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of ALiBi, float32 `[heads]`: `2 ** (-8 (h + 1) / heads)` for a power of two.

    For another number of heads, the slopes of the next lower power of two come first. The rest are every other slope of
    the next higher power of two.

    Args:
        heads: number of query heads, at least 1.
        device: device of the result.

    Raises:
        TypeError: heads is no int.
        ValueError: heads is less than 1.

    Reference:
        Press, Smith, Lewis, "Train Short, Test Long" (2021).
    """
    if isinstance(heads, bool) or not isinstance(heads, int):
        raise TypeError(f"heads: expected an int, got {heads!r}; pass the number of query heads")
    if heads < 1:
        raise ValueError(f"heads: expected at least 1, got {heads}; pass the number of query heads")
    lower = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / lower) for h in range(lower)]
    slopes += [2 ** (-4 * (2 * h + 1) / lower) for h in range(heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _window(window_size: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The window as `flashtile.attention` takes it, which checks the numbers."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: expected a pair (left, right), got {window_size!r}; -1 is an unlimited side")
    left, right = (None if side == -1 else side for side in window_size)
    return left, right


def unpacked(name: str, packed: Tensor, parts: int, varlen: bool) -> tuple[Tensor, ...]:
    """Views of the parts, which are the third dimension from the end."""
    layout = "[total" if varlen else "[batch, seq"
    if packed.dim() != (4 if varlen else 5) or packed.shape[-3] != parts:
        raise ValueError(
            f"{name}: expected shape {layout}, {parts}, heads, head_dim], got {list(packed.shape)}; cu_seqlens says "
            "which of the layouts it is"
        )
    return packed.unbind(-3)


_MASK = (
    "key_padding_mask=, True = keep, hides padded keys; causal=True belongs to the module; flashtile.attention takes "
    "other masks"
)
_WEIGHTS = "leave it out, the weights are never in memory; flashtile.attention_probs computes those of chosen rows"
_NOT_NEEDED = "leave it out, flashtile has one way to compute it"
_NO_SUCH = "leave it out, there are no such parameters"

#: An argument of another library -> those of the modules that mean the same; or what to do where there is none.
OTHER_NAMES: dict[str, tuple[str, ...] | str] = {
    "d_model": ("embed_dim",),
    "nheads": ("num_heads",),
    "num_kv_heads": ("num_heads_kv",),
    "bias": ("qkv_proj_bias", "out_proj_bias"),
    "dropout": ("attention_dropout",),
    "dropout_p": ("dropout", "attention_dropout"),
    "attention_dropout": ("dropout",),
    "scale": ("softmax_scale",),
    "window": ("window_size",),
    "batch_first": "leave it out, dense inputs are [batch, seq, ...]",
    "add_bias_kv": _NO_SUCH,
    "add_zero_attn": _NO_SUCH,
    "kdim": "leave it out, keys and values are as wide as the queries",
    "vdim": "leave it out, keys and values are as wide as the queries",
    "use_flash_attn": _NOT_NEEDED,
    "fused_bias_fc": _NOT_NEEDED,
    "checkpointing": "leave it out, torch.utils.checkpoint.checkpoint around the module does this",
    "key": ("x_kv", "kv"),
    "value": ("x_kv", "kv"),
    "mask": _MASK,
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "is_causal": ("causal",),
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "cu_seqlens_q": ("cu_seqlens",),
    "max_seqlen_q": ("max_seqlen",),
    "max_s": ("max_seqlen",),
    "inference_params": ("cache",),
    "past_key_value": ("cache",),
}


def refuse_other_names(module: object, method: Callable[..., Any], given: Iterable[str]) -> NoReturn:
    """Raises TypeError for the arguments that a module, or a call of it (`method`), was given and does not have."""
    of = type(module).__name__ if method.__name__ == "__init__" else f"a call of {type(module).__name__}"
    parameters = inspect.signature(method).parameters.values()
    ours = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD][1:]
    raise TypeError(". ".join(f"{of} has no argument {name}; {_remedy(name, ours)}" for name in given))


def _remedy(name: str, ours: list[str]) -> str:
    known = OTHER_NAMES.get(name, ())
    if isinstance(known, str):
        return known
    if names := [our for our in known if our in ours]:
        return f"it is called {' and '.join(names) if name == 'bias' else names[0]}"
    if name == "is_causal":
        return "pass causal=True when you make the module"
    close = difflib.get_close_matches(name, ours, 1)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(ours)}"
