"""Tokens per second of transformers' continuous batching: flashtile beside "sdpa".

    python -m benchmarks.continuous_batching --output benchmarks/results/h100-continuous-batching.json

A Llama with random weights answers requests of different lengths by `model.generate_batch`. All implementations have
the same weights, requests and pages. A first run of each compiles kernels; the median of the others counts. CUDA graphs
and asynchronous batches are what transformers chooses by itself, unless the options say otherwise.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.evidence.measure import make_row
from flashtile.bench.record import Recorder, command_line
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


def measure(model: Any, name: str, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    model.set_attn_implementation(name)
    generate(model, prompts, options)
    runs = [generate(model, prompts, options) for _ in range(options.runs)]
    seconds = statistics.median(seconds for seconds, _ in runs)
    case = {
        "model": f"Llama, {options.layers} layers", "H": options.heads, "Hkv": options.heads_kv, "D": options.head_dim,
        "requests": len(prompts), "prompt": options.prompt, "new_tokens": options.new_tokens, "page": options.page,
        "dtype": str(model.dtype).partition(".")[2],
    }  # fmt: skip
    made = sum(len(answer) for answer in runs[0][1])
    row = make_row(
        "continuous-batching", "fwd", name, case, ms=seconds * 1e3, timer="perf-counter", tokens_per_s=made / seconds
    )
    return {"row": row, "answers": runs[0][1]}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    register()
    recorder = Recorder(device, command_line("python -m benchmarks.continuous_batching", arguments), options.output)
    model, prompts = make_model(options, device), make_prompts(options)
    print(f"{len(prompts)} requests, {sum(map(len, prompts))} tokens of prompts, {options.new_tokens} new tokens each")
    first: list[list[int]] | None = None
    for name in options.implementations:
        found = measure(model, name, prompts, options)
        first = found["answers"] if first is None else first
        # Rounding differs with the implementation, so random weights may choose another token somewhere.
        same = sum(ours == theirs for a, b in zip(found["answers"], first) for ours, theirs in zip(a, b))
        found["row"]["same_tokens"] = round(same / sum(map(len, first)), 4)
        recorder.add([found["row"]])
        row = found["row"]
        print(
            f"  {name:16} {row['tokens_per_s']:10.1f} tokens/s   {row['same_tokens']:.1%} tokens as the first one's",
            flush=True,
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.continuous_batching", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
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
    add("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    add("--output", type=Path, help="file for the record, written after every implementation")
    return parser


if __name__ == "__main__":
    sys.exit(main())
