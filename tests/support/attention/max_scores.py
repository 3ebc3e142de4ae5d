"""The check of `return_max_scores`: the largest scores against float64, beside the other results."""

from __future__ import annotations

import torch

import flashtile
from flashtile.testing import AttentionCase, assert_close, make_inputs
from flashtile.testing.cases import Inputs


def call(case: AttentionCase, inputs: Inputs, backend: str, dtype: torch.dtype, **returned: bool):
    """A forward of a case in `dtype`."""
    tensors = {
        name: tensor.to(dtype) if dtype is torch.float64 and name in ("bias", "alibi_slopes", "sinks") else tensor
        for name, tensor in inputs.tensors.items()
    }
    q, k, v = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v))
    function = flashtile.attention_varlen if case.packed else flashtile.attention
    return function(q, k, v, **tensors, **case.keywords(), backend=backend, **returned)


def check(case: AttentionCase, backend: str, device: str = "cpu") -> None:
    """Holds the largest scores of a case to the tolerance policy, and out and lse to those of other calls."""
    inputs = make_inputs(case, device)
    both = {"return_lse": True, "return_max_scores": True}
    out, lse, found = call(case, inputs, backend, case.dtype, **both)
    oracle, eager = (call(case, inputs, "reference", dtype, **both)[2] for dtype in (torch.float64, case.dtype))
    assert found.shape == lse.shape and found.dtype is lse.dtype and not found.requires_grad
    assert_close("max_scores", found, oracle, eager)
    # The other results are those of a call that does not ask.
    assert_close("out", out, *(call(case, inputs, "reference", dtype) for dtype in (torch.float64, case.dtype)))
    assert bool((lse >= found - 1e-5).all())
