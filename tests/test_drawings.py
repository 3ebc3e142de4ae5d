"""Pictures of data are those that their script draws; nothing sticks out of any drawing, and its figures are right."""

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

IMAGES = ROOT / "docs" / "images"
#: Drawings in the style of the script, by their names.
DRAWINGS = {
    path.stem: path.read_text("utf-8")
    for path in sorted(IMAGES.glob("*.svg"))
    if "matplotlib" not in path.read_text("utf-8")
}
PICTURES = pytest.mark.parametrize("draw", draw_docs.PICTURES, ids=lambda draw: draw.__name__)
_SVG = "{http://www.w3.org/2000/svg}"
#: Width of a letter of a wide font, in parts of the font size.
_LETTER = 0.58


@PICTURES
def test_the_committed_picture_is_that_of_the_script(draw):
    assert DRAWINGS[draw.__name__] == draw().svg(), "run python tools/draw_docs.py"


@pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_nothing_sticks_out(drawing):
    root = ElementTree.fromstring(drawing)
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
    for drawing in DRAWINGS.values():
        assert not re.search(r"<script|<image|href|url\(|@import", drawing)


def test_every_picture_is_in_a_document():
    text = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert not [name for name in DRAWINGS if f"images/{name}.svg" not in text]


def test_steps_of_the_online_softmax_end_at_the_softmax():
    root = ElementTree.fromstring(DRAWINGS["online_softmax"])
    shown = [text.text for text in root.findall(f"{_SVG}text") if "font-family" in text.attrib]
    scores, values = (1.0, 3.0, 2.0, 5.0, 0.0, 4.0), (10.0, 20.0, 30.0, 40.0, 50.0, 60.0)
    expected, last = [], -math.inf
    for seen in (2, 4, 6):
        row_max = max(scores[:seen])
        weights = [math.exp(score - row_max) for score in scores[:seen]]
        acc = sum(weight * value for weight, value in zip(weights, values))
        figures = math.exp(last - row_max), sum(weights), acc, acc / sum(weights)
        expected += [f"{row_max:g}", *(f"{figure:.4f}" for figure in figures)]
        last = row_max
    assert shown == expected
