"""The names that are served have the arguments and defaults that the tables of `flashtile.compat.signatures` say."""

import datetime

import pytest
import torch

from flashtile.compat.adapter import Names, adapted, tables
from flashtile.compat.signatures import SERVED
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
    first(x, z=(2, 3))

. = other: prefix_
    none()
"""
    expected = {"first": "x, z=(2, 3)", "Second.forward": "self, x"}
    assert tables(text) == {
        "a.b": Names(("home", "second"), "", expected),
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
