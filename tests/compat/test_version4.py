"""FlashAttention-4's names: values by their definition, always with lse, sinks, blocks, and what raises."""

import math

import pytest
import torch

from flashtile.testing import assert_close, assert_same
from support.attention.compat_cases import (
    Meaning,
    attention_by_definition,
    check_against,
    cumulative,
    devices,
    normal,
    packed_by_definition,
    places,
    scores_by_definition,
    served,
)
from support.running.each_case import each_case

flash_attn_combine = served(4).flash_attn_combine
flash_attn_func = served(4).flash_attn_func
flash_attn_varlen_func = served(4).flash_attn_varlen_func
get_scheduler_metadata = served(4).get_scheduler_metadata
BlockSparseTensorsTorch = served(4, "block_sparsity").BlockSparseTensorsTorch

OPTIONS = {
    "plain": ({}, Meaning()),
    "causal": ({"causal": True, "num_splits": 4, "pack_gqa": True, "deterministic": True}, Meaning(causal=True)),
    "left": ({"causal": True, "window_size": (4, None)}, Meaning(causal=True, window=(4, -1))),
    "window": ({"window_size": (4, 2), "softcap": 2.0, "softmax_scale": 0.3}, Meaning(0.3, window=(4, 2), softcap=2.0)),
}
options_and_meaning = pytest.mark.parametrize(("options", "meaning"), OPTIONS.values(), ids=OPTIONS.keys())


def showing(shown, **meaning):
    """A call that sees what `shown` has, bool that broadcasts to the scores."""
    return Meaning(bias=torch.zeros(shown.shape).masked_fill(~shown, -math.inf), **meaning)


@places
@each_case("way", ["dense", "packed", "pages"])
def test_second_product(way, device, dtype):
    """Scores of q and k and of qv and v, as those of both together, with a sink and a score function."""
    q, k, v, qv = (normal(2, rows, heads, 16, seed=seed).to(device, dtype) for seed, (rows, heads) in enumerate(
        ((5, 4), (8, 2), (8, 2), (5, 4))))  # fmt: skip
    options = {
        "causal": True, "learnable_sink": normal(4, seed=9).to(device, dtype),
        "score_mod": lambda score, b, h, q_idx, kv_idx, **_: score + 0.1 * q_idx,
    }  # fmt: skip
    expected = flash_attn_func(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, **options)
    if way == "dense":
        found = flash_attn_func(q, k, v, qv, **options)
    else:
        places = {"cu_seqlens_k": cumulative([8, 8], device)}
        rows = [x.flatten(0, 1) for x in (k, v)]
        if way == "pages":
            rows = [x.unflatten(0, (4, 4)) for x in rows]
            places = {"page_table": torch.arange(4, device=device).view(2, 2).int()}
        found = flash_attn_varlen_func(q, *rows, qv, max_seqlen_q=5, max_seqlen_k=8, **places, **options)
    for one, other in zip(found, expected):
        assert_same(one, other)


@places
@options_and_meaning
@each_case("sinks", [False, True])
def test_dense(sinks, options, meaning, device, dtype):
    inputs = [normal(2, 9, 4, 16), normal(2, 14, 2, 16, seed=1), normal(2, 14, 2, 24, seed=2)]
    inputs += [normal(4, seed=3)] * sinks
    check_against(
        lambda q, k, v, *sink: flash_attn_func(q, k, v, **options, learnable_sink=sink[0] if sink else None),
        lambda q, k, v, *sink: attention_by_definition(q, k, v, meaning, None, *sink), inputs, device, dtype,
    )  # fmt: skip


