"""The page that shows records: what it draws, that it is whole and needs nothing from elsewhere."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flashtile.bench.__main__ import main
from flashtile.bench.cases import Case
from flashtile.bench.companions.norms import LayerNorm
from flashtile.bench.html import charts, figures, svg
from flashtile.bench.html.figures import Named, implementations, sections
from flashtile.bench.html.report import write_report

RECORDS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SVG = "{http://www.w3.org/2000/svg}"


def row(impl, case, ms, phase="fwd", op="attention", **more):
    return {"op": op, "phase": phase, "impl": impl, "case": case, "ms": ms, "tflops": 4 / ms, "gbps": 8 / ms, **more}


def length(seq, **more):
    return Case(2, seq, 4, 4, 64, 64, **more).record()


def record(rows, gpu="NVIDIA H200"):
    return {"machine": {"gpu": gpu}, "versions": {"torch": "2"}, "commit": "c" * 40, "command": "a <b>", "rows": rows}


def named(rows, **facts):
    found = record(rows, **facts)
    return Named(found, "r.json", implementations([found]))


LINES = [
    row(impl, length(seq), ms * seq, phase)
    for impl, ms in (("flashtile-triton", 1.0), ("peer", 2.0))
    for seq in (512, 1024, 2048)
    for phase in ("fwd", "bwd")
]


class Elements(HTMLParser):
    """Opening and closing in order; what is named as a source."""

    def __init__(self):
        super().__init__()
        self.open, self.problems, self.targets, self.identifiers = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self._look(tag, attributes)

    def handle_startendtag(self, tag, attributes):
        self._look(tag, attributes)

    def _look(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href"):
                self.targets.append(value)
            if name == "id":
                self.identifiers.append(value)
            if name.startswith("on") or tag in ("script", "link", "iframe"):
                self.problems.append(f"{tag} {name}")

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"closes {tag}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The page of all committed records."""
    path = tmp_path_factory.mktemp("report") / "deep" / "report.html"
    assert write_report(RECORDS, path) > 40
    return path


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(whole):
    text = whole.read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>\n")
    ElementTree.fromstring(text.partition("\n")[2])  # well-formed
    elements = Elements()
    elements.feed(text)
    assert not elements.problems and not elements.open
    assert len(set(elements.identifiers)) == len(elements.identifiers)
    assert {target[1:] for target in elements.targets} == set(elements.identifiers)
    assert all(target.startswith("#") for target in elements.targets)
    assert "url(" not in text and "@import" not in text
    assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}


def test_the_page_suits_phones_and_dark_rooms(whole):
    text = whole.read_text("utf-8")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1"/>' in text
    assert "@media (prefers-color-scheme: dark)" in text and "color-scheme: light dark" in text
    assert not re.search(r'fill="#|stroke="#', text), "colours are of the style sheet, which knows the dark"
    assert len(set(re.findall(r"--c\d: (#\w+)", text))) == 20  # ten each for light and dark


