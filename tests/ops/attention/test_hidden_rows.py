"""Rows that see no key: no gradient passes through them on any backend, not even NaN from above."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import BlockMask
from flashtile.ops.attention.call import describe_call
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.testing import AttentionCase, assert_close, assert_same, make_inputs, run
from support.attention.attention_cases import changed
from support.running.places import places

NAN = float("nan")


def _shown(seq_q: int, seq_k: int) -> Tensor:
    """A mask under which the first 5 rows and row 9 see nothing."""
    shown = torch.ones(seq_q, seq_k, dtype=torch.bool)
    shown[:5] = shown[9] = False
    return shown


_BASE = AttentionCase(seq_q=36, seq_k=20, heads_kv=1, head_dim=16, head_dim_v=16)
_TABLE = torch.zeros(36, 20).masked_fill(~_shown(36, 20), -torch.inf)

#: What hides rows -> a call, and tensors of it.
HIDING: dict[str, tuple[AttentionCase, dict[str, Any]]] = {
    "causal": (changed(_BASE, causal=True), {}),
    "window": (changed(_BASE, window=(3, None), align="top_left"), {}),
    "key_lengths": (replace(_BASE, key_lengths=(20, 0)), {}),
    "mask": (_BASE, {"mask": _shown(36, 20)}),
    "bias": (replace(_BASE, bias="11qk"), {"bias": _TABLE}),
    "block_mask": (_BASE, {"block_mask": BlockMask.from_dense(_shown(36, 20), (128, 128))}),
    "dropout": (changed(_BASE, causal=True, dropout_p=0.3), {}),
    "negative_scale": (changed(_BASE, causal=True, scale=-0.3), {}),
    "alibi_softcap": (changed(_BASE, causal=True, alibi_slopes="h", softcap=3.0), {}),
    "packed": (replace(_BASE, lengths_q=(14, 16), lengths_k=(0, 16)), {}),
}
IN_HOPPER_KERNELS = ("causal", "window", "block_mask", "negative_scale", "packed")


class _Call:
    """A call of `HIDING`, and its rows that see no key, beside which there are others."""

    def __init__(
        self, name: str, device: str, dtype: torch.dtype, width: int | None = None, sinks: Tensor | None = None
    ) -> None:
        case, tensors = HIDING[name]
        batch, width = 1 if width else 2, width or (64 if device == "cuda" else 16)
        self.case = replace(case, batch=batch, head_dim=width, head_dim_v=width, dtype=dtype)
        self.inputs = make_inputs(self.case, device)
        wide = torch.promote_types(dtype, torch.float32)
        given = {key: t.to(wide) if key == "bias" else t for key, t in tensors.items()}
        self.inputs.tensors |= {key: t.to(device) for key, t in given.items()}
        lse = run(self.case, self.inputs, "reference")["lse"]
        self.blind = lse.isneginf().transpose(-1, -2)
        assert self.blind.any() and not self.blind.all()
        if sinks is not None:
            self.case = replace(self.case, sinks=True)
            self.inputs.tensors["sinks"] = sinks.to(device, wide)

    def gradients(
        self, backend: str, value: float, lse_value: float, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Gradients by name where `value` comes from above through out, and `lse_value` through lse, in the rows that
        see no key. What comes through out has its heads before its rows in memory, unlike anything else."""
        dout, dlse = self.inputs.dout.clone(), torch.ones_like(self.inputs.dlse)
        dout[self.blind], dlse.transpose(-1, -2)[self.blind] = value, lse_value
        dout = dout.transpose(-3, -2).contiguous().transpose(-3, -2)
        results = run(self.case, replace(self.inputs, dout=dout, dlse=dlse), backend, dtype)
        return {key: value for key, value in results.items() if key not in ("out", "lse")}


def check(
    name: str, backend: str, device: str = "cpu", dtype: torch.dtype = torch.float32, width: int | None = None
) -> None:
    call = _Call(name, device, dtype, width)
    loud = call.gradients(backend, NAN, NAN)
    assert not loud["dq"][call.blind].any()
    if dtype is not torch.float32:
        assert_same(loud, call.gradients(backend, 0.0, 0.0))
        return
    eager, oracle = (call.gradients("reference", 0.0, 0.0, of) for of in (dtype, torch.float64))
    for key, value in loud.items():
        assert_close(key, value, oracle[key], eager[key])


