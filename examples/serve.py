"""A small server: continuous batching over a paged cache, with chunks of prompts, shared prefixes and speculation.

python examples/serve.py [--model gpt | llama] [--cache float8_e4m3fn | float8_e5m2 | int8] [--no-draft] [--no-graphs]

Requests of different lengths share each step of the model. A step has a chunk of a prompt for some requests, and the
newest tokens for others: one token, or with a draft model the tokens that it proposed. All of them are one packed row,
and one call of `flashtile.attention_with_kv_cache` for each layer. Requests that begin with the same tokens share the
pages of these. A step without chunks is a CUDA graph, captured once for each size. At the end every request is
generated again, alone, and must give the same tokens.

The models are small and have random weights: flashtile's GPT, or transformers' Llama. The draft model is the first
layer of the target, whose other layers change little.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import flashtile
from flashtile.models import GPT, GPTConfig
from flashtile.modules import MHA

VOCABULARY = 97
PAGE = 8
CONTEXT = 512


class Step(NamedTuple):
    """A step's packed row, and what attention has to know of it; int32, on the device, in one buffer.

    Attributes:
        tokens: `[total]`. Rows after the last request's tokens only fill up the step.
        positions: `[total]`, of each token in its request.
        starts: `[requests + 1]`, where the tokens of each request begin.
        lengths: `[requests]`, tokens of each that are in the cache already.
        table: `[requests, pages]`.
        longest: tokens of a request in the step at most.
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    lengths: Tensor
    table: Tensor
    longest: int

    @classmethod
    def of(cls, buffer: Tensor, requests: int, total: int, pages: int, longest: int) -> Step:
        """Views of a buffer that holds everything one after another."""
        sizes = sizes_of(requests, total, pages)
        parts = (part[:size] for part, size in zip(buffer.split([*map(aligned, sizes)]), sizes))
        tokens, positions, starts, lengths, table = parts
        return cls(tokens, positions, starts, lengths, table.view(requests, pages), longest)


def sizes_of(requests: int, total: int, pages: int) -> tuple[int, ...]:
    """Numbers of each tensor of a step."""
    return total, total, requests + 1, requests, requests * pages


