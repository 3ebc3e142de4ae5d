"""FlashAttention-4's functions of scores and of positions, and its lists of blocks, as flashtile takes them.

There `score_mod(score, batch, head, q_idx=, kv_idx=, seqlen_info=, aux_tensors=)` and `mask_mod(batch, head, q_idx,
kv_idx, seqlen_info, aux_tensors)` are written in CuTe. Here they are plain Python functions of PyTorch operations. With
aux_scalars, these are one more argument. `seqlen_info` has `seqlen_q` and `seqlen_k`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashtile

_POINTS = 64  #: at which a derivative is compared
_TOLERANCE = 2e-3
#: Sizes of a block that are tried where the lists come without: of queries, and of keys.
_BLOCKS_Q, _BLOCK_K = (128, 256), 128


class SeqlenInfo(NamedTuple):
    """The lengths of one sequence, which are read from a tensor only where a function asks."""

    lengths_q: int | Tensor
    lengths_k: int | Tensor
    batch: Any

    @property
    def seqlen_q(self) -> Any:
        return self.lengths_q if isinstance(self.lengths_q, int) else self.lengths_q[self.batch]

    @property
    def seqlen_k(self) -> Any:
        return self.lengths_k if isinstance(self.lengths_k, int) else self.lengths_k[self.batch]


class Problem(NamedTuple):
    """The facts that functions are told beside a score and its place.

    Attributes:
        batch, heads, seq_q, seq_k: sizes; of packed sequences the longest.
        lengths_q, lengths_k: int, or integers `[batch]` of packed sequences.
        aux_tensors, aux_scalars: as the caller gave them.
        device: of q.
    """

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    lengths_q: int | Tensor
    lengths_k: int | Tensor
    aux_tensors: list[Tensor] | None
    aux_scalars: tuple[Any, ...] | None
    device: torch.device

    def told(self, batch: Any) -> dict[str, Any]:
        """The further arguments of functions."""
        told = {"seqlen_info": SeqlenInfo(self.lengths_q, self.lengths_k, batch), "aux_tensors": self.aux_tensors}
        return told if self.aux_scalars is None else told | {"aux_scalars": self.aux_scalars}


def score_function(score_mod: Callable[..., Any], problem: Problem) -> Callable[..., Tensor]:
    """The same for `flashtile.attention(score_mod=)`."""
    check_language("score_mod", score_mod)
    problem = problem._replace(aux_tensors=problem.aux_tensors or ())  # type: ignore[arg-type]

    def function(score: Any, batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
        return score_mod(score, batch, head, q_idx=q_index, kv_idx=k_index, **problem.told(batch))

    return function


def mask_function(mask_mod: Callable[..., Any], problem: Problem) -> Callable[..., Tensor]:
    """The same for `flashtile.BlockMask.from_predicate`."""
    check_language("mask_mod", mask_mod)

    def predicate(batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
        return mask_mod(batch, head, q_index, k_index, *problem.told(batch).values())

    return predicate


def check_derivative(function: Callable[..., Tensor], score_mod_bwd: Callable[..., Any], problem: Problem) -> None:
    """Compares a caller's derivative, `score_mod_bwd(grad, score, batch, head, q_idx=, ...)`, with flashtile's own at
    some places, which reads values on the host. flashtile computes with its own, so another one would be ignored."""
    check_language("score_mod_bwd", score_mod_bwd)
    if not all(problem[:4]):
        return
    generator = torch.Generator("cpu").manual_seed(0)
    places = [torch.randint(size, (_POINTS,), generator=generator, device="cpu") for size in problem[:4]]
    scores, upstream = (torch.randn(_POINTS, generator=generator, device="cpu") for _ in range(2))
    scores, upstream, *places = (tensor.to(problem.device) for tensor in (scores, upstream, *places))
    backward = score_function(lambda score, *place, **told: score_mod_bwd(upstream, score, *place, **told), problem)
    with torch.enable_grad():
        result = function(scores.requires_grad_(), *places)
        own = torch.zeros_like(scores)
        if result.requires_grad:
            (own,) = torch.autograd.grad(result, scores, upstream, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        given = torch.as_tensor(backward(scores.detach(), *places), device=own.device).expand_as(own)
    error = (given - own).abs().max().item()
    if not error <= _TOLERANCE * max(1.0, own.abs().max().item()):
        raise ValueError(
            f"score_mod_bwd: expected the derivative of score_mod, which flashtile computes by itself, got one that "
            f"differs by {error:.2g}; correct it, or leave it out"
        )


def check_language(name: str, function: Callable[..., Any]) -> None:
    """Refuses what is no function of PyTorch operations."""
    if not callable(function):
        raise TypeError(f"{name}: expected a function of PyTorch operations, got {type(function).__name__}")
    for part in (function, inspect.unwrap(function)):
        space = getattr(part, "__globals__", {})
        used = [space.get(found) for found in getattr(getattr(part, "__code__", None), "co_names", ())]
        modules = [value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "") for value in used]
        if "cutlass" in (
            str(found).split(".")[0] for found in (space.get("__name__"), type(part).__module__, *modules)
        ):
            raise ValueError(
                f"{name}: expected a Python function of PyTorch operations, got one written in CuTe, which only CuTe "
                "compiles; write it with the same arguments and PyTorch operations, without cute.jit"
            )


class BlockSparseTensorsTorch(NamedTuple):
    """For each block of queries, which blocks of keys are computed; every tensor is int32.

    Attributes:
        mask_block_cnt: `[batch | 1, heads | 1, blocks_q]`, how many there are, or None for none.
        mask_block_idx: `[batch | 1, heads | 1, blocks_q, blocks_k]`, their numbers; what lies past the count is not
            read. A `mask_mod` says what is visible in these. Without one all of it is, as in the full ones.
        full_block_cnt: likewise those in which everything is visible, or None for none.
        full_block_idx: their numbers.
        block_size: (queries, keys) of a block; None for (128 or 256, 128), which the shapes tell.
    """

    mask_block_cnt: Tensor | None
    mask_block_idx: Tensor | None
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_size: tuple[int, int] | None = None


class Layouts(NamedTuple):
    """The lists as bool `[batch | 1, heads | 1, blocks_q, blocks_k]`, all False where there is none; a block's size."""

    partial: Tensor
    full: Tensor
    size: tuple[int, int]


