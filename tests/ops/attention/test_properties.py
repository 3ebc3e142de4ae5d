"""Properties over random calls: agreement with the fp64 oracle, and what must not change the result."""

from dataclasses import replace
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor

import flashtile
from flashtile.testing import AttentionCase, Inputs, assert_same, check, make_inputs, run, with_arguments

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

sides = st.none() | st.integers(0, 40)
# Sizes around the edges of tiles, and anything between.
sizes = st.integers(0, 70) | st.sampled_from([1, 63, 64, 65, 127, 128, 129])
seeds = st.integers(0, 2**20)


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a call that are not tensors."""
    given: dict[str, Any] = {}
    if draw(st.booleans()):
        given["causal"] = True
    if draw(st.booleans()):
        given["window"] = (draw(sides), draw(sides))
    if draw(st.booleans()):
        given["align"] = draw(st.sampled_from(["bottom_right", "top_left"]))
    if draw(st.integers(0, 3)) == 0:
        given["scale"] = draw(st.sampled_from([0.0, 0.3, -0.2, 1]))
    if draw(st.integers(0, 2)) == 0:
        given["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 0.9]))
    return given


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    """Any call: dense or packed, every option, odd sizes."""
    heads_kv = draw(st.integers(1, 3))
    case = AttentionCase(
        seq_q=draw(sizes),
        seq_k=draw(sizes),
        batch=draw(st.integers(0, 3)),
        heads=heads_kv * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        head_dim=draw(st.integers(1, 40)),
        head_dim_v=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(DTYPES)),
        arguments=draw(arguments()),
    )
    if draw(st.booleans()):
        lengths = st.tuples(sizes, sizes)
        pairs = draw(st.lists(lengths, max_size=4))
        case = replace(
            case,
            batch=len(pairs),
            lengths_q=tuple(pair[0] for pair in pairs),
            lengths_k=tuple(pair[1] for pair in pairs),
        )
    if draw(st.booleans()):
        lengths = st.lists(st.integers(0, 90), min_size=case.batch, max_size=case.batch)
        case = replace(case, key_lengths=tuple(draw(lengths)))
    return case


@st.composite
def score_cases(draw: st.DrawFn) -> AttentionCase:
    """Any call with soft cap, bias, mask, ALiBi and sinks, each or none."""
    case = draw(cases())
    tables = st.tuples(*(st.sampled_from(("1", name)) for name in ("1" if case.packed else "b", "h", "q", "k")))
    if draw(st.booleans()):
        case = with_arguments(case, softcap=draw(st.sampled_from([0.5, 2.0, 30])))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([None, torch.float32])) if case.dtype is not torch.float64 else None
        case = replace(case, bias="".join(draw(tables)), bias_dtype=dtype)
    if draw(st.booleans()):
        case = replace(case, mask="".join(draw(tables)))
    return replace(case, alibi_slopes=draw(st.sampled_from([None, "h", "bh"])), sinks=draw(st.booleans()))


#: Each of them has many sizes and options: half of the usual number is enough.
fewer = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)


@fewer
@hypothesis.given(cases(), seeds)
def test_cpu_agrees_with_the_oracle(case, seed):
    check(case, "cpu", seed=seed)


@fewer
@hypothesis.given(score_cases(), seeds)
def test_changed_scores_on_the_cpu_agree_with_the_oracle(case, seed):
    check(case, "cpu", seed=seed)


# --- what must not change the result --------------------------------------------------------------------------------


def plain_cases(**changes: Any) -> st.SearchStrategy[AttentionCase]:
    """Dense float64 calls without masks and dropout, in which every key counts the same."""
    return st.builds(
        AttentionCase,
        seq_q=st.integers(1, 70),
        seq_k=st.integers(2, 70),
        batch=st.integers(1, 2),
        heads=st.just(2),
        heads_kv=st.sampled_from([1, 2]),
        head_dim=st.integers(1, 20),
        head_dim_v=st.integers(1, 20),
        dtype=st.just(torch.float64),
        **changes,
    )


def forward(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    return flashtile.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **options)


@fewer
@hypothesis.given(plain_cases(), seeds)
def test_order_of_keys_does_not_matter(case, seed):
    inputs = make_inputs(case)
    order = torch.randperm(case.seq_k, generator=torch.Generator().manual_seed(seed))
    shuffled = replace(inputs, k=inputs.k[:, order], v=inputs.v[:, order])
    plain, moved = run(case, inputs, "cpu"), run(case, shuffled, "cpu")
    for name in ("out", "lse", "dq"):
        assert_same(moved[name], plain[name])
    for name in ("dk", "dv"):
        assert_same(moved[name], plain[name][:, order])


@fewer
@hypothesis.given(plain_cases(), st.data())
def test_two_halves_of_the_keys_merge_by_their_lse(case, data):
    inputs = make_inputs(case)
    cut = data.draw(st.integers(0, case.seq_k), label="cut")
    halves = [
        forward(replace(inputs, k=inputs.k[:, part], v=inputs.v[:, part])) for part in (slice(0, cut), slice(cut, None))
    ]
    out, lse = forward(inputs)
    assert_same(torch.logaddexp(halves[0][1], halves[1][1]), lse)
    merged = sum(part * (part_lse - lse).exp().transpose(1, 2)[..., None] for part, part_lse in halves)
    assert_same(merged, out)


@fewer
@hypothesis.given(plain_cases(), arguments())
def test_batch_equals_packed(case, options):
    inputs = make_inputs(replace(case, arguments=options))
    packed_case = replace(case, lengths_q=(case.seq_q,) * case.batch, lengths_k=(case.seq_k,) * case.batch)
    lengths = make_inputs(packed_case).tensors
    flat = Inputs(
        *(t.flatten(0, 1) for t in (inputs.q, inputs.k, inputs.v, inputs.dout)),
        dlse=inputs.dlse.transpose(0, 1).flatten(1, 2),
        tensors={**lengths, **inputs.tensors},
    )
    dense = run(replace(case, arguments=options), inputs, "cpu")
    packed = run(replace(packed_case, arguments=options), flat, "cpu")
    assert_same(packed.pop("lse"), dense.pop("lse").transpose(0, 1).flatten(1, 2))
    for name, value in packed.items():
        assert_same(value, dense[name].flatten(0, 1))


@fewer
@hypothesis.given(plain_cases(), st.floats(-50, 50))
def test_shift_of_all_scores_moves_lse_only(case, shift):
    # One more dimension adds `shift` to every score of every row.
    inputs = make_inputs(case)
    q = torch.cat((inputs.q, torch.full_like(inputs.q[..., :1], shift)), dim=-1)
    k = torch.cat((inputs.k, torch.ones_like(inputs.k[..., :1])), dim=-1)
    out, lse = forward(inputs, scale=1.0)
    moved, moved_lse = forward(replace(inputs, q=q, k=k), scale=1.0)
    assert_same(moved, out)
    assert_same(moved_lse, lse + shift)


@fewer
@hypothesis.given(plain_cases(), st.integers(0, 80))
def test_key_length_is_a_cut(case, length):
    inputs = make_inputs(case)
    lengths = torch.full((case.batch,), min(length, case.seq_k))
    cut = replace(inputs, k=inputs.k[:, :length], v=inputs.v[:, :length])
    assert_same(forward(inputs, key_lengths=lengths), forward(cut))


@fewer
@hypothesis.given(plain_cases(), sides, sides)
def test_causal_is_a_window(case, left, right):
    inputs = make_inputs(case)
    causal = forward(inputs, causal=True, window=(left, right))
    assert all(map(torch.equal, causal, forward(inputs, window=(left, 0))))


@fewer
@hypothesis.given(plain_cases(), sides, sides)
def test_row_does_not_depend_on_what_it_does_not_see(case, left, right):
    inputs = make_inputs(case)
    row, column = torch.arange(case.seq_q)[:, None], torch.arange(case.seq_k)
    diagonal = row + case.seq_k - case.seq_q
    lowest = diagonal - (left if left is not None else 10**6)
    highest = diagonal + (right if right is not None else 10**6)
    seen = ((lowest <= column) & (column <= highest)).any(dim=0)
    changed = replace(
        inputs,
        k=torch.where(seen[:, None, None], inputs.k, 3 * inputs.k),
        v=torch.where(seen[:, None, None], inputs.v, -inputs.v),
    )
    assert_same(*(forward(each, window=(left, right)) for each in (inputs, changed)))


@fewer
@hypothesis.given(plain_cases(), st.floats(0.1, 4))
def test_out_is_linear_in_v_and_an_average_of_it(case, factor):
    inputs = make_inputs(case)
    out, _ = forward(inputs)
    affine, _ = forward(replace(inputs, v=factor * inputs.v + 1))
    assert_same(affine, factor * out + 1)
    values = inputs.v.repeat_interleave(case.heads // case.heads_kv, dim=2)
    assert (out <= values.amax(1, keepdim=True) + 1e-12).all()
    assert (out >= values.amin(1, keepdim=True) - 1e-12).all()


@fewer
@hypothesis.given(plain_cases())
def test_grouped_heads_equal_repeated_heads(case):
    inputs = make_inputs(replace(case, heads=4, heads_kv=2))
    repeated = replace(inputs, k=inputs.k.repeat_interleave(2, dim=2), v=inputs.v.repeat_interleave(2, dim=2))
    grouped, full = run(case, inputs, "cpu"), run(case, repeated, "cpu")
    for name in ("out", "lse", "dq"):
        assert_same(grouped[name], full[name])
    for name in ("dk", "dv"):
        assert_same(grouped[name], full[name].unflatten(2, (2, 2)).sum(3))


# --- what changes scores --------------------------------------------------------------------------------------------


@fewer
@hypothesis.given(plain_cases(), seeds)
def test_bias_of_whole_rows_moves_lse_only(case, seed):
    inputs = make_inputs(case)
    shape = (case.batch, case.heads, case.seq_q, 1)
    bias = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    out, lse = forward(inputs)
    moved, moved_lse = forward(inputs, bias=bias)
    assert_same(moved, out)
    assert_same(moved_lse, lse + bias.squeeze(-1))


@fewer
@hypothesis.given(plain_cases(), st.floats(-5, 5))
def test_sink_scales_out_by_the_share_of_the_keys(case, logit):
    inputs = make_inputs(case)
    sinks = torch.full((case.heads,), logit, dtype=torch.float64)
    out, lse = forward(inputs)
    less, more_lse = forward(inputs, sinks=sinks)
    assert_same(more_lse, torch.logaddexp(lse, sinks[:, None]))
    assert_same(less, out * (lse - more_lse).exp().transpose(1, 2)[..., None])


@fewer
@hypothesis.given(plain_cases(), sides, sides)
def test_window_is_a_mask(case, left, right):
    inputs = make_inputs(case)
    distance = torch.arange(case.seq_k) - torch.arange(case.seq_q)[:, None] - (case.seq_k - case.seq_q)
    mask = (distance >= -(10**6 if left is None else left)) & (distance <= (10**6 if right is None else right))
    window = run(replace(case, arguments={"window": (left, right)}), inputs, "cpu")
    assert_same(run(case, replace(inputs, tensors={"mask": mask}), "cpu"), window)


@fewer
@hypothesis.given(plain_cases(), st.floats(0.1, 100))
def test_soft_cap_is_a_tanh_of_the_score(case, softcap):
    # With a single key, lse is the score.
    inputs = make_inputs(replace(case, seq_k=1))
    _, scores = forward(inputs, scale=2.0)
    _, capped = forward(inputs, scale=2.0, softcap=softcap)
    assert_same(capped, softcap * (scores / softcap).tanh())
