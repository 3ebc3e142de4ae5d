"""The names of `flashtile._backends.gluon`, as functions that Python runs. Only what the Hopper kernels use is here."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from gluon_emulator import values
from gluon_emulator.machine import Barrier, NamedBarrier, Store, check_fenced, current
from gluon_emulator.memory import Descriptor, Shared
from gluon_emulator.values import Pointer, Value, as_value, binary, blockmask_layout, int1, int32, int64

SUMS_PASS_LOOPS = True
GluonASTSource = None


class _Int(int):
    value = property(int)


class _Float(float):
    value = property(float)


def _constexpr(number: Any) -> Any:
    """A number as it is, with `.value` as constants of a module have."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return number
    return _Int(number) if isinstance(number, int) else _Float(number)


def _jit(function: Callable) -> Callable:
    function.arg_names = list(inspect.signature(function).parameters)  # type: ignore[attr-defined]
    function.is_gluon = lambda: True  # type: ignore[attr-defined]
    return function


def aggregate(cls: type) -> type:
    return cls


# Layouts: only what kernels ask of them.


@dataclass(frozen=True)
class _Slice:
    dim: int
    parent: Any


@dataclass(frozen=True)
class _Operand:
    operand_index: int
    parent: Any
    k_width: int


class _Barriers:
    """The layout of barriers, and an array of them."""

    def __init__(self, count: int = 0) -> None:
        self._barriers = [Barrier() for _ in range(count)]

    def index(self, place: Any) -> Barrier:
        place = int(place)
        assert 0 <= place < len(self._barriers), "outside of the barriers"
        return self._barriers[place]


def _layout(kind: str) -> Callable[..., tuple]:
    return lambda *parameters: (kind, *map(repr, parameters))


# Tensors.


def _unary(function: Callable) -> Callable[[Value], Value]:
    return lambda x: Value(function(as_value(x).data), as_value(x).dtype, blockmask_layout(x))


def _where(condition: Any, yes: Any, no: Any) -> Value:
    dtype = values.common_dtype(yes, no)
    numbers = [as_value(each).number for each in (condition, yes, no)]
    if None not in numbers and not dtype.is_floating:
        return as_value(numbers[1] if numbers[0] else numbers[2], dtype)
    chosen = torch.where(as_value(condition).data, as_value(yes, dtype).data, as_value(no, dtype).data)
    return Value(chosen, dtype, blockmask_layout(yes, no, condition))


def _fma(a: Any, b: Any, c: Any) -> Value:
    """Rounded once."""
    wide = [as_value(each, values.float32).data.double() for each in (a, b, c)]
    return Value((wide[0] * wide[1] + wide[2]).float(), values.float32, blockmask_layout(a, b, c))


def _cast(x: Any, dtype: Any) -> Value:
    return as_value(x).to(dtype)


def _zeros_like(x: Value) -> Value:
    return _full(x.shape, 0, x.dtype, blockmask_layout(x))


def _extreme(whole: Callable, real: Callable) -> Callable[..., Value]:
    """The extreme of two operands; if one of two real ones is not a number, the other."""

    def choose(a: Any, b: Any) -> Value:
        return binary(real if values.common_dtype(a, b).is_floating else whole, a, b)

    return choose


def _reduction(function: Callable, skipped: float | None = None) -> Callable[..., Value]:
    """Along an axis; `skipped`: for numbers that are none."""

    def reduce(x: Value, axis: int) -> Value:
        data = x.data
        if skipped is not None and x.dtype.is_floating:
            data = torch.where(data.isnan() & ~data.isnan().all(axis, keepdim=True), skipped, data)
        reduced = function(data, axis)
        return Value(reduced, x.dtype, None if x._layout is None else _Slice(axis, x._layout))

    return reduce


def _sum(data: torch.Tensor, axis: int) -> torch.Tensor:
    return data.sum(axis, dtype=data.dtype)


def _arange(begin: int, end: int, layout: Any = None) -> Value:
    return Value(torch.arange(begin, end, dtype=torch.int32), int32, layout)


def _full(shape: Sequence[int], number: Any, dtype: Any, layout: Any = None) -> Value:
    return Value(as_value(number, dtype).data.expand(list(map(int, shape))).clone(), dtype, layout)


def _zeros(shape: Sequence[int], dtype: Any, layout: Any = None) -> Value:
    return _full(shape, 0, dtype, layout)


def _reshape(x: Value, shape: Sequence[int]) -> Value:
    return Value(x.data.reshape(list(map(int, shape))), x.dtype, ("reshaped",))


