"""The page that shows records: what it draws and says, that it is whole, fits a screen and needs no network."""

import collections
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

import pytest

from flashtile.bench import html
from flashtile.bench.cases import Case
from flashtile.bench.html import make_verdict, words, write_report
from flashtile.bench.html.charts import Named, in_order, record_part, styles
from flashtile.bench.html.drawing import DotChart, LineChart, Series, draw
from flashtile.bench.serving_cases import ServingCase
from flashtile.bench.start import UserError
from support.running.browser import CHROMIUM, open_browser
from support.running.each_case import each_case
from support.running.once import once

RECORDS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
HTML, SVG = "{http://www.w3.org/1999/xhtml}", "{http://www.w3.org/2000/svg}"


def row(impl, case, ms, phase="fwd", op="attention", **more):
    return {"op": op, "phase": phase, "impl": impl, "case": case, "ms": ms, "tflops": 4 / ms, "gbps": 8 / ms, **more}


def length(seq, **more):
    return Case(2, seq, 4, 4, 64, 64, **more).record()


def record(rows, gpu="NVIDIA H200"):
    return {"machine": {"gpu": gpu}, "versions": {"torch": "2"}, "commit": "c" * 40, "command": "a <b>", "rows": rows}


def named(rows, name="r.json", **facts):
    return Named(record(rows, **facts), Path(name))


def charts_of(rows, words):
    """The charts of a record of some rows that have these words in their titles."""
    return [chart for chart in record_part(named(rows)).charts if words in chart.title]


LINES = [
    row(impl, length(seq), ms * seq, phase)
    for impl, ms in (("flashtile-triton", 1.0), ("peer", 2.0))
    for seq in (512, 1024, 2048)
    for phase in ("fwd", "bwd")
]


