"""The pictures of the documents are those that their script draws; nothing sticks out of them."""

import importlib.util
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("draw_docs", ROOT / "tools" / "draw_docs.py")
assert _SPEC is not None and _SPEC.loader is not None
draw_docs = importlib.util.module_from_spec(_SPEC)
sys.modules["draw_docs"] = draw_docs
_SPEC.loader.exec_module(draw_docs)

PICTURES = pytest.mark.parametrize("draw", draw_docs.PICTURES, ids=lambda draw: draw.__name__)
_SVG = "{http://www.w3.org/2000/svg}"
#: Width of a letter of a wide font, in parts of the font size.
_LETTER = 0.58


@PICTURES
def test_the_committed_picture_is_that_of_the_script(draw):
    committed = (ROOT / "docs" / "images" / f"{draw.__name__}.svg").read_text("utf-8")
    assert committed == draw().svg(), "run python tools/draw_docs.py"


@PICTURES
def test_nothing_sticks_out(draw):
    root = ElementTree.fromstring(draw().svg())
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    texts = root.findall(f"{_SVG}text")
    assert texts and root.find(f"{_SVG}title").text
    for text in texts:
        size, x, y = (float(text.attrib[name]) for name in ("font-size", "x", "y"))
        extent = _LETTER * size * len(text.text or "")
        left = x - {"start": 0, "middle": extent / 2, "end": extent}[text.attrib["text-anchor"]]
        assert left >= 4, text.text
        assert left + extent <= width - 4, text.text
        assert size <= y <= height - 4, text.text
    for box in root.findall(f"{_SVG}rect"):
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height


def test_pictures_load_nothing():
    for draw in draw_docs.PICTURES:
        assert not re.search(r"<script|<image|href|url\(|@import", draw().svg())


def test_every_picture_is_in_a_document():
    text = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert not [draw.__name__ for draw in draw_docs.PICTURES if f"images/{draw.__name__}.svg" not in text]


def test_steps_of_the_online_softmax_end_at_the_softmax():
    *_, (row_max, _, row_sum, acc) = draw_docs.online_steps()
    weights = [math.exp(score) for score in draw_docs.ROW_SCORES]
    whole = sum(weight * value for weight, value in zip(weights, draw_docs.ROW_VALUES)) / sum(weights)
    assert acc / row_sum == pytest.approx(whole, rel=1e-14)
    assert row_max + math.log(row_sum) == pytest.approx(math.log(sum(weights)), rel=1e-14)
