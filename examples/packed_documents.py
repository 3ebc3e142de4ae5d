"""Documents of different lengths in one packed call, compared with the same documents padded to the longest one.

python examples/packed_documents.py
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same

LENGTHS = [37, 512, 5, 130, 260, 64]
HEADS, HEAD_DIM = 4, 64


def timed(function: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result of a function, and the shortest of five times that it took."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def main() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    q, k, v = (torch.randn(sum(LENGTHS), HEADS, HEAD_DIM) for _ in range(3))
    documents = [t.split(LENGTHS) for t in (q, k, v)]
    padded = [torch.nn.utils.rnn.pad_sequence(parts, batch_first=True) for parts in documents]

    packed_out, packed_seconds = timed(lambda: flashtile.attention_varlen(q, k, v, cu_seqlens, causal=True))
    padded_out, padded_seconds = timed(lambda: flashtile.attention(*padded, causal=True, key_lengths=lengths))

    for document, length in enumerate(LENGTHS):
        rows = slice(int(cu_seqlens[document]), int(cu_seqlens[document + 1]))
        assert_same(packed_out[rows], padded_out[document, :length])
    print(f"packed: {sum(LENGTHS)} rows, {1000 * packed_seconds:.1f} ms")
    print(f"padded: {len(LENGTHS) * max(LENGTHS)} rows, {1000 * padded_seconds:.1f} ms; the results agree")


if __name__ == "__main__":
    main()