#: Places of every row of `HIDING`; the Hopper kernels have some of them.
EVERYWHERE = ("reference", "cpu", "interpreted", "gpu")


@places(*EVERYWHERE, dtypes=True)
@pytest.mark.parametrize("name", HIDING)
def test_nan_from_above_does_not_spread(name, backend, device, dtype):
    check(name, backend, device, dtype)
    check_sinks(name, backend, device, dtype)


@places("interpreted", "gpu", dtypes=True)
def test_nan_from_above_does_not_spread_in_wide_heads(backend, device, dtype):
    check("mask", backend, device, dtype, width=272)


@places("hopper", dtypes=True)
@pytest.mark.parametrize("name", IN_HOPPER_KERNELS)
def test_nothing_spreads_in_hopper_kernels(name, backend, device, dtype):
    check(name, backend, device, dtype)
    check_sinks(name, backend, device, dtype)


# --- rows that see a sink alone -------------------------------------------------------------------------------------


def check_sinks(name: str, backend: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    call = _Call(name, device, dtype, sinks=torch.tensor([0.3, -torch.inf]))
    quiet = call.gradients(backend, 0.0, 1.0)
    assert_same(call.gradients(backend, float("inf"), 1.0), quiet)
    # What comes through lse is the sink's, and nobody else's.
    loud = call.gradients(backend, NAN, NAN)
    assert loud.pop("dsinks").isnan().tolist() == [True, False]
    quiet.pop("dsinks")
    assert_same(loud, quiet)
    assert not loud["dq"][call.blind].any()


@places(*EVERYWHERE, "hopper", dtypes=True)
def test_a_row_that_sees_a_key_spreads_nan_beside_a_sink(backend, device, dtype):
    shapes = (1, 6, 1, 64 if device == "cuda" else 16), (1, 4, 1, 64 if device == "cuda" else 16)
    q, k = (torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes)
    out = flashtile.attention(q, k, k, causal=True, sinks=torch.zeros(1, device=device), backend=backend)
    upstream = torch.ones_like(out)
    upstream[:, :3] = NAN  # the first two rows see nothing, the third the first key
    dq, dk = torch.autograd.grad(out, (q, k), upstream)
    assert dq.isnan().any(-1).flatten().tolist() == [False, False, True, False, False, False]
    assert dk.isnan().any()


@places(*EVERYWHERE, "hopper", dtypes=True)
def test_rows_past_the_last_sequence_give_sinks_no_gradient(backend, device, dtype):
    q = torch.randn(20, 2, 64 if device == "cuda" else 16).to(device, dtype).requires_grad_()
    sinks = torch.zeros(2, device=device).requires_grad_()
    cu_seqlens = torch.tensor([0, 5, 13], device=device)
    out = flashtile.attention_varlen(q, q, q, cu_seqlens, sinks=sinks, backend=backend)
    upstream = torch.ones_like(out)
    quiet = torch.autograd.grad(out, (q, sinks), upstream, retain_graph=True)
    upstream[13:] = NAN
    assert_same(torch.autograd.grad(out, (q, sinks), upstream), quiet)


# --- what the host knows --------------------------------------------------------------------------------------------

_SIDES = (None, -2, 0, 3)


def may_hide_rows(q: Tensor, k: Tensor, side: SideInputs, spec: AttentionSpec) -> bool:
    return describe_call("backward", (q, k, k), side, spec).may_hide_rows


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("seq_q, seq_k", [(4, 4), (6, 3), (3, 6), (1, 5), (5, 1)])
def test_the_host_knows_when_a_band_hides_rows(seq_q, seq_k, top_left):
    q, k = torch.empty(1, seq_q, 1, 8), torch.empty(1, seq_k, 1, 8)
    for left, right in product(_SIDES, _SIDES):
        diagonal = torch.arange(seq_q)[:, None] + (0 if top_left else seq_k - seq_q)
        key = torch.arange(seq_k)
        shown = (key >= diagonal - (99 if left is None else left)) & (
            key <= diagonal + (99 if right is None else right)
        )
        hides = not shown.any(dim=1).all()
        spec = AttentionSpec(1.0, left, right, top_left)
        # It may err on the safe side only.
        assert may_hide_rows(q, k, SideInputs(), spec) >= hides, (left, right)
    plain = AttentionSpec(1.0, None, 0)
    assert may_hide_rows(q, k, SideInputs(), plain) == (seq_q > seq_k)
    assert not may_hide_rows(q, k, SideInputs(), AttentionSpec(1.0))


def test_packed_sequences_of_equal_lengths_hide_nothing():
    q, cu_seqlens = torch.empty(6, 1, 8), torch.tensor([0, 2, 6])
    same, other = SideInputs(cu_seqlens, cu_seqlens, 4, 4), SideInputs(cu_seqlens, cu_seqlens.clone(), 4, 4)
    assert not may_hide_rows(q, q, same, AttentionSpec(1.0, 3, 0))
    assert may_hide_rows(q, q, same, AttentionSpec(1.0, -1, None))
    assert may_hide_rows(q, q, other, AttentionSpec(1.0))


def _check_scores_of_minus_infinity(
    backend: str, device: str, dtype: torch.dtype, seq: int, width: int, **options: Any
) -> None:
    """An infinite number in queries 5 of head 0 and 7 of head 1 makes all their scores -inf."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, seq, 2, width, generator=generator) for _ in range(3))
    k[..., 3] = k[..., 3].abs() + 0.1
    q[0, 5, 0, 3] = q[0, 7, 1, 3] = -torch.inf
    options = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in options.items()}

    def run(which: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        tensors = [t.to(device, dtype) for t in (q, k, v)]
        learned = (
            {"sinks": options["sinks"].to(torch.promote_types(dtype, torch.float32))} if "sinks" in options else {}
        )
        return flashtile.attention(*tensors, **(options | learned), return_lse=True, backend=which)

    found, oracle, eager = run(backend, dtype), run("reference", torch.float64), run("reference", dtype)
    for name, *values in zip(("out", "lse"), found, oracle, eager):
        assert_close(name, *values)
    sinks = options.get("sinks", torch.full((2,), -torch.inf))
    for row, head in ((5, 0), (7, 1)):
        assert not found[0][0, row, head].any() and found[1][0, head, row] == sinks[head]


_WITH_TABLES: list[dict[str, Any]] = [{}, {"window": (4, 0)}, {"sinks": torch.tensor([0.3, -0.2])}]


@pytest.mark.parametrize("seq", [20, 300])
@pytest.mark.parametrize("options", [*_WITH_TABLES, {"mask": torch.arange(20).remainder(3) > 0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_score_of_minus_infinity_hides_its_key(backend, dtype, options, seq):
    if "mask" in options:
        options = {"mask": options["mask"].repeat(seq // 20)}
    _check_scores_of_minus_infinity(backend, "cpu", dtype, seq, 16, **options)


def test_one_query_of_minus_infinity_hides_all_keys():
    """Also where keys are computed in splits."""
    k = torch.rand(1, 3000, 2, 64) + 0.1
    q = torch.full((1, 1, 2, 64), -torch.inf)
    for backend in ("cpu", "reference"):
        out, lse = flashtile.attention(q, k, k, return_lse=True, backend=backend)
        assert not out.any() and lse.isneginf().all()
        assert not flashtile.attention_probs(q, k).any()


@pytest.mark.interpreter
@pytest.mark.parametrize("options", _WITH_TABLES, ids=str)
def test_a_score_of_minus_infinity_hides_its_key_in_interpreted_kernels(options):
    _check_scores_of_minus_infinity("triton", "cpu", torch.float32, 20, 16, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", _WITH_TABLES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "triton", "split"])
def test_a_score_of_minus_infinity_hides_its_key_on_a_gpu(backend, options):
    _check_scores_of_minus_infinity(backend, "cuda", torch.bfloat16, 100, 64, **options)
