"""FlashAttention-3's interface: values by their definition, what is accepted without effect, what raises."""

import pytest
import torch

import flashtile.compat
from flashtile.compat import attend as attend_module
from flashtile.testing import assert_close, assert_same
from support.attention.compat_cases import (
    CALLS,
    PLACES,
    Meaning,
    attention_by_definition,
    check_8_bits,
    check_against,
    cumulative,
    devices,
    normal,
    packed_by_definition,
    places,
    served,
)
from support.running.each_case import each_case

flash_attn_combine = served(3).flash_attn_combine
flash_attn_func = served(3).flash_attn_func
flash_attn_qkvpacked_func = served(3).flash_attn_qkvpacked_func
flash_attn_varlen_func = served(3).flash_attn_varlen_func
flash_attn_with_kvcache = served(3).flash_attn_with_kvcache
get_scheduler_metadata = served(3).get_scheduler_metadata

OPTIONS = {
    "plain": ({}, Meaning()),
    "causal": ({"causal": True, "num_splits": 4, "pack_gqa": True, "sm_margin": 8}, Meaning(causal=True)),
    "window": ({"window_size": (4, 2), "softcap": 2.0, "deterministic": True}, Meaning(window=(4, 2), softcap=2.0)),
    "chunk": ({"attention_chunk": 4, "causal": True}, Meaning(chunk=4, causal=True)),
    "chunk and all": ({"attention_chunk": 5}, Meaning(chunk=5)),
    "chunk and window": (
        {"attention_chunk": 6, "window_size": (2, 1), "softmax_scale": 0.3},
        Meaning(chunk=6, window=(2, 1), scale=0.3),
    ),
}
options_and_meaning = pytest.mark.parametrize(("options", "meaning"), OPTIONS.values(), ids=OPTIONS.keys())


@places
@options_and_meaning
def test_dense(options, meaning, device, dtype):
    q, k, v = normal(2, 9, 4, 16), normal(2, 14, 2, 16, seed=1), normal(2, 14, 2, 24, seed=2)
    check_against(
        lambda q, k, v: flash_attn_func(q, k, v, **options, return_attn_probs=True),
        lambda q, k, v: attention_by_definition(q, k, v, meaning), [q, k, v], device, dtype,
    )  # fmt: skip


def test_packed_heads():
    qkv = normal(2, 9, 8, 16).float()
    expected = flash_attn_func(*qkv.split((4, 2, 2), 2), causal=True, return_attn_probs=True)
    for one, other in zip(flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4, return_attn_probs=True), expected):
        assert torch.equal(one, other)


@places
@options_and_meaning
@each_case("used", ["", "qk"])
def test_packed(used, options, meaning, device, dtype):
    lengths_q, lengths_k = [5, 0, 9, 3], [7, 4, 9, 11]
    lengths = cumulative(lengths_q, device), cumulative(lengths_k, device), 9, 11
    used_q = [3, 0, 9, 0] if "q" in used else lengths_q
    used_k = [7, 2, 4, 10] if "k" in used else lengths_k
    given = {
        f"seqused_{name}": torch.tensor(counts, dtype=torch.int32, device=device)
        for name, counts in (("q", used_q), ("k", used_k)) if name in used
    }  # fmt: skip

    def definition(q, k, v):
        rows_q, rows_k = (
            [row for start, count in zip(ends.tolist(), counts) for row in range(start, start + count)]
            for ends, counts in ((lengths[0], used_q), (lengths[1], used_k))
        )
        out = packed_by_definition(q[rows_q], k[rows_k], v[rows_k], used_q, used_k, meaning)[0]
        return torch.zeros(17, 4, 24).to(out).index_copy(0, torch.tensor(rows_q, device=device), out)

    check_against(
        lambda q, k, v: flash_attn_varlen_func(q, k, v, *lengths, **given, **options), definition,
        [normal(17, 4, 16), normal(31, 2, 16, seed=1), normal(31, 2, 24, seed=2)], device, dtype,
    )  # fmt: skip


@each_case("shape", [(2, 5), (9,)])
def test_combine(shape):
    outs, lses = normal(3, *shape, 4, 8).float(), normal(3, *shape, 4, seed=1).float()
    out, lse = flash_attn_combine(outs, lses)
    assert_same(lse, lses.logsumexp(0))
    assert_same(out, ((lses - lse).exp()[..., None] * outs).sum(0))
    assert flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype is torch.bfloat16
    buffer = torch.empty_like(out, dtype=torch.float16)
    assert flash_attn_combine(outs, lses, buffer)[0] is buffer
    with pytest.raises(ValueError, match="out: expected"):
        flash_attn_combine(outs, lses, buffer[:1])


#: Queries and keys, and positions of a chunk, which end within a chunk, at one, before the first, or not at all.
EDGES = {
    "one position": (5, 9, 1), "a multiple": (8, 12, 4), "all in one": (5, 9, 9), "wider than all": (5, 9, 50),
    "more queries": (14, 5, 4), "more queries, wide": (14, 5, 50), "no keys": (5, 0, 4), "no queries": (0, 5, 4),
}  # fmt: skip


@devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("edge", EDGES)
def test_chunks_at_the_edges(edge, causal, device):
    """Rows before the first key see nothing, and are 0 with an lse of -inf, as without chunks."""
    seq_q, seq_k, chunk = EDGES[edge]
    meaning = Meaning(chunk=chunk, causal=causal)
    inputs = [normal(2, seq_q, 4, 16), normal(2, seq_k, 2, 16, seed=1), normal(2, seq_k, 2, 16, seed=2)]
    q, k, v = (x.half().double() for x in inputs)
    expected, expected_lse = attention_by_definition(q, k, v, meaning)
    eager, eager_lse = attention_by_definition(*(x.half() for x in inputs), meaning)
    leaves = [x.half().to(device).requires_grad_() for x in inputs]
    out, lse = flash_attn_func(*leaves, causal=causal, attention_chunk=chunk, return_attn_probs=True)
    assert_close("out", out.detach().cpu(), expected, eager)
    assert_close("lse", lse.detach().cpu(), expected_lse, eager_lse)
    out.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    lengths_q, lengths_k = [seq_q, 3, seq_q], [seq_k, 0, seq_k]
    packed = [
        torch.cat((x[0], normal(rows, *x.shape[2:], seed=5), x[1])).half().to(device)
        for x, rows in zip(inputs, (3, 0, 0))
    ]
    ends = cumulative(lengths_q, device), cumulative(lengths_k, device)
    out, lse = flash_attn_varlen_func(
        *packed, *ends, max(lengths_q), max(lengths_k), causal=causal, attention_chunk=chunk, return_attn_probs=True
    )
    parts, parts_lse = out.split(lengths_q), lse.split(lengths_q, 1)
    assert_close("packed out", torch.stack(parts[::2]).cpu(), expected, eager)
    assert_close("packed lse", torch.stack(parts_lse[::2]).cpu(), expected_lse, eager_lse)
    assert not parts[1].any() and parts_lse[1].isneginf().all()


