"""Attention of a few queries to many keys: when keys are split, and the kernels that do so against the fp64 oracle."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

import flashtile
from flashtile._backends import clear_plans, devices
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.attention.split import MAX_QUERIES, no_gain
from flashtile.testing import AttentionCase, check, make_inputs, run, with_arguments
from support.attention.attention_cases import BASE, EDGES, PAIRS, combined, parameters
from support.running.covering import turns

_MULTIPROCESSORS = 132


def _served(case: AttentionCase) -> bool:
    tables = case.bias or case.mask or case.block_mask
    return not (case.packed or tables or case.arguments.get("dropout_p"))


_SERVED = {name: case for name, case in (PAIRS | EDGES).items() if _served(case)}
_COMBINED = combined(*(name for name, case in PAIRS.items() if not _served(case)))
_ON_A_GPU = {name: case for name, case in (_COMBINED | EDGES).items() if _served(case)}
#: What the diagonals depend on, together, and the edges.
_INTERPRETED = [
    "plain", "grouped", "head_dims", "key_lengths+band causal", "key_lengths+band top_left", "key_lengths+alibi",
    "band top_left+alibi", "band left+softcap", "band window+sinks", "key_lengths+sinks", "scale", "one_query",
    "no_queries", "no_keys", "no_batch", "one_key",
]  # fmt: skip


@pytest.fixture
def splits(request):
    from flashtile.ops.attention.split import launch
    from flashtile.ops.common.split_keys import configs

    with mock.patch.object(configs, "choose_splits", return_value=request.param):
        launch._pipeline.cache_clear()
        yield
    launch._pipeline.cache_clear()


@pytest.mark.interpreter
@pytest.mark.parametrize("case", parameters({name: _SERVED[name] for name in _INTERPRETED}))
@pytest.mark.parametrize("splits", [3], indirect=True)
def test_interpreted(case, splits):
    check(replace(case, seq_q=min(case.seq_q, 5)), "split")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, dtype, splits",
    [
        (name, dtype, splits)
        for name, (dtype, splits) in turns(
            _ON_A_GPU,
            [(torch.bfloat16, 3), (torch.float32, 3), (torch.bfloat16, 1), (torch.float32, 1), (torch.bfloat16, 3)],
        )
    ],
    ids=str,
    indirect=["splits"],
)
def test_gpu(name, dtype, splits):
    check(replace(_ON_A_GPU[name], dtype=dtype), "split", "cuda")


_LONG = replace(BASE, seq_k=1100, heads=8, heads_kv=2, head_dim=128, head_dim_v=128, dtype=torch.bfloat16)
_EVERYTHING = replace(
    with_arguments(_LONG, causal=True, window=(500, 0), softcap=5.0),
    key_lengths=(700, 3), alibi_slopes="bh", sinks=True,
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [_LONG, with_arguments(_LONG, causal=True), _EVERYTHING], ids=["plain", "causal", "all"]
)
@pytest.mark.parametrize("heads", [2, 8, 16])
@pytest.mark.parametrize("seq_q, head_dim", [(1, 128), (2, 64), (5, 256), (16, 128), (100, 80)])
def test_gpu_short_queries(seq_q, head_dim, heads, case):
    check(replace(case, seq_q=seq_q, heads=heads, head_dim=head_dim, head_dim_v=head_dim), "split", "cuda")


@pytest.mark.gpu
def test_gpu_auto_splits_and_gradients_follow():
    case = replace(_LONG, seq_q=4)
    inputs = make_inputs(case, "cuda")
    assert flashtile.explain(inputs.q, inputs.k, inputs.v).backend == "split"
    auto, named = run(case, inputs, "auto"), run(case, inputs, "split")
    assert torch.equal(auto["out"], named["out"]) and torch.equal(auto["lse"], named["lse"])
    check(case, "auto", "cuda")


@pytest.mark.gpu
def test_gpu_runs_and_graph_replays_give_the_same_bits():
    inputs = make_inputs(replace(_LONG, seq_q=3), "cuda")
    q, k, v = inputs.q, inputs.k, inputs.v
    expected = flashtile.attention(q, k, v, backend="split")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention(q, k, v, backend="split")
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
        assert torch.equal(flashtile.attention(q, k, v, backend="split"), expected)


@pytest.mark.parametrize(
    "sizes, others_split, splits",
    [
        # batch, seq_q, heads, heads_kv, key_tiles
        ((1, 16, 64, 8, 256), False, True),
        ((128, 1, 32, 8, 32), False, True),  # a full GPU too: a group's heads share its keys
        ((1, 128, 8, 8, 512), False, True),  # eight tiles of queries, 132 multiprocessors
        ((1, 1, 32, 8, 2), False, True),
        ((1, 1, 32, 8, 1), False, False),  # a tile of keys cannot be split
        ((2, 64, 64, 8, 256), False, False),  # as many programs as multiprocessors, with fuller tiles
        ((16, 1, 32, 32, 2), False, False),  # both read as fast as memory gives
        ((64, 128, 32, 32, 32), False, False),  # tiles of queries are full
        ((1, MAX_QUERIES + 1, 8, 8, 512), False, False),
        ((0, 1, 8, 8, 512), False, False),
        ((1, 0, 8, 8, 512), False, False),
        ((1, 1, 8, 8, 0), False, False),
        # Beside the splits of Hopper: faster on an H200, as measured with heads of 128.
        ((1, 16, 32, 8, 512), True, True),
        ((1, 32, 32, 8, 512), True, False),
        ((1, 64, 32, 8, 32), True, False),
        ((1, 17, 32, 8, 32), True, True),
        ((1, 128, 8, 8, 256), True, False),
        ((1, 1, 32, 32, 256), True, True),
    ],
    ids=str,
)
def test_when_splitting_pays(sizes, others_split, splits):
    assert (no_gain(*sizes, _MULTIPROCESSORS, others_split=others_split) is None) is splits


def test_what_is_served():
    found = {}
    for name, case in PAIRS.items():
        inputs = make_inputs(case)
        options = {**inputs.tensors, **case.keywords(), "backend": "split", "device": "sm_90"}
        found[name] = flashtile.explain(inputs.q, inputs.k, inputs.v, **options).backend == "split"
    assert found == {name: _served(case) for name, case in PAIRS.items()}


@pytest.mark.skipif("flashtile._backends.devices.triton_missing()", reason="plans launches of Triton")
def test_strides_of_dimensions_of_one_do_not_count():
    """Strides of a batch of one and of a single query may be odd."""
    from flashtile.ops.attention.split.launch import split_call

    q = torch.empty_strided((1, 1, 8, 64), (1, 7, 64, 1), device="meta")
    k = torch.empty_strided((1, 100, 2, 64), (1, 128, 64, 1), device="meta")
    call = split_call(q, k, k, SideInputs(None, None, 1, 100), AttentionSpec(1.0))
    assert call.strides == ((0, 0, 64), (0, 128, 64), (0, 128, 64))


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("arch", [arch for arch in devices.KNOWN_DEVICES if arch != "sm_75"])
def test_explained(arch):
    found = flashtile.explain(_meta(1, 1, 32, 128), _meta(1, 8192, 8, 128), _meta(1, 8192, 8, 128), device=arch)
    assert found.backend == "split"
    first, *rest = found.kernels
    assert (first.name, first.backend) == ("forward", "split") and first.parts > 1
    assert "16 queries and heads" in str(first) and f"keys in {first.parts} parts" in str(first)
    assert [kernel.backend for kernel in rest] == (["hopper"] if arch == "sm_90" else ["triton", "triton"])


def test_why_not():
    q, k = _meta(1, 1, 32, 128), _meta(1, 8192, 8, 128)
    assert "bias, mask" in flashtile.explain(q, k, k, mask=_meta(1, 8192).bool(), device="sm_90").rejected["split"]
    assert "gains nothing" in flashtile.explain(q, k[:, :100], k[:, :100], device="sm_90").rejected["split"]
    named = flashtile.explain(q, k, k, dropout_p=0.5, backend="split", device="sm_90")
    assert named.backend is None and "no dropout" in named.reason
    with pytest.raises(ValueError, match="backend: 'split' cannot serve this call"):
        flashtile.attention(*(torch.randn(1, 4, 2, 16) for _ in range(3)), backend="split")


@pytest.mark.skipif(devices.interpreting(), reason="launches take addresses: needs TRITON_INTERPRET unset")
def test_prepared_launches_pass_what_others_pass(monkeypatch):
    from flashtile._backends import launch as backend_launch
    from flashtile.ops.attention.split import launch
    from flashtile.ops.common.split_keys import plan

    passed: list[tuple] = []
    monkeypatch.setattr(
        backend_launch, "make_launch",
        lambda source, programs, scalars, _: lambda *given: passed.append((source.function.__name__, given, scalars)),
    )  # fmt: skip
    monkeypatch.setattr(plan, "device_facts", lambda device: devices.KNOWN_DEVICES["sm_90"])
    monkeypatch.setattr(plan, "multiprocessors", lambda device: 132)
    clear_plans()
    q, k, v = (torch.zeros(2, rows, 2, 64, dtype=torch.bfloat16) for rows in (1, 2000, 2000))
    lengths, slopes, sinks = torch.tensor([7, 900], dtype=torch.int32), torch.ones(2), torch.zeros(2)
    side = SideInputs(None, None, 1, 2000, lengths, alibi_slopes=slopes, sinks=sinks)
    launch.forward(q, k, v, side, AttentionSpec(0.1))
    prepared = launch.prepare_forward(q, k, v, side, AttentionSpec(0.1))
    assert (
        prepared is not None and launch.prepare_forward(q.float(), k.float(), v.float(), side, AttentionSpec(1)) is None
    )
    prepared(q, k, v, (lengths, slopes, sinks))
    (attend, given, scalars), _, (*again, scalars_again), _ = passed
    assert again[0] == attend == "attend_kernel" and scalars == scalars_again
    assert len(given) == 9 and given[:3] + given[5:] == again[1][:3] + again[1][5:]  # out and lse are new
    clear_plans()
