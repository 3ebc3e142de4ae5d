"""The numbers of tiles of packed calls in the Hopper forward, where sequences are about equally long."""

import pytest
import torch

import flashtile
from flashtile._backends import devices
from flashtile.ops.attention import checks, repeated, select
from flashtile.testing import assert_close
from gluon_emulator import EmulatedHopper
from gluon_emulator.serving import served_by

pytestmark = pytest.mark.skipif(
    bool(devices.triton_missing()) or devices.interpreting(), reason="needs Triton, not interpreting"
)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "lengths, longest, past, by_sequence",
    [
        pytest.param((128, 128, 128), 128, 0, True, id="equal"),
        pytest.param((128, 70, 128, 0, 128), 128, 0, True, id="shorter"),
        pytest.param((200, 60, 3), 128, 90, True, id="longer than the caller said"),
        pytest.param((192, 250, 100), 192, 0, True, id="a tile more than the caller said"),
        pytest.param((300, 20, 20), 300, 0, False, id="uneven"),
        pytest.param((128, 128), 128, 200, False, id="many rows past the last"),
    ],
)
def test_sequences_of_about_the_same_length_are_numbered_alike(
    monkeypatch, lengths, longest, past, by_sequence, causal
):
    emulated = EmulatedHopper(multiprocessors=3, seed=1)
    launch = emulated.modules["launch"]
    told, decide = [], launch._numbered_by_sequence
    monkeypatch.setattr(launch, "_numbered_by_sequence", lambda *of: told.append(decide(*of)) or told[-1])
    monkeypatch.setattr(select, "implementation", served_by(emulated))
    monkeypatch.setattr(checks, "check_cu_seqlens_values", lambda *of: None)  # as on a GPU, where nobody reads them
    repeated.forget_calls()
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, sum(lengths) + past, 2, 64, generator=generator).to(torch.bfloat16)
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32)
    sizes = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    out = flashtile.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, **sizes, causal=causal, backend="hopper")
    assert told == [by_sequence]
    for begin, length in zip(cu_seqlens.tolist(), lengths):
        rows = slice(begin, begin + length)
        oracle, eager = (
            flashtile.attention(*(of[None, rows].to(dtype) for of in (q, k, v)), causal=causal, backend="reference")[0]
            for dtype in (torch.float64, torch.bfloat16)
        )
        assert_close("out", out[rows], oracle, eager)
    assert not out[sum(lengths) :].any()
