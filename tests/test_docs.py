"""The documents are true: their Python runs and prints what they say, their links lead somewhere, the files, targets
and names in them exist, and their tables are those of the code and of the records."""

from __future__ import annotations

import functools
import importlib
import json
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashtile
from benchmarks.evidence.summary import summary
from flashtile._backends.devices import KNOWN_DEVICES
from flashtile.bench.cases import Case
from flashtile.bench.summary import ratios_to_best
from flashtile.bench.tables import table_of, tables
from flashtile.ops.attention.repeated import forget_calls
from flashtile.ops.attention.select import BACKENDS

ROOT = Path(__file__).parent.parent
SOURCE = Path(flashtile.__file__).parent
DECISIONS = sorted((ROOT / "decisions").glob("*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *DECISIONS])
#: Those that run as they are; what takes arguments has tests of its own.
EXAMPLES = sorted(
    p for p in (ROOT / "examples").glob("*.py") if not (ROOT / "tests/examples" / f"test_{p.name}").exists()
)
README, FIGURES, WHICH_ONE = (
    (ROOT / name).read_text("utf-8") for name in ("README.md", "docs/figures.md", "docs/which_one.md")
)
PEERS = ("sdpa-flash", "sdpa-cudnn", "fa4")
_SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"^prints\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
_FILE = re.compile(r"`((?:src|tests|docs|decisions|examples|benchmarks|\.ci)/[\w./-]+)`")
_TARGET = re.compile(r"\bmake ([a-z][a-z-]*)\b")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _snippets(text: str) -> list[tuple[int, str]]:
    """(line number, source) of each Python snippet."""
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in _SNIPPET.finditer(text)]


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if _SNIPPET.search(path.read_text("utf-8"))], ids=_name)
def test_snippets_run(path, monkeypatch, capsys):
    """All snippets of a document run in order in one namespace, and print what the document says that they print.

    `torch.compile` stops short of generating C++.
    """
    text = path.read_text("utf-8")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    namespace = {"__name__": "snippets"}
    for line, source in _snippets(text):
        exec(compile("\n" * line + source, str(path), "exec"), namespace)
    printed = capsys.readouterr().out
    assert all(expected in printed for expected in _PRINTED.findall(text))


@pytest.mark.parametrize("path", EXAMPLES, ids=_name)
def test_examples_run(path):
    source = path.read_text("utf-8")
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_and_files_exist(path):
    text = path.read_text("utf-8")
    for target, anchor in _LINK.findall(text):
        if "://" in target:
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"link to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file.read_text("utf-8")), f"link to {target}{anchor}"
    for file in _FILE.findall(text):
        assert (ROOT / file).exists(), f"names {file}"


def test_the_minutes_that_the_tests_take_are_the_same_everywhere():
    for target in ("test", "test-all"):
        texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")]
        lines = [line for text in texts for line in text.splitlines() if line.startswith(f"| `make {target}` |")]
        minutes = [re.search(r"(\d+) minutes", line)[1] for line in lines]
        assert len(minutes) == 2 and len(set(minutes)) == 1, lines


@pytest.mark.parametrize("path", DECISIONS, ids=_name)
def test_decisions_are_short_and_dated(path):
    for record in path.read_text("utf-8").split("\n## ")[1:]:
        title, _, text = record.partition("\n")
        assert len(record.split()) <= 200, title
        assert re.match(r"\n\*20\d\d-\d\d-\d\d", text), title


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_make_targets_exist(path):
    makefile = (ROOT / "Makefile").read_text("utf-8")
    code = re.findall(r"`[^`\n]+`|^```.*?^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for target in {target for snippet in code for target in _TARGET.findall(snippet)}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_public_names_and_commands_exist(path):
    text = path.read_text("utf-8")
    for name in re.findall(r"`flashtile\.(\w+)", text):
        there = any((SOURCE / part).exists() for part in (name, f"{name}.py"))
        assert there or hasattr(importlib.import_module("flashtile"), name), f"flashtile.{name}"
    commands = set(re.findall(r"`flashtile ([a-z][a-z-]*)", text))
    if commands:
        typer = pytest.importorskip("typer")
        known = set(typer.main.get_command(importlib.import_module("flashtile.cli.app").app).commands)
        assert commands <= known


def test_the_changelog_knows_this_version():
    assert f"## [{flashtile.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_path_of_an_eager_call_is_the_documented_one():
    """Of the first call of its kind, on a CPU, whose backend plans no launch."""
    section = (ROOT / "docs/design.md").read_text("utf-8").split("## The path of a call")[1]
    lines = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1].splitlines()
    written = [
        name.split(".")[-1] for line in lines for name in re.findall(r"[\w.]+", re.split(r"  +", line.strip())[0])
    ]
    called = []

    def note(frame, event, _):
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(SOURCE):
            called.append(frame.f_code.co_name)

    q = torch.randn(1, 9, 2, 24)
    forget_calls()
    sys.setprofile(note)
    try:
        flashtile.attention(q, q, q, causal=True)
    finally:
        sys.setprofile(None)
    expected = [name for name in written if name not in ("prepare_forward", "launch", "or")]
    assert len(expected) == 11
    rest = iter(called)
    for name in expected:
        assert name in rest, (name, called)


