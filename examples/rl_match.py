"""Sampler and trainer agree in every bit: reinforcement learning without a second set of log-probabilities.

python examples/rl_match.py [--device cuda --dtype bfloat16] [--sequences 12] [--tokens 40]

A small GPT with random weights samples completions of prompts with a paged cache, as a server does: sequences join and
leave the batch, prompts come in chunks, and some steps verify several guessed tokens. A trainer then computes the
log-probabilities of the same tokens from whole sequences, packed in other company. In the batch-invariant mode both are
equal bit for bit. Without it they are not, and the program prints by how much.

Attention is flashtile's, with `flashtile.batch_invariant_mode()`. Norms, rotary embedding and the loss are invariant as
they are. A product with weights is PyTorch's, whose bits depend on the number of rows. `by_rows` gives each product the
same number.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashtile

VOCABULARY, WIDTH, HEADS, HEADS_KV, HEAD_DIM, LAYERS = 61, 128, 4, 2, 64, 2
PAGE, LONGEST = 16, 256

#: The attention function: from the number of the layer, q, k and v to out, all packed.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor, rows: int = 32) -> Tensor:
    """A function of each row of x `[n, columns]`, on so many rows at a time, the last ones filled up with zeros: all
    products inside have one shape, and the bits of a row do not depend on how many others there are."""
    padded = F.pad(x, (0, 0, 0, -len(x) % rows))
    return torch.cat([function(part) for part in padded.split(rows)])[: len(x)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Model(nn.Module):
    """Logits of packed tokens. It does not know what attends, so sampler and trainer share everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """`tokens`, `positions`: `[n]`. Returns `[n, vocabulary]`."""
        x = self.embedding(tokens)
        cos, sin = flashtile.rotary_tables(LONGEST, HEAD_DIM, device=x.device)
        for number, block in enumerate(self.blocks):
            projected = by_rows(block.qkv, flashtile.rms_norm(x, block.norms[0]))
            q, k, v = projected.unflatten(-1, (-1, HEAD_DIM)).split((HEADS, HEADS_KV, HEADS_KV), 1)
            q, k = (flashtile.apply_rotary(each[None], cos, sin, position_ids=positions[None])[0] for each in (q, k))
            x = x + by_rows(block.out, attend(number, q, k, v).flatten(1))
            x = x + by_rows(block.mlp, flashtile.rms_norm(x, block.norms[1]))
        return by_rows(self.head, x).float()


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    return -flashtile.cross_entropy(logits, tokens, reduction="none")


class Sequence:
    """A prompt and its completion. `scores`: the sampler's log-probability of each token behind the prompt."""

    def __init__(self, number: int, draw: random.Random) -> None:
        self.prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(5, 70))]
        self.tokens = list(self.prompt)
        self.scores: list[Tensor] = []
        self.cached = 0
        # Whatever the batch is, a sequence draws its tokens by its own random numbers.
        self.noise = torch.rand(LONGEST, VOCABULARY, generator=torch.Generator().manual_seed(number))

    def choose(self, logits: Tensor) -> int:
        noise = self.noise[len(self.tokens)].to(logits.device)
        return int((logits - (-noise.log()).log()).argmax())