def test_chunks_are_short_sequences(monkeypatch):
    """What is not visible is not computed: no sequence is longer than a chunk, and no pair is there twice."""
    seen = []

    def counting(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
        seen.append((cu_seqlens_q.diff() * cu_seqlens_k.diff(), options["max_seqlen_q"], options["max_seqlen_k"]))
        return run(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)

    run = flashtile.attention_varlen
    monkeypatch.setattr(flashtile, "attention_varlen", counting)
    x = torch.randn(2, 100, 1, 8)
    flash_attn_func(x, x, x, attention_chunk=16)
    flash_attn_varlen_func(x[0], x[0], x[0], cumulative([60, 40]), cumulative([60, 40]), 60, 60, attention_chunk=16)
    pairs = [int(pairs.sum()) for pairs, *_ in seen]
    assert pairs == [2 * (6 * 16**2 + 4**2), (3 * 16**2 + 12**2) + (2 * 16**2 + 8**2)]
    assert all(longest == [16, 16] for _, *longest in seen)
    assert all(int(pairs.max()) <= 16**2 for pairs, *_ in seen)
    flash_attn_func(x, x, x, attention_chunk=100)
    assert len(seen) == 2, "one chunk is a plain call"


def with_second_product(definition):
    """A definition whose scores are those of `q kᵀ + qv vᵀ`."""

    def with_qv(q, k, v, qv, *rest):
        heads = v.shape[-2]
        assert q.shape[-2] % heads == 0
        return definition(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, *rest)

    return with_qv


@pytest.mark.parametrize(("device", "dtype"), [PLACES[0], *CALLS])
@each_case(
    "columns, name",
    [((16, 24), "chunk and window"), ((40, 480), "causal"), ((40, 480), "window"), ((40, 480), "chunk and window")],
)
def test_second_product(columns, name, device, dtype):
    options, meaning = OPTIONS[name]
    narrow, wide = columns
    q, k, v, qv = (
        normal(2, 9, 4, narrow) / 2, normal(2, 14, 2, narrow, seed=1), normal(2, 14, 2, wide, seed=2),
        normal(2, 9, 4, wide, seed=3) / 4,
    )  # fmt: skip
    check_against(
        lambda q, k, v, qv: flash_attn_func(q, k, v, qv=qv, **options, return_attn_probs=True),
        with_second_product(lambda *given: attention_by_definition(*given, meaning)), [q, k, v, qv], device, dtype,
    )  # fmt: skip
    lengths_q, lengths_k = [5, 0, 9, 3], [7, 4, 9, 11]
    ends = cumulative(lengths_q, device), cumulative(lengths_k, device), 9, 11
    packed = [
        normal(17, 4, narrow) / 2, normal(31, 2, narrow, seed=1), normal(31, 2, wide, seed=2),
        normal(17, 4, wide, seed=3) / 4,
    ]  # fmt: skip
    check_against(
        lambda q, k, v, qv: flash_attn_varlen_func(q, k, v, *ends, qv=qv, **options, return_attn_probs=True),
        with_second_product(lambda *given: packed_by_definition(*given, lengths_q, lengths_k, meaning)), packed,
        device, dtype,
    )  # fmt: skip


def test_second_product_a_few_rows_at_a_time(monkeypatch):
    q, k, v, qv = (normal(2, *shape).float() for shape in ((9, 4, 40), (14, 2, 40), (14, 2, 480), (9, 4, 480)))
    expected = flash_attn_func(q, k, v, qv=qv, causal=True)
    monkeypatch.setattr(attend_module, "_SCORES", 2 * 4 * 14 * 2)
    assert_same(flash_attn_func(q, k, v, qv=qv, causal=True), expected)
    used = torch.tensor([2, 7], dtype=torch.int32)
    ends, ends_k = cumulative([9, 9]), cumulative([14, 14])
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(
        *rows, ends, ends_k, 9, 14, seqused_q=used, qv=qv.flatten(0, 1), return_attn_probs=True
    )
    whole, whole_lse = flash_attn_func(q, k, v, qv=qv, return_attn_probs=True)
    assert_same(out[9:16], whole[1, :7])
    assert_same(lse[:, :2], whole_lse[0, :, :2])
    assert not out[2:9].any() and lse[:, 16:].isneginf().all()


def eight_bit_inputs(device="cpu"):
    """q, k and v in 8 bits, and their factors as FlashAttention-3 and as flashtile name them."""
    tensors, factors = zip(
        *(flashtile.quantize_fp8(normal(2, 9, heads, 16, seed=heads).float().to(device), 2) for heads in (4, 2, 2))
    )
    theirs = dict(zip(("q_descale", "k_descale", "v_descale"), factors))
    return tensors, theirs, {f"descale_{name[0]}": factor for name, factor in theirs.items()}


@devices
def test_8_bit_inputs(device):
    (q, k, v), factors, ours = eight_bit_inputs(device)
    expected, expected_lse = flashtile.attention(q, k, v, causal=True, **ours, return_lse=True)
    out, lse = flash_attn_func(q, k, v, causal=True, **factors, return_attn_probs=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    ends = cumulative([9, 9], device)
    out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, 9, 9, causal=True, **factors)
    check_8_bits(out.view(expected.shape), q, k, v, list(factors.values()), Meaning(causal=True))
    qkv = torch.cat([x.view(torch.uint8) for x in (q, k, v)], 2).view(torch.float8_e4m3fn)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4, **factors), expected)
    chunked = flash_attn_func(q, k, v, causal=True, attention_chunk=5, **factors)
    for part in (slice(0, 5), slice(5, 9)):
        rows = q[:, part], k[:, part], v[:, part]
        check_8_bits(chunked[:, part], *rows, list(factors.values()), Meaning(causal=True))
    with pytest.raises(ValueError, match="qv: expected None beside float8_e4m3fn"):
        flash_attn_func(q, k, v, qv=q)


@devices
def test_8_bit_inputs_that_require_grad_run_forward(device):
    tensors, factors, _ = eight_bit_inputs(device)
    expected = flash_attn_func(*tensors, causal=True, **factors)
    assert not expected.requires_grad
    q, k, v = (x.requires_grad_() for x in tensors)
    ends = cumulative([9, 9], device)
    dense = flash_attn_func(q, k, v, causal=True, **factors)
    assert torch.equal(dense.detach(), expected)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    used = torch.tensor([7, 4], dtype=torch.int32, device=device)
    packed = [
        flash_attn_varlen_func(*rows, ends, ends, 9, 9, seqused_q=used_q, seqused_k=used_k, causal=True, **factors)
        for used_q in (None, used) for used_k in (None, used)
    ]  # fmt: skip
    for out in (dense, *packed):
        assert out.requires_grad and out.shape[-2:] == expected.shape[-2:]
        with pytest.raises(NotImplementedError, match="has a forward only"):
            out.float().sum().backward()
    with torch.no_grad():
        assert not flash_attn_func(q, k, v, causal=True, **factors).requires_grad


X = torch.randn(1, 5, 2, 8)


@each_case("arguments, message", [
        ({"qv": X[..., :4]}, "qv: expected"), ({"q_descale": X}, "q_descale: expected None"),
        ({"k_descale": X}, "k_descale: expected None"), ({"v_descale": X}, "v_descale: expected None"),
        ({"attention_chunk": -4}, "attention_chunk: expected at least 0"),
    ])  # fmt: skip
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        flash_attn_func(X, X, X, **arguments)
    packed = {name: value[0] if name == "qv" else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(X[0], X[0], X[0], cumulative([5]), cumulative([5]), 5, 5, **packed)
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(X, X, X, **arguments)
    with pytest.raises(ValueError, match="qkv: expected shape"):
        flash_attn_qkvpacked_func(X)