def _table(text: str, first_column: str) -> list[list[str]]:
    """Cells of the table whose first heading is given, headings first."""
    (table,) = re.findall(rf"^\| {re.escape(first_column)} \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [rows[0], *rows[2:]]


def test_backends_are_in_the_order_in_which_they_are_tried():
    written = [backend.strip("`") for backend, *_ in _table(WHICH_ONE, "backend")[1:]]
    assert written == list(BACKENDS.by_name)


def test_devices_are_those_of_the_code():
    for document in ("docs/install.md", "docs/which_one.md"):
        text = (ROOT / document).read_text("utf-8")
        assert set(re.findall(r"\b(?:sm_\d+|gfx\d+)", text)) == set(KNOWN_DEVICES), document


def _which_one() -> list[tuple[str, str, list[str]]]:
    """(peer, cases, [forward, backward]) of each row of the table of speeds in which_one.md."""
    return [(peer, where, cells) for peer, where, *cells in _table(WHICH_ONE, "flashtile against")[1:]]


def _milliseconds(record: str) -> dict[str, dict[tuple[Case, str], float]]:
    """Implementation -> (case, phase) -> ms, of the rows that have a speed."""
    times: dict[str, dict[tuple[Case, str], float]] = {}
    for row in json.loads((ROOT / "benchmarks/results" / record).read_text("utf-8"))["rows"]:
        if row["ms"] is not None:
            times.setdefault(row["impl"], {})[Case.from_record(row["case"]), row["phase"]] = row["ms"]
    return times


def _compared(record: str, ours: str, peers: tuple[str, ...], table: str = "default") -> list[str]:
    """Cells of a row: how many cases of the table; then, for each phase, the speed of ours over that of the
    fastest peer, as mean and lowest, and in how many cases it is below 1."""
    times = _milliseconds(record)
    cells = []
    for phase in ("fwd", "bwd"):
        rows = [row for row in times[ours] if row[1] == phase and table_of(row[0]) == table]
        best = {row: [times[peer][row] for peer in peers if row in times[peer]] for row in rows}
        ratios = [min(ms) / times[ours][row] for row, ms in best.items() if ms]
        mean, slower = statistics.geometric_mean(ratios), sum(ratio < 1 for ratio in ratios)
        cells += [str(len(ratios)), f"{mean:.2f} ({min(ratios):.2f})", str(slower)]
    assert cells[0] == cells[3]
    return cells[:3] + cells[4:]


def test_speeds_are_those_of_the_record():
    times = _milliseconds("h200-attention.json")
    for head_dim, mask, seq, *speeds in _table(FIGURES, "head_dim")[1:]:
        width, length, causal = int(head_dim), int(seq.replace(",", "")), mask == "causal"
        case = Case(16384 // length, length, 2048 // width, 2048 // width, width, width, causal=causal)
        for impl, cell in zip(("flashtile-hopper", *PEERS), speeds, strict=True):
            for (phase, factor), speed in zip((("fwd", 1), ("bwd", 2.5)), cell.split(" / "), strict=True):
                flops = factor * 4 * 16384 * length * 2048 / (2 if causal else 1)
                assert round(flops / times[impl][case, phase] / 1e9) == int(speed), (head_dim, mask, seq, impl)


def test_comparisons_are_those_of_the_records():
    hopper = functools.partial(_compared, "h200-attention.json", "flashtile-hopper")
    portable = functools.partial(_compared, "h200-attention-portable.json", "flashtile-triton")
    against = [*(hopper((peer,)) for peer in PEERS), hopper(PEERS)]
    others = [hopper(PEERS, table) for table in ("grouped", "mla", "window")]
    others.append(_compared("h200-attention-packed.json", "flashtile-hopper", ("fa4", "torch-varlen"), "varlen"))
    older = [portable((peer,)) for peer in ("sdpa-flash", "flex", "sdpa-cudnn")]
    assert [cells for _, *cells in _table(FIGURES, "`hopper` against")[1:]] == against
    assert [cells for _, *cells in _table(FIGURES, "`hopper` against the fastest peer")[1:]] == others
    assert [cells for _, *cells in _table(FIGURES, "`triton` against")[1:]] == older
    fastest = [[cells[0], cells[1], cells[3]] for cells in (against[-1], *others)]
    assert [cells for _, *cells in _table(README, "`hopper` against the fastest of them")[1:]] == fastest
    forward, backward = (cell.split()[0] for cell in fastest[0][1:])
    assert f"{forward} times as fast forward and {backward} times as fast backward" in " ".join(README.split())
    assert [cells for *_, cells in _which_one()[:3]] == [[cells[1], cells[3]] for cells in against[:3]]
    versions = json.loads((ROOT / "benchmarks/results/h200-attention.json").read_text("utf-8"))["versions"]
    assert f"FlashAttention-4 {versions['flash-attn-4']}" in " ".join(FIGURES.split())


def test_times_on_other_values_are_those_of_the_record():
    times = _milliseconds("h200-values.json")
    ours = times["flashtile-hopper"]
    peers = [times[name] for name in ("fa4", "sdpa-cudnn", "sdpa-flash")]

    def longest(of: dict, cases: list[Case]) -> str:
        return f"{max(of[case, 'fwd'] / of[replace(case, values='normal'), 'fwd'] for case in cases):.2f}"

    for group, count, *slowest, speed in _table(FIGURES, "dtype, head_dim, tokens")[1:]:
        dtype, head_dim, tokens = re.findall(r"(\w+), (\d+), ([\d,]+\d)", group)[0]
        wanted = (dtype, int(head_dim), int(tokens.replace(",", "")))
        cases = [case for case, phase in ours if phase == "fwd" and (case.dtype, case.D, case.S) == wanted]
        ratios = [min(of[case, "fwd"] for of in peers) / ours[case, "fwd"] for case in cases]
        assert int(count) == len(cases)
        assert slowest == [longest(of, cases) for of in (ours, *peers[:2])]
        assert speed == f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f})"
    highest = max(float(row[2]) for row in _table(FIGURES, "dtype, head_dim, tokens")[1:])
    assert f"at most {highest:.2f} times as long as on normal inputs" in " ".join(README.split())


