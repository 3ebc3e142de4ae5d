"""flashtile as one of PyTorch's implementations of flash attention, below autograd and `torch.compile`: four operators.
Two have the layout `[batch, heads, seq, head_dim]` of `scaled_dot_product_attention`, two that of flash_attn, `[batch,
seq, heads, head_dim]`, or packed `[total, heads, head_dim]`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import attention as torch_attention

import flashtile
from flashtile.compat.rows import gathered_keys
from flashtile.integrations.shared import check_options


def use_flashtile_as_flash_attention(
    name: str = "flashtile", *, backend: str = "auto", deterministic: bool = False
) -> None:
    """Registers flashtile as an implementation of PyTorch's flash attention, and activates it.

    From then on `torch.nn.functional.scaled_dot_product_attention` runs on flashtile wherever PyTorch chooses its flash
    backend, and so do `torch.nn.attention.varlen.varlen_attn` and compiled graphs that contain its operators.
    `torch.nn.attention.restore_flash_attention_impl()` ends it. PyTorch still decides which calls are flash attention:
    on GPUs, in float16 or bfloat16, without attn_mask, with heads of at most 256. `use_flashtile_sdpa` serves all
    others as well.

    Calls that flashtile does not serve raise; none falls back to PyTorch's kernels.

    Args:
        name: what `torch.nn.attention.activate_flash_attention_impl` knows it by. A program that chooses "FA3" or
            "FA4" itself gets flashtile if it is registered under that name.
        backend: as in `flashtile.attention`.
        deterministic: as in `flashtile.attention`. `torch.use_deterministic_algorithms(True)` has the same effect.

    Raises:
        ImportError: this PyTorch has no registry of implementations.
        TypeError: name is no string, or `deterministic` is no bool.
        ValueError: there is no backend of that name.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {type(name).__name__}; use 'flashtile'")
    check_options(backend, deterministic)
    if not hasattr(torch_attention, "register_flash_attention_impl"):
        raise ImportError(
            "torch: expected a version with torch.nn.attention.register_flash_attention_impl, got "
            f"{torch.__version__}; update it, or use flashtile.integrations.use_flashtile_sdpa"
        )
    operators = _Operators({"backend": backend, "deterministic": deterministic})
    torch_attention.register_flash_attention_impl(name, register_fn=lambda: _Active(operators, "CUDA"))
    torch_attention.activate_flash_attention_impl(name)


class _Active:
    """The operators, in PyTorch's tables for a kind of device until `remove`."""

    def __init__(self, operators: _Operators, dispatch_key: str) -> None:
        self._library: Library | None = Library("aten", "IMPL")
        for name, function in (
            ("_scaled_dot_product_flash_attention", operators.sdpa_forward),
            ("_scaled_dot_product_flash_attention.quantized", operators.sdpa_forward_quantized),
            ("_flash_attention_forward.quantized", operators.forward_quantized),
            ("_scaled_dot_product_flash_attention_backward", operators.sdpa_backward),
            ("_flash_attention_forward", operators.forward),
            ("_flash_attention_backward", operators.backward),
        ):
            self._library.impl(name, function, dispatch_key)
        if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
            self._library.impl("_flash_attention_forward_no_dropout_inplace", operators.forward_to, dispatch_key)

    def remove(self) -> None:
        self._library = None  # PyTorch takes the functions out with it


