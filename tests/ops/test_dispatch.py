"""How operators present themselves to PyTorch's compiler."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import lowering
from torch._subclasses import FakeTensorMode

import flashtile
from flashtile.ops.common import dispatch


@pytest.mark.parametrize("writes_graphs_out", [False, True])
def test_inductor_makes_lowerings_without_writing_the_graph_out(
    writes_graphs_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named operator gets a lowering without the log that takes exponential time in deep models."""
    monkeypatch.setattr(lowering, "FALLBACK_ALLOW_LIST", type(lowering.FALLBACK_ALLOW_LIST)())
    monkeypatch.setattr(dispatch, "_WRITES_GRAPHS_OUT", writes_graphs_out)
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 16)
        flashtile.attention(q, q, q)
        flashtile.layer_norm(torch.empty(4, 8), torch.empty(8), torch.empty(8))
    named = {"flashtile::attention_forward", "flashtile::layer_norm_forward"} if writes_graphs_out else set()
    assert set(lowering.FALLBACK_ALLOW_LIST) == named
