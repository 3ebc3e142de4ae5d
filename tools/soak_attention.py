"""Random attention calls, forward and backward, each against float64; then one call many times, bit for bit.

    python tools/soak_attention.py [--count 200] [--seed 0] [--backend hopper] [--processes 8] [--repeats 100]
    python tools/soak_attention.py --features --backend triton
    python tools/soak_attention.py --features --emulated --processes 2

Head sizes of q and k and of v, masks, packing, grouped heads, lengths, dtypes, strides and addresses are drawn; with
`--features` also what changes scores, block masks, key lengths and dropout, any number of them together. Call number
`n` of a seed is always the same one. Compilation takes most of the time on a GPU, so calls are shared out among
processes. The backends cpu and reference run on the CPU, the others on a GPU. With `--emulated` the source of the
Hopper kernels runs on the CPU instead (tests/gluon_emulator), in smaller calls and with events in random order.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import flashtile
from flashtile.ops.attention import repeated, select
from flashtile.testing import AttentionCase, Inputs, check, make_inputs, with_arguments
from flashtile.testing.kernel_checks import Layout

#: Widths of heads: those of real models, and for the portable kernels any number of columns.
_WIDTHS = (32, 40, 64, 80, 96, 128, 192, 256, 320, 512)
_MOST_COLUMNS = 300
#: The place of the emulator.
_TESTS = str(Path(__file__).resolve().parent.parent / "tests")
#: Longer sequences of emulated calls are cut to a quarter.
_LONGEST_EMULATED = 450
_MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "align": "top_left"},
    {"window": (150, 20)},
    {"causal": True, "window": (64, None)},
)


class Job(NamedTuple):
    """A call to make."""

    seed: int
    number: int
    backend: str
    features: bool
    emulated: bool


class Outcome(NamedTuple):
    """Whether the backend served the call, and what went wrong, or None."""

    served: bool
    failure: str | None = None


def draw_case(job: Job) -> AttentionCase:
    """The case of a job."""
    seed, number, backend, features, emulated = job
    generator = random.Random(f"{seed}/{number}")
    head_dim, head_dim_v = _width(generator, backend), _width(generator, backend)
    heads_kv = generator.choice((1, 2, 3))
    sequences = generator.randint(1, 4)
    lengths: dict[str, Any] = {}
    if generator.random() < 0.4:
        lengths = {of: tuple(_length(generator) for _ in range(sequences)) for of in ("lengths_q", "lengths_k")}
    seq_q, seq_k, heads = _length(generator), _length(generator), heads_kv * generator.choice((1, 2, 4))
    dtype = generator.choice((torch.bfloat16, torch.float16))
    case = AttentionCase(seq_q, seq_k, sequences, heads, heads_kv, head_dim, head_dim_v, dtype=dtype, **lengths)
    case = with_arguments(case, **generator.choice(_MASKS))
    case = _with_features(case, generator) if features else case
    return _shortened(case) if emulated else case


def _shortened(case: AttentionCase) -> AttentionCase:
    """A case that the emulator computes in seconds."""

    def short(lengths: Any) -> Any:
        if isinstance(lengths, tuple):
            return tuple(map(short, lengths))
        return lengths // 4 if lengths is not None and lengths > _LONGEST_EMULATED else lengths

    names = ("seq_q", "seq_k", "lengths_q", "lengths_k", "key_lengths")
    return replace(case, **{name: short(getattr(case, name)) for name in names})


def _with_features(case: AttentionCase, generator: random.Random) -> AttentionCase:
    """The case with each feature that a backend may lack in a third of the calls."""

    def maybe(*choices: Any) -> Any:
        return generator.choice(choices) if generator.random() < 0.33 else None

    sequences = case.batch if case.lengths_q is None else len(case.lengths_q)
    shapes = ("1111", "111k", "11q1", "11qk", "1hqk", "1h1k")
    batched = () if case.packed else ("b111", "b11k", "b1qk", "bhqk", "bh1k")
    key_lengths = maybe(tuple(_length(generator) for _ in range(sequences)))
    changed = replace(
        case,
        bias=maybe(*shapes, *batched),
        bias_dtype=generator.choice((None, torch.float32)),
        mask=maybe(*shapes, *batched),
        alibi_slopes=maybe("h", "bh"),
        sinks=generator.random() < 0.33,
        key_lengths=key_lengths,
        block_mask=maybe((64, 64), (128, 128), (16, 256), (192, 64)),
        score_mod=generator.random() < 0.33,
        constant=("score_mod",) if generator.random() < 0.7 else (),
    )
    arguments = {"softcap": maybe(2.0, 30.0), "dropout_p": maybe(0.1, 0.5), "scale": maybe(-0.2, 0.3)}
    arguments["deterministic"] = maybe(True)
    return with_arguments(changed, **{name: value for name, value in arguments.items() if value is not None})


def _width(generator: random.Random, backend: str) -> int:
    """The Hopper kernels take multiples of 8, the backward up to 256."""
    if backend == "hopper" or generator.random() < 0.5:
        return generator.choice(_WIDTHS)
    return generator.randint(1, _MOST_COLUMNS)


def _length(generator: random.Random) -> int:
    """Mostly short, sometimes none, sometimes many tiles."""
    return generator.choice(
        (0, 1, generator.randint(2, 130), generator.randint(131, 700), generator.randint(701, 1500))
    )


def _device_of(backend: str) -> str:
    return "cpu" if backend in ("cpu", "reference") else "cuda"


def run_case(job: Job) -> Outcome:
    """Checks one case."""
    seed, number, backend, _, emulated = job
    case, device = draw_case(job), "cpu" if emulated else _device_of(backend)
    try:
        inputs = make_inputs(case, device, number)
        if number % 3 == 0:
            inputs.q, inputs.k, inputs.v = _side_by_side(inputs.q, inputs.k, inputs.v)
        elif number % 3 == 1:
            _place(inputs, random.Random(f"{seed}/{number}/layouts"))
        if emulated:
            return Outcome(_check_emulated(case, inputs, number))
        check(case, backend, device, inputs=inputs)
    except Exception as error:
        if f"'{backend}' cannot serve this call" in str(error):
            return Outcome(False)
        return Outcome(True, f"{number}: {case}: {type(error).__name__}: {error}")
    return Outcome(True)


def _check_emulated(case: AttentionCase, inputs: Inputs, number: int) -> bool:
    """Checks a case on a machine of its own, whose events come in an order of their own. Returns whether the kernels
    serve it."""
    if _TESTS not in sys.path:
        sys.path.append(_TESTS)
    from gluon_emulator import EmulatedHopper
    from gluon_emulator.serving import NotServedError, served_by

    machine = EmulatedHopper(multiprocessors=1 + number % 4, seed=number)
    if number % 2:  # few and short sequences go the way of many
        schedule = machine.modules["schedule"]
        schedule._SHORT_LINES, schedule._SHORT_TILES, schedule._SHORT_IN_THE_MEAN = 0, 1 + number % 3, 100
    repeated.forget_calls()
    with mock.patch.object(select, "implementation", served_by(machine)):
        try:
            check(case, "hopper", inputs=inputs)
        except NotServedError:
            return False
    return True


def _place(inputs: Inputs, generator: random.Random) -> None:
    """Puts each tensor into rows that are wider by some elements, at an address that is some elements on."""

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        return Layout(generator.choice((0, 1, 2, 4, 8)), generator.choice((0, 1, 2, 4, 8, 16))).place(tensor)

    inputs.q, inputs.k, inputs.v, inputs.dout = map(drawn, (inputs.q, inputs.k, inputs.v, inputs.dout))
    inputs.tensors |= {name: drawn(inputs.tensors[name]) for name in ("bias", "mask") if name in inputs.tensors}


def _side_by_side(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same tensors as views of one, their heads side by side, as a projection to q, k and v leaves them. Tensors of
    other shapes are left as they are."""
    if len({tensor.shape[:-2] + tensor.shape[-1:] for tensor in tensors}) > 1:
        return list(tensors)
    return list(torch.cat(tensors, -2).split([tensor.shape[-2] for tensor in tensors], -2))


def repeat_forward(backend: str, repeats: int) -> int:
    """Runs one long causal call `repeats` times. Returns how many results differed from the first in any bit."""
    device = _device_of(backend)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(2, 4000, heads, 128, generator=generator, device=device).bfloat16() for heads in (16, 4, 4))
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
    parser.add_argument("--features", action="store_true", help="draw what changes scores, masks, lengths, dropout too")
    parser.add_argument("--emulated", action="store_true", help="the Hopper kernels' source, on a CPU")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    if options.emulated and options.backend != "hopper":
        parser.error(f"--emulated runs the Hopper kernels, not those of --backend {options.backend}")
    jobs = [
        Job(options.seed, number, options.backend, options.features, options.emulated)
        for number in range(options.count)
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        outcomes = list(pool.imap_unordered(run_case, jobs, chunksize=4))
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    for failure in failures:
        print(failure)
    served = sum(outcome.served for outcome in outcomes)
    print(f"{options.count} random calls, {served} of them served, {len(failures)} wrong")
    differing = 0
    if not options.emulated:
        differing = repeat_forward(options.backend, options.repeats)
        print(f"{options.repeats} repetitions, {differing} different")
    sys.exit(bool(failures or differing))


if __name__ == "__main__":
    main()
