"""The names that are served have the arguments and defaults that the tables of `flashtile.compat.signatures` say."""

import datetime

import pytest
import torch

import flashtile
import flashtile.modules
from flashtile.compat.adapter import Names, adapted, tables
from flashtile.compat.signatures import SERVED
from flashtile.testing import assert_same
from support.attention.compat_cases import arguments_of
from support.running.each_case import each_case

VERSIONS = {f"{name} {served.version}": served for name, versions in SERVED.items() for served in versions}
MODULES = {
    f"{version} {module}": names for version, served in VERSIONS.items() for module, names in served.modules.items()
}


@each_case("version", VERSIONS)
def test_each_version_says_where_it_was_read(version):
    release, where, day = VERSIONS[version].read
    assert release and where and datetime.date.fromisoformat(day)


@each_case("module", MODULES)
def test_arguments(module):
    names = MODULES[module]
    found = names.found()
    for name, arguments in names.arguments.items():
        first, *rest = name.split(".")
        value = found[first]
        for part in rest:
            value = getattr(value, part)
        assert arguments_of(value) == arguments, name
        assert value.__doc__ or rest or "*args" in arguments, name


def test_a_table_is_read():
    text = """
a.b = home, second
    first(x, y=1,
        z=(2, 3)); Second.forward(self, x)
    first(x->y, z=(2, 3))

. = other: prefix_
    none()
"""
    expected = {"first": "x, z=(2, 3)", "Second.forward": "self, x"}
    assert tables(text) == {
        "a.b": Names(("home", "second"), "", expected, {}, {"first": {"x": "y"}}),
        ".": Names(("other",), "prefix_", {"none": ""}),
    }
    assert tables(text)["a.b"].public == ["first", "Second"]


def test_a_body_takes_what_it_uses_by_name():
    def body(first, **rest):
        return first, rest

    made = adapted("name", "first, second=torch.float16, third=(1, None), **others", body)
    assert made(5, third=6, more=7) == (5, {"second": torch.float16, "third": 6, "more": 7})
    assert made.__qualname__ == made.__name__ == "name"
    with pytest.raises(TypeError, match=r"name\(\) missing 1 required positional argument: 'first'"):
        made()


def test_names_that_differ_in_arguments_alone_are_made_of_the_table():
    text = """
. = own, flashtile, flashtile.modules
    scaled_masked_softmax(inputs->x, mask, factor->scale=2.0); GatedMlp(in_features, multiple_of=256)
    Mlp.forward(self, x)
"""
    home = {"__name__": "own"}
    tables(text)["."].serve(home)
    assert home.keys() == {"__name__", "scaled_masked_softmax", "GatedMlp"}, "the others are flashtile's as they are"
    x = torch.randn(1, 1, 2, 3)
    given = {"inputs": x, "mask": torch.zeros(1, 1, 2, 3, dtype=torch.bool)}
    assert_same(home["scaled_masked_softmax"](**given), (2 * x).softmax(-1))
    layer = home["GatedMlp"](6)
    assert isinstance(layer, flashtile.modules.GatedMlp) and layer.fc2.in_features == 256
    assert flashtile.modules.GatedMlp(6).fc2.in_features == 128
