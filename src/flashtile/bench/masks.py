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
from typing import Any, NamedTuple

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


class Mask(NamedTuple):
    """The pairs of a query and a key that a case shows, by functions of a device: as a pattern and as a function of the
    indices, or as a tensor of booleans in which every query sees a key."""

    pairs: float  # visible pairs of one head over the batch, as far as they count as work
    visible: Callable[[torch.device], Visible] | None = None  # as a user of FlexAttention writes it
    pattern: Callable[[torch.device], BlockMask] | None = None  # flashtile's
    tensor: Callable[[torch.device], Tensor] | None = None
    parts: tuple[int, ...] | None = None  # lengths of the parts that do not see each other
    full: bool = False  # of each tile of the pattern all pairs are visible, or none

    def block_mask(self, device: torch.device) -> BlockMask | None:
        return None if self.pattern is None else _made(self.pattern, device)

    def indices(self, device: torch.device) -> Visible:
        """The mask as a function of the indices."""
        assert self.visible is not None
        return _made(self.visible, device)

    def shown(self, rows: range, keys: range, device: torch.device) -> Tensor:
        """The keys, of some, that some queries see: bool `[rows, keys]`."""
        q_index = torch.arange(rows.start, rows.stop, device=device)[:, None]
        return self.indices(device)(q_index, torch.arange(keys.start, keys.stop, device=device)[None, :])


@functools.lru_cache(maxsize=4)
def _made(make: Callable[[torch.device], Any], device: torch.device) -> Any:
    """The result of a mask's `pattern` or `visible` on a device, made once: both read tensors."""
    return make(device)


@functools.cache
def find_mask(name: str | None, batch: int, queries: int, keys: int, causal: bool) -> Mask | None:
    """The mask of a case by the name of its mask or function; None for a function of scores, and without a name."""
    if name is None or name in SCORES:
        return None
    if name in MASKS:
        return MASKS[name](queries)
    if name == PADDING or name.startswith("random"):
        return _tensor_mask(name, batch, queries, keys)
    if name.startswith("documents"):
        lengths = tuple(long_tailed_lengths(queries, int(name.removeprefix("documents"))))
        return _separate(lengths, batch * sum(n**2 for n in lengths) / (2 if causal else 1), causal)
    assert queries == keys, "tiles are of as many queries as keys"
    return _random_tiles(name, batch, queries)


