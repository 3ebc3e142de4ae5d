"""What holds for every public function (tests/public_calls.py): another default device, sizes that depend on data,
results that are changed in place, and the arithmetic that PyTorch's counter sees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import flashtile
from flashtile.testing import assert_same
from public_calls import CALLS, ROWS, PublicCall

#: Public names that are no functions of tensors, or whose functions are attributes of them.
NO_CALLS = {
    "AttentionOptions", "AttentionPart", "BlockMask", "Explanation", "OnlineSoftmax", "RotaryScaling", "ScoreFunction",
    "decompositions", "explain", "finish_attention", "patterns",
}  # fmt: skip


def test_every_public_function_is_called() -> None:
    called = {name.partition(":")[0] for name in CALLS}
    of_patterns = {name.removeprefix("patterns.") for name in called if name.startswith("patterns.")}
    assert called >= set(flashtile.__all__) - NO_CALLS
    assert of_patterns == set(flashtile.patterns.__all__)


_Q, _X, _INDEX = torch.ones(1, 4, 2, 8), torch.ones(3, 8), torch.zeros(3, dtype=torch.int64)
#: Calls of one tensor, whose argument has the name before the colon: another one than q, k, v or x where there is one.
SPARSE: dict[str, tuple[Callable[[Tensor], object], Tensor]] = {
    "q": (lambda t: flashtile.attention(t, _Q, _Q), _Q),
    "bias": (lambda t: flashtile.attention(_Q, _Q, _Q, bias=t), torch.ones(4, 4)),
    "mask": (lambda t: flashtile.attention(_Q, _Q, _Q, mask=t), torch.ones(4, 4, dtype=torch.bool)),
    "alibi_slopes": (lambda t: flashtile.attention(_Q, _Q, _Q, alibi_slopes=t), torch.ones(2)),
    "sinks": (lambda t: flashtile.attention(_Q, _Q, _Q, sinks=t), torch.ones(2)),
    "key_lengths": (lambda t: flashtile.attention(_Q, _Q, _Q, key_lengths=t), torch.ones(1, dtype=torch.int32)),
    "dropout_seed": (
        lambda t: flashtile.attention(_Q, _Q, _Q, dropout_p=0.1, dropout_seed=t), torch.ones(2, dtype=torch.int64)
    ),
    "cu_seqlens_q": (
        lambda t: flashtile.attention_varlen(_Q[0], _Q[0], _Q[0], t), torch.tensor([0, 4], dtype=torch.int32)
    ),
    "score_mod": (
        lambda t: flashtile.attention(_Q, _Q, _Q, score_mod=lambda s, b, h, q, k: s + t[q, k]), torch.ones(4, 4)
    ),
    "rows": (lambda t: flashtile.attention_probs(_Q, _Q, rows=t), _INDEX),
    "attn_mask": (lambda t: flashtile.scaled_dot_product_attention(_Q, _Q, _Q, attn_mask=t), torch.ones(2, 2)),
    "block_table": (
        lambda t: flashtile.attention_with_kv_cache(_Q, _Q, _Q, block_table=t), torch.zeros(1, 1, dtype=torch.int32)
    ),
    "logits": (lambda t: flashtile.cross_entropy(t, _INDEX), _X),
    "labels": (lambda t: flashtile.cross_entropy(_X, t), _INDEX),
    "weight: of a loss": (lambda t: flashtile.linear_cross_entropy(_X, t, _INDEX), _X),
    "weight: of a norm": (lambda t: flashtile.layer_norm(_X, t), torch.ones(8)),
    "x0_subset": (lambda t: flashtile.dropout_add_layer_norm(_X, None, None, None, x0_subset=t), _INDEX),
    "weight: of a layer": (lambda t: flashtile.fused_dense(_X, t), _X),
    "cos": (lambda t: flashtile.apply_rotary(_Q, t, torch.ones(4, 4)), torch.ones(4, 4)),
    "scores": (lambda t: flashtile.online_softmax(t, _X.T), _X),
}  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_are_refused_by_name(name: str) -> None:
    call, tensor = SPARSE[name]
    with pytest.raises(TypeError, match=rf"^{name.partition(':')[0]}: expected .*dense.* got layout torch.sparse_coo"):
        call(tensor.to_sparse())


@pytest.fixture
def another_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def results_and_gradients(call: PublicCall, leaves: list[Tensor]) -> list[Tensor]:
    """What a call returns, and the gradients of its leaves."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    results = call.results(*leaves)
    recorded = [out.square().sum() for out in results if out.requires_grad]
    if recorded:
        results += [g for g in torch.autograd.grad(sum(recorded), leaves, allow_unused=True) if g is not None]
    return [result.detach() for result in results]