class _Operators:
    """PyTorch's operators, with their schemas. `options`: the backend and whether results repeat bit for bit."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def sdpa_forward(self, query: Tensor, key: Tensor, value: Tensor, *given: Any, **options: Any) -> tuple[Any, ...]:
        return self.sdpa_forward_quantized(query, key, value, None, None, None, *given, **options)

    def sdpa_forward_quantized(
        self, query: Tensor, key: Tensor, value: Tensor, q_descale: Tensor | None, k_descale: Tensor | None,
        v_descale: Tensor | None, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        sizes, flags = (None, None, q.shape[1], k.shape[1]), (dropout_p, is_causal, return_debug_mask)
        descales = q_descale, k_descale, v_descale
        out, lse, *state, weights = self.forward_quantized(q, k, v, *sizes, *flags, *descales, scale=scale)
        return out.transpose(1, 2), lse, *sizes, *state, weights

    def sdpa_backward(self, *given: Any, scale: float | None = None) -> tuple[Tensor, ...]:
        dout, q, k, v, out = (t.transpose(1, 2) for t in given[:5])
        lse, rest = given[5], given[8:]  # between them the offsets of nested tensors, which come packed instead
        grads = self.backward(dout, q, k, v, out, lse, *(None, None, *rest), scale=scale)
        return tuple(grad.transpose(1, 2) for grad in grads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *given: Any, **options: Any) -> tuple[Tensor, ...]:
        return self.forward_quantized(query, key, value, *(*given, None, None, None), **options)

    def forward_quantized(
        self, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
        max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, q_descale: Tensor | None,
        k_descale: Tensor | None, v_descale: Tensor | None, *, scale: float | None = None,
        window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if return_debug_mask and cum_seq_q is not None:
            raise NotImplementedError(
                "return_debug_mask: expected False with packed sequences, got True; see flashtile.dropout_mask for "
                "what a seed drops"
            )
        forward_only = {"alibi_slopes": alibi_slopes, "seqused_k": seqused_k, "block_table": block_table}
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
            for name, tensor in forward_only.items():
                if tensor is not None:
                    raise NotImplementedError(
                        f"{name}: expected None where a gradient is wanted, because PyTorch's backward does not get "
                        "it, got a tensor; call it under torch.no_grad(), or call flashtile.attention_varlen"
                    )
        options = self._options | _described(scale, is_causal, window_size_left, window_size_right)
        options |= {"alibi_slopes": alibi_slopes, "dropout_p": dropout_p}
        options |= {"descale_q": q_descale, "descale_k": k_descale, "descale_v": v_descale}
        options["batch_invariant"] = num_splits == 1  # so programs ask PyTorch for it; other numbers are hints
        if block_table is not None or seqused_k is not None:
            if cum_seq_q is None or seqused_k is None:
                raise NotImplementedError(
                    "seqused_k, block_table: expected packed queries with cum_seq_q, and pages with seqused_k, got "
                    f"query {list(query.shape)}; use flashtile.attention_with_kv_cache"
                )
            if block_table is not None and dropout_p:
                raise NotImplementedError(
                    f"dropout_p: expected 0 beside block_table, got {dropout_p}; pages are for inference"
                )
            if block_table is not None:
                cum_seq_k, options["block_table"], options["key_lengths"] = None, block_table, seqused_k
            else:
                cum_seq_k = cum_seq_q if cum_seq_k is None else cum_seq_k
                if is_causal or options["window"] is not None:  # the diagonal ends at the last key that counts
                    key, value, cum_seq_k = gathered_keys(key, value, cum_seq_k, max_k, lengths=seqused_k)
                    cum_seq_k = cum_seq_k.to(cum_seq_q.dtype)
                else:
                    options["key_lengths"] = seqused_k
        with torch.no_grad():  # autograd is above these operators
            seed = flashtile.draw_dropout_seed(query.device) if dropout_p else None
            options["dropout_seed"] = seed
            if cum_seq_q is None:
                out, lse = flashtile.attention(query, key, value, return_lse=True, **options)
            else:
                out, lse = flashtile.attention_varlen(
                    query, key, value, cum_seq_q, cum_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k, return_lse=True,
                    **options,
                )  # fmt: skip
            results = _results(query, out, lse, seed)
            if return_debug_mask and seed is not None:
                return *results[:-1], _signed_weights(query, key, dropout_p, seed, options)
            return results

    def forward_to(self, out: Tensor, query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        results = self.forward(query, *arguments, **options)
        out.copy_(results[0])
        return results[1]

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        options = self._options | _described(scale, is_causal, window_size_left, window_size_right)
        if dropout_p:
            options |= {"dropout_p": dropout_p, "dropout_seed": rng_state.view(torch.int64)}
        if cum_seq_q is not None:
            options |= {
                "cu_seqlens": cum_seq_q, "max_seqlen": max_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_k": max_k
            }  # fmt: skip
        dq, dk, dv = flashtile.attention_backward(grad_out, query, key, value, out, logsumexp, **options)[:3]
        return _match_strides(query, dq), _match_strides(key, dk), _match_strides(value, dv)


def _described(scale: float | None, is_causal: bool, left: int | None, right: int | None) -> dict[str, Any]:
    """The arguments that say which keys a query sees, and the scale. A side of -1 has no bound, as None."""
    sides = tuple(None if side is None or side < 0 else side for side in (left, right))
    return {"scale": scale, "causal": is_causal, "window": None if sides == (None, None) else sides}


def _signed_weights(query: Tensor, key: Tensor, dropout_p: float, seed: Tensor, options: dict[str, Any]) -> Tensor:
    """The softmax weights `[batch, heads, seq_q, seq_k]` before dropout, negative where it drops one."""
    names = "scale", "causal", "window", "alibi_slopes"
    weights = flashtile.attention_probs(query, key, **{name: options[name] for name in names})
    batch, heads, seq_q, seq_k = weights.shape
    kept = flashtile.dropout_mask(seed, dropout_p, batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k)
    return torch.where(kept, weights, -weights).to(query.dtype)


def _results(query: Tensor, out: Tensor, lse: Tensor, seed: Tensor | None) -> tuple[Tensor, ...]:
    """What PyTorch's forward returns. `seed`: that of dropout."""
    state = query.new_empty(2, dtype=torch.uint64) if seed is None else seed.view(torch.uint64)
    unused = query.new_empty((), dtype=torch.uint64)
    return _match_strides(query, out), lse, state, unused, query.new_empty(0)


def _match_strides(like: Tensor, result: Tensor) -> Tensor:
    """A result as PyTorch's compiler expects it: as `torch.empty_like` lies."""
    if result.stride() == like.stride():
        return result
    expected = torch.empty_like(like, dtype=result.dtype)
    return result if result.stride() == expected.stride() else expected.copy_(result)
