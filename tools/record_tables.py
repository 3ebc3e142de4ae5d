"""The tables of the documents that come from benchmark records, in `benchmarks/results`:

    python tools/record_tables.py            # says which tables of the documents differ
    python tools/record_tables.py --write    # writes them

A table stands behind a line `<!-- NAME, by tools/record_tables.py -->`, where NAME is a key of `TABLES`. A test
compares. Above 1, flashtile is faster; means are geometric. Only the format of records is used, no module of flashtile.
A table of a record that is not there yet is left out. If less than half of the kernels' functions are as they were in a
record (`tools/record_age.py` writes how many), a line below the table says so.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
_GUIDES = ("figures", "which_one", "kv_cache", "training_evidence")
DOCUMENTS = [ROOT / name for name in ("README.md", *(f"docs/{guide}.md" for guide in _GUIDES))]
_PLACE = re.compile(
    r"(?<=<!-- )([\w-]+)(?=, by tools/record_tables\.py -->\n\n)"
    r"((?:[^|*\n].*\n\n)?)((?:\|.*\n)*\n?)(?:\*Older code: .*\n\n)?"
)

Row = dict[str, Any]
Case = dict[str, Any]
Keep = Callable[[Case], bool]

FORWARD, BACKWARD = "fwd", "bwd"
PEERS = ("sdpa-flash", "sdpa-cudnn", "fa4")
CPU_PEERS = ("sdpa-flash", "sdpa-math", "sdpa-gathered", "matmul")
ALL_PEERS = (*PEERS, "sdpa-efficient", "flex", "torch-varlen")


#: The records that the table at hand was made from.
_read: set[str] = set()


def rows_of(record: str) -> list[Row]:
    """The rows of a record that have a speed."""
    _read.add(record)
    return _rows_of(record)


@functools.cache
def _rows_of(record: str) -> list[Row]:
    text = (ROOT / "benchmarks" / "results" / f"{record}.json").read_text("utf-8")
    return [row for row in json.loads(text)["rows"] if row["ms"] is not None]


#: The cases of a record that a row of a table counts.
KEEP: dict[str, Keep] = {
    "all": lambda case: True,
    "grouped": lambda case: case["H"] != case["Hkv"],
    "mla": lambda case: case["D"] != case["Dv"],
    "window": lambda case: case["window"] is not None,
    "plain": lambda case: not any(KEEP[kind](case) for kind in ("grouped", "mla", "window")),
    "bias": lambda case: case["bias"] is not None,
    "mask": lambda case: case["mask"] is not None,
    "softcap": lambda case: case["softcap"] is not None,
    **{name: partial(lambda name, case: (case["mask"] or "").startswith(name), name)
       for name in ("tiles", "documents", "padding", "random")},
    "dropout, narrow heads": lambda case: case["dropout_p"] > 0 and case["D"] <= 64,
    "dropout, wide heads": lambda case: case["dropout_p"] > 0 and case["D"] > 64,
    "long": lambda case: case["S"] > 200 and not case["Sk"] and case["window"] is None,
    "short": lambda case: not KEEP["long"](case) and case["window"] is None,
    "72 to 112": lambda case: KEEP["long"](case) and 72 <= case["D"] <= 112,
    "128 to 256": lambda case: KEEP["long"](case) and 128 <= case["D"] <= 256,
    "decoding": lambda case: "kib" not in case and not case.get("append"),
}  # fmt: skip


def where(**wanted: Any) -> Keep:
    return lambda case: wanted.items() <= case.items()


def heads_of(low: int, high: int) -> Keep:
    return lambda case: low <= case["D"] <= high and case["window"] is None


class Ratios(NamedTuple):
    """Speeds of flashtile over those of the fastest peer, of the cases in which there is one."""

    values: list[float]

    @property
    def mean(self) -> float:
        return statistics.geometric_mean(self.values)

    @property
    def cell(self) -> str:
        """Mean, and the lowest where there are several."""
        lowest = f" ({min(self.values):.2f})" if len(self.values) > 1 else ""
        return f"{self.mean:.2f}{lowest}" if self.values else "–"

    @property
    def full_cell(self) -> str:
        return f"{self.mean:.2f} ({min(self.values):.2f})"

    @property
    def slower(self) -> str:
        return str(sum(value < 1 for value in self.values))


def ratios(
    record: str, phase: str, ours: str | tuple[str, ...], peers: Iterable[str] = ALL_PEERS, keep: Keep = KEEP["all"],
    op: str | None = None,
) -> Ratios:  # fmt: skip
    """`ours` may name several implementations, of which the last that has a case counts. `op`: None for all."""
    times: dict[str, dict[str, float]] = {}
    for row in rows_of(record):
        if row["phase"] == phase and op in (None, row["op"]) and keep(row["case"]):
            times.setdefault(row["impl"], {})[json.dumps([row["op"], row["case"]], sort_keys=True)] = row["ms"]
    mine: dict[str, float] = {}
    for name in (ours,) if isinstance(ours, str) else ours:
        mine |= times.get(name, {})
    best = {
        key: min(found) for key in mine if (found := [times[peer][key] for peer in peers if key in times.get(peer, {})])
    }
    return Ratios([best[key] / mine[key] for key in best])


def compared(record: str, *given: Any) -> list[str]:
    """How many cases; mean (lowest) and how many are slower, forward and then backward."""
    forward, backward = (ratios(record, phase, *given) for phase in (FORWARD, BACKWARD))
    return [str(len(forward.values)), forward.full_cell, forward.slower, backward.full_cell, backward.slower]


def means(record: str, *given: Any) -> list[str]:
    """How many cases; mean (lowest), forward and then backward."""
    forward, backward = (ratios(record, phase, *given) for phase in (FORWARD, BACKWARD))
    return [str(len(forward.values)), forward.cell, backward.cell]


# The tables.


def hopper_speeds() -> list[list[str]]:
    found: dict[tuple[int, bool], dict[tuple[str, str], float]] = {}
    for row in rows_of("h200-attention"):
        case = row["case"]
        if KEEP["plain"](case) and case["S"] == 8192:
            found.setdefault((case["D"], case["causal"]), {})[row["impl"], row["phase"]] = row["tflops"]
    table = [["head_dim", "mask", "flashtile (`hopper`)", "FlashAttention-2", "cuDNN", "FlashAttention-4"]]
    for (head_dim, causal), speeds in found.items():
        pairs = ((speeds[impl, FORWARD], speeds[impl, BACKWARD]) for impl in ("flashtile-hopper", *PEERS))
        cells = (f"{forward:.0f} / {backward:.0f}" for forward, backward in pairs)
        table.append([str(head_dim), "causal" if causal else "full", *cells])
    return table


COMPARED = ["cases", "forward", "slower in", "backward", "slower in"]
MEANS = ["cases", "forward", "backward"]
_NAMES = {"sdpa-flash": "FlashAttention-2", "sdpa-cudnn": "cuDNN", "fa4": "FlashAttention-4", "flex": "FlexAttention"}
_HOPPER = ("h200-attention", "flashtile-hopper", PEERS)
_H100 = ("h100-attention", "flashtile-auto", PEERS)
_MASKS = ("h200-masks", ("flashtile-triton", "flashtile-hopper"), ("flex",))
_FEATURES = ("h100-features", "flashtile-auto", ALL_PEERS)
_SHAPES = ("h200-shapes", "flashtile-auto", ALL_PEERS)
_FLOAT32 = ("h100-float32", "flashtile-auto", ("sdpa-efficient",))
_PORTABLE = ("h200-attention-portable", "flashtile-triton")
#: Tables of ratios: the first heading, what is said of the cases, and for each line its name and arguments of that.
_RATIOS: dict[str, tuple[str, Callable[..., list[str]], dict[str, tuple[Any, ...]]]] = {
    "hopper-others": ("`hopper` against the fastest peer", compared, {
        "one sequence of 8,192 to 131,072 tokens, heads of 128": ("h200-long", "flashtile-auto", PEERS),
        "64 and 8 heads of 128, 2k to 32k tokens": (*_HOPPER, KEEP["grouped"]),
        "head_dim 192, of v 128, 8,192 tokens": (*_HOPPER, KEEP["mla"]),
        "a window of 128 keys, head_dim 64": (*_HOPPER, KEEP["window"]),
        "packed: sequences of 30 to 10,035 tokens":
            ("h200-attention-packed", "flashtile-auto", ("fa4", "torch-varlen")),
    }),
    "portable": ("`triton` against", compared, {
        _NAMES[peer]: (*_PORTABLE, (peer,)) for peer in ("sdpa-flash", "flex", "sdpa-cudnn")
    }),
    "masks": ("flashtile against FlexAttention", means, {
        "block masks, 5 to 50 % of the tiles": (*_MASKS, KEEP["tiles"]),
        "a soft cap": (*_MASKS, KEEP["softcap"]),
        "65,536 tokens of documents": (*_MASKS, KEEP["documents"]),
    }),
    "features": ("feature", means, {
        "dropout 0.1, heads of 32 and 64": (*_FEATURES, KEEP["dropout, narrow heads"]),
        "dropout 0.1, heads of 96 to 256": (*_FEATURES, KEEP["dropout, wide heads"]),
        "a bias with its gradient": (*_FEATURES, KEEP["bias"]),
        "a mask of padded keys `[B, 1, 1, S]`": (*_FEATURES, KEEP["padding"]),
        "a random mask `[1, 1, S, S]`": (*_FEATURES, KEEP["random"]),
    }),
    "shapes": ("other shapes", compared, {
        "heads of 72 to 112": (*_SHAPES, KEEP["72 to 112"]),
        "heads of 128 to 256": (*_SHAPES, KEEP["128 to 256"]),
        "heads of 320 and 512": (*_SHAPES, heads_of(320, 512)),
        "windows of 127 to 4,096 keys, grouped heads": (*_SHAPES, KEEP["window"]),
        "sequences of 49 to 197 tokens, or 77 keys": (*_SHAPES, KEEP["short"]),
        "all of them": _SHAPES,
    }),
    "float32": ("float32, heads of", compared, {
        "32 and 64": (*_FLOAT32, heads_of(32, 64)), "96 and 128": (*_FLOAT32, heads_of(96, 128)),
        "160 to 256": (*_FLOAT32, heads_of(160, 256)), "512": (*_FLOAT32, heads_of(512, 512)), "all": _FLOAT32,
    }),
    "on-h100": ("on an H100", compared, {
        "plain attention": (*_H100, KEEP["plain"]), "grouped heads": (*_H100, KEEP["grouped"]),
        "head_dim 192, of v 128": (*_H100, KEEP["mla"]), "window of 128 keys": (*_H100, KEEP["window"]),
    }),
}  # fmt: skip


def ratio_table(name: str) -> list[list[str]]:
    heading, cells, lines = _RATIOS[name]
    found = [[line, *cells(*arguments)] for line, arguments in lines.items()]
    return [[heading, *(COMPARED if cells is compared else MEANS)], *found]


def readme_speeds() -> list[list[str]]:
    names = (
        "head_dim 64, 128 and 256, full and causal, 512 to 16,384 tokens",
        "one sequence of 8,192 to 131,072 tokens, heads of 128",
        "64 query heads and 8 key/value heads of 128, 2,048 to 32,768 tokens",
        "head_dim 192, of v 128, 8,192 tokens",
        "a window of 128 keys, head_dim 64, 8,192 tokens",
        "packed: 65,536 tokens in sequences of 30 to 10,035",
    )
    rows = [["", *compared(*_HOPPER, KEEP["plain"])], *ratio_table("hopper-others")[1:]]
    cells = [[name, row[1], row[2], row[4]] for name, row in zip(names, rows, strict=True)]
    return [["`hopper` against the fastest of them", *MEANS], *cells]


def which_one() -> list[list[str]]:
    table, where = [["flashtile against", "where", "forward", "backward"]], ""
    names = ("SDPA with FlashAttention-2", "SDPA with cuDNN", "FlashAttention-4", "the fastest of these")
    for name, peers in zip(names, (*((peer,) for peer in PEERS), PEERS), strict=True):
        cases, *cells = means(*_HOPPER[:2], peers, KEEP["plain"])
        table.append([name, where or f"{cases} plain and causal cases", *cells])
        where = "the same"
    blocks = ratio_table("masks")[1]
    table.append(["FlexAttention", f"block masks, {blocks[1]} cases", *blocks[2:]])
    biases = means("h100-features", "flashtile-auto", ("flex", "sdpa-efficient"), KEEP["bias"])
    name = "the fastest of FlexAttention and SDPA's memory-efficient kernel"
    return [*table, [name, f"a bias with its gradient, {biases[0]} cases", *biases[1:]]]


def values() -> list[list[str]]:
    rows = [row for row in rows_of("h200-values") if row["phase"] == FORWARD]
    times = {(row["impl"], json.dumps(row["case"], sort_keys=True)): row["ms"] for row in rows}
    cases = [row["case"] for row in rows if row["impl"] == "flashtile-hopper"]

    def time(case: Case, **changed: Any) -> float:
        return times["flashtile-hopper", json.dumps({**case, **changed}, sort_keys=True)]

    table = [["head_dim, tokens", *(f"{dtype}: {what}" for dtype in ("bf16", "fp16") for what in ("time", "speed"))]]
    for head_dim, tokens in ((64, 8192), (128, 8192), (256, 8192), (64, 4096)):
        cells = [f"{head_dim}, {tokens:,}{', trained' if tokens == 4096 else ''}"]
        for dtype in ("bf16", "fp16"):
            keep = where(dtype=dtype, D=head_dim, S=tokens)
            longest = max(time(case) / time(case, values="normal") for case in filter(keep, cases))
            speed = ratios("h200-values", FORWARD, "flashtile-hopper", ("fa4", "sdpa-cudnn", "sdpa-flash"), keep)
            cells += [f"{longest:.2f}", speed.full_cell]
        table.append(cells)
    return table


def random_shapes() -> list[list[str]]:
    common, odd = ("sdpa-cudnn", "fa4"), ("sdpa-flash", "sdpa-cudnn", "fa4", "torch-varlen")
    kinds = (
        ("heads of 64 and 128 in bfloat16, full and causal, also grouped; cuDNN, FlashAttention-4",
         "H200", "h200-random", common),
        ("the same, of another seed", "H200", "h200-random-other", common),
        ("the same as the first", "H100", "h100-random", common),
        ("heads of 32 to 256 in both 16-bit dtypes, dropout, packed, other keys; cuDNN, FlashAttention-2 and on the "
         "H200 FlashAttention-4 and `varlen_attn`", "H200", "h200-random-odd", odd),
        ("the same", "H100", "h100-random-odd", odd),
    )  # fmt: skip
    table = [["shapes drawn at random; peers", "GPU", *COMPARED]]
    return [*table, *([name, gpu, *compared(record, "flashtile-auto", peers)] for name, gpu, record, peers in kinds)]


def function_ratios(phase: str, name: str, head_dim: int) -> Ratios:
    """The ratios of the later record, if it has the function."""
    later = {row["case"]["function"] for row in rows_of("h200-score-functions")}
    rows_of("h200-functions")
    record = "h200-score-functions" if name in later else "h200-functions"
    return ratios(record, phase, "flashtile-auto", ("flex",), where(function=name, D=head_dim))


def functions() -> list[list[str]]:
    table = [["function or mask", "forward: heads of 128, 64", "backward: heads of 128, 64"]]
    for name in dict.fromkeys(row["case"]["function"] for row in rows_of("h200-functions")):
        cells = []
        for phase in (FORWARD, BACKWARD):
            found = [function_ratios(phase, name, head_dim) for head_dim in (128, 64)]
            cells.append(", ".join(f"{each.mean:.2f}" if each.values else "–" for each in found))
        table.append([f"`{name}`", *cells])
    return table


#: Operations beside attention: names in the table and in the record; products have forward and backward together.
_OPERATIONS = {
    "layer norm, 1,024 to 8,192 columns": "layer_norm",
    "RMS norm, the same": "rms_norm",
    "dropout, sum and layer norm": "dropout_add_layer_norm",
    "sum and RMS norm": "dropout_add_rms_norm",
    "rotary": "rotary",
    "causal softmax, 2,048 columns": "causal_softmax",
    "softmax with a mask": "masked_softmax",
    "cross-entropy, 50,257 to 128,256 classes": "cross_entropy",
    "linear layer, forward and backward together": "fused_dense",
    "perceptron, gelu and SwiGLU, likewise": "fused_mlp",
}


def companions() -> list[list[str]]:
    peers = ("eager", "compile", "liger", "quack")
    table = [["operation", *MEANS]]
    for name, op in _OPERATIONS.items():
        phases = FORWARD, "fwd+bwd" if op.startswith("fused") else BACKWARD
        found = [ratios("h200-companions", phase, "flashtile-triton", peers, op=op) for phase in phases]
        table.append([name, str(len(found[0].values)), *(each.cell for each in found)])
    return table


def training() -> list[list[str]]:
    names = ("flashtile", "flashtile-compile", "transformers-eager", "transformers-sdpa", "transformers-compile")
    records = {
        "GPT-2 small": "h200-training-small",
        "GPT-2 medium": "h200-training-medium",
        "GPT-2 small, after 1,000 steps": "h200-training-later",
        "GPT-2 small, dropout 0.1, on an H100": "h100-training-small-dropout",
        "BERT-large, dropout 0.1, on an H100": "h100-training-bert-dropout",
    }
    heading = ["flashtile", "flashtile, compiled", "transformers, eager", "with sdpa", "compiled"]
    table = [["tokens per second", *heading]]
    for model, record in records.items():
        rows = {row["impl"]: row for row in rows_of(record)}
        table.append([model, *(f"{rows[name]['tokens_per_s']:,.0f}" if name in rows else "–" for name in names)])
    return table


def pathfinder() -> list[list[str]]:
    """Means over seeds."""
    table = [["task", "attention", "accuracy, %", "seeds", "steps", "ms a step", "peak MiB"]]
    rows = rows_of("h200-training-pathfinder")
    for impl in dict.fromkeys(row["impl"] for row in rows):
        found = [row for row in rows if row["impl"] == impl]
        accuracies = [100 * row["accuracy"] for row in found]
        accuracy = f"{statistics.mean(accuracies):.1f} ± {statistics.stdev(accuracies):.1f}"
        ms, steps = statistics.mean(row["ms"] for row in found), str(found[0]["case"]["steps"])
        sizes = str(len(found)), steps, f"{ms:.2f}", f"{found[0]['peak_mib']:,.0f}"
        table.append(["pathfinder", impl, accuracy, *sizes])
    return table


def curves() -> list[list[str]]:
    table = [["model", "implementation", "steps", "loss, mean of the last tenth", "ms a step"]]
    for row in rows_of("h200-training-curves"):
        loss = statistics.mean(row["curve"][-len(row["curve"]) // 10 :])
        steps = str(row["case"]["steps"])
        table.append([row["case"]["model"], row["impl"], steps, f"{loss:.4f}", f"{row['ms']:.1f}"])
    return table


def steps(record: str, **sizes: Any) -> list[list[str]]:
    """Training steps of the cases of some sizes, without those under torch.compile."""
    table = [["model", "context", "batch", "implementation", "ms", "tokens/s", "of the peak", "MiB"]]
    for row in rows_of(record):
        case = row["case"]
        if where(**sizes)(case) and "compile" not in row["impl"]:
            figures = f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.1%}", f"{row['peak_mib']:,.0f}"
            table.append([case["model"], str(case["S"]), str(case["B"]), row["impl"], *figures])
    return table


def decoding() -> list[list[str]]:
    """GB/s of the cache with one query."""
    found = {
        (row["case"]["B"], row["case"]["S"], row["impl"], row["case"]["page"]): f"{round(row['gbps']):,}"
        for row in rows_of("h200-serving")
        if row["gbps"] and not {"factors", "queries", "latent"} & row["case"].keys()
        and (row["case"]["Sq"], row["case"]["D"], row["case"]["append"]) == (1, 128, False)
    }  # fmt: skip
    columns = [
        *(("flashtile-auto", page) for page in (None, 16, 64)), ("copy", None),
        *((peer, None) for peer in ("sdpa-flash", "sdpa-cudnn", "fa4")),
    ]  # fmt: skip
    heading = ["flashtile", "pages of 16", "pages of 64", "a copy", "FlashAttention-2", "cuDNN", "FlashAttention-4"]
    table = [["cache", *heading]]
    for batch, length in sorted({key[:2] for key in found}, key=lambda size: size[::-1]):
        cells = [found.get((batch, length, *column), "–") for column in columns]
        if cells[0] != "–":
            table.append([f"{batch} × {length:,}", *cells])
    return table


#: Common parts of the calls of that record; a case has no further keys then.
_USUAL: Case = {"H": 32, "Hkv": 8, "D": 128, "Dv": 128, "Sq": 1, "page": 16, "append": False, "dtype": "bf16"}
#: Calls of the table: what they are, the case, and what their time is compared with: an implementation, other cases.
_KINDS: list[tuple[str, Case, str, list[Case]]] = [
    ("1 query, 8 × 16,384 rows", {"B": 8, "S": 16384}, "copy", []),
    ("1 query, 16 × 8,192 rows, 16 heads of 256, one of keys",
     {"B": 16, "S": 8192, "H": 16, "Hkv": 1, "D": 256, "Dv": 256}, "copy", []),
    ("5 queries, 8 × 16,384 rows", {"B": 8, "S": 16384, "Sq": 5}, "1 query", [{"B": 8, "S": 16384}]),
    ("8 chunks of 512 and 120 single tokens, 2,048 to 16,384 rows", {"B": 128, "S": 16384, "Sq": 512}, "the two halves",
     [{"B": 8, "S": 16384, "Sq": 512}, {"B": 120, "S": 16384}]),
    ("a chunk of 512 and 4 single tokens, 65,536 rows each", {"B": 5, "S": 65536, "Sq": 512}, "the two halves",
     [{"B": 1, "S": 65536, "Sq": 512}, {"B": 4, "S": 65536}]),
    *((f"1 query, 8 × {rows:,} rows, float8_e4m3fn", {"B": 8, "S": rows, "factors": "head"}, "16 bits",
       [{"B": 8, "S": rows}]) for rows in (16384, 65536)),
    ("512 queries, 4 × 16,384 rows, float8_e4m3fn", {"B": 4, "S": 16384, "Sq": 512, "factors": "head"}, "16 bits",
     [{"B": 4, "S": 16384, "Sq": 512}]),
    ("1 query, 64 × (32,768 rows of all + 512)", {"B": 64, "S": 33280, "shared_rows": 32768}, "copy", []),
    ("a tree of 63 tokens, 8 × 16,384 rows", {"B": 8, "S": 16384, "Sq": 63, "tree": True}, "a causal mask",
     [{"B": 8, "S": 16384, "Sq": 63}]),
    *((f"latent attention, {heads} heads, {queries}", {**size, "H": heads, "Hkv": 1, "D": 576, "Dv": 512, "page": 64,
       "latent": True}, "copy", []) for heads in (16, 128)
      for queries, size in (("1 query, 32 × 8,192 rows", {"B": 32, "S": 8192}),
                            ("512 queries, 4 × 16,384 rows", {"B": 4, "S": 16384, "Sq": 512}))),
]  # fmt: skip


def _served(*wanted: tuple[str, Case]) -> list[Row]:
    """The rows of implementations and cases of serving, of the newer record those that it has. A mixed batch is given
    without its lists."""
    found = {
        (
            row["impl"],
            *sorted((key, value) for key, value in row["case"].items() if key not in ("queries", "lengths")),
        ): row
        for row in (*rows_of("h200-serving"), *rows_of("h200-serving-chunks"))
    }
    return [found[(impl, *sorted({**_USUAL, **case}.items()))] for impl, case in wanted]


def serving_chunks() -> list[list[str]]:
    """Chunks of four prompts, and of one: TFLOP/s, and the share of the same work's without a cache."""
    lengths = (4096, 16384, 65536)
    table = [["queries over rows in use", *(f"{length:,}" for length in lengths)]]
    pages = ((None, "one piece"), (64, "pages of 64"), (16, "pages of 16"), (1, "pages of 1"))
    kinds = [(4, chunk, page, words) for page, words in pages for chunk in (64, 512, 2048)]
    kinds += [(1, chunk, 16, "pages of 16, one prompt") for chunk in (64, 256)]
    for prompts, chunk, page, words in kinds:
        sizes = [{"B": prompts, "S": length, "Sq": chunk, "page": page} for length in lengths]
        rows = [_served(("flashtile-auto", size), ("dense", size)) for size in sizes]
        cells = [f"{ours['tflops']:.0f} ({dense['ms'] / ours['ms']:.2f})" for ours, dense in rows]
        table.append([f"{chunk:,}, {words}", *cells])
    return table


