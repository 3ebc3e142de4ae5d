"""Tokens per second of transformers' continuous batching: flashtile beside "sdpa".

    python -m benchmarks.continuous_batching --output benchmarks/results/h100-continuous-batching.json

A Llama with random weights answers requests of different lengths by `model.generate_batch`. All implementations have
the same weights, requests and pages. A first run of each compiles kernels; the median of the others counts. CUDA graphs
and asynchronous batches are what transformers chooses by itself, unless the options say otherwise.

The answers are held against a plain forward of the model over each prompt with its answer: a chosen token is the best
there, or nearly so, by rounding. At a near tie two implementations may part, and their texts differ from then on. The
program prints where the answer to each request first differs from that of the first implementation.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks.common import Program
from flashtile.bench.record import make_row
from flashtile.integrations.transformers import register


def make_model(options: argparse.Namespace, device: torch.device) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.heads * options.head_dim, head_dim=options.head_dim,
        intermediate_size=3 * options.heads * options.head_dim, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, num_key_value_heads=options.heads_kv,
        max_position_embeddings=options.prompt + options.new_tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Prompts of an eighth to all of the longest length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(-(-options.prompt // 8), options.prompt + 1, (options.requests,), generator=generator)
    return [torch.randint(options.vocabulary, (n,), generator=generator).tolist() for n in lengths.tolist()]


def generate(model: Any, prompts: list[list[int]], options: argparse.Namespace) -> tuple[float, list[list[int]]]:
    """Seconds until all requests are answered, and their new tokens."""
    generation = transformers.GenerationConfig(
        max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    pages = -(-(options.prompt + options.new_tokens) // options.page)
    batching = transformers.ContinuousBatchingConfig(
        page_size=options.page, num_blocks=options.requests * pages + 1, max_batch_tokens=options.batch_tokens,
        max_requests_per_batch=options.requests, use_cuda_graph=options.graphs, auto_switch_to_flash=False,
    )  # fmt: skip
    start = time.perf_counter()
    found = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=batching)
    seconds = time.perf_counter() - start
    answers = [request.generated_tokens for request in found.values()]
    if len(answers) < len(prompts) or any(request.error for request in found.values()):
        raise RuntimeError(f"{model.config._attn_implementation}: not all requests were answered")
    return seconds, answers


@torch.inference_mode()
def check(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, float]:
    """The share of tokens that are the best of a plain forward over the same text, and by how much a chosen token is at
    most below the best, in standard deviations of the logits."""
    model.set_attn_implementation("sdpa")
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.tensor([prompt + answer[:-1]], device=model.device)
        logits = model(text, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
        chosen = logits[range(len(answer)), answer]
        gaps.append((logits.amax(1) - chosen) / logits.std(1))
    found = torch.cat(gaps)
    return {"best_tokens": round(float((found == 0).float().mean()), 4), "largest_gap": round(float(found.max()), 4)}


def first_differences(answers: list[list[int]], others: list[list[int]]) -> list[int]:
    """For each request, how many tokens come before the first that differs."""
    pairs = (list(zip(a, b, strict=True)) for a, b in zip(answers, others, strict=True))
    return [next((place for place, (one, other) in enumerate(pair) if one != other), len(pair)) for pair in pairs]


def measure(
    model: Any, name: str, prompts: list[list[int]], options: argparse.Namespace
) -> tuple[dict[str, Any], list[list[int]]]:
    """A row of the record, and the answers."""
    model.set_attn_implementation(name)
    generate(model, prompts, options)
    runs = [generate(model, prompts, options) for _ in range(options.runs)]
    seconds, answers = statistics.median(seconds for seconds, _ in runs), runs[-1][1]
    case = {
        "model": f"Llama, {options.layers} layers", "H": options.heads, "Hkv": options.heads_kv, "D": options.head_dim,
        "requests": len(prompts), "prompt": options.prompt, "new_tokens": options.new_tokens, "page": options.page,
        "dtype": str(model.dtype).partition(".")[2],
    }  # fmt: skip
    found = {"tokens_per_s": sum(map(len, answers)) / seconds, **check(model, prompts, answers)}
    row = make_row("continuous-batching", "fwd", name, case, ms=seconds * 1e3, timer="perf-counter", **found)
    return row, answers


def make_program() -> Program:
    program = Program("continuous_batching", __doc__, "implementation")
    add = program.add_argument
    add("--implementations", nargs="+", default=["flashtile", "sdpa"], help="names of attention in transformers")
    add("--requests", type=int, default=64)
    add("--prompt", type=int, default=2048, help="tokens of the longest prompt")
    add("--new-tokens", type=int, default=128, help="of each request")
    add("--batch-tokens", type=int, default=2048, help="tokens of a step at most")
    add("--page", type=int, default=32, help="tokens of a page")
    add("--layers", type=int, default=16)
    add("--heads", type=int, default=32)
    add("--heads-kv", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--vocabulary", type=int, default=32000)
    add("--runs", type=int, default=2, help="of each implementation, after a first one that does not count")
    add("--graphs", action=argparse.BooleanOptionalAction, help="CUDA graphs; default: as transformers chooses")
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    options, device, recorder = make_program().start(arguments)
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    register()
    model, prompts = make_model(options, device), make_prompts(options)
    print(f"{len(prompts)} requests, {sum(map(len, prompts))} tokens of prompts, {options.new_tokens} new tokens each")
    first: list[list[int]] | None = None
    for name in options.implementations:
        row, answers = measure(model, name, prompts, options)
        recorder.add([row])
        print(
            f"  {name:16} {row['tokens_per_s']:10.1f} tokens/s   {row['best_tokens']:.1%} of tokens are the best, "
            f"the others at most {row['largest_gap']:.3f} standard deviations below"
        )
        if first is not None:
            print(f"    tokens of each request before the first difference: {first_differences(answers, first)}")
        first = first or answers
    return 0


if __name__ == "__main__":
    sys.exit(main())
