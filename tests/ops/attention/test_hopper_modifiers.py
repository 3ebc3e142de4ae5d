"""What changes scores and weights in the Hopper kernels, piece by piece: run on a CPU by tests/gluon_emulator, and
compiled for the instructions that it becomes."""

from __future__ import annotations

import collections
import random
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from support.compilation import needs_triton  # noqa: F401

# isort: split
import triton

from flashtile._backends import devices
from flashtile._backends.gluon import gl, gluon
from flashtile._backends.launch import Parameter, pointer_to, specialise
from flashtile.ops.attention.gpu.parameters import DropoutNumbers, TableNumbers, side_parameters
from flashtile.ops.attention.hopper.modifiers import head_dropout, kept_weights
from flashtile.ops.attention.hopper.primitives import product_layout
from flashtile.ops.attention.philox import keep_threshold, keep_tile
from flashtile.ops.attention.spec import Origin
from gluon_emulator import EmulatedHopper
from gluon_emulator.machine import Machine
from gluon_emulator.memory import Memory, dtype_of
from gluon_emulator.values import Pointer, Value, as_value
from support.compilation.machine_code import Call, compile_source, described_call, instructions

_SM_90 = devices.KNOWN_DEVICES["sm_90"]
_MODULES = EmulatedHopper(multiprocessors=1, seed=0).modules


def _emulate(body: Callable[[], Value], *tensors: torch.Tensor) -> torch.Tensor:
    """What `body` returns when four warps run it that may read `tensors`."""
    memory, results = Memory(), []
    memory.know(*tensors)
    Machine(memory, random.Random(0), 1).run(1, 4, lambda: results.append(body().data))
    return results[0]


def _pointer(tensor: torch.Tensor) -> Value:
    return Value(torch.tensor(tensor.data_ptr()), Pointer(dtype_of(tensor.dtype)))


@pytest.mark.parametrize("transposed", [False, True], ids=["scores", "transposed"])
@pytest.mark.parametrize("rows, columns, origin", [(64, 128, None), (128, 64, None), (64, 16, (48, 32, 5, 9))], ids=str)
def test_dropout_keeps_what_the_definition_keeps(rows, columns, origin, transposed):
    module = _MODULES["modifiers"]
    queries, keys = (columns, rows) if transposed else (rows, columns)
    seed, p, first_query, first_key = torch.tensor([0x9ABCDEF0, 0x87654321]), 0.3, 192, 320
    row, column, matrix, heads = origin or (None,) * 4

    def kept() -> Value:
        side = SimpleNamespace(dropout_seed=_pointer(seed))
        numbers = SimpleNamespace(
            dropout=DropoutNumbers(as_value(keep_threshold(p)), 1 / (1 - p)),
            origin=Origin(row, column, None, matrix, heads),  # type: ignore[arg-type]
        )
        head = module.head_dropout(side, numbers, as_value(2), as_value(1), 4)
        tile = as_value(first_query), as_value(first_key), queries, keys, "layout", transposed
        return module.kept_weights(head, *tile)

    row, column, matrix, heads = origin or (0, 0, 0, 4)
    first_row, first_column = first_query + row, first_key + column
    expected = keep_tile(
        seed, p, torch.tensor([matrix + 2 * heads + 1]), range(first_row, first_row + queries),
        range(first_column, first_column + keys),
    )[0]  # fmt: skip
    assert 0.5 < expected.float().mean() < 0.9
    assert torch.equal(_emulate(kept, seed), expected.mT if transposed else expected)


@gluon.jit
def _kept_kernel(
    side, out_ptr, numbers, query, key, heads,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = product_layout(COLUMNS)
    head = head_dropout(side, numbers, gl.program_id(0), gl.program_id(1), heads)
    QUERIES: gl.constexpr = COLUMNS if TRANSPOSED else ROWS
    KEYS: gl.constexpr = ROWS if TRANSPOSED else COLUMNS
    kept = kept_weights(head, query, key, QUERIES, KEYS, layout, TRANSPOSED)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    gl.store(out_ptr + (row * COLUMNS + column), kept.to(gl.float32))


@pytest.mark.parametrize("transposed", [False, True], ids=["scores", "transposed"])
@pytest.mark.parametrize("rows, columns", [(64, 128), (128, 64), (128, 128)], ids=str)
def test_random_words_are_computed_once_where_they_are_needed(rows, columns, transposed):
    """Seven rounds for four weights and ten for the head, and no word moves to another thread."""
    call = described_call("forward", Call(dropout_p=0.5, heads=1), _SM_90)
    described = side_parameters(call, covered=True, by_column=False)
    parameters = {
        "side": described.pointers,
        "out_ptr": pointer_to(torch.float32, 16),
        "numbers": described.numbers,
        **dict.fromkeys(("query", "key", "heads"), Parameter("i32")),
    }
    constants = {"ROWS": rows, "COLUMNS": columns, "TRANSPOSED": transposed}
    compiled = compile_source(specialise(_kept_kernel, parameters, constants, num_warps=4).source, _SM_90)
    text = instructions(compiled.asm)
    used = collections.Counter(re.findall(r"(IMAD\.WIDE|IMAD\.HI|SHFL|BAR|LDS|STS)\b", text))
    products = 7 * rows * columns // 4 // 128 + 20
    wide, halves = used.pop("IMAD.WIDE"), used.pop("IMAD.HI", 0)
    if triton.__version__.startswith("3.7."):  # it takes the halves of a product one by one
        wide, halves = wide + halves, 0
    assert 0.75 * products < wide < 1.05 * products and halves < 0.1 * products
    assert not used, "words move"


def _broadcast(shape: tuple[int, ...], sizes: tuple[int, ...]) -> SimpleNamespace:
    """A table of these sizes, what the kernels are told of it, and its tile in full."""
    table = torch.randn(sizes).to(torch.bfloat16)
    strides = [stride if size > 1 else 0 for size, stride in zip(sizes, table.stride())]
    return SimpleNamespace(table=table, strides=strides, full=table.expand(shape))


@pytest.mark.parametrize("transposed", [False, True], ids=["scores", "transposed"])
@pytest.mark.parametrize("sizes", [(2, 3, 100, 150), (1, 3, 100, 1), (2, 1, 1, 150), (1, 1, 1, 1)], ids=str)
def test_a_tile_of_a_table(sizes, transposed):
    """Past its end there is what the caller says, and a dimension of one is read once."""
    module, given = _MODULES["modifiers"], _broadcast((2, 3, 100, 150), sizes)
    batch, head, row, column = given.strides

    def tile() -> Value:
        ends = sizes[2] if row else None, sizes[3] if column else None
        numbers = TableNumbers(batch, head, row or None, *ends)
        pointer = module.head_table(_pointer(given.table), numbers, as_value(1), as_value(2))
        place = column, as_value(64), as_value(128), 64, 32
        return module.load_table(pointer, numbers, *place, SimpleNamespace(), float("inf"), transposed)

    read = _emulate(tile, given.table)
    read = read.expand(*((32, 8, 8) if transposed else (64, 4, 8))).flatten(1)
    shown = read.mT if transposed else read
    assert torch.equal(shown[:36, :22], given.full[1, 2, 64:, 128:])
    if row:
        assert (shown[36:] == float("inf")).all()
    if column:
        assert (shown[:, 22:] == float("inf")).all()
