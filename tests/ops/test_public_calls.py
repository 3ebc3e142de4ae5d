"""What holds for every public function (tests/support/running/public_calls.py): another default device, sizes that
depend on data, results that are changed in place, and the arithmetic that PyTorch's counter sees."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import flashtile
from flashtile.ops.common import flops
from flashtile.testing import assert_same
from support.running.each_case import each_case
from support.running.public_calls import CALLS, ROWS, SEQ, PublicCall, labels, shown

#: Public names that are no functions of tensors, or whose functions are attributes of them.
NO_CALLS = {
    "AttentionOptions", "AttentionPart", "BlockMask", "Explanation", "OnlineSoftmax", "RotaryScaling", "ScoreFunction",
    "decompositions", "explain", "finish_attention", "patterns",
}  # fmt: skip


def test_every_public_function_is_called():
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


@each_case("name", SPARSE)
def test_sparse_tensors_are_refused_by_name(name):
    call, tensor = SPARSE[name]
    with pytest.raises(TypeError, match=rf"^{name.partition(':')[0]}: expected .*dense.* got layout torch.sparse_coo"):
        call(tensor.to_sparse())


def results_and_gradients(call: PublicCall, leaves: list[Tensor]) -> list[Tensor]:
    """What a call returns, and the gradients of its leaves."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    results = call.results(*leaves)
    recorded = [out.square().sum() for out in results if out.requires_grad]
    if recorded:
        results += [g for g in torch.autograd.grad(sum(recorded), leaves, allow_unused=True) if g is not None]
    return [result.detach() for result in results]


def _bool_arguments(function: Callable[..., object]) -> list[str]:
    return [name for name, p in inspect.signature(function).parameters.items() if isinstance(p.default, bool)]


_FLAGS = [
    (call, flag)
    for name in flashtile.__all__
    if callable(function := getattr(flashtile, name)) and not isinstance(function, type)
    for flag in _bool_arguments(function)
    if (call := next((call for call in CALLS if call.partition(":")[0] == name), None))
]


@each_case("name, flag", _FLAGS)
def test_flags_are_bools(name, flag):
    """Also in a call like an earlier one, for which little is checked."""
    call, function = CALLS[name], name.partition(":")[0]
    public = getattr(flashtile, function)
    call.results(*call.leaves(ROWS))

    def with_flag(*arguments: object, **options: object) -> object:
        return public(*arguments, **(options | {flag: value}))

    if call.function is public:
        call = call._replace(function=with_flag)
    for value in ("no", 1):
        with (
            mock.patch.object(flashtile, function, with_flag),
            pytest.raises(TypeError, match=f"^{flag}: expected True or False, got {value!r}"),
        ):
            call.results(*call.leaves(ROWS))


@each_case("name", [name for name, call in CALLS.items() if call.shapes])
def test_lazily_negated_tensors(name):
    """Tensors whose memory holds the opposite numbers, such as `z.conj().imag`."""
    call = CALLS[name]
    leaves = call.leaves(ROWS)
    found = []
    for view in (torch.clone, lambda leaf: torch._neg_view(-leaf)):
        mine = [leaf.clone().requires_grad_() for leaf in leaves]
        results = call.results(*map(view, mine))
        recorded = [out.square().sum() for out in results if out.requires_grad]
        if recorded:
            results += [g for g in torch.autograd.grad(sum(recorded), mine, allow_unused=True) if g is not None]
        found.append([result.detach() for result in results])
    assert_same(found[1], found[0])


@each_case("name", CALLS)
def test_another_default_device(name):
    call = CALLS[name]
    torch.set_default_device("meta")
    try:
        found = results_and_gradients(call, call.leaves(ROWS))
    finally:
        torch.set_default_device(None)
    assert_same(found, results_and_gradients(call, call.leaves(ROWS)))


TRACED = [name for name, call in CALLS.items() if not call.of_values]
#: Those that compare sizes each in another way, and have a gradient.
COMPILED = [
    "attention: key_lengths", "attention: all that learns", "attention: block_mask", "attention_varlen: longest",
    "scaled_dot_product_attention: float", "cross_entropy: of sequences", "linear_cross_entropy: of sequences",
    "dropout_add_layer_norm: two", "dropout_add_rms_norm: subset", "scaled_masked_softmax", "online_softmax",
    "logsumexp_merge", "apply_rotary: in place", "apply_rotary_qkv", "fused_dense", "fused_mlp: recomputed",
]  # fmt: skip
OF_SEQUENCES = [
    "attention: bias", "attention: slopes", "scaled_dot_product_attention: float", "attention_part", "attention_probs",
    "attention_backward", "cross_entropy: of sequences", "scaled_masked_softmax", "apply_rotary", "quantize_fp8",
]  # fmt: skip


