"""The mask function of `attn_implementation="flashtile"`: compact masks of patterns that are known, else whole ones.

Shape letters: B batch, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from flashtile.integrations.transformers import compact
from flashtile.integrations.transformers.compact import Band

#: Types of models that read masks in code of their own too, or append to them, as additions to scores: eager
#: attention's is the only one that they know. By its class where a configuration tells no type.
READERS = frozenset({
    "bigbird_pegasus", "deepseek_v4", "doge", "gemma4_audio", "git", "informer", "lasr_encoder", "nllb-moe",
    "PPDocLayoutV2ReadingOrderConfig",
})  # fmt: skip


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: Tensor | None = None,
    local_size: int | None = None, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu", config: Any = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """A mask of one model call, with the arguments of transformers' mask functions.

    Returns:
        A compact mask, of at most `[B, 8, 1, K]` (see `compact`), where the pattern is causal or full, with or without
        a window, over padded or packed sequences. Elsewhere, where the model asks for a whole one, and for one query
        at a cache of fixed size, that of transformers, bool `[B, 1, Q, K]`; for models that read it themselves the one
        that is added to scores, of the dtype of the model, or None where it would hide nothing.
    """
    found: Tensor | None = None
    tracing = torch.compiler.is_compiling()  # functions that are being traced do not show what they are made of
    packed = None if tracing else _packed_sequences(mask_function)
    make_whole: Any = masking_utils.sdpa_mask
    skip = False
    if not READERS.isdisjoint((getattr(config, "model_type", None), type(config).__name__)):
        make_whole, skip = masking_utils.eager_mask, allow_is_bidirectional_skip
    elif packed is not None and attention_mask is None and not _has_indexers(config):
        pattern, sequence_of_row = packed
        band = _recognised(pattern)
        if band is not None:
            found = compact.packed_sequences(band, _ends(sequence_of_row))
    elif allow_is_causal_skip or allow_is_bidirectional_skip:
        if tracing:
            band = _by_arguments(allow_is_causal_skip, local_size, kv_offset + kv_length, config)
        else:
            band = _recognised(mask_function)
        if band is not None and (attention_mask is None or attention_mask.dim() == 2):
            found = _compact(band, q_length, kv_length, q_offset, kv_offset, attention_mask, device)
    if found is not None:
        return found
    whole: Tensor | None = make_whole(
        batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=skip, device=device, **kwargs,
    )  # fmt: skip
    return whole


def _has_indexers(config: Any) -> bool:
    """Whether layers choose keys by the mask, of which they read a whole one; for packed sequences they do not ask."""
    return "indexed_attention" in (getattr(config, "layer_types", None) or ())


def _compact(
    band: Band, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, attention_mask: Tensor | None,
    device: torch.device | str,
) -> Tensor | None:  # fmt: skip
    """The compact mask of a dense call; None where its diagonal does not end at the last key in use."""
    keys = kv_length
    if band.causal or band.windowed:
        first_row = _on_host(q_offset)
        if first_row is None:
            return None
        keys = first_row + q_length - kv_offset  # up to the last query
        if not 0 < keys <= kv_length or (keys < kv_length and not band.causal):
            return None
        band = band._replace(prefix=keys < kv_length)
    if attention_mask is None:
        return compact.all_keys(band, keys, device)
    visible = attention_mask[:, kv_offset : kv_offset + keys]
    if visible.shape[1] < keys:  # what the mask does not know is not there yet
        visible = torch.nn.functional.pad(visible, (0, keys - visible.shape[1]))
    # Whether there is padding at all would cost a synchronisation to know, except on a CPU.
    if visible.device.type == "cpu" and not torch.compiler.is_compiling() and bool(visible.all()):
        return compact.all_keys(band, keys, device)
    return compact.from_visible_keys(band, visible)


def _on_host(offset: int | Tensor) -> int | None:
    """The position of the first query. A cache of fixed size that has been filled before keeps it in a tensor, which is
    read, once for a model call of several tokens; None where it cannot be."""
    if not isinstance(offset, Tensor):
        return offset
    capturing = offset.is_cuda and torch.cuda.is_current_stream_capturing()
    return None if torch.compiler.is_compiling() or capturing else int(offset)


def _by_arguments(causal: bool, local_size: int | None, end: int, config: Any) -> Band | None:
    """The pattern that transformers' arguments tell, by which it leaves out masks for sdpa."""
    if local_size is None or end < local_size:
        return Band(causal)
    window = getattr(config, "sliding_window", None)
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return Band(causal=True, windowed=True) if causal and local_size == window and not chunked else None


# --- patterns -------------------------------------------------------------------------------------------------------
# transformers hands patterns over as functions of indices, composed of its own. They are recognised by the code that
# they share with others made by the same functions, and by the values that they close over.


def pattern_within_sequences(pattern: Callable[..., Any]) -> Band | None:
    """The band that a pattern is within each of its packed sequences, wherever they are; None for all others."""
    packed = _packed_sequences(pattern)
    return _recognised(packed[0] if packed else pattern)


def _recognised(pattern: Callable[..., Any]) -> Band | None:
    """The band that a pattern is; None for all others."""
    if pattern is masking_utils.causal_mask_function:
        return Band(causal=True)
    if pattern is masking_utils.bidirectional_mask_function:
        return Band()
    both = _and_parts(pattern)
    if both is None or len(both) != 2:
        return None
    window, rest = both
    if rest is masking_utils.causal_mask_function and _made_by(window, masking_utils.sliding_window_overlay, 1):
        return Band(causal=True, windowed=True)
    two_sided = masking_utils.sliding_window_bidirectional_overlay
    if rest is masking_utils.bidirectional_mask_function and _made_by(window, two_sided, 1):
        return Band(windowed=True)
    return None


def _packed_sequences(pattern: Callable[..., Any]) -> tuple[Callable[..., Any], Tensor] | None:
    """(pattern within each sequence, sequence of each row `[B, S]`) of a pattern for packed sequences."""
    both = _and_parts(pattern)
    if both is None or len(both) != 2:
        return None
    # Before 5.23, transformers kept the indices as they are, which for a band is the same: distances count.
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    for sequences, rest in (both, both[::-1]):
        same = _made_by(sequences, masking_utils.packed_sequence_mask_function, None)
        if same:
            within = _made_by(rest, remap, None, None) if remap else None
            return within["mask_function"] if within else rest, same["packed_sequence_mask"]
    return None


def _and_parts(pattern: Callable[..., Any]) -> tuple[Callable[..., Any], ...] | None:
    made = _made_by(pattern, masking_utils.and_masks, masking_utils.causal_mask_function)
    return made["mask_functions"] if made else None


def _made_by(function: Any, maker: Callable[..., Any], *example: Any) -> dict[str, Any] | None:
    """The values that a function closes over, where `maker` made it. `example`: any arguments of the maker."""
    code: Any = getattr(function, "__code__", None)
    made = code is not None and code is getattr(maker(*example), "__code__", None)
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__))) if made else None


def _ends(sequence_of_row: Tensor) -> Tensor:
    """The ends of the sequences, of all rows of the batch in one row; a row of the batch begins a sequence."""
    last = torch.ones_like(sequence_of_row, dtype=torch.bool)
    last[:, :-1] = sequence_of_row[:, 1:] != sequence_of_row[:, :-1]
    return last.flatten().nonzero().flatten() + 1
