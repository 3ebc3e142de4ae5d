"""The documents are true: their Python runs and prints what they say, their links lead somewhere, the files, targets
and names in them exist, and their tables are those of the code and of the records."""

import functools
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile._backends.devices import CARDS, KNOWN_DEVICES
from flashtile.ops.attention.repeated import forget_calls
from flashtile.ops.attention.select import BACKENDS
from support.running.each_case import each_case

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
_SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"^prints\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
_FILE = re.compile(r"`((?:src|tests|docs|decisions|examples|benchmarks|\.ci)/[\w./-]+)`")
_SOURCE_FILE = re.compile(r"`(?:[\w.]+/)*(\w+\.py)`")
_TARGET = re.compile(r"\bmake ([a-z][a-z-]*)\b")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _snippets(text: str) -> list[tuple[int, str]]:
    """(line number, source) of each Python snippet."""
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in _SNIPPET.finditer(text)]


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@functools.cache
def _source_files() -> set[str]:
    folders = ("src", "tests", "tools", "benchmarks", "examples")
    return {file.name for folder in folders for file in (ROOT / folder).rglob("*.py")}


@functools.cache
def _words_of_the_code() -> set[str]:
    folders = ("src", "tests", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    return {word for path in files for word in (path.stem, *re.findall(r"\w+", path.read_text("utf-8")))}


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if _SNIPPET.search(path.read_text("utf-8"))], ids=_name)
def test_snippets_run(path, monkeypatch, capsys):
    """All snippets of a document run in order in one namespace, and print what the document says that they print.

    `torch.compile` stops short of generating C++.
    """
    text = path.read_text("utf-8")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
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


@each_case("path", DOCUMENTS)
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
    if path.parent == ROOT / "docs":  # decisions keep the names of their time
        unknown = set(_SOURCE_FILE.findall(text)) - _source_files()
        assert not unknown, f"names {unknown}"


