"""Score programs written out as Triton source, which is Gluon source too. Strings only: no Triton here.

A program becomes a function of a tile: every step is a line (`score_writer`), and reads are masked loads. Shapes
broadcast: the score is a tile, `q_index` and `k_index` have a dimension of 1, `batch` and `head` have none; `first_q`
and `first_k` are where the tile begins. `captured` has the addresses of the tensors that are read, `sizes` their sizes,
`sums` where their gradients are added up. `tl` is the language, Triton or Gluon; `constant`, `hyperbolic_tangent`,
`sine` and `add_to_entries` are functions that each of them has of its own.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashtile.ops.attention.gpu.score_writer import ScoreBounds, ScoreWriter, UnsupportedOperationError
from flashtile.ops.attention.score_program import INPUTS, UPSTREAM, named_steps, parse
from flashtile.ops.attention.score_tracing import ScoreGradient, derivative

_SCORE, _BATCH, _HEAD, _Q_INDEX, _K_INDEX = INPUTS

#: Arguments of the functions that are written, and of those of gradients, before the last one.
_OF_TILE = "score, batch, head, q_index, k_index, first_q, first_k, captured, sizes"
_OF_GRADIENTS = "score, batch, head, q_index, k_index, first_q, first_k, upstream, hidden, captured, sizes"

#: `sin(x + quarters · π/2)` of float32. Triton's own is CUDA's, inlined for each element with its way for huge
#: arguments: 29,000 instructions instead of 8,000 in the Hopper forward, more than the instruction cache holds.
#: Here a number of which only integers are near rounds `n = x · 2/π`. It is off by one at most, which the second step
#: mends; both subtract n · π/2 in parts. Then come polynomials on [-π/4, π/4] (Cephes). From 2²² · π/2 on, neighbours
#: of float32 lie 0.5 or more apart, and the result is NaN.
SINE_SOURCE = """
def sine(x, quarters):
    rounded = tl.fma(x, 0.636619772, 12582912.0)
    n = rounded - 12582912.0
    rest = tl.fma(n, -1.5703125, x)
    rest = tl.fma(n, -4.837512969970703125e-4, rest)
    rest = tl.fma(n, -7.54978995489188216e-8, rest)
    again = tl.fma(rest, 0.636619772, 12582912.0)
    m = again - 12582912.0
    rest = tl.fma(m, -1.57079637, rest)
    rest = tl.fma(m, 4.37113883e-8, rest)
    quadrant = rounded.to(tl.int32, bitcast=True) + again.to(tl.int32, bitcast=True) + quarters
    square = rest * rest
    series = tl.fma(square, tl.fma(square, -1.9515295891e-4, 8.3321608736e-3), -1.6666654611e-1)
    of_sine = tl.fma(rest * square, series, rest)
    series = tl.fma(square, tl.fma(square, 2.443315711809948e-5, -1.388731625493765e-3), 4.166664568298827e-2)
    of_cosine = tl.fma(square, tl.fma(square, series, -0.5), 1.0)
    value = tl.where((quadrant & 1) == 0, of_sine, of_cosine)
    value = tl.where((quadrant & 2) == 0, value, -value)
    return tl.where(tl.abs(x) < 6588397.0, value, float("nan"))
"""


def unsupported_operation(text: str, with_derivative: bool) -> str | None:
    """The first operation of a program that the kernels lack, by PyTorch's name; None where they have all."""
    try:
        function_source(text)
        if with_derivative:
            derivative_source(text)
    except UnsupportedOperationError as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=1024)
def function_source(text: str, bounds: ScoreBounds | None = None, reads_before: bool = False) -> str:
    """`score_function(score, batch, head, q_index, k_index, first_q, first_k, captured, sizes)`: the new scores, NaN
    where the function reads outside of a captured tensor. `bounds`: what is known of the indices. `reads_before`: one
    more argument, `reads`, is what `reads_source` returns."""
    program = parse(text)
    writer = ScoreWriter(program, bounds, program.early_loads if reads_before else ())
    arguments = f"{_OF_TILE}, reads" if reads_before else _OF_TILE
    return _source("score_function", arguments, [*writer.lines, f"return {_new_scores(writer, program.results[0])}"])


