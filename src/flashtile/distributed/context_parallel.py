"""Attention over a sequence that is cut over ranks: what a user calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile.distributed.checks import (
    check_block_mask,
    check_flags,
    check_parts,
    check_tensors,
    check_whole,
    longest_document,
)  # fmt: skip
from flashtile.distributed.engine import Call, ContextAttention
from flashtile.distributed.exchange import Alone, Exchange
from flashtile.distributed.heads import AttentionByHeads, HeadExchange, check_heads, local_head_runs, shared_out
from flashtile.distributed.layout import Layout, LayoutKind
from flashtile.distributed.merge import wide_dtype
from flashtile.distributed.places import STRATEGIES, Places, agree, mesh_places, replicated
from flashtile.distributed.schedule import Problem, Schedule, gathered_schedule, ring_schedule

Strategy = Literal["ring", "all_to_all", "all_gather", "ring_all_to_all"]
Align = Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | flashtile.ScoreFunction

#: Calls whose arguments were checked as a whole.
_sound: set[tuple[Any, ...]] = set()


if TYPE_CHECKING:
    from typing_extensions import Unpack

    class Options(flashtile.AttentionOptions, total=False):
        """The optional arguments, for type checkers: with `return_lse` a call returns a pair."""

        strategy: Strategy
        layout: LayoutKind
        cu_seqlens: Sequence[int] | Tensor | None
        reduce_gradients: bool


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: DeviceMesh,
    return_lse: Literal[False] = False, return_max_scores: Literal[False] = False, **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: DeviceMesh,
    return_lse: Literal[True], return_max_scores: Literal[False] = False, **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: DeviceMesh,
    return_lse: bool = False, return_max_scores: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, ...]: ...  # fmt: skip


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: DeviceMesh,
    return_lse: bool = False, return_max_scores: bool = False, **options: Unpack[Options],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    strategy: Strategy = "ring",
    layout: LayoutKind = "zigzag",
    cu_seqlens: Sequence[int] | Tensor | None = None,
    causal: bool = False,
    align: Align = "bottom_right",
    window: Window | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    key_lengths: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_max_scores: bool = False,
    reduce_gradients: bool = True,
    deterministic: bool = False,
    backend: str = "auto",
    block_mask: flashtile.BlockMask | None = None,
    score_mod: ScoreMod | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention over a sequence of which each rank has a shard: the result of `flashtile.attention` on one GPU.

    Every rank of the mesh calls this function with its shards of q, k and v (from `shard_sequence`), and gets its shard
    of the output. Differentiable once in q, k, v, bias, alibi_slopes, sinks and the tensors that score_mod reads, also
    through `lse`.

    Strategies, for `N` ranks:

    - "ring": the keys and values of the other ranks arrive one block after another, while the previous block is
      computed. No restrictions.
    - "all_to_all": the ranks exchange tokens for heads. Each computes all tokens of `heads / N` heads. `N` divides the
      query heads; key/value heads are repeated if there are fewer than ranks.
    - "all_gather": every rank first gathers all keys and values. The fewest messages, the most memory.
    - "ring_all_to_all": a mesh of two dimensions: a ring along the first, heads exchanged along the second.

    Args:
        q: `[batch, seq_q / N, heads_q, head_dim]`, this rank's shard; with cu_seqlens `[total / N, heads_q, head_dim]`.
        k: `[batch, seq_k / N, heads_kv, head_dim]`, or packed.
        v: `[batch, seq_k / N, heads_kv, head_dim_v]`, or packed.
        mesh: DeviceMesh of the ranks, with one dimension, or two for "ring_all_to_all".
        strategy: one of the above.
        layout: how sequences are cut: "zigzag" (balanced under a causal mask) or "contiguous".
        cu_seqlens: cumulative lengths of packed documents in the whole sequence, the same on all ranks, as numbers or
            as a tensor on the CPU, because the host plans with them. A document may cross the border of a shard.
            Queries and keys must be the same tokens.
        causal, align, window: as in `flashtile.attention`, for the whole sequence.
        dropout_seed: the same on all ranks; without it, the first rank draws one. The mask is that of one GPU.
        key_lengths: `[batch]`, or one for each document, counted in the whole sequence.
        bias: broadcasts to the scores of the whole sequence, the same on all ranks. Or it has the `seq_q / N` rows of
            this shard, in its order, and all keys ("ring" and "all_gather"). A single row always counts for the whole
            sequence. With cu_seqlens it counts within each document: `[1, heads_q, longest, longest]`. The same holds
            for mask.
        alibi_slopes: `[heads_q]`, `[batch, heads_q]` or `[documents, heads_q]`, the same on all ranks.
        sinks: `[heads_q]`, the same on all ranks.
        return_lse: also return the log-sum-exp of this shard's rows.
        return_max_scores: also return the largest score of each of this shard's rows, over all keys.
        reduce_gradients: sum the gradients of alibi_slopes, sinks, a bias of the whole sequence, and the tensors that
            score_mod reads over the ranks. With False each rank has its part, for FSDP or DDP to sum like the gradients
            of other parameters.
        block_mask: of the whole sequence, on each rank; with cu_seqlens, of the documents. Each rank computes the tiles
            that it shows. Parts of it are cut out once for each mask, which makes the host wait.
        score_mod: as in `flashtile.attention`, the same function on all ranks. Its indices count in the whole sequence,
            or in the document, and its heads are all heads.

    The other arguments are those of `flashtile.attention`.

    Returns:
        out `[batch, seq_q / N, heads_q, head_dim_v]`, or packed; with `return_lse` also lse
        `[batch, heads_q, seq_q / N]`, packed `[heads_q, total / N]`, float32, and with `return_max_scores` last
        max_scores, likewise.

    Raises:
        TypeError, ValueError: as `flashtile.attention`; a strategy cannot serve the call; or the ranks made different
            calls, which is checked before anything is exchanged, once for each kind of call.
        RuntimeError: a transfer failed or timed out (the process group's timeout); the message names rank and step.

    Reference:
        Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023); Brandon et al., "Striped Attention"
        (2023), which balances as zigzag does; Jacobs et al., "DeepSpeed Ulysses" (2023); Fang, Zhao, "USP" (2024).
    """
    check_flags(
        causal=causal, return_lse=return_lse, return_max_scores=return_max_scores, reduce_gradients=reduce_gradients,
        deterministic=deterministic,
    )  # fmt: skip
    places = mesh_places(mesh)
    packed = cu_seqlens is not None
    named = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "key_lengths": key_lengths, "dropout_seed": dropout_seed,
    }  # fmt: skip
    check_tensors(named, packed)
    q, k, v = _autocast(q, k, v)
    _check_strategy(strategy, places, q.shape[-2], k.shape[-2])
    named, documents, row_sharded = check_parts(named | {"q": q, "k": k, "v": v}, strategy, places.ranks, cu_seqlens)
    bias, mask = named["bias"], named["mask"]
    length_q, length_k = (t.shape[-3] * places.ranks for t in (q, k))
    if block_mask is not None:
        check_block_mask(block_mask, q)
    longest = longest_document(documents, bias, mask, block_mask)
    function = traced(score_mod, q)
    band = {"causal": causal, "align": align, "window": window}
    settings = {
        "scale": scale, "dropout_p": dropout_p, "softcap": softcap, "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    facts: dict[str, Any] = (
        band | settings | {"strategy": strategy, "layout": layout, "return_max_scores": return_max_scores}
    )
    facts |= {
        "score_mod": _described_function(function),
        "block_mask": block_mask and (block_mask.shape, block_mask.tile),
    }
    kind = _check_agreement(places, named, facts, documents)
    if (kind, places.ranks, len(documents), longest) not in _sound:
        check_whole(places.ranks, named, band | settings, documents, row_sharded, block_mask)
        _sound.add((kind, places.ranks, len(documents), longest))
    if dropout_p and dropout_seed is None:
        dropout_seed = flashtile.draw_dropout_seed(q.device)
        places.from_first(dropout_seed, "forward, the dropout seed")
    adds_up = reduce_gradients
    bias = replicated(places, "bias", bias, adds_up and not row_sharded)
    alibi_slopes = replicated(places, "alibi_slopes", alibi_slopes, adds_up)
    sinks = replicated(places, "sinks", sinks, adds_up)
    captured: list[Any] = [] if function is None else list(function.captured)
    captured = [replicated(places, "score_mod", t, adds_up and t.requires_grad) for t in captured]
    located = bias, mask, alibi_slopes, key_lengths, block_mask, function
    positional = bool(dropout_p) or any(each is not None for each in located)
    ring = places.groups[0].size if strategy != "all_to_all" else 1
    problem = make_problem((length_q, length_k), ring, layout, band, documents, positional)
    wide = wide_dtype(q.dtype)
    exchange: Exchange = places.groups[0] if strategy != "all_to_all" else Alone()
    settings["scale"] = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(
        make_schedule(strategy, problem), exchange, settings, band, key_lengths=key_lengths, dropout_seed=dropout_seed,
        mask=mask, head=0, heads=q.shape[-2], row_sharded=row_sharded, longest=longest, max_scores=return_max_scores,
        block_mask=block_mask, score_mod=function and function._replace(captured=()),
    )  # fmt: skip
    statistics: list[Any] = [None if t is None else t.to(wide) for t in (alibi_slopes, sinks)]
    if packed:
        q, k, v = q[None], k[None], v[None]
    results: tuple[Tensor, ...]
    tensors = q, k, v, bias, *statistics, *captured
    if strategy in ("ring", "all_gather"):
        results = ContextAttention.apply(call, *tensors)
    else:
        results = _run_by_heads(places, layout, return_lse, call, *tensors)
    asked = (results[0], *results[1:][not return_lse :])
    asked = tuple(t[0] for t in asked) if packed else asked
    return asked if return_lse or return_max_scores else asked[0]


