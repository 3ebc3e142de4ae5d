"""Cases with a function: what it shows and scores, FlexAttention's way, the oracle, and first calls."""

from dataclasses import replace

import pytest
import torch

from flashtile.bench import implementations, masks
from flashtile.bench.base import Implementation
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.implementations import IMPLEMENTATIONS, build_flashtile
from flashtile.bench.oracle import AttentionProblem, Oracle
from flashtile.bench.runner import run_case, side_stream
from support.running.each_case import each_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def find_case(name: str) -> Case:
    causal = name in masks.CAUSAL if name in masks.MASKS else name != "relative"
    return Case(1, 128, 2, 2, 16, 16, causal=causal, dtype="fp32", function=name)


CASES = [find_case(name) for name in (*masks.SCORES, *masks.MASKS)]


def named(*names: str) -> list[Implementation]:
    return [each for each in IMPLEMENTATIONS if each.name in names]


@each_case("seq", [128, 2048])
@each_case("name", masks.MASKS)
def test_masks_show_what_the_oracle_is_told(name, seq):
    dense = masks.MASKS[name](seq).pattern(CPU).to_dense()[0, 0]
    assert torch.equal(masks.shown(name, seq, range(20, 90), range(seq), CPU), dense[20:90])
    assert torch.equal(masks.shown(name, seq, range(seq), range(10, 100), CPU), dense[:, 10:100])
    case = replace(find_case(name), S=seq)
    assert int(dense.sum()) == case.visible_pairs() and not (case.causal and dense.triu(1).any())
    if case.segments is not None:
        apart = torch.block_diag(*(torch.ones(length, length) for length in case.segments)) == 0
        assert sum(case.segments) == seq and not (dense & apart).any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_are_right(case):
    for row in run_case(case, named("flashtile-cpu", "flashtile-builtin", "sdpa-flash"), CPU, AttentionProblem, 0):
        expected = {"flashtile-builtin": "flashtile has no argument for it", "sdpa-flash": "measured without functions"}
        assert row["ms"] is not None or row["why"] == expected[row["impl"]], row
        assert row["ms"] is None or row["impl"] != "sdpa-flash"


def test_the_same_by_an_argument_where_there_is_one():
    rows = [row for case in CASES for row in run_case(case, named("flashtile-builtin"), CPU, AttentionProblem, 0)]
    found = {row["case"]["function"] for row in rows if row["ms"] is not None}
    assert found == {"alibi", "softcap", "documents", "window"}
    (builtin,) = named("flashtile-builtin")
    assert builtin.unsupported(Case(1, 16, 2, 2, 8, 8), CPU) == "measured beside functions only"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_computes_the_case(case):
    """Traced in one piece, as for its kernels, which a CPU has not for the backward."""
    inputs = make_inputs(case, CPU)
    tensors = [t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v)]
    tensors += inputs.tables if masks.learns(case.function) else ()
    torch.compiler.reset()
    flex = implementations.only_compiled(implementations.flex_function(case, inputs))
    attend = torch.compile(flex, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        out = attend(*tensors).transpose(1, 2)
    assert Oracle(case, inputs).judge({"out": out}).why is None


@pytest.mark.parametrize("name", ["relative", "waves"])
def test_a_wrong_gradient_of_a_table_is_found(name):
    def build(case, inputs):
        attend = build_flashtile("cpu")(case, inputs)

        def wrong(q, k, v, *tables):
            *others, last = tables
            return attend(q, k, v, *others, last.detach() + 1.5 * (last - last.detach()))

        return wrong

    forward, backward = run_case(find_case(name), [Implementation("wrong", ("cpu",), build)], CPU, AttentionProblem, 0)
    assert forward["ms"] is not None and backward["ms"] is None
    assert f"dtable{0 if name == 'relative' else 1}" in backward["why"]


def test_a_mask_with_one_pair_too_many_is_found():
    case = find_case("prefix-lm")

    def build(case, inputs):
        mask = masks.shown(case.function, case.S, range(case.S), range(case.S), CPU)
        mask[40, 100] = True
        bias = torch.zeros(1, 1, case.S, case.S).masked_fill(~mask, -torch.inf)
        return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    rows = run_case(case, [Implementation("wrong", ("cpu",), build, heads_first=True)], CPU, AttentionProblem, 0)
    assert all(row["ms"] is None and "wrong result" in row["why"] for row in rows)


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_gpu(case):
    """A different result of FlexAttention may be found wrong or refused; ours may not."""
    case = replace(case, S=1024, D=64, Dv=64, dtype="bf16")
    with side_stream(CUDA):
        rows = run_case(case, named("flashtile-triton", "flashtile-builtin", "flex"), CUDA, AttentionProblem, 0)
    for row in rows:
        assert row["ms"] is not None or (row["impl"] != "flashtile-triton" and row["why"]), row
