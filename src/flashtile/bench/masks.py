"""The masks and functions that cases name: what they show, how many pairs, and how scores change.

`mask` of a case: `tiles128:0.1` shows random tiles of 128 queries and 128 keys, about a tenth of them. `documents768`
shows each token the tokens of its own document; their lengths have the median 768 and a long tail. These two are block
masks. The others are tensors of booleans: `padding` hides the last keys of each batch entry, up to half of them, and
`random0.5` shows half of all pairs.

`function` of a case: scores and masks as users write them, for flashtile and for FlexAttention alike. A score function
is the same Python function for both. A mask is a pattern of flashtile and, for FlexAttention and for the oracle, the
function of the indices that a user writes. Sizes follow the length of the sequence, so that short cases have every part
of a mask too.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile import BlockMask, patterns

#: `(score, batch, head, q_index, k_index) -> score`.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: `(q_index, k_index) -> visible`.
Visible = Callable[[Tensor, Tensor], Tensor]
Tables = Sequence[Tensor]

SOFTCAP = 30.0
_DILATION = 4
_ANSWERS = 8
#: The mask of keys that pad short sequences.
PADDING = "padding"


def long_tailed_lengths(total: int = 65536, median: int = 768) -> list[int]:
    """Lengths from 16 to 16,384 of log-normal distribution (sigma 1.4), always the same, `total` tokens."""
    generator = random.Random(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = round(generator.lognormvariate(math.log(median), 1.4))
        lengths.append(min(max(drawn, 16), 16384, left))
    return lengths


def document_lengths(mask: str | None, seq: int) -> tuple[int, ...] | None:
    """Lengths of the documents that a mask keeps apart; None for another mask, or none."""
    if mask is None or not mask.startswith("documents"):
        return None
    return tuple(long_tailed_lengths(seq, int(mask.removeprefix("documents"))))


def padded_lengths(batch: int, keys: int) -> list[int]:
    """How many keys each batch entry has under the mask of padding: all of them, down to a little more than half."""
    return [keys - keys * entry // (2 * batch) for entry in range(batch)]


def visible_in_tensor(mask: str, batch: int, queries: int, keys: int) -> int:
    """Pairs that a tensor shows over the batch; of random pairs, how many are expected."""
    if mask == PADDING:
        return queries * sum(padded_lengths(batch, keys))
    return round(batch * queries * keys * float(mask.removeprefix("random")))


def mask_tensor(mask: str, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Bool `[batch, 1, 1, keys]` of padding, `[1, 1, queries, keys]` of random pairs. Every query sees a key."""
    if mask == PADDING:
        lengths = torch.tensor(padded_lengths(batch, keys), device=device)
        return (torch.arange(keys, device=device) < lengths[:, None])[:, None, None]
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.rand(queries, keys, generator=generator, device=device) < float(mask.removeprefix("random"))
    drawn[:, 0] = True
    return drawn[None, None]


def parse_tiles(mask: str) -> tuple[int, float]:
    """Tile and density of a mask of random tiles."""
    tile, _, density = mask.removeprefix("tiles").partition(":")
    return int(tile), float(density)


def visible_tiles(tiles: int, density: float) -> int:
    """How many of `tiles · tiles` are visible: those on the diagonal at least."""
    return max(tiles, round(density * tiles**2))


@functools.cache
def tile_layout(seq: int, mask: str) -> Tensor:
    """The tiles that a mask shows, always the same for a name: bool `[tiles, tiles]` on the CPU, all diagonal ones."""
    tile, density = parse_tiles(mask)
    tiles = seq // tile
    aside = [cell for cell in range(tiles**2) if cell % (tiles + 1)]
    drawn = random.Random(0).sample(aside, visible_tiles(tiles, density) - tiles)
    layout = torch.eye(tiles, dtype=torch.bool, device="cpu")
    layout.view(-1)[torch.tensor(drawn, dtype=torch.long, device="cpu")] = True
    return layout


def tile_rows(seq: int, mask: str, rows: range, device: torch.device) -> Tensor:
    """The keys that some queries see of random tiles: bool `[rows, seq]`."""
    tile, _ = parse_tiles(mask)
    by_row = torch.arange(rows.start, rows.stop, device="cpu") // tile
    return tile_layout(seq, mask)[by_row].to(device).repeat_interleave(tile, dim=1)


