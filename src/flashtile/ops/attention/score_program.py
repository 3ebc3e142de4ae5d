"""A score function as a list of steps: what `score_mod` becomes before a backend sees it.

A step is an elementwise operation of PyTorch on scalars, a constant, a cast, or a read of a captured tensor by indices.
It names its arguments: `%score`, `%batch`, `%head`, `%q_index`, `%k_index`, in a derivative also `%upstream`, and `%0`,
`%1`, ... for the results of earlier steps. `score_tracing` makes programs from Python functions.

The list is canonical text as well (`ScoreProgram.text`), an argument of the operators and the key of kernels. It
travels in exported programs, so it may come from anywhere: what it names is looked up here and nowhere else.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: The arguments of a score function, and what they are called in a program.
INPUTS = ("%score", "%batch", "%head", "%q_index", "%k_index")
UPSTREAM = "%upstream"
_SCORE, _BATCH, _HEAD, _Q_INDEX, _K_INDEX = INPUTS

#: Steps that are no operation of PyTorch: `load` (number of the captured tensor, indices), `constant` (value),
#: `cast` (value).
LOAD, CONSTANT, CAST = "load", "constant", "cast"

#: Dtypes of captured tensors, and of tensors that index them.
CAPTURED_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

#: A program longer than this is refused. Every tile keeps all values, and kernels have a line for each.
MOST_STEPS = 4096
_MOST_CHARACTERS = 2**20


class Step(NamedTuple):
    """One result of a program.

    Attributes:
        operation: LOAD, CONSTANT, CAST, or the full name of an overload, such as "aten.mul.Tensor".
        arguments: names of values, and numbers, booleans, None or options in words.
        keywords: pairs of a name and an argument.
        dtype: of the result, such as "float32".
    """

    operation: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    dtype: str

    @property
    def name(self) -> str:
        """The operation without its library and overload, such as "mul"; "" for what is none of PyTorch's."""
        return self.operation.split(".")[1] if "." in self.operation else ""

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the values that it takes."""
        return tuple(filter(is_value, (*self.arguments, *(of for _, of in self.keywords))))

    def renamed(self, name: Callable[[Any], Any]) -> Step:
        """The same step of other arguments."""
        keywords = tuple((key, name(value)) for key, value in self.keywords)
        return self._replace(arguments=tuple(map(name, self.arguments)), keywords=keywords)


class ScoreProgram(NamedTuple):
    """A function of (score, batch, head, q_index, k_index) and of captured tensors. `captured`: dtype and number of
    dimensions of each captured tensor. `steps`: in the order of computation; each one contributes to a result.
    `results`: names of values. A score function has one, in the dtype of the score."""

    captured: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]

    @property
    def text(self) -> str:
        return json.dumps(self, separators=(",", ":"))

    @property
    def loads(self) -> tuple[tuple[str, Step], ...]:
        """The names and steps of all reads of captured tensors."""
        return tuple((name, step) for name, step in named_steps(self.steps).items() if step.operation == LOAD)

    @property
    def value_inputs(self) -> dict[str, frozenset[str]]:
        """For each value by its name, the arguments of the function that it depends on."""
        found = {name: frozenset((name,)) for name in (*INPUTS, UPSTREAM)}
        for name, step in named_steps(self.steps).items():
            found[name] = frozenset().union(*(found[value] for value in step.values))
        return found

    @property
    def by_distance(self) -> frozenset[str]:
        """The names of the values that depend on a query and a key by their difference alone, and on no score."""
        found = {_BATCH, _HEAD}
        for name, step in named_steps(self.steps).items():
            is_difference = step.name in ("sub", "rsub") and {*step.arguments} == {_Q_INDEX, _K_INDEX}
            if is_difference or found.issuperset(step.values):
                found.add(name)
        return frozenset(found)

    @property
    def early_loads(self) -> tuple[str, ...]:
        """The names of the reads that do not depend on the score."""
        inputs = self.value_inputs
        return tuple(name for name, _ in self.loads if inputs[name].isdisjoint((_SCORE, UPSTREAM)))

    def needed_for(self, values: Iterable[str]) -> set[str]:
        """These values, and all that they are computed from."""
        needed = set(values)
        for name, step in reversed(named_steps(self.steps).items()):
            if name in needed:
                needed.update(step.values)
        return needed


def named_steps(steps: Sequence[Step]) -> dict[str, Step]:
    """The steps by the names of their results."""
    return {f"%{number}": step for number, step in enumerate(steps)}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: The program of a function that returns the score as it is.
UNCHANGED = ScoreProgram((), (), INPUTS[:1]).text


class ScoreFunction(NamedTuple):
    """A score function that has been traced, and may be passed as `score_mod`; `flashtile.trace_score_mod` makes one.

    Attributes:
        program: what it computes, as text.
        captured: the tensors that it reads.
        dtype: of the scores: float32, for float64 inputs float64.
    """

    program: str
    captured: tuple[Tensor, ...]
    dtype: torch.dtype


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> ScoreProgram:
    """The program of a text, which may come from anywhere. Raises ValueError unless each step is an elementwise
    operation or a read of a captured tensor."""
    try:
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"expected at most {_MOST_CHARACTERS} characters, got {len(text)}")
        captured, steps, results = json.loads(text)
        program = ScoreProgram(
            tuple((dtype, dims) for dtype, dims in captured),
            tuple(
                Step(operation, tuple(arguments), tuple((name, value) for name, value in keywords), dtype)
                for operation, arguments, keywords, dtype in steps
            ),
            tuple(results),
        )
        _check_program(program)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"score program: {error}; programs are what flashtile.trace_score_mod makes of a function, unchanged"
        ) from None
    return program


def _check_program(program: ScoreProgram) -> None:
    """Refuses what `trace_score_mod` would not have made."""
    dtypes = dict(zip(INPUTS, ("float32", *["int32"] * 4)))
    known_dtypes, index_dtypes = (set(map(dtype_name, each)) for each in (CAPTURED_DTYPES, INDEX_DTYPES))
    if len(program.steps) > MOST_STEPS:
        raise ValueError(f"expected at most {MOST_STEPS} steps, got {len(program.steps)}")
    for dtype, dims in program.captured:
        if dtype not in known_dtypes or type(dims) is not int or dims < 0:
            raise ValueError(f"expected dtype and number of dimensions of a captured tensor, got {(dtype, dims)!r:.80}")
    for number, step in enumerate(program.steps):
        arguments, place = step.arguments, f"step {number}"
        if step.dtype not in known_dtypes:
            raise ValueError(f"expected a dtype in {place}, got {step.dtype!r:.80}")
        if step.operation == LOAD:
            captured, *indices = arguments
            if type(captured) is not int or not 0 <= captured < len(program.captured):
                raise ValueError(f"expected the number of a captured tensor in {place}, got {captured!r:.80}")
            if (step.dtype, len(indices)) != program.captured[captured]:
                raise ValueError(f"expected as many indices in {place} as the captured tensor has dimensions")
            fits = all(dtypes.get(index) in index_dtypes for index in indices)
        elif step.operation == CONSTANT:
            fits = len(arguments) == 1 and is_number(arguments[0])
        elif step.operation == CAST:
            fits = len(arguments) == 1 and arguments[0] in dtypes
        else:
            check_operands(step.operation, arguments, step.keywords, dtypes)
            fits = True
        if not fits or (step.keywords and not step.name):
            raise ValueError(f"expected the arguments of {step.operation!r} in {place}, got {arguments!r:.80}")
        dtypes[f"%{number}"] = step.dtype
    if len(program.results) != 1 or program.results[0] not in dtypes:
        raise ValueError(f"expected one value as the result, got {program.results!r:.80}")


@functools.lru_cache(maxsize=1024)
def _check_captured(text: str, found: tuple[tuple[str, int], ...]) -> None:
    expected = parse(text).captured
    if found != expected:
        raise ValueError(
            f"score program: expected captured tensors of these dtypes and dimensions, {list(expected)}, got "
            f"{list(found)}; pass a program with the tensors that flashtile.trace_score_mod returned with it"
        )


def check_captured(text: str, captured: Sequence[Tensor]) -> None:
    """Refuses tensors that are not those that a program says it reads. Kernels take their addresses."""
    _check_captured(text, tuple((dtype_name(tensor.dtype), tensor.dim()) for tensor in captured))


class ProgramBuilder:
    """New steps out of those of another program. `captured`: numbers there of the tensors that they read. `names`: what
    values of the other program are called here."""

    def __init__(
        self, source: Sequence[Step], captured: Sequence[int] = (), replaced: Mapping[str, str] | None = None
    ) -> None:
        """`replaced`: values of the other program that stand for others of it."""
        self._source, self._replaced = named_steps(source), replaced or {}
        self.steps: list[Step] = []
        self.captured = list(captured)
        self.names: dict[str, str] = {}

    def copied(self, *values: str) -> tuple[str, ...]:
        """The values of the same meaning here, with the steps that they need."""
        needed, open_names = set(), [self._resolved(value) for value in values]
        while open_names:
            if (value := self._resolved(open_names.pop())) in self._source and value not in needed:
                needed.add(value)
                open_names += self._source[value].values
        for value, step in self._source.items():
            if value in needed and value not in self.names:
                self.names[value] = self._copy(step)
        return tuple(map(self._named, values))

    def step(self, operation: str, arguments: tuple[Any, ...], dtype: str) -> str:
        """Adds a step. Returns the name of its result."""
        return self._added(Step(operation, arguments, (), dtype))

    def _copy(self, step: Step) -> str:
        step = step.renamed(self._named)
        if step.operation == LOAD:
            number, *indices = step.arguments
            if number not in self.captured:
                self.captured.append(number)
            step = step._replace(arguments=(self.captured.index(number), *indices))
        return self._added(step)

    def _added(self, step: Step) -> str:
        self.steps.append(step)
        return f"%{len(self.steps) - 1}"

    def _resolved(self, name: str) -> str:
        while name in self._replaced:
            name = self._replaced[name]
        return name

    def _named(self, argument: Any) -> Any:
        if not is_value(argument):
            return argument
        name = self._resolved(argument)
        return self.names.get(name, name)


@functools.lru_cache(maxsize=1024)
def moved(text: str) -> tuple[str, tuple[int, ...]]:
    """The same function counted from another place: the program reads one more captured scalar, int32, for each index
    that it uses, and adds it. Returns their numbers among (batch, head, q_index, k_index)."""
    program = parse(text)
    used = {*program.results, *(value for step in program.steps for value in step.values)}
    places = tuple(number for number, name in enumerate(INPUTS[1:]) if name in used)
    first = len(program.captured)
    builder = ProgramBuilder(program.steps, range(first))
    added = {}
    for extra, number in enumerate(places):
        start = builder.step(LOAD, (first + extra,), "int32")
        added[INPUTS[1 + number]] = builder.step("aten.add.Tensor", (INPUTS[1 + number], start), "int32")
    builder.names |= added
    results = builder.copied(*program.results)
    captured = (*program.captured, *[("int32", 0)] * len(places))
    return ScoreProgram(captured, tuple(builder.steps), results).text, places


def is_value(argument: Any) -> bool:
    """Whether an argument of a step names a value."""
    return isinstance(argument, str) and argument.startswith("%")


def run(
    program: ScoreProgram, inputs: Mapping[str, Tensor], load: Callable[[str, Step, Sequence[Tensor]], Tensor]
) -> dict[str, Tensor]:
    """All values of a program by name.

    Args:
        inputs: tensors that broadcast to one another, all with the same number of dimensions, so that PyTorch promotes
            their dtypes as it does those of scalars.
        load: gives the value of a read from its name, its step and its indices.
    """
    values = dict(inputs)
    ones = (1,) * inputs[INPUTS[0]].dim()

    def resolved(argument: Any) -> Any:
        return values[argument] if is_value(argument) else argument

    for number, step in enumerate(program.steps):
        name, dtype = f"%{number}", getattr(torch, step.dtype)
        if step.operation == LOAD:
            values[name] = load(name, step, [values[index] for index in step.arguments[1:]])
        elif step.operation == CONSTANT:
            values[name] = torch.full(ones, step.arguments[0], dtype=dtype, device=inputs[INPUTS[0]].device)
        elif step.operation == CAST:
            values[name] = values[step.arguments[0]].to(dtype)
        else:
            arguments = map(resolved, step.arguments)
            values[name] = operator(step.operation)(*arguments, **{key: resolved(of) for key, of in step.keywords})
    return values


def apply(
    program: ScoreProgram, inputs: Mapping[str, Tensor], captured: Sequence[Tensor], visible: Tensor | None = None
) -> Tensor:
    """The scores that a score function makes of a tile; NaN where it reads outside of a captured tensor.

    Differentiable in the score and the captured tensors. Elements that are not `visible` (None = all are) have no
    gradient, and any value.
    """
    outside: list[Tensor] = []

    def shown(value: Tensor) -> Tensor:
        return value if visible is None or not value.is_floating_point() else torch.where(visible, value, 0)

    def load(name: str, step: Step, indices: Sequence[Tensor]) -> Tensor:
        value, misses = read(captured[step.arguments[0]], indices, inputs[INPUTS[0]].dim())
        if misses is not None:
            outside.append(misses)
        return shown(value)

    inputs = {**inputs, INPUTS[0]: shown(inputs[INPUTS[0]])}
    result = run(program, inputs, load)[program.results[0]]
    for misses in outside:
        result = result.masked_fill(misses, float("nan"))
    return result.broadcast_to(torch.broadcast_shapes(result.shape, inputs[INPUTS[0]].shape))


def read(tensor: Tensor, indices: Sequence[Tensor], dims: int) -> tuple[Tensor, Tensor | None]:
    """Entries of a tensor, and where the indices lie outside of it (None where that cannot be). Negative indices count
    from the end. `dims`: of the tile."""
    if not indices:
        return tensor.reshape((1,) * dims), None
    places, misses = _places(tensor, indices)
    if tensor.numel() == 0:
        return tensor.new_zeros(misses.shape), misses
    return tensor[places], misses


def add_at(total: Tensor, indices: Sequence[Tensor], values: Tensor, factor: float) -> None:
    """Adds `factor` times values to the entries that `read` reads for these indices, in a fixed order, in place."""
    if not indices:
        total.add_(values.sum(), alpha=factor)
        return
    if total.numel() == 0:
        return
    places, misses = _places(total, indices)
    # If an index is the same for many elements of the tile, these are summed first.
    values = values.masked_fill(misses, 0)
    shape = torch.broadcast_shapes(*(place.shape for place in places))
    values = values.broadcast_to(torch.broadcast_shapes(values.shape, shape)).sum_to_size(shape)
    flat = sum(place * stride for place, stride in zip(places, total.stride()))
    assert isinstance(flat, Tensor)
    # In one dimension PyTorch's CPU adds one element after another.
    total.view(-1).index_add_(0, flat.broadcast_to(shape).reshape(-1), values.reshape(-1), alpha=factor)


def _places(tensor: Tensor, indices: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Indices between 0 and the last one of each dimension, and which of the given ones were not."""
    places, misses = [], None
    for index, size in zip(indices, tensor.shape):
        index = index.long()
        index = torch.where(index < 0, index + size, index)
        misses_here = (index < 0) | (index >= size)
        misses = misses_here if misses is None else misses | misses_here
        places.append(index.clamp(0, max(0, size - 1)))
    assert misses is not None
    return tuple(places), misses