def test_every_figure_has_its_command_and_machine(whole):
    root = ElementTree.fromstring(whole.read_text("utf-8").partition("\n")[2])
    html = "{http://www.w3.org/1999/xhtml}"
    commands = {json.loads(path.read_text("utf-8"))["command"] for path in RECORDS}
    found = list(root.iter(f"{html}figure"))
    for figure in found:
        caption = figure.find(f"{html}figcaption")
        assert caption.find(f"{html}code").text in commands and re.match(r"\S+\.json, .+, commit \w+", caption.text)
        drawing = figure.find(f"{SVG}svg")
        assert drawing.get("aria-label") and drawing.get("viewBox")
    assert len(found) > 40


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_renders_it_without_a_word_on_the_console(whole, tmp_path, dark):
    picture = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync", "--disable-quic", f"--user-data-dir={tmp_path}"]
    options += ["--enable-logging=stderr", "--window-size=500,900", f"--screenshot={picture}"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run([CHROMIUM, *options, whole.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and picture.stat().st_size > 10_000, done.stderr
    assert "CONSOLE" not in done.stderr


def test_lengths_make_lines_in_order():
    first, second = figures.speeds(named(LINES[::-1]))
    assert {first.title, second.title} == {f"head_dim 64, full, bf16, {phase}" for phase in ("forward", "backward")}
    assert first.headings == ("sequence length", "peer", "flashtile-triton")
    assert first.lines[0] == ("512", *(f"{4 / (ms * 512):.3g}" for ms in (2.0, 1.0)))
    lines = ElementTree.fromstring(first.svg).findall(f"{SVG}polyline")
    assert len(lines) == 2
    for line in lines:
        across = [float(pair.split(",")[0]) for pair in line.get("points").split()]
        assert across == sorted(across)


def test_ratios_are_to_the_best_peer():
    slower = [row("slow", length(seq), 9.0 * seq, phase) for seq in (512, 1024, 2048) for phase in ("fwd", "bwd")]
    chart, _ = figures.ratios(named([*LINES, *slower]))
    assert chart.title.startswith("flashtile-triton over the best peer")
    assert [line[1] for line in chart.lines] == ["2", "2", "2"] and 'class="level"' in chart.svg


def test_what_has_no_lengths_stands_alone():
    rows = [*LINES, row("flashtile-triton", length(4096, mask="tiles128:0.5"), 3.0)]
    chart, *more = figures.kinds(named(rows))
    assert not more and chart.lines == (("b2-h4-d64-full-tiles128:0.5-s4096-bf16", "1.33"),)


def test_memory_against_length():
    rows = [row("plain", {"S": seq, "B": 1}, 1.0, memory_mib=seq**2) for seq in (1024, 2048)]
    for one in rows:
        del one["tflops"]
    memory, time = figures.lengths(named(rows))
    assert memory.title == "Memory, forward" and memory.lines[0] == ("1k", "1048576") and time.lines[0][1] == "1"


def test_memory_of_each_head_size():
    rows = [{**one, "peak_mib": one["case"]["S"] / 4} if one["phase"] == "bwd" else one for one in LINES]
    (chart,) = figures.lengths(named(rows))
    assert chart.title == "head_dim 64, full, bf16, memory with the backward"
    assert chart.lines[0] == ("512", "128", "128")


def test_points_lie_under_the_roof_of_a_known_machine():
    chart, _ = figures.rooflines_of(named(LINES))
    assert chart.title == "H200, bfloat16, forward"
    case, bytes_moved = Case.from_record(length(512)), 4 * 2 * 512 * 4 * 64 * 2 + 2 * 4 * 512 * 4
    assert chart.lines[0][1] == f"{case.flops('fwd') / bytes_moved:.0f}"
    assert figures.rooflines_of(named(LINES, gpu="NVIDIA H100 PCIe")) == []
    peers_alone = [one for one in LINES if one["impl"] == "peer"]
    assert figures.rooflines_of(named(peers_alone)) == []


def test_companions_by_bandwidth_or_products():
    case = LayerNorm("bf16", 16, 1024)
    found = named([row("eager", case.record(), 2.0, op="layer_norm")])
    (chart,) = figures.bandwidths(found)
    assert chart.lines == ((case.name, "4"),) and figures.products(found) == []


def test_other_operations_are_drawn_by_their_time():
    rows = [row("a", {"S": 1, "flag": None}, 2.0, op="new-op"), row("a", {"S": 1}, 2.0, op="cache-decode")]
    (other,), (decoding,) = figures.others(named(rows)), figures.decoding(named(rows))
    assert other.title == "New-op, forward" and other.lines == (("S=1", "2"),)
    assert decoding.title == "Cache-decode, forward" and decoding.lines == (("S=1", "4"),)


def test_training_by_length_losses_and_accuracy():
    step = {"op": "train-step", "phase": "fwd+bwd+step"}
    rows = [
        row("flashtile", {"model": "m", "B": 8, "S": seq}, 1.0, **step, tokens_per_s=1e6 / seq, peak_mib=seq)
        for seq in (1024, 4096, 16384)
    ]
    rows.append(row("flashtile", {"model": "other", "B": 8, "S": 64}, 1.0, **step, tokens_per_s=5.0))
    speed, memory, alone = figures.tokens(named(rows))
    assert speed.title == "train-step model=m, speed" and speed.lines[0] == ("1k", "977")
    assert memory.lines[-1] == ("16k", "16384") and alone.lines[0][1] == "5"
    curve = [float(i) for i in range(600)] + [None] * 10
    rows = [row(impl, {"model": "m"}, 1.0, op="train-curve", curve=curve) for impl in ("flashtile", "plain")]
    (chart,) = figures.losses(named(rows))
    assert chart.headings == ("step", "flashtile", "plain") and chart.lines == (("600", "594", "594"),)
    assert "<circle" not in chart.svg
    broken = row("flashtile", {}, 1.0, op="train-curve", curve=[None])
    assert figures.losses(named([broken])) == []
    rows = [row("flashtile", {"seed": 1}, 1.0, op="lra-listops", accuracy=0.5)]
    (chart,) = figures.accuracies(named(rows))
    assert chart.title == "Lra-listops" and chart.lines == (("seed=1", "50"),) and figures.others(named(rows)) == []


def test_traffic_and_breakdown():
    parts = {"bytes_read": 3e9, "bytes_written": 1e9}
    io = row("standard", {"B": 1}, 2.0, op="attention-io", predicted=parts, counted={**parts, "bytes_read": 5e9})
    uncounted = {**io, "impl": "flashtile", "counted": None}
    (chart,) = figures.traffic(named([io, uncounted]))
    assert chart.lines == (("standard", "4", "6"), ("flashtile", "4", "–"))
    steps = [
        row("standard", {"B": 1}, ms, op="attention-breakdown", step=name) for name, ms in (("mask", 1.0), ("pv", 3))
    ]
    (stacked,) = figures.breakdowns(named(steps))
    assert stacked.title == "Forward, B=1"
    assert stacked.lines == (("standard", "mask", "1"), ("standard", "pv", "3"))
    widths = [float(part.get("width")) for part in ElementTree.fromstring(stacked.svg).findall(f"{SVG}rect")]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.3)


def test_what_has_no_time_is_left_out():
    rows = [{**one, "ms": None, "why": "it broke"} for one in LINES]
    assert all(not section.figures for section in sections([named(rows)]))


def test_colours_are_told_apart_in_a_record_and_the_same_on_the_page():
    first = record([row(impl, length(1), 1.0) for impl in ("p", "flashtile-a", "q")])
    second = record([row(impl, length(1), 1.0) for impl in ("flashtile-b", "r", "p")])
    index = implementations([first, second])
    for one in (first, second):
        used = [index[found["impl"]] for found in one["rows"]]
        assert len(set(used)) == len(used)
    assert index["flashtile-a"] == index["flashtile-b"] == 0


def test_words_of_records_are_no_markup(tmp_path):
    path = tmp_path / "r&d.json"
    path.write_text(json.dumps(record([row("<b>&", length(seq), 1.0) for seq in (1, 2, 4)])))
    write_report([path], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<b>" not in text and "a &lt;b&gt;" in text and "r&amp;d.json" in text
    ElementTree.fromstring(text.partition("\n")[2])


@pytest.mark.parametrize(
    ("values", "top", "ticks"), [((0.19,), 0.2, 5), ((7, 790), 800, 5), ((0,), 1.0, 6), ((1.0,), 1.0, 6)]
)
def test_linear_axes_end_at_round_numbers(values, top, ticks):
    axis = svg.linear_axis(values, 0, 100)
    assert axis.low == 0 and axis.high == pytest.approx(top) and len(axis.ticks) == ticks
    assert axis(0) == 0 and axis(axis.high) == 100


def test_logarithmic_axes_end_at_powers():
    axis = svg.log_axis([512, 16384], 0, 100, base=2)
    assert axis.ticks == (512, 1024, 2048, 4096, 8192, 16384) and axis(512) == 0 and axis(16384) == pytest.approx(100)
    single = svg.log_axis([1024], 0, 100, base=2)
    assert single.low == 1024 and single.high == 2048
    assert svg.log_axis([0.02, 300], 0, 1).ticks == (0.01, 0.1, 1, 10, 100, 1000)
    assert [svg.number(v) for v in (512, 4096, 2**20, 250_000, 0.5)] == ["512", "4k", "1M", "250k", "0.5"]


def test_long_names_are_cut_in_the_drawing_alone():
    chart = charts.dot_chart("t", {"n" * 80: {"a": 1.0}}, {"a": 0}, "ms")
    assert "n" * 60 not in re.findall(r">(n+…?)</text>", chart.svg)[0] and chart.lines[0][0] == "n" * 80


def test_the_module_writes_the_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(RECORDS[0]), "--output", str(page)]) == 0
    assert "figures" in capsys.readouterr().out and page.exists()
    with pytest.raises(SystemExit):
        main(["report", str(page)])
    assert "is no JSON file" in capsys.readouterr().err
