"""Multi-head attention with its projections: grouped heads, rotary, ALiBi, padding masks, packed inputs, KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

import flashtile
from flashtile import BlockMask
from flashtile.modules.attention import InnerAttention, alibi_slopes, refuse_other_names
from flashtile.modules.layers import check_sizes, computes_only, is_hooked
from flashtile.modules.padding import pad_input, unpad_input
from flashtile.modules.rotary import RotaryEmbedding
from flashtile.ops.common.sizes import differ


class KVCache:
    """Keys and values of the tokens so far, for one layer, in buffers that are allocated once.

    Args:
        batch: number of sequences, which all have the same length.
        capacity: number of tokens that fit.
        heads_kv: heads of keys and values.
        head_dim: head dimension of keys and values.
        device: device of the buffers.
        dtype: dtype of the buffers, which is that of the keys.

    Attributes:
        k, v: `[batch, capacity, heads_kv, head_dim]`.
        length: number of tokens in the cache. The host knows it, so nothing waits for the GPU. Set it to 0 to start
            again, or to a lower number to forget the last tokens.

    Raises:
        TypeError: a size is no int.
        ValueError: a size is below 0.
    """

    def __init__(
        self, batch: int, capacity: int, heads_kv: int, head_dim: int, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        check_sizes(batch=batch, capacity=capacity, heads_kv=heads_kv, head_dim=head_dim)
        self.k = torch.empty(batch, capacity, heads_kv, head_dim, device=device, dtype=dtype)
        self.v = torch.empty_like(self.k)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k and v `[batch, new, heads_kv, head_dim]`. Returns views of the filled part."""
        wanted = (self.k.shape[0], k.shape[1], *self.k.shape[2:])
        for name, given in (("k", k), ("v", v)):
            if given.shape != wanted:
                raise ValueError(f"{name}: expected shape {wanted}, that of the cache, got {tuple(given.shape)}")
            if given.dtype is not self.k.dtype or given.device != self.k.device:
                raise ValueError(
                    f"{name}: expected {self.k.dtype} on {self.k.device}, those of the cache, got {given.dtype} on "
                    f"{given.device}; make the cache with dtype= and device="
                )
            if given.requires_grad:
                raise ValueError(f"{name}: expected no gradient with a cache, got one; decode under torch.no_grad()")
        end = self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"cache: expected at most {self.capacity} tokens, its capacity, got {end}; make it larger")
        self.k[:, self.length : end] = k
        self.v[:, self.length : end] = v
        self.length = end
        return self.k[:, :end], self.v[:, :end]


class _Lengths(NamedTuple):
    """The lengths of packed sequences, by their names as arguments of `MHA.forward`."""

    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_k: int | None = None