def block_mask_of(
    blocks: BlockSparseTensorsTorch | None, backward: BlockSparseTensorsTorch | None,
    mask_mod: Callable[..., Any] | None, problem: Problem,
) -> flashtile.BlockMask | None:  # fmt: skip
    """The mask of blocks, of a function, or of both, as flashtile takes it. Reads values on the host, and so waits.

    Args:
        blocks: the function says what is visible in its mask blocks; without a function all of it is.
        backward: the same by their keys, compared: `[batch | 1, heads | 1, blocks_k]`, `[..., blocks_k, blocks_q]`.
    """
    seq_q, seq_k = problem.seq_q, problem.seq_k
    if blocks is None:
        if backward is not None:
            raise ValueError(
                "block_sparse_tensors_bwd: expected None without block_sparse_tensors, got lists; pass those of the "
                "forward, from which flashtile makes the others"
            )
        if mask_mod is None:
            return None
        return flashtile.BlockMask.from_predicate(mask_function(mask_mod, problem), *problem[:4], device=problem.device)
    layouts = _layouts(blocks, seq_q, seq_k)
    if backward is not None:
        _check_backward(layouts, backward, seq_q, seq_k, mask_mod is not None)
    if mask_mod is None or blocks.mask_block_cnt is None:
        return flashtile.BlockMask.from_layout(layouts.partial | layouts.full, layouts.size, seq_q, seq_k)
    visible, size = mask_function(mask_mod, problem), layouts.size
    partial, full = (layout.expand(*problem[:2], -1, -1) for layout in layouts[:2])

    def predicate(batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
        block = batch, head, q_index // size[0], k_index // size[1]
        return partial[block] & visible(batch, head, q_index, k_index) | full[block]

    return flashtile.BlockMask.from_predicate(predicate, *problem[:4], device=problem.device)


def _layouts(blocks: BlockSparseTensorsTorch, seq_q: int, seq_k: int) -> Layouts:
    lists = {"mask_block": blocks[:2], "full_block": blocks[2:4]}
    found = {
        name: _listed(name, count, index, -(-seq_k // _BLOCK_K))
        for name, (count, index) in lists.items() if count is not None
    }  # fmt: skip
    if not found:
        raise ValueError("mask_block_cnt, full_block_cnt: expected at least one, got None; leave the lists out")
    size, given = blocks.block_size, next(iter(found.values()))
    if size is None:
        rows = [rows for rows in _BLOCKS_Q if -(-seq_q // rows) == given.shape[2]]
        size = (rows[0] if rows else _BLOCKS_Q[0], _BLOCK_K)
    tiles = -(-seq_q // size[0]), -(-seq_k // size[1])
    for layout in found.values():
        if layout.shape[2] != tiles[0] or layout.shape[3] < tiles[1] or layout[..., tiles[1] :].any():
            raise ValueError(
                f"block_size: expected blocks of {size} for {seq_q} queries and {seq_k} keys, {list(tiles)} of them, "
                f"got lists of {list(layout.shape[2:])}; pass the block_size that they were made for"
            )
    none = torch.zeros(1, 1, *tiles, dtype=torch.bool, device=given.device)
    partial, full = (found[name][..., : tiles[1]] if name in found else none for name in lists)
    return Layouts(partial, full, size)


def _check_backward(
    forward: Layouts, blocks: BlockSparseTensorsTorch, seq_q: int, seq_k: int, has_function: bool
) -> None:
    """Whether lists by keys name the blocks of the forward: with a function each kind of them, else all of them."""
    size = forward.size if blocks.block_size is None else blocks.block_size
    other = _layouts(blocks._replace(block_size=(size[1], size[0])), seq_k, seq_q)
    rows, columns = (
        torch.arange(0, length, math.gcd(*sizes), device=forward.full.device)
        for length, sizes in zip((seq_q, seq_k), zip(size, forward.size))
    )

    def shown(layouts: Sequence[Tensor], size: tuple[int, int]) -> list[Tensor]:
        layouts = layouts if has_function else [layouts[0] | layouts[1]]
        return [layout[:, :, rows // size[0]][..., columns // size[1]] for layout in layouts]

    mine, given = shown(forward[:2], forward.size), shown([layout.transpose(2, 3) for layout in other[:2]], size)
    if any((one != two).any() for one, two in zip(mine, given)):
        raise ValueError(
            "block_sparse_tensors_bwd: expected the blocks of block_sparse_tensors, by their keys, got others; leave "
            "it out, and flashtile makes these lists"
        )


def _listed(name: str, count: Tensor, index: Tensor | None, columns: int) -> Tensor:
    """The blocks that are in a list: bool `[batch, heads, blocks_q, at least columns]`."""
    if index is None or count.dim() != 3 or index.dim() != 4 or index.shape[:3] != count.shape:
        raise ValueError(
            f"{name}_cnt, {name}_idx: expected [batch, heads, blocks_q] and [batch, heads, blocks_q, blocks_k], got "
            f"{list(count.shape)} and {None if index is None else list(index.shape)}"
        )
    columns = max(index.shape[3], columns)
    there = torch.arange(index.shape[3], device=index.device) < count[..., None]
    number = torch.where(there, index, columns).long().clamp(max=columns)
    layout = torch.zeros(*index.shape[:3], columns + 1, dtype=torch.bool, device=index.device)
    return layout.scatter(3, number, True)[..., :columns]