_KINDS = (
    lambda case: (case.mask or "").startswith("tiles"),
    lambda case: case.window is not None,
    lambda case: case.softcap is not None,
    lambda case: case.bias is not None,
    lambda case: (case.mask or "").startswith("documents"),
)


def test_scores_and_masks_are_those_of_the_record():
    """For each kind: what "auto" takes, the Hopper kernels where they serve a case, against FlexAttention."""
    times = _milliseconds("h200-masks.json")
    ours = {**times["flashtile-triton"], **times["flashtile-hopper"]}
    table = _table(FIGURES, "flashtile against FlexAttention")[1:]
    for kind, (_, *cells) in zip(_KINDS, table, strict=True):
        expected = []
        for phase in ("fwd", "bwd"):
            rows = [row for row in times["flex"] if row[1] == phase and kind(row[0])]
            ratios = [times["flex"][row] / ours[row] for row in rows]
            expected += [str(len(ratios)), f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f})"]
        assert cells == [*expected[:2], expected[3]]
    assert _which_one()[3][2] == table[0][2:]


def test_speeds_with_a_bias_are_those_of_the_record():
    times = _milliseconds("h100-features.json")
    ours = times["flashtile-auto"]
    cases = [case for case, phase in ours if phase == "fwd" and case.bias]
    assert f"{len(cases)} cases" in _which_one()[4][1]
    cells = []
    for phase in ("fwd", "bwd"):
        ratios = [
            min(times[peer][case, phase] for peer in ("flex", "sdpa-efficient")) / ours[case, phase] for case in cases
        ]
        cells.append(f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f})")
    assert _which_one()[4][2] == cells
    backward = f"{min(ratios):.1f} to {max(ratios):.1f} times"
    assert f"the backward is {backward} as fast" in " ".join(README.split())
    assert f"its backward has {backward} the speed" in WHICH_ONE


