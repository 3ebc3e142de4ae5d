"""Which tests are in the quick part, and that it has all that it must have."""

import itertools
from types import SimpleNamespace

import pytest

import flashtile
from support.running import selection
from support.running.each_case import each_case


class _Item(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def _item(name: str, *marks: str, **parameters: object) -> SimpleNamespace:
    callspec = {"callspec": SimpleNamespace(params=parameters)} if parameters else {}
    return _Item(nodeid=name, get_closest_marker=lambda mark: True if mark in marks else None, **callspec)


def test_the_quick_part_has_one_case_of_a_test_and_of_each_of_its_kernels():
    items = [
        _item("test_a.py::test_one"),
        _item("test_a.py::test_widths[1]", width=1),
        _item("test_a.py::test_widths[2]", width=2),
        _item("test_a.py::test_fits[dq-1]", kernel="dq", width=1),
        _item("test_a.py::test_fits[dq-2]", kernel="dq", width=2),
        _item("test_a.py::test_fits[dkdv-1]", kernel="dkdv", width=1),
        _item("test_b.py::test_one"),
        _item("test_b.py::test_all", "slow"),
        _item("test_b.py::test_some[1]", "slow", case=1),
        _item("test_b.py::test_some[2]", case=2),
        _item("test_b.py::test_some[3]", "interpreter", case=3),
        _item("test_b.py::test_some[4]", "interpreter", case=4),
    ]
    parts = selection.parts(items)
    assert [item.nodeid for item in parts["rest"]] == [
        "test_a.py::test_widths[2]", "test_a.py::test_fits[dq-2]", "test_b.py::test_all", "test_b.py::test_some[1]",
        "test_b.py::test_some[4]",
    ]  # fmt: skip
    assert [item for item in items if item in parts["quick"] or item in parts["rest"]] == items


@each_case("marked", [False, True])
def test_each_two_values_are_in_a_case(marked):
    """Of cases on the CPU alone, too, where those on a GPU are skipped. Names in one parametrisation go together."""
    values = list(itertools.product("xyz", ((1, 2), (2, 1), (2, 2)), (False, True), ("cpu", "cuda")))
    marks = [SimpleNamespace(name="parametrize", args=(names,)) for names in ("a", "b, c", ["d"], "e")]
    gpu = SimpleNamespace(name="gpu", args=())
    items = []
    for a, (b, c), d, e in values:
        mine = [*marks, gpu] if marked and e == "cuda" else marks
        items.append(_item(f"test_a.py::test[{len(items)}]", a=a, b=b, c=c, d=d, e=e))
        items[-1].iter_markers = lambda name=None, mine=mine: [mark for mark in mine if name in (None, mark.name)]
    alone = [_item("test_a.py::test_one"), _item("test_a.py::test_two[0]", a=1, b=1)]
    for item in alone:
        item.iter_markers = lambda name=None: []
    chosen = selection.in_pairs([*items, *alone])
    assert chosen[0] is items[0] and chosen[-2:] == alone and len(chosen) <= (26 if marked else 14)
    for device in ("cpu", "cuda") if marked else ("",):
        params = [item.callspec.params for item in chosen[:-2] if device in item.callspec.params["e"]]
        found = [{(of["a"], of["b"], of["c"]) for of in params}, {(of["b"], of["c"], of["d"]) for of in params}]
        assert [len(each) for each in found] == [9, 6] and len({(of["a"], of["d"]) for of in params}) == 6


@pytest.fixture
def packed():
    return flashtile.attention_varlen


def _helper() -> object:
    return [flashtile.rms_norm for _ in range(2)]


def test_names_are_those_of_a_test_its_fixtures_and_its_helpers(packed, request):
    assert flashtile.attention and _helper() and packed
    names = selection.names_used([request.node])
    assert {"attention", "attention_varlen", "rms_norm"} <= names
    assert not {"layer_norm", "attention_bias"} & names


def test_every_public_name_is_used(request):
    if not request.config.option.complete:
        pytest.skip("looks at a whole run: needs --complete")
    assert set(flashtile.__all__) - selection.names_used(request.session.items) == set()


def test_kernels_are_found():
    pytest.importorskip("triton")
    found = selection.kernels(flashtile)
    assert "flashtile.ops.rotary.kernels.rotary_kernel" in found
    assert not any(name.endswith("load_tile") for name in found)