class OfKeptRows(nn.Module):
    """A call whose sizes depend on data: of the rows that a mask keeps, or of the tokens of each sequence (SEQ). They
    are counted for each leaf by itself."""

    def __init__(self, call: PublicCall, size: int = -1) -> None:
        super().__init__()
        self.call, self.size = call, size

    def forward(self, kept: Tensor, *leaves: Tensor) -> list[Tensor]:
        chosen = list(leaves)
        for number, shape in enumerate(self.call.shapes):
            rows = kept.clone().nonzero().flatten()
            for dim in (dim for dim, size in enumerate(shape) if size == self.size):
                chosen[number] = chosen[number].index_select(dim, rows)
        return self.call.results(*chosen)


KEPT = [torch.tensor(kept, dtype=torch.bool) for kept in ([1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0])]


@pytest.mark.parametrize("name", [name for name in TRACED if name not in COMPILED])
def test_export_with_sizes_that_depend_on_data(name):
    call = CALLS[name]
    model, leaves = OfKeptRows(call), call.leaves(4)
    program = torch.export.export(model, (KEPT[0], *leaves)).module()
    for kept in KEPT:
        assert_same(program(kept, *leaves), model(kept, *leaves))


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_export_with_lengths_that_depend_on_data(name):
    call = CALLS[name]
    model, leaves = OfKeptRows(call, SEQ), call.leaves(2)
    kept = torch.tensor([True, False, True, True, False])
    program = torch.export.export(model, (kept, *leaves)).module()
    for each in (kept, ~kept, torch.zeros_like(kept)):
        assert_same(program(each, *leaves), model(each, *leaves))


@pytest.mark.parametrize("name", COMPILED)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compilation_with_sizes_that_depend_on_data(name):
    torch._dynamo.reset()
    call = CALLS[name]
    compiled = torch.compile(OfKeptRows(call), fullgraph=True, backend="aot_eager")
    for kept in KEPT:
        of_kept = [PublicCall(functools.partial(each, kept)) for each in (compiled, OfKeptRows(call))]
        found, expected = (results_and_gradients(each, call.leaves(4)) for each in of_kept)
        assert_same(found, expected)


@each_case("name", CALLS)
def test_results_can_be_changed_in_place(name):
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
def test_results_of_each_backend_can_be_changed_in_place(device, backend, packed):
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


def counted(run: Callable[[], object]) -> dict[str, int]:
    """The operations of our operators that PyTorch's counter sees."""
    with FlopCounterMode(display=False) as counter:
        run()
    of_all = {
        str(name).removeprefix("flashtile."): count for name, count in counter.get_flop_counts()["Global"].items()
    }
    return {name: count for name, count in of_all.items() if "aten" not in name}


B, S, K, H, D, DV = 2, 6, 9, 4, 8, 16
PRODUCT = 2 * B * S * K * H
MASKS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 0), "softcap": 5.0},
    "key_lengths": {"key_lengths": torch.tensor([3, 9])},
    "mask": {"mask": shown(S, K)},
    "block_mask": {"block_mask": flashtile.BlockMask.from_dense(shown(S, K))},
    "dropout": {"dropout_p": 0.5},
}