def _feature(case: Case) -> str:
    if case.dropout_p:
        return f"dropout {case.dropout_p}"
    masks = {"padding": "mask of padded keys `[B, 1, 1, S]`", "random0.5": "random mask `[1, 1, S, S]`"}
    return f"bias `{case.bias}`" if case.bias else masks[case.mask]


def test_times_with_features_are_those_of_the_record():
    times = _milliseconds("h100-features.json")
    ours = times["flashtile-auto"]
    expected = []
    for case in (case for case, phase in ours if phase == "fwd" and (case.dropout_p or case.bias or case.mask)):
        shape = f"{case.B:,} × {case.S:,}", str(case.H)
        cells = _against_the_fastest(times, ours, case)
        expected.append([_feature(case), str(case.D), "causal" if case.causal else "full", *shape, *cells])
    assert list(_table(FIGURES, "feature")[1:]) == expected


#: Peers as the tables of single cases name them.
_PEERS = {
    "sdpa-flash": "FlashAttention-2", "sdpa-cudnn": "cuDNN", "sdpa-efficient": "memory-efficient", "fa4": "FA4",
    "flex": "FlexAttention",
}  # fmt: skip


def _newest(records: list[dict], ours: str, case: Case) -> dict:
    """The last of the records that has a case."""
    return next(record for record in reversed(records) if (case, "fwd") in record.get(ours, {}))


def _against_the_fastest(times: dict, ours: dict, case: Case) -> list[str]:
    """Ours, the fastest peer and the ratio, forward and then backward; dashes where no peer has a result."""
    cells = []
    for phase in ("fwd", "bwd"):
        found = {name: times[name][case, phase] for name in _PEERS if (case, phase) in times.get(name, {})}
        mine, best = ours.get((case, phase)), min(found, key=found.get, default=None)
        peer = "–" if best is None else f"{found[best]:.3g} ({_PEERS[best]})"
        ratio = "–" if best is None or mine is None else f"{found[best] / mine:.2f}"
        cells += ["–" if mine is None else f"{mine:.3g}", peer, ratio]
    return cells


def _shape(case: Case) -> list[str]:
    mask = f"window of {case.window[0]:,}" if case.window else "causal" if case.causal else "full"
    tokens = f"{case.B:,} × {case.S:,}" + (f" on {case.Sk} keys" if case.Sk else "")
    return [str(case.D), mask, tokens, str(case.H) if case.H == case.Hkv else f"{case.H} / {case.Hkv}"]


def _single_cases(record: str, table: str) -> list[list[str]]:
    """Cells of the cases of a table, one row each."""
    times = _milliseconds(record)
    of_table = set(tables(torch.device("cuda"))[table])
    cases = [case for case, phase in times["flashtile-auto"] if phase == "fwd" and case in of_table]
    return [[*_shape(case), *_against_the_fastest(times, times["flashtile-auto"], case)] for case in cases]


def test_times_of_other_shapes_are_those_of_the_record():
    expected = _single_cases("h200-shapes.json", "shapes")
    assert len(expected) == 45
    assert list(_table(FIGURES, "head_dim, other shapes")[1:]) == expected
    peers = (*PEERS, "sdpa-efficient")
    both = [_compared(f"{gpu}-shapes.json", "flashtile-auto", peers, "shapes") for gpu in ("h200", "h100")]
    assert [cells for _, *cells in _table(FIGURES, "all cases of other shapes")[1:]] == both


def test_times_of_float32_are_those_of_the_record():
    expected = _single_cases("h100-float32.json", "float32")
    assert len(expected) == 21
    assert list(_table(FIGURES, "head_dim, float32")[1:]) == expected


def test_random_shapes_are_those_of_the_records():
    common, odd = ("sdpa-cudnn", "fa4"), ("sdpa-flash", "sdpa-cudnn")
    expected = [
        _compared("h200-random.json", "flashtile-auto", common, "random"),
        _compared("h100-random.json", "flashtile-auto", common, "random"),
        _compared("h200-random-odd.json", "flashtile-auto", (*odd, "torch-varlen"), "random-odd"),
        _compared("h100-random-odd.json", "flashtile-auto", odd, "random-odd"),
    ]
    assert [cells for _, *cells in _table(FIGURES, "shapes drawn at random")[1:]] == expected
    forward, backward = (expected[0][at].split() for at in (1, 3))
    said = f"{forward[0]} times as fast forward and {backward[0]} times backward as the fastest peer"
    assert f"{said}; the lowest is {min(forward[1], backward[1])[1:-1]}" in " ".join(README.split())


