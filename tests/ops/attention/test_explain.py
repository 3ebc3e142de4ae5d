"""`flashtile.explain` tells what a call would run, from the same choices that the call makes."""

from typing import Any

import pytest
import torch

import flashtile
from flashtile._backends import devices
from flashtile._backends.devices import KNOWN_DEVICES
from flashtile.ops.attention.cpu import tiles
from support.running.each_case import each_case


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _explain(seq: int = 4096, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, **arguments):
    tensor = _meta(2, seq, 16, head_dim, dtype=dtype)
    return flashtile.explain(tensor, tensor, tensor, **arguments)


@pytest.mark.parametrize("arch", KNOWN_DEVICES)
def test_every_known_architecture_is_served_by_the_portable_kernels(arch):
    dtype = torch.float16
    found = _explain(dtype=dtype, device=arch, backend="triton")
    assert found.backend == "triton" and found.device == arch
    assert [kernel.name for kernel in found.kernels] == ["forward", "dq", "dkdv"]
    assert all(kernel.shared_memory <= KNOWN_DEVICES[arch].shared_memory for kernel in found.kernels)
    automatic = _explain(dtype=dtype, device=arch)
    assert automatic.backend == ("hopper" if arch == "sm_90" else "triton")
    assert "the tensors are on cuda" in automatic.rejected["cpu"]


def test_a_single_stage_is_no_stages():
    assert ", 1 stage, " in str(_explain(dtype=torch.float32, head_dim=32, device="sm_90", backend="triton"))
    assert ", 3 stages, " in str(_explain(device="sm_90", backend="triton"))


@pytest.mark.parametrize(
    "learns, arguments, kernels",
    [
        (False, {}, [("backward", "hopper")]),
        (False, {"deterministic": True}, [("backward", "hopper")]),
        (True, {}, [("backward", "hopper"), ("dcaptured", "hopper")]),
        (True, {"deterministic": True}, [("dq", "triton"), ("dkdv", "triton")]),
    ],
)
def test_who_computes_the_gradients_of_what_a_function_reads(learns, arguments, kernels):
    table = torch.zeros(8191, device="meta", requires_grad=learns)

    def relative(score, batch, head, q_index, k_index):
        return score * table[q_index - k_index + 4095]

    found = _explain(score_mod=relative, device="sm_90", **arguments)
    assert [(kernel.name, kernel.backend) for kernel in found.kernels] == [("forward", "hopper"), *kernels]
    assert ("64 queries × 128 keys, 2 computing" in str(found.kernels[-1])) is (kernels[-1][0] == "dcaptured")


@pytest.mark.parametrize(
    "seq, head_dim, bias, forward, backward",
    [
        (64, 64, None, "triton", "triton"), (65, 32, None, "hopper", "hopper"), (64, 128, None, "hopper", "hopper"),
        (49, 32, (1, 2, 49, 49), "triton", "triton"), (768, 32, (1, 2, 768, 768), "hopper", "hopper"),
        (769, 32, (1, 2, 769, 769), "triton", "triton"), (513, 64, (1, 2, 513, 513), "triton", "hopper"),
    ],
)  # fmt: skip
def test_small_tiles_serve_few_tokens_and_narrow_heads_with_a_bias(seq, head_dim, bias, forward, backward):
    q = torch.empty(4, seq, 2, head_dim, dtype=torch.bfloat16, device="meta", requires_grad=True)
    added = None if bias is None else q.new_empty(bias)
    automatic, named = (
        flashtile.explain(q, q, q, bias=added, device="sm_90", backend=name) for name in ("auto", "hopper")
    )
    assert [kernel.backend for kernel in automatic.kernels][:2] == [forward, backward]
    assert {kernel.backend for kernel in named.kernels} == {"hopper"}
    names = [kernel.name for kernel in automatic.kernels[1:] if kernel.backend == "triton"]
    assert names == ([] if backward == "hopper" else ["short_backward"] if seq <= 64 else ["dq", "dkdv"])


@pytest.mark.parametrize(
    "shape, arguments, kernels",
    [
        ((1, 2, 768, 768), {}, [("backward", "hopper"), ("dbias", "hopper")]),
        ((4, 2, 768, 768), {}, [("backward", "hopper")]),  # it is the gradient of the scores, which that kernel stores
        ((4, 2, 768, 768), {"softcap": 5.0}, [("backward", "hopper"), ("dbias", "hopper")]),
        ((4, 1, 1, 768), {}, [("backward", "hopper"), ("dbias", "triton")]),
        ((1, 2, 768, 770), {}, [("backward", "hopper"), ("dbias", "triton")]),
    ],
    ids=str,
)
def test_who_computes_the_gradient_of_a_bias(shape, arguments, kernels):
    q, k = (torch.empty(4, seq, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for seq in shape[2:])
    if shape[2] == 1:
        q = k
    bias = q.new_empty(shape).requires_grad_()
    found = flashtile.explain(q, k, k, bias=bias, device="sm_90", **arguments)
    assert [(kernel.name, kernel.backend) for kernel in found.kernels][1:] == kernels


def test_roles_of_warpgroups_are_told():
    found = _explain(device="sm_90")
    assert isinstance(found, flashtile.Explanation)
    assert "2 computing warpgroups" in str(found.kernels[0]) and "forward (hopper)" in str(found)
    wide = flashtile.explain(*(torch.empty(1, 128, 2, d, dtype=torch.bfloat16, device="meta") for d in (192, 192, 128)),
                             device="sm_90")  # fmt: skip
    assert "128 keys, 3 computing warpgroups of which one loads" in str(wide.kernels[1])


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"head_dim": 64, "dtype": torch.float32}, "forward of float32 is for heads of 65 to 512 columns"),
        ({"head_dim": 288, "dtype": torch.float8_e4m3fn}, "up to 256 columns, and these 288"),
        ({"head_dim": 20}, "head_dim_v must be a multiple of 8"),
        ({"device": "sm_80"}, "for sm_90"),
    ],
)
def test_why_the_hopper_kernels_do_not_serve_a_call(arguments, reason):
    arguments = {"device": "sm_90", **arguments}
    automatic = _explain(**arguments)
    assert automatic.backend == "triton" and reason in automatic.rejected["hopper"]
    by_name = _explain(**arguments, backend="hopper")
    assert by_name.backend is None and reason in by_name.reason


