"""Calls like an earlier one, for which nothing is decided again: what they give, and what makes a call another one.

With `dropout_p=0`, an integer, a call is decided about as if it were the first; so it is what others are compared with.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.ops.attention import repeated, select
from flashtile.ops.common import dispatch
from flashtile.ops.common import repeated as repeated_calls

_OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, None), "align": "top_left"},
    "scores": {"softcap": 3.0, "scale": 0.3},
    "in order": {"deterministic": True},
    "reference": {"backend": "reference"},
}


def inputs(seed: int = 0, seq: int = 24, dtype: torch.dtype = torch.float32, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(2, seq, 4, 16, generator=generator).to(dtype) for _ in range(3)]
    return [tensor.requires_grad_(grad) for tensor in tensors]


def forward_backward(qkv: list[Tensor], through_lse: bool = False, **options: Any) -> list[Tensor]:
    out, lse = flashtile.attention(*qkv, return_lse=True, **options)
    through = [out, lse] if through_lse else [out]
    upstream = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).view_as(t) for t in through]
    grads = torch.autograd.grad(through, qkv, upstream)
    return [out, lse, *grads]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def decided(monkeypatch):
    """The phases for which a backend is chosen."""
    found: list[str] = []
    choose = select.implementation

    def implementation(phase: str, *call: Any, **more: Any) -> Any:
        found.append(phase)
        return choose(phase, *call, **more)

    monkeypatch.setattr(select, "implementation", implementation)
    return found


class _Subclass(Tensor):
    pass


@pytest.mark.parametrize("by_pytorch", [True, False])
def test_tensors_are_recognised(by_pytorch, monkeypatch):
    if not by_pytorch:
        monkeypatch.setattr(dispatch, "_TensorGuards", None)
    q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 6, 4, 16, requires_grad=True)
    recognises = dispatch.recogniser(q, k)
    assert recognises(q, k) and recognises(torch.randn(3, 8, 4, 16)[1:], k.detach().requires_grad_())
    with torch.no_grad():
        assert recognises(q, k)
    others = {
        "size": q[:1], "rank": q[0], "strides": q.mT.contiguous().mT, "dtype": q.double(), "device": q.to("meta"),
        "gradient": q.clone().requires_grad_(), "parameter": torch.nn.Parameter(q, requires_grad=False),
        "subclass": q.as_subclass(_Subclass), "negative": torch._neg_view(q), "none": None, "list": q.tolist(),
        "sparse": q.to_sparse(),
    }  # fmt: skip
    assert [name for name, other in others.items() if recognises(other, k)] == []
    assert not recognises(q, k.detach()) and not recognises(q, q)
    twice = dispatch.recogniser(q, k, q)
    assert twice(q, k, q) and not twice(q, k, k) and not twice(q, q, q)


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_the_same_as_a_call_that_is_decided_about(options, decided):
    for seed in range(3):
        qkv = inputs(seed)
        assert same(forward_backward(qkv, **options), forward_backward(qkv, **options, dropout_p=0))
        assert same(forward_backward(qkv, True, **options), forward_backward(qkv, True, **options, dropout_p=0))
    # Those with dropout_p=0 are decided about each time.
    assert decided.count("forward") == 1 + 6


def _relative(table: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return score + table[head, q_index - k_index + 23]

    return score_mod


def _learning(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype).requires_grad_()


def _features() -> dict[str, dict[str, Any]]:
    """Arguments with tensors; those that want gradients come first."""
    visible = torch.ones(24, 24, dtype=torch.bool).tril(3)
    return {
        "key lengths": {"key_lengths": torch.tensor([24, 7])},
        "bias": {"bias": _learning(24, 24)},
        "bias of all": {"bias": _learning(2, 4, 24, 24), "mask": visible},
        "slopes": {"alibi_slopes": _learning(4), "causal": True},
        "sinks": {"sinks": _learning(4), "window": (5, 0)},
        "block mask": {"block_mask": flashtile.BlockMask.from_dense(visible, (64, 64))},
        "table": {"score_mod": _relative(_learning(4, 47))},
        "seed": {"dropout_p": 0.5, "dropout_seed": torch.tensor([3, 4])},
    }


def _both_ways(
    qkv: list[Tensor], options: dict[str, Any], decided_anew: bool, offsets: Tensor | None = None
) -> list[Tensor]:
    """Results and gradients, by way of an earlier call that is alike, or decided anew."""
    if decided_anew:
        repeated.forget_calls()
    arguments = (*qkv, offsets) if offsets is not None else qkv
    attend = flashtile.attention_varlen if offsets is not None else flashtile.attention
    out, lse = attend(*arguments, return_lse=True, **options)
    reached = [t for t in options.values() if isinstance(t, Tensor) and t.requires_grad]
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    return [out, lse, *torch.autograd.grad([out, lse], [*qkv, *reached], [upstream, lse.detach().cos()])]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", _features())
def test_calls_with_other_tensors(name, packed):
    options, offsets = _features()[name], None
    if packed:
        options = {**options, "max_seqlen_q": 24, "max_seqlen_k": 24}
        offsets = torch.tensor([0, 24, 48], dtype=torch.int32)
        if name == "bias of all":
            options["bias"] = _learning(1, 4, 24, 24)
        if name == "key lengths":
            options["key_lengths"] = torch.tensor([20, 7])
    for seed in range(3):
        qkv = inputs(seed)
        if packed:
            qkv = [t.detach().flatten(0, 1).requires_grad_() for t in qkv]
        repeated_call = _both_ways(qkv, options, decided_anew=False, offsets=offsets)
        assert same(repeated_call, _both_ways(qkv, options, decided_anew=True, offsets=offsets))


def test_what_is_returned_and_one_tensor_for_both_lengths_are_recognised(monkeypatch):
    made = []
    new_call = repeated.new_call
    monkeypatch.setattr(repeated, "new_call", lambda *given, **more: (made.append(given), new_call(*given, **more))[1])
    offsets, lengths = torch.tensor([0, 5, 24], dtype=torch.int32), {"max_seqlen_q": 24, "max_seqlen_k": 24}
    for seed in range(3):
        qkv = [t.detach()[0].requires_grad_() for t in inputs(seed)]
        results = flashtile.attention(*inputs(seed), return_max_scores=True)
        assert same(results, flashtile.attention(*inputs(seed), return_max_scores=True, dropout_p=0))
        out = flashtile.attention_varlen(*qkv, offsets, offsets, **lengths)
        assert same(torch.autograd.grad(out.sum(), qkv), _by_default(qkv, offsets, **lengths))
    assert len(made) == 2, "each call is new once, and both ways to give lengths are one call"


def _by_default(qkv: list[Tensor], offsets: Tensor, **lengths: int) -> list[Tensor]:
    return [*torch.autograd.grad(flashtile.attention_varlen(*qkv, offsets, **lengths).sum(), qkv)]


def test_tensors_of_another_kind_are_checked_again():
    q, k, v = inputs()
    for _ in range(2):
        flashtile.attention(q, k, v, sinks=torch.zeros(4), key_lengths=torch.tensor([3, 24]))
        with pytest.raises(TypeError, match="sinks: expected dtype"):
            flashtile.attention(q, k, v, sinks=torch.zeros(4).half(), key_lengths=torch.tensor([3, 24]))
        with pytest.raises(ValueError, match="alibi_slopes: expected shape"):
            flashtile.attention(q, k, v, alibi_slopes=torch.zeros(5))
        with pytest.raises(ValueError, match="key_lengths: expected lengths of at most"):
            flashtile.attention(q, k, v, sinks=torch.zeros(4), key_lengths=torch.tensor([3, 25]))
    assert torch.equal(
        flashtile.attention(q, k, v, alibi_slopes=torch.ones(4)),
        flashtile.attention(q, k, v, alibi_slopes=torch.ones(4), dropout_p=0),
    ), "a tensor of the same shape in another argument is another call"


def test_each_call_draws_its_own_seed():
    q, k, v = inputs()
    first, second = (flashtile.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    third = flashtile.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(third, flashtile.attention(q, k, v, dropout_p=0.5))


def test_without_gradients_and_with_them(decided):
    plain = flashtile.attention(*inputs(grad=False))
    recorded = flashtile.attention(*inputs())
    with torch.no_grad():
        unrecorded = flashtile.attention(*inputs())
    assert not plain.requires_grad and recorded.requires_grad and not unrecorded.requires_grad
    assert torch.equal(plain, recorded) and torch.equal(plain, unrecorded)
    assert decided == ["forward"] * 2, "once for tensors that want gradients, recorded or not"
    only_k = inputs(grad=False)
    only_k[1].requires_grad_()
    (dk,) = torch.autograd.grad(flashtile.attention(*only_k).sum(), only_k[1])
    assert torch.equal(dk, torch.autograd.grad(flashtile.attention(*only_k, dropout_p=0).sum(), only_k[1])[0])


def test_one_tensor_may_be_all_three(decided):
    q, k, v = inputs()
    first = flashtile.attention(q, q, q)
    decided.clear()
    assert torch.equal(flashtile.attention(q, q, q), first) and not decided
    assert not torch.equal(flashtile.attention(q, k, v), first)
    assert torch.equal(torch.autograd.grad(first.sum(), q)[0], _by_copies(q))


def _by_copies(q: Tensor) -> Tensor:
    copies = [q.detach().clone().requires_grad_() for _ in range(3)]
    gradients = torch.autograd.grad(flashtile.attention(*copies).sum(), copies)
    return gradients[0] + gradients[1] + gradients[2]


def test_other_layouts_and_dtypes_are_other_calls(decided):
    calls_made = [
        inputs(),
        inputs(seq=25),
        inputs(dtype=torch.bfloat16),
        [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in inputs()],
        [t.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for t in inputs()],  # rows are not contiguous
        [t.detach().expand(2, 24, 4, 16)[:1] for t in inputs()],
    ]
    for qkv in calls_made * 2:
        assert torch.equal(flashtile.attention(*qkv), flashtile.attention(*qkv, dropout_p=0))
    assert decided.count("forward") == len(calls_made) * 3 + 1  # columns that are not contiguous each time


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        ({"causal": True}, {"causal": 1}, "causal: expected True or False"),
        ({"deterministic": False}, {"deterministic": 0}, "deterministic: expected True or False"),
        ({"window": (1, 0)}, {"window": (True, 0)}, "window: expected int or None"),
        ({"window": (1, 0)}, {"window": (1.0, 0)}, "window: expected int or None"),
        ({"scale": 1.0}, {"scale": True}, "scale: expected a float"),
        ({"softcap": 1.0}, {"softcap": torch.tensor(1.0)}, "softcap: expected a float"),
        ({"backend": "cpu"}, {"backend": ["cpu"]}, "backend: expected one of"),
        ({}, {"backend": "gpu"}, "backend: expected one of"),
        ({}, {"align": None}, "align: expected one of"),
        ({}, {"dropout_p": False}, "dropout_p: expected a float"),
        ({}, {"dropout_seed": 3}, "dropout_seed: expected an int64 tensor"),
    ],
    ids=str,
)
def test_arguments_that_equal_others_are_still_checked(first, second, error):
    qkv = inputs()
    for _ in range(2):
        flashtile.attention(*qkv, **first)
        with pytest.raises((TypeError, ValueError), match=error):
            flashtile.attention(*qkv, **second)


def test_autocast_makes_it_another_call():
    wide, narrow = inputs(), inputs(dtype=torch.bfloat16)
    mixed = [wide[0], *narrow[1:]]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert flashtile.attention(*wide).dtype is torch.bfloat16
            assert torch.equal(flashtile.attention(*mixed), flashtile.attention(*narrow))
        assert flashtile.attention(*wide).dtype is torch.float32
        assert flashtile.attention(*narrow).dtype is torch.bfloat16
        with pytest.raises(TypeError, match="k: expected the dtype of q"):
            flashtile.attention(*mixed)


def test_what_observes_a_call_still_does():
    q, k, v = inputs()
    expected = flashtile.attention(q, k, v)
    with torch.profiler.profile() as profile:
        flashtile.attention(q, k, v)
    assert "flashtile::attention_forward" in {event.key for event in profile.key_averages()}
    assert type(flashtile.attention(q.as_subclass(_Subclass), k, v)) is _Subclass
    assert torch.equal(torch.func.vmap(flashtile.attention)(q[None], k[None], v[None])[0], expected)
    out, tangent = torch.func.jvp(
        lambda q: flashtile.attention(q, k.detach(), v.detach()), (q.detach(),), (q.detach(),)
    )
    assert tangent.abs().max() > 0 and out.shape == expected.shape
    hidden = torch._neg_view(q.detach())
    assert torch.equal(flashtile.attention(hidden, k, v), flashtile.attention(-q.detach(), k, v))


def test_backwards_of_one_forward():
    qkv = inputs()
    out = flashtile.attention(*qkv)
    decided = flashtile.attention(*qkv, dropout_p=0)
    for dout in (torch.ones_like(out), torch.ones(1).expand_as(out), torch.ones_like(out).mT.contiguous().mT):
        found = torch.autograd.grad(out, qkv, dout, retain_graph=True)
        assert same([*found], [*torch.autograd.grad(decided, qkv, dout, retain_graph=True)])
    batched = torch.autograd.grad(out, qkv, torch.ones(2, *out.shape), retain_graph=True, is_grads_batched=True)
    assert torch.equal(batched[0][1], torch.autograd.grad(out, qkv, torch.ones_like(out), retain_graph=True)[0])
    first = torch.autograd.grad(out.square().sum(), qkv[0], create_graph=True, retain_graph=True)[0]
    second = torch.autograd.grad(first.sum(), qkv)
    expected = torch.autograd.grad(decided.square().sum(), qkv[0], create_graph=True)[0]
    assert same([*second], [*torch.autograd.grad(expected.sum(), qkv)])


def test_hooks_of_saved_tensors_may_change_the_layout():
    """Each tensor is given back once, and what comes back may lie elsewhere."""
    qkv, unpacked = inputs(), []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    expected = forward_backward(qkv)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        assert same(forward_backward(qkv), expected)
    assert len(unpacked) == 5


def test_calls_of_ever_new_shapes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(repeated_calls, "_MOST_CALLS", 4)
    for seq in range(1, 12):
        flashtile.attention(*inputs(seq=seq))
        assert 0 < len(repeated._CALLS) <= 4


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_a_gpu(dtype, backend, decided):
    """Other addresses are other tensors; those that are no multiples of 16 bytes are decided about each time."""
    options = {"causal": True, "deterministic": True, "backend": backend}
    for seed, offset in enumerate([0, 8, 1, 0, 3, 16]):
        torch.manual_seed(seed)
        storage = torch.randn(3, offset + 2 * 200 * 4 * 64, device="cuda").to(dtype)
        qkv = [row[offset:].view(2, 200, 4, 64).requires_grad_() for row in storage]
        for through_lse in (False, True):
            repeated = forward_backward(qkv, through_lse, **options)
            decisions = len(decided)
            assert same(repeated, forward_backward(qkv, through_lse, **options, dropout_p=0))
            assert len(decided) == decisions + 2
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert same(forward_backward(qkv, True, **options), repeated)
        torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("name", _features())
def test_calls_with_other_tensors_on_a_gpu(name, backend, decided):
    """Also at addresses that are no multiples of 16 bytes, which are decided about each time."""
    options = {key: _on_gpu(value) for key, value in _features()[name].items()} | {"backend": backend}
    options["deterministic"] = True
    for seed, offset in enumerate([0, 8, 1, 0, 3, 16]):
        torch.manual_seed(seed)
        storage = torch.randn(3, offset + 2 * 24 * 4 * 64, device="cuda").to(torch.bfloat16)
        qkv = [row[offset:].view(2, 24, 4, 64).requires_grad_() for row in storage]
        repeated_call = _both_ways(qkv, options, decided_anew=False)
        decisions = len(decided)
        assert same(repeated_call, _both_ways(qkv, options, decided_anew=True))
        assert len(decided) == decisions + 2
    decided.clear()
    _both_ways([t.detach().clone().requires_grad_() for t in qkv], options, decided_anew=False)
    assert not decided, "an equal call came before"


def _on_gpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cuda().requires_grad_(value.requires_grad)
    if isinstance(value, flashtile.BlockMask):
        return value.cuda()
    return _relative(_learning(4, 47).detach().cuda().requires_grad_()) if callable(value) else value


@pytest.mark.gpu
@pytest.mark.unpoisoned
def test_a_graph_of_repeated_calls():
    qkv = [torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward_backward(qkv, deterministic=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_backward(qkv, deterministic=True)
    with torch.no_grad():
        for tensor in qkv:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert same(captured, forward_backward(qkv, deterministic=True))