class Sampler:
    """Steps over a paged cache, of chunks, single tokens and guesses, in random company."""

    def __init__(self, model: Model, sequences: list[Sequence], new: int, draw: random.Random, backend: str) -> None:
        self.model, self.sequences, self.new, self.draw, self.backend = model, sequences, new, draw, backend
        weight = model.head.weight
        pages = LONGEST // PAGE
        shape = LAYERS, len(sequences) * pages, PAGE, HEADS_KV, HEAD_DIM
        self.k, self.v = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.table = torch.randperm(len(sequences) * pages, device=weight.device).view(-1, pages).int()

    def run(self) -> None:
        while waiting := [each for each in self.sequences if len(each.scores) < self.new]:
            self._step(self.draw.sample(waiting, self.draw.randint(1, len(waiting))))

    def _step(self, chosen: list[Sequence]) -> None:
        rows = []
        for each in chosen:
            known = each.tokens[each.cached :]
            if len(known) > 1:  # some of the prompt, or all that is left of it
                rows.append(known[: self.draw.randint(1, len(known))])
            else:  # the newest token, and guesses of what follows
                guesses = [int(each.noise[len(each.tokens) + i].argmax()) for i in range(self.draw.randint(0, 3))]
                rows.append(known + guesses)
        logits = self._logits(chosen, rows)
        for each, tokens, own in zip(chosen, rows, logits.split([len(row) for row in rows])):
            for place, _ in enumerate(tokens):
                each.cached += 1
                if each.cached < len(each.tokens):
                    continue
                token = each.choose(own[place])
                each.scores.append(
                    log_probabilities(own[place : place + 1], own.new_tensor([token], dtype=torch.int64))
                )
                each.tokens.append(token)
                if len(each.scores) == self.new or tokens[place + 1 : place + 2] != [token]:
                    break  # what was guessed is wrong, and its rows of the cache are written over

    def _logits(self, chosen: list[Sequence], rows: list[list[int]]) -> Tensor:
        device = self.k.device
        starts = torch.tensor([0, *map(len, rows)], device=device).cumsum(0).int()
        lengths = torch.tensor([each.cached for each in chosen], device=device).int()
        table = self.table[[self.sequences.index(each) for each in chosen]]
        positions = torch.cat([torch.arange(each.cached, each.cached + len(row)) for each, row in zip(chosen, rows)])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flashtile.attention_with_kv_cache(
                q, self.k[layer], self.v[layer], k, v, cache_lengths=lengths, block_table=table, cu_seqlens_q=starts,
                backend=self.backend,
            )  # fmt: skip

        tokens = torch.tensor([token for row in rows for token in row], device=device)
        return self.model(tokens, positions.to(device), attend)


def trained_scores(model: Model, sequences: list[Sequence], backend: str) -> list[Tensor]:
    """The trainer's log-probabilities of all completions, from one packed batch that wants gradients."""
    device = model.head.weight.device
    lengths = [len(each.tokens) - 1 for each in sequences]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    tokens = torch.tensor([token for each in sequences for token in each.tokens[:-1]], device=device)
    targets = torch.tensor([token for each in sequences for token in each.tokens[1:]], device=device)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention_varlen(q, k, v, starts, causal=True, backend=backend)

    scores = log_probabilities(model(tokens, positions, attend), targets)
    scores.sum().backward()
    return [own[len(each.prompt) - 1 :] for each, own in zip(sequences, scores.detach().split(lengths))]


def differences(arguments: argparse.Namespace, invariant: bool) -> Tensor:
    """Of the sampler's log-probabilities and the trainer's, of all tokens."""
    torch.manual_seed(0)
    draw = random.Random(0)
    model = Model().to(arguments.device, getattr(torch, arguments.dtype))
    sequences = [Sequence(number, draw) for number in range(arguments.sequences)]
    with flashtile.batch_invariant_mode() if invariant else nullcontext():
        with torch.no_grad():
            Sampler(model, sequences, arguments.tokens, draw, arguments.backend).run()
        draw.shuffle(sequences)
        trained = trained_scores(model, sequences, arguments.backend)
    return torch.cat([torch.cat(each.scores) - own for each, own in zip(sequences, trained)]).abs()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--sequences", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=40, help="of each completion")
    arguments = parser.parse_args(words)
    for invariant in (True, False):
        found = differences(arguments, invariant)
        print(f"{'in' if invariant else 'without'} the batch-invariant mode, {len(found)} tokens, largest difference:")
        print(f"  {float(found.max())}")
        bins = Counter("0" if not each else f"1e{int(torch.tensor(each).log10().floor())}" for each in found.tolist())
        for name, count in sorted(bins.items()):
            print(f"  {name:>6} {count:6} {'#' * max(1, 50 * count // len(found))}")


if __name__ == "__main__":
    main()
