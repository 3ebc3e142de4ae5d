"""Decoding with a paged cache: sequences of different lengths share one pool of keys and values.

python examples/decode.py

One attention layer with random weights stands for a model. A sequence takes a page when it needs one, and returns all
its pages at the end. The pool may therefore be smaller than the longest sequence times the batch. On a GPU the step is
a CUDA graph: lengths and tables are written in place, and each replay reads their current values. Each output is
compared with attention over the whole sequence.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same

HEADS, HEADS_KV, HEAD_DIM = 8, 2, 64
BATCH, PAGE, PAGES, LONGEST = 3, 16, 12, 96
STEPS = 60


class Decoder:
    """The tensors of a step, at fixed addresses, and the pages of each sequence."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.q = torch.zeros(BATCH, 1, HEADS, HEAD_DIM, device=device, dtype=dtype)
        self.k, self.v = (torch.zeros(BATCH, 1, HEADS_KV, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
        self.k_pages, self.v_pages = (
            torch.zeros(PAGES, PAGE, HEADS_KV, HEAD_DIM, device=device, dtype=dtype) for _ in range(2)
        )
        self.table = torch.zeros(BATCH, LONGEST // PAGE, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(BATCH, dtype=torch.int32, device=device)
        self.tables = flashtile.rotary_tables(LONGEST, HEAD_DIM, device=device)
        self.free = list(range(PAGES))
        self.taken: list[list[int]] = [[] for _ in range(BATCH)]

    def grow(self, sequence: int, rows: int) -> None:
        """Makes room for the next row of a sequence that has `rows` rows."""
        if rows % PAGE == 0:
            page = self.free.pop()
            self.table[sequence, len(self.taken[sequence])] = page
            self.taken[sequence].append(page)

    def leave(self, sequence: int) -> None:
        """Ends a sequence and returns its pages; another one starts in its place."""
        self.free += self.taken[sequence]
        self.taken[sequence] = []
        self.lengths[sequence] = 0

    @torch.no_grad()
    def step(self) -> Tensor:
        """One token for every sequence: `[BATCH, 1, HEADS, HEAD_DIM]`."""
        cos, sin = self.tables
        out = flashtile.attention_with_kv_cache(
            self.q, self.k_pages, self.v_pages, self.k, self.v, cache_lengths=self.lengths, block_table=self.table,
            rotary_cos=cos, rotary_sin=sin,
        )  # fmt: skip
        self.lengths.add_(1)
        return out


def as_graph(decoder: Decoder) -> Callable[[], Tensor]:
    """The step as a CUDA graph."""
    decoder.step()  # compiles
    decoder.lengths.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoder.step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def expected(decoder: Decoder, sequence: int, history: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the newest query of a sequence to all its keys."""
    keys, values = (torch.stack(rows, dim=1) for rows in zip(*history, strict=True))  # [1, length, HEADS_KV, HEAD_DIM]
    q = flashtile.apply_rotary(decoder.q[sequence, None], *decoder.tables, seqlen_offsets=len(history) - 1)
    return flashtile.attention(q, flashtile.apply_rotary(keys, *decoder.tables), values)


def main() -> None:
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    decoder = Decoder("cuda", torch.bfloat16) if gpu else Decoder("cpu", torch.float32)
    step = as_graph(decoder) if gpu else decoder.step
    histories: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(BATCH)]
    last_rows = [5, 40, 17]  # the lengths at which the sequences end
    done, most_pages = 0, 0
    for _ in range(STEPS):
        for tensor in (decoder.q, decoder.k, decoder.v):
            tensor.normal_()
        for sequence, history in enumerate(histories):
            decoder.grow(sequence, len(history))
            history.append((decoder.k[sequence].clone(), decoder.v[sequence].clone()))
        most_pages = max(most_pages, PAGES - len(decoder.free))
        out = step()
        for sequence, history in enumerate(histories):
            alone = expected(decoder, sequence, history)
            assert_same(out[sequence, None], alone)
            if len(history) == last_rows[sequence]:
                decoder.leave(sequence)
                history.clear()
                last_rows[sequence], done = last_rows[sequence] % 40 + 10, done + 1
    print(f"{done} sequences done; at most {most_pages} of {PAGES} pages in use at a time")


if __name__ == "__main__":
    main()
