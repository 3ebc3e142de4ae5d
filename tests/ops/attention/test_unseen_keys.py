"""Keys that the band of a dense call hides from every query: what they hold has no effect, on any backend."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.ops.attention.call import seen_call, visible_keys
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.testing import assert_close
from support.attention.cpu_tiles import use_only_tiles
from support.attention.mask_checks import shown_by_band

NAN = float("nan")
SEQ_Q, SEQ_K = 21, 75

_TOP_LEFT = {"causal": True, "align": "top_left"}
_LEFT = {"window": (7, 0)}
_BOTH = {"window": (7, 40), "align": "top_left"}
#: Arguments, and of the 75 keys those that 21 queries see.
CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "top_left": (_TOP_LEFT, (0, 21)),
    "left": (_LEFT, (47, 75)),
    "both_sides": (_BOTH, (0, 61)),
    "alibi": (_TOP_LEFT | {"alibi_slopes": torch.tensor([0.3, 0.1])}, (0, 21)),
    "alibi_left": (_LEFT | {"alibi_slopes": torch.tensor([0.3, 0.1])}, (47, 75)),
    "key_lengths": (_LEFT | {"key_lengths": torch.tensor([60, 30])}, (47, 60)),
    "tables": (_LEFT | {"bias": torch.ones(2, 1, 1, SEQ_K), "mask": torch.arange(SEQ_K) % 3 > 0}, (47, 75)),
    "dropout": (_TOP_LEFT | {"dropout_p": 0.3, "dropout_seed": torch.tensor([1, 2])}, (0, 21)),
    "score_mod": (_TOP_LEFT | {"score_mod": lambda score, b, h, i, j: score - 0.1 * (i - j)}, (0, 21)),
    "sinks": (_LEFT | {"sinks": torch.tensor([0.5, 1.0]), "softcap": 3.0}, (47, 75)),
}
_PORTABLE = ["top_left", "left", "alibi", "tables", "dropout"]


def results(name: str, backend: str, device: str, dtype: torch.dtype, fill: float, width: int) -> dict[str, Tensor]:
    """out, lse and gradients where keys and values that no query sees, and their columns of a bias, hold `fill`."""
    arguments, (first, last) = CASES[name]
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, SEQ_Q, 2, width), "k": (2, SEQ_K, 1, width), "v": (2, SEQ_K, 1, width)}
    tensors = {
        key: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for key, shape in shapes.items()
    }
    wide = torch.promote_types(dtype, torch.float32)
    options = {
        key: (t.to(wide) if t.is_floating_point() else t).to(device) if isinstance(t, Tensor) else t
        for key, t in arguments.items()
    }
    if "bias" in options:
        tensors["bias"] = options.pop("bias").clone()
    unseen = torch.ones(SEQ_K, dtype=torch.bool)
    unseen[first:last] = False
    tensors["k"][:, unseen], tensors["v"][:, unseen] = fill, fill
    if "bias" in tensors:
        tensors["bias"][..., unseen] = fill
    leaves = {key: tensor.to(device).requires_grad_() for key, tensor in tensors.items()}
    out, lse = flashtile.attention(**leaves, **options, return_lse=True, backend=backend, deterministic=True)
    (out.float().square().sum() + lse[~lse.isinf()].sum()).backward()
    found = {"out": out, "lse": lse} | {f"d{key}": leaf.grad for key, leaf in leaves.items()}
    return {key: tensor.detach().cpu() for key, tensor in found.items()}


def check(name: str, backend: str, device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = 16) -> None:
    clean = results(name, backend, device, dtype, 0.0, width)
    for fill in (NAN, float("inf")):
        dirty = results(name, backend, device, dtype, fill, width)
        for key, tensor in clean.items():
            assert torch.equal(dirty[key], tensor), f"{key}: unseen keys that hold {fill} have an effect"
    oracle, eager = (results(name, "reference", device, kind, 0.0, width) for kind in (torch.float64, dtype))
    for key, tensor in clean.items():
        assert_close(key, tensor, oracle[key], eager[key])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_cpu(name, backend):
    check(name, backend)


@pytest.mark.parametrize("name", ["top_left", "left"])
def test_cpu_tiles(name, monkeypatch):
    use_only_tiles(monkeypatch)
    check(name, "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("name", _PORTABLE)
def test_interpreted(name):
    check(name, "triton")


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["top_left", "left", "alibi"])
def test_interpreted_splits(name):
    check(name, "split")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("backend", ["auto", "triton", "split"])
@pytest.mark.parametrize("name", ["top_left", "left", "alibi", "key_lengths"])
def test_gpu(name, backend, width):
    check(name, backend, "cuda", torch.bfloat16, width)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["both_sides", "alibi_left", "tables", "dropout", "score_mod", "sinks"])
def test_gpu_features(name):
    check(name, "auto", "cuda", torch.bfloat16, 64)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "width, dtype",
    [(64, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (128, torch.float32), (256, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("name", ["top_left", "left", "alibi"])
def test_hopper(name, width, dtype):
    """float32 has Hopper kernels for wider heads and no ALiBi."""
    check(name, "auto" if name == "alibi" and dtype is torch.float32 else "hopper", "cuda", dtype, width)


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("seq_q, seq_k", [(4, 9), (9, 4), (5, 5)])
def test_the_call_over_seen_keys_sees_the_same(seq_q, seq_k, top_left):
    q, k = torch.zeros(1, seq_q, 2, 8), torch.zeros(1, seq_k, 1, 8)
    sides = [None, -6, -3, 0, 2, 6]
    for left in sides:
        for right in sides:
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
