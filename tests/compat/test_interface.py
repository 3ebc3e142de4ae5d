"""flash_attn 2.8.3's attention functions: values and gradients by their definition, in all layouts and options."""

import math

import pytest
import torch

from flashtile.testing import assert_same
from support.attention.compat_cases import (
    Meaning,
    attention_by_definition,
    check_against,
    cumulative,
    devices,
    every_dtype,
    group_head_dropout,
    normal,
    packed_by_definition,
    places,
    scores_by_definition,
    served,
    visible_keys,
)
from support.running.each_case import each_case

flash_attn_func = served(2).flash_attn_func
flash_attn_kvpacked_func = served(2).flash_attn_kvpacked_func
flash_attn_qkvpacked_func = served(2).flash_attn_qkvpacked_func
flash_attn_varlen_func = served(2).flash_attn_varlen_func
flash_attn_varlen_kvpacked_func = served(2).flash_attn_varlen_kvpacked_func
flash_attn_varlen_qkvpacked_func = served(2).flash_attn_varlen_qkvpacked_func
interface = served(2, "flash_attn_interface")
v1, triton, v3 = served(1, "flash_attn_interface"), served(1, "flash_attn_triton"), served(3)

SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
#: Arguments of a call, and what they mean.
OPTIONS = {
    "plain": ({}, Meaning()),
    "causal": ({"causal": True}, Meaning(causal=True)),
    "scale": ({"softmax_scale": 0.3, "deterministic": True}, Meaning(scale=0.3)),
    "window": ({"window_size": (3, 2)}, Meaning(window=(3, 2))),
    "tensor": ({"window_size": torch.tensor([3, -1])}, Meaning(window=(3, -1))),
    "left": ({"window_size": (2, -1), "causal": True}, Meaning(causal=True, window=(2, -1))),
    "softcap": ({"softcap": 1.5, "window_size": (-1, 4)}, Meaning(softcap=1.5, window=(-1, 4))),
    "alibi": ({"alibi_slopes": SLOPES, "causal": True}, Meaning(alibi_slopes=SLOPES, causal=True)),
}
options_and_meaning = pytest.mark.parametrize(("options", "meaning"), OPTIONS.values(), ids=OPTIONS.keys())


def on(device: str, options: dict) -> dict:
    return {name: value.to(device) if name == "alibi_slopes" else value for name, value in options.items()}


@places
@options_and_meaning
@each_case("packed", [False, True])
def test_functions(packed, options, meaning, device, dtype):
    options, lengths_q, lengths_k = on(device, options), [5, 0, 9, 3], [7, 4, 9, 11]
    if packed:
        function, shapes = flash_attn_varlen_func, [(17, 4, 12), (31, 2, 12), (31, 2, 12)]
        lengths = cumulative(lengths_q, device), cumulative(lengths_k, device), 9, 11
    else:
        function, shapes, lengths = flash_attn_func, [(2, 9, 4, 12), (2, 14, 2, 12), (2, 14, 2, 12)], ()

    def definition(*qkv):
        if packed:
            return packed_by_definition(*qkv, lengths_q, lengths_k, meaning)[0]
        return attention_by_definition(*qkv, meaning)[0]

    inputs = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    check_against(lambda *qkv: function(*qkv, *lengths, **options), definition, inputs, device, dtype)


ENDS = cumulative([5, 0, 9, 3])
BIAS = normal(1, 4, 1, 9).float()
#: A function of q, k and v, one of q and kv, one of qkv, and the arguments behind the tensors: of the last, and before
#: these of the others.
APART = {
    "version 1": (
        v1.flash_attn_unpadded_func, v1.flash_attn_unpadded_kvpacked_func, v1.flash_attn_unpadded_qkvpacked_func,
        (ENDS, 9, 0.0, 0.3, True), (ENDS, ENDS, 9, 9, 0.0, 0.3, True),
    ),
    "version 1, earlier": (
        v1.flash_attn_unpadded_func, None, v1.flash_attn_func, (ENDS, 0.0, 9, 0.3, True),
        (ENDS, ENDS, 9, 9, 0.0, 0.3, True),
    ),
    "version 1, bias": (
        triton.flash_attn_func, triton.flash_attn_kvpacked_func, triton.flash_attn_qkvpacked_func, (BIAS, True),
        (BIAS, True),
    ),
    "version 2": (
        flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, (0.0, 0.3, True), (0.0, 0.3, True),
    ),
    "version 2, packed": (
        flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func,
        (ENDS, 9, 0.0, 0.3, True), (ENDS, ENDS, 9, 9, 0.0, 0.3, True),
    ),
    "version 3": (v3.flash_attn_func, None, v3.flash_attn_qkvpacked_func, (0.3, True), (0.3, True)),
}  # fmt: skip


