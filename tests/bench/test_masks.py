"""Masks and functions of cases: what they show and score, how much of it, FlexAttention's way, and the oracle."""

from dataclasses import replace

import pytest
import torch

from flashtile.bench import masks
from flashtile.bench.base import Implementation
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.implementations import IMPLEMENTATIONS, build_flashtile, flex_function
from flashtile.bench.oracle import AttentionProblem, Oracle
from flashtile.bench.runner import run_case, side_stream
from support.running.each_case import each_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TILES = Case(2, 96, 4, 2, 16, 8, dtype="fp32", mask="tiles16:0.4")
DOCUMENTS = Case(1, 96, 2, 2, 16, 16, causal=True, dtype="fp32", mask="documents20")


def find_case(name: str) -> Case:
    causal = name in masks.CAUSAL if name in masks.MASKS else name != "relative"
    return Case(1, 128, 2, 2, 16, 16, causal=causal, dtype="fp32", function=name)


FUNCTIONS = [find_case(name) for name in (*masks.SCORES, *masks.MASKS)]
FLEX = [
    Case(1, 256, 4, 2, 16, 16, dtype="fp32", mask="tiles64:0.5"),
    Case(1, 256, 2, 2, 16, 16, causal=True, dtype="fp32", mask="documents50"),
    Case(1, 256, 2, 2, 16, 16, causal=True, dtype="fp32", window=(20, 0)),
    Case(2, 128, 4, 2, 16, 16, dtype="fp32", bias="1HSS"),
    Case(2, 128, 2, 2, 16, 16, causal=True, dtype="fp32", softcap=2.0, bias="BHSS"),
    *FUNCTIONS,
]


def named(*names: str) -> list[Implementation]:
    return [each for each in IMPLEMENTATIONS if each.name in names]


@each_case("seq", [128, 2048])
@each_case("name", [*masks.MASKS, "tiles16:0.4", "documents20"])
def test_masks_show_what_the_oracle_is_told(name, seq):
    causal = name in (*masks.CAUSAL, "documents20")
    mask = masks.find_mask(name, 1, seq, seq, causal)
    dense = mask.block_mask(CPU).to_dense()[0, 0]
    assert torch.equal(mask.shown(range(20, 90), range(seq), CPU), dense[20:90])
    assert torch.equal(mask.shown(range(seq), range(10, 100), CPU), dense[:, 10:100])
    pairs = int(dense.sum()) - (seq / 2 if name == "documents20" else 0)  # by convention half of S²
    assert pairs == mask.pairs and not (causal and dense.triu(1).any())
    if mask.parts is not None:
        apart = torch.block_diag(*(torch.ones(length, length) for length in mask.parts)) == 0
        assert sum(mask.parts) == seq and len(mask.parts) > (name == "documents20") and not (dense & apart).any()


def test_layouts_have_the_diagonal_and_the_density():
    for density in (0.05, 0.25, 0.5):
        shown = masks.find_mask(f"tiles128:{density:g}", 1, 16384, 16384, False).pairs
        layout = masks.tile_layout(128, shown // 128**2)
        assert int(layout.sum()) == round(density * 128**2) and layout.diagonal().all()
        assert not torch.equal(layout, layout.T)
    few = masks.find_mask("tiles16:0.01", 2, 64, 64, False)
    assert few.pairs == 2 * 4 * 16**2 and torch.equal(masks.tile_layout(4, 4), torch.eye(4, dtype=torch.bool))


def test_documents_are_those_of_the_packed_table():
    assert masks.find_mask("documents768", 1, 65536, 65536, True).parts == tuple(masks.long_tailed_lengths())
    assert (
        not masks.find_mask("documents20", 1, 96, 96, False)
        .block_mask(CPU)
        .to_dense()[0, 0]
        .triu(1)
        .equal(masks.find_mask("documents20", 1, 96, 96, True).block_mask(CPU).to_dense()[0, 0].triu(1))
    )


@each_case("case", [TILES, DOCUMENTS])
def test_oracle_is_that_of_the_whole_matrix(case):
    inputs = make_inputs(case, CPU)
    shown = inputs.block_mask.to_dense()
    q, k, v = (t.transpose(1, 2).double() for t in (inputs.q, inputs.k, inputs.v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown, enable_gqa=True)
    oracle = Oracle(case, inputs)
    assert oracle.judge({"out": out.transpose(1, 2).float()}).why is None
    hidden = (~shown[0, 0]).nonzero()[0]
    shown[0, 0, hidden[0], hidden[1]] = True
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown, enable_gqa=True)
    assert oracle.judge({"out": out.transpose(1, 2).float()}).why is not None


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_ours_are_right_and_by_an_argument_where_there_is_one(case):
    rows = run_case(case, named("flashtile-cpu", "flashtile-builtin", "sdpa-flash"), CPU, AttentionProblem, 0)
    has_argument = case.function in ("alibi", "softcap", "documents", "window")
    reasons = {"sdpa-flash": "measured without functions"}
    if not has_argument:
        reasons["flashtile-builtin"] = "flashtile has no argument for it"
    assert [row.get("why") for row in rows] == [reasons.get(row["impl"]) for row in rows]
    (builtin,) = named("flashtile-builtin")
    assert builtin.unsupported(replace(case, function=None), CPU) == "measured beside functions only"


@pytest.mark.parametrize("case", FLEX, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_computes_the_case(case):
    """Traced in one piece, as for its kernels, which a CPU has not for the backward."""
    inputs = make_inputs(case, CPU)
    tensors = [t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v)]
    tensors += [] if inputs.bias is None else [inputs.bias]
    tensors += inputs.tables if masks.learns(case.function) else ()
    torch.compiler.reset()
    attend = torch.compile(flex_function(case, inputs), backend="eager", fullgraph=True)
    with torch.no_grad():
        out = attend(*tensors).transpose(1, 2)
    assert Oracle(case, inputs).judge({"out": out}).why is None


def test_flex_that_is_not_compiled_gets_no_speed():
    with torch.compiler.set_stance("force_eager"):
        rows = run_case(FLEX[0], named("flex"), CPU, AttentionProblem)
    assert [row["ms"] for row in rows] == [None, None]
    assert all("fell back to eager execution" in row["why"] for row in rows)


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
        mask = case.shown.shown(range(case.S), range(case.S), CPU).clone()
        mask[40, 100] = True
        bias = torch.zeros(1, 1, case.S, case.S).masked_fill(~mask, -torch.inf)
        return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    rows = run_case(case, [Implementation("wrong", ("cpu",), build, heads_first=True)], CPU, AttentionProblem, 0)
    assert all(row["ms"] is None and "wrong result" in row["why"] for row in rows)


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_on_a_gpu(case):
    """A different result of FlexAttention may be found wrong or refused; ours may not."""
    case = replace(case, S=1024, D=64, Dv=64, dtype="bf16")
    with side_stream(CUDA):
        rows = run_case(case, named("flashtile-triton", "flashtile-builtin", "flex"), CUDA, AttentionProblem, 0)
    for row in rows:
        assert row["ms"] is not None or (row["impl"] != "flashtile-triton" and row["why"]), row