@devices
@each_case("keys", ["packed", "dense", "pages"])
@each_case("dense_queries", [False, True])
def test_layouts_of_packed_calls(dense_queries, keys, device):
    """Queries dense or packed; keys packed, dense with used rows, or in pages."""
    lengths_q, lengths_k = [6, 6, 6] if dense_queries else [6, 0, 3], [7, 4, 12]
    q, k, v = normal(sum(lengths_q), 4, 16), normal(23, 2, 16, seed=1), normal(23, 2, 16, seed=2)
    meaning = Meaning(causal=True)
    oracle = packed_by_definition(q, k, v, lengths_q, lengths_k, meaning)
    eager = packed_by_definition(*(x.float() for x in (q, k, v)), lengths_q, lengths_k, meaning)
    given = {} if dense_queries else {"cu_seqlens_q": cumulative(lengths_q, device), "max_seqlen_q": 6}
    q, k, v = (x.float().to(device) for x in (q, k, v))
    used = torch.tensor(lengths_k, dtype=torch.int32, device=device)
    if keys == "packed":
        given |= {"cu_seqlens_k": cumulative(lengths_k, device), "max_seqlen_k": 12}
    else:
        rows = [torch.nn.utils.rnn.pad_sequence(x.split(lengths_k), batch_first=True) for x in (k, v)]
        if keys == "pages":
            rows = [x.unflatten(1, (3, 4)).flatten(0, 1).flip(0) for x in rows]
            given["page_table"] = (8 - torch.arange(9, device=device)).view(3, 3).int()
        k, v = rows
        given["seqused_k"] = used
    out, lse = flash_attn_varlen_func(q.view(3, 6, 4, 16) if dense_queries else q, k, v, **given, causal=True)
    if dense_queries:
        assert out.shape == (3, 6, 4, 16) and lse.shape == (3, 4, 6)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    for name, got, exact, plain in zip(("out", "lse"), (out, lse), oracle, eager, strict=True):
        assert_close(name, got, exact, plain)


def lists(layout):
    """Counts and numbers of the blocks of a layout, the rest of the numbers out of range."""
    count = layout.sum(-1, dtype=torch.int32)
    order = (~layout).int().argsort(dim=-1, stable=True).int()
    past = torch.arange(layout.shape[-1]) >= count[..., None]
    return count, order.masked_fill(past, 99)


@places
@pytest.mark.parametrize("way", ["both", "a function", "full only", "a size"])
def test_block_sparsity(way, device, dtype):
    seq_q, seq_k, size = 200, 300, (128, 128)
    generator = torch.Generator().manual_seed(0)
    if way == "a size":
        size = (64, 96)
    blocks = -(-seq_q // size[0]), -(-seq_k // size[1])
    full = torch.rand(2, 1, *blocks, generator=generator) < 0.3
    partial = (torch.rand(1, 2, *blocks, generator=generator) < 0.4) & (way != "full only")
    full[0, 0, 0] = partial[:, :, 0] = False  # rows that see nothing
    shown = (full | partial).repeat_interleave(size[0], 2)[:, :, :seq_q].repeat_interleave(size[1], 3)[..., :seq_k]
    both = [x.to(device) for layout in (partial, full) for x in lists(layout)]
    by_keys = [x.to(device) for layout in (partial, full) for x in lists(layout.transpose(2, 3))]
    if way == "full only":
        both[:2] = by_keys[:2] = [None, None]
    size_given = size if way == "a size" else None
    given = {"block_sparse_tensors": BlockSparseTensorsTorch(*both, size_given)}
    given["block_sparse_tensors_bwd"] = BlockSparseTensorsTorch(*by_keys, size_given)
    if way == "a function":
        given["mask_mod"] = lambda b, h, q_idx, k_idx, info, aux: (q_idx + k_idx) % 3 != 0
        within = (torch.arange(seq_q)[:, None] + torch.arange(seq_k)) % 3 != 0
        full_shown = full.repeat_interleave(size[0], 2)[:, :, :seq_q].repeat_interleave(size[1], 3)[..., :seq_k]
        shown = shown & within | full_shown
    q, k, v = normal(2, seq_q, 2, 16), normal(2, seq_k, 1, 16, seed=1), normal(2, seq_k, 1, 16, seed=2)
    check_against(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True, **given)[0],
        lambda q, k, v: attention_by_definition(q, k, v, showing(shown, causal=True))[0], [q, k, v],
        device, dtype,
    )  # fmt: skip


