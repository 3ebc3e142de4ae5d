"""The backends that serve each feature of attention, by the code that chooses: the table of docs/attention.md.

    python tools/feature_matrix.py            # prints the table
    python tools/feature_matrix.py --write    # writes it into docs/attention.md

Each feature is a call, or several that must agree. `flashtile.explain` is asked, with the backend by name, whether it
serves the forward and whose kernels compute the gradients. A test holds the document to what this prints.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flashtile
from flashtile._backends import devices
from flashtile.ops.attention.call import Machine, describe_call
from flashtile.ops.attention.select import BACKENDS
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.testing import AttentionCase, make_inputs, with_arguments
from flashtile.testing.cases import learned_tensor

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "attention.md"
BEGIN = "<!-- Begin of what `python tools/feature_matrix.py --write` writes. -->\n"
END = "<!-- End of what `python tools/feature_matrix.py --write` writes. -->\n"

#: How much of a call a backend does, from nothing to everything.
NOTHING, FORWARD, EVERYTHING = "no", "forward¹", "yes"
ORDER = (NOTHING, FORWARD, EVERYTHING)

BASE = AttentionCase(heads=4, heads_kv=4, head_dim=64, head_dim_v=64, dtype=torch.bfloat16)
Change = Callable[[AttentionCase], AttentionCase]
#: A GPU that all backends for GPUs have kernels for.
GPU = "sm_90"


class Feature(NamedTuple):
    """A row of the table. `changes`: of the plain call; they must give the same cells. `apart`: labels of features with
    which the row below holds instead."""

    label: str
    changes: tuple[Change, ...]
    apart: tuple[str, ...] = ()


def _with(**changes: Any) -> Change:
    """A call with other attributes of a case, or with other arguments."""

    def changed(case: AttentionCase) -> AttentionCase:
        own = {name: value for name, value in changes.items() if hasattr(case, name)}
        rest = {name: value for name, value in changes.items() if name not in own}
        return with_arguments(replace(case, **own), **rest)

    return changed


def _heads(head_dim: int, head_dim_v: int, **more: Any) -> Change:
    return _with(head_dim=head_dim, head_dim_v=head_dim_v, **more)


def _bias(case: AttentionCase) -> AttentionCase:
    return replace(case, bias="1hqk" if case.packed else "bhqk")


#: Features without which the Hopper kernels serve wide heads, and float32.
_NOT_OF_WIDE_HEADS = (
    "`alibi_slopes`", "`alibi_slopes`, with gradient", "`bias`, with gradient", "`mask`", "`block_mask`", "`score_mod`",
    "`score_mod`, with gradients of captured tensors", "`dropout_p`",
)  # fmt: skip
_NOT_OF_FLOAT32 = (
    *_NOT_OF_WIDE_HEADS, "packed sequences", "`key_lengths`", "`softcap`", "`return_max_scores=True`",
    "`score_mod`, with gradients of captured tensors and `deterministic=True`",
)  # fmt: skip

FEATURES = (
    Feature("float16", (_with(dtype=torch.float16),)),
    Feature("bfloat16", (_with(dtype=torch.bfloat16),)),
    Feature(
        "float32",
        (_with(dtype=torch.float32),),
        (
            "float32 with heads of 65 to 512 columns",
            "head_dim a multiple of 8, up to 256, and another one of v",
            "head_dim up to 512",
        ),
    ),
    Feature(
        "float32 with heads of 65 to 512 columns",
        (
            _heads(192, 128, dtype=torch.float32),
            _heads(72, 512, dtype=torch.float32),
            _heads(512, 64, dtype=torch.float32),
        ),
        _NOT_OF_FLOAT32,
    ),
    Feature("float64", (_with(dtype=torch.float64),)),
    Feature(
        "head_dim a multiple of 8, up to 256, and another one of v", (_heads(64, 64), _heads(192, 128), _heads(8, 256))
    ),
    Feature("head_dim up to 256, not a multiple of 8, contiguous tensors", (_heads(20, 64), _heads(65, 64))),
    Feature("head_dim of v not a multiple of 8", (_heads(64, 20), _heads(20, 20))),
    Feature("head_dim up to 512", (_heads(512, 512), _heads(64, 264)), _NOT_OF_WIDE_HEADS),
    Feature(
        "head_dim over 256 with dropout, a block mask or what changes scores, except `softcap` and `sinks`",
        (_heads(320, 64, dropout_p=0.1),),
    ),
    Feature(
        "causal with both alignments, windows",
        (_with(causal=True), _with(causal=True, align="top_left"), _with(window=(9, 4))),
    ),
    Feature("grouped and multi-query heads", (_with(heads_kv=2), _with(heads_kv=1))),
    Feature("packed sequences", (_with(key_lengths=None, lengths_q=(5, 0, 37), lengths_k=(33, 4, 20)),)),
    Feature("`key_lengths`", (lambda case: replace(case, key_lengths=(9,) * (3 if case.packed else 2)),)),
    Feature("`softcap`", (_with(softcap=2.0),)),
    Feature("`sinks`, with gradient", (_with(sinks=True),)),
    Feature("`alibi_slopes`", (_with(alibi_slopes="bh", constant=("alibi_slopes",)),)),
    Feature("`alibi_slopes`, with gradient", (_with(alibi_slopes="h", constant=()),)),
    Feature("`bias`, with gradient", (_bias,)),
    Feature("`mask`", (_with(mask="11qk"),)),
    Feature("`block_mask`", tuple(_with(block_mask=tile) for tile in ((128, 128), (256, 128), (64, 64), (64, 256)))),
    Feature("`score_mod`", (_with(score_mod=True, constant=("score_mod",)),)),
    Feature(
        "`score_mod`, with gradients of captured tensors",
        (_with(score_mod=True, constant=()),),
        ("`deterministic=True`",),
    ),
    Feature(
        "`score_mod`, with gradients of captured tensors and `deterministic=True`",
        (_with(score_mod=True, constant=(), deterministic=True),),
    ),
    Feature("`dropout_p`", (_with(dropout_p=0.1),)),
    Feature("`return_max_scores=True`", (_with(return_max_scores=True),)),
    Feature("`deterministic=True`", (_with(deterministic=True),)),
)


@functools.cache
def device_of(backend: str) -> str:
    """The device on which a backend is asked about: the CPU if it serves a plain call there."""
    x = torch.empty(1, 8, 1, 64, device="meta")
    return "cpu" if flashtile.explain(x, x, x, backend=backend, device="cpu").backend else GPU


def served(case: AttentionCase) -> dict[str, str]:
    """How each backend, asked for by name, serves a call."""
    inputs = make_inputs(case)
    for name in case.learned:
        learned_tensor(inputs.tensors[name]).requires_grad_()

    def served_by(backend: str) -> str:
        given = {**inputs.tensors, **case.keywords(), "backend": backend, "device": device_of(backend)}
        answer = flashtile.explain(inputs.q, inputs.k, inputs.v, **given)
        if answer.backend != backend:
            return NOTHING
        # The reference has one entry for both directions, which names no backend. The Hopper backward runs the portable
        # kernel of a bias's gradient itself.
        others = {kernel.name for kernel in answer.kernels if kernel.backend not in ("", backend)}
        return EVERYTHING if others <= {"dbias"} else FORWARD

    return {backend: served_by(backend) for backend in BACKENDS.by_name}


def cells(feature: Feature) -> list[str]:
    """A row: what each backend does."""
    rows = [list(served(change(BASE)).values()) for change in feature.changes]
    assert all(row == rows[0] for row in rows), f"{feature.label}: split the row, its calls differ: {rows}"
    return rows[0]


def eight_bits() -> list[str]:
    """The row of float8_e4m3fn, which has a forward only."""
    x = torch.empty(2, 64, 4, 64, dtype=torch.float8_e4m3fn, device="meta")
    answers = {name: flashtile.explain(x, x, x, backend=name, device=device_of(name)) for name in BACKENDS.by_name}
    return [EVERYTHING if answer.backend == name else NOTHING for name, answer in answers.items()]


def column_sums() -> list[str]:
    """The row of `flashtile.attention_column_sums`."""

    def choice(backend: str) -> str | None:
        on_cpu = device_of(backend) == "cpu"
        device = devices.INTERPRETER if on_cpu else devices.KNOWN_DEVICES[GPU]
        shape = (BASE.batch, BASE.seq_q, BASE.heads, BASE.head_dim)
        q = torch.empty(shape, dtype=BASE.dtype, device="meta")
        machine = Machine("cpu" if on_cpu else "cuda", device, 132)
        call = describe_call("column_sums", (q, q, q), SideInputs(), AttentionSpec(1.0), backend, machine=machine)
        return BACKENDS.choose(call).backend

    return [EVERYTHING if choice(backend) == backend else NOTHING for backend in BACKENDS.by_name]


def table() -> str:
    """The table in Markdown, a row for all features that the same backends serve, with its notes."""
    rows = [[feature.label, *cells(feature)] for feature in FEATURES]
    rows += [["float8_e4m3fn (forward only)", *eight_bits()]]
    rows += [["`attention_column_sums` (forward only)", *column_sums()]]
    groups: dict[tuple[str, ...], list[str]] = {}
    for label, *found in rows:
        groups.setdefault(tuple(found), []).append(label)
    grouped = [["; ".join(labels), *found] for found, labels in groups.items()]
    headings = ["", *(f"`{backend}`" for backend in BACKENDS.by_name)]
    head, *lines = ["| " + " | ".join(row) + " |" for row in (headings, *grouped)]
    lines = [head, "|" + "---|" * len(headings), *lines]
    note = (
        "A backend serves a call if it serves each of its features. The mark ¹ means that the backend computes the "
        "forward and\nanother backend computes the gradients."
    )
    return "\n".join(lines) + f"\n\n{note}\n"


def written(text: str) -> str:
    """The document with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(
            f"{DOCUMENT.name}: expected the lines {BEGIN.strip()} and {END.strip()}, got none; put them in"
        )
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the document, instead of printing")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    DOCUMENT.write_text(written(DOCUMENT.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