def _run_by_heads(
    places: Places, kind: LayoutKind, wants_lse: bool, call: Call, q: Tensor, k: Tensor, v: Tensor,
    *others: Tensor | None,
) -> Any:  # fmt: skip
    """(out, lse), or (out, lse, max_scores), by exchanging tokens for heads; lse is None if it is not wanted."""
    group = places.groups[-1]
    if len(places.groups) > 1:
        kind = "contiguous"  # within a place of the ring, in whose order its tokens stay
    cut_q, cut_k = (Layout(t.shape[1] * group.size, group.size, kind) for t in (q, k))
    k, v = (shared_out(t, group.size) for t in (k, v))
    exchange, runs = HeadExchange(group, cut_q, cut_k), local_head_runs(call.schedule, q, k.shape[2], group.size)
    return AttentionByHeads.apply(exchange, call, runs, wants_lse, q, k, v, *others)


def make_problem(
    lengths: tuple[int, int],
    ring: int,
    layout: LayoutKind,
    band: dict[str, Any],
    documents: tuple[int, ...],
    positional: bool,
) -> Problem:
    """The facts of a call that a schedule needs. `lengths`: of queries and keys in the whole sequence. `band`: its
    arguments causal, align and window."""
    left, right = band["window"] or (None, None)
    cut_q, cut_k = (Layout(length, ring, layout) for length in lengths)
    right = 0 if band["causal"] else right
    return Problem(cut_q, cut_k, (left, right), band["align"] == "top_left", documents, positional)


