"""The masks of cases: what they show, how much of it, and FlexAttention's way to say it."""

import pytest
import torch

from flashtile.bench import implementations, masks
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.implementations import IMPLEMENTATIONS
from flashtile.bench.oracle import AttentionProblem, Oracle
from flashtile.bench.runner import run_case
from support.running.each_case import each_case

CPU = torch.device("cpu")
TILES = Case(2, 96, 4, 2, 16, 8, dtype="fp32", mask="tiles16:0.4")
DOCUMENTS = Case(1, 96, 2, 2, 16, 16, causal=True, dtype="fp32", mask="documents20")
FLEX = [
    Case(1, 256, 4, 2, 16, 16, dtype="fp32", mask="tiles64:0.5"),
    Case(1, 256, 2, 2, 16, 16, causal=True, dtype="fp32", mask="documents50"),
    Case(1, 256, 2, 2, 16, 16, causal=True, dtype="fp32", window=(20, 0)),
    Case(2, 128, 4, 2, 16, 16, dtype="fp32", bias="1HSS"),
    Case(2, 128, 2, 2, 16, 16, causal=True, dtype="fp32", softcap=2.0, bias="BHSS"),
]


@each_case("density", [0.05, 0.25, 0.5])
def test_layout_has_the_diagonal_and_the_density(density):
    layout = masks.tile_layout(16384, f"tiles128:{density:g}")
    assert layout.shape == (128, 128) and layout.diagonal().all()
    assert int(layout.sum()) == masks.visible_tiles(128, density) == round(density * 128**2)
    assert not torch.equal(layout, layout.T)


def test_few_tiles_are_those_of_the_diagonal():
    assert torch.equal(masks.tile_layout(64, "tiles16:0.01"), torch.eye(4, dtype=torch.bool))
    assert masks.visible_tiles(4, 0.01) == 4


def test_block_mask_shows_what_the_oracle_is_told():
    dense = make_inputs(TILES, CPU).block_mask.to_dense()[0, 0]
    shown = masks.tile_rows(96, TILES.mask, range(10, 50), CPU)
    assert torch.equal(shown, dense[10:50])
    assert TILES.B * int(dense.sum()) == TILES.visible_pairs() == 2 * round(0.4 * 36) * 16**2


@each_case("causal", [False, True])
def test_documents_see_themselves(causal):
    lengths = masks.document_lengths("documents20", 96)
    assert sum(lengths) == 96 and len(lengths) > 2
    expected = torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()
    block_mask = masks.block_mask("documents20", 96, causal, CPU)
    assert torch.equal(block_mask.to_dense()[0, 0], expected.tril() if causal else expected)


def test_documents_are_those_of_the_packed_table():
    assert masks.document_lengths("documents768", 65536) == tuple(masks.long_tailed_lengths())
    assert masks.document_lengths(None, 64) is masks.document_lengths("tiles16:0.5", 64) is None


@each_case("case", [TILES, DOCUMENTS])
def test_oracle_is_that_of_the_whole_matrix(case):
    """The oracle makes its own pairs, of tiles from the layout and of documents one by one."""
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


@pytest.mark.parametrize("case", FLEX, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_computes_the_case(case):
    """Traced in one piece, as for its kernels, which a CPU has not for the backward."""
    inputs = make_inputs(case, CPU)
    tensors = [t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v)]
    tensors += [] if inputs.bias is None else [inputs.bias]
    torch.compiler.reset()
    flex = implementations.only_compiled(implementations.flex_function(case, inputs))
    attend = torch.compile(flex, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        out = attend(*tensors).transpose(1, 2)
    assert Oracle(case, inputs).judge({"out": out}).why is None


def test_flex_that_is_not_compiled_gets_no_speed():
    (implementation,) = [each for each in IMPLEMENTATIONS if each.name == "flex"]
    with torch.compiler.set_stance("force_eager"):
        rows = run_case(FLEX[0], [implementation], CPU, AttentionProblem)
    assert [row["ms"] for row in rows] == [None, None]
    assert all("fell back to eager execution" in row["why"] for row in rows)