#: The page of all records takes several seconds to draw.
_draws_all_records = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The page of all committed records, with the largest pictures of each kind."""
    pytest.importorskip("matplotlib")

    def make(folder):
        with mock.patch.object(html, "draw", _LargestDrawn().draw):
            written = write_report(RECORDS, folder / "deep" / "report.html")
        assert written.pictures > 40 and written.tables > 40 and not written.notes

    return once(tmp_path_factory, "report", make) / "deep" / "report.html"


class _LargestDrawn:
    """Draws a chart if it is larger in some way than those of its kind so far; others get an empty picture."""

    def __init__(self):
        self.largest = collections.defaultdict(lambda: (0, 0, 0))

    def draw(self, chart, styles, number):
        dots = isinstance(chart, DotChart)
        kind = (dots, chart.logarithmic, chart.level is None, *(() if dots else (chart.steps, not chart.roof)))
        names = list(chart.cases) if dots else [one.name for one in chart.series]
        points = sum(map(len, chart.cases.values() if dots else (one.points for one in chart.series)))
        sizes, largest = (points, len(names), max(map(len, names))), self.largest[kind]
        if all(size <= other for size, other in zip(sizes, largest)):
            return '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 200"/>'
        self.largest[kind] = tuple(map(max, sizes, largest))
        return draw(chart, styles, number)


def parsed(path):
    return ElementTree.fromstring(path.read_text("utf-8").partition("\n")[2])


def words_in(element):
    return " ".join(part for text in element.itertext() if (part := text.strip()))


# --- the whole page -------------------------------------------------------------------------------------------------


@_draws_all_records
def test_the_page_is_whole_and_needs_nothing_from_elsewhere(whole):
    text = whole.read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>\n")
    elements = list(parsed(whole).iter())  # it is well-formed
    forbidden = {HTML + tag for tag in ("script", "link", "iframe")}
    assert not [each for each in elements if each.tag in forbidden or any(name[:2] == "on" for name in each.attrib)]
    identifiers = [each.get("id") for each in elements if each.get("id")]
    targets = [each.attrib[name] for each in elements for name in ("src", "href") if name in each.attrib]
    assert len(set(identifiers)) == len(identifiers)
    assert targets and set(targets) <= {f"#{identifier}" for identifier in identifiers}
    assert "@import" not in text and set(re.findall(r"url\((.)", text)) <= {"#"}
    known = {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[\w./]+", text)) <= known


@_draws_all_records
def test_the_page_opens_with_the_verdict_and_four_charts_and_is_small(whole):
    pictures = re.findall(r"<svg[^>]*[^/]>.*?</svg>", whole.read_text("utf-8"))
    assert whole.stat().st_size <= 750_000 and sum(map(len, pictures)) <= 6_000 * len(pictures)
    first, read, *others = parsed(whole).findall(f"{HTML}body/{HTML}main/{HTML}section")
    assert first.find(f"{HTML}h2").text == "Verdict" and len(list(first.iter(f"{SVG}svg"))) == 4
    said = words_in(first)
    for machine in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "AMD EPYC (2 cores)"):
        assert f"On {machine} flashtile is faster than the fastest other implementation in" in said
    assert "cuDNN through PyTorch" in said and "sdpa-cudnn" not in said
    assert "How to read it" in words_in(read)
    assert all([child.tag for child in section] == [f"{HTML}details"] for section in others)


@_draws_all_records
def test_the_page_suits_dark_rooms(whole):
    text = whole.read_text("utf-8")
    assert "@media (prefers-color-scheme: dark)" in text and "color-scheme: light dark" in text
    assert not re.search(r"#[0-9a-f]{6}", text.partition("</style>")[2]), "colours are of the style sheet"
    assert len(set(re.findall(r"--c\d: (#\w+)", text))) == 20  # ten each for light and dark


@_draws_all_records
def test_the_page_says_what_was_measured_on_what(whole):
    body = parsed(whole).find(f"{HTML}body")
    introduction = words_in(body.find(f"{HTML}header"))
    for said in ("attention", "serving", "training", "NVIDIA H200", "AMD EPYC (2 cores)", "PyTorch"):
        assert said in introduction, said
    names = words_in(body.find(f".//{HTML}section[@id='names-of-implementations']"))
    assert "FlashAttention-4 fa4" in names and "flashtile, kernels for Hopper flashtile-hopper" in names
    machines = [heading.text.strip() for heading in body.iter(f"{HTML}h2")]
    assert machines[2] == "NVIDIA H100 80GB HBM3" and machines[-2].endswith("(2 cores)")


@_draws_all_records
def test_no_title_or_label_is_a_dump_of_keys_or_a_checksum(whole):
    root = parsed(whole)
    said = [words_in(found) for tag in ("h2", "h3", "h4", "th") for found in root.iter(HTML + tag)]
    said += [words_in(found) for svg in root.iter(f"{SVG}svg") for found in svg.iter(f"{SVG}text")]
    assert len(said) > 1000
    for text in said:
        assert not re.search(r"[={}\[\]]|sha256|\b[0-9a-f]{16,}\b|None|True|False", text), text


@_draws_all_records
def test_charts_of_a_group_have_different_titles_and_every_group_names_machine_and_record(whole):
    root, files = parsed(whole), {path.name for path in RECORDS}
    commands = {json.loads(path.read_text("utf-8"))["command"] for path in RECORDS}
    assert {code.text for code in root.iter(f"{HTML}code")} == commands
    count = 0
    for section in root.iter(f"{HTML}section"):
        section = next(iter(section.findall(f"{HTML}details[@class='fold']")), section)
        headings = section.findall(f"{HTML}summary/{HTML}h3")
        assert all(found.text.strip() and found.find(f"{HTML}span").text in files for found in headings)
        for grid in section.findall(f"{HTML}div"):
            titles = [found.find(f"{HTML}h4").text for found in grid.findall(f"{HTML}figure")]
            assert len(set(titles)) == len(titles), titles
            count += len(titles)
    assert count > 100


# --- in a browser ---------------------------------------------------------------------------------------------------

#: Elements that reach past the screen or their own box, or are cut off in a picture.
_OVERFLOWS = """
(() => {
  const screen = document.documentElement.clientWidth;
  const found = document.scrollingElement.scrollWidth > screen ? [`page ${document.scrollingElement.scrollWidth}`] : [];
  for (const element of document.querySelectorAll('body *')) {
    const place = element.getBoundingClientRect();
    const picture = element.closest('svg');
    const frame = picture && element !== picture ? picture.getBoundingClientRect() : {left: 0, right: screen};
    const words = !picture || element.tagName === 'text';
    if (words && place.width && (place.right > frame.right + 2 || place.left < frame.left - 2))
      found.push(`${element.tagName} ${element.textContent.trim().slice(0, 60)} ${place.left} to ${place.right}`);
    if (!picture && element.clientWidth && element.scrollWidth > element.clientWidth + 1)
      found.push(`${element.tagName} scrolls: ${element.textContent.trim().slice(0, 60)}`);
  }
  return found.slice(0, 5);
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with open_browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@_draws_all_records
def test_in_a_browser_nothing_overflows_and_no_request_leaves_the_page(whole, browser):
    """One test, because the page of all records takes longer to draw than to look at."""
    for width, dark in ((1280, False), (390, True)):
        browser.open(whole, width, dark=dark)
        assert browser.evaluate("document.documentElement.clientWidth") == width
        assert browser.evaluate(_OVERFLOWS) == []
        assert browser.evaluate("document.documentElement.scrollHeight") <= 6_000
        browser.evaluate("document.querySelectorAll('details').forEach(found => found.open = true)")
        assert browser.evaluate(_OVERFLOWS) == []
        assert browser.requests == [whole.as_uri()] and not browser.messages
        assert len(browser.screenshot()) > 10_000


def test_the_look_for_overflows_and_requests_sees_them(browser, tmp_path):
    page = tmp_path / "wide.html"
    page.write_text("<p style='width: 2000px'>wide</p><img src='http://127.0.0.1:9/x.png'>", "utf-8")
    browser.open(page, 390)
    assert any("wide" in found for found in browser.evaluate(_OVERFLOWS))
    assert browser.requests == [page.as_uri(), "http://127.0.0.1:9/x.png"] and browser.messages


# --- which charts ---------------------------------------------------------------------------------------------------


def test_lengths_make_lines_in_order():
    first, second = charts_of(LINES[::-1], ": TFLOP/s")
    assert {first.title, second.title} == {"Forward: TFLOP/s", "Backward: TFLOP/s"}
    table = first.table()
    assert table.headings == ["sequence length (tokens)", "peer", "flashtile, portable kernels"]
    assert table.lines[0] == ["512", *(f"{4 / (ms * 512):.3g}" for ms in (2.0, 1.0))]
    for series in first.series:
        assert [x for x, _ in series.points] == [512, 1024, 2048]


def test_titles_say_what_differs():
    wide = [{**one, "case": {**one["case"], "D": 128, "Dv": 128}} for one in LINES]
    titles = {chart.title for chart in charts_of([*LINES, *wide], ": TFLOP/s")}
    phases = ("Forward", "Backward")
    assert titles == {f"{phase}, head_dim {dim}: TFLOP/s" for phase in phases for dim in (64, 128)}
    part = record_part(named(LINES))
    assert part.common == "head_dim 64, full, bfloat16" and part.title == "Attention: plain"


def test_ratios_are_to_the_best_peer():
    slower = [row("slow", length(seq), 9.0 * seq, phase) for seq in (512, 1024, 2048) for phase in ("fwd", "bwd")]
    chart, _ = charts_of([*LINES, *slower], "best peer")
    assert chart.title == "Forward: speed over the best peer" and chart.level == 1.0
    assert [line[1] for line in chart.table().lines] == ["2", "2", "2"]


def test_chunks_over_rows_in_use_are_a_grid():
    def serving(queries, rows, impl, ms):
        case = ServingCase(4, rows, Sq=queries, page=16).record()
        return {**row(impl, case, ms, op="serving"), "tflops": 700.0}

    sizes = [(queries, rows) for queries in (64, 2048) for rows in (4096, 65536)]
    rows = [serving(*size, impl, ms) for size in sizes for impl, ms in (("flashtile-auto", 2.0), ("dense", 1.5))]
    table, of_all = record_part(named(rows)).tables
    assert table.title.startswith("Chunks of prompts, head_dim 128, pages of 16, bfloat16: TFLOP/s (share of")
    assert table.headings == ["queries over rows in use", "4,096", "65,536"]
    assert table.lines == [[queries, "700 (0.75)", "700 (0.75)"] for queries in ("64", "2,048")]
    assert len(of_all.lines) == 4, "also with the peers"
    assert len(record_part(named(rows[2:])).tables) == 1, "a part of a grid is none"


def test_what_has_no_lengths_is_a_line_of_a_table():
    rows = [*LINES, row("flashtile-triton", length(4096, mask="tiles128:0.5"), 3.0)]
    rows.append(row("new", length(4096, mask="tiles128:0.5"), 0.5))
    (table,) = record_part(named(rows)).tables
    assert table.title == "Attention, forward: TFLOP/s"
    assert table.headings == ["case", "flashtile, portable kernels", "new"]
    assert table.lines == [["50% of the tiles of 128, 4,096 tokens", "1.33", "8"]]


@each_case("key", ["memory_mib", "peak_mib"])
def test_memory_against_length(key):
    rows = [{**one, key: one["case"]["S"] / 4} if one["phase"] == "bwd" else one for one in LINES]
    (chart,) = charts_of(rows, "memory")
    assert chart.title == "Backward: memory" and chart.table().lines[0] == ["512", "128", "128"]


def test_points_lie_under_the_roof_of_a_known_machine():
    chart, _ = charts_of(LINES, "roof")
    assert chart.title == "Forward: under the roof"
    case, bytes_moved = Case.from_record(length(512)), 4 * 2 * 512 * 4 * 64 * 2 + 2 * 4 * 512 * 4
    lines = chart.table().lines
    assert lines[0][0] == "flashtile, portable kernels, head_dim 64: 512 tokens"
    assert lines[0][1] == f"{case.flops('fwd') / bytes_moved:.0f}"
    for rows, gpu in ((LINES, "NVIDIA H100 PCIe"), ([one for one in LINES if one["impl"] == "peer"], "NVIDIA H200")):
        assert not [chart for chart in record_part(named(rows, gpu=gpu)).charts if "roof" in chart.title]


@each_case("more, title, cell", [
        ({"op": "layer_norm", "tflops": None}, "Layer norm, forward: GB/s", "4"),
        ({"op": "fused_dense"}, "Linear layer, forward: TFLOP/s", "2"),
        ({"op": "new-op", "tflops": None, "gbps": None}, "New-op, forward: ms", "2"),
        ({"op": "attention-host"}, "Host time, forward: µs", "2,000"),
        ({"op": "train-step", "tokens_per_s": 5.0}, "Training step, forward: tokens/s", "5"),
        ({"op": "lra-listops", "accuracy": 0.5}, "Long Range Arena: ListOps, forward: % right", "50"),
        ({"op": "attention-io", "predicted": {"bytes_read": 3e9, "bytes_written": 1e9}, "counted": None},
         "Traffic, forward: GB", "4"),
    ])  # fmt: skip
def test_figures_have_the_unit_of_their_operation(more, title, cell):
    table = record_part(named([row("eager", {"dtype": "bf16"}, 2.0, **more)])).tables[0]
    assert table.title == title and table.lines[0][1] == cell


def test_losses_are_lines_over_steps():
    curve = [float(i) for i in range(600)] + [None] * 10
    rows = [
        row(impl, {"model": "m", "text_sha256": "ab" * 32}, 1.0, op="train-curve", curve=curve, curve_every=2)
        for impl in ("flashtile", "plain")
    ]
    (chart,) = charts_of(rows, "Training on text")
    assert chart.table().headings[:2] == ["step", "flashtile in a whole model"]
    assert chart.table().lines == [["1,200", "594", "594"]]
    assert not record_part(named([row("flashtile", {}, 1.0, op="train-curve", curve=[None])])).charts


def test_what_has_no_time_is_left_out():
    rows = [{**one, "ms": None, "why": "it broke"} for one in LINES]
    part = record_part(named(rows))
    assert not part.charts and not part.tables and make_verdict([named(rows)]) is None


def test_the_verdict_says_how_many_times_as_fast_and_in_how_many_comparisons():
    slow = {("flashtile-triton", "bwd"): 4.0}
    rows = [{**one, "ms": one["ms"] * slow.get((one["impl"], one["phase"]), 1)} for one in LINES]
    slower = [{**one, "impl": "flashtile-hopper", "ms": 9 * one["ms"]} for one in LINES if one["impl"] != "peer"]
    found = make_verdict([named([*rows, *slower])])
    assert found.sentences == (
        "On NVIDIA H200 flashtile is faster than the fastest other implementation in 3 of 6 comparisons, 1.00 times as "
        "fast in the geometric mean (0.50 to 2.00).",
    )
    lines = found.table.lines
    assert lines[0] == ["Attention: plain", "forward", "NVIDIA H200", "2.00", "2.00", "2.00", "3", "peer"]
    assert lines[1][3:] == ["0.50", "0.50", "0.50", "3", "peer"]
    titles = [chart.title for chart in found.charts]
    assert titles[:2] == ["Attention, forward", "Attention, backward"] and len(titles) == 4
    assert titles[2] == "Forward: TFLOP/s (NVIDIA H200, head_dim 64, full, bfloat16)"


def test_the_verdict_is_of_every_kind_and_machine():
    window = [{**one, "case": length(512, causal=True, window=(7, 0))} for one in LINES if one["case"]["S"] == 512]
    decode = [row(impl, {"S": 1}, ms, op="decode") for impl, ms in (("flashtile-triton", 3.0), ("peer", 2.0))]
    cpu = Named({"machine": {"cpu": "c"}, "rows": LINES}, Path("cpu.json"))
    found = make_verdict([named([*LINES, *window, *decode]), cpu])
    kinds = ["Attention: plain, portable kernels", "Attention: window, portable kernels", "Decoding"]
    assert list(dict.fromkeys(line[0] for line in found.table.lines)) == kinds
    assert found.sentences[0].endswith("In the mean it is slower in: Decoding (0.67).") and len(found.sentences) == 2
    *_, rest = [chart for chart in found.charts if isinstance(chart, DotChart)]
    assert rest.cases == {"Decoding": {"NVIDIA H200": pytest.approx(2 / 3)}}
    own = [row(impl, {"S": 1}, 1.0, op="lra-listops") for impl in ("flashtile", "block-sparse", "flashtile-one-gpu")]
    assert make_verdict([named(own)]) is None, "no part of flashtile is a peer"


def test_gpus_come_first_and_of_them_the_most_comparisons():
    cpu = Named({"machine": {"cpu": "c", "cpu_cores": 2}, "rows": LINES}, Path("cpu.json"))
    few = named([one for one in LINES if one["phase"] == "fwd"], "few.json")
    assert [one.path.name for one in in_order([cpu, few, named(LINES, "many.json")])] == [
        "many.json", "few.json", "cpu.json",
    ]  # fmt: skip


def test_colours_are_told_apart_in_a_record_and_the_same_on_the_page():
    first = named([row(impl, length(1), 1.0) for impl in ("p", "flashtile-a", "q")])
    second = named([row(impl, length(1), 1.0) for impl in ("flashtile-b", "r", "p")])
    index = styles([first, second])
    for one in (first, second):
        used = [index[found["impl"]] for found in one.rows]
        assert len(set(used)) == len(used)
    assert index["flashtile-a"] == index["flashtile-b"] == 0


# --- words ----------------------------------------------------------------------------------------------------------


def test_cases_are_named_by_what_differs():
    cases = [length(64, causal=True), length(128, causal=True, window=(7, 0)), length(64, causal=True, dropout_p=0.1)]
    assert words.case_labels(cases) == ["64 tokens", "window of 8 keys, 128 tokens", "dropout 0.1, 64 tokens"]
    assert words.common_facets(cases) == {"D": "head_dim 64", "causal": "causal", "dtype": "bfloat16"}
    assert words.case_labels([{"H": 8, "Hkv": 8}, {"H": 8, "Hkv": 2}]) == [
        "8 heads",
        "8 query heads, 2 key/value heads",
    ]
    assert words.case_labels([{"S": 1, "text_sha256": "a"}, {"S": 1, "text_sha256": "b"}]) == ["plain", "plain (2)"]
    assert words.case_labels([{"S": 4, "lengths": [1, 2]}]) == ["2 sequences, 3 tokens"]


def test_every_implementation_and_key_of_the_committed_records_has_words():
    for path in RECORDS:
        for one in json.loads(path.read_text("utf-8"))["rows"]:
            assert words.implementation_name(one["impl"]), one["impl"]
            assert not words.unknown_keys(one["case"]) and one["op"] in words.OPERATIONS
            assert one["phase"] in words.PHASES


# --- pictures -------------------------------------------------------------------------------------------------------


def elements_of(chart):
    pytest.importorskip("matplotlib")
    return list(ElementTree.fromstring(draw(chart, {}, 7)).iter())


def texts(elements):
    return [words_in(element) for element in elements if element.tag == f"{SVG}text"]


def test_a_picture_has_its_own_identifiers_the_pages_colours_and_its_numbers_as_text():
    series = (Series("ours", ((512.0, 0.0051), (1024.0, 0.0149))),)
    elements = elements_of(LineChart("A & B", series, "length", "s"))
    svg = elements[0]
    assert svg.get("aria-label") == "A & B" and svg.get("role") == "img" and not svg.get("width")
    assert {"512", "1k", "length", "s", "ours", "0.008"} <= {*texts(elements)}, texts(elements)
    assert all(element.get("id", "f7-").startswith("f7-") for element in elements)
    styles = [element.get("style", "") for element in elements]
    for part in ("fill", "stroke"):
        assert any(f"{part}: var(--c0)" in style for style in styles), "marks and their line"


def test_long_names_of_cases_are_wrapped():
    chart = DotChart("t", {" ".join(["name"] * 30): {"a": 1.0}}, "ms")
    lines = [line for line in texts(elements_of(chart)) if "name" in line]
    assert " ".join(lines).split() == ["name"] * 30 and max(map(len, lines)) <= 46


# --- files ----------------------------------------------------------------------------------------------------------


def test_words_of_records_are_no_markup(tmp_path):
    path = tmp_path / "r&d.json"
    path.write_text(json.dumps(record([row("<b>&", length(seq), 1.0) for seq in (1, 2, 4)])))
    write_report([path], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<b>" not in text and "a &lt;b&gt;" in text and "r&amp;d.json" in text
    parsed(tmp_path / "page.html")


@pytest.mark.parametrize("name", [r"\1", r"$\frac{1$", "_hidden"], ids=["group", "formula", "underscore"])
def test_names_in_records_are_text_for_every_part_of_the_page(name, tmp_path):
    path = tmp_path / "r.json"
    rows = [row(name, length(seq), 1.0) for seq in (1, 2, 4)]
    rows += [row(name, {"S": seq, name: seq}, 1.0, op=name) for seq in (1, 2)]
    path.write_text(json.dumps(record(rows)))
    assert write_report([path], tmp_path / "page.html").pictures
    pictures = list(parsed(tmp_path / "page.html").iter(f"{SVG}svg"))
    assert pictures and all(any(name in text for text in texts(picture.iter())) for picture in pictures)
    assert name in [words_in(found) for found in parsed(tmp_path / "page.html").iter(f"{HTML}th")]


@pytest.mark.parametrize("key, value", [("ms", 0), ("ms", -1.0), ("tflops", float("nan")), ("gbps", "fast")])
def test_a_row_without_a_time_or_a_speed_is_refused(key, value, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record([{**row("flashtile-triton", length(64), 1.0), key: value}])))
    with pytest.raises(UserError, match=rf"got {key} .* in row 1; take the row out"):
        write_report([path], tmp_path / "page.html")


def test_what_is_not_known_in_a_record_is_named_and_shown(tmp_path):
    rows = [row("flashtile-triton", {**length(64), "score_mod": name}, 1.0) for name in ("relu", "sin")]
    rows.append(row("flashtile-triton", {"S": 1}, 1.0, op="new-op"))
    path = tmp_path / "newer.json"
    path.write_text(json.dumps(record(rows)))
    written = write_report([path], tmp_path / "page.html")
    assert [note.partition(";")[0] for note in written.notes] == [
        "newer.json: unknown operation 'new-op' in 1 row",
        "newer.json: unknown key 'score_mod' in the case of 2 rows of 'attention'",
    ]
    text = words_in(parsed(tmp_path / "page.html"))
    assert written.notes[1] in text and "score mod relu" in text and "score mod sin" in text


def test_without_matplotlib_the_page_has_tables_and_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record(LINES)))
    written = write_report([path], tmp_path / "page.html")
    assert 'in a checkout of flashtile, pip install ".[plots]"' in written.notes[0] and written.pictures == 0
    root = parsed(tmp_path / "page.html")
    assert not list(root.iter(f"{SVG}svg")) and written.notes[0] in words_in(root.find(f"{HTML}body/{HTML}header"))
    tables = [found for found in root.iter(f"{HTML}details") if found.get("class") != "fold"]
    assert tables and all(found.get("open") for found in tables)
    assert "0.00781" in words_in(root)
