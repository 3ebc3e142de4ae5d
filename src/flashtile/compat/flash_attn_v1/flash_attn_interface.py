"""The attention functions of flash_attn 1.0.9, each a call of `flashtile.attention_varlen`.

What the arguments mean, for all functions here:

- q `[total_q, heads, head_dim]`, k and v `[total_k, heads_kv, head_dim]`, packed by `cu_seqlens`, int32 `[batch + 1]`;
  `max_seqlen` is the longest sequence. dtypes and head sizes are those of `flashtile.attention`.
- dropout_p: probability that an attention weight is dropped.
- softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
- causal: no key right of the diagonal is visible, which begins at the first key.
- return_attn_probs: also return lse, float32 `[batch, heads, max_seqlen rounded up to 16]`, -inf past the end of a
  sequence, and `S_dmask`, `[batch, heads, rows rounded up to 16, keys rounded up to 64]`, of elements
  `exp(score - maximum of the row)`, negative where dropped, in the order of tensor-core fragments. That is a matrix of
  `seq_q × seq_k`, for tests.
- deterministic: gradients are the same in every run.

A row that sees no key is 0. Raised are the `TypeError` and `ValueError` of the public functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile.compat.shared import calls
from flashtile.compat.shared.arguments import unpacked
from flashtile.compat.shared.version1 import Call, attend, packed_lse, padded_lse, probs, shifted

Output = Tensor | tuple[Tensor, ...]


def flash_attn_unpadded_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Output:
    """Attention of packed sequences: out, or (out, lse, S_dmask)."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(q, k, v, Call(*lengths, dropout_p, softmax_scale, causal, deterministic), return_attn_probs)


def flash_attn_unpadded_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Output:
    """As `flash_attn_unpadded_func`, with kv `[total_k, 2, heads_kv, head_dim]`."""
    k, v = unpacked("kv", kv, 2, "total_k")
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(q, k, v, Call(*lengths, dropout_p, softmax_scale, causal, deterministic), return_attn_probs)


def flash_attn_unpadded_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Output:
    """As `flash_attn_unpadded_func`, with qkv `[total, 3, heads, head_dim]`."""
    q, k, v = unpacked("qkv", qkv, 3, "total")
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return attend(q, k, v, Call(*lengths, dropout_p, softmax_scale, causal, deterministic), return_attn_probs)


def flash_attn_unpadded_qkvpacked_split_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen0: int,
    max_seqlen1: int,
    batch_size0: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Output:
    """As `flash_attn_unpadded_qkvpacked_func`, in two calls side by side.

    One is that of the first `batch_size0` sequences, of at most max_seqlen0, the other that of the rest, of at most
    max_seqlen1. On a GPU the second runs on a stream of its own, and nothing waits on the host.

    Returns:
        out, or (out, lse, S_dmask of the first, S_dmask of the others).
    """
    q, k, v = unpacked("qkv", qkv, 3, "total")
    sequences = cu_seqlens.shape[0] - 1
    if not 0 <= batch_size0 <= sequences:
        raise ValueError(
            f"batch_size0: expected from 0 to {sequences}, the number of sequences, got {batch_size0}; it is how many "
            "of them are in the first call"
        )
    first, rest = cu_seqlens[: batch_size0 + 1], cu_seqlens[batch_size0:]
    start = rest[:1]
    options = (dropout_p, softmax_scale, causal, deterministic)
    halves = [
        Call(first, first, max_seqlen0, max_seqlen0, *options),
        Call(rest - start, rest - start, max_seqlen1, max_seqlen1, *options),
    ]
    seeds = [flashtile.draw_dropout_seed(qkv.device) if dropout_p else None for _ in halves]
    with _SideStream(qkv) as side:
        later = shifted(qkv, start)
        q1, k1, v1 = later.unbind(1)
        others = attend(q1, k1, v1, halves[1], return_attn_probs, seeds[1])
        others = others if isinstance(others, tuple) else (others,)
    ours = attend(q, k, v, halves[0], return_attn_probs, seeds[0])
    ours = ours if isinstance(ours, tuple) else (ours,)
    side.join(others, (cu_seqlens, start, *halves[1][:2], *(seed for seed in seeds if seed is not None)))
    # The rows of the others follow: a shift back by as many.
    row = torch.arange(qkv.shape[0], device=qkv.device)
    out = torch.where((row < start)[:, None, None], ours[0], shifted(others[0], -start))
    if not return_attn_probs:
        return out
    rows = max(ours[1].shape[2], others[1].shape[2])
    lses = [torch.nn.functional.pad(lse, (0, rows - lse.shape[2]), value=float("-inf")) for lse in (ours[1], others[1])]
    return out, torch.cat(lses), ours[2], others[2]


