"""Batches of real text for BERT: sequences of whole paragraphs, padded to the longest possible one.

A sequence begins with the token that stands for it and holds paragraphs of one document, as many as fit; so its length
is what the text makes it. Words and signs are tokens, with numbers from a hash: the work of a step depends on lengths
alone.
"""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.evidence.text import Text

IGNORED = -100
_CLASS, _MASK, _FIRST_WORD = 1, 2, 5
#: Share of the tokens that the model has to guess (Devlin et al. 2019, section 3.1).
_GUESSED = 0.15
#: More of a text is not read.
_MOST_BYTES = 8 * 2**20
_WORD = re.compile(r"\w+|[^\w\s]")
_PARAGRAPH = re.compile(r"\n\s*\n")


class Batch(NamedTuple):
    """One step's sequences.

    Attributes:
        tokens: int64 `[B, S]`, some of them masked; 0 where nothing is.
        labels: int64 `[B, S]`, the tokens to guess; `IGNORED` elsewhere.
        mask: bool `[B, S]`, True = a token.
        total: number of tokens, which who makes a batch knows.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    total: int

    def shortest_and_longest(self) -> Batch:
        """These two sequences alone, cut to the length of the latter."""
        lengths = self.mask.sum(1)
        rows = torch.stack((lengths.argmin(), lengths.argmax()))
        return _batch(*(tensor[rows, : int(lengths.max())] for tensor in self[:3]))

    def parts(self, size: int) -> list[Batch]:
        """Batches of so many of the sequences, one after another."""
        if size >= len(self.tokens):
            return [self]
        return [_batch(*tensors) for tensors in zip(*(tensor.split(size) for tensor in self[:3]), strict=True)]

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self[:3]), self.total)


def sequences(text: Text, longest: int, vocabulary: int) -> list[list[int]]:
    """Tokens of every sequence of a text, each at most so long."""
    found: list[list[int]] = []
    for document in _documents(text):
        current: list[int] = []
        for paragraph in _PARAGRAPH.split(document):
            words = [
                _FIRST_WORD + zlib.crc32(word.encode()) % (vocabulary - _FIRST_WORD)
                for word in _WORD.findall(paragraph)
            ]
            if current and len(current) + len(words) >= longest:
                found.append([_CLASS, *current])
                current = []
            current += words
            while len(current) >= longest:  # a paragraph that is longer than a sequence
                found.append([_CLASS, *current[: longest - 1]])
                current = current[longest - 1 :]
        if current:
            found.append([_CLASS, *current])
    return found


def make_batch(text: Text, size: int, longest: int, vocabulary: int, seed: int = 0) -> Batch:
    """A batch of sequences that a seed draws from the text.

    Raises:
        ValueError: the text has fewer sequences than that.
    """
    known = sequences(text, longest, vocabulary)
    if len(known) < size:
        raise ValueError(
            f"data: expected text for {size} sequences, got {len(known)}; take more text or a smaller batch"
        )
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(size, longest, dtype=torch.int64)
    mask = torch.zeros(size, longest, dtype=torch.bool)
    for row, place in enumerate(torch.randperm(len(known), generator=generator)[:size].tolist()):
        tokens[row, : len(known[place])] = torch.tensor(known[place])
        mask[row, : len(known[place])] = True
    guessed = (torch.rand(size, longest, generator=generator) < _GUESSED) & mask
    guessed[:, 0] = False
    guessed[:, 1] = mask[:, 1]  # so that every sequence has one
    labels = tokens.masked_fill(~guessed, IGNORED)
    return _batch(tokens.masked_fill(guessed, _MASK), labels, mask)


def _batch(tokens: Tensor, labels: Tensor, mask: Tensor) -> Batch:
    return Batch(tokens, labels, mask, int(mask.sum()))


def _documents(text: Text) -> list[str]:
    found, last = [], min(len(text.tokens), _MOST_BYTES)
    for start, end in zip(text.documents, text.documents[1:]):
        if start < last:
            found.append(bytes(text.tokens[start : min(end, last)].tolist()).decode(errors="replace"))
    return found