@functools.lru_cache(maxsize=2)
def block_mask(mask: str, seq: int, causal: bool, device: torch.device) -> BlockMask:
    """The mask as flashtile takes it, `causal` included."""
    lengths = document_lengths(mask, seq)
    if lengths is not None:
        return patterns.documents(lengths=lengths, causal=causal, device=device)
    tile, _ = parse_tiles(mask)
    return BlockMask.from_layout(tile_layout(seq, mask).to(device), (tile, tile), seq, seq)


class ScoreFunction(NamedTuple):
    """A function of scores.

    Attributes:
        tables: from heads, seq and a generator, the tensors that it reads, float32 with heads first.
        make: the function that reads such tensors; the second argument is seq.
        learned: the gradients of the tables are part of the backward.
    """

    tables: Callable[[int, int, torch.Generator], tuple[Tensor, ...]]
    make: Callable[[Tables, int], ScoreMod]
    learned: bool = False


class MaskFunction(NamedTuple):
    """A function of the indices, for sequences of one length. `pattern`: flashtile's mask, on a device. `visible`: the
    function that a user of FlexAttention writes, on a device where it reads tensors. `pairs`: how many pairs are
    visible. `parts`: lengths of the parts that do not see each other."""

    pattern: Callable[[torch.device], BlockMask]
    visible: Callable[[torch.device], Visible]
    pairs: int
    parts: tuple[int, ...] | None = None


def _relative(tables: Tables, seq: int) -> ScoreMod:
    (table,) = tables
    return lambda score, batch, head, q_index, k_index: score + table[head, q_index - k_index + (seq - 1)]


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """`[heads]`: 2 to the powers of -8 / heads, -16 / heads, and so on to -8."""
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=device))


def _alibi(tables: Tables, seq: int) -> ScoreMod:
    (slopes,) = tables
    return lambda score, batch, head, q_index, k_index: score - slopes[head] * torch.abs(q_index - k_index)


def _softcap(tables: Tables, seq: int) -> ScoreMod:
    return lambda score, batch, head, q_index, k_index: SOFTCAP * torch.tanh(score / SOFTCAP)