def serving_kinds() -> list[list[str]]:
    """Calls that are not chunks alone, each with the time that it is compared with."""
    table = [["call", "µs", "GB/s of the cache", "TFLOP/s", "time beside"]]
    for words, case, beside, others in _KINDS:
        row, *found = _served(
            ("flashtile-auto", case), *([("flashtile-auto", other) for other in others] or [(beside, case)])
        )
        share = row["ms"] / sum(other["ms"] for other in found)
        figures = f"{1e3 * row['ms']:,.1f}", f"{row['gbps']:,.0f}", f"{row['tflops']:,.0f}"
        name = "a copy" if beside == "copy" else beside
        table.append([words, *figures, f"{share:.2f} × {name}" if others or row["tflops"] < 0.3 * row["gbps"] else "–"])
    return table


_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def on_a_cpu() -> list[list[str]]:
    """Against the fastest of PyTorch's flash attention, its math path and gathered pages."""
    kinds: list[tuple[str, str, Keep]] = [
        ("a step of decoding, one query", "cpu-decode", KEEP["decoding"]),
        ("grouped heads, 256 and 1,024 tokens", "cpu-grouped", KEEP["all"]),
        ("windows of 128 and 256 keys", "cpu-features", KEEP["window"]),
        ("masks, 512 tokens", "cpu-features", KEEP["mask"]),
        ("a bias with its gradient", "cpu-features", KEEP["bias"]),
    ]
    heading = (f"{label} {phase}" for label in _DTYPES.values() for phase in ("forward", "backward"))
    table = [["on one core", "cases", *heading]]
    for name, record, keep in kinds:
        cells = [name, ""]
        for dtype in _DTYPES:

            def wanted(case: Case, keep: Keep = keep, dtype: str = dtype) -> bool:
                return case["dtype"] == dtype and keep(case)

            cells[1], *found = means(record, "flashtile-cpu", CPU_PEERS, wanted)
            cells += found
        table.append(cells)
    return table


