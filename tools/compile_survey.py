"""Compiles the portable kernels in every form for every architecture, and holds what each card has room for.

    PYTHONPATH=src:tests python tools/compile_survey.py --jobs 16 --json survey.jsonl          # all: 5 core hours
    PYTHONPATH=src:tests python tools/compile_survey.py --arch sm_86 sm_89 --kernel dq dkdv --width 128 --dtype fp16

No GPU need be there. Prints a line for each form: shared memory beside what the card gives a program, spilled bytes
beside what may spill (`tests/support/compilation/spills.py`), and registers of a thread. Fails where a form does not
compile, where its machine code is wrong, or where it takes more than that. Tests hold the same of a sample.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flashtile
from flashtile._backends.devices import KNOWN_DEVICES
from flashtile._backends.launch import KernelSource
from flashtile.ops.attention.call import TensorFacts
from flashtile.ops.common.tiles import tile_width
from flashtile.testing.cases import RelativeScore
from support.compilation.machine_code import (
    Call,
    binary_of,
    call_on,
    differing,
    plan,
    registers,
    sharing_a_multiprocessor,
)
from support.compilation.spills import attention_spills, companion_spills

_WIDTHS = (16, 32, 64, 96, 128, 192, 256, 512)
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
_KERNELS = ("forward", "dq", "dkdv", "dbias", "column_sums", "short_backward")

_BIAS = TensorFacts(torch.bfloat16, (1, 4, 4096, 4096), (0, 2**24, 4096, 1), 0)
_MASK = _BIAS._replace(dtype=torch.bool)
_SCORES = flashtile.trace_score_mod(RelativeScore(torch.zeros(4, 33, requires_grad=True)))
#: "together": what takes the most shared memory.
_FEATURES: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"window_right": 0},
    "packed": {"window_right": 0, "sequences": 3},
    "mask": {"mask": _MASK},
    "bias": {"bias": _BIAS},
    "dropout": {"window_right": 0, "dropout_p": 0.1},
    "score_mod": {"score_mod": _SCORES},
    "together": {"bias": _BIAS._replace(dtype=torch.float32), "mask": _MASK, "block_tile": (128, 128)},
}  # fmt: skip

#: Operations whose forms are those of their tests.
_COMPANIONS = ("kv_cache", "layer_norm", "cross_entropy", "softmax", "rotary", "dense")


class Form(NamedTuple):
    """A kernel with one set of constants, types and features. `width` and `dtype`: "" for other operations, whose
    features are the name of a test's call."""

    arch: str
    operation: str
    kernel: str
    feature: str
    width: int | str = ""
    dtype: str = ""

    @property
    def may_spill(self) -> int:
        if self.operation != "attention":
            return companion_spills(self.arch, self.operation, self.kernel, self.feature)
        width, more = tile_width(int(self.width)), self.feature not in ("dense", "causal")
        return attention_spills(self.arch, _DTYPES[self.dtype], self.kernel, width, more)


def forms(chosen: argparse.Namespace) -> dict[Form, KernelSource]:
    """What is compiled, each source once for an architecture."""
    found: dict[Form, KernelSource] = {}
    for arch in chosen.arch:
        every = {**dict(_attention(arch, chosen)), **dict(_companions(arch, chosen))}
        for kernel in {form.kernel: None for form in every}:
            mine = {form: source for form, source in every.items() if form.kernel == kernel}
            found |= {form: mine[form] for form in differing(mine)}
    return found


def _attention(arch: str, chosen: argparse.Namespace) -> Iterator[tuple[Form, KernelSource]]:
    for dtype in chosen.dtype if "attention" in chosen.operation else ():
        for width in chosen.width:
            for feature, options in _FEATURES.items():
                call = call_on(arch, Call(width, width, _DTYPES[dtype], descales=dtype == "fp8", **options))
                for kernel in (of for of in _KERNELS if of in (chosen.kernel or _KERNELS)):
                    planned = _planned(kernel, arch, call)
                    if planned is not None:
                        yield Form(arch, "attention", kernel, feature, width, dtype), planned