def test_tiles_follow_the_call():
    def tiles(kernel: int, **arguments: Any) -> Any:
        return _explain(device="sm_90", backend="triton", **arguments).kernels[kernel].tiles

    assert tiles(1, head_dim=64) != tiles(1, head_dim=64, causal=True)
    assert tiles(2) != tiles(2, head_dim=64)
    assert tiles(2, causal=True) != tiles(2, seq=512, causal=True)


def test_on_the_cpu_it_says_who_computes_and_why():
    q = torch.empty(1, 256, 2, 64)
    assert "PyTorch's CPU flash attention" in str(flashtile.explain(q, q, q, causal=True))
    assert "with tables" in str(flashtile.explain(q, q, q, window=(16, 0)))
    capped = flashtile.explain(q, q, q, softcap=20.0)
    assert capped.backend == "cpu" and capped.kernels[0].name.startswith("flashtile tiles")
    assert "needs a GPU" in capped.rejected["triton"] or "interpreted" in capped.rejected["triton"]


def test_packed_calls_are_recognised_by_their_cumulative_lengths():
    packed = torch.empty(10, 2, 64)
    found = flashtile.explain(packed, packed, packed, torch.tensor([0, 4, 10]))
    assert "packed" in found.kernels[0].name


def test_a_backend_that_cannot_serve_is_told_not_raised():
    for backend in ("triton", "auto"):
        found = _explain(dtype=torch.float64, device="sm_90", backend=backend)
        assert found.backend is None and "float64" in found.reason and not found.kernels
        assert str(found).startswith("backend: none")


@each_case(
    "name, arch",
    [
        *(("h100", "sm_90"), ("GH-200", "sm_90"), ("MI300X", "gfx942"), ("RTX 2080 Ti", "sm_75"), ("rtx3060", "sm_86")),
        *(("RTX 4070 Ti SUPER", "sm_89"), ("RTX 5060 Ti", "sm_120")),
        *(("RTX 2050", None), ("RTX 4000", None), ("RTX 5000 Ada", None), ("RTX 3090 X", None)),
    ],
)
def test_gpus_have_names(name, arch):
    """Also each card of a series."""
    assert devices.architecture_named(name) == arch
    if arch:
        assert _explain(device=name) == _explain(device=arch)


def test_each_architecture_has_a_gpu_with_a_name():
    assert set(devices.CARDS) == set(devices.KNOWN_DEVICES)
    for arch, cards in devices.CARDS.items():
        assert cards and {devices.architecture_named(card) for card in cards} == {arch}


@pytest.mark.parametrize("device", ["sm_1", "meta", "nonsense"])
def test_unknown_devices_raise_and_name_the_known_ones(device):
    with pytest.raises(ValueError, match=r"device: expected .*'h100', or one of .*sm_90.*gfx942"):
        _explain(device=device)


_CU_SEQLENS = torch.tensor([0, 4, 10])


@pytest.mark.parametrize(
    ("cu_seqlens", "arguments", "error", "message"),
    [
        ([0, 4, 10], {}, TypeError, "cu_seqlens_q: expected a torch.Tensor, got list"),
        (_CU_SEQLENS, {"key_lengths": torch.tensor([1, 2, 3])}, ValueError, r"key_lengths: expected shape \(2,\)"),
        (_CU_SEQLENS, {"mask": torch.ones(1, 1, dtype=torch.bool)}, ValueError, "max_seqlen_q, max_seqlen_k: expected"),
        (None, {"window": (-1, 0)}, ValueError, "window: expected left"),
        (None, {"cu_seqlens_k": _CU_SEQLENS}, ValueError, "cu_seqlens_k: expected it beside cu_seqlens_q only"),
        (None, {"max_seqlen_k": 10}, ValueError, "max_seqlen_k: expected it beside cu_seqlens_q only, got 10"),
    ],
)
def test_bad_calls_raise_as_the_call_itself(cu_seqlens, arguments, error, message):
    rows = torch.empty(10, 2, 64)
    rows = rows[None] if cu_seqlens is None else rows
    with pytest.raises(error, match=message):
        flashtile.explain(rows, rows, rows, cu_seqlens, **arguments)


def test_under_autocast_it_tells_of_the_dtype_that_the_call_has(monkeypatch):
    monkeypatch.setattr(tiles, "has_float16_matmul", lambda: False)
    rows = torch.empty(1, 10, 2, 64)
    with torch.autocast("cpu", torch.float16):
        found = flashtile.explain(rows, rows, rows, causal=True)
    assert "torch.float16" in found.reason and "longer in float16" in found.kernels[-1].name


@pytest.mark.parametrize("seq_q, seq_k", [(300, 0), (0, 300)])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_calls_without_queries_or_keys_are_explained(backend, seq_q, seq_k):
    q, k = (torch.empty(2, seq, 4, 64, dtype=torch.bfloat16, device="meta") for seq in (seq_q, seq_k))
    found = flashtile.explain(q, k, k, window=(50, None), backend=backend, device="sm_90")
    assert [kernel.name for kernel in found.kernels][1:] == (["backward"] if backend == "hopper" else ["dq", "dkdv"])
