"""Which tests are in the quick part, and that it has all that it must have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import flashtile
from support.running import selection


def _item(name: str, slow: bool = False, **parameters: object) -> SimpleNamespace:
    callspec = {"callspec": SimpleNamespace(params=parameters)} if parameters else {}
    marks = {"slow"} if slow else set()
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: True if mark in marks else None, **callspec)


def test_the_quick_part_has_one_case_of_a_test_and_of_each_of_its_kernels() -> None:
    items = [
        _item("test_a.py::test_one"),
        _item("test_a.py::test_widths[1]", width=1),
        _item("test_a.py::test_widths[2]", width=2),
        _item("test_a.py::test_fits[dq-1]", kernel="dq", width=1),
        _item("test_a.py::test_fits[dq-2]", kernel="dq", width=2),
        _item("test_a.py::test_fits[dkdv-1]", kernel="dkdv", width=1),
        _item("test_b.py::test_one"),
        _item("test_b.py::test_all", slow=True),
        _item("test_b.py::test_some[1]", slow=True, case=1),
        _item("test_b.py::test_some[2]", case=2),
    ]
    parts = selection.parts(items)
    assert [item.nodeid for item in parts["rest"]] == [
        "test_a.py::test_widths[2]", "test_a.py::test_fits[dq-2]", "test_b.py::test_all", "test_b.py::test_some[1]"
    ]  # fmt: skip
    assert [item for item in items if item in parts["quick"] or item in parts["rest"]] == items


@pytest.fixture
def packed() -> object:
    return flashtile.attention_varlen


def _helper() -> object:
    return [flashtile.rms_norm for _ in range(2)]


def test_names_are_those_of_a_test_its_fixtures_and_its_helpers(packed: object, request: pytest.FixtureRequest) -> None:
    assert flashtile.attention and _helper() and packed
    names = selection.names_used([request.node])
    assert {"attention", "attention_varlen", "rms_norm"} <= names
    assert not {"layer_norm", "attention_bias"} & names


def test_every_public_name_is_used(request: pytest.FixtureRequest) -> None:
    if not request.config.option.complete:
        pytest.skip("looks at a whole run: needs --complete")
    assert set(flashtile.__all__) - selection.names_used(request.session.items) == set()


def test_kernels_are_found() -> None:
    pytest.importorskip("triton")
    found = selection.kernels(flashtile)
    assert "flashtile.ops.rotary.kernels.rotary_kernel" in found
    assert not any(name.endswith("load_tile") for name in found)