@pytest.mark.parametrize("name", CALLS)
def test_another_default_device(name: str, another_default_device: None) -> None:
    call = CALLS[name]
    found = results_and_gradients(call, call.leaves(ROWS))
    torch.set_default_device(None)
    assert_same(found, results_and_gradients(call, call.leaves(ROWS)))


TRACED = [name for name, call in CALLS.items() if not call.of_values]
#: Those that compare sizes each in another way.
COMPILED = [
    "attention: bias", "attention: slopes of batch", "attention_varlen: longest", "scaled_dot_product_attention: float",
    "attention_with_kv_cache: rotary", "attention_probs", "quantize_fp8", "cross_entropy: of sequences",
    "linear_cross_entropy: of sequences", "dropout_add_rms_norm", "scaled_masked_softmax", "online_softmax",
    "logsumexp_merge", "apply_rotary: longest", "apply_rotary_qkv", "fused_mlp",
]  # fmt: skip


class OfKeptRows(nn.Module):
    """A call whose sizes depend on data: of the rows that a mask keeps, which are counted for each leaf by itself."""

    def __init__(self, call: PublicCall) -> None:
        super().__init__()
        self.call = call

    def forward(self, kept: Tensor, *leaves: Tensor) -> list[Tensor]:
        chosen = [t[kept.clone()] if shape[0] == -1 else t for t, shape in zip(leaves, self.call.shapes)]
        return self.call.results(*chosen)


KEPT = [torch.tensor(kept, dtype=torch.bool) for kept in ([1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0])]


@pytest.mark.parametrize("name", TRACED)
def test_export_with_sizes_that_depend_on_data(name: str) -> None:
    call = CALLS[name]
    model, leaves = OfKeptRows(call), call.leaves(4)
    program = torch.export.export(model, (KEPT[0], *leaves)).module()
    for kept in KEPT:
        assert_same(program(kept, *leaves), model(kept, *leaves))


@pytest.mark.parametrize("name", COMPILED)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compilation_with_sizes_that_depend_on_data(name: str) -> None:
    torch._dynamo.reset()
    call = CALLS[name]
    compiled = torch.compile(OfKeptRows(call), fullgraph=True, backend="aot_eager")
    for kept in KEPT:
        of_kept = [PublicCall(functools.partial(each, kept)) for each in (compiled, OfKeptRows(call))]
        found, expected = (results_and_gradients(each, call.leaves(4)) for each in of_kept)
        assert_same(found, expected)


@pytest.mark.parametrize("name", CALLS)
def test_results_can_be_changed_in_place(name: str) -> None:
    call = CALLS[name]
    for result in call.results(*(leaf.requires_grad_() for leaf in call.leaves(ROWS))):
        if result.requires_grad:
            result.add_(1)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "reference"),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
        pytest.param("cuda", "auto", marks=pytest.mark.gpu),
    ],
)
def test_results_of_each_backend_can_be_changed_in_place(device: str, backend: str, packed: bool) -> None:
    for dim in (64, 40, 192):
        q = torch.randn(3, 40, 2, dim, dtype=torch.bfloat16, device=device, requires_grad=True)
        options = {"backend": backend, "return_lse": True, "softcap": 5.0 if dim == 40 else None}
        for _ in range(2):  # the second call is like the first
            results = (
                flashtile.attention_varlen(*[q.flatten(0, 1)] * 3, torch.tensor([0, 20, 120], device=device), **options)
                if packed
                else flashtile.attention(q, q, q, **options)
            )
            for result in results:
                result.add_(1)