def aligned(size: int) -> int:
    """The place of so many numbers in a buffer: 16 bytes or several times as many, so that no kernel is compiled for
    other addresses."""
    return -(-size // 4) * 4


class Cache:
    """Pages of all layers of one model."""

    def __init__(self, size: Size) -> None:
        shape = (size.layers, size.pages, PAGE, size.heads // 2, size.width // size.heads)
        self.k, self.v = (torch.zeros(shape, dtype=size.cache_dtype, device=size.device) for _ in range(2))
        # A factor for each row and head of a cache of 8 bits, written with the row.
        eight_bits = size.cache_dtype.itemsize == 1
        self.factors = [torch.ones(shape[:-1], device=size.device) for _ in range(2)] if eight_bits else None
        self.step: Step | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Appends the new rows `[total, heads_kv, head_dim]`, and attends. Returns `[total, heads, head_dim]`."""
        assert self.step is not None
        if self.factors is not None:
            options |= {"descale_k": self.factors[0][layer], "descale_v": self.factors[1][layer]}
        return flashtile.attention_with_kv_cache(
            q, self.k[layer], self.v[layer], k, v, cache_lengths=self.step.lengths, block_table=self.step.table,
            cu_seqlens_q=self.step.starts, max_seqlen_q=self.step.longest, **options,
        )  # fmt: skip


class CachedAttention(nn.Module):
    """In the place of a GPT's inner attention: rotates, appends and attends. All rows are one, `[1, total]`."""

    def __init__(self, cache: Cache, layer: int, tables: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.cache, self.layer, self.tables = cache, layer, tables

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        cos, sin = self.tables
        return self.cache.attend(self.layer, q[0], k[0], v[0], rotary_cos=cos, rotary_sin=sin)[None]


class Runner:
    """A model, its cache, and its logits `[1, total, vocabulary]` for tokens and positions `[1, total]`."""

    def __init__(self, model: nn.Module, logits: Callable[[Tensor, Tensor], Tensor], cache: Cache) -> None:
        self.model, self.logits, self.cache = model, logits, cache
        self.graphs: dict[tuple[int, int], DecodeGraph] = {}
        with torch.no_grad():
            for name, weight in model.named_parameters():
                first = ".0." in name
                if not first and name.endswith(("out_proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight")):
                    weight *= 0.1

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """The most probable next token after each of the packed tokens: `[total]`."""
        self.cache.step = step
        return self.logits(step.tokens[None], step.positions[None])[0].argmax(dim=-1)

    def decode(self, requests: int, tokens: int) -> DecodeGraph:
        """The graph of a step with so many tokens for each of at least so many requests, captured at its first use."""
        size = 1 << (requests - 1).bit_length(), tokens
        if size not in self.graphs:
            self.graphs[size] = DecodeGraph(self, *size)
        return self.graphs[size]


class DecodeGraph:
    """A step of the model that brings the same number of tokens for each request, as a CUDA graph.

    The graph reads its buffer, which stays where it is, and serves any requests. On a CPU the calls are made anew.
    """

    def __init__(self, runner: Runner, requests: int, tokens: int) -> None:
        self.requests, self.runner = requests, runner
        device, total, pages = runner.cache.k.device, requests * tokens, CONTEXT // PAGE
        # Without a token of any request at first, so that a warm-up writes nothing to the cache.
        length = sum(map(aligned, sizes_of(requests, total, pages)))
        self.buffer = torch.zeros(length, dtype=torch.int32, device=device)
        self.step = Step.of(self.buffer, requests, total, pages, tokens)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                runner.run(self.step)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.following = runner.run(self.step)

    def run(self, numbers: list[int]) -> Tensor:
        """The next tokens, as of `Runner.run`. `numbers`: what the buffer shall hold."""
        self.buffer.copy_(torch.tensor(numbers, dtype=torch.int32))
        if self.graph is None:
            return self.runner.run(self.step)
        self.graph.replay()
        return self.following


class Size(NamedTuple):
    """Of a model and its cache."""

    layers: int
    width: int
    heads: int
    pages: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: str


def gpt(size: Size, seed: int) -> Runner:
    torch.manual_seed(seed)
    config = GPTConfig(
        context=CONTEXT, layers=size.layers, heads=size.heads, heads_kv=size.heads // 2, width=size.width,
        vocabulary=VOCABULARY, positions="rotary", norm="rms", initial_std=0.2,
    )  # fmt: skip
    model = GPT(config, device=size.device, dtype=size.dtype).eval()
    cache = Cache(size)
    tables = flashtile.rotary_tables(CONTEXT, config.head_dim, device=size.device)
    mixers = [module for module in model.modules() if isinstance(module, MHA)]
    for layer, mixer in enumerate(mixers):
        mixer.rotary_emb = None  # the call rotates by the rows of the cache
        mixer.inner_attn = CachedAttention(cache, layer, tables)
    return Runner(model, lambda tokens, _: model(tokens), cache)


def llama(size: Size, seed: int) -> Runner:
    """The same through transformers, which rotates by the positions that it is given."""
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=size.width, intermediate_size=2 * size.width,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads // 2,
        max_position_embeddings=CONTEXT, initializer_range=0.2,
    )  # fmt: skip
    cache = Cache(size)

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        packed = (rows[0].transpose(0, 1) for rows in (q, k, v))  # from [1, heads, total, head_dim]
        return cache.attend(module.layer_idx, *packed, scale=scaling)[None], None

    name = f"paged-server-{id(cache)}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    model = LlamaForCausalLM._from_config(config, attn_implementation=name).to(size.device, size.dtype).eval()
    return Runner(model, lambda ids, positions: model(ids, position_ids=positions, use_cache=False).logits, cache)


@dataclass
class Request:
    """A prompt, what was generated, and how much of both is in the cache."""

    tokens: list[int]
    new_tokens: int
    prompt: int = field(init=False)
    cached: int = 0
    pages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def done(self) -> bool:
        return len(self.tokens) - self.prompt >= self.new_tokens


class Pages:
    """Which pages are free, how many requests use each, and which hold known beginnings."""

    def __init__(self, pages: int) -> None:
        self.free = deque(range(pages))
        self.users = [0] * pages
        self.known: dict[tuple[int, ...], int] = {}
        self.shared = 0

    def share(self, request: Request) -> None:
        """Gives a request the pages of its beginning that another one has filled. The last token must be computed."""
        for end in range(PAGE, len(request.tokens), PAGE):
            page = self.known.get(tuple(request.tokens[:end]))
            if page is None:
                return
            self.users[page] += 1
            request.pages.append(page)
            request.cached = end
            self.shared += 1

    def grow(self, request: Request, rows: int) -> bool:
        """Makes room for so many rows; False if there are too few pages."""
        missing = -(-rows // PAGE) - len(request.pages)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            page = self.free.popleft()
            self.users[page] += 1
            request.pages.append(page)
        return True

    def remember(self, request: Request) -> None:
        """Lets others share the full pages of a prompt."""
        for end in range(PAGE, min(request.cached, request.prompt) + 1, PAGE):
            self.known.setdefault(tuple(request.tokens[:end]), request.pages[end // PAGE - 1])

    def release(self, request: Request) -> None:
        for page in request.pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)
        self.known = {tokens: page for tokens, page in self.known.items() if self.users[page]}
        request.pages = []


class Server:
    """Runs requests together.

    Args:
        target: the model whose tokens are wanted.
        draft: a smaller model that proposes them, or None. Its cache has the same pages.
        pages: pages of the caches.
        budget: tokens of a step at most.
        proposals: tokens that the draft model proposes in a step.
        graphs: whether steps without chunks of prompts are CUDA graphs.
    """

    def __init__(
        self, target: Runner, draft: Runner | None, pages: int, budget: int = 48, proposals: int = 3,
        graphs: bool = True,
    ) -> None:  # fmt: skip
        self.target, self.draft, self.budget, self.proposals = target, draft, budget, proposals
        self.graphs = graphs
        self.pages = Pages(pages)
        self.device = target.cache.k.device
        self.steps = self.accepted = self.proposed = 0

    def serve(self, requests: Sequence[Request]) -> None:
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            parts = [(request, self._next(request)) for request in running]
            budget = self.budget - sum(len(tokens) for _, tokens in parts)
            while waiting and budget > 0:
                request = waiting[0]
                if not request.pages:
                    self.pages.share(request)
                if not self.pages.grow(request, len(request.tokens) + request.new_tokens + self.proposals):
                    break
                chunk = request.tokens[request.cached : request.cached + budget]
                budget -= len(chunk)
                parts.append((request, chunk))
                if request.cached + len(chunk) < len(request.tokens):
                    break  # the rest of this prompt comes first in the next step
                running.append(waiting.popleft())
            if not parts:
                raise RuntimeError("too few pages for a single request")
            self._step(parts)
            for request in [request for request in running if request.done]:
                del request.tokens[request.prompt + request.new_tokens :]
                running.remove(request)
                self.pages.release(request)

    def _next(self, request: Request) -> list[int]:
        """The newest token of a request, and what the draft model proposes behind it."""
        return request.tokens[-1:] + [-1] * (self.proposals if self.draft is not None else 0)

    def _step(self, parts: list[tuple[Request, list[int]]]) -> None:
        """One step of the model for chunks of prompts and newest tokens."""
        self._propose([(request, tokens) for request, tokens in parts if -1 in tokens])
        if self.draft is not None:
            self._run(self.draft, parts)  # the draft model's cache has the same rows
        following = self._run(self.target, parts)
        for (request, tokens), after in zip(parts, following):
            end = request.cached + len(tokens)
            if end < len(request.tokens):
                request.cached = end  # a chunk, behind which the prompt goes on
            elif end == len(request.tokens):
                request.cached = end
                request.tokens.append(after[-1])
            else:
                self._accept(request, tokens, after)
            self.pages.remember(request)
        self.steps += 1

    def _accept(self, request: Request, tokens: list[int], after: list[int]) -> None:
        """Keeps the proposals that are the target's own tokens, and its token behind them. Other rows are forgotten."""
        right = 0
        while right + 1 < len(tokens) and tokens[right + 1] == after[right]:
            right += 1
        request.tokens += after[: right + 1]
        request.cached += right + 1
        self.proposed += len(tokens) - 1
        self.accepted += right

    def _propose(self, parts: list[tuple[Request, list[int]]]) -> None:
        """Fills in the proposals of the draft model, one for each request at a time."""
        for number in range(self.proposals if parts else 0):
            assert self.draft is not None
            following = self._run(self.draft, [(request, tokens[: number + 1]) for request, tokens in parts])
            for (_, tokens), after in zip(parts, following):
                tokens[number + 1] = after[-1]

    def _run(self, runner: Runner, parts: list[tuple[Request, list[int]]]) -> list[list[int]]:
        """The next token after each token of all parts."""
        counts = [len(tokens) for _, tokens in parts]
        if self.graphs and counts == counts[:1] * len(parts) and counts[0] <= self.proposals + 1:
            graph = runner.decode(len(parts), counts[0])
            numbers = self._pack(parts, graph.requests, graph.requests * counts[0], CONTEXT // PAGE)
            flat = graph.run(numbers)[: sum(counts)]
        else:
            sizes = len(parts), sum(counts), max(len(request.pages) for request, _ in parts)
            buffer = torch.tensor(self._pack(parts, *sizes), dtype=torch.int32, device=self.device)
            flat = runner.run(Step.of(buffer, *sizes, max(counts)))
        following = flat.tolist()
        return [following[end - count : end] for count, end in zip(counts, accumulate(counts))]

    def _pack(self, parts: list[tuple[Request, list[int]]], requests: int, total: int, pages: int) -> list[int]:
        """What the buffer of a `Step` holds, filled up to so many requests, tokens and pages of each request."""
        tokens = [token for _, tokens in parts for token in tokens]
        positions = [request.cached + place for request, tokens in parts for place in range(len(tokens))]
        starts = [0, *accumulate(len(tokens) for _, tokens in parts)]
        starts += starts[-1:] * (requests - len(parts))
        lengths = [request.cached for request, _ in parts]
        table = [page for request, _ in parts for page in _filled(request.pages, pages)]
        rows = zip((tokens, positions, starts, lengths, table), sizes_of(requests, total, pages))
        return [number for row, size in rows for number in _filled(row, aligned(size))]


def _filled(numbers: list[int], size: int) -> list[int]:
    return numbers + [0] * (size - len(numbers))


def requests_of(seed: int, count: int) -> list[Request]:
    """Prompts of different lengths, of which half begin with the same tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most, (), generator=generator))
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    common = draw(20, 21)
    return [
        Request((common if number % 2 else []) + draw(3, 60), int(torch.randint(5, 25, (), generator=generator)))
        for number in range(count)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "llama"), default="gpt")
    parser.add_argument(
        "--cache", choices=("float8_e4m3fn", "float8_e5m2", "int8"), help="8 bits; default: the model's"
    )
    parser.add_argument("--draft", action=argparse.BooleanOptionalAction, default=True, help="a smaller model proposes")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs of decoding")
    for name, default, text in (
        ("requests", 10, "to serve"), ("layers", 3, "of the model"), ("width", 64, "of the model"),
        ("heads", 4, "of the queries; half as many of keys"), ("pages", 64, f"of {PAGE} tokens, in the cache"),
        ("budget", 48, "tokens of a step at most"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cache_dtype = dtype if options.cache is None else getattr(torch, options.cache)
    size = Size(options.layers, options.width, options.heads, options.pages, dtype, cache_dtype, device)
    build = {"gpt": gpt, "llama": llama}[options.model]
    target, draft = build(size, seed=0), None
    if options.draft:
        draft = build(size._replace(layers=1), seed=0)
        draft.model.load_state_dict(target.model.state_dict(), strict=False)

    def serve(requests: list[Request]) -> Server:
        server = Server(target, draft, options.pages, options.budget, graphs=options.graphs)
        server.serve(requests)
        return server

    if device == "cuda":
        serve(requests_of(1, options.requests))  # compiles kernels and captures graphs
    batch = requests_of(1, options.requests)
    start = time.perf_counter()
    together = serve(batch)
    seconds = time.perf_counter() - start
    made = sum(request.new_tokens for request in batch)
    print(
        f"{len(batch)} requests, {made} new tokens in {together.steps} steps: {made / seconds:.0f} tokens/s on {device}"
    )
    print(f"{together.pages.shared} pages of shared beginnings", end="")
    print(f", {together.accepted} of {together.proposed} proposals accepted" if options.draft else "")
    single = Server(target, None, options.pages, budget=10**6, graphs=False)
    for request, alone in zip(batch, requests_of(1, options.requests)):
        single.serve([alone])
        same = sum(one == other for one, other in zip(request.tokens, alone.tokens))
        # In bfloat16 two tokens may be equally probable but for rounding, which differs with the shapes of a step.
        assert request.tokens == alone.tokens or (dtype is torch.bfloat16 and same >= request.prompt), "not the same"
    print("every request has the tokens that it gets alone")


if __name__ == "__main__":
    main()