def _waves(tables: Tables, seq: int) -> ScoreMod:
    frequency, gain = tables

    def waves(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return score + gain[head, k_index] * torch.sin(frequency[head] * (q_index - k_index))

    return waves


SCORES = {
    "relative": ScoreFunction(lambda heads, seq, drawn: (_normal(drawn, heads, 2 * seq - 1),), _relative, learned=True),
    "alibi": ScoreFunction(lambda heads, seq, drawn: (alibi_slopes(heads, drawn.device),), _alibi),
    "softcap": ScoreFunction(lambda heads, seq, drawn: (), _softcap),
    "waves": ScoreFunction(
        lambda heads, seq, drawn: (
            torch.rand(heads, generator=drawn, device=drawn.device), _normal(drawn, heads, seq),
        ), _waves, learned=True,
    ),
}  # fmt: skip


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def packed_lengths(seq: int) -> tuple[int, ...]:
    """Long-tailed, in 65,536 tokens those of a packed batch."""
    return tuple(long_tailed_lengths(seq, min(768, seq // 8)))


def visible_in_documents(lengths: Sequence[int], device: torch.device, causal: bool = True) -> Visible:
    """Each token the tokens of its own document; causal, those before it alone."""
    document = torch.repeat_interleave(torch.tensor(lengths, device=device)).int()
    if not causal:
        return lambda q_index, k_index: document[q_index] == document[k_index]
    return lambda q_index, k_index: (k_index <= q_index) & (document[q_index] == document[k_index])


def window_left(seq: int) -> int:
    """Keys before the query: 1,024 keys in all of 8,192 tokens."""
    return seq // 8 - 1


def _documents(seq: int) -> MaskFunction:
    lengths = packed_lengths(seq)
    return MaskFunction(
        lambda device: patterns.documents(lengths=lengths, causal=True, device=device),
        lambda device: visible_in_documents(lengths, device),
        sum(n * (n + 1) // 2 for n in lengths),
        lengths,
    )


def _window(seq: int) -> MaskFunction:
    left = window_left(seq)
    return MaskFunction(
        lambda device: patterns.sliding_window(seq, left=left, right=0, device=device),
        lambda device: lambda q_index, k_index: (k_index <= q_index) & (q_index - k_index <= left),
        sum(min(row, left) + 1 for row in range(seq)),
    )


def _prefix_lm(seq: int) -> MaskFunction:
    prefix = seq // 4
    return MaskFunction(
        lambda device: patterns.prefix_lm(seq, prefix, device=device),
        lambda device: lambda q_index, k_index: (k_index <= q_index) | (k_index < prefix),
        sum(max(row + 1, prefix) for row in range(seq)),
    )


def _dilated(seq: int) -> MaskFunction:
    """One key in four: 512 before the query in 8,192 tokens."""
    left = seq // 16

    def visible(q_index: Tensor, k_index: Tensor) -> Tensor:
        back = q_index - k_index
        return (back >= 0) & (back <= left * _DILATION) & (back % _DILATION == 0)

    return MaskFunction(
        lambda device: patterns.dilated(seq, left, 0, _DILATION, device=device),
        lambda device: visible,
        sum(min(row // _DILATION, left) + 1 for row in range(seq)),
    )


def _neighborhood(seq: int) -> MaskFunction:
    """A picture of a power of two of tokens: 64 × 128 and a window of 13 × 13 in 8,192 tokens."""
    width = 2 ** (seq.bit_length() // 2)
    height = seq // width
    kernel = min(13, height - 1 | 1)
    reach = kernel // 2

    def visible(q_index: Tensor, k_index: Tensor) -> Tensor:
        middle_row = (q_index // width).clamp(reach, height - 1 - reach)
        middle_column = (q_index % width).clamp(reach, width - 1 - reach)
        near_row = torch.abs(k_index // width - middle_row) <= reach
        return near_row & (torch.abs(k_index % width - middle_column) <= reach)

    return MaskFunction(
        lambda device: patterns.neighborhood((height, width), kernel, device=device),
        lambda device: visible,
        height * width * kernel**2,
    )


def _tree(seq: int) -> MaskFunction:
    """Prompts with eight answers each, of up to 8,192 tokens together. Children stand right behind their parent, so a
    token is seen up to the end of the last segment below it."""
    group = min(seq, 8192)
    prompt, answer = group // 4, group * 3 // (4 * _ANSWERS)
    trees = seq // group
    assert seq % group == 0 and prompt + _ANSWERS * answer == group, "trees are of one size"
    lengths = [prompt, *[answer] * _ANSWERS] * trees
    roots = range(0, len(lengths), 1 + _ANSWERS)
    parents = [parent for root in roots for parent in (-1, *[root] * _ANSWERS)]

    def visible(device: torch.device) -> Visible:
        ends = [end for tree in range(trees) for end in ((tree + 1) * group, *_ends(tree * group + prompt, answer))]
        end = torch.repeat_interleave(torch.tensor(ends, device=device), torch.tensor(lengths, device=device)).int()
        return lambda q_index, k_index: (k_index <= q_index) & (q_index < end[k_index])

    inner = prompt * (prompt + 1) // 2 + _ANSWERS * (answer * (answer + 1) // 2 + answer * prompt)
    pattern = functools.partial(patterns.tree, lengths, parents)
    return MaskFunction(lambda device: pattern(device=device), visible, trees * inner, (group,) * trees)


def _ends(start: int, answer: int) -> range:
    """The ends of the answers that begin at some token."""
    return range(start + answer, start + _ANSWERS * answer + 1, answer)


#: Name -> from seq, the function.
MASKS: dict[str, Callable[[int], MaskFunction]] = {
    name: functools.cache(make)
    for name, make in (
        ("documents", _documents), ("window", _window), ("prefix-lm", _prefix_lm), ("dilated", _dilated),
        ("neighborhood", _neighborhood), ("tree", _tree),
    )
}  # fmt: skip
#: Those in which no query sees a later key.
CAUSAL = ("documents", "window", "dilated", "tree")


@functools.lru_cache(maxsize=2)
def mask_pattern(name: str | None, seq: int, device: torch.device) -> BlockMask | None:
    """The mask as flashtile takes it; None for a function of scores, and without a function."""
    return MASKS[name](seq).pattern(device) if name in MASKS else None


@functools.lru_cache(maxsize=2)
def visible(name: str, seq: int, device: torch.device) -> Visible:
    """The mask as a function of the indices."""
    return MASKS[name](seq).visible(device)


def tables(name: str | None, heads: int, seq: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The tensors that the function of scores reads; none without one."""
    return SCORES[name].tables(heads, seq, generator) if name in SCORES else ()


def learns(name: str | None) -> bool:
    """Whether the backward has gradients of the tables."""
    return name in SCORES and SCORES[name].learned


def shown(name: str, seq: int, rows: range, keys: range, device: torch.device) -> Tensor:
    """The keys, of some, that some queries see: bool `[rows, keys]`, from the function of the indices."""
    q_index = torch.arange(rows.start, rows.stop, device=device)[:, None]
    return visible(name, seq, device)(q_index, torch.arange(keys.start, keys.stop, device=device)[None, :])