def several_gpus() -> list[list[str]]:
    found: dict[tuple[int, str], str] = {}
    for row in rows_of("h200x4-context-parallel"):
        alone = row["impl"] == "flashtile-one-gpu" or row["efficiency"] is None
        if row["case"]["causal"] and row["phase"] == "fwd+bwd":
            cell = f"{row['ms']:,.1f}" + ("" if alone else f" ({row['efficiency']:.2f})")
            found[row["case"]["S"], row["impl"]] = cell
    columns = ["flashtile-one-gpu", *(f"flashtile-{name}" for name in ("all_to_all", "all_gather", "ring"))]
    columns += ["torch-cp-allgather", "torch-cp-alltoall"]
    heading = ["one GPU", "`all_to_all`", "`all_gather`", "`ring`", "PyTorch, all-gather", "PyTorch, all-to-all"]
    table = [["tokens", *heading]]
    for length in sorted({length for length, _ in found}):
        table.append([f"{length:,}", *(found.get((length, impl), "–") for impl in columns)])
    return table


def host_time() -> list[list[str]]:
    times = {(row["impl"], row["phase"]): row["ms"] for row in rows_of("h200-host-time")}
    phases = {
        "forward, without gradients": "fwd-nograd",
        "forward, recorded for a backward": FORWARD,
        "forward and backward": "fwd+bwd",
    }
    impls = ("flashtile-hopper", "flashtile-triton", "sdpa-flash", "sdpa-cudnn")
    heading = ["flashtile (`hopper`)", "flashtile (`triton`)", "FlashAttention-2", "cuDNN"]
    cells = [[name, *(f"{1000 * times[impl, phase]:.3g}" for impl in impls)] for name, phase in phases.items()]
    return [["one call, µs", *heading], *cells]


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    **{name: partial(ratio_table, name) for name in _RATIOS},
    "hopper-speeds": hopper_speeds, "readme-speeds": readme_speeds, "which-one": which_one, "values": values,
    "random-shapes": random_shapes, "functions": functions, "companions": companions, "training": training,
    "decoding": decoding, "serving-chunks": serving_chunks, "serving-kinds": serving_kinds, "on-a-cpu": on_a_cpu,
    "several-gpus": several_gpus, "host-time": host_time, "pathfinder": pathfinder, "curves": curves,
    "longer-sequences": partial(steps, "h200-training-contexts", model="gpt2-small", S=4096),
    "bert": partial(steps, "h200-training-bert", B=64),
}  # fmt: skip


