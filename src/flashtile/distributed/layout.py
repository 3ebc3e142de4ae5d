"""How a sequence is cut over ranks: pure data, without processes.

`contiguous` gives each rank one run of tokens. `zigzag` cuts the sequence into two chunks for each rank and gives rank
`r` of `N` the chunks `r` and `2N - 1 - r`, so that under a causal mask every rank has the same number of visible pairs,
at every step of a ring. Three ranks::

    contiguous   0 0 1 1 2 2        zigzag   0 1 2 2 1 0

In two dimensions the ring's ranks cut the sequence so, and the ranks of a row (those that exchange heads) cut the
ring's share into equal runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

LayoutKind = Literal["zigzag", "contiguous"]
LAYOUTS = ("zigzag", "contiguous")


class Chunk(NamedTuple):
    """Tokens `start` to `stop` of the whole sequence, which begin at `local` in the shard."""

    start: int
    stop: int
    local: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """A sequence cut over ranks. `length`: tokens of the whole sequence. `ring`: ranks that cut it by `kind`. `kind`:
    "zigzag" or "contiguous". `inner`: ranks among which each share is cut again, in equal runs."""

    length: int
    ring: int
    kind: LayoutKind = "zigzag"
    inner: int = 1

    def __post_init__(self) -> None:
        if self.kind not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {self.kind!r}")
        if self.length % self.divisor:
            raise ValueError(
                f"sequence: expected a length that {self.divisor} divides ({self.kind} over {self.ranks} ranks), got "
                f"{self.length}; pad it, and hide the padding with key_lengths"
            )

    @property
    def ranks(self) -> int:
        return self.ring * self.inner

    @property
    def divisor(self) -> int:
        """The number that divides the length."""
        return self.ring * (2 if self.kind == "zigzag" and self.ring > 1 else 1) * self.inner

    @property
    def share(self) -> int:
        """Tokens of one rank."""
        return self.length // self.ranks

    def ring_chunks(self, place: int) -> tuple[Chunk, ...]:
        """The chunks of the place `place` in the ring, before its ranks cut them again."""
        if self.ring == 1:
            return (Chunk(0, self.length, 0),)
        if self.kind == "contiguous":
            size = self.length // self.ring
            return (Chunk(place * size, (place + 1) * size, 0),)
        size = self.length // (2 * self.ring)
        late = 2 * self.ring - 1 - place
        first, last = Chunk(place * size, (place + 1) * size, 0), Chunk(late * size, (late + 1) * size, size)
        # The two chunks in the middle are neighbours: one run.
        return (Chunk(first.start, last.stop, 0),) if first.stop == last.start else (first, last)

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """The chunks of a rank. Ranks of one place in the ring have neighbouring numbers."""
        place, part = divmod(rank, self.inner)
        begin, end = part * self.share, (part + 1) * self.share
        found: list[Chunk] = []
        for chunk in self.ring_chunks(place):
            low, high = max(begin, chunk.local), min(end, chunk.local + chunk.length)
            if low < high or (not self.share and not found):
                found.append(Chunk(chunk.start + low - chunk.local, chunk.start + high - chunk.local, low - begin))
        return tuple(found)