@functools.lru_cache(maxsize=1024)
def with_derivative_source(text: str, bounds: ScoreBounds | None = None) -> str:
    """`score_and_derivative(..., sizes, reads)`: `function_source`'s scores, their derivatives by the score."""
    gradient = derivative(text, torch.float32, of_score_alone=True)
    assert gradient.result is not None
    writer = ScoreWriter(gradient.program, bounds, gradient.program.early_loads)
    slope = "0.0" if gradient.score is None else writer.value_name(gradient.score)
    result = f"return {_new_scores(writer, gradient.result)}, {slope} + tl.zeros_like(score)"
    lines = ["upstream = tl.zeros_like(score) + 1.0", *writer.lines, result]
    return _source("score_and_derivative", f"{_OF_TILE}, reads", lines)


@functools.lru_cache(maxsize=1024)
def adds_to_score(text: str) -> bool:
    """Whether a function adds what does not depend on the score, so that its derivative by the score is 1."""
    return derivative(text, torch.float32).score == UPSTREAM


def _new_scores(writer: ScoreWriter, result: str) -> str:
    """The expression of what a function returns, NaN where it reads outside of a captured tensor."""
    scores = writer.value_name(result)
    if writer.checks:
        scores = f'tl.where({" & ".join(writer.checks)}, {scores}, float("nan"))'
    return scores if _SCORE in writer.argument_inputs(result) else f"{scores} + tl.zeros_like(score)"


@functools.lru_cache(maxsize=1024)
def reads_source(text: str, bounds: ScoreBounds | None = None, with_derivative: bool = False) -> str | None:
    """`score_reads(batch, head, q_index, k_index, first_q, first_k, captured, sizes)`: what a function reads that does
    not depend on the score, as a tuple; None where there is nothing of the kind. `with_derivative`: and its derivative
    by the score."""
    program = derivative(text, torch.float32, of_score_alone=True).program if with_derivative else parse(text)
    loads = program.early_loads
    if not loads:
        return None
    writer = ScoreWriter(program, bounds, only=program.needed_for(loads))
    names = "".join(f"{writer.value_name(load)}, " for load in loads)
    return _source("score_reads", _OF_TILE.removeprefix("score, "), [*writer.lines, f"return ({names})"])


@functools.lru_cache(maxsize=1024)
def derivative_source(
    text: str, summed: tuple[bool, ...] = (), in_order: bool = False, bounds: ScoreBounds | None = None
) -> str:
    """`score_derivative(score, batch, head, q_index, k_index, first_q, first_k, upstream, hidden, captured, sizes,
    sums)`: the gradient of the score. `hidden`: the pairs whose derivative does not count. `summed`: for which captured
    tensors the function adds up gradients, in the field `sum<number>` of `sums`; none where that is another kernel's
    task. `in_order`: these are the sums of the thread blocks of a wave, one after another, and each adds to its own
    (`gpu/scores`)."""
    gradient = derivative(text, torch.float32)
    writer = ScoreWriter(gradient.program, bounds)
    lines = [*writer.lines, *_additions(gradient, writer, summed, in_order)]
    result = "tl.zeros_like(score)"
    if gradient.score is not None:
        result = f"tl.where(hidden, 0.0, {writer.value_name(gradient.score)}) + tl.zeros_like(score)"
    return _source("score_derivative", f"{_OF_GRADIENTS}, sums", [*lines, f"return {result}"])


@functools.lru_cache(maxsize=1024)
def additions_source(text: str, summed: tuple[bool, ...], bounds: ScoreBounds | None = None) -> str:
    """`add_gradients(...)`, of tiles `[N, M]`: what `derivative_source` adds up, and nothing else."""
    gradient = derivative(text, torch.float32)
    wanted = [(*indices, value) for captured, indices, value in gradient.loads if summed[captured]]
    needed = gradient.program.needed_for([name for names in wanted for name in names])
    writer = ScoreWriter(gradient.program, bounds, only=needed)
    lines = [*writer.lines, *_additions(gradient, writer, summed, transposed=True)]
    return _source("add_gradients", f"{_OF_GRADIENTS}, sums", lines or ["pass"])


