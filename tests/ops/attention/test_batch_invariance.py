"""The batch-invariant mode: the bits of a sequence in any company, and what the mode refuses.

The environment variable FLASHTILE_DRAWS sets how many sequences are drawn in each test.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flashtile
from flashtile._backends import clear_plans, devices
from flashtile.ops.attention import repeated, select
from flashtile.ops.kv_cache.hopper import backend
from flashtile.testing import assert_same
from support.attention.company import Sequence, by_steps, differences, in_chunks, over_cache, search

if TYPE_CHECKING:
    from gluon_emulator import EmulatedHopper

_HALVES = torch.bfloat16, torch.float16
_WIDTHS = 64, 72, 128, 192, 256


def _draws(few: int) -> range:
    return range(int(os.environ.get("FLASHTILE_DRAWS", few)))


def test_bits_on_a_cpu() -> None:
    compared, differ = search(_draws(6), 0, "cpu", (*_HALVES, torch.float32), 200, (16, 64, 72, 256))
    assert compared["pages"] and not differ, "\n".join(differ)


def test_bits_differ_without_the_mode() -> None:
    assert search(range(6), 0, "cpu", (torch.float32,), 200, (16, 64), invariant=False)[1]


_needs_emulator = pytest.mark.skipif(
    bool(devices.triton_missing()) or devices.interpreting(), reason="needs Triton, not interpreting"
)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedHopper]:
    """Calls of "hopper" run in the emulator, and those over caches too."""
    from flashtile.ops.attention.hopper import cache_launch
    from flashtile.ops.kv_cache import operator
    from flashtile.ops.kv_cache.triton import launch
    from gluon_emulator import EmulatedHopper
    from gluon_emulator.serving import served_by
    from support.attention.backend_calls import HOPPER

    repeated.forget_calls()
    clear_plans()
    machine = EmulatedHopper(multiprocessors=3, seed=0)
    monkeypatch.setattr(select, "implementation", served_by(machine))
    over_cache = SimpleNamespace(forward=functools.partial(machine.call, launch.forward))
    monkeypatch.setattr(operator._BACKENDS, "implementation", lambda *_: over_cache)
    facts = HOPPER._replace(multiprocessors=3)
    monkeypatch.setattr(machine.modules["cache_launch"], "current_machine", lambda _: facts)
    monkeypatch.setattr(cache_launch, "plan_chunks", machine.modules["cache_launch"].plan_chunks)
    monkeypatch.setattr(machine.modules["cache_launch"], "multiprocessors", lambda _: 12)
    monkeypatch.setattr(cache_launch, "plan_steps", machine.modules["cache_launch"].plan_steps)
    monkeypatch.setattr(launch, "device_facts", lambda _: HOPPER.facts)
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 12)
    yield machine
    clear_plans()


@_needs_emulator
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("seed", [4, 109, 248], ids=["soft cap", "window with a left end", "one tile of keys"])
def test_bits_of_the_hopper_kernels_in_the_emulator(seed: int) -> None:
    compared, differ = search(_draws(1), seed, "cpu", _HALVES, 150, _WIDTHS, "hopper")
    assert compared["pages"] and not differ, "\n".join(differ)


@_needs_emulator
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", _HALVES, ids=str)
def test_tiles_hidden_from_a_row_leave_no_trace(dtype: torch.dtype) -> None:
    """The second chunk meets the second tile of keys first, of which some of its rows see nothing."""
    inputs = (torch.randn(136, 1, 72, dtype=dtype) for _ in range(4))
    sequence = Sequence(*inputs, {"causal": True, "backend": "hopper", "batch_invariant": True})
    whole, parts = in_chunks(sequence, [136], {}), in_chunks(sequence, [100, 136], {})
    assert not differences([("whole", whole), ("parts", parts)])


_STEPS: dict[str, tuple[torch.dtype, int, int, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, 72, 72, {"softcap": 9.0}),
    "fp16": (torch.float16, 192, 64, {}),
    "rising": (torch.bfloat16, 64, 128, {"scale": 8.0}),
    "rising fp16": (torch.float16, 64, 64, {"scale": 8.0}),
    "sinks": (torch.bfloat16, 64, 64, {"sinks": torch.ones(4)}),
}


@_needs_emulator
@pytest.mark.parametrize(
    "name, few",
    [("bf16", True), ("rising", True), ("rising fp16", True), ("fp16", False), ("rising", False), ("sinks", True)],
)
def test_steps_of_one_query(name: str, few: bool, emulated: EmulatedHopper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread blocks share the keys of few sequences; the heads of a group are rows of one tile."""
    monkeypatch.setattr(backend, "_FEW_PAIRS", 0.5 if few else 0)
    dtype, head_dim, head_dim_v, features = _STEPS[name]
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(264, heads, width, dtype=dtype)
        for heads, width in ((4, head_dim), (1, head_dim), (1, head_dim_v), (4, head_dim_v))
    )
    k[:100] *= 5  # references rise late, if scores are large
    sequence = Sequence(q, k, v, dout, {"causal": True, "backend": "hopper", "batch_invariant": True, **features})
    other = Sequence(q[:70], k[:70], v[:70], dout[:70], sequence.arguments)
    results = [
        ("whole", in_chunks(sequence, [264], {})),
        ("steps", by_steps(sequence, [other], 1, 2, {})),
        ("packed", over_cache(sequence, [other], 0, [262, 263, 264], 16, sequence.arguments)),
    ]
    assert not differences(results)
    shared = {"step_weights_kernel", "step_values_kernel"} & set(emulated.launched)
    assert len(shared) == (2 if few and "sinks" not in features else 0)


