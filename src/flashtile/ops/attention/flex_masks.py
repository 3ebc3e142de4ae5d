"""PyTorch's block masks as flashtile's, converted again when something that they were converted from has changed.

PyTorch evaluates `mask_mod` in every call, so a mask means what its function, the tensors that it reads, and its lists
are at that time. One mask serves the layers of a model, and each of its steps, and they seldom change between.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.surroundings import Surroundings

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


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