def _tensor_mask(name: str, batch: int, queries: int, keys: int) -> Mask:
    """Padding, of `[batch, 1, 1, keys]`: all keys of the first entry are visible, a little more than half of the last.
    Or random pairs, `[1, 1, queries, keys]`."""
    lengths = [keys - keys * entry // (2 * batch) for entry in range(batch)]

    def padding(device: torch.device) -> Tensor:
        return (torch.arange(keys, device=device) < torch.tensor(lengths, device=device)[:, None])[:, None, None]

    if name == PADDING:
        return Mask(queries * sum(lengths), tensor=padding)
    share = float(name.removeprefix("random"))

    def drawn(device: torch.device) -> Tensor:
        generator = torch.Generator(device).manual_seed(0)
        found = torch.rand(queries, keys, generator=generator, device=device) < share
        found[:, 0] = True
        return found[None, None]

    return Mask(round(batch * queries * keys * share), tensor=drawn)  # as many are expected


def _random_tiles(name: str, batch: int, seq: int) -> Mask:
    tile, density = int(name.removeprefix("tiles").partition(":")[0]), float(name.partition(":")[2])
    tiles = seq // tile
    assert seq % tile == 0, "tiles are whole"
    count = max(tiles, round(density * tiles**2))  # those on the diagonal at least

    def pattern(device: torch.device) -> BlockMask:
        return BlockMask.from_layout(tile_layout(tiles, count).to(device), (tile, tile), seq, seq)

    def visible(device: torch.device) -> Visible:
        layout = tile_layout(tiles, count).to(device)
        return lambda q_index, k_index: layout[q_index // tile, k_index // tile]

    return Mask(batch * count * tile**2, visible, pattern, full=True)


@functools.cache
def tile_layout(tiles: int, count: int) -> Tensor:
    """Visible tiles, always the same, all diagonal ones among them: bool `[tiles, tiles]` on the CPU."""
    aside = [cell for cell in range(tiles**2) if cell % (tiles + 1)]
    drawn = random.Random(0).sample(aside, count - tiles)
    layout = torch.eye(tiles, dtype=torch.bool, device="cpu")
    layout.view(-1)[torch.tensor(drawn, dtype=torch.long, device="cpu")] = True
    return layout


def _separate(lengths: tuple[int, ...], pairs: float, causal: bool) -> Mask:
    """Each token sees the tokens of its own document; if causal, those before it alone."""

    def visible(device: torch.device) -> Visible:
        document = torch.repeat_interleave(torch.tensor(lengths, device=device)).int()
        if not causal:
            return lambda q_index, k_index: document[q_index] == document[k_index]
        return lambda q_index, k_index: (k_index <= q_index) & (document[q_index] == document[k_index])

    make = functools.partial(patterns.documents, lengths=lengths, causal=causal)
    return Mask(pairs, visible, lambda device: make(device=device), parts=lengths)


class ScoreFunction(NamedTuple):
    """A function of scores. `tables`: from heads, seq and a generator, the tensors that it reads, float32 with heads
    first. `make`: from such tensors and seq, the function. `learned`: their gradients are part of the backward."""

    tables: Callable[[int, int, torch.Generator], tuple[Tensor, ...]]
    make: Callable[[Tables, int], ScoreMod]
    learned: bool = False


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


def window_left(seq: int) -> int:
    """Keys before the query: 1,024 keys in all of 8,192 tokens."""
    return seq // 8 - 1


def _documents(seq: int) -> Mask:
    lengths = packed_lengths(seq)
    return _separate(lengths, sum(n * (n + 1) // 2 for n in lengths), causal=True)


def _window(seq: int) -> Mask:
    left = window_left(seq)
    return Mask(
        sum(min(row, left) + 1 for row in range(seq)),
        lambda device: lambda q_index, k_index: (k_index <= q_index) & (q_index - k_index <= left),
        lambda device: patterns.sliding_window(seq, left=left, right=0, device=device),
    )


def _prefix_lm(seq: int) -> Mask:
    prefix = seq // 4
    return Mask(
        sum(max(row + 1, prefix) for row in range(seq)),
        lambda device: lambda q_index, k_index: (k_index <= q_index) | (k_index < prefix),
        lambda device: patterns.prefix_lm(seq, prefix, device=device),
    )


def _dilated(seq: int) -> Mask:
    """One key in four: 512 before the query in 8,192 tokens."""
    left = seq // 16

    def visible(q_index: Tensor, k_index: Tensor) -> Tensor:
        back = q_index - k_index
        return (back >= 0) & (back <= left * _DILATION) & (back % _DILATION == 0)

    return Mask(
        sum(min(row // _DILATION, left) + 1 for row in range(seq)),
        lambda device: visible,
        lambda device: patterns.dilated(seq, left, 0, _DILATION, device=device),
    )


def _neighborhood(seq: int) -> Mask:
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

    return Mask(
        height * width * kernel**2,
        lambda device: visible,
        lambda device: patterns.neighborhood((height, width), kernel, device=device),
    )


def _tree(seq: int) -> Mask:
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
        starts = range(0, seq, group)
        ends = [
            end
            for start in starts
            for end in (start + group, *range(start + prompt + answer, start + group + 1, answer))
        ]
        end = torch.repeat_interleave(torch.tensor(ends, device=device), torch.tensor(lengths, device=device)).int()
        return lambda q_index, k_index: (k_index <= q_index) & (q_index < end[k_index])

    inner = prompt * (prompt + 1) // 2 + _ANSWERS * (answer * (answer + 1) // 2 + answer * prompt)
    pattern = functools.partial(patterns.tree, lengths, parents)
    return Mask(trees * inner, visible, lambda device: pattern(device=device), parts=(group,) * trees)


#: Name of a function -> from seq, the mask.
MASKS: dict[str, Callable[[int], Mask]] = {
    "documents": _documents, "window": _window, "prefix-lm": _prefix_lm, "dilated": _dilated,
    "neighborhood": _neighborhood, "tree": _tree,
}  # fmt: skip
#: Those in which no query sees a later key.
CAUSAL = ("documents", "window", "dilated", "tree")


def tables(name: str | None, heads: int, seq: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The tensors that the function of scores reads; none without one."""
    return SCORES[name].tables(heads, seq, generator) if name in SCORES else ()


def learns(name: str | None) -> bool:
    """Whether the backward has gradients of the tables."""
    return name in SCORES and SCORES[name].learned