@_needs_emulator
@pytest.mark.parametrize("page", [0, 16, 1])
@pytest.mark.parametrize("queries", [[1, 66, 0, 1, 1], [1, 0, 0, 1, 0]], ids=["mixed", "tokens"])
def test_packed_tokens(
    page: int, queries: list[int], emulated: EmulatedHopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads of a group are rows of one tile for each packed sequence that has one query."""
    monkeypatch.setattr(backend, "_FEW_PAIRS", 0)
    torch.manual_seed(0)
    dtype, (heads, heads_kv, width), capacity = torch.bfloat16, (4, 2, 64), 320
    lengths = [300, 70, 0, 129, 5]
    total = sum(queries) + 3
    q = torch.randn(total, heads, width, dtype=dtype)
    k, v = (torch.randn(len(lengths), capacity, heads_kv, width, dtype=dtype) for _ in range(2))
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    arguments: dict[str, Any] = {"causal": True, "return_lse": True, "batch_invariant": True}
    caches: dict[str, Any] = {"k_cache": k, "v_cache": v}
    if page:
        table = torch.randperm(len(lengths) * capacity // page).view(len(lengths), -1).int()
        shuffled = {name: torch.empty(table.numel(), page, heads_kv, width, dtype=dtype) for name in caches}
        for name, rows in caches.items():
            shuffled[name][table.flatten()] = rows.view(table.numel(), page, heads_kv, width)
        caches = {**shuffled, "block_table": table}
    out, lse = flashtile.attention_with_kv_cache(
        q, **caches, cu_seqlens_q=starts, cache_lengths=torch.tensor(lengths, dtype=torch.int32),
        max_seqlen_q=max(queries), backend="triton", **arguments,
    )  # fmt: skip
    assert emulated.launched == ["attention_forward_kernel"] * (1 + (max(queries) > 1))
    for number, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        if begin == end:
            continue
        own = q[None, begin:end], *(rows[number, None, : lengths[number]] for rows in (k, v))
        expected, expected_lse = flashtile.attention(*own, backend="hopper", **arguments)
        assert torch.equal(out[begin:end], expected[0]) and torch.equal(lse[:, begin:end], expected_lse[0])
    assert (out[-3:] == 0).all() and (lse[:, -3:] == -math.inf).all()


@pytest.mark.interpreter
def test_bits_of_the_portable_kernels_in_the_interpreter() -> None:
    compared, differ = search(_draws(1), 12, "cpu", (torch.float16, torch.float32), 40, (16,), "triton")
    assert compared["pages"] and not differ, "\n".join(differ)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_bits_on_a_gpu(part: int) -> None:
    draws = [number for number in _draws(40) if number // 10 % 4 == part]
    compared, differ = search(draws, 0, "cuda", (*_HALVES, torch.float32), 700, _WIDTHS, alike=10)
    assert compared["pages"] and not differ, "\n".join(differ)


_COMPANIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda x: flashtile.rms_norm(x, torch.ones_like(x[0])),
    "layer_norm": lambda x: flashtile.layer_norm(x, torch.ones_like(x[0]), torch.ones_like(x[0])),
    "cross_entropy": lambda x: flashtile.cross_entropy(x, (x[:, 0].abs() * 9).long(), reduction="none")[:, None],
    "softmax": lambda x: flashtile.scaled_masked_softmax(x[:, None, None], None, 0.5)[:, 0, 0],
    "rotary": lambda x: flashtile.apply_rotary(x[:, None, None], *flashtile.rotary_tables(1, 200, device=x.device))[
        :, 0, 0
    ],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", _COMPANIONS)
def test_rows_of_companions_decide_alone(name: str, device: str) -> None:
    """Out and the gradient, without a mode."""

    def results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        out = _COMPANIONS[name](x)
        return out, torch.autograd.grad(out, x, torch.ones_like(out).cumsum(-1))[0]

    x = torch.randn(70, 200).to(device)
    whole = results(x)
    for rows in (slice(0, 1), slice(3, 10), slice(5, 70)):
        assert all(torch.equal(one[rows], other) for one, other in zip(whole, results(x[rows])))


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_rows_of_odd_logits_decide_alone_in_the_mode(device: str) -> None:
    """Rows of 61 columns begin at any place within 16 bytes."""
    logits = (torch.randn(9, 61) * 4).to(device).requires_grad_()
    labels = torch.arange(9, device=device)

    def results(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        losses = flashtile.cross_entropy(logits[rows], labels[rows], reduction="none", backend="triton")
        return losses, torch.autograd.grad(losses.sum(), logits)[0][rows]

    with flashtile.batch_invariant_mode():
        whole = results(slice(0, 9))
        for row in range(9):
            one = results(slice(row, row + 1))
            assert all(torch.equal(tensor[row : row + 1], other) for tensor, other in zip(whole, one))
            copied = flashtile.cross_entropy(logits[row : row + 1].clone(), labels[row : row + 1], backend="triton")
            assert torch.equal(copied, whole[0][row])


def _inputs(rows: int = 70, heads: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    sizes = (heads, heads // 2, heads // 2)
    return [torch.randn(2, rows, of, 16, dtype=dtype, requires_grad=True) for of in sizes]


_FEATURES: dict[str, dict[str, Any]] = {
    "causal, top left": {"causal": True, "align": "top_left"},
    "window": {"window": (30, 10)},
    "bias": {"bias": torch.randn(1, 4, 70, 70)},
    "mask": {"mask": torch.rand(2, 1, 70, 70) > 0.5, "causal": True},
    "block mask": {"block_mask": flashtile.BlockMask.from_dense(torch.rand(1, 4, 70, 70) > 0.995, (16, 64))},
    "function": {"score_mod": lambda score, b, h, i, j: score * 0.5 + (i - j), "key_lengths": torch.tensor([50, 0])},
}


@pytest.mark.parametrize("arguments", _FEATURES.values(), ids=_FEATURES)
def test_the_mode_only_rounds_differently(arguments: dict[str, Any]) -> None:
    inputs, results = _inputs(), []
    for invariant in (True, False):
        out = flashtile.attention(*inputs, **arguments, backend="cpu", batch_invariant=invariant)
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out).cumsum(1))])
    for one, other in zip(*results):
        assert_same(one, other)


def test_context_decorator_and_argument_say_the_same() -> None:
    q, k, v = (tensor.detach() for tensor in _inputs())
    expected = flashtile.attention(q, k, v, causal=True, batch_invariant=True)
    with flashtile.batch_invariant_mode():
        within = flashtile.attention(q, k, v, causal=True)
        with flashtile.batch_invariant_mode(enabled=False):
            outside = flashtile.attention(q, k, v, causal=True)
    decorated = flashtile.batch_invariant_mode()(flashtile.attention)(q, k, v, causal=True)
    module = flashtile.modules.FlashSelfAttention(causal=True, batch_invariant=True)
    assert torch.equal(within, expected) and torch.equal(decorated, expected) and not torch.equal(outside, expected)
    assert module.options(q)["batch_invariant"]
    with pytest.raises(TypeError, match="enabled: expected True or False"), flashtile.batch_invariant_mode(1):  # type: ignore[arg-type]
        pass


def test_refused_calls() -> None:
    q, k, v = (tensor.detach() for tensor in _inputs())
    for match, arguments in {
        "expected dropout_p = 0": {"dropout_p": 0.5},
        "'reference' cannot serve": {"backend": "reference"},
        "batch_invariant: expected True or False": {"batch_invariant": 1},
    }.items():
        with pytest.raises((ValueError, TypeError), match=match):
            flashtile.attention(q, k, v, **{"batch_invariant": True, **arguments})
    eight = [tensor.to(torch.float8_e4m3fn) for tensor in (q, k, v)]
    with pytest.raises(ValueError, match="expected inputs of 16 bits or more"):
        flashtile.attention(*eight, batch_invariant=True)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    for match, arguments in {
        "num_splits: expected None or 1": {"num_splits": 4},
        "shared_rows: expected None": {"shared_rows": 2},
        "cache_left_padding: expected None": {"cache_left_padding": lengths},
    }.items():
        with pytest.raises(ValueError, match=match):
            flashtile.attention_with_kv_cache(q, k, v, cache_lengths=lengths, batch_invariant=True, **arguments)
    with pytest.raises(ValueError, match="expected caches in q's dtype"):
        flashtile.attention_with_kv_cache(q, *eight[1:], cache_lengths=lengths, batch_invariant=True)
