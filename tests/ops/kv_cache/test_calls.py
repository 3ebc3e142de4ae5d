"""Steps like an earlier one, which are neither checked nor decided anew: the same results, and the same errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile._backends import clear_plans
from flashtile._backends.devices import interpreting, triton_missing
from flashtile.ops.kv_cache import operator, repeated
from flashtile.testing import assert_same
from support.attention.kv_cache_cases import CacheCase, check
from support.running.each_case import each_case

STEP = CacheCase(seq_q=1, capacity=300, lengths=260, heads=4, head_dim=16)


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many steps were served with all checks."""
    served: list[object] = []
    forward = operator._forward

    def counted(call, spec, backend):
        served.append(call)
        return forward(call, spec, backend)

    monkeypatch.setattr(operator, "_forward", counted)
    return lambda: len(served)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("lengths", [None, 1, 7, 260, (260, 260)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_repeated_steps(lengths, heads_kv: int, dtype: torch.dtype, causal: bool, general) -> None:
    case = replace(STEP, lengths=lengths, heads_kv=heads_kv, dtype=dtype, arguments={"causal": causal})
    check(case, "cpu")
    before = general()
    check(case, "cpu")
    # The check also runs the reference, twice. Fewer keys than a vector holds may need a second look.
    assert general() == before + 2


def _step(rows: int = 40, **options):
    torch.manual_seed(0)
    q, *caches = torch.randn(2, 1, 4, 16), torch.randn(2, rows, 2, 16), torch.randn(2, rows, 2, 16)
    return lambda **more: flashtile.attention_with_kv_cache(q, *caches, **options, **more)


def test_each_step_has_its_own_length(general) -> None:
    step = _step(300)
    lengths = torch.tensor([200, 200])
    for length in (200, 201, 300, 129):
        lengths.fill_(length)
        actual = step(cache_lengths=lengths, return_lse=True)
        assert all(map(torch.equal, actual, step(cache_lengths=length, return_lse=True)))
        repeated.forget_calls()
        assert all(map(torch.equal, actual, step(cache_lengths=length, return_lse=True)))
    assert general() == 9  # a tensor and a number are different calls


@each_case("wrong, error", [
    ({"cache_lengths": 41}, ValueError),
    ({"cache_lengths": -1}, ValueError),
    ({"cache_lengths": True}, TypeError),
    ({"cache_lengths": torch.tensor([40, 41])}, ValueError),
    ({"cache_lengths": torch.tensor([41, 41])}, ValueError),
    ({"cache_lengths": torch.tensor([-1, -1])}, ValueError),
    ({"cache_lengths": torch.tensor([40])}, ValueError),
    ({"cache_lengths": torch.tensor([40.0, 40.0])}, TypeError),
    ({"causal": 1}, TypeError),
    ({"return_lse": 0}, TypeError),
    ({"rotary_interleaved": 0}, TypeError),
    ({"scale": float("nan")}, ValueError),
    ({"scale": "1"}, TypeError),
    ({"backend": "cuda"}, ValueError),
    ({"num_splits": 0}, ValueError),
    ({"max_seqlen_q": 1}, ValueError),
    ({"cu_seqlens_new": torch.tensor([0, 1, 2])}, ValueError),
])  # fmt: skip
def test_a_wrong_argument_is_refused_in_a_later_step_too(wrong: dict, error: type[Exception]) -> None:
    step = _step()
    step(cache_lengths=40)
    with pytest.raises(error):
        step(**{"cache_lengths": 40, **wrong})


def test_sequences_of_different_lengths_and_empty_ones_are_looked_at(general) -> None:
    step = _step()
    step()
    for lengths in (torch.tensor([40, 3]), torch.tensor([0, 0]), 0):
        out, lse = step(cache_lengths=lengths, return_lse=True)
        expected, expected_lse = step(cache_lengths=lengths, return_lse=True, backend="reference")
        assert_same(out, expected)
        assert_same(lse, expected_lse)
    assert general() == 7


def test_other_layouts_are_looked_at(general) -> None:
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 300, 2, 16)
    wider = torch.randn(2, 300, 2, 32)[..., :16].copy_(cache)
    actual = [flashtile.attention_with_kv_cache(q, keys, keys + 0) for keys in (cache, cache, wider, cache)]
    assert general() == 2
    assert torch.equal(actual[0], actual[1])
    assert_same(actual[0], actual[2])
    assert torch.equal(actual[0], actual[3])
    q.requires_grad_()
    with torch.no_grad():
        flashtile.attention_with_kv_cache(q, cache, cache)
    with pytest.raises(ValueError, match="requires_grad"):
        flashtile.attention_with_kv_cache(q, cache, cache)


@each_case("value", [float("nan"), float("inf")])
@each_case("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_inf(value: float, dtype: torch.dtype) -> None:
    q, k_cache = torch.randn(1, 1, 2, 16, dtype=dtype), torch.randn(1, 30, 2, 16, dtype=dtype)
    v_cache = k_cache.clone()
    flashtile.attention_with_kv_cache(q, k_cache, v_cache)
    k_cache[0, 4, 1, 3] = value
    actual = flashtile.attention_with_kv_cache(q, k_cache, v_cache)
    expected = flashtile.attention_with_kv_cache(q, k_cache, v_cache, backend="reference")
    assert torch.equal(actual.isfinite(), expected.isfinite())


class _Subclass(torch.Tensor):
    pass


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch, general) -> Callable[[dict], object]:
    """What the code for GPUs launches for the arguments of a call, or its error."""
    from flashtile._backends import devices
    from flashtile._backends import launch as backend_launch
    from flashtile.ops.common.split_keys import plan as split_plan
    from flashtile.ops.kv_cache.triton import launch

    launched: list[tuple] = []

    def make_launch(source, programs: int, scalars: tuple, _) -> Callable[..., None]:
        return lambda *given: launched.append((source, programs, scalars, given))

    monkeypatch.setattr(backend_launch, "make_launch", make_launch)
    monkeypatch.setattr(backend_launch, "_load_with_others", lambda plan: None)
    monkeypatch.setattr(operator._BACKENDS, "implementation", lambda *_: launch)
    for module in (launch, split_plan):
        monkeypatch.setattr(module, "device_facts", lambda _: devices.KNOWN_DEVICES["sm_80"])
        monkeypatch.setattr(module, "multiprocessors", lambda _: 108)
    clear_plans()

    def found(arguments: dict) -> object:
        launched.clear()
        tensors = {name: each for name, each in arguments.items() if isinstance(each, torch.Tensor)}
        versions = {name: each._version for name, each in tensors.items() if not each.is_inference()}
        try:
            results = flashtile.attention_with_kv_cache(**arguments)
        except (TypeError, ValueError) as error:
            return type(error), str(error)
        results = results if isinstance(results, tuple) else (results,)
        addresses = {each.data_ptr(): name for name, each in tensors.items()}
        kernels = [
            (source, programs, scalars, [addresses.get(one, one if one < 2**20 else "made") for one in given])
            for source, programs, scalars, given in launched
        ]
        written = [name for name, version in versions.items() if version != tensors[name]._version]
        return kernels, written, [(each.shape, each.dtype) for each in results]

    return found


def _arguments(kind: str) -> dict:
    """Those of a call like all others of its kind."""

    def tensor(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    given = {"q": tensor(2, 1, 4, 16), "k_cache": tensor(2, 64, 2, 16), "v_cache": tensor(2, 64, 2, 16)}
    given["cache_lengths"] = torch.tensor([9, 7], dtype=torch.int32)
    if "pages" in kind:
        given |= {name: given[name].view(8, 16, 2, 16) for name in ("k_cache", "v_cache")}
        given["block_table"] = torch.arange(8, dtype=torch.int32).view(2, 4)
    if "append" in kind:
        given |= {"k": tensor(2, 1, 2, 16), "v": tensor(2, 1, 2, 16)}
    if "rotary" in kind:
        given |= {"rotary_cos": tensor(64, 8), "rotary_sin": tensor(64, 8)}
    if "packed" in kind:
        given |= {name: given[name].flatten(0, 1) for name in ("q", "k", "v")}
        given |= {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32), "max_seqlen_q": 1}
    if "int8" in kind:
        given |= {name: given[name].to(torch.int8) for name in ("k_cache", "v_cache")}
        given |= {name: torch.ones(2, 64, 2) for name in ("descale_k", "descale_v")}
    if "number" in kind:
        given["cache_lengths"] = 9
    if "tree" in kind:
        given |= {"q": tensor(2, 3, 4, 16), "tree_mask": torch.ones(3, 3).tril().bool()}
    return given


def _off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same at an address that is a multiple of an element only."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def _changes(given: dict) -> dict[str, dict]:
    """By what is different, arguments that differ from these in one thing."""
    changes: dict[str, dict] = {}
    for name, each in given.items():
        if not isinstance(each, torch.Tensor):
            continue
        others = {
            "address": _off_by_one(each), "strides": each.new_zeros(*each.shape[:-1], 48)[..., : each.shape[-1]],
            "order": each.transpose(0, -2).contiguous().transpose(0, -2) if each.dim() > 1 else each[::2],
            "size": each[:1], "last size": each[..., :-1], "rank": each[None], "type": each.as_subclass(_Subclass),
            "parameter": torch.nn.Parameter(each, requires_grad=False), "number": 3, "list": each.tolist(),
            "wide": each.to(torch.int64 if each.dtype is torch.int32 else torch.float32), "bfloat16": each.bfloat16(),
            "columns apart": torch.zeros(*each.shape, 2, dtype=each.dtype)[..., 0], "none": None,
        }  # fmt: skip
        if each.is_floating_point():
            others |= {"gradient": each.clone().requires_grad_(), "negative": torch._neg_view(each)}
        with torch.inference_mode():
            others["inference"] = each.clone()
        changes |= {f"{name}: {what}": {name: other} for what, other in others.items()}
    scalars = {
        "causal": (False, 1), "scale": (0.25, 1, True, float("nan"), -0.5), "softcap": (3.0, 0.0, False),
        "num_splits": (1, 2, 129),
        "window": ((5, None), (5, 0), (True, 0), [5, 0], (5.0, 0), (-1, 0), 5), "rotary_interleaved": (True, 0),
        "return_lse": (True, 0), "batch_invariant": (True, 1), "backend": ("triton", "cuda"), "shared_rows": (2,),
        "max_seqlen_q": (1, 2, 3, 64, 0, True, 1.0, -1), "cache_lengths": (9, 64, 65, -1, True, None, 9.0),
    }  # fmt: skip
    changes |= {f"{name}: {value}": {name: value} for name, values in scalars.items() for value in values}
    indices = torch.zeros(2, dtype=torch.int32)
    slopes = torch.ones(4)
    caches = torch.zeros(2, *given["k_cache"].shape, dtype=given["k_cache"].dtype)
    interleaved, shifted = caches.transpose(0, 1).contiguous().unbind(1), caches.flatten()
    shifted = shifted[8 : 8 + given["k_cache"].numel()].view(given["k_cache"].shape)
    return changes | {
        "slopes": {"alibi_slopes": slopes}, "slopes of sequences": {"alibi_slopes": slopes.expand(2, 4)},
        "slopes in 16 bits": {"alibi_slopes": slopes.half()}, "sinks": {"sinks": slopes},
        "sinks in 16 bits": {"sinks": slopes.half()},
        "entries": {"cache_batch_indices": torch.arange(2).int()},
        "left": {"cache_left_padding": indices}, "starts": {"cu_seqlens_q": torch.arange(3).int()},
        "new starts": {"cu_seqlens_new": torch.arange(3).int()}, "factors": {"descale_k": torch.ones(())},
        "one cache": {"v_cache": given["k_cache"]}, "two in one": dict(zip(("k_cache", "v_cache"), caches)),
        "interleaved": dict(zip(("k_cache", "v_cache"), interleaved)),
        "overlapping": {"k_cache": caches[0], "v_cache": shifted}, "k twice": {"v": given.get("k")},
        "tree": {"tree_mask": torch.ones(1, 1, dtype=torch.bool)},
    }  # fmt: skip


@pytest.mark.skipif(bool(triton_missing()) or interpreting(), reason="needs Triton, not interpreting")
@pytest.mark.parametrize("kind", ["append rotary pages packed", "append rotary number", "append int8", "pages tree"])
def test_a_call_that_differs_in_one_thing_is_another_call(kind: str, outcome, general) -> None:
    """Between two calls of one kind, and without them, a call does the same."""
    for what, change in _changes(_arguments(kind)).items():
        repeated.forget_calls()
        expected = outcome(_arguments(kind))
        before = general()
        assert outcome(_arguments(kind)) == expected and general() == before
        changed = {**_arguments(kind), **change}
        found = [outcome(changed), outcome(changed)]
        assert outcome(_arguments(kind)) == expected, what
        repeated.forget_calls()
        assert [outcome(changed)] * 2 == found, f"{kind}, {what}"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["pages", "append number", "append rotary pages packed", "append int8", "tree"])
def test_repeated_calls_on_a_gpu(kind: str, general) -> None:
    """Each with other numbers, lengths and addresses."""
    for step in range(3):
        torch.manual_seed(step)
        given = _arguments(kind)
        for name in given.keys() & {"q", "k", "v", "k_cache", "v_cache", "rotary_cos", "rotary_sin"}:
            given[name] = torch.randn(given[name].shape).to(given[name].dtype)
        given["cache_lengths"] += 5 * step
        given = {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in given.items()}
        before = general()
        out = flashtile.attention_with_kv_cache(**{**given, "k_cache": given["k_cache"].clone()})
        assert general() == before + (not step)
        assert_same(out, flashtile.attention_with_kv_cache(**given, backend="reference"))