#: Names of elementwise operations. PyTorch's tag `pointwise` has more, such as random numbers.
_LIST = """
    __lshift__ __rshift__ __xor__ abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min
    conj_physical copysign cos cosh deg2rad digamma div elu eq erf erfc erfinv exp exp2 expm1 float_power floor
    floor_divide fmax fmin fmod frac gcd ge gelu gelu_backward gt hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp lgamma log
    log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logit_backward lt
    masked_fill maximum minimum mish mul mvlgamma nan_to_num ne neg nextafter polygamma pow rad2deg reciprocal relu
    relu6 remainder round rsqrt rsub selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh
    softplus softshrink special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_xlog1py
    special_zeta sqrt square sub tan tanh tanh_backward threshold threshold_backward true_divide trunc where xlogy
"""
_NAMES = frozenset(_LIST.split())
_aten = torch.ops.aten
#: Elementwise forms that PyTorch, or some version of it, does not tag as such.
_UNTAGGED = {
    _aten.floor_divide.default, _aten.floor_divide.Scalar, _aten.hardswish.default, _aten.leaky_relu.default,
}  # fmt: skip

#: The options in words that these operations have.
_WORDS = {"floor", "trunc", "none", "tanh"}
_NUMBERS = {"number": (bool, int, float), "float": (bool, int, float), "int": (bool, int), "bool": (bool,)}
_LARGEST_INTEGER = 2**63 - 1
#: The largest order or digit, `int` in a signature: the memory that `mvlgamma` takes grows with its order.
_LARGEST_ORDER = 64


