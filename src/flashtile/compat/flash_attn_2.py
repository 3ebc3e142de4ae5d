"""flash_attn 2.8.3: the functions of attention, each a call of `flashtile.attention` or `attention_varlen`.

docs/migrating.md ("flash-attn 2") says what arguments mean here, and what differs:

- q `[batch, seq_q, heads, head_dim]`, k and v `[batch, seq_k, heads_kv, head_dim]`; packed `[total, heads, head_dim]`
  with `cu_seqlens_q` and `cu_seqlens_k`, int32 `[batch + 1]`. `heads_kv` divides `heads`.
- causal: no key right of the diagonal is visible, which ends at the last key. window_size: keys on each side, -1 =
  unlimited.
- alibi_slopes: float32 `[heads]` or `[batch, heads]`.
- return_attn_probs: also return lse, float32 `[batch, heads, seq_q]` (packed `[heads, total_q]`), -inf for a row that
  sees no key, and `S_dmask`: with dropout `[batch, heads, seq_q', seq_k']`, lengths rounded up to multiples of 128, of
  elements `exp(score - maximum of the row)`, negative where dropped; without dropout an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.compat import calls
from flashtile.compat.adapter import adapted
from flashtile.compat.calls import Output, attend, taken_apart
from flashtile.compat.rows import locate_rows
from flashtile.compat.signatures import VERSION_2

flash_attn_func = flash_attn_kvpacked_func = flash_attn_qkvpacked_func = attend
flash_attn_varlen_func = flash_attn_varlen_kvpacked_func = flash_attn_varlen_qkvpacked_func = attend


def flash_attn_with_kvcache(num_splits: int, rotary_interleaved: Any, **given: Any) -> Output:
    """One step of decoding, by `flashtile.attention_with_kv_cache`, where shapes and meanings are told.

    `k` and `v`, `[batch, seq_new, heads_kv, head_dim]`, are written to the caches in place from `cache_seqlens` on.
    Nothing is recorded for a backward.

    Args:
        cache_seqlens, cache_batch_idx, cache_leftpad: `cache_lengths`, `cache_batch_indices` and `cache_left_padding`.
        block_table: int32 `[batch, pages]`; the caches are then pages of any size.
        num_splits: 0 chooses by the sizes.
        return_softmax_lse: also return lse, float32 `[batch, heads, seq_q]`.
    """
    call, places = calls.split_options(given)
    return calls.with_cache(
        call=call, num_splits=num_splits or None, rotary_interleaved=bool(rotary_interleaved), **places
    )


def _get_block_size_n(**given: Any) -> int:
    """Keys of a block of `S_dmask`: all of them, because its elements refer to the maximum of the whole row."""
    return 1 << 30


def _flash_attn_forward(return_softmax: bool, **given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward by itself, dense or packed: out, lse, S_dmask and rng_state, int64 `[2]`, which the backward wants.

    `leftpad_k` and `seqused_k`, int32 `[batch]`, take keys away at the beginning and at the end of each sequence.
    """
    return calls.forward(taken_apart(given), return_softmax)


_flash_attn_varlen_forward = _flash_attn_forward


@torch.no_grad()
def _gradients(dout: Tensor, out: Tensor, softmax_lse: Tensor, rng_state: Tensor | None, given: dict) -> Tensor:
    """Writes the gradients to the buffers among the arguments, and returns `rowsum(dout · out)`."""
    apart = taken_apart(given)
    gradients = calls.backward(apart, dout, out, softmax_lse, rng_state)
    calls.write_gradients(gradients, *(apart.rest[name] for name in ("dq", "dk", "dv")))
    return calls.row_sums(dout, out)


def _flash_attn_backward(
    dout: Tensor, out: Tensor, softmax_lse: Tensor, rng_state: Tensor | None, **given: Any
) -> Tensor:
    """The backward by itself, by `flashtile.attention_backward`: gradients are written to dq, dk and dv, where given.

    `out` and `softmax_lse` may be those of more keys than are here.

    Returns:
        `rowsum(dout · out)`, float32 `[batch, heads, seq_q rounded up to 128]`.
    """
    sums = _gradients(dout, out, softmax_lse, rng_state, given)
    return torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 128))


def _flash_attn_varlen_backward(
    dout: Tensor, out: Tensor, softmax_lse: Tensor, rng_state: Tensor | None, **given: Any
) -> Tensor:
    """The packed backward by itself, as `_flash_attn_backward`.

    Returns:
        `rowsum(dout · out)`, float32 `[heads, total_q + 128 · batch]`: those of sequence `b` begin at row
        `cu_seqlens_q[b] + 128 · b`, other elements are 0.
    """
    sums, ends = _gradients(dout, out, softmax_lse, rng_state, given), given["cu_seqlens_q"]
    sequence, within, there = locate_rows(ends, sums.shape[1])
    spread = sums.new_zeros(sums.shape[0], sums.shape[1] + 128 * (ends.shape[0] - 1))
    return spread.index_add_(1, ends[sequence] + within + 128 * sequence, sums * there)


def _class(name: str, function: str) -> type:
    """A class in the place of an autograd class, for programs that call `apply` of one: that is the function, because
    flashtile records its own calls. It takes return_softmax and whether autograd records (`is_grad_enabled`)."""

    def run(return_softmax: bool, is_grad_enabled: bool, **given: Any) -> Output:
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_grad_enabled):
            return attend(return_attn_probs=return_softmax, **given)

    arguments = VERSION_2.modules["flash_attn_interface"].arguments[f"{name}.forward"].removeprefix("ctx, ")
    methods = {"forward": lambda ctx, **given: run(**given), "apply": adapted(f"{name}.apply", arguments, run)}
    static = {method: staticmethod(function) for method, function in methods.items()}
    return type(name, (), {"__doc__": f"`{function}`.", "__module__": __name__, **static})


FlashAttnFunc = _class("FlashAttnFunc", "flash_attn_func")
FlashAttnKVPackedFunc = _class("FlashAttnKVPackedFunc", "flash_attn_kvpacked_func")
FlashAttnQKVPackedFunc = _class("FlashAttnQKVPackedFunc", "flash_attn_qkvpacked_func")
FlashAttnVarlenFunc = _class("FlashAttnVarlenFunc", "flash_attn_varlen_func")
FlashAttnVarlenKVPackedFunc = _class("FlashAttnVarlenKVPackedFunc", "flash_attn_varlen_kvpacked_func")
FlashAttnVarlenQKVPackedFunc = _class("FlashAttnVarlenQKVPackedFunc", "flash_attn_varlen_qkvpacked_func")

VERSION_2.serve(globals())