class MHA(nn.Module):
    """Multi-head attention: projections, position embedding, attention, output projection.

    State-dict keys are `Wqkv` (with cross_attn `Wq` and `Wkv`) and `out_proj`. The rows of `Wqkv` are first the heads
    of q, then those of k, then those of v. In a padding mask True means keep, the opposite of
    `torch.nn.MultiheadAttention`.

    Args:
        embed_dim: width of inputs and outputs, a multiple of num_heads.
        num_heads: heads of the queries.
        num_heads_kv: heads of keys and values, a divisor of num_heads; default num_heads.
        cross_attn: keys and values come from a second input.
        qkv_proj_bias: the input projections have a bias.
        out_proj_bias: the output projection has a bias.
        dropout: probability that an attention weight is dropped, in training.
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
        causal: tokens see no later tokens.
        layer_idx: index of this layer's cache in a sequence of caches.
        rotary_emb_dim: elements of a head that are rotated; 0 = no rotary embedding.
        rotary_emb_base: base of the rotary frequencies.
        rotary_emb_scale_base: scale base of xPos; None = no xPos.
        rotary_emb_interleaved: neighbouring elements form a pair, else elements `i` and `i + rotary_emb_dim / 2`.
        use_alibi: add the biases of ALiBi to the scores.
        window_size: (left, right) number of keys visible on each side, -1 or None = unlimited.
        return_residual: also return the input.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        TypeError: a size is no int, or an argument has another library's name.
        ValueError: head counts do not divide, or rotary embedding is combined with cross attention.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, num_heads_kv: int | None = None, cross_attn: bool = False,
        qkv_proj_bias: bool = True, out_proj_bias: bool = True, dropout: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, layer_idx: int | None = None, rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0, rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False, use_alibi: bool = False,
        window_size: tuple[int | None, int | None] = (-1, -1), return_residual: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **other_names: NoReturn,
    ) -> None:  # fmt: skip
        if other_names:
            refuse_other_names(self, MHA.__init__, other_names)
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        _check_sizes(embed_dim, num_heads, num_heads_kv)
        if cross_attn and rotary_emb_dim:
            raise ValueError(
                f"rotary_emb_dim: expected 0 with cross_attn=True, got {rotary_emb_dim}; queries and keys of two "
                "sequences have no common positions"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.use_alibi = use_alibi
        self.return_residual = return_residual
        width_kv = 2 * num_heads_kv * self.head_dim
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, qkv_proj_bias, device, dtype)
            self.Wkv = nn.Linear(embed_dim, width_kv, qkv_proj_bias, device, dtype)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + width_kv, qkv_proj_bias, device, dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, out_proj_bias, device, dtype)
        self.rotary_emb = (
            RotaryEmbedding(rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device)
            if rotary_emb_dim
            else None
        )
        # On the CPU whatever the default device is, such as meta: it is a constant, not a parameter to be loaded.
        slopes = alibi_slopes(num_heads, "cpu") if use_alibi else None
        inner = InnerAttention(causal, softmax_scale, dropout, window_size, slopes)
        self.windowed = inner.window != (None, None)
        self.inner_attn: nn.Module = inner

    def forward(
        self, x: Tensor, x_kv: Tensor | None = None, key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None, cache: KVCache | Sequence[KVCache] | None = None,
        position_ids: Tensor | None = None, block_mask: BlockMask | None = None, **other_names: NoReturn,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attention of x to itself, or with cross_attn to x_kv.

        Args:
            x: `[batch, seq, embed_dim]`; with cu_seqlens `[total, embed_dim]`.
            x_kv: `[batch, seq_k, embed_dim]`, or `[total_k, embed_dim]`, with cross_attn only.
            key_padding_mask: bool, True = keep (`torch.nn.MultiheadAttention` has True = ignore): `[batch, seq]`, or
                with cross_attn `[batch, seq_k]`. The other rows are removed before anything is computed (`unpad_input`,
                which waits for the GPU once): no token sees them, their output is 0, and positions count the kept rows.
            cu_seqlens: `[batch + 1]` cumulative lengths of packed sequences.
            max_seqlen: upper bound of the lengths; it helps to choose tiles, and keeps rotary tables short.
            cu_seqlens_k: cumulative lengths of x_kv.
            max_seqlen_k: upper bound of the lengths of x_kv.
            cache: x follows the tokens in the cache, and is appended to it. With layer_idx, a sequence of the caches of
                all layers. Only for causal self-attention of dense x, because all sequences of a cache have the same
                length.
            position_ids: int32 or int64 `[batch, seq]` or `[1, seq]`, less than seq: positions for rotary embedding,
                if there is one; None = tokens follow one another. Only for dense self-attention without a cache.
            block_mask: which tokens see which, as well as causal and window_size; only as position_ids.

        Returns:
            A tensor of the shape of x; with return_residual a pair of it and x.

        Raises:
            TypeError: an argument has another library's name.
            ValueError: arguments cannot be combined, or a shape is wrong.
        """
        if other_names:
            refuse_other_names(self, MHA.forward, other_names)
        lengths = _Lengths(cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k)
        if position_ids is None and block_mask is None:
            out = self._output(x, x_kv, key_padding_mask, lengths, cache)
        else:
            others = (x_kv, key_padding_mask, *lengths, cache)
            self._check_tree(x, position_ids, block_mask, any(other is not None for other in others))
            out = self._attend(x, None, lengths, position_ids, block_mask)
        return (out, x) if self.return_residual else out

    def _output(
        self,
        x: Tensor,
        x_kv: Tensor | None,
        key_padding_mask: Tensor | None,
        lengths: _Lengths = _Lengths(),  # noqa: B008
        cache: KVCache | Sequence[KVCache] | None = None,
    ) -> Tensor:
        self._check_inputs(x, x_kv, lengths)
        if key_padding_mask is not None:
            self._check_mask(x, x_kv, key_padding_mask, lengths.cu_seqlens)
        if cache is not None:
            self._check_cache(key_padding_mask, lengths.cu_seqlens)
            return self._decode(x, self._own(cache))
        if key_padding_mask is None:
            return self._attend(x, x_kv, lengths)
        kept = unpad_input(x if x_kv is None else x_kv, key_padding_mask)
        if x_kv is None:
            out = self._attend(kept.x, None, _Lengths(kept.cu_seqlens, kept.max_seqlen))
            return pad_input(out, kept.indices, *key_padding_mask.shape)
        # Queries are packed too, all of one length.
        batch, seq = x.shape[:2]
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seq
        out = self._attend(x.flatten(0, 1), kept.x, _Lengths(cu_seqlens, seq, kept.cu_seqlens, kept.max_seqlen))
        return out.unflatten(0, (batch, seq))

    def _attend(
        self, x: Tensor, x_kv: Tensor | None, lengths: _Lengths, position_ids: Tensor | None = None,
        block_mask: BlockMask | None = None,
    ) -> Tensor:  # fmt: skip
        if x_kv is None:
            cu_seqlens, max_seqlen, *_ = lengths
            lengths = _Lengths(cu_seqlens, max_seqlen, cu_seqlens, max_seqlen)
            longest = None if cu_seqlens is None else max_seqlen
            q, k, v = self._project(x, longest, 0, cu_seqlens, max_seqlen, position_ids)
        else:
            q = self._heads(self.Wq(x), self.num_heads)
            k, v = self._heads(self.Wkv(x_kv), 2 * self.num_heads_kv).chunk(2, dim=-2)
        masks = () if block_mask is None else (block_mask,)
        return self.out_proj(self.inner_attn(q, k, v, None, *lengths, *masks).flatten(-2))

    def _decode(self, x: Tensor, cache: KVCache) -> Tensor:
        # Tables for all that fits, made once: those for each length would be new in every step.
        q, k, v = self._project(x, max(cache.capacity, cache.length + x.shape[1]), cache.length)
        k, v = cache.append(k, v)
        inner = self.inner_attn
        if isinstance(inner, InnerAttention) and inner.decodes(q):
            out = inner.decode(q, cache.k, cache.v, cache.length)
        else:
            out = inner(q, k, v)
        return self.out_proj(out.flatten(-2))

    def _project(
        self, x: Tensor, positions: int | None, offset: int = 0, cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None, position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """q, k and v of x with their positions in them, views of one tensor: `[..., heads, head_dim]`. Rotary tables
        have so many `positions` (None: as many as tokens), and x begins at `offset`."""
        qkv = self._heads(self.Wqkv(x), self.num_heads + 2 * self.num_heads_kv)
        if self.rotary_emb is not None:
            # Positions are counted in the projection: if ranks share the tokens of x, it has the tokens of all.
            positions = qkv.shape[-3] if positions is None else positions
            tables = self.rotary_emb.tables(positions, x.device)
            style = self.rotary_emb.interleaved, _output_is_ours(self.Wqkv)
            qkv = flashtile.apply_rotary_qkv(
                qkv, *tables, *style, seqlen_offsets=offset, num_heads_q=self.num_heads, cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen, position_ids=position_ids,
            )  # fmt: skip
        q, k, v = qkv.split([self.num_heads, self.num_heads_kv, self.num_heads_kv], dim=-2)
        return q, k, v

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim))

    def _own(self, cache: KVCache | Sequence[KVCache]) -> KVCache:
        if isinstance(cache, KVCache):
            return cache
        if self.layer_idx is None:
            raise ValueError(
                "cache: expected a KVCache without layer_idx, got a sequence; layer_idx says which is this"
            )
        return cache[self.layer_idx]

    def _check_inputs(self, x: Tensor, x_kv: Tensor | None, lengths: _Lengths) -> None:
        """Checks which arguments go together, and their shapes; the functions below check their contents."""
        if (x_kv is None) is self.cross_attn:
            expected, came = ("a tensor", "None") if self.cross_attn else ("None", "a tensor")
            raise ValueError(
                f"x_kv: expected {expected} with cross_attn={self.cross_attn}, got {came}; without cross_attn x "
                "attends to itself"
            )
        cu_seqlens = lengths.cu_seqlens
        layout = "[batch, seq, embed_dim]" if cu_seqlens is None else "[total, embed_dim], packed by cu_seqlens"
        for name, given in (("x", x), ("x_kv", x_kv)):
            if given is None:
                continue
            if given.dim() != (3 if cu_seqlens is None else 2) or given.shape[-1] != self.embed_dim:
                raise ValueError(
                    f"{name}: expected {layout}, with embed_dim {self.embed_dim}, got shape {tuple(given.shape)}"
                )
        if x_kv is not None and cu_seqlens is None and differ(x_kv.shape[:1], x.shape[:1]):
            raise ValueError(f"x_kv: expected the batch of x, {x.shape[0]}, got {x_kv.shape[0]}")
        named = [name for name, value in zip(_Lengths._fields, lengths) if value is not None]
        if named and cu_seqlens is None:
            raise ValueError(f"{named[0]}: expected None without cu_seqlens, got a value; it belongs to packed inputs")
        of_keys = [name for name in named if name.endswith("_k")]
        if of_keys and not self.cross_attn:
            raise ValueError(f"{of_keys[0]}: expected None with cross_attn=False, got a value; keys are those of x")
        if self.cross_attn and cu_seqlens is not None and lengths.cu_seqlens_k is None:
            raise ValueError("cu_seqlens_k: expected a tensor beside cu_seqlens with cross_attn=True, got None")

    def _check_mask(self, x: Tensor, x_kv: Tensor | None, mask: Tensor, cu_seqlens: Tensor | None) -> None:
        if cu_seqlens is not None:
            raise ValueError("key_padding_mask: expected None with cu_seqlens, got a tensor; packed x has no padding")
        masked = x if x_kv is None else x_kv
        if mask.dtype is not torch.bool or differ(mask.shape, masked.shape[:2]):
            raise ValueError(
                f"key_padding_mask: expected bool {tuple(masked.shape[:2])}, True = keep, got {mask.dtype} "
                f"{tuple(mask.shape)}; one element a key"
            )
        if self.cross_attn and (self.causal or self.use_alibi or self.windowed):
            raise ValueError(
                "key_padding_mask: expected None where cross attention is causal, has a window or ALiBi, got a tensor; "
                "taking keys out would move the diagonal, pack both inputs with cu_seqlens instead"
            )

    def _check_tree(self, x: Tensor, position_ids: Tensor | None, block_mask: BlockMask | None, others: bool) -> None:
        """Checks what may come with position_ids or block_mask."""
        if others or self.cross_attn:
            raise ValueError(
                "position_ids, block_mask: expected None except for dense self-attention without a cache, got a value"
            )
        if not isinstance(self.inner_attn, InnerAttention):
            other = type(self.inner_attn).__name__
            raise ValueError(f"position_ids, block_mask: expected None with {other} as attention, got a value")
        self._check_inputs(x, None, _Lengths())
        left, right = self.inner_attn.window
        xpos = self.rotary_emb is not None and self.rotary_emb.scale_base is not None
        if position_ids is not None and (left is not None or right or self.use_alibi or xpos):
            raise ValueError("position_ids: expected None with a window, ALiBi or xPos, got a tensor; these count rows")

    def _check_cache(self, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        if self.cross_attn or not self.causal:
            raise ValueError(
                "cache: expected None where attention is not causal self-attention, got one; earlier tokens would have "
                "to see the new ones"
            )
        if key_padding_mask is not None or cu_seqlens is not None:
            raise ValueError(
                "cache: expected None with key_padding_mask or cu_seqlens, got one; a cache holds sequences of one "
                "length"
            )
        if self.rotary_emb is not None and self.rotary_emb.scale_base is not None:
            raise ValueError(
                "cache: expected None with rotary_emb_scale_base, got one; the decay of xPos depends on the length of "
                "the table, which grows with the tokens"
            )


def _output_is_ours(projection: nn.Module) -> bool:
    """Whether nothing else reads what a projection wrote, so that the rotation may be in place: it is a linear layer,
    which does not need its output for its gradients, and no hook sees the output."""
    if getattr(projection, "keeps_no_output", False):
        return not is_hooked(projection)
    return computes_only(projection, nn.Linear)


class FlashMHA(MHA):
    """Multi-head self-attention with the interface of the first FlashAttention: an `MHA` that returns a pair.

    Args:
        embed_dim: width of inputs and outputs, a multiple of num_heads.
        num_heads: number of heads.
        bias: all projections have a bias.
        batch_first: x is `[batch, seq, embed_dim]`, else `[seq, batch, embed_dim]`.
        attention_dropout: probability that an attention weight is dropped, in training.
        causal: tokens see no later tokens.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, bias: bool = True, batch_first: bool = True,
        attention_dropout: float = 0.0, causal: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, **other_names: NoReturn,
    ) -> None:  # fmt: skip
        if other_names:
            refuse_other_names(self, FlashMHA.__init__, other_names)
        super().__init__(
            embed_dim, num_heads, qkv_proj_bias=bias, out_proj_bias=bias, dropout=attention_dropout, causal=causal,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.batch_first = batch_first

    def forward(  # type: ignore[override]
        self, x: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = False, **other_names: NoReturn
    ) -> tuple[Tensor, None]:
        """Attention of x to itself.

        Args:
            x: `[batch, seq, embed_dim]`, or `[seq, batch, embed_dim]` with batch_first=False.
            key_padding_mask: bool `[batch, seq]`, True = keep (`torch.nn.MultiheadAttention` has True = ignore). The
                output of the other rows is 0.
            need_weights: must be False, because the weights are never in memory.

        Returns:
            The output, in the shape of x, and None instead of weights.
        """
        if other_names:
            refuse_other_names(self, FlashMHA.forward, other_names)
        if need_weights:
            raise ValueError("need_weights: expected False, got True; attention weights are never in memory as a whole")
        x = x if self.batch_first else x.transpose(0, 1)
        out = self._output(x, None, key_padding_mask)
        return (out if self.batch_first else out.transpose(0, 1)), None


def _check_sizes(embed_dim: int, num_heads: int, num_heads_kv: int) -> None:
    check_sizes(embed_dim=embed_dim, num_heads=num_heads, num_heads_kv=num_heads_kv)
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"embed_dim: expected a multiple of num_heads, {num_heads}, got {embed_dim}")
    if num_heads_kv < 1 or num_heads % num_heads_kv:
        raise ValueError(f"num_heads_kv: expected a divisor of num_heads, {num_heads}, got {num_heads_kv}")
