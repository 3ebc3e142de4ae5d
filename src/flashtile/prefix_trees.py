"""Sequences that share prefixes, packed into one row in which each prefix is computed once.

Shape letters: T packed tokens, V vocabulary, W width of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import flashtile
from flashtile import BlockMask, patterns

__all__ = ["PrefixTree"]

#: Tokens of one sequence: int64 or int32 `[length]`, or a list of ints.
Tokens = Tensor | Sequence[int]
_IGNORED = -100


class PrefixTree:
    """Token sequences that share prefixes, as the inputs of one model call; each shared prefix is there once.

    ::

        tree = PrefixTree.from_completions([(prompt, [first, second, third])])
        hidden = model.hidden(tree.tokens[None], position_ids=tree.positions[None], block_mask=tree.block_mask())
        log_probs = tree.linear_log_probs(hidden, model.output_weight)    # one for each packed token
        of_sequences = tree.unpack(log_probs)                             # one tensor for each sequence

    A loss of `of_sequences` and its gradients are those of the sequences computed one by one, because a token depends
    on the tokens before it in its own sequence alone. Create a tree with `from_completions`, `from_sequences`, or from
    its segments. It is immutable. Its layout is made on the host: give it tokens that are there, so that only
    `block_mask` waits for a GPU, once.

    Args:
        segments: tokens of each segment of the tree, which follow one another in the packed row. A segment may be
            empty.
        parents: for each segment the number of the segment that it continues, or -1 if it begins sequences. A segment
            stands after its parent.
        ends: for each sequence the number of its last segment; None = every segment without children ends a sequence.
        device: device of the tensors.

    Attributes:
        tokens: int64 `[T]`.
        positions: int64 `[T]`, position of each token in its sequences, from 0.
        segments: int64 `[T]`, number of the segment of each token.
        lengths: number of tokens of each sequence.
        device: device of the tensors.

    Raises:
        TypeError: an argument has another type.
        ValueError: tokens have another shape or dtype, or a number names no segment.
    """

    def __init__(
        self,
        segments: Sequence[Tokens],
        parents: Sequence[int],
        *,
        ends: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        parts = [_tokens(f"segments[{index}]", segment) for index, segment in enumerate(segments)]
        self._sizes, self._parents = [part.shape[0] for part in parts], list(parents)
        positions = patterns.tree_positions(self._sizes, self._parents, device="cpu")  # checks the parents
        ends = _leaves(parents) if ends is None else _checked_ends(ends, len(parts))
        self.device = torch.get_default_device() if device is None else torch.device(device)
        tokens = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")
        numbers = torch.arange(len(parts), device="cpu")
        self.tokens, self.positions = tokens.to(self.device), positions.to(self.device)
        self.segments = numbers.repeat_interleave(torch.tensor(self._sizes, dtype=torch.int64, device="cpu")).to(
            self.device
        )
        self._predict(tokens)
        self._collect(ends)
        self._masks: dict[int | None, BlockMask] = {}

    @classmethod
    def from_completions(
        cls, groups: Sequence[tuple[Tokens, Sequence[Tokens]]], *, device: torch.device | str | None = None
    ) -> PrefixTree:
        """A tree from prompts with several completions each. Sequences are in the order of the completions.

        Args:
            groups: pairs of a prompt and its completions.
            device: device of the tensors.
        """
        segments: list[Tokens] = []
        parents: list[int] = []
        ends: list[int] = []
        for prompt, completions in groups:
            root = len(segments)
            segments += [prompt, *completions]
            parents += [-1, *itertools.repeat(root, len(completions))]
            ends += range(root + 1, len(segments))
        return cls(segments, parents, ends=ends, device=device)

    @classmethod
    def from_sequences(cls, sequences: Sequence[Tokens], *, device: torch.device | str | None = None) -> PrefixTree:
        """A tree from whole sequences, which share all tokens that they have in common at their beginning.

        Args:
            sequences: tokens of each sequence. Equal sequences share all their tokens.
            device: device of the tensors.
        """
        parts = [_tokens(f"sequences[{index}]", sequence) for index, sequence in enumerate(sequences)]
        segments, parents, ends = _shared(parts)
        return cls(segments, parents, ends=ends, device=device)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"PrefixTree({len(self)} sequences, {sum(self.lengths)} tokens, packed {self.tokens.shape[0]})"

    def block_mask(self, left: int | None = None) -> BlockMask:
        """What each token sees: the tokens before it in its own sequences, and itself. It is made once.

        Args:
            left: number of tokens before it that a token sees, in its sequence; None = all.

        Returns:
            A mask of shape `(1, 1, T, T)`.

        Raises:
            TypeError: left is no int.
            ValueError: left is negative.
        """
        if left is not None and (isinstance(left, bool) or not isinstance(left, int)):
            raise TypeError(f"left: expected an int or None, got {left!r}; it is a number of tokens")
        if left is not None and left < 0:
            raise ValueError(f"left: expected at least 0, got {left}; with 0 a token sees itself alone")
        if left not in self._masks:
            mask = patterns.tree(self._sizes, self._parents, device=self.device)
            if left is not None:
                positions, seq = self.positions, self.tokens.shape[0]
                near = BlockMask.from_predicate(
                    lambda batch, head, q, k: positions[q] - positions[k] <= left,
                    None, None, seq, seq, device=self.device,
                )  # fmt: skip
                mask = mask & near
            self._masks[left] = mask
        return self._masks[left]

    def log_probs(self, logits: Tensor, *, logit_scale: float = 1.0, softcap: float | None = None) -> Tensor:
        """Log-probability of each packed token, given the tokens before it in its sequences.

        Args:
            logits: `[T, V]` or `[1, T, V]`, of the next token.
            logit_scale: factor on the logits, such as 1 / temperature.
            softcap: as in `flashtile.cross_entropy`.

        Returns:
            float32 `[T]` (float64 for float64); 0 for the first token of a sequence, which nothing predicts.

        Raises:
            ValueError: logits have another shape.
        """
        logits = self._rows("logits", logits)
        return self._log_probs(
            logits, lambda rows, labels: flashtile.cross_entropy(
                rows, labels, reduction="none", logit_scale=logit_scale, softcap=softcap, ignore_index=_IGNORED
            )
        )  # fmt: skip

    def linear_log_probs(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        logit_scale: float = 1.0,
        softcap: float | None = None,
    ) -> Tensor:
        """`log_probs` of `hidden @ weight.T + bias`, whose logits are never in memory as a whole.

        Args:
            hidden: `[T, W]` or `[1, T, W]`, the inputs of the last linear layer.
            weight: `[V, W]`, its weight.
            bias: `[V]`, its bias.
            logit_scale, softcap: as in `log_probs`.
        """
        hidden = self._rows("hidden", hidden)
        return self._log_probs(
            hidden, lambda rows, labels: flashtile.linear_cross_entropy(
                rows, weight, labels, bias, reduction="none", logit_scale=logit_scale, softcap=softcap,
                ignore_index=_IGNORED,
            )
        )  # fmt: skip

    def unpack(self, values: Tensor) -> list[Tensor]:
        """Values of packed tokens as those of whole sequences. Sequences share values; their gradients add up.

        Args:
            values: `[T, ...]`.

        Returns:
            For each sequence `[length, ...]`.

        Raises:
            ValueError: values have another shape.
        """
        if values.dim() < 1 or values.shape[0] != self.tokens.shape[0]:
            raise ValueError(f"values: expected [{self.tokens.shape[0]}, ...], got shape {tuple(values.shape)}")
        return list(values.index_select(0, self._index).split(self.lengths))

    def _rows(self, name: str, given: Tensor) -> Tensor:
        tokens = self.tokens.shape[0]
        rows = given[0] if given.dim() == 3 and given.shape[0] == 1 else given
        if rows.dim() != 2 or rows.shape[0] != tokens:
            raise ValueError(
                f"{name}: expected [{tokens}, columns] or [1, {tokens}, columns], got shape {tuple(given.shape)}; the "
                "tree is one row of a batch"
            )
        return rows

    def _log_probs(self, rows: Tensor, losses: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        of_rows = losses(rows, self._labels)  # [T]
        of_branches = losses(rows.index_select(0, self._branch_rows), self._branch_labels)
        return -torch.cat((of_rows, of_branches, of_rows.new_zeros(1))).index_select(0, self._loss_of_token)

    def _predict(self, tokens: Tensor) -> None:
        """Which row predicts each token. A row with several children has a label, and further ones as branches."""
        total = tokens.shape[0]
        labels = torch.full_like(tokens, _IGNORED)
        labels[:-1] = tokens[1:]
        loss_of_token = torch.arange(-1, total - 1, device="cpu")
        last_rows: list[int] = []  # of each segment; that of its parent where it is empty
        branch_rows: list[int] = []
        branch_tokens: list[int] = []  # where those tokens lie
        start, roots = 0, []
        for size, parent in zip(self._sizes, self._parents):
            before = -1 if parent < 0 else last_rows[parent]
            last_rows.append(start + size - 1 if size else before)
            if size and start and before != start - 1:  # the row before belongs to another path
                labels[start - 1] = _IGNORED
            if size and before < 0:
                roots.append(start)
            elif size and before != start - 1:
                branch_rows.append(before)
                branch_tokens.append(start)
            start += size
        branches = torch.tensor(branch_tokens, dtype=torch.int64, device="cpu")
        loss_of_token[branches] = total + torch.arange(len(branch_tokens), device="cpu")
        loss_of_token[torch.tensor(roots, dtype=torch.int64, device="cpu")] = total + len(branch_tokens)
        self._labels, self._loss_of_token = labels.to(self.device), loss_of_token.to(self.device)
        self._branch_labels = tokens[branches].to(self.device)
        self._branch_rows = torch.tensor(branch_rows, dtype=torch.int64, device=self.device)

    def _collect(self, ends: Sequence[int]) -> None:
        """The packed rows of all sequences, one after another."""
        starts = [0, *itertools.accumulate(self._sizes)]
        self.lengths: list[int] = []
        ranges = []
        for end in ends:
            path = []
            while end >= 0:
                path.append(end)
                end = self._parents[end]
            self.lengths.append(sum(self._sizes[segment] for segment in path))
            ranges += [torch.arange(starts[segment], starts[segment + 1], device="cpu") for segment in reversed(path)]
        index = torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device="cpu")
        self._index = index.to(self.device)


def _tokens(name: str, given: Tokens) -> Tensor:
    """int64 `[length]` on the CPU."""
    if not isinstance(given, Tensor):
        if not isinstance(given, (list, tuple)) or any(isinstance(t, bool) or not isinstance(t, int) for t in given):
            raise TypeError(f"{name}: expected a tensor or a list of ints, got {type(given).__name__}; pass token ids")
        given = torch.tensor(given, dtype=torch.int64, device="cpu")
    if given.dim() != 1 or given.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name}: expected int64 [length], got {given.dtype} {tuple(given.shape)}; pass token ids")
    return given.detach().to("cpu", torch.int64)


def _leaves(parents: Sequence[int]) -> list[int]:
    return sorted(set(range(len(parents))) - set(parents))


def _checked_ends(ends: Sequence[int], segments: int) -> Sequence[int]:
    for end in ends:
        if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < segments:
            raise ValueError(f"ends: expected numbers from 0 to {segments - 1}, one for each sequence, got {end!r}")
    return ends


def _common_prefix(first: Tensor, second: Tensor) -> int:
    length = min(first.shape[0], second.shape[0])
    different = (first[:length] != second[:length]).nonzero()
    return int(different[0]) if different.numel() else length


def _shared(parts: list[Tensor]) -> tuple[list[Tensor], list[int], list[int]]:
    """Segments, parents and ends of the smallest tree of some sequences."""
    lists = [part.tolist() for part in parts]
    order = sorted(range(len(parts)), key=lists.__getitem__)
    ordered = [parts[index] for index in order]
    common = [0, *map(_common_prefix, ordered, ordered[1:])]  # of each sequence and the one before it
    segments: list[Tensor] = []
    parents: list[int] = []
    ends = [-1] * len(parts)
    stack = [(0, len(parts), 0, -1)] if parts else []  # sequences from, to; tokens above; segment above
    while stack:
        first, stop, above, segment = stack.pop()
        shared = min(common[first + 1 : stop], default=ordered[first].shape[0])
        if shared > above or not ordered[first].shape[0]:
            segments.append(ordered[first][above:shared])
            parents.append(segment)
            segment = len(segments) - 1
        while first < stop and ordered[first].shape[0] == shared:
            ends[order[first]] = segment
            first += 1
        cuts = [first, *(index for index in range(first + 1, stop) if common[index] == shared), stop]
        stack += [(start, end, shared, segment) for start, end in itertools.pairwise(cuts) if start < end][::-1]
    return segments, parents, ends