def test_blocks_of_256_queries():
    """The shape of the lists tells that a block has 256 queries, as two tiles of a Blackwell GPU have."""
    layout = torch.tensor([[[[True, False, True]], [[False, True, False]]]]).view(1, 1, 2, 3)
    q, k = normal(1, 400, 1, 8).float(), normal(1, 300, 1, 8, seed=1).float()
    count, index = lists(layout)
    shown = layout.repeat_interleave(256, 2)[:, :, :400].repeat_interleave(128, 3)[..., :300]
    out, _ = flash_attn_func(q, k, k, block_sparse_tensors=BlockSparseTensorsTorch(None, None, count, index))
    assert_same(out, attention_by_definition(q, k, k, showing(shown))[0])
    with pytest.raises(ValueError, match="block_size: expected blocks of"):
        flash_attn_func(q[:, :100], k, k, block_sparse_tensors=BlockSparseTensorsTorch(None, None, count, index))
    with pytest.raises(ValueError, match="mask_block_cnt, mask_block_idx: expected"):
        flash_attn_func(q, k, k, block_sparse_tensors=BlockSparseTensorsTorch(count, None))


@devices
def test_a_sink_of_16_bits_keeps_its_dtype(device):
    q = normal(1, 5, 2, 16).to(device, torch.float16).requires_grad_()
    sink = normal(2).to(device, torch.bfloat16).requires_grad_()
    flash_attn_func(q, q, q, learnable_sink=sink)[0].sum().backward()
    assert sink.grad.dtype is torch.bfloat16 and sink.grad.any()


X = torch.randn(1, 5, 2, 8)


