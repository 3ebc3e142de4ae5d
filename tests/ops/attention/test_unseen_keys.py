"""Keys that the band of a dense call hides from every query: what they hold has no effect, on any backend."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from flashtile.ops.attention.call import seen_call, visible_keys
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.testing import AttentionCase, check, make_inputs, run
from support.attention.attention_cases import changed
from support.attention.cpu_tiles import use_only_tiles
from support.attention.mask_checks import shown_by_band

_BASE = AttentionCase(seq_q=21, seq_k=75, heads_kv=1, head_dim=16, head_dim_v=16)
_TOP_LEFT = changed(_BASE, causal=True, align="top_left", deterministic=True)
_LEFT = changed(_BASE, window=(7, 0), deterministic=True)
#: Calls, and of the 75 keys those that 21 queries see.
CASES: dict[str, tuple[AttentionCase, tuple[int, int]]] = {
    "top_left": (_TOP_LEFT, (0, 21)),
    "left": (_LEFT, (47, 75)),
    "both_sides": (changed(_BASE, window=(7, 40), align="top_left", deterministic=True), (0, 61)),
    "alibi": (replace(_TOP_LEFT, alibi_slopes="h", constant=("alibi_slopes",)), (0, 21)),
    "alibi_left": (replace(_LEFT, alibi_slopes="h", constant=("alibi_slopes",)), (47, 75)),
    "key_lengths": (replace(_LEFT, key_lengths=(60, 30)), (47, 60)),
    "tables": (replace(_LEFT, bias="b11k", mask="111k"), (47, 75)),
    "dropout": (changed(_TOP_LEFT, dropout_p=0.3), (0, 21)),
    "score_mod": (replace(_TOP_LEFT, score_mod=True, constant=("score_mod",)), (0, 21)),
    "sinks": (changed(_LEFT, sinks=True, softcap=3.0), (47, 75)),
}


def check_unseen(
    name: str, backend: str, device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = 16
) -> None:
    """Holds results and gradients to the oracle, and to the same bits whatever is in keys and values that no query sees
    and in their columns of a bias."""
    case, (first, last) = CASES[name]
    case = replace(case, head_dim=width, head_dim_v=width, dtype=dtype)
    inputs = make_inputs(case, device)
    unseen = torch.ones(case.seq_k, dtype=torch.bool)
    unseen[first:last] = False
    clean: dict[str, torch.Tensor] = {}
    for fill in (0.0, float("nan"), float("inf")):
        for tensor in (inputs.k, inputs.v):
            tensor[:, unseen] = fill
        if case.bias:
            inputs.tensors["bias"][..., unseen] = fill
        found = run(case, inputs, backend)
        clean = clean or check(case, backend, device, inputs=inputs)
        for key, tensor in clean.items():
            assert torch.equal(found[key], tensor), f"{key}: unseen keys that hold {fill} have an effect"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_cpu(name, backend):
    check_unseen(name, backend)


@pytest.mark.parametrize("name", ["top_left", "left"])
def test_cpu_tiles(name, monkeypatch):
    use_only_tiles(monkeypatch)
    check_unseen(name, "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["top_left", "left", "alibi", "tables", "dropout"])
def test_interpreted(name):
    check_unseen(name, "triton")


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["top_left", "left", "alibi"])
def test_interpreted_splits(name):
    check_unseen(name, "split")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("backend", ["auto", "triton", "split"])
@pytest.mark.parametrize("name", ["top_left", "left", "alibi", "key_lengths"])
def test_gpu(name, backend, width):
    check_unseen(name, backend, "cuda", torch.bfloat16, width)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["both_sides", "alibi_left", "tables", "dropout", "score_mod", "sinks"])
def test_gpu_features(name):
    check_unseen(name, "auto", "cuda", torch.bfloat16, 64)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "width, dtype",
    [(64, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (128, torch.float32), (256, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("name", ["top_left", "left", "alibi"])
def test_hopper(name, width, dtype):
    """float32 has Hopper kernels for wider heads and no ALiBi."""
    check_unseen(name, "auto" if name == "alibi" and dtype is torch.float32 else "hopper", "cuda", dtype, width)


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("seq_q, seq_k", [(4, 9), (9, 4), (5, 5)])
def test_the_call_over_seen_keys_sees_the_same(seq_q, seq_k, top_left):
    q, k = torch.zeros(1, seq_q, 2, 8), torch.zeros(1, seq_k, 1, 8)
    for left, right in product([None, -6, -3, 0, 2, 6], repeat=2):
        spec = AttentionSpec(1.0, left, right, top_left)
        whole = shown_by_band(seq_q, seq_k, spec)
        first, last = visible_keys(seq_q, seq_k, spec)
        call = seen_call(q, k, k, SideInputs(alibi_slopes=torch.ones(2)), spec)
        assert not whole[:, :first].any() and not whole[:, last:].any()
        if call is None:
            assert (first, last) == (0, seq_k)
            continue
        assert torch.equal(shown_by_band(seq_q, last - first, call.spec), whole[:, first:last]), (left, right)
        distance = last - first - seq_q + (call.spec.origin.diagonal if call.spec.origin else 0)
        assert distance == seq_k - seq_q - first