@functools.lru_cache(maxsize=256)
def make_schedule(strategy: str, problem: Problem) -> Schedule:
    """The steps of a strategy; that of heads alone has one, without transfers."""
    return gathered_schedule(problem) if strategy == "all_gather" else ring_schedule(problem, strategy)


def traced(score_mod: ScoreMod | None, q: Tensor) -> flashtile.ScoreFunction | None:
    """The score function of a call, traced once for all of its parts."""
    if score_mod is None or isinstance(score_mod, flashtile.ScoreFunction):
        return score_mod
    wide = wide_dtype(q.dtype)
    return flashtile.trace_score_mod(score_mod, device=q.device, dtype=wide)


def _described_function(function: flashtile.ScoreFunction | None) -> tuple[Any, ...] | None:
    """The parts of a score function that ranks compare: its program, and the kinds of the tensors that it reads."""
    if function is None:
        return None
    grad = torch.is_grad_enabled()
    kinds = tuple((tuple(t.shape), str(t.dtype), t.requires_grad and grad) for t in function.captured)
    return function.program, kinds


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under `torch.autocast` in its dtype, as `flashtile.attention`."""
    device = getattr(getattr(q, "device", None), "type", "cpu")
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    kept = torch.float64, torch.float8_e4m3fn
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype not in kept else t for t in (q, k, v))
    return q, k, v


def _check_strategy(strategy: str, places: Places, heads: int, heads_kv: int) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    two = strategy == "ring_all_to_all"
    if len(places.groups) != 1 + two:
        raise ValueError(
            f"mesh: expected {1 + two} dimensions for strategy={strategy!r}, got {len(places.groups)}; "
            + ("make it with init_device_mesh(..., (ring, heads))" if two else "take one of them, or 'ring_all_to_all'")
        )
    if strategy in ("all_to_all", "ring_all_to_all"):
        check_heads(heads, heads_kv, places.groups[-1].size)


def _check_agreement(
    places: Places, tensors: dict[str, Tensor | None], settings: dict[str, Any], documents: tuple[int, ...]
) -> tuple[Any, ...]:
    """Checks that all ranks make the same kind of call; returns something that tells it from others."""
    described = {
        name: None if t is None else (tuple(t.shape), str(t.dtype), t.requires_grad and torch.is_grad_enabled())
        for name, t in tensors.items()
    }
    settings = {name: _comparable(value) for name, value in settings.items()} | {"packed": bool(documents)}
    values = {name: t for name, t in tensors.items() if t is not None and name in ("key_lengths", "dropout_seed")}
    facts = described | settings
    agree(places, facts, values | {"cu_seqlens": documents})
    return tuple(facts.items())


def _comparable(value: Any) -> Any:
    """An argument as ranks compare it: what is none of a call's kinds, which is refused later, in words."""
    if isinstance(value, list):
        value = tuple(value)
    return value if isinstance(value, (bool, int, float, str, tuple, type(None))) else repr(value)