def relative(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    """Reads all that a function is told."""
    last = seqlen_info.seqlen_k - seqlen_info.seqlen_q + q_idx
    return score * aux_scalars[0] + aux_tensors[0][head] * (kv_idx - last)


def relative_bwd(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    return grad * aux_scalars[0]


def near(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    return kv_idx <= q_idx + seqlen_info.seqlen_k - seqlen_info.seqlen_q + head


def functions_by_definition(q, k, v, slopes):
    """out and lse of one sequence with `relative` and `near`."""
    seq_q, seq_k = q.shape[1], k.shape[1]
    distance = torch.arange(seq_k, device=q.device) - torch.arange(seq_q, device=q.device)[:, None] - (seq_k - seq_q)
    shown = distance <= torch.arange(q.shape[2], device=q.device)[:, None, None]
    scores = scores_by_definition(q, k, Meaning()) * 0.5 + slopes[:, None, None] * distance
    weights = scores.masked_fill(~shown, -math.inf)
    values = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", weights.softmax(-1).to(v.dtype), values), weights.logsumexp(-1)


@places
@each_case("layout", ["dense", "packed"])
def test_functions_of_scores_and_places(layout, device, dtype):
    """With gradients of the tensors that they read; positions of packed sequences count from their start."""
    lengths_q, lengths_k = ([6, 6], [9, 9]) if layout == "dense" else ([3, 9], [7, 11])
    inputs = [normal(12, 4, 16), normal(18, 2, 16, seed=1), normal(18, 2, 16, seed=2), normal(4, seed=3)]

    def served(q, k, v, slopes):
        given = {"score_mod": relative, "score_mod_bwd": relative_bwd, "mask_mod": near}
        given |= {"aux_tensors": [slopes], "aux_scalars": (0.5,)}
        if layout == "dense":
            out, lse = flash_attn_func(*(x.unflatten(0, (2, -1)) for x in (q, k, v)), **given)
            return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        ends = cumulative(lengths_q, device), cumulative(lengths_k, device)
        metadata = get_scheduler_metadata(9, 11, 4, 2, 16, 1, cu_seqlens_q=ends[0])
        return flash_attn_varlen_func(
            q, k, v, None, *ends, 9, 11, 7, scheduler_metadata=metadata, disable_scheduler_metadata=True, **given
        )

    def definition_of_functions(q, k, v, slopes):
        parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
        found = [functions_by_definition(*(x[None] for x in part), slopes) for part in parts]
        return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)

    if layout == "packed":
        inputs[1:3] = [normal(18, 2, 16, seed=seed) for seed in (1, 2)]
    check_against(served, definition_of_functions, inputs, device, dtype)


def test_parts_put_together():
    q, k = normal(2, 5, 2, 8).float(), normal(2, 12, 2, 8, seed=1).float()
    parts = [flash_attn_func(q, part, part) for part in k.split([7, 5], 1)]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    expected, expected_lse = attention_by_definition(q, k, k, Meaning())
    out, lse = flash_attn_combine(outs, lses)
    assert_same(out, expected)
    assert_same(lse, expected_lse.transpose(1, 2))
    used = torch.tensor([5, 2])
    for given in ({}, {"out": torch.full_like(out, 7.0)}):
        part, lse = flash_attn_combine(outs, lses, seqused=used, **given)
        assert torch.equal(part[1, :2], out[1, :2]) and (part[1, 2:] == (7.0 if given else 0.0)).all()
        assert lse[1, 2:].isneginf().all() and lse[0].isfinite().all()
    packed, lse = flash_attn_combine(
        outs.flatten(1, 2), lses.flatten(1, 2), cu_seqlens=cumulative([5, 5]), seqused=used, return_lse=False
    )
    assert lse is None and torch.equal(packed, flash_attn_combine(outs, lses, seqused=used)[0].flatten(0, 1))


def in_cute(*arguments, **options):
    return arguments[0]


in_cute.__wrapped__ = type(in_cute)(in_cute.__code__, {"__name__": "cutlass.cute"})
NO_BLOCKS = BlockSparseTensorsTorch(*lists(torch.zeros(1, 1, 1, 1, dtype=torch.bool)))
LISTS = BlockSparseTensorsTorch(*lists(torch.ones(1, 1, 1, 1, dtype=torch.bool)))


WIDE = torch.zeros(1, 5, 2, 500)


@each_case("arguments, message", [
        ({"qv": X[..., :3]}, "qv: expected torch.float32"),
        (
            {"k": WIDE[..., :16], "q": WIDE[..., :16], "v": WIDE, "qv": WIDE, "learnable_sink": torch.ones(2)},
            "sinks: expected None beside q and qv of 516 columns",
        ),
        ({"gather_kv_indices": X}, "gather_kv_indices: expected None.*mask_mod"),
        ({"gather_bwd_recompute_p": True}, "gather_bwd_recompute_p: expected False"),
        ({"gather_bwd_token_chunk": 8}, "gather_bwd_token_chunk: expected None"),
        ({"score_mod": in_cute}, "score_mod: expected a Python function .* got one written in CuTe"),
        ({"mask_mod": in_cute}, "mask_mod: expected a Python function .* got one written in CuTe"),
        ({"aux_tensors": [X]}, "aux_tensors: expected None.*score_mod and mask_mod"),
        ({"score_mod_bwd": relative_bwd}, "score_mod_bwd: expected None without score_mod"),
        (
            {"score_mod": relative, "score_mod_bwd": lambda grad, *_, **__: grad, "aux_tensors": [X[0, 0, 0]],
             "aux_scalars": (0.5,)},
            "score_mod_bwd: expected the derivative of score_mod",
        ),
        ({"block_sparse_tensors_bwd": LISTS}, "block_sparse_tensors_bwd: expected None without"),
        (
            {"block_sparse_tensors": LISTS, "block_sparse_tensors_bwd": NO_BLOCKS},
            "block_sparse_tensors_bwd: expected the blocks of block_sparse_tensors",
        ),
    ])  # fmt: skip
def test_what_is_not_served_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        flash_attn_func(**{"q": X, "k": X, "v": X, **arguments})


def test_what_is_not_served_raises_in_packed_calls():
    packed, ends = X[0], cumulative([5])
    for name, given in (("gather_kv_indices", packed), ("seqlen_k_per_split", 128)):
        with pytest.raises(ValueError, match=f"{name}: expected None"):
            flash_attn_varlen_func(packed, packed, packed, cu_seqlens_q=ends, cu_seqlens_k=ends, **{name: given})
    with pytest.raises(ValueError, match="max_seqlen_q: expected an int beside mask_mod"):
        flash_attn_varlen_func(packed, packed, packed, None, ends, ends, mask_mod=lambda b, h, i, j, info, aux: i >= j)
    with pytest.raises(ValueError, match="virtual_batch_idx: expected None"):
        flash_attn_combine(X[None], X[None, ..., 0], virtual_batch_idx=ends)
