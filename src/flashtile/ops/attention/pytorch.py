"""Attention with the arguments, layout and semantics of PyTorch's own functions: `scaled_dot_product_attention` and
`flex_attention`.

Shape letters: N any number of leading dimensions, B batch, H query heads, G key/value heads, L queries, S keys, E
head_dim, V head_dim of the values. PyTorch's `[N, H, L, E]` becomes `[N, L, H, E]` by strides alone.

PyTorch evaluates `mask_mod` in every call of `flex_attention`, so a mask means what its function, the tensors that it
reads, and its lists are at that time. Its block masks are converted again when any of these has changed. One mask
serves the layers of a model, and each of its steps, and they seldom change between.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flashtile.ops.attention.api import attention
from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.checks import autocast_dtype
from flashtile.ops.attention.options import ScoreMod
from flashtile.ops.attention.score_tracing import Surroundings
from flashtile.ops.attention.spec import FP8, MAX_HEAD_DIM
from flashtile.ops.common.checks import FLOAT_DTYPES, as_float, check_device, check_tensors, raise_not_bool
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.sizes import broadcasts, differ, known

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str = "auto",
    deterministic: bool = False,
    **other_names: NoReturn,
) -> Tensor:
    """Attention with the arguments, layout and meaning of `torch.nn.functional.scaled_dot_product_attention`.

    Computes `softmax(scale · query keyᵀ + attn_mask) value`. Differentiable in query, key, value and a floating-point
    attn_mask. The last two arguments are flashtile's own.

    Args:
        query: `[..., H, L, E]`; float16, bfloat16, float32, or float64 on a CPU. A tensor with two dimensions is one
            head.
        key: `[..., G, S, E]`. Leading dimensions and heads of query, key and value broadcast.
        value: `[..., G, S, V]`; E and V at most 512.
        attn_mask: broadcasts to `[..., H, L, S]` and has at least the last two dimensions. Either bool, True = visible;
            or added to the scores, in query's dtype or float32, with a gradient in its own shape. A `CausalBias` of
            `torch.nn.attention.bias` is also accepted.
        dropout_p: probability that a weight is dropped. It applies whenever it is not 0, in evaluation as well.
        is_causal: query `i` sees the keys 0 to `i`, also if L and S differ. Not together with attn_mask.
        scale: factor on the scores; default `1/sqrt(E)`.
        enable_gqa: query head `h` reads key head `h // (H // G)`, and the same for values; H is a multiple of G.
        backend: as in `flashtile.attention`.
        deterministic: as in `flashtile.attention`.

    Returns:
        `[..., H, L, V]` in query's dtype (under autocast in the autocast dtype). A row without a visible key is 0.

    Raises:
        TypeError: a dtype or an argument's type is wrong, or a tensor is nested.
        ValueError: a shape, a device or a value is wrong, or the named backend cannot serve the call.
    """
    if other_names:
        refuse_other_names(scaled_dot_product_attention, other_names)
    check_query_key_value(query, key, value)
    if not (isinstance(is_causal, bool) and isinstance(enable_gqa, bool)):
        raise_not_bool(is_causal=is_causal, enable_gqa=enable_gqa)
    dropout_p = as_float("dropout_p", dropout_p, "reading it would synchronise, pass a Python float")
    align = "top_left"
    if attn_mask is not None:
        if is_causal:
            raise ValueError(
                "attn_mask, is_causal: expected one of them, got both; put the causal part into the mask, "
                "attn_mask & torch.ones(L, S, dtype=torch.bool).tril()"
            )
        variant = getattr(attn_mask, "variant", None)
        if variant is not None:
            align, attn_mask, is_causal = _causal_bias(attn_mask, variant, query.shape[-2], key.shape[-2]), None, True
    rank = max(query.dim(), key.dim(), value.dim())
    batch, heads = _leading(query, key, value, enable_gqa)
    query, key, value = _grouped(query, key, value, batch, heads)
    options: dict[str, Any] = {"causal": is_causal, "align": align, "scale": scale, "backend": backend}
    if attn_mask is not None:
        options.update(_score_inputs(attn_mask, query, (*batch, heads, query.shape[1], key.shape[1]), rank))
    out = _attend(query, key, value, dropout_p, deterministic=deterministic, **options)
    out = out.transpose(1, 2)  # [N, H, L, V]
    shape = (*batch, heads, *out.shape[2:])[-rank:]
    return out if len(batch) == 1 and rank == 4 else out.reshape(shape)


def check_query_key_value(query: Tensor, key: Tensor, value: Tensor, eight_bits: bool = False) -> None:
    """Checks that `attention` could not word in PyTorch's names. `eight_bits`: float8_e4m3fn is served too."""
    check_tensors(query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(
                f"{name}: expected at least 2 dimensions [seq, head_dim], got shape {tuple(tensor.shape)}; "
                "insert dimensions of size 1"
            )
        check_device(name, tensor, query.device, of="query")
        if tensor.dtype is not query.dtype and autocast_dtype(query.device) is None:
            raise TypeError(f"{name}: expected the dtype of query, {query.dtype}, got {tensor.dtype}; cast one of them")
        if tensor.dtype not in FLOAT_DTYPES and not (eight_bits and tensor.dtype is FP8):
            raise TypeError(
                f"{name}: expected dtype float16, bfloat16, float32 or float64, got {tensor.dtype}; cast it"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"key: expected the head_dim of query, {query.shape[-1]}, got {key.shape[-1]}; scores are their products"
        )
    for name, tensor in (("query", query), ("value", value)):
        if tensor.shape[-1] > MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected head_dim up to {MAX_HEAD_DIM}, got {tensor.shape[-1]}; split the head")
    if differ(key.shape[-2:-1], value.shape[-2:-1]):
        raise ValueError(
            f"value: expected as many rows as key, {key.shape[-2]}, got {value.shape[-2]}; each key has one value"
        )


def _causal_bias(bias: Any, variant: Any, seq_q: int, seq_k: int) -> str:
    """The alignment that a `torch.nn.attention.bias.CausalBias` stands for."""
    if (bias.seq_len_q, bias.seq_len_kv) != (seq_q, seq_k):
        raise ValueError(
            f"attn_mask: expected a causal bias for {seq_q} queries and {seq_k} keys, got one for {bias.seq_len_q} and "
            f"{bias.seq_len_kv}; build it for these sizes"
        )
    return "top_left" if variant.name == "UPPER_LEFT" else "bottom_right"


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[tuple[int, ...], int]:
    """The batch dimensions of the result, at least one, and its heads."""
    heads, *shared = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
    if enable_gqa:
        for name, found in zip(("key", "value"), shared):
            if found != heads and (not found or heads % found):
                raise ValueError(
                    f"{name}: expected a number of heads that divides query's {heads}, got {found}; query heads share "
                    "them in groups of equal size"
                )
    else:
        numbers = (heads, *shared)
        heads = 0 if 0 in numbers else max(numbers)
        if any(number not in (1, heads) for number in numbers):
            raise ValueError(
                f"query, key, value: expected the same number of heads, or 1, got {numbers}; pass enable_gqa=True "
                "where query heads share those of key and value"
            )
    if query.dim() == key.dim() == value.dim() == 4 and all(known(t.shape[0] == query.shape[0]) for t in (key, value)):
        return (query.shape[0],), heads
    try:
        batch = torch.broadcast_shapes((1,), *(t.shape[:-3] for t in (query, key, value)))
    except RuntimeError:
        raise ValueError(
            "query, key, value: expected leading dimensions that broadcast, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; expand them"
        ) from None
    return tuple(batch), heads


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, batch: tuple[int, ...], heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The three as `[N, seq, heads, head_dim]`; key and value with as many heads as each other, not repeated where
    kernels share them."""
    heads_k, heads_v = (t.shape[-3] if t.dim() > 2 else 1 for t in (key, value))
    if heads_k != heads_v or not heads:
        key, value = _repeated(key, heads), _repeated(value, heads)
    if query.dim() < 3 or query.shape[-3] != heads:
        query = query.expand(*query.shape[:-3], heads, *query.shape[-2:])
    query, key, value = (_one_batch(t, batch).transpose(1, 2) for t in (query, key, value))
    return query, key, value


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """`[..., heads, S, E]`."""
    if tensor.dim() < 3 or tensor.shape[-3] == 1:
        return tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])
    return tensor.repeat_interleave(heads // tensor.shape[-3], dim=-3) if tensor.shape[-3] != heads else tensor


def _one_batch(tensor: Tensor, batch: tuple[int, ...]) -> Tensor:
    """`[N, heads, seq, head_dim]` with all batch dimensions in N."""
    if tensor.dim() == 4 and len(batch) == 1 and known(tensor.shape[0] == batch[0]):
        return tensor
    inner = tuple(tensor.shape[-3:]) if tensor.dim() > 2 else (1, *tensor.shape)
    return tensor.expand(*batch, *inner).reshape(math.prod(batch), *inner)


def _score_inputs(attn_mask: Tensor, query: Tensor, sizes: tuple[int, ...], rank: int) -> dict[str, Tensor]:
    """A mask as `mask` or `bias` of `attention`, `[N | 1, H | 1, L | 1, S | 1]`. `query`: `[N, L, H, E]`. `sizes`:
    `(*batch, H, L, S)`, what it must broadcast to; `rank` of them are in PyTorch's own shapes."""
    check_tensors(attn_mask=attn_mask)
    check_device("attn_mask", attn_mask, query.device, of="query")
    shape = (1,) * (len(sizes) - attn_mask.dim()) + tuple(attn_mask.shape)
    fits = 2 <= attn_mask.dim() <= rank and broadcasts(shape, sizes)
    if not fits:
        raise ValueError(
            f"attn_mask: expected at least 2 dimensions that broadcast to {list(sizes[-rank:])}, got "
            f"{list(attn_mask.shape)}; insert dimensions of size 1"
        )
    batch, inner = shape[:-3], shape[-3:]
    attn_mask = attn_mask.reshape(shape)
    if not all(known(size == 1) for size in batch):
        attn_mask = attn_mask.expand(*sizes[:-3], *inner)
        batch = sizes[:-3]
    attn_mask = attn_mask.reshape(math.prod(batch), *inner)
    if attn_mask.dtype is torch.bool:
        return {"mask": attn_mask}
    return {"bias": _as_bias(attn_mask, query)}


def _as_bias(attn_mask: Tensor, query: Tensor) -> Tensor:
    """A floating-point mask in a dtype that `attention` adds to scores of this query."""
    dtype = query.dtype
    if attn_mask.dtype is torch.float32:
        return attn_mask.double() if dtype is torch.float64 else attn_mask  # widening loses nothing
    autocast = autocast_dtype(query.device)
    if autocast is not None and dtype is not torch.float64:
        dtype = autocast
        if attn_mask.dtype in (torch.float16, torch.bfloat16):
            attn_mask = attn_mask.to(dtype)
    if attn_mask.dtype is not dtype:
        raise TypeError(
            f"attn_mask: expected dtype bool, float32 or that of query, {dtype}, got {attn_mask.dtype}; cast it"
        )
    return attn_mask


def _attend(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, **options: Any) -> Tensor:
    """`attention`, and the sizes and the probability that PyTorch serves beyond it: no columns, no heads, p = 1."""
    columns = value.shape[-1]
    if not query.shape[2]:  # an empty batch of one head each
        batch, rows = query.shape[:2]
        for name in {"mask", "bias"} & options.keys():
            options[name] = options[name].expand(batch, 0, -1, -1).flatten(0, 1).unsqueeze(1)
        query, key, value = (t.transpose(1, 2).flatten(0, 1).unsqueeze(2) for t in (query, key, value))
        return _attend(query, key, value, dropout_p, **options).reshape(batch, rows, 0, columns)
    if not query.shape[-1]:  # a column of zeros has the same scores
        options["scale"] = 1.0
        query, key = (torch.nn.functional.pad(t, (0, 1)) for t in (query, key))
    if not columns:
        value = torch.nn.functional.pad(value, (0, 1))
    call: Any = attention
    if dropout_p == 1:
        return call(query, key, value, **options)[..., :columns] * 0.0
    out = call(query, key, value, dropout_p=dropout_p, **options)
    return out if out.shape[-1] == columns else out[..., :columns]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | FlexBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with the arguments, layout and meaning of `torch.nn.attention.flex_attention.flex_attention`.

    It needs no `torch.compile`. Differentiable in query, key, value and the tensors that score_mod reads, also through
    lse. The last two arguments are flashtile's own.

    Args:
        query: `[B, H, L, E]`; dtypes as for `flashtile.attention`.
        key: `[B, G, S, E]`; beside a block_mask also with a batch size of 1, which all queries share.
        value: `[B, G, S, V]`, with key's batch size.
        score_mod: `(score, batch, head, q_index, k_index) -> score`, as for `flashtile.attention`.
        block_mask: a `torch.nn.attention.flex_attention.BlockMask` for L queries and S keys, or a
            `flashtile.BlockMask`. PyTorch's is converted at its first use, and again when its mask_mod or something
            that this reads has changed.
        scale: factor on the scores; default `1/sqrt(E)`.
        enable_gqa: query head `h` reads key/value head `h // (H // G)`. Without it, H and G are equal.
        return_lse: also return lse `[B, H, L]`, the natural log-sum-exp of each row.
        kernel_options: None; flashtile chooses tile sizes from tables.
        return_aux: an `AuxRequest`: return an `AuxOutput` with lse, max_scores or both, `[B, H, L]` each.
        backend: as in `flashtile.attention`.
        deterministic: as in `flashtile.attention`.

    Returns:
        `[B, H, L, V]` in query's dtype; with return_lse a pair with lse, with return_aux a pair with an `AuxOutput`.

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, kernel_options are given, or no backend serves the call.

    Reference:
        Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels" (2024).
    """
    if other_names:
        refuse_other_names(flex_attention, other_names)
    check_query_key_value(query, key, value, eight_bits=True)
    if not (isinstance(enable_gqa, bool) and isinstance(return_lse, bool)):
        raise_not_bool(enable_gqa=enable_gqa, return_lse=return_lse)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: expected 4 dimensions [batch, heads, seq, head_dim], got shape {tuple(tensor.shape)}; insert "
                "dimensions of size 1"
            )
    query, key, value = _align_batches(query, key, value, block_mask is not None, enable_gqa)
    if kernel_options:
        raise ValueError(
            f"kernel_options: expected None, got {kernel_options!r}; leave it out, flashtile chooses tile sizes from "
            "tables"
        )
    if return_lse and return_aux is not None:
        raise ValueError("return_lse, return_aux: expected one of them, got both; ask for AuxRequest(lse=True)")
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    wants_max = return_aux is not None and return_aux.max_scores
    found: Any = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale=scale,
        score_mod=score_mod,
        block_mask=None if block_mask is None else converted(block_mask),
        return_lse=wants_lse,
        return_max_scores=wants_max,
        backend=backend,
        deterministic=deterministic,
    )
    results = list(found) if isinstance(found, tuple) else [found]
    out = results.pop(0).transpose(1, 2)
    lse = results.pop(0) if wants_lse else None
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse, results.pop(0) if wants_max else None)
    return out if lse is None else (out, lse)


def _align_batches(
    query: Tensor, key: Tensor, value: Tensor, masked: bool, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The three, whose batch sizes and heads fit together."""
    batch, heads, *_ = query.shape
    heads_kv = key.shape[1]
    if differ(key.shape[:2], value.shape[:2]):
        raise ValueError(
            f"value: expected the batch size and heads of key, {tuple(key.shape[:2])}, got {tuple(value.shape[:2])}; "
            "each key has one value"
        )
    if not enable_gqa and heads != heads_kv:
        raise ValueError(
            f"key: expected the number of heads of query, {heads}, got {heads_kv}; pass enable_gqa=True where query "
            "heads share those of key and value"
        )
    if heads_kv and heads % heads_kv:
        raise ValueError(
            f"key: expected a number of heads that divides query's {heads}, got {heads_kv}; query heads share them in "
            "groups of equal size"
        )
    if differ(query.shape[:1], key.shape[:1]):
        if not (masked and known(key.shape[0] == 1)):
            raise ValueError(
                f"key: expected the batch size of query, {batch}, or 1 beside a block_mask, got {key.shape[0]}; expand "
                "key and value, or repeat them"
            )
        key, value = (tensor.expand(batch, -1, -1, -1) for tensor in (key, value))
    return query, key, value


def converted(block_mask: BlockMask | FlexBlockMask) -> BlockMask:
    """flashtile's mask for the argument `block_mask` of `flex_attention`."""
    if isinstance(block_mask, BlockMask):
        return block_mask
    if torch.compiler.is_compiling():
        # A graph would keep what the mask is while it is traced.
        torch._dynamo.graph_break(
            msg="block_mask: expected a flashtile.BlockMask in one graph, got one of PyTorch, which is read anew in "
            "each call; convert it before with flashtile.BlockMask.from_flex, or compile without fullgraph=True"
        )
        return torch.compiler.disable(_remembered)(block_mask)
    return _remembered(block_mask)


class _Conversion(NamedTuple):
    """A mask, and what it was made from: the tensors with the state of each, and all else."""

    mask: BlockMask
    tensors: tuple[Tensor | None, ...]
    states: tuple[int | Tensor | None, ...]
    key: Any

    def holds(self, tensors: tuple[Tensor | None, ...], key: Any) -> bool:
        """Whether a mask made from these would be the same."""
        if self.key != key or len(self.tensors) != len(tensors):
            return False
        for own, other, state in zip(self.tensors, tensors, self.states):
            if own is not other or (own is not None and not _unchanged(own, state)):
                return False
        return True


#: PyTorch's masks that live, and what was made from them.
_CONVERSIONS: weakref.WeakKeyDictionary[Any, _Conversion] = weakref.WeakKeyDictionary()


def _remembered(block_mask: FlexBlockMask) -> BlockMask:
    seen = Surroundings.of(block_mask.mask_mod) if hasattr(block_mask, "mask_mod") else None
    if seen is None:
        return BlockMask.from_flex(block_mask)
    tensors = (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        *seen.tensors,
    )
    key = seen.key, block_mask.seq_lengths, block_mask.BLOCK_SIZE
    found = _CONVERSIONS.get(block_mask)
    if found is None or not found.holds(tensors, key):
        # The states of before, in case that mask_mod changes what it reads.
        states = tuple(map(_state, tensors))
        found = _Conversion(BlockMask.from_flex(block_mask), tensors, states, key)
        _CONVERSIONS[block_mask] = found
    return found.mask


def _state(tensor: Tensor | None) -> int | Tensor | None:
    """Something by which a later change in place is found. Tensors of inference mode do not count theirs."""
    if tensor is None:
        return None
    return tensor.clone() if tensor.is_inference() else tensor._version


def _unchanged(tensor: Tensor, state: int | Tensor | None) -> bool:
    return torch.equal(tensor, state) if isinstance(state, Tensor) else tensor._version == state
