"""Random attention calls on a GPU, forward and backward, each against float64; then one call many times, bit for bit.

    python tools/soak_attention.py [--count 200] [--seed 0] [--backend hopper] [--processes 8] [--repeats 100]

Head sizes, masks, packing, grouped heads, lengths, dtypes and strides are drawn; call number `n` of a seed is always
the same one. Compilation takes most of the time, so calls are shared out among processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from typing import Any

import torch

import flashtile
from flashtile.testing import AttentionCase, check, make_inputs, with_arguments

_HEADS = ((64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (40, 40), (80, 64), (128, 64))
_MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "align": "top_left"},
    {"window": (150, 20)},
    {"causal": True, "window": (64, None)},
)


def draw_case(seed: int, number: int) -> AttentionCase:
    """The `number`-th case of a seed."""
    generator = random.Random(f"{seed}/{number}")
    head_dim, head_dim_v = generator.choice(_HEADS)
    heads_kv = generator.choice((1, 2, 3))
    sequences = generator.randint(1, 4)
    lengths: dict[str, Any] = {}
    if generator.random() < 0.4:
        lengths = {of: tuple(_length(generator) for _ in range(sequences)) for of in ("lengths_q", "lengths_k")}
    case = AttentionCase(
        seq_q=_length(generator),
        seq_k=_length(generator),
        batch=sequences,
        heads=heads_kv * generator.choice((1, 2, 4)),
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=generator.choice((torch.bfloat16, torch.float16)),
        **lengths,
    )
    return with_arguments(case, **generator.choice(_MASKS))


def _length(generator: random.Random) -> int:
    """Mostly short, sometimes none, sometimes many tiles."""
    return generator.choice(
        (0, 1, generator.randint(2, 130), generator.randint(131, 700), generator.randint(701, 1500))
    )


def run_case(job: tuple[int, int, str]) -> str | None:
    """Checks one case. Returns what went wrong, or None."""
    seed, number, backend = job
    case = draw_case(seed, number)
    try:
        inputs = make_inputs(case, "cuda", number)
        if number % 3 == 0:
            inputs.q, inputs.k, inputs.v = _side_by_side(inputs.q, inputs.k, inputs.v)
        check(case, backend, "cuda", inputs=inputs)
    except Exception as error:
        return f"{number}: {case}: {type(error).__name__}: {error}"
    return None


def _side_by_side(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same tensors as views of one, their heads side by side, as a projection to q, k and v leaves them. Tensors of
    other shapes are left as they are."""
    if len({tensor.shape[:-2] + tensor.shape[-1:] for tensor in tensors}) > 1:
        return list(tensors)
    return list(torch.cat(tensors, -2).split([tensor.shape[-2] for tensor in tensors], -2))


def repeat_forward(backend: str, repeats: int) -> int:
    """Runs one long causal call `repeats` times. Returns how many results differed from the first in any bit."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 4000, heads, 128, generator=generator, device="cuda").bfloat16() for heads in (16, 4, 4))
    first = flashtile.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    differing = 0
    for _ in range(repeats):
        again = flashtile.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        differing += not all(torch.equal(a, b) for a, b in zip(first, again))
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    jobs = [(options.seed, number, options.backend) for number in range(options.count)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        failures = [failure for failure in pool.imap_unordered(run_case, jobs, chunksize=4) if failure]
    for failure in failures:
        print(failure)
    differing = repeat_forward(options.backend, options.repeats)
    print(f"{options.count} random calls, {len(failures)} wrong; {options.repeats} repetitions, {differing} different")
    sys.exit(bool(failures or differing))


if __name__ == "__main__":
    main()
