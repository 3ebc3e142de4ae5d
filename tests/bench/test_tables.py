"""The tables of cases and choosing from them."""

import pytest
import torch

from flashtile.bench.base import select_cases
from flashtile.bench.registry import case_name
from flashtile.bench.tables import cases_named, find_table, tables
from support.running.each_case import each_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


#: Of each table the number of cases, their work forward in TFLOP, and what a backward moves in GiB.
SIZES = {
    "cuda": {
        "default": (36, 19.48, 18.0), "values": (126, 75.45, 47.25), "grouped": (10, 140.6, 17.44),
        "mla": (2, 8.246, 5.0), "window": (1, 0.03409, 1.0), "varlen": (4, 7.834, 8.0), "masks": (31, 13.98, 19.5),
        "features": (45, 18.14, 18.49), "long": (16, 175.2, 14.75), "shapes": (45, 16.48, 16.87),
        "float32": (21, 1.672, 4.788), "functions": (20, 5.365, 8.625), "random": (40, 17.76, 14.69),
        "random-odd": (60, 21.89, 21.33), "card": (14, 0.7899, 1.3125),
    },
    "cpu": {"default": (18, 0.277, 0.3984), "grouped": (12, 0.0612, 0.3193), "features": (12, 0.008279, 0.188),
            "card": (3, 0.0005285, 0.01416)},
}  # fmt: skip


@each_case("device", SIZES)
def test_tables_are_as_they_were_measured(device):
    """Records are compared case by case, so a case is changed on purpose only."""
    found = tables(torch.device(device))
    assert {name: len(set(cases)) for name, cases in found.items()} == {n: size[0] for n, size in SIZES[device].items()}
    for name, cases in found.items():
        work = sum(case.flops("fwd") for case in cases) / 1e12, sum(case.bytes("bwd") for case in cases) / 2**30
        assert work == pytest.approx(SIZES[device][name][1:], rel=1e-3), name


@each_case("device", [CPU, CUDA])
def test_quick_is_a_part_of_the_table(device):
    assert 0 < len(cases_named(device, ["all"], quick=True)) < len(cases_named(device, ["all"]))
    assert set(cases_named(device, ["all"], quick=True)) <= set(cases_named(device, ["all"]))


@each_case("device", [CPU, CUDA])
def test_names_with_batch_and_heads_tell_the_cases_of_all_tables_apart(device):
    names = [case_name({"op": "attention", "case": case.record()}) for case in cases_named(device, ["all"])]
    assert len(set(names)) == len(names)


def test_quick_shows_every_kind_of_mask():
    few = cases_named(CUDA, ["masks"], quick=True)
    assert {"window", "lengths", "mask", "softcap", "bias"} == {
        name for case in few for name in ("window", "lengths", "mask", "softcap", "bias") if getattr(case, name)
    }
    assert any(not case.changes_scores and case.window is case.lengths is None for case in few) and len(few) < 10


def test_table_of_a_case():
    """The first that has it: some cases of features, values, masks and shapes are others' too."""
    known = tables(CUDA)
    owners = {case: [name for name in known if case in known[name]] for cases in known.values() for case in cases}
    assert all(find_table(case) == names[0] for case, names in owners.items())
    shared = [names for names in owners.values() if len(names) > 1]
    expected = [["default", "masks", "features"], *[["default", "values"]] * 4, ["varlen", "masks"]]
    shapes = [["default", "features", "shapes"], *[["default", "shapes"]] * 2, *[["features", "shapes"]] * 2]
    assert sorted(shared) == sorted([*[["default", "features"]] * 7, *expected, *shapes])
    assert find_table(tables(CPU)["default"][-1]) == "default"


def test_tables_are_chosen_by_name():
    known = tables(CUDA)
    assert cases_named(CUDA) == known["default"]
    assert cases_named(CPU, ["all"]) == [case for cases in tables(CPU).values() for case in cases]
    assert cases_named(CUDA, ["mla", "window", "mla"]) == known["mla"] + known["window"]
    assert cases_named(CUDA, ["all"]) == list(dict.fromkeys(case for cases in known.values() for case in cases))
    with pytest.raises(ValueError, match="--table: no mla on cpu; there are: default, grouped, features, card, all"):
        cases_named(CPU, ["mla"])
    for name in ("random", "random-odd"):
        drawn = cases_named(CUDA, [f"{name}:3"])
        assert len(drawn) == len(known[name]) and drawn != known[name] == cases_named(CUDA, [name])
    with pytest.raises(ValueError, match="no mla:3 on cuda"):
        cases_named(CUDA, ["mla:3"])


def test_select_cases_by_pattern_and_by_word():
    cases = tables(CUDA)["default"]
    assert all(case.name.startswith("d64-causal") for case in select_cases(cases, ["d64-causal-*"]))
    assert {case.S for case in select_cases(cases, ["s2048"])} == {2048}
    assert select_cases(cases, []) == cases
    with pytest.raises(ValueError, match="'d65' matches no case; there are: d64-full-s512-bf16"):
        select_cases(cases, ["d65"])