def _additions(
    gradient: ScoreGradient,
    writer: ScoreWriter,
    summed: tuple[bool, ...],
    in_order: bool = False,
    transposed: bool = False,
) -> list[str]:
    """Lines that add up the gradients of captured tensors. `transposed`: the rows of a tile are keys, and there is a
    function `diagonal_sums`."""
    lines, by_distance = [], gradient.program.by_distance if transposed else frozenset()
    for captured, indices, value in gradient.loads:
        if not (captured < len(summed) and summed[captured]):
            continue
        total = f"sums.sum{captured}"
        if in_order:
            sizes = "".join(f" * sizes.size{captured}_{dim}" for dim in range(len(indices)))
            lines.append(f"own = {total} + tl.program_id(0).to(tl.int64){sizes}")
            total = "own"
        inputs = frozenset().union(*(writer.argument_inputs(index) for index in indices))
        lines.append(f"gradient = tl.where(hidden, 0.0, {writer.value_name(value)}).to(tl.float32)")
        # Elements of a tile that belong to one entry are added up before they go to memory: first those of a row, which
        # one warp has, so that less passes between warps.
        of_row, of_column = (_Q_INDEX, _K_INDEX) if transposed else (_K_INDEX, _Q_INDEX)
        if of_row not in inputs:
            lines.append("gradient = tl.sum(gradient, 1)[:, None]")
        if of_column not in inputs:
            lines.append("gradient = tl.sum(gradient, 0)[None, :]")
        of_place = writer
        if {_Q_INDEX, _K_INDEX} <= inputs and by_distance.issuperset(indices):
            # The entry of a diagonal is that of any of its pairs, such as one with the first query.
            own = {_Q_INDEX: "first_q", _K_INDEX: "diagonal"}
            needed = gradient.program.needed_for(indices)
            of_place = ScoreWriter(gradient.program, only=needed, names=own, prefix="of_diagonal")
            lines += ["gradient, diagonal = diagonal_sums(gradient, first_k)", *of_place.lines]
        lines.append("zeros = tl.zeros_like(gradient).to(tl.int32)")
        offset, inside = "zeros", "zeros == 0"
        if indices:
            more, place, within = of_place.place(captured, indices, "at")
            lines += more
            offset, inside = f"{place} + zeros", f"{within} & (zeros == 0)"
        added = [offset, "gradient", inside]
        if in_order and of_row not in inputs:  # a column `[M, 1]`, which is added as one row
            added = [f"tl.trans({each})" for each in added]
        lines.append(f"{'add_in_order' if in_order else 'add_to_entries'}({total}, {', '.join(added)})")
    return lines


@functools.lru_cache(maxsize=1024)
def tile_reads(text: str | None) -> tuple[torch.dtype, ...]:
    """The dtypes of what a function reads for each score, which Triton loads ahead as it does a bias."""
    if text is None:
        return ()
    program, both = parse(text), {_Q_INDEX, _K_INDEX}
    inputs = program.value_inputs
    return tuple(getattr(torch, step.dtype) for name, step in program.loads if both <= inputs[name])


@functools.lru_cache(maxsize=1024)
def reads_by_key(text: str) -> bool:
    """Whether a function reads entries of captured tensors that differ from key to key."""
    program = parse(text)
    inputs = program.value_inputs
    return any(_K_INDEX in inputs[name] for name, _ in program.loads)


#: Steps of a score function up to which its intermediate values take few registers. ALiBi has four.
_FEW_STEPS = 4

#: Operations that count as several steps. `score * sin(0.1 * score)` would have three. Milliseconds with that and with
#: this count (H100, 8,192 tokens, causal, 16 heads of 64 and of 128): Hopper forward 1.79 and 2.00, now 1.08 and 1.28;
#: portable forward 1.30 and 1.36, now 1.29 and 1.44; portable backward 3.29 and 6.68, now 3.39 and 5.89.
_MANY_STEPS = {"sin": 5, "cos": 5, "erf": 5}


def tile_values(text: str | None) -> tuple[torch.dtype, ...]:
    """The dtypes of what a function holds for each score beside it: what it reads, or of many steps the results."""
    reads = tile_reads(text)
    return reads if text is None or reads or tile_steps(text) <= _FEW_STEPS else (torch.float32,)


@functools.lru_cache(maxsize=1024)
def tile_steps(text: str) -> int:
    """How many steps of a function are computed for each score: those that the score or both indices have a part in."""
    program = parse(text)
    inputs = program.value_inputs
    return sum(
        _MANY_STEPS.get(step.name, 1)
        for name, step in named_steps(program.steps).items()
        if _SCORE in inputs[name] or {_Q_INDEX, _K_INDEX} <= inputs[name]
    )


def _source(name: str, arguments: str, lines: Sequence[str]) -> str:
    return f"def {name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines)


def compiled(source: str, jit: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    """A function of a name of its own: Triton tells constant functions apart by name. `names`: what its source uses."""
    source = source.strip()
    name = f"{source[4 : source.index('(')]}_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    source = f"@jit\ndef {name}{source[source.index('(') :]}"
    filename = f"<flashtile {name}>"
    # Triton and tracebacks read it there; without a time of change it stays.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {**names, "jit": jit, "__name__": __name__}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]
