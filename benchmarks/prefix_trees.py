"""Time and memory of a policy-gradient step: completions of a prompt as a padded batch, and as a prefix tree.

    python -m benchmarks.prefix_trees --output benchmarks/results/h100-prefix-trees.json

Both compute the log-probability of every completion's tokens with flashtile's GPT, and its gradients. The batch holds
the prompt once for each completion, the tree once. A small case is checked in float32 before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashtile
from benchmarks.common import Program
from flashtile.bench.record import make_row
from flashtile.bench.timing import Uncaptured, make_timer, step_facts, typical
from flashtile.models import GPT, GPTConfig
from flashtile.prefix_trees import PrefixTree
from flashtile.testing import Size, assert_same, size


class Problem(NamedTuple):
    """A prompt and its completions, and a model for them."""

    model: GPT
    prompt: Tensor
    completions: list[Tensor]


def make_problem(
    options: argparse.Namespace, completions: int, device: torch.device, dtype: torch.dtype, scale: int = 1
) -> Problem:
    """Completions of half to all of the longest length. `scale` divides the lengths."""
    torch.manual_seed(0)
    longest, prompt = options.completion // scale, options.prompt // scale
    config = GPTConfig(
        context=prompt + longest, layers=options.layers, heads=options.heads, width=options.width, positions="rotary",
        norm="rms", activation="swiglu", attention_bias=False, mlp_bias=False, vocabulary=options.vocabulary,
    )  # fmt: skip
    lengths = torch.randint((longest + 1) // 2, longest + 1, (completions,)).tolist()
    tokens = [torch.randint(options.vocabulary, (length,), device=device) for length in (prompt, *lengths)]
    return Problem(GPT(config, device=device, dtype=dtype), tokens[0], tokens[1:])


def over_batch(problem: Problem) -> list[Tensor]:
    """Log-probabilities of each completion's tokens, from sequences padded on the right."""
    start = len(problem.prompt)
    sequences = [torch.cat((problem.prompt, completion)) for completion in problem.completions]
    tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(problem.completions, batch_first=True, padding_value=-100)
    hidden = problem.model.hidden(tokens)[:, start - 1 : -1]
    losses = flashtile.linear_cross_entropy(hidden, problem.model.output_weight, labels, reduction="none")
    return [-row[: len(completion)] for row, completion in zip(losses, problem.completions, strict=True)]


def over_tree(problem: Problem) -> list[Tensor]:
    """The same, from a prefix tree, which is made anew in each step."""
    tree = PrefixTree.from_completions([(problem.prompt, problem.completions)], device=problem.prompt.device)
    hidden = problem.model.hidden(tree.tokens[None], position_ids=tree.positions[None], block_mask=tree.block_mask())
    log_probs = tree.unpack(tree.linear_log_probs(hidden, problem.model.output_weight))
    return [each[len(problem.prompt) :] for each in log_probs]


IMPLEMENTATIONS = {"flashtile-padded-batch": over_batch, "flashtile-prefix-tree": over_tree}


def step(problem: Problem, log_probs: Callable[[Problem], list[Tensor]]) -> list[Tensor]:
    """A loss with an advantage for each completion, and its gradients."""
    problem.model.zero_grad()
    found = log_probs(problem)
    loss = torch.stack([(index % 3 - 1.5) * each.mean() for index, each in enumerate(found)]).mean()
    loss.backward()
    return found


def check(options: argparse.Namespace, completions: int, device: torch.device) -> None:
    """Asserts that both compute the same, on lengths of an eighth and heads of 64, in float32. The tolerance is that of
    sums as long as those of a small model."""
    narrow = argparse.Namespace(
        **{**vars(options), "heads": min(options.heads, 12), "width": 64 * min(options.heads, 12)}
    )
    problem = make_problem(narrow, completions, device, torch.float32, scale=8)
    results = []
    for log_probs in IMPLEMENTATIONS.values():
        found = torch.cat(step(problem, log_probs)).detach()
        results.append((found, {name: p.grad.clone() for name, p in problem.model.named_parameters()}))
    (batch, gradients), (tree, found) = results
    assert_same(tree, batch)
    # The shares of completions in a gradient cancel: each has an advantage, of either sign.
    largest = max(size(gradient).largest for gradient in gradients.values())
    assert_same(found, gradients, cancelled=Size(largest, largest))


def saved_bytes(call: Callable[[], Any]) -> int:
    """Bytes that the forward of a step keeps for the backward, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _still_there = call()
    return sum(kept.values())


def measure(options: argparse.Namespace, completions: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each implementation of one case."""
    check(options, completions, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    problem = make_problem(options, completions, device, dtype)
    case = {
        "model": f"{options.layers} layers of {options.width}", "prompt": options.prompt, "completions": completions,
        "lengths": [len(completion) for completion in problem.completions], "dtype": str(dtype).partition(".")[2],
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    expected: Tensor | None = None
    for name, log_probs in IMPLEMENTATIONS.items():
        saved = saved_bytes(partial(log_probs, problem))
        call = partial(step, problem, log_probs)
        found = torch.cat(call()).detach()
        expected = found if expected is None else expected
        timer = make_timer(Uncaptured(call), device)
        rows.append(
            make_row(
                "prefix-trees", "fwd+bwd", name, case, ms=typical(timer.sample(options.seconds), timer.kind),
                error=(found - expected).abs().max().item(), timer=timer.kind, saved_mib=round(saved / 2**20, 1),
                **step_facts(call, device),
            )
        )  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("prefix_trees", __doc__, "case")
    add = program.add_argument
    add("--completions", type=int, nargs="+", default=[8, 16], help="of one prompt; several are several cases")
    add("--prompt", type=int, default=2048, help="tokens of the prompt")
    add("--completion", type=int, default=512, help="tokens of the longest completion")
    add("--layers", type=int, default=12)
    add("--width", type=int, default=768)
    add("--heads", type=int, default=12)
    add("--vocabulary", type=int, default=50304)
    add("--seconds", type=float, default=2.0, help="for the samples of each implementation")
    options, device, recorder = program.start(arguments)
    for completions in options.completions:
        rows = measure(options, completions, device)
        recorder.add(rows)
        print(f"{completions} completions of a prompt of {options.prompt} tokens")
        for row in rows:
            memory = f"peak {row['peak_mib']:.0f} MiB" if "peak_mib" in row else f"saved {row['saved_mib']:.0f} MiB"
            print(f"  {row['impl']:24} {row['ms']:9.1f} ms   {memory}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