class _SideStream:
    """A stream beside the current one on a GPU; elsewhere nothing."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._stream = torch.cuda.Stream(x.device) if x.is_cuda else None
        self._context: torch.cuda.StreamContext | None = None

    def __enter__(self) -> _SideStream:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._x.device))
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(*error)

    def join(self, results: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> None:
        """The current stream waits for the results; memory that one stream made and the other uses is told to both."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._x.device)
        current.wait_stream(self._stream)
        for tensor in (self._x, *inputs):
            tensor.record_stream(self._stream)
        for tensor in results:
            tensor.record_stream(current)


def flash_attn_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    dropout_p: float,
    max_s: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_unpadded_qkvpacked_func` with the arguments of earlier versions."""
    return flash_attn_unpadded_qkvpacked_func(
        qkv, cu_seqlens, max_s, dropout_p, softmax_scale, causal, return_attn_probs
    )


def _get_block_size(device: object, head_dim: int, is_dropout: bool) -> int:
    """Keys of a block of `S_dmask`: all of them, because its elements refer to the maximum of the whole row."""
    return 1 << 30


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    return_softmax: bool,
    num_splits: int = 0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The forward by itself, written to `out`: out, lse, rng_state int64 `[2]`, which the backward wants, and S_dmask.

    `num_splits` was how many thread blocks share the rows of a sequence: the result does not depend on it.
    """
    call = Call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal)
    with torch.no_grad():
        rng_state = torch.randint(2**32, (2,), dtype=torch.int64, device=q.device, generator=generator)
        seed = rng_state if dropout_p else None
        result, lse = flashtile.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            causal=bool(causal), align="top_left", scale=softmax_scale, dropout_p=dropout_p, dropout_seed=seed,
            return_lse=True,
        )  # fmt: skip
        out.copy_(result)
        weights = probs(q, k, call, seed) if return_softmax else None
        return out, padded_lse(lse, cu_seqlens_q, max_seqlen_q), rng_state, weights


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    rng_state: Tensor | None = None,
    num_splits: int = 0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward by itself, by `flashtile.attention_backward`, written to dq, dk and dv.

    `num_splits` 1 asks for gradients that are the same in every run. With dropout, `rng_state` is that of the forward;
    where it is None, it is drawn from `generator`, which must be as it was then.

    Returns:
        dq, dk, dv and `rowsum(dout · out)`, float32 `[batch, heads, max_seqlen_q rounded up to 16]`.
    """
    if dropout_p and rng_state is None and generator is not None:
        rng_state = torch.randint(2**32, (2,), dtype=torch.int64, device=q.device, generator=generator)
    call = calls.Call(dropout_p, softmax_scale, causal, deterministic=num_splits == 1)
    layout = calls.Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    with torch.no_grad():
        lse = packed_lse(softmax_lse, cu_seqlens_q, q.shape[0])
        gradients = calls.backward(dout, q, k, v, out, lse, layout, call, rng_state, "top_left")
        calls.write_gradients(gradients, (dq, dk, dv))
        sums = padded_lse(calls.row_sums(dout, out), cu_seqlens_q, max_seqlen_q)
        return dq, dk, dv, sums.masked_fill(sums.isneginf(), 0)
