"""Exported models: with flashtile's operators, and in PyTorch's own alone, also for sizes other than those exported."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import flashtile
from flashtile import BlockMask
from flashtile.integrations.export import decompose
from flashtile.models import GPT, GPTConfig
from flashtile.modules import MHA, RotaryEmbedding
from flashtile.testing import assert_close, assert_same
from support.running.each_case import each_case

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]

GPTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"positions": "rotary", "norm": "rms", "activation": "swiglu", "heads_kv": 2, "window": 5},
    "neox": {
        "positions": "rotary", "rotary_dim": 4, "parallel": True, "tied": False, "activation": "gelu_tanh",
        "heads_kv": 2, "window": 5,
    },
}  # fmt: skip


def operators(program: ExportedProgram) -> set[str]:
    """The namespaces of what the graph calls."""
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return {target.namespace for target in targets if isinstance(target, torch._ops.OpOverload)}


def make_gpt(name: str) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=97, width=32, layers=1, heads=4, context=64, **GPTS[name])).eval()


def tokens(batch: int, seq: int) -> Tensor:
    return torch.randint(0, 97, (batch, seq), generator=torch.Generator().manual_seed(batch * seq))


def assert_equal_results(program: ExportedProgram, model: nn.Module, *inputs: Tensor) -> None:
    """By the tolerance policy: the oracle is the model in float64, the eager computation the decomposed program."""
    actual = program.module()(*inputs).detach()
    expected = model(*inputs).detach()
    wide = model.double()(*(t.double() if t.is_floating_point() else t for t in inputs)).detach()
    model.float()
    assert_close("out", actual, wide, expected)


# Named dimensions need strict=True: PyTorch does not prove its own guard of a reshape there and back without.
DYNAMIC = {
    "default": {"dynamic_shapes": ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)},
    "strict": {"dynamic_shapes": ({0: Dim("batch"), 1: Dim("seq", max=64)},), "strict": True},
}


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize(("name", "mode"), [("gpt2", "default"), ("neox", "default"), ("llama", "strict")])
def test_a_gpt_exports_with_any_batch_and_length(name, mode):
    model = make_gpt(name)
    if name == "neox":
        model(tokens(1, 5))  # its tables of five rotations do not bound the exported model
    program = torch.export.export(model, (tokens(2, 9),), **DYNAMIC[mode])
    decomposed = decompose(program)
    assert operators(decomposed) == {"aten"}
    if name == "gpt2":
        assert operators(program) >= {"flashtile"}
        program = saved_and_loaded(program)
    for batch, seq in ((1, 2), (3, 33), (2, 9)):
        assert_same(program.module()(tokens(batch, seq)), model(tokens(batch, seq)))
        assert_equal_results(decomposed, model, tokens(batch, seq))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen and recorded", "learning and not recorded"])
def test_a_model_exports_whether_or_not_it_learns(frozen):
    model = make_gpt("llama").requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        program = torch.export.export(model, (tokens(2, 9),))
    decomposed = decompose(program)
    assert operators(decomposed) == {"aten"}
    assert_same(program.module()(tokens(2, 9)), model(tokens(2, 9)))
    assert_equal_results(decomposed, model, tokens(2, 9))


def test_a_rotation_in_place_exports():
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = RotaryEmbedding(8)

        def forward(self, qkv: Tensor) -> Tensor:
            return self.rotary(qkv + 1)

    model, qkv = Rotated(), torch.randn(1, 5, 3, 2, 8)
    with torch.no_grad():
        decomposed = decompose(torch.export.export(model, (qkv,)))
    assert operators(decomposed) == {"aten"}
    assert_same(decomposed.module()(qkv), model(qkv))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_onnx_runtime_computes_the_same(name, tmp_path):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(
            package, reason=f"{package} is not installed: the graphs of aten operators are tested above"
        )
    runtime = pytest.importorskip("onnxruntime")
    model = make_gpt(name)
    program = decompose(torch.export.export(model, (tokens(2, 9),), **DYNAMIC["default"]))
    exported = torch.onnx.export(program, dynamo=True, verbose=False)
    exported.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for batch, seq in ((1, 2), (3, 33)):
        (logits,) = session.run(None, {session.get_inputs()[0].name: tokens(batch, seq).numpy()})
        expected = model(tokens(batch, seq)).detach()
        oracle = model.double()(tokens(batch, seq)).detach()
        model.float()
        assert_close("logits", torch.from_numpy(logits), oracle, expected)


REMEDY = (
    r"export in two steps, program = torch.export.export\(model.eval\(\), args\) and torch.onnx.export\(.*decompose"
)


@each_case("way", ["dynamo", "torchscript", "program"])
def test_an_export_to_onnx_leads_to_the_remedy(way):
    pytest.importorskip("onnx", reason="onnx is not installed: the test below stands for its exporter")
    pytest.importorskip("onnxscript")
    model: Any = make_gpt("gpt2")
    if way == "program":
        model = torch.export.export(model, (tokens(2, 9),))
    arguments = () if way == "program" else (tokens(2, 9),)
    with pytest.raises(Exception, match=REMEDY):
        torch.onnx.export(model, arguments, io.BytesIO(), dynamo=way != "torchscript", verbose=False)


def test_operators_refuse_the_exporter_to_onnx(monkeypatch):
    model, program = make_gpt("gpt2"), torch.export.export(make_gpt("gpt2"), (tokens(2, 9),))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(Exception, match=f"got flashtile::.*; {REMEDY}"):
        torch.export.export(model, (tokens(2, 9),))
    with pytest.raises(Exception, match=f"got flashtile::.*; {REMEDY}"):
        program.run_decompositions()
    with pytest.raises(NotImplementedError, match=REMEDY):
        torch.jit.trace(model, (tokens(2, 9),))
    model(tokens(2, 9))  # what is not traced runs


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def qkv(*more: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return *(torch.randn(2, 7, heads, 8, generator=generator) for heads in (4, 2, 2)), *more


BLOCKS = BlockMask.from_predicate(lambda b, h, q, k: k <= q, 1, 1, 7, 7)
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "causal": (lambda q, k, v: flashtile.attention(q, k, v, causal=True), qkv()),
    "window, soft cap": (lambda q, k, v: flashtile.attention(q, k, v, window=(2, 1), softcap=3.0), qkv()),
    "lse": (lambda q, k, v: flashtile.attention(q, k, v, return_lse=True)[1], qkv()),
    "key lengths": (
        lambda q, k, v, n: flashtile.attention(q, k, v, key_lengths=n, align="top_left"),
        qkv(torch.tensor([3, 7])),
    ),
    "bias, sinks": (
        lambda q, k, v, b, s: flashtile.attention(q, k, v, bias=b, sinks=s),
        qkv(torch.randn(4, 7, 7), torch.randn(4)),
    ),
    "mask, slopes": (
        lambda q, k, v, m, a: flashtile.attention(q, k, v, mask=m, alibi_slopes=a),
        qkv(torch.rand(2, 1, 7, 7) < 0.5, torch.rand(4)),
    ),
    "block mask": (lambda q, k, v: flashtile.attention(q, k, v, block_mask=BLOCKS), qkv()),
    "sdpa": (
        lambda q, k, v: flashtile.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
        ),
        qkv(),
    ),
    "layer norm": (lambda x, w: flashtile.layer_norm(x, w), (torch.randn(5, 8), torch.randn(8))),
    "sum and RMS norm": (
        lambda x, r, w: flashtile.dropout_add_rms_norm(x, r, w),
        (torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)),
    ),
    "causal softmax": (lambda x: flashtile.scaled_causal_softmax(x, 0.5), (torch.randn(2, 3, 5, 5),)),
    "perceptron": (
        lambda x, w1, w2: flashtile.fused_mlp(x, w1, None, w2, None),
        (torch.randn(5, 8), torch.randn(16, 8), torch.randn(8, 16)),
    ),
    "cross-entropy": (lambda x, y: flashtile.cross_entropy(x, y), (torch.randn(5, 9), torch.arange(5))),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_export_and_decompose(name):
    function, inputs = CALLS[name]
    model = Function(function)
    program = torch.export.export(model, inputs)
    assert "flashtile" in operators(program)
    decomposed = decompose(program)
    assert operators(decomposed) == {"aten"}
    assert_same(program.module()(*inputs), model(*inputs))
    assert_equal_results(decomposed, model, *inputs)


def test_a_layer_decomposes_without_its_dropout_in_evaluation():
    layer, x = MHA(32, 4, dropout=0.5, causal=True), torch.randn(2, 7, 32)
    assert operators(decompose(torch.export.export(layer.eval(), (x,)))) == {"aten"}
    with pytest.raises(ValueError, match="dropout_p: expected 0 in a graph of PyTorch's operations"):
        decompose(torch.export.export(layer.train(), (x,)))


@pytest.mark.slow
@pytest.mark.parametrize("name, padded", [("mistral", True), ("gpt2", False)], ids=["mistral-padded", "gpt2-whole"])
def test_a_model_of_transformers_exports_for_any_batch_and_length(name, padded):
    pytest.importorskip("transformers")
    from flashtile.integrations.transformers import register, unregister
    from support.models.transformers_cases import ALL, VOCABULARY, build, make_inputs

    register()
    model = build(ALL[name], "flashtile", use_cache=False, num_hidden_layers=1)
    inputs = make_inputs(ALL[name], "left")
    tokens = torch.randint(3, VOCABULARY, (3, 19))
    longer = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    longer["attention_mask"][1, :6] = 0
    names = ["input_ids", "attention_mask"] if padded else ["input_ids"]
    inputs, longer = ({key: given[key] for key in names} for given in (inputs, longer))
    program = torch.export.export(
        model, (), inputs, dynamic_shapes={key: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for key in names}
    )
    decomposed = decompose(program)
    assert "flashtile" in operators(program) and operators(decomposed) == {"aten"}
    for given in (inputs, longer):
        real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
        expected = model(**given).logits[real]
        for exported in (program, decomposed):
            assert_same(exported.module()(**given).logits[real], expected)
    unregister()


# --- what has no equivalent -----------------------------------------------------------------------------------------


def test_packed_sequences_are_refused():
    inputs = *(torch.randn(9, heads, 8) for heads in (4, 2, 2)), torch.tensor([0, 4, 9])
    program = torch.export.export(Function(lambda q, k, v, n: flashtile.attention_varlen(q, k, v, n)), inputs)
    assert "flashtile" in operators(program)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected None in a graph of PyTorch's operations"):
        decompose(program)


def test_operators_without_an_equivalent_are_named():
    def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Any:
        return flashtile.linear_cross_entropy(x, weight, labels)

    program = torch.export.export(Function(loss), (torch.randn(5, 8), torch.randn(9, 8), torch.arange(5)))
    with pytest.raises(ValueError, match=r"program: expected operators .* got flashtile.linear_cross_entropy_forward"):
        decompose(program)


def test_only_exported_programs_are_taken():
    with pytest.raises(TypeError, match="program: expected an ExportedProgram, got GPT"):
        decompose(make_gpt("gpt2"))  # type: ignore[arg-type]


def test_the_table_has_the_forward_operators():
    table = flashtile.decompositions()
    assert torch.ops.flashtile.attention_forward.default in table
    table.clear()
    assert flashtile.decompositions()
