"""Checks of the arguments of a context-parallel call, and of its explanation, before anything is exchanged."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import flashtile

#: Arguments of a call that are tensors, beside q, k and v.
TENSORS = ("bias", "mask", "alibi_slopes", "sinks", "key_lengths", "dropout_seed")


def check_flags(**flags: bool) -> None:
    """For flags that the ranks follow before any of them makes a call of attention."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected True or False, got {flag!r}; use bool(...)")


def check_tensors(tensors: dict[str, Tensor | None], packed: bool) -> None:
    """As far as the tensors of a call, by name, must be known here: `check_whole` checks the rest."""
    dims = 3 if packed else 4
    for name, tensor in tensors.items():
        shard = name in ("q", "k", "v")
        if tensor is None and not shard:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; use torch.as_tensor(...)")
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{name}: expected a plain tensor of this rank, got a DTensor; pass what its to_local() returns"
            )
        if shard and tensor.dim() != dims:
            layout = "[tokens, heads, head_dim]" if packed else "[batch, seq, heads, head_dim]"
            raise ValueError(
                f"{name}: expected {dims} dimensions {layout}, got shape {tuple(tensor.shape)}; cu_seqlens says which "
                "of the layouts it is"
            )
    q, k = tensors["q"], tensors["k"]
    if packed and q is not None and k is not None and q.shape[0] != k.shape[0]:
        raise ValueError(
            f"k: expected the tokens of q, {q.shape[0]}, with cu_seqlens, got {k.shape[0]}; documents attend to "
            "themselves"
        )


def check_whole(
    ranks: int,
    tensors: dict[str, Tensor | None],
    settings: dict[str, Any],
    documents: tuple[int, ...],
    row_sharded: bool,
    block_mask: flashtile.BlockMask | None = None,
) -> None:
    """Refuses what `flashtile.attention` refuses of the whole call: it is asked, with tensors that have no memory. The
    calls for the parts see less: rectangles of a bias, some of the heads, and a band only where it cuts one. `tensors`:
    of this rank, by their names as arguments. `settings`: the other arguments. `documents`: cumulative lengths; empty
    for a dense call. `row_sharded`: bias and mask have the rows of the shard."""
    whole = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        shape = list(tensor.shape)
        if name in ("q", "k", "v"):
            shape[-3] *= ranks
        elif row_sharded and name in ("bias", "mask") and shape[-2] > 1:
            shape[-2] *= ranks
        whole[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    call: Any = flashtile.attention
    if documents:
        longest = longest_document(documents, tensors.get("bias"), tensors.get("mask"), block_mask)
        edges = torch.empty(len(documents), dtype=torch.int32, device="meta")
        call = functools.partial(
            flashtile.attention_varlen, cu_seqlens_q=edges, max_seqlen_q=longest, max_seqlen_k=longest
        )
    if block_mask is not None:
        settings = settings | {"block_mask": block_mask.to("meta")}
    with torch.no_grad():
        call(**whole, **settings)


def check_block_mask(block_mask: flashtile.BlockMask, q: Tensor) -> None:
    """Whether it is one, and where q is."""
    if not isinstance(block_mask, flashtile.BlockMask):
        kind = type(block_mask)
        raise TypeError(
            f"block_mask: expected a flashtile.BlockMask, got {kind.__module__}.{kind.__qualname__}; build one with "
            "BlockMask.from_flex from PyTorch's, or with BlockMask.from_predicate or flashtile.patterns"
        )
    if block_mask.device != q.device:
        raise ValueError(
            f"block_mask: expected the device of q, {q.device}, got {block_mask.device}; move it: block_mask.to(...)"
        )


def check_parts(
    tensors: dict[str, Tensor | None], strategy: str, ranks: int, cu_seqlens: Sequence[int] | Tensor | None
) -> tuple[dict[str, Tensor | None], tuple[int, ...], bool]:
    """The tensors of a call, bias and mask with all four dimensions; the cumulative lengths of its documents, none for
    a dense call; and whether bias and mask have the rows of the shard. q, k and v were checked before."""
    q, packed = tensors["q"], cu_seqlens is not None
    assert q is not None
    documents = () if cu_seqlens is None else check_documents(cu_seqlens, q.shape[0] * ranks)
    bias, mask = (with_four_dims(name, tensors[name]) for name in ("bias", "mask"))
    row_sharded = has_shard_rows(bias, mask, strategy, ranks, q.shape[-3] * ranks, packed)
    return tensors | {"bias": bias, "mask": mask}, documents, row_sharded


def check_documents(cu_seqlens: Sequence[int] | Tensor, total: int) -> tuple[int, ...]:
    """Cumulative lengths as numbers, checked."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.device.type != "cpu":
            raise ValueError(
                f"cu_seqlens: expected numbers or a tensor on the CPU, got one on {cu_seqlens.device}; reading it "
                "would make the host wait; pass a tuple of numbers, which FSDP2 leaves where they are"
            )
        cu_seqlens = cu_seqlens.tolist()
    try:
        documents = tuple(map(operator.index, cu_seqlens))
    except TypeError:
        raise TypeError(
            f"cu_seqlens: expected integers, cumulative lengths of documents, got {cu_seqlens!r}; round them"
        ) from None
    if not documents or documents[0] != 0 or any(b < a for a, b in pairwise(documents)):
        raise ValueError(f"cu_seqlens: expected cumulative lengths from 0 that never decrease, got {documents}")
    if documents[-1] > total:
        raise ValueError(
            f"cu_seqlens: expected at most the {total} tokens of all shards at its end, got {documents[-1]}"
        )
    return documents


def longest_document(documents: tuple[int, ...], *tables: Tensor | flashtile.BlockMask | None) -> int | None:
    """The size up to which bias, mask and block mask of packed documents count; None without them."""
    given = [table for table in tables if table is not None]
    if not documents or not given:
        return None
    needed = max((b - a for a, b in pairwise(documents)), default=0)
    longest = max((size for table in given for size in table.shape[-2:] if size > 1), default=needed)
    if longest < needed:
        raise ValueError(
            f"bias, mask: expected rows and columns up to the longest document, {needed}, got {longest}; they count "
            "within each document"
        )
    return longest


def with_four_dims(name: str, table: Tensor | None) -> Tensor | None:
    """A bias or mask with all four dimensions."""
    if table is None or table.dim() == 4:
        return table
    if table.dim() > 4:
        raise ValueError(f"{name}: expected at most 4 dimensions, got shape {tuple(table.shape)}")
    return table[(None,) * (4 - table.dim())]


def has_shard_rows(
    bias: Tensor | None, mask: Tensor | None, strategy: str, ranks: int, length_q: int, packed: bool
) -> bool:
    """Whether bias and mask have the rows of this shard alone."""
    if packed or ranks == 1:
        return False
    rows = {name: t.shape[-2] for name, t in (("bias", bias), ("mask", mask)) if t is not None and t.shape[-2] > 1}
    for name, size in rows.items():
        if size not in (length_q, length_q // ranks):
            raise ValueError(
                f"{name}: expected the {length_q} rows of the whole sequence, or the {length_q // ranks} of this "
                f"shard, got {size}"
            )
    sharded = {name for name, size in rows.items() if size != length_q}
    if not sharded:
        return False
    if len(sharded) != len(rows):
        raise ValueError("bias, mask: expected both with the rows of this shard, or with all, got one of each")
    if strategy not in ("ring", "all_gather"):
        raise ValueError(
            f"{sharded.pop()}: expected the {length_q} rows of the whole sequence with strategy={strategy!r}, got "
            f"{length_q // ranks}; every rank computes all rows of some heads"
        )
    return True