def _permute(x: Value, order: Sequence[int]) -> Value:
    return Value(x.data.permute(order), x.dtype, ("permuted",))


def _split(x: Value) -> tuple[Value, Value]:
    return tuple(Value(part, x.dtype) for part in x.data.unbind(-1))  # type: ignore[return-value]


def _join(a: Value, b: Value) -> Value:
    return Value(torch.stack((a.data, b.data), -1), a.dtype)


def _convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return x.with_layout(layout)


def _gather(x: Value, index: Value, axis: int) -> Value:
    return Value(x.data.gather(axis, index.data.long()), x.dtype, x._layout)


def _cdiv(a: Any, b: Any) -> Any:
    return (a + (b - 1)) // b


# Device memory.


def _access(pointer: Value, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses and mask in their common shape."""
    assert isinstance(pointer.dtype, Pointer)
    return torch.broadcast_tensors(pointer.data, as_value(mask).data)  # type: ignore[return-value]


def _load(pointer: Value, mask: Any = True, other: Any = None, volatile: bool = False) -> Value:
    if volatile:
        current().watch(int(pointer.data))
    addresses, where = _access(pointer, mask)
    dtype = pointer.dtype.element_ty
    data = current().machine.memory.load(addresses, dtype, where)
    if other is not None:
        data = torch.where(where, data, as_value(other, dtype).data)
    if not data.dim() and not dtype.is_floating:
        return as_value(data.item(), dtype)
    return Value(data, dtype, blockmask_layout(pointer, mask))


def _store(pointer: Value, value: Any, mask: Any = True) -> None:
    addresses, where = _access(pointer, mask)
    dtype = pointer.dtype.element_ty
    data = as_value(value, dtype).data
    addresses, where, data = torch.broadcast_tensors(addresses, where, data)
    current().machine.memory.store(addresses, data, dtype, where)


def _atomic_add(pointer: Value, value: Any, mask: Any = True, sem: str = "acq_rel") -> Value:
    current().let_others_run()
    addresses, where = _access(pointer, mask)
    dtype = pointer.dtype.element_ty
    return Value(current().machine.memory.add(addresses, as_value(value, dtype).data, dtype, where), dtype)


# Shared memory, copies and products.


def _allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    return _Barriers(shape[0]) if isinstance(layout, _Barriers) else Shared.allocate(dtype, shape, layout)


def _store_shared(place: Shared, value: Value) -> None:
    assert value.dtype is place.dtype and value.shape == place.shape, (value.shape, place.shape)
    current().write(place, value.data)


Shared.store = _store_shared  # type: ignore[attr-defined]


def reinterpret(tile: Shared, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
    return tile.reinterpret(dtype, shape, layout)


def fence_async_shared() -> None:
    current().fence()


def thread_barrier() -> None:
    current().let_others_run()


def tma_load(descriptor: Descriptor, coordinates: Sequence[Any], barrier: Barrier, target: Shared) -> None:
    current().machine.copy(descriptor, coordinates, barrier, target)


def tma_store(descriptor: Descriptor, coordinates: Sequence[Any], source: Shared) -> None:
    _start_store(descriptor, coordinates, source, torch.Tensor.copy_)


def tma_reduce_add(descriptor: Descriptor, coordinates: Sequence[Any], source: Shared) -> None:
    _start_store(descriptor, coordinates, source, torch.Tensor.add_)


def _start_store(descriptor: Descriptor, coordinates: Sequence[Any], source: Shared, write: Callable) -> None:
    assert source.shape == descriptor.block_shape and source.dtype is descriptor.dtype
    check_fenced(source)
    memory, (address, part) = current().machine.memory, descriptor.inside(coordinates)
    current().start_store(Store(source, lambda data: write(descriptor.find(memory, address, part), data[part])))


def tma_store_wait(pendings: int) -> None:
    current().wait_stores(pendings)


def warpgroup_mma(a: Any, b: Shared, acc: Value, use_acc: Any = True, is_async: bool = False) -> Value:
    assert is_async
    return current().start_product(a, b, acc, bool(use_acc))


def warpgroup_mma_init(value: Value) -> Value:
    return value


def warpgroup_mma_wait(num_outstanding: int, deps: Sequence[Value]) -> Any:
    settled = current().wait_products(num_outstanding, deps)
    return settled[0] if len(settled) == 1 else tuple(settled)


def _wait(barrier: Barrier, phase: Any) -> None:
    parity = int(phase)
    caller = inspect.currentframe().f_back  # type: ignore[union-attr]
    current().wait_barrier(barrier, parity, f"{caller.f_code.co_name}, line {caller.f_lineno}")  # type: ignore[union-attr]


def _expect(barrier: Barrier, count: int) -> None:
    barrier.expect(int(count))


def _arrive(barrier: Barrier, count: int = 1) -> None:
    """One thread for all, when all have come so far."""
    barrier.arrive(count)
    current().let_others_run()


def _every_thread_arrives(barrier: Barrier, increment_count: bool = True) -> None:
    assert not increment_count
    crew = current()
    if crew.copies:
        crew.arrive_after_copies(barrier)
    else:
        barrier.arrive(crew.threads)
    crew.let_others_run()


def _copy_to_shared(place: Shared, pointer: Value, mask: Any = True) -> None:
    """Elements at addresses, zeros where masked, to shared memory at some time from now on."""
    addresses, where = _access(pointer, mask)
    dtype, memory = pointer.dtype.element_ty, current().machine.memory
    assert place.shape == list(addresses.shape) and place.dtype is dtype
    current().start_copy(lambda: torch.where(where, memory.load(addresses, dtype, where), 0), place)


# Machine instructions that kernels write themselves.


def _inline_asm(asm: str, constraints: str, args: list, dtype: Any, is_pure: bool, pack: int) -> Any:
    function, found = _instruction(asm)
    return function(found, dtype, *args)


@functools.cache
def _instruction(asm: str) -> tuple[Callable, re.Match]:
    for pattern, function in _INSTRUCTIONS.items():
        found = re.search(pattern, asm)
        if found:
            return function, found
    raise NotImplementedError(f"what does this instruction do? {asm}")


def _static_assert(condition: Any) -> None:
    assert condition


def _converted(found: re.Match, dtype: Any, x: Value) -> Value:
    return x.to(dtype)


def _widened(found: re.Match, dtype: Any, words: Value, factor: Any = None) -> tuple[Value, ...]:
    """Four numbers of 8 bits in each word as two pairs of 16, which are words too."""
    kinds = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    numbers = words.data.contiguous().view(kinds.get(found["kind"] or "", torch.int8)).float()
    numbers = numbers.view(*words.shape, 4)
    if factor is not None:
        numbers = numbers * factor.data[..., None]
    pairs = numbers.to(torch.bfloat16 if found["wide"] == "bf16" else torch.float16).view(torch.int32)
    return tuple(Value(half, int32) for half in pairs.unbind(-1))


def _same(found: re.Match, dtype: Any, x: Value) -> Value:
    return x


def _tanh(found: re.Match, dtype: Any, x: Value) -> Value:
    return Value(torch.tanh(x.data), x.dtype, x._layout)


def _reciprocal(found: re.Match, dtype: Any, x: Value) -> Value:
    return Value(1.0 / x.data, x.dtype, x._layout)


def _multiplied_and_added(found: re.Match, dtype: Any, a: Value, b: Value, c: Value) -> Value:
    return a * b + c


def _stores_done(found: re.Match, dtype: Any, threads: Value) -> None:
    current().let_others_run()
    current().finish_stores()


def _products_done(found: re.Match, dtype: Any) -> None:
    current().wait_products(int(found[1]), [])


def _named_barrier(found: re.Match, dtype: Any) -> None:
    crew = current()
    barrier = crew.program.named_barriers.setdefault(int(found[2]), NamedBarrier())
    phase = barrier.phase
    barrier.arrive(crew.threads, int(found[3]))
    if found[1] == "sync":
        crew.wait(lambda: barrier.phase > phase, f"its turn, barrier {found[2]}")
    else:
        crew.let_others_run()


def _declare_flag(found: re.Match, dtype: Any) -> None:
    assert found[1] not in current().flags, "declared twice"
    current().flags[found[1]] = None


def _vote(found: re.Match, dtype: Any, sums: Value) -> Value:
    """The vote of all warps together: a warp that has nothing to do behind the branch does nothing there."""
    assert found[2] in current().flags, "not declared"
    current().flags[found[2]] = int((sums.data > float(found[1])).any())
    return sums


def _read_flag(found: re.Match, dtype: Any) -> Value:
    return as_value(current().flags[found[1]])


def _add_fragments(found: re.Match, dtype: Any, x: Value, address: Value) -> None:
    """Adds a block of a product to device memory, each thread its four numbers of every eight columns side by side:
    those of two rows, 8 apart, and two columns."""
    rows, columns = x.shape
    assert rows == 64 and current().warps == 4
    parts = x.data.view(4, 2, 8, columns // 8, 4, 2).permute(3, 0, 2, 4, 1, 5)
    places = int(address.data) + 4 * torch.arange(x.data.numel())
    everywhere = torch.ones(places.shape, dtype=torch.bool)
    current().machine.memory.add(places, parts.reshape(-1), values.float32, everywhere)
    current().let_others_run()


def _take_number(found: re.Match, dtype: Any, counter: Value) -> Value:
    assert current().warps == 1, "each warp would take one"
    return _atomic_add(counter, 1)


_INSTRUCTIONS = {
    r"(?s)(cvt\.rn\.f16x2\.(?P<kind>e\dm\d)x2|xor\.b32 all).*cvt\.rn\.(?P<wide>b?f16)x2\.f32": _widened,
    r"tanh\.approx\.f32": _tanh,
    r"rcp\.approx\.ftz\.f32": _reciprocal,
    r"fma\.rn\.f32": _multiplied_and_added,
    r"cvt\.rn\.\w+x2\.f32|shl\.b32 x|cvt\.f32\.f16": _converted,
    r"pmevent": _same,
    r"^add\.f32 ": lambda found, dtype, a, b: a + b,
    r"cp\.async\.bulk\.wait_group 0": _stores_done,
    r"wgmma\.wait_group\.sync\.aligned (\d+)": _products_done,
    r"barrier\.cta\.(sync|arrive)\.aligned (\d+), (\d+)": _named_barrier,
    r"\.reg \.b32 (flashtile_flag_\d)": _declare_flag,
    r"(?s)setp\.gt\.f32 above, largest, (\S+);.*vote\.sync\.any.*selp\.b32 (flashtile_flag_\d)": _vote,
    r"mov\.b32 \$0, (flashtile_flag_\d)": _read_flag,
    r"red\.relaxed\.gpu\.global\.add\.v4\.f32": _add_fragments,
    r"(?s)atom\.relaxed\.gpu\.global\.add\.u32 number,.*shfl\.sync\.idx": _take_number,
}

gluon = SimpleNamespace(jit=_jit, constexpr_function=lambda function: function)
async_copy = SimpleNamespace(
    mbarrier_arrive=_every_thread_arrives,
    async_copy_global_to_shared=_copy_to_shared,
    commit_group=lambda: None,
    wait_group=lambda left: current().finish_copies(),
)
mbarrier = SimpleNamespace(
    MBarrierLayout=_Barriers,
    init=lambda barrier, count: barrier.init(int(count)),
    wait=_wait,
    expect=_expect,
    arrive=_arrive,
)
gl = SimpleNamespace(
    constexpr=_constexpr, tensor=Value, shared_memory_descriptor=Shared, to_tensor=as_value,
    int1=int1, uint8=values.uint8, int8=values.int8, int16=values.int16, int32=int32, uint32=values.uint32, int64=int64,
    float16=values.float16, bfloat16=values.bfloat16, float32=values.float32, float64=values.float64,
    float8e4nv=values.float8e4nv,
    SliceLayout=_Slice, DotOperandLayout=_Operand, BlockedLayout=_layout("blocked"),
    NVMMADistributedLayout=_layout("product"), NVMMASharedLayout=_layout("swizzled"),
    SwizzledSharedLayout=_layout("shared"), DistributedLinearLayout=_layout("linear"),
    program_id=lambda axis: as_value(current().program.number),
    num_programs=lambda axis: as_value(current().machine.programs),
    num_warps=lambda: current().warps,
    static_range=range, static_assert=_static_assert,
    arange=_arange, full=_full, zeros=_zeros, reshape=_reshape, permute=_permute, split=_split, join=_join,
    convert_layout=_convert_layout, where=_where, gather=_gather, cdiv=_cdiv,
    exp2=_unary(torch.exp2), exp=_unary(torch.exp), log=_unary(torch.log), abs=_unary(torch.abs),
    log2=_unary(torch.log2), sqrt=_unary(torch.sqrt), sin=_unary(torch.sin), cos=_unary(torch.cos),
    erf=_unary(torch.erf), floor=_unary(torch.floor), ceil=_unary(torch.ceil),
    fma=_fma, cast=_cast, zeros_like=_zeros_like,
    maximum=_extreme(torch.maximum, torch.fmax), minimum=_extreme(torch.minimum, torch.fmin),
    sum=_reduction(_sum), max=_reduction(torch.amax, float("-inf")), min=_reduction(torch.amin, float("inf")),
    load=_load, store=_store, atomic_add=_atomic_add, inline_asm_elementwise=_inline_asm,
    allocate_shared_memory=_allocate_shared_memory,
    warp_specialize=lambda parts, warps, registers: current().machine.specialize(parts, warps),
)  # fmt: skip