def test_speeds_on_an_h100_are_those_of_the_record():
    compared = functools.partial(_compared, "h100-attention.json", "flashtile-auto", PEERS)
    expected = [compared(table) for table in ("default", "grouped", "mla", "window")]
    assert [cells for _, *cells in _table(FIGURES, "on an H100")[1:]] == expected


def test_mean_speeds_of_float32_are_those_of_the_record():
    _, forward, _, backward, _ = _compared("h100-float32.json", "flashtile-auto", ("sdpa-efficient",), "float32")
    said = f"{forward.split()[0]} times as fast forward and {backward.split()[0]} times backward as PyTorch's"
    assert said in " ".join(README.split())


def test_times_of_functions_are_those_of_the_records():
    """Of the last record that has the case."""
    records = [*map(_milliseconds, ("h200-functions.json", "h200-score-functions.json"))]
    expected = []
    for case in (case for case, phase in records[0]["flashtile-auto"] if phase == "fwd"):
        times = _newest(records, "flashtile-auto", case)
        cells = _against_the_fastest(times, times["flashtile-auto"], case)
        cells = [cell.removesuffix(" (FlexAttention)") for cell in cells]
        expected.append([case.function, str(case.D), f"{case.S:,}", *cells])
    assert list(_table(FIGURES, "function or mask")[1:]) == expected


def test_host_times_are_those_of_the_record():
    rows = json.loads((ROOT / "benchmarks/results/h200-host-time.json").read_text("utf-8"))["rows"]
    times = {(row["impl"], row["phase"]): row["ms"] for row in rows}
    table = _table(FIGURES, "one call, µs")[1:]
    for phase, (_, *cells) in zip(("fwd-nograd", "fwd", "fwd+bwd"), table, strict=True):
        for impl, cell in zip(("flashtile-hopper", "flashtile-triton", "sdpa-flash", "sdpa-cudnn"), cells, strict=True):
            assert float(f"{1000 * times[impl, phase]:.3g}") == float(cell), (impl, phase)


def _rows(record: str) -> list[dict]:
    rows = json.loads((ROOT / "benchmarks/results" / record).read_text("utf-8"))["rows"]
    return [row for row in rows if row["ms"] is not None]


#: Rows of figures.md about what is beside attention, by the beginning of their names.
_OPERATIONS = {
    "layer norm": "layer_norm", "RMS norm": "rms_norm", "dropout, sum and layer norm": "dropout_add_layer_norm",
    "sum and RMS norm": "dropout_add_rms_norm", "rotary": "rotary", "causal softmax": "causal_softmax",
    "softmax with a mask": "masked_softmax", "cross-entropy": "cross_entropy", "linear layer": "fused_dense",
    "perceptron": "fused_mlp",
}  # fmt: skip


def test_speeds_beside_attention_are_those_of_the_record():
    """Against the fastest peer. For products the second column has forward and backward together."""
    ratios = ratios_to_best(_rows("h200-companions.json"))
    table = _table(FIGURES, "operation")[1:]
    for (beginning, op), (name, *cells) in zip(_OPERATIONS.items(), table, strict=True):
        assert name.startswith(beginning)
        phases = ("fwd", "fwd+bwd" if op.startswith("fused") else "bwd")
        found = [[each.value for each in ratios if (each.op, each.phase) == (op, phase)] for phase in phases]
        means = [f"{statistics.geometric_mean(values):.2f}" for values in found]
        lowest = [f" ({min(values):.2f})" if len(values) > 1 else "" for values in found]
        assert cells == [str(len(found[0])), means[0] + lowest[0], means[1] + lowest[1]], name


def _on_a_cpu(row):
    """The cells that name a row of a record of a CPU."""
    case = row["case"]
    page = f", pages of {case['page']}" if case.get("page") else ""
    mask = [_visible_on_a_cpu(case)] if "causal" in case else []
    heads = f"{case['H']} / {case['Hkv']} of {case['D']}"
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[case["dtype"]]
    return f"{case['B']} × {case['S']:,}{page}", heads, *mask, dtype