@pytest.mark.parametrize(
    "name", ["adding_a_feature", "adding_an_operation", "design", "kernels", "reading_the_kernels"]
)
def test_names_in_the_pages_about_the_code_exist(name):
    """Each name in backticks that no prose has: `with_underscores` or `InCapitals`."""
    prose = re.sub(
        r"^```.*?^```$", "", (ROOT / "docs" / f"{name}.md").read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    named = {word for span in re.findall(r"`([^`\n]+)`", prose) for word in re.findall(r"\w+", span)}
    unknown = {word for word in named - _words_of_the_code() if re.search(r"\w_\w|[a-z][A-Z]", word)} - {
        "custom_op"
    }  # PyTorch's
    assert not unknown


def _tables(text):
    """The rows of all tables, as lists of cells."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_what_was_tried_of_each_package_is_held_by_tests():
    """Its files exist by the test above, and name the package."""
    section = (ROOT / "docs/integrations.md").read_text("utf-8").partition("## What was tried")[2]
    rows = _tables(section)[2:]
    assert len(rows) > 8
    for package, version, device, tests in rows:
        assert re.search(r"\d", version), package
        assert re.match(r"CPU|GPU", device), package
        files = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        assert files, package
        source = "".join((ROOT / file).read_text("utf-8") for file in files)
        name = re.search(r"[\w.]+", package.removeprefix("PyTorch's "))[0]
        assert name.lower().removeprefix("torch.") in source.lower().replace("_", ""), package


def test_every_trainer_is_held_by_a_test():
    text = (ROOT / "docs/integrations.md").read_text("utf-8").partition("\n## Trainers")[2].partition("\n## ")[0]
    rows = _tables(text)[2:]
    assert {row[0].strip("`") for row in rows} == {
        path.name for path in (ROOT / "examples/trainers").glob("*.py") if path.stem != "tiny_llama"
    }
    source = (ROOT / "tests/examples/test_trainers.py").read_text("utf-8")
    for program, version, shows in rows:
        assert program.strip("`").partition("_")[0] in source, program
        assert re.search(r"\d\.\d", version) and shows, program


def test_the_minutes_that_the_tests_take_are_the_same_everywhere():
    for target in ("test", "test-all"):
        texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")]
        lines = [line for text in texts for line in text.splitlines() if line.startswith(f"| `make {target}` |")]
        minutes = [re.search(r"(\d+) minutes", line)[1] for line in lines]
        assert len(minutes) == 2 and len(set(minutes)) == 1, lines


@each_case("path", DECISIONS)
def test_decisions_are_short_and_dated(path):
    for record in path.read_text("utf-8").split("\n## ")[1:]:
        title, _, text = record.partition("\n")
        assert len(record.split()) <= 200, title
        assert re.match(r"\n\*20\d\d-\d\d-\d\d", text), title


@each_case("path", DOCUMENTS)
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
    guide = (ROOT / "docs/attention.md").read_text("utf-8").partition("## Choosing a backend")[2]
    assert re.findall(r"^\d\. `(\w+)`", guide, re.MULTILINE) == [
        name for name in BACKENDS.by_name if name != "reference"
    ]


def test_cards_are_those_of_the_code_and_of_the_records():
    """Architectures, cards and shared memory, the kernels that serve them, and the cards that have a record."""
    rows = _table((ROOT / "docs/hardware.md").read_text("utf-8"), "architecture")[1:]
    assert [row[0] for row in rows] == list(KNOWN_DEVICES)
    machines = [json.loads(path.read_text("utf-8"))["machine"] for path in (ROOT / "benchmarks/results").glob("*.json")]
    q = torch.empty(1, 4096, 8, 128, dtype=torch.float16, device="meta")
    for arch, cards, memory, kernels, state in rows:
        assert cards.split(", ") == list(CARDS[arch]), arch
        assert memory == f"{KNOWN_DEVICES[arch].shared_memory // 1024} KiB", arch
        first = flashtile.explain(q, q, q, causal=True, device=arch).backend
        assert kernels == {"hopper": "Hopper, portable", "triton": "portable"}[first], arch
        named = dict(re.findall(r"(\w+): ([^;]+)", state))
        assert state == "compiled" or set(named) <= {"measured", "checked"}, arch
        gpus = {machine["gpu"] for machine in machines if machine.get("gpu_capability") == arch}
        measured = named["measured"].split(", ") if "measured" in named else []
        assert all(any(card in gpu for gpu in gpus) for card in measured), f"{arch}: no record of some of {measured}"
        assert all(any(card in gpu for card in measured) for gpu in gpus), f"{arch}: not {measured}, but {gpus}"


_SPEC = importlib.util.spec_from_file_location("record_tables", ROOT / "tools" / "record_tables.py")
assert _SPEC is not None and _SPEC.loader is not None
record_tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(record_tables)


@each_case("path", record_tables.DOCUMENTS)
def test_tables_are_those_of_the_records(path):
    text = path.read_text("utf-8")
    assert "by tools/record_tables.py" in text
    assert record_tables.with_tables(text) == text, "run python tools/record_tables.py --write"


def test_tables_of_older_code_say_so():
    ages = record_tables._ages()
    records = {path.stem for path in (ROOT / "benchmarks/results").glob("*.json")}
    assert set(ages) == records, "run python tools/record_age.py --write"
    for name, (same, functions) in ages.items():
        said = record_tables.older_code([name])
        assert (f" {same} of {functions} " in said) if 2 * same < functions else not said


def test_every_table_is_in_a_document():
    text = "".join(path.read_text("utf-8") for path in record_tables.DOCUMENTS)
    assert not [name for name in record_tables.TABLES if f"<!-- {name}, by tools/record_tables.py -->" not in text]


def test_no_peer_is_much_faster_on_a_cpu():
    """The bar is 0.9 of the speed of PyTorch's fastest in each case."""
    for record in ("cpu-decode", "cpu-grouped"):
        for phase in ("fwd", "bwd"):
            ratios = record_tables.ratios(record, phase, "flashtile-cpu", record_tables.CPU_PEERS)
            assert all(value >= 0.9 for value in ratios.values)


def test_figures_in_the_text_are_those_of_the_records():
    """What the documents say without a table."""
    readme = " ".join(README.split())
    which_one, figures = " ".join(WHICH_ONE.split()), " ".join(FIGURES.split())
    forward, backward = (cell.split()[0] for cell in record_tables.readme_speeds()[1][2:])
    said = f"{forward} times as fast forward and {backward} times as fast backward"
    assert said in readme
    biases = record_tables.ratios(
        "h100-features", "bwd", "flashtile-auto", ("flex", "sdpa-efficient"), record_tables.KEEP["bias"]
    )
    times = f"{min(biases.values):.1f} to {max(biases.values):.1f} times"
    assert f"its backward has {times} the speed" in which_one
    _, _, count, forward, _, backward, _ = record_tables.random_shapes()[1]
    lowest = min(cell.split()[1][1:-1] for cell in (forward, backward))
    said = f"{forward.split()[0]} times as fast forward and {backward.split()[0]} times backward as the fastest peer"
    assert f"**{count} shapes drawn at random**: {said}; the lowest is {lowest}" in readme
    _, _, forward, _, backward, _ = record_tables.ratio_table("float32")[-1]
    assert f"{forward.split()[0]} times as fast forward and {backward.split()[0]} times backward as PyTorch's" in readme
    kinds = {(row["case"]["function"], row["case"]["D"]) for row in _rows("h200-functions")}
    of = record_tables.function_ratios
    ratios = [[ratio for kind in kinds for ratio in of(phase, *kind).values] for phase in ("fwd", "bwd")]
    means = [record_tables.Ratios(found).mean for found in ratios]
    assert f"The mean is {means[0]:.2f} forward and {means[1]:.2f} backward" in figures
    costs = {}
    for name, whole, *pages in (row[:4] for row in record_tables.decoding()[1:] if row[2] != "–"):
        costs[name] = [100 - 100 * int(page.replace(",", "")) / int(whole.replace(",", "")) for page in pages]
    small = costs.pop("8 × 4,096")
    assert f"up to {max(cost for each in costs.values() for cost in each):.0f} % of the speed" in figures
    assert f"those of 64 and 16 rows cost {small[1]:.0f} and {small[0]:.0f} %" in figures


def _rows(record: str) -> list[dict]:
    return record_tables.rows_of(record.removesuffix(".json"))


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


def test_every_record_of_training_is_named():
    text = (ROOT / "docs/training_evidence.md").read_text("utf-8")
    records = sorted((ROOT / "benchmarks/results").glob("h?00-training-*.json"))
    assert len(records) >= 10 and not [record.name for record in records if record.name not in text]


def test_breakdown_is_that_of_the_record():
    text = " ".join((ROOT / "docs/io_model.md").read_text("utf-8").split())
    said = []
    for phase in ("fwd", "bwd"):
        rows = [row for row in _rows("h200-breakdown.json") if row["phase"] == phase]
        steps = {row["step"]: row["ms"] for row in rows if row["impl"] == "standard"}
        products = sum(
            ms for step, ms in steps.items() if step in ("q kᵀ", "weights · v", "dout · vᵀ", "dq", "dk", "dv")
        )
        (one_call,) = (row["ms"] for row in rows if row["impl"] == "flashtile-triton")
        total = sum(steps.values())
        said.append((f"{100 * products / total:.0f} %", f"{total:.2f}", f"{one_call:.2f}"))
    (forward, backward) = said
    assert (
        f"{forward[0]} of the standard forward's {forward[1]} ms and {backward[0]} of the backward's {backward[1]}"
        in text
    )
    assert f"takes {forward[2]} and {backward[2]} ms" in text


def test_counted_traffic_is_that_of_the_record():
    table = _table((ROOT / "docs/io_model.md").read_text("utf-8"), "computation")[1:]
    for row, (name, *cells) in zip(_rows("h200-io.json"), table, strict=True):
        predicted, counted = (row[key]["bytes_read"] + row[key]["bytes_written"] for key in ("predicted", "counted"))
        assert abs(predicted - counted) < 0.05 * counted
        assert [name, *cells] == [
            row["impl"], f"{row['predicted']['flops'] / 1e9:,.0f}", f"{predicted / 1e9:.2f}", f"{counted / 1e9:.2f}",
            f"{predicted / counted:.2f}", f"{row['ms']:.2f}", f"{row['predicted']['least_ms']:.2f}",
        ]  # fmt: skip