#: Tables that stand for whole pages, not for the code of a record, or whose page says how old they are.
_SUMMARIES = {"readme-speeds", "which-one", "pathfinder", "curves", "longer-sequences", "bert"}


@functools.cache
def _ages() -> dict[str, tuple[int, int]]:
    """For each record, how many functions of its kernels are as they were, of how many."""
    text = (ROOT / "benchmarks" / "results" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w-]+)\.json` \| \w+ \| (\d+) of (\d+) \|$", text, re.MULTILINE)
    return {name: (int(same), int(functions)) for name, same, functions in rows}


def older_code(records: Iterable[str]) -> str:
    """A line that says which share of the kernels' functions is unchanged, where it is less than half."""
    ages = [_ages()[record] for record in records if record in _ages()]
    old = sorted({age for age in ages if 2 * age[0] < age[1]})
    if not old:
        return ""
    counts = " and ".join(f"{same} of {functions}" for same, functions in old)
    return f"*Older code: of the kernels' functions, {counts} are unchanged.*\n\n"


def markdown(table: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]]) + "\n"


def with_tables(text: str) -> str:
    """A document with its tables made anew."""

    def made(place: re.Match[str]) -> str:
        _read.clear()
        try:
            table = markdown(TABLES[place[1]]()) + "\n"
            return place[1] + place[2] + table + ("" if place[1] in _SUMMARIES else older_code(_read))
        except FileNotFoundError:  # the record is not there yet
            return place[1] + place[2]

    return _PLACE.sub(made, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables instead of comparing them")
    write, differs = parser.parse_args().write, False
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        if (new := with_tables(text)) != text:
            differs = True
            print(f"{path.relative_to(ROOT)}: {'written' if write else 'differs from the records'}")
            if write:
                path.write_text(new, "utf-8")
    return int(differs and not write)


if __name__ == "__main__":
    sys.exit(main())