def _visible_on_a_cpu(case):
    """What a table of a CPU calls the mask or the bias of a case."""
    if case["window"] is not None:
        return f"window of {case['window'][0] + 1}"
    if case.get("mask") is not None:
        return {"padding": "padding", "random0.5": "half of the pairs"}[case["mask"]]
    return "bias with its gradient" if case.get("bias") else "causal" if case["causal"] else "full"


@pytest.mark.parametrize("table, record, columns", [
    ("cache on a CPU", "cpu-decode.json", (("flashtile-cpu",), ("sdpa-flash", "sdpa-gathered"), ("matmul",))),
    ("shape on a CPU", "cpu-grouped.json", (("flashtile-cpu",), ("sdpa-flash",))),
    ("mask or bias on a CPU", "cpu-features.json", (("flashtile-cpu",), ("sdpa-flash",), ("sdpa-math",))),
])  # fmt: skip
def test_times_on_a_cpu_are_those_of_the_records(table, record, columns):
    found = {}
    for row in _rows(record):
        if row["op"] != "copy" and row["ms"] is not None and not row["case"].get("append"):
            found[_on_a_cpu(row), row["impl"], row["phase"]] = f"{row['ms']:.{2 if row['ms'] < 10 else 1}f}"
    lines = _table(FIGURES, table)[1:]
    named = len(lines[0]) - len(columns) * len({phase for *_, phase in found})
    for line in lines:
        case = tuple(line[:named])
        phases = [phase for phase in ("fwd", "bwd") if (case, "flashtile-cpu", phase) in found]
        times = [
            next((found[case, impl, phase] for impl in impls if (case, impl, phase) in found), "–")
            for phase in phases
            for impls in columns
        ]
        assert list(line[named:]) == times, case
    assert {tuple(line[:named]) for line in lines} == {case for case, *_ in found}


@pytest.mark.parametrize("record", ["cpu-decode.json", "cpu-grouped.json"])
def test_no_peer_is_much_faster_on_a_cpu(record):
    """The bar is 0.9 of the speed of PyTorch's fastest in each row."""
    ratios = ratios_to_best(_rows(record))
    slower = [(each.case, each.phase, each.peer, each.value) for each in ratios if each.value < 0.9]
    assert ratios and not slower


def test_decoding_speeds_are_those_of_the_record():
    found = {}
    for row in _rows("h200-decode.json"):
        case = row["case"]
        if row["op"] != "copy" and not case["append"]:
            found[case["B"], case["S"], row["impl"], case["page"]] = f"{round(row['gbps']):,}"
    columns = [
        *(("flashtile-triton", page) for page in (None, 16, 64)),
        *((peer, None) for peer in ("sdpa-flash", "sdpa-cudnn", "fa4")),
    ]  # fmt: skip
    table = _table(FIGURES, "cache")[1:]
    for name, *cells in table:
        batch, length = (int(part.replace(",", "")) for part in name.split(" × "))
        assert cells == [found.get((batch, length, *column), "–") for column in columns], name
    assert len(table) == len({key[:2] for key in found})
    speeds = {key: float(text.replace(",", "")) for key, text in found.items()}
    costs = {(key[:2], key[3]): 1 - speeds[key] / speeds[(*key[:3], None)] for key in speeds if key[3] in (16, 64)}
    small = (8, 4096)
    most = max(cost for (case, _), cost in costs.items() if case != small)
    assert f"up to {100 * most:.0f} % of the speed" in " ".join(FIGURES.split())
    assert f"{100 * costs[small, 64]:.0f} and {100 * costs[small, 16]:.0f} %." in " ".join(FIGURES.split())


def test_speeds_of_several_gpus_are_those_of_the_record():
    found = {}
    for row in _rows("h200x4-context-parallel.json"):
        case, alone = row["case"], row["impl"] == "flashtile-one-gpu" or row["efficiency"] is None
        cell = "–" if row["ms"] is None else f"{row['ms']:.1f}"
        cell += "" if alone else f" ({row['efficiency']:.2f})"
        found.setdefault((case["S"], case["causal"], row["impl"]), []).append(cell)
    ours = [f"flashtile-{name}" for name in ("one-gpu", "all_to_all", "all_gather", "ring")]
    columns = [*ours, "torch-cp-allgather", "torch-cp-alltoall"]
    for name, *cells in _table(FIGURES, "tokens, four GPUs")[1:]:
        length, causal = int(name.split(", ")[0].replace(",", "")), "causal" in name
        assert cells == [" / ".join(found.get((length, causal, impl), ["–", "–"])) for impl in columns], name