@each_case("name", APART)
def test_tensors_that_are_packed_are_those_apart(name):
    of_three, of_two, of_one, arguments_of_one, arguments = APART[name]
    qkv = normal(*((17, 3, 4, 12) if arguments[0] is ENDS else (2, 9, 3, 4, 12))).float().requires_grad_()
    q, k, v = qkv.unbind(-3)
    calls = [(of_three, (q, k, v, *arguments)), (of_one, (qkv, *arguments_of_one))]
    calls += [] if of_two is None else [(of_two, (q, torch.stack((k, v), -3), *arguments))]
    results = [[out, *torch.autograd.grad(out.square().sum(), qkv)] for out in (call(*given) for call, given in calls)]
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0]))


#: Autograd class, its function, shapes of the inputs, and what stands between them and the options.
CLASSES = {
    "dense": (interface.FlashAttnFunc, flash_attn_func, [(2, 9, 4, 12), (2, 14, 2, 12), (2, 14, 2, 12)], ()),
    "kv": (interface.FlashAttnKVPackedFunc, flash_attn_kvpacked_func, [(2, 9, 4, 12), (2, 14, 2, 2, 12)], ()),
    "qkv": (interface.FlashAttnQKVPackedFunc, flash_attn_qkvpacked_func, [(2, 9, 3, 4, 12)], ()),
    "varlen": (
        interface.FlashAttnVarlenFunc, flash_attn_varlen_func, [(17, 4, 12), (31, 2, 12), (31, 2, 12)], (5, 7, 9, 11),
    ),
    "varlen-kv": (
        interface.FlashAttnVarlenKVPackedFunc, flash_attn_varlen_kvpacked_func, [(17, 4, 12), (31, 2, 2, 12)],
        (5, 7, 9, 11),
    ),
    "varlen-qkv": (
        interface.FlashAttnVarlenQKVPackedFunc, flash_attn_varlen_qkvpacked_func, [(17, 3, 4, 12)], (5, 9),
    ),
}  # fmt: skip
SEQUENCES = {5: [5, 0, 9, 3], 7: [7, 4, 9, 11]}


@devices
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("name", CLASSES)
def test_autograd_classes_are_the_functions(name, dropout_p, device):
    recorded, function, shapes, lengths = CLASSES[name]
    lengths = [cumulative(SEQUENCES[n], device) if n in SEQUENCES else n for n in lengths]
    options = (dropout_p, 0.3, True, (4, -1), 2.0, SLOPES.to(device), True)
    block_table = (None,) if name == "varlen" else ()
    results = []
    for run, last in ((recorded.apply, (True, *block_table, True)), (function, (True,))):
        torch.manual_seed(0)
        leaves = [normal(*shape, seed=seed).half().to(device).requires_grad_() for seed, shape in enumerate(shapes)]
        out, lse, weights = run(*leaves, *lengths, *options, *last)
        assert not weights.requires_grad and bool(weights.numel()) is (dropout_p > 0)
        loss = (out * normal(*out.shape, seed=8).to(out)).sum() + lse.clamp(min=-30).sum()
        results.append([out, lse, weights, *torch.autograd.grad(loss, leaves)])
    assert_same(*results)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = recorded.apply(*leaves, *lengths, 0.0, *options[1:], False, *block_table, True)
    assert torch.equal(out, function(*leaves, *lengths, 0.0, *options[1:]))
    with torch.no_grad():
        assert not recorded.apply(*leaves, *lengths, *options, False, *block_table, False).requires_grad


#: What comes behind the lengths: dropout, scale, causal, left, right, soft cap, slopes.
HALVES = {
    "plain": (0.0, 0.3, False, -1, -1, 0.0, None),
    "scores": (0.0, 0.3, False, 4, 3, 2.0, SLOPES),
    "dropout": (0.25, 0.3, True, -1, -1, 0.0, None),
}