def _planned(kernel: str, arch: str, call: Call) -> KernelSource | None:
    """None if there is no such kernel of the call: 8-bit inputs have no gradients."""
    if (call.descales and kernel != "forward") or (kernel == "dbias" and call.bias is None):
        return None
    if kernel != "short_backward":
        return plan(kernel, KNOWN_DEVICES[arch], call).kernel.source  # type: ignore[arg-type]
    short = plan("dq", KNOWN_DEVICES[arch], call._replace(seq_q=49, seq_k=49))
    return short.kernel.source if short.name == kernel else None


def _companions(arch: str, chosen: argparse.Namespace) -> Iterator[tuple[Form, KernelSource]]:
    for operation in (of for of in _COMPANIONS if of in chosen.operation):
        for (kernel, name), source in importlib.import_module(f"ops.{operation}.test_compile").sources(arch).items():
            if kernel in (chosen.kernel or (kernel,)):
                yield Form(arch, operation, kernel, name), source


_FORMS: list[tuple[Form, KernelSource]] = []


def _compiled(number: int) -> dict[str, Any]:
    """A form's record. `problem`: "" if there is none."""
    form, source = _FORMS[number]
    device = KNOWN_DEVICES[form.arch]
    record = {
        **form._asdict(),
        "warps": source.num_warps,
        "stages": source.num_stages,
        "tile": [source.constants.get(f"shape.BLOCK_{of}", source.constants.get(f"BLOCK_{of}")) for of in "MN"],
        "memory_limit": device.shared_memory // sharing_a_multiprocessor(source),
        "may_spill": form.may_spill,
        "problem": "",
    }
    try:
        binary = binary_of(source, device)
    except Exception as error:  # whatever the compiler raises
        return record | {"problem": f"{type(error).__name__}: {error!s:.300}"}
    record |= {"memory": binary.shared_memory, "spilled": binary.spilled, "registers": registers(binary)}
    if binary.shared_memory > record["memory_limit"]:
        record["problem"] = "MORE SHARED MEMORY THAN THERE IS"
    elif binary.spilled > record["may_spill"]:
        record["problem"] = "SPILLS MORE THAN IS STATED"
    return record


def _line(record: dict[str, Any]) -> str:
    name = " ".join(str(record[field]) for field in Form._fields if record[field] != "")
    if "memory" not in record:
        return f"{name}: {record['problem']}"
    return (
        f"{name}: {record['memory']} of {record['memory_limit']} bytes of shared memory, {record['spilled']} of "
        f"{record['may_spill']} spilled, {record['registers']} registers on {record['warps']} warps "
        f"{record['problem']}"
    ).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=KNOWN_DEVICES, default=[*KNOWN_DEVICES])
    every = ("attention", *_COMPANIONS)
    parser.add_argument("--operation", nargs="+", choices=every, default=every)
    parser.add_argument("--kernel", nargs="+", help="names, such as dkdv, attend or backward")
    parser.add_argument("--width", nargs="+", type=int, default=_WIDTHS, help="columns of attention's heads")
    parser.add_argument("--dtype", nargs="+", choices=_DTYPES, default=[*_DTYPES], help="of attention")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="a file for the records, one a line")
    chosen = parser.parse_args()
    _FORMS[:] = forms(chosen).items()
    records = []
    with (
        open(chosen.json or os.devnull, "w", encoding="utf-8") as file,
        multiprocessing.get_context("fork").Pool(chosen.jobs) as pool,
    ):
        for record in pool.imap(_compiled, range(len(_FORMS))):
            records.append(record)
            print(_line(record), flush=True)
            print(json.dumps(record), file=file, flush=True)
    of_cards, bad = (Counter(each["arch"] for each in found) for found in (records, filter(_problem, records)))
    for arch in of_cards:
        spilling = sum(each.get("spilled", 0) > 0 for each in records if each["arch"] == arch)
        print(f"{arch}: {of_cards[arch]} forms, {spilling} spill, {bad[arch]} past what is stated")
    return int(any(bad.values()))


def _problem(record: dict[str, Any]) -> str:
    return record["problem"]


if __name__ == "__main__":
    sys.exit(main())
