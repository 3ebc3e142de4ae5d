"""FlexAttention as a peer: masks as lists of blocks, bias and soft cap as functions of the scores, always compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashtile import BlockMask, patterns
from flashtile.bench import functions
from flashtile.bench.cases import Case, Inputs
from flashtile.bench.functions import ScoreMod, Visible

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


def build_flex(case: Case, inputs: Inputs) -> Callable[..., Tensor]:
    """The compiled function `(q, k, v) -> out`, with a bias or with the tables of a function behind v.

    `fullgraph` makes an error of what torch.compile does not trace, and of its limit on recompilations.
    """
    torch.compiler.reset()  # each case compiles its own kernels; the limit on recompilations counts them together
    return torch.compile(only_compiled(flex_of(case, inputs)), dynamic=False, fullgraph=True)


def only_compiled(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, but an error where it is not compiled: FlexAttention then computes the whole matrix in silence."""

    def compiled(*tensors: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            raise RuntimeError("fell back to eager execution, whose time would be another's")
        return attend(*tensors)

    return compiled


def flex_of(case: Case, inputs: Inputs) -> Callable[..., Tensor]:
    """The function, to be compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    lists, grouped = _block_mask(case, inputs), case.H != case.Hkv

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        if case.function in functions.SCORES:
            score_mod: ScoreMod | None = functions.SCORES[case.function].make(more or inputs.tables, case.S)
        else:
            score_mod = _score_mod(case, more[0] if more else None)
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=lists, enable_gqa=grouped)

    return attend


def _score_mod(case: Case, bias: Tensor | None) -> ScoreMod | None:
    softcap, shared = case.softcap, case.bias == "1HSS"
    if softcap is None and bias is None:
        return None

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[0 if shared else batch, head, row, column]
        return score

    return score_mod


def _block_mask(case: Case, inputs: Inputs) -> FlexBlockMask | None:
    """Our lists of blocks, which are FlexAttention's, with its usual functions for the elements of partial blocks."""
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    device = inputs.q.device
    if inputs.block_mask is None and not case.causal and case.window is None:
        return None
    lists = (inputs.block_mask or _band(case, device)).to_flex()
    if case.mask is not None and case.segments is None:
        return lists  # all of its tiles are full
    visible = _visible(case, device)

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return visible(row, column)

    blocks = (lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices)
    seq_lengths = (case.S, case.S)
    return FlexBlockMask.from_kv_blocks(*blocks, lists.BLOCK_SIZE, mask_mod, seq_lengths)


def _visible(case: Case, device: torch.device) -> Visible:
    if case.function in functions.MASKS:
        return functions.visible(case.function, case.S, device)
    return visible_in_band(case) if case.segments is None else _visible_in_documents(case, case.segments, device)


def _band(case: Case, device: torch.device) -> BlockMask:
    left, right = case.window or (None, None)
    return patterns.sliding_window(case.S, None, left, 0 if case.causal else right, device=device)


def visible_in_band(case: Case) -> Visible:
    """Whether a query sees a key by causal and window; made of no more comparisons than the case needs."""
    left, right = case.window or (None, None)
    keys_left = case.S if left is None else left
    keys_right = 0 if case.causal else case.S if right is None else right

    def visible(row: Tensor, column: Tensor) -> Tensor:
        seen = column <= row + keys_right
        return seen if left is None else seen & (column >= row - keys_left)

    return visible


def _visible_in_documents(case: Case, lengths: Sequence[int], device: torch.device) -> Visible:
    document = torch.repeat_interleave(torch.tensor(lengths, device=device)).int()

    def visible(row: Tensor, column: Tensor) -> Tensor:
        same = document[row] == document[column]
        return same & (column <= row) if case.causal else same

    return visible