def test_training_speeds_are_those_of_the_records():
    names = ("flashtile", "flashtile-compile", "transformers-eager", "transformers-sdpa", "transformers-compile")
    records = {
        "GPT-2 small": "h200-training-small", "GPT-2 medium": "h200-training-medium",
        "GPT-2 small, after 1,000 steps": "h200-training-later",
        "GPT-2 small, dropout 0.1, on an H100": "h100-training-small-dropout",
        "BERT-large, dropout 0.1, on an H100": "h100-training-bert-dropout",
    }  # fmt: skip
    for model, *cells in _table(FIGURES, "tokens per second")[1:]:
        rows = {row["impl"]: row for row in _rows(f"{records[model]}.json") if row["ms"]}
        assert cells == [f"{rows[name]['tokens_per_s']:,.0f}" if name in rows else "–" for name in names], model
        assert all(row["case"].get("dropout_p", 0.0) == (0.1 if "dropout" in model else 0.0) for row in rows.values())


def test_ratios_of_training_with_dropout_are_those_of_the_records():
    eager, compiled = [], []
    for name in ("small", "bert"):
        ms = {row["impl"]: row["ms"] for row in _rows(f"h100-training-{name}-dropout.json")}
        eager.append(f"{ms['transformers-sdpa'] / ms['flashtile']:.2f}")
        compiled.append(f"{ms['transformers-compile'] / ms['flashtile-compile']:.2f}")
    both, both_compiled = " and ".join(eager), " and ".join(compiled)
    words = " ".join(FIGURES.split())
    assert f"flashtile is {both} times as fast as sdpa, and {both_compiled} times where both are compiled" in words
    assert f"with dropout 0.1, GPT-2 and BERT {both_compiled} times as fast" in " ".join(README.split())
    evidence = " ".join((ROOT / "docs/training_evidence.md").read_text("utf-8").split())
    for faster, of_compiled in zip(eager, compiled, strict=True):
        assert f"flashtile's model is {faster} times as fast as" in evidence
        assert f"and {of_compiled} times where both are compiled" in evidence


def test_training_evidence_is_that_of_the_records():
    lines = (ROOT / "docs/training_evidence.md").read_text("utf-8").splitlines()
    records = sorted((ROOT / "benchmarks/results").glob("h?00-training-*.json"))
    assert len(records) >= 10
    for record in records:
        assert record.name in "".join(lines), record.name
        for line in summary(json.loads(record.read_text("utf-8"))["rows"]).splitlines():
            assert line in lines, (record.name, line)


def test_breakdown_is_that_of_the_record():
    document = (ROOT / "docs/io_model.md").read_text("utf-8")
    for phase, heading in (("fwd", "forward, step"), ("bwd", "backward, step")):
        rows = [row for row in _rows("h200-breakdown.json") if row["phase"] == phase]
        standard = [row for row in rows if row["impl"] == "standard"]
        total = sum(row["ms"] for row in standard)
        (one_call,) = (row["ms"] for row in rows if row["impl"] == "flashtile-triton")
        times = [*(row["ms"] for row in standard), total, one_call]
        table = _table(document, heading)[1:]
        assert [name for name, *_ in table[: len(standard)]] == [row["step"] for row in standard]
        assert [cells for _, *cells in table] == [[f"{ms:.2f}", f"{ms / total:.0%}"] for ms in times]


def test_counted_traffic_is_that_of_the_record():
    table = _table((ROOT / "docs/io_model.md").read_text("utf-8"), "computation")[1:]
    for row, (name, *cells) in zip(_rows("h200-io.json"), table, strict=True):
        predicted, counted = (row[key]["bytes_read"] + row[key]["bytes_written"] for key in ("predicted", "counted"))
        assert abs(predicted - counted) < 0.05 * counted
        assert [name, *cells] == [
            row["impl"], f"{row['predicted']['flops'] / 1e9:,.0f}", f"{predicted / 1e9:.2f}", f"{counted / 1e9:.2f}",
            f"{predicted / counted:.2f}", f"{row['ms']:.2f}", f"{row['predicted']['least_ms']:.2f}",
        ]  # fmt: skip