@places
@each_case("packed", [False, True])
@each_case("name", HALVES)
def test_halves_of_functions(name, packed, device, dtype):
    """Gradients from results, into buffers, and the sums over columns of dout · out."""
    call = [part.to(device) if isinstance(part, torch.Tensor) else part for part in HALVES[name]]
    shapes = [(17, 4, 16), *[(31, 2, 16)] * 2] if packed else [(2, 9, 4, 16), *[(2, 14, 2, 16)] * 2]
    lengths = (*(cumulative(SEQUENCES[n], device) for n in (5, 7)), 9, 11) if packed else ()
    leaves = [normal(*shape, seed=seed).to(device, dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    function = flash_attn_varlen_func if packed else flash_attn_func
    dropout_p, scale, causal, left, right, softcap, slopes = call
    torch.manual_seed(4)
    expected = function(*leaves, *lengths, dropout_p, scale, causal, (left, right), softcap, slopes, True)
    dout = normal(*expected.shape, seed=3).to(expected)
    given, grads = [leaf.detach() for leaf in leaves], [torch.full_like(leaf, math.nan) for leaf in leaves]
    forward = interface._flash_attn_varlen_forward if packed else interface._flash_attn_forward
    backward = interface._flash_attn_varlen_backward if packed else interface._flash_attn_backward
    torch.manual_seed(4)
    out, lse, _, rng_state = forward(*given, *lengths, *call, return_softmax=False)
    sums = backward(dout, *given, out, lse, *grads, *lengths, *call, True, rng_state)
    assert_same([out, *grads], [expected.detach(), *torch.autograd.grad(expected, leaves, dout)])
    products = (dout.double() * out.double()).sum(-1).transpose(-1, -2).to(sums)
    if packed:
        assert sums.shape == (4, 17 + 128 * 4)
        assert_same(sums[:, 128 * 2 + 5 : 128 * 2 + 14], products[:, 5:14])
    else:
        assert sums.shape == (2, 4, 128) and (sums[..., 9:] == 0).all()
        assert_same(sums[..., :9], products)
    if dropout_p:
        with pytest.raises(ValueError, match="rng_state"):
            backward(dout, *given, out, lse, *grads, *lengths, *call, True)


def test_buffers():
    q = normal(1, 5, 2, 8).float()
    call = (0.3, False, -1, -1, 0.0, None)
    out, lse, _, _ = interface._flash_attn_forward(q, q, q, 0.0, *call, False)
    dk = torch.empty_like(q)
    interface._flash_attn_backward(out, q, q, q, out, lse, None, dk, None, 0.0, *call, False)
    assert dk.isfinite().all()
    with pytest.raises(ValueError, match="dq: expected"):
        interface._flash_attn_backward(out, q, q, q, out, lse, q.double(), None, None, 0.0, *call, False)


@devices
def test_longest_sequences_may_be_tensors(device):
    q, cu = normal(17, 4, 16).half().to(device), cumulative([5, 0, 9, 3], device)
    longest = cu.diff().max()
    expected = flash_attn_varlen_func(q, q, q, cu, cu, 9, 9, causal=True)
    assert_same(flash_attn_varlen_func(q, q, q, cu, cu, longest, longest, causal=True), expected)
    pages, table = paged(q.cpu(), [5, 0, 9, 3], 16, 1, device)
    out = flash_attn_varlen_func(q, pages, pages, cu, cu, longest, longest, causal=True, block_table=table)
    assert_same(out, expected)
    if device == "cuda":
        with pytest.raises(TypeError, match="max_seqlen"):
            flash_attn_varlen_func(q, q, q, cu, cu, longest, longest, 0.1, return_attn_probs=True)


DROPOUT_P = 0.25
DROPOUT_OPTIONS = {
    name: (options, meaning) for name, (options, meaning) in OPTIONS.items() if name in ("plain", "causal", "window")
} | {"all": (
    {"softcap": 1.5, "alibi_slopes": SLOPES, "window_size": (4, 1)},
    Meaning(softcap=1.5, alibi_slopes=SLOPES, window=(4, 1)),
)}  # fmt: skip


def softmax_from(S_dmask, scores):
    """Weights and dropout as a test gets them from S_dmask: it normalises by blocks of keys, of which it sees one."""
    seq_q, seq_k = scores.shape[-2:]
    block = interface._get_block_size_n(scores.device, 16, True, False)
    assert len(scores.split(block, dim=-1)) == 1
    S_dmask = S_dmask[:, :, :seq_q, :seq_k].to(scores.dtype)
    lse = scores.logsumexp(-1)
    factor = (scores.amax(-1) - lse.masked_fill(lse.isneginf(), math.inf)).exp()
    return S_dmask.abs() * factor.nan_to_num(0)[..., None], S_dmask >= 0


@every_dtype
@each_case("options, meaning", DROPOUT_OPTIONS.values())
def test_weights_with_dropout(options, meaning, device, dtype):
    options, seq_q, seq_k = on(device, options), 37, 30
    q, k, v = (normal(2, *shape, seed=n).to(device, dtype) for n, shape in enumerate(
        [(seq_q, 4, 16), (seq_k, 2, 16), (seq_k, 2, 16)]))  # fmt: skip
    kept = group_head_dropout(4, device, DROPOUT_P, 2, 4, seq_q, seq_k)
    torch.manual_seed(4)
    out, _, S_dmask = flash_attn_func(q, k, v, DROPOUT_P, **options, return_attn_probs=True)
    assert S_dmask.shape == (2, 4, 128, 128) and S_dmask.dtype is dtype
    assert (S_dmask[:, :, seq_q:] == 0).all() and (S_dmask[..., seq_k:] == 0).all()
    scores = scores_by_definition(q.double(), k.double(), meaning)
    weights, dropout = softmax_from(S_dmask, scores)
    expected = scores.softmax(-1).nan_to_num(0)
    assert (weights - expected).abs().max() <= 4 * torch.finfo(dtype).eps
    seen = visible_keys(seq_q, seq_k, meaning).to(device)
    assert (dropout == kept)[seen.expand_as(kept)].all()
    assert (weights[~seen.expand_as(kept)] == 0).all()
    assert (out == 0).all(-1).any() == (seen.any(-1).logical_not().any().item())
    torch.manual_seed(4)
    assert torch.equal(out, flash_attn_func(q, k, v, DROPOUT_P, **options)), "asking for them changes nothing"
    again, _, _ = flash_attn_func(q, k, v, DROPOUT_P, **options, return_attn_probs=True)
    assert not torch.equal(out, again), "the next call draws other numbers"


def paged(k, lengths, page_size, pages_each, device):
    """Keys in pages in random order: pages, and the table, whose unused entries point nowhere."""
    pages = torch.full((len(lengths) * pages_each + 3, page_size, *k.shape[1:]), math.nan, dtype=k.dtype)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(0))
    table = torch.full((len(lengths), pages_each), -1, dtype=torch.int32)
    start = used = 0
    for sequence, length in enumerate(lengths):
        for page in range(-(-length // page_size)):
            table[sequence, page] = order[used]
            rows = k[start + page * page_size : start + min(length, (page + 1) * page_size)]
            pages[order[used], : len(rows)] = rows
            used += 1
        start += length
    return pages.to(device), table.to(device)


def test_pages_have_gradients():
    cu_q, cu_k = cumulative([3, 2]), cumulative([5, 20])
    k, q = normal(25, 1, 4).float(), normal(5, 1, 4).float()
    pages, table = paged(k, [5, 20], 16, 2, "cpu")
    pages = pages.nan_to_num(0).requires_grad_()
    flash_attn_varlen_func(q, pages, pages, cu_q, cu_k, 3, 20, block_table=table).sum().backward()
    k = k.requires_grad_()
    flash_attn_varlen_func(q, k, k, cu_q, cu_k, 3, 20).sum().backward()
    expected, _ = paged(k.grad, [5, 20], 16, 2, "cpu")
    assert_same(pages.grad, expected.nan_to_num(0))


def test_keys_left_out_at_both_ends():
    q, k, v = normal(8, 2, 8).float(), normal(20, 2, 8, seed=1).float(), normal(20, 2, 8, seed=2).float()
    cu_q, cu_k = cumulative([5, 3]), cumulative([12, 8])
    out, _, _, _ = interface._flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, 5, 12, 0.0, 0.3, True, leftpad_k=torch.tensor([2, 1]), seqused_k=torch.tensor([9, 8])
    )
    rows = [*range(2, 9), *range(13, 20)]
    expected = flash_attn_varlen_func(q, k[rows], v[rows], cu_q, cumulative([7, 7]), 5, 7, 0.0, 0.3, True)
    assert_same(out, expected)


@each_case(
    "call, error, names",
    [
        (lambda q: flash_attn_qkvpacked_func(q), ValueError, "qkv: expected shape"),
        (lambda q: flash_attn_kvpacked_func(q, q), ValueError, "kv: expected shape"),
        (lambda q: flash_attn_func(q, q, q, window_size=3), TypeError, "window_size"),
        (lambda q: flash_attn_func(q, q, q, window_size=(1.5, 0)), TypeError, "window"),
        (lambda q: flash_attn_func(q, q, q, dropout_p=1.0), ValueError, "dropout_p"),
        (lambda q: flash_attn_func(q, q, q, alibi_slopes=SLOPES[:1]), ValueError, "alibi_slopes"),
        (lambda q: flash_attn_func(q, q[:, :, :1], q), ValueError, "v: expected"),
    ],
)
def test_errors(call, error, names):
    with pytest.raises(error, match=names):
        call(torch.randn(1, 5, 2, 8))


@each_case(
    "table, names",
    [
        (torch.tensor([[0]], dtype=torch.int32), "block_table: expected pages for the 20 keys"),
        (torch.tensor([[0, 7]], dtype=torch.int32), "block_table: expected numbers from 0 to 2"),
        (torch.tensor([[0, -1]], dtype=torch.int32), "block_table: expected numbers from 0 to 2"),
        (torch.tensor([[0.0, 1.0]]), "block_table: expected int32"),
        (torch.zeros(2, 2, dtype=torch.int32), "block_table: expected int32"),
    ],
)
def test_wrong_pages(table, names):
    q, pages = torch.randn(2, 1, 4), torch.randn(3, 16, 1, 4)
    with pytest.raises(ValueError, match=names):
        flash_attn_varlen_func(q, pages, pages, cumulative([2]), cumulative([20]), 2, 20, block_table=table)
