"""The cases that every backend of the rotation must get right: features alone and in pairs, and the edges of sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_close
from support.running.covering import combined_cases


@dataclass(frozen=True)
class RotaryCase:
    """One call. `layout` is "x", "qkv", "grouped" (qkv of unequal heads) or "kv".

    `lengths` are those of packed sequences; `offsets` an int or one for each sequence. `ids`: a position for each row,
    of "each" sequence, of all alike ("one"), or of "packed" rows.
    """

    layout: str = "x"
    batch: int = 2
    seq: int = 7
    heads: int = 3
    head_dim: int = 24
    rotary_dim: int = 24
    dtype: torch.dtype = torch.float32
    table_dtype: torch.dtype = torch.float32
    interleaved: bool = False
    inplace: bool = False
    conjugate: bool = False
    xpos: bool = False
    offsets: int | tuple[int, ...] = 0
    lengths: tuple[int, ...] | None = None
    ids: str = ""


def _inputs(case: RotaryCase, device: str) -> tuple[Tensor, Tensor]:
    layouts = {"x": (case.heads,), "qkv": (3, case.heads), "grouped": (case.heads + 2,), "kv": (2, case.heads)}
    heads = layouts[case.layout]
    # One row more than the sequences own.
    rows = (case.batch, case.seq) if case.lengths is None else (sum(case.lengths) + 1,)
    rows = (case.batch * case.seq,) if case.ids == "packed" else rows
    generator = torch.Generator().manual_seed(0)
    x, dout = (
        torch.randn(*rows, *heads, case.head_dim, generator=generator, dtype=torch.float64).to(case.dtype).to(device)
        for _ in range(2)
    )
    return x, dout


def run(case: RotaryCase, backend: str, dtype: torch.dtype | None, device: str) -> dict[str, Tensor]:
    """out and dx; `dtype` casts x and the tables first."""
    x, dout = _inputs(case, device)
    tables = flashtile.rotary_tables(64, case.rotary_dim, device=device, dtype=case.table_dtype)
    keys = tuple(2 * t for t in tables) if case.xpos else (None, None)
    if dtype is not None:
        x, dout, tables = x.to(dtype), dout.to(dtype), tuple(t.to(dtype) for t in tables)
        keys = tuple(None if t is None else t.to(dtype) for t in keys)
    leaf = x.requires_grad_()
    x = leaf * 1  # in place on a leaf is an error
    options: dict = {"interleaved": case.interleaved, "inplace": case.inplace, "backend": backend}
    options["seqlen_offsets"] = (
        torch.tensor(case.offsets, device=device) if isinstance(case.offsets, tuple) else case.offsets
    )
    if case.ids:
        shape = {"each": (case.batch, case.seq), "one": (1, case.seq), "packed": (case.batch * case.seq,)}[case.ids]
        ids = torch.randint(64, (*shape, 2), generator=torch.Generator().manual_seed(1))
        options["position_ids"] = ids.to(device)[..., 0]  # not contiguous
    if case.lengths is not None:
        options["cu_seqlens"] = torch.tensor([0, *case.lengths], device=device).cumsum(0).int()
    if case.layout == "x":
        out = flashtile.apply_rotary(x, *tables, conjugate=case.conjugate, **options)
    elif case.layout == "kv":
        out = flashtile.apply_rotary_kv(x, *tables, **options)
    else:
        heads_q = case.heads if case.layout == "grouped" else None
        out = flashtile.apply_rotary_qkv(x, *tables, *keys, num_heads_q=heads_q, **options)
    assert (out is x) is case.inplace
    (dx,) = torch.autograd.grad(out, leaf, dout)
    return {"out": out.detach(), "dx": dx}


def check(case: RotaryCase, backend: str, device: str = "cpu") -> None:
    """Asserts that a backend's forward and backward of a case agree with the fp64 oracle."""
    actual = run(case, backend, None, device)
    oracle = run(case, "reference", torch.float64, device)
    eager = run(case, "reference", None, device)
    for name, value in actual.items():
        assert_close(f"{case}: {name}", value, oracle[name], eager[name])


_BASE = RotaryCase()
_FEATURES: dict[str, dict] = {
    "interleaved": {"interleaved": True},
    "inplace": {"inplace": True},
    "partial": {"rotary_dim": 10},
    "narrow": {"dtype": torch.float16},
    "tables": {"table_dtype": torch.float16},
    "offset int": {"offsets": 5},
    "offset tensor": {"offsets": (9, 2)},
    "packed": {"lengths": (4, 6)},
    "offset ids": {"ids": "each"},
    "layout conjugate": {"conjugate": True},
    "layout qkv": {"layout": "qkv"},
    "layout xpos": {"layout": "qkv", "xpos": True},
    "layout grouped": {"layout": "grouped", "xpos": True},
    "layout kv": {"layout": "kv"},
}


def _compatible(first: str, second: str) -> bool:
    return first.split()[0] != second.split()[0] and {first, second} != {"offset ids", "packed"}


_ALONE = {"plain": _BASE} | {name: replace(_BASE, **change) for name, change in _FEATURES.items()}
PAIRS = _ALONE | {
    f"{first}+{second}": replace(_BASE, **_FEATURES[first], **_FEATURES[second])
    for first, second in combinations(_FEATURES, 2)
    if _compatible(first, second)
}
#: Every pair in fewer cases, for tests that take long.
COMBINED = _ALONE | combined_cases(
    _BASE, list(_FEATURES), lambda case, name: replace(case, **_FEATURES[name]), _compatible
)

EDGES = {
    "no_pairs": replace(_BASE, rotary_dim=0),
    "no_pairs_inplace": replace(_BASE, rotary_dim=0, inplace=True),
    "one_pair": replace(_BASE, head_dim=3, rotary_dim=2),
    "no_rows": replace(_BASE, seq=0),
    "no_batch": replace(_BASE, batch=0),
    "one_row": replace(_BASE, seq=1, batch=1, offsets=63),
    "empty_sequences": replace(_BASE, lengths=(0, 5, 0, 0, 3, 0), offsets=(1, 2, 3, 4, 5, 6)),
    "ids_of_all": replace(_BASE, ids="one"),
    "ids_packed": replace(_BASE, ids="packed", inplace=True),
    "ids_packed_qkv": replace(_BASE, ids="packed", layout="grouped", xpos=True),
    "ids_of_no_rows": replace(_BASE, ids="each", seq=0),
    "no_sequences": replace(_BASE, lengths=()),
    "many_sequences": replace(_BASE, lengths=(1,) * 300, heads=1, head_dim=4, rotary_dim=4),
    "many_heads": replace(_BASE, heads=40, seq=3, interleaved=True),
    "wide": replace(_BASE, head_dim=256, rotary_dim=256),
    "partial_wide": replace(_BASE, head_dim=192, rotary_dim=64),
}


def parameters(cases: dict[str, RotaryCase]) -> list:
    return [pytest.param(case, id=name.replace(" ", "_")) for name, case in cases.items()]