@each_case("name", MASKS)
def test_flops_of_attention_are_those_of_all_pairs(name):
    q, k, v = (
        torch.randn(B, seq, heads, dim, requires_grad=True) for seq, heads, dim in ((S, H, D), (K, 2, D), (K, 2, DV))
    )
    for _ in range(2):  # the second call is like the first
        flashtile.attention(q, k, v, **MASKS[name]).sum().backward()
    assert counted(lambda: flashtile.attention(q, k, v, **MASKS[name]).sum().backward()) == {
        "attention_forward": sdpa_flop_count((B, H, S, D), (B, H, K, D), (B, H, K, DV)),
        "attention_backward": sdpa_backward_flop_count((B, H, S, DV), (B, H, S, D), (B, H, K, D), (B, H, K, DV)),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_flops_on_a_gpu(backend):
    """There, a backward runs in another thread."""
    q = torch.randn(B, 64, H, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    run = lambda: flashtile.attention(q, q, q, causal=True, backend=backend).sum().backward()  # noqa: E731
    run()
    product = 2 * B * 64 * 64 * H * 64
    assert counted(run) == {"attention_forward": 2 * product, "attention_backward": 5 * product}


def test_flops_of_packed_attention_are_those_of_each_sequence():
    q, k = torch.randn(12, H, D, requires_grad=True), torch.randn(14, H, D)
    ends = torch.tensor([0, 2, 2, 10]), torch.tensor([0, 3, 8, 13], dtype=torch.int32)  # 2 · 3 and 8 · 5 pairs
    assert counted(lambda: flashtile.attention_varlen(q, k, k, *ends, causal=True).sum().backward()) == {
        "attention_forward": 2 * 46 * H * 2 * D,
        "attention_backward": 2 * 46 * H * 5 * D,
    }
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [mode.from_tensor(t) for t in (q, k, k, *ends)]
        bound = counted(lambda: flashtile.attention_varlen(*given, max_seqlen_q=9, max_seqlen_k=5))
    assert bound == {"attention_forward": 2 * 12 * 5 * H * 2 * D}


FLOPS: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...], dict[str, int]]] = {
    "column sums": (
        lambda q, k: flashtile.attention_column_sums(q, k, torch.zeros(B, H, S)),
        ((B, S, H, D), (B, K, H, D)),
        {"attention_column_sums": PRODUCT * D},
    ),
    "part": (
        lambda q, k: flashtile.attention_part(q, k, k, flashtile.AttentionPart(0, 0, 2 * S, 2 * K)),
        ((B, S, H, D), (B, K, H, D)),
        {"attention_forward": PRODUCT * 2 * D},
    ),
    "cache": (
        lambda q, cache: [flashtile.attention_with_kv_cache(q, cache, cache, cache_lengths=4) for _ in range(2)],
        ((B, 1, H, D), (B, K, H, D)),
        {"attention_cached": 2 * 2 * B * 4 * H * 2 * D},
    ),
    "appended": (
        lambda q, cache, new: flashtile.attention_with_kv_cache(
            q, cache, cache.clone(), new, new, cache_lengths=torch.tensor([1, 5])
        ),
        ((B, 2, H, D), (B, K, H, D), (B, 2, H, D)),
        {"attention_cached_": 2 * 2 * (1 + 2 + 5 + 2) * H * 2 * D},
    ),
    "accumulate": (
        lambda x, dout, total: flashtile.linear_bias_wgrad(x, dout, main_grad=total),
        ((5, 3), (5, 7), (7, 3)),
        {"dense_accumulate": 2 * 5 * 3 * 7},
    ),
}


@each_case("name", FLOPS)
def test_flops_of_other_operators(name):
    call, shapes, expected = FLOPS[name]
    tensors = [torch.randn(shape) for shape in shapes]
    call(*tensors)
    assert counted(lambda: call(*tensors)) == expected


@each_case("reduction", ["mean", "none"])
def test_flops_of_a_linear_loss(reduction):
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    loss = lambda: flashtile.linear_cross_entropy(x, weight, labels(x), reduction=reduction).sum()  # noqa: E731
    one = 2 * 5 * 3 * 7
    forward, backward = "linear_cross_entropy_forward", "linear_cross_entropy_backward"
    assert counted(lambda: loss().backward()) == (
        {forward: 3 * one} if reduction == "mean" else {forward: one, backward: 3 * one}
    )


def test_every_operator_with_products_has_a_formula():
    """The others compute elements, sums and exponentials."""
    without = {
        "cross_entropy_backward", "cross_entropy_backward_", "cross_entropy_forward", "dense_activate",
        "dense_activate_backward", "dense_column_sum", "finish_attention", "layer_norm_backward", "layer_norm_forward",
        "merge_attention_", "rotary", "rotary_", "softmax_backward", "softmax_forward",
    }  # fmt: skip
    defined = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("flashtile::")}
    counted = {str(op).removeprefix("flashtile.") for op in flop_registry if str(op).startswith("flashtile.")}
    of_tests = {name for name in defined if name.startswith(("test_", "gate_"))}  # tests/ops/test_operators.py
    assert counted - of_tests == defined - without - of_tests


@each_case("flashtile_first", [True, False])
def test_the_counter_and_flashtile_are_imported_in_any_order(flashtile_first):
    """Formulas are registered at once, or when PyTorch's module is imported: here another one of its name."""
    finders = [each for each in sys.meta_path if each is not flops._ON_IMPORT]
    registered = mock.patch.dict(sys.modules), mock.patch.object(torch.utils, "flop_counter", flop_counter)
    with mock.patch.object(sys, "meta_path", finders), mock.patch.dict(flops._FORMULAS), registered[0], registered[1]:
        del sys.modules[flops._COUNTER]
        if not flashtile_first:
            importlib.import_module(flops._COUNTER)
        flops.register_flops("attention_forward", flops._FORMULAS["attention_forward"])
        counter = importlib.import_module(flops._COUNTER)
        assert counter is not flop_counter and sys.meta_path == finders
        assert torch.ops.flashtile.attention_forward in counter.flop_registry