def is_elementwise(func: Any) -> bool:
    """Whether an overload of PyTorch may be a step: one result, element by element, and nothing changed."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and func._schema.name.removeprefix("aten::") in _NAMES
        and (torch.Tag.pointwise in func.tags or func in _UNTAGGED)
        and not func._schema.is_mutable
    )


@functools.lru_cache(maxsize=1024)
def operator(name: str) -> Callable[..., Any]:
    """The overload that a step names, such as "aten.mul.Tensor". Raises ValueError if no step may be that."""
    library, _, rest = name.partition(".")
    operation, _, overload = rest.partition(".")
    if library == "aten" and operation in _NAMES:
        packet = getattr(_aten, operation)
        found = getattr(packet, overload) if overload in packet.overloads() else None
        if is_elementwise(found):
            return found  # type: ignore[return-value]
    raise ValueError(f"expected an elementwise operation of PyTorch that score functions may use, got {name[:80]!r}")


def check_operands(
    name: str, arguments: Sequence[Any], keywords: Sequence[tuple[str, Any]], values: Container[str]
) -> None:
    """ValueError if arguments do not fit the overload's signature. `values`: names known before this step."""
    signature = operator(name)._schema.arguments  # type: ignore[attr-defined]
    positional = [argument for argument in signature if not argument.kwarg_only]
    given = {argument.name: value for argument, value in zip(positional, arguments)}
    named = dict(keywords)
    twice = len(named) != len(keywords) or given.keys() & named
    if len(arguments) > len(positional) or twice or named.keys() - {argument.name for argument in signature}:
        raise ValueError(f"expected the arguments of {name}, got others, more, or one twice")
    given |= named
    for argument in signature:
        if argument.name in given:
            _check_operand(f"{argument.name} of {name}", str(argument.type), given[argument.name], values)
        elif not argument.has_default_value():
            raise ValueError(f"expected {argument.name} of {name}, got none")


def _check_operand(what: str, kind: str, given: Any, values: Container[str]) -> None:
    if kind.startswith("Optional["):
        if given is None:
            return
        kind = kind.removeprefix("Optional[").removesuffix("]")
    if kind == "str":
        fits = isinstance(given, str) and given in _WORDS
    elif kind == "Tensor":  # PyTorch takes numbers there too
        fits = given in values if isinstance(given, str) else is_number(given)
    else:
        fits = kind in _NUMBERS and is_number(given) and isinstance(given, _NUMBERS[kind])
        fits = fits and (kind != "int" or abs(given) <= _LARGEST_ORDER)
    if not fits:
        raise ValueError(f"expected {kind} as {what}, got {str(given)[:80]!r}")


def is_number(given: Any) -> bool:
    """Whether an argument is a number that PyTorch can hold."""
    return isinstance(given, float) or (isinstance(given, int) and abs(given) <= _LARGEST_INTEGER)
