"""What a launch of the Hopper kernels passes, for whatever calls they serve, without a GPU: each argument fits its
parameter, and descriptors are those of the tensors and legal by NVIDIA's rules (CUDA driver API,
cuTensorMapEncodeTiled)."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import namedtuple
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.compilation import needs_triton  # noqa: F401

# isort: split
from flashtile import patterns
from flashtile._backends import alignment, clear_plans, tma
from flashtile._backends import launch as backend_launch
from flashtile._backends.launch import KernelSource
from flashtile.ops.attention.call import Phase
from flashtile.ops.attention.hopper import backward_configs, cache_launch, forward, launch, unsupported_reason
from flashtile.ops.attention.hopper.separate_configs import STATISTIC_ROWS, is_wide_float32
from flashtile.ops.attention.hopper.tuned_rows import forward_config
from flashtile.ops.attention.spec import FP8, AttentionSpec, BackwardInputs, Gradients, SideInputs, Wanted
from support.attention.backend_calls import HOPPER, hopper_call

_RANGES = {"i32": range(-(2**31), 2**31), "i64": range(-(2**63), 2**63)}


class _Descriptor(NamedTuple):
    dtype: torch.dtype
    box: tuple[int, ...]
    layout: tma.Layout
    swizzled: bool
    address: int

    def check(self) -> None:
        itemsize, (shape, strides, _) = self.dtype.itemsize, self.layout
        assert len(self.box) == len(shape) == len(strides) <= 5
        assert self.address % 16 == 0
        assert all(0 < size < 2**31 for size in shape)
        assert strides[-1] == 1
        assert all(stride * itemsize % 16 == 0 and 0 <= stride * itemsize < 2**40 for stride in strides[:-1])
        swizzle = tma.swizzle_bytes(self.dtype, self.box, self.swizzled)
        assert swizzle in (0, 32, 64, 128)
        message = (*self.box[:-1], swizzle // itemsize if swizzle else self.box[-1])
        assert all(0 < size <= 256 for size in message) and message[-1] * itemsize % 16 == 0

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it leads to the first and to the last row and head of a tensor."""
        rows, heads, _ = tensor.shape[-3:]
        for row, head in itertools.product({0, rows - 1}, {0, heads - 1}):
            element = tensor[..., row, head, 0]
            places: tuple[int, ...] = (element.shape[0] - 1, row, head, 0) if tensor.dim() == 4 else (
                tma.PACKED_ROWS, rows, tma.PACKED_ROWS - rows + row, head, 0
            )  # fmt: skip
            offset = sum(map(int.__mul__, places, self.layout.strides)) * tensor.itemsize
            last = element[-1] if tensor.dim() == 4 else element
            if (self.address + offset) % 2**64 != last.data_ptr():
                return False
        return self.dtype is tensor.dtype


class _Launched(NamedTuple):
    programs: int
    arguments: dict[str, Any]


@pytest.fixture(scope="module")
def launched():
    """Arguments of launches by the name of the kernel and of the parameter; each is checked against its parameter."""
    found: dict[str, _Launched] = {}

    def make_launch(source: KernelSource, programs: int, scalars: tuple[Any, ...], device: torch.device) -> Any:
        names = source.names
        assert set(source.constants) >= set(source.constant_names)

        def record(*given: Any) -> None:
            assert 0 < programs < 2**31
            rest, by_name = [*given, *scalars], {}
            of_given = len(names) - len(scalars)
            for place, (name, of, multiple) in enumerate(zip(names, source.types, source.multiples, strict=True)):
                by_name[name] = value = None if of == "constexpr" and place < of_given else rest.pop(0)
                if of == "constexpr" or (name == "counter_ptr" and value is None):
                    continue
                if of.startswith("tensordesc"):
                    assert of == tma.descriptor_type(*value[:2], value.swizzled)
                    sizes = (*value.layout.shape, *value.layout.strides)
                    assert tuple(rest.pop(0) for _ in sizes) == sizes
                elif of == "fp32":
                    assert isinstance(value, float) and abs(value) < 2.0**127
                else:
                    assert value in _RANGES["i64" if of.startswith("*") else of] and value % multiple == 0, name
            assert not rest
            found[source.function.__name__] = _Launched(programs, by_name)

        return record

    def described(*given: Any) -> tuple:
        descriptor = _Descriptor(*given)
        descriptor.check()
        return descriptor, *descriptor.layout.shape, *descriptor.layout.strides

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend_launch, "make_launch", make_launch)
        patched.setattr("flashtile.ops.attention.call.current_machine", lambda device: HOPPER)
        zeros = torch.zeros(2, dtype=torch.int32)
        patched.setattr(launch, "tile_counter", lambda device: zeros)
        patched.setattr(tma, "_encoded", described)
        patched.setattr(tma, "_described", described)
        clear_plans()
        yield found
        clear_plans()


@st.composite
def _strided(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Padded, in another order, expanded; and of dimensions of one any strides."""
    unit = 16 // dtype.itemsize
    strides, elements = [0] * (len(shape) - 1), -(-shape[-1] // unit) * unit
    for index in draw(st.permutations(range(len(strides)))):
        strides[index] = draw(st.sampled_from([elements, elements + unit, 0]))
        elements = max(elements, shape[index] * strides[index])
        if shape[index] == 1:
            strides[index] = draw(st.sampled_from([strides[index], 1, 7, 2**39 + 1]))
    storage = torch.zeros(dtype.itemsize * (elements + 2 * unit), dtype=torch.uint8).view(dtype)
    start = -storage.data_ptr() % 16 // dtype.itemsize + draw(st.sampled_from([0, unit]))
    return storage.as_strided(shape, (*strides, 1), start)


_DTYPES = (torch.float16, torch.bfloat16, FP8)


class _Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    side: SideInputs
    spec: AttentionSpec


@st.composite
def _calls(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], wide: bool = False, plain: bool = False) -> _Call:
    """`wide`: heads of q or of v have more than 256 columns. `plain`: no tensor beside q, k and v."""
    dtype, packed = draw(st.sampled_from(dtypes)), not plain and draw(st.booleans())
    head_dim, head_dim_v = draw(st.integers(1, 256)), 8 * draw(st.integers(1, 32))
    if wide:
        more, more_v = draw(st.sampled_from([(256, 0), (0, 256), (256, 256)]))
        head_dim, head_dim_v = head_dim + more, head_dim_v + more_v
    heads_kv, group = draw(st.sampled_from([(1, 1), (1, 4), (3, 1), (2, 3)]))
    batch, seq_q, seq_k = (draw(st.sampled_from(sizes)) for sizes in ((1, 3), (1, 64, 130), (1, 128, 300)))
    outer = () if packed else (batch,)
    heads = heads_kv * group
    q, k, v, dout = (
        draw(_strided((*outer, *shape), dtype))
        for shape in (
            (seq_q, heads, head_dim), (seq_k, heads_kv, head_dim), (seq_k, heads_kv, head_dim_v),
            (seq_q, heads, head_dim_v),
        )
    )  # fmt: skip
    optional = st.one_of(st.none(), st.sampled_from([0, 5, 2**31 - 1]))
    spec = AttentionSpec(
        draw(st.sampled_from([0.1, -0.3, 0.0, 1e-25])), draw(optional), draw(optional),
        deterministic=draw(st.booleans()), softcap=draw(st.sampled_from([0.0, 30.0])),
    )  # fmt: skip
    ones = torch.ones(heads)
    slopes, sinks = (None if plain else draw(st.sampled_from([None, ones])) for _ in range(2))
    side = SideInputs(
        torch.tensor([0, seq_q // 2, seq_q]) if packed else None,
        torch.tensor([0, seq_k, seq_k], dtype=torch.int32) if packed else None,
        seq_q,
        seq_k,
        alibi_slopes=slopes,
        sinks=sinks,
    )
    return _Call(q, k, v, dout, side, spec)


def _served(phase: Phase, call: _Call) -> bool:
    facts = hopper_call(phase, call.q, call.k, call.v, call.side, call.spec)
    assert facts.aligned
    return unsupported_reason(facts) is None


@given(st.one_of(_calls(_DTYPES), _calls(_DTYPES, plain=True)), st.booleans())
def test_a_call_passes_what_its_kernels_declare(launched, call, has_dlse):
    """Prepared launches pass the same."""
    if _served("forward", call):
        _check_forward(launched, call)
        if call.side.plain:
            _check_prepared_forward(launched, call)
    if call.q.dtype is not FP8 and _served("backward", call):
        inputs = _backward_inputs(call, has_dlse)
        _check_backward(launched, call, inputs)
        if call.side.plain:
            _check_prepared_backward(launched, call, inputs)


def _check_forward(launched: dict[str, _Launched], call: _Call) -> None:
    out, lse = launch.forward(call.q, call.k, call.v, call.side, call.spec)
    arguments = launched["attention_forward_kernel"].arguments
    described = {"k": call.k, "out": out}
    if call.q.dtype is FP8:
        widened = launched["attention_convert_kernel"].arguments
        assert widened["numbers_ptr"] == call.v.data_ptr() and widened["converted_ptr"] == arguments["v_desc"].address
        wide = torch.empty(call.v.shape, dtype=torch.bfloat16)
        assert arguments["v_desc"]._replace(address=wide.data_ptr()).is_of(wide)
        batch = call.v.shape[0] if call.v.dim() == 4 else 1
        places = {"batch": batch - 1, "row": call.v.shape[-3] - 1, "head": call.v.shape[-2] - 1}
        last = call.v[-1] if call.v.dim() == 4 else call.v
        offset = sum(place * widened[f"stride_numbers_{of}"] for of, place in places.items())
        assert call.v.data_ptr() + offset == last[-1, -1].data_ptr()
    else:
        described["v"] = call.v
    if call.spec.scale > 0:
        described["q"] = call.q
    assert all(arguments[f"{name}_desc"].is_of(tensor) for name, tensor in described.items())
    assert arguments["lse_ptr"] == lse.data_ptr()
    sizes = [arguments[f"problem.{name}"] for name in ("heads", "group", "rows_q", "rows_k")]
    assert sizes == [call.q.shape[-2], call.q.shape[-2] // call.k.shape[-2], call.q.shape[-3], call.k.shape[-3]]


@given(st.one_of(_calls((torch.float32,)), _calls((torch.float32,), wide=True)), st.booleans())
def test_a_call_of_float32_passes_what_its_kernels_declare(launched, call, has_dlse):
    call = _without_slopes(call)._replace(spec=call.spec._replace(softcap=0.0))
    if _served("forward", call):
        _check_float32_forward(launched, call)
    if _served("backward", call):
        _check_float32_backward(launched, call, has_dlse)


def _check_float32_forward(launched: dict[str, _Launched], call: _Call) -> None:
    q, k, v, _, side, spec = call
    assert launch.prepare_forward(q, k, v, side, spec) is None  # TF32 may be allowed for the next call
    out, lse = launch.forward(q, k, v, side, spec)
    arguments = launched["attention_float32_forward_kernel"].arguments
    assert arguments["out_ptr"] == out.data_ptr() and arguments["lse_ptr"] == lse.data_ptr()
    assert arguments["problem.side.sinks"] == (None if side.sinks is None else side.sinks.data_ptr())
    # The last tensor that is split is v.
    split = launched["attention_convert_kernel"].arguments
    assert split["numbers_ptr"] == v.data_ptr() and split["converted_ptr"] == arguments["v_desc"].address
    sizes = [arguments[f"problem.{name}"] for name in ("heads", "group", "rows_q", "rows_k")]
    assert sizes == [q.shape[-2], q.shape[-2] // k.shape[-2], q.shape[-3], k.shape[-3]]


def _check_prepared_forward(launched: dict[str, _Launched], call: _Call) -> None:
    q, k, v, _, side, spec = call
    expected = launched["attention_forward_kernel"]
    prepared = launch.prepare_forward(q, k, v, side, spec)
    assert (prepared is None) == (spec.scale <= 0)
    if prepared is not None:
        out, lse = prepared(q, k, v, ())
        programs, arguments = launched["attention_forward_kernel"]
        outputs = {"lse_ptr": lse.data_ptr()}
        for name in ("out_desc", "out_tail_desc"):
            if arguments[name] is not None:
                outputs[name] = expected.arguments[name]._replace(address=out.data_ptr())
        if q.dtype is FP8:  # read from a copy in 16 bits
            outputs |= {name: arguments[name] for name in ("v_desc", "v_tail_desc")}
        assert programs == expected.programs and arguments == {**expected.arguments, **outputs}


_IN_SCRATCH = ("statistics_ptr", "sums_ptr", "cleared_ptr", "turns_ptr", "counter_ptr", "masked_dout_ptr")


def _check_prepared_backward(launched: dict[str, _Launched], call: _Call, inputs: BackwardInputs) -> None:
    expected = dict(launched)
    prepared = launch.prepare_backward(inputs, call.side, call.spec, Wanted())
    assert (prepared is None) == (call.spec.scale <= 0)
    if prepared is None:
        return
    dout, dlse, q, k, v, out, lse = inputs
    dq, dk, dv, *_ = prepared(dout, dlse, (q, k, v, out, lse))
    main = launched["attention_backward_kernel"].arguments
    moved_by_tma = {"q": q, "k": k, "v": v}
    if main["problem.shares"] == 1:  # else the main kernel stores parts of these
        moved_by_tma |= {"dk": dk, "dv": dv}
    if main["dq_desc"] is not None:
        moved_by_tma["dq"] = dq
    else:
        assert launched["attention_end_kernel"].arguments["dq_ptr"] == dq.data_ptr()
    assert all(main[f"{name}_desc"].is_of(tensor) for name, tensor in moved_by_tma.items())
    moved = main["counter_ptr"] - expected["attention_backward_kernel"].arguments["counter_ptr"]
    for name, (programs, arguments) in expected.items():
        assert programs == launched[name].programs
        for parameter, value in arguments.items():
            given = launched[name].arguments[parameter]
            in_scratch = parameter in _IN_SCRATCH
            if in_scratch and value is not None:
                assert given == value + moved
            elif not isinstance(value, _Descriptor) and parameter != "dq_ptr":
                assert given == value, parameter


def _check_backward(launched: dict[str, _Launched], call: _Call, inputs: BackwardInputs) -> None:
    q, k, v, dout, side, spec = call
    launched.clear()  # not every call has the last kernel
    gradients = launch.backward(inputs, side, spec, Wanted())
    (tiles, begin), (programs, main) = (launched[f"attention_{name}_kernel"] for name in ("begin", "backward"))
    described = {"k": k, "v": v}
    if main["problem.shares"] == 1:  # else the main kernel stores parts of these
        described |= {"dk": gradients.k, "dv": gradients.v}
    if spec.scale > 0:
        described["q"] = q
    if not begin["masked_dout_ptr"]:
        described["dout"] = dout
    summed = begin["cleared_ptr"] is not None
    assert summed is (main["dq_desc"] is None) and main["sums_ptr"] == (begin["cleared_ptr"] or main["sums_ptr"])
    if summed:
        assert launched["attention_end_kernel"].arguments["dq_ptr"] == gradients.q.data_ptr()
    else:
        described["dq"] = gradients.q
    assert [name for name, tensor in described.items() if not main[f"{name}_desc"].is_of(tensor)] == []
    assert begin["dout_ptr"] == dout.data_ptr()
    # The parts of the buffer, in their order: each has room.
    config = backward_configs.choose_backward_config(hopper_call("backward", q, k, v, side, spec))
    if main["sums_ptr"] is not None:
        of_a_line = main["problem.group"] * main["problem.query_tiles"]  # for each thread block that takes whole ones
        sums = 4 * config.block_m * backward_configs.tile_width(q.shape[-1])
        assert begin["statistics_ptr"] >= main["sums_ptr"] + sums * (tiles if summed else programs * of_a_line)
    masked_dout = begin["statistics_ptr"] + tiles * config.block_m * config.statistics_bytes
    masked_dout_bytes = 2 * dout.numel() if begin["masked_dout_ptr"] else 0
    assert begin["masked_dout_ptr"] in (None, masked_dout) and begin["counter_ptr"] >= masked_dout + masked_dout_bytes
    turns = begin["counter_ptr"] + 4
    assert begin["turns_ptr"] is None or begin["turns_ptr"] >= turns
    assert bool(begin["logit_sums_ptr"]) is (side.sinks is not None)
    assert begin["row_logits_ptr"] == (None if side.sinks is None else side.sinks.data_ptr())
    assert (main["turns_ptr"] is not None) is (spec.deterministic and summed) and main["turns_ptr"] == begin[
        "turns_ptr"
    ]
    assert main["counter_ptr"] == begin["counter_ptr"] and main["statistics_desc"].address == begin["statistics_ptr"]
    assert (begin["lse_unit"] is not None) is config.statistics_multiplied
    if side.cu_seqlens_q is None and spec.window_left is spec.window_right is None:
        assert begin["masked_dout_ptr"] is None
    for name, gradient, of in zip("qkv", gradients, (q, k, v)):
        by_tma = name == "q" or main["problem.shares"] == 1
        assert gradient.shape == of.shape and (not by_tma or alignment.aligned(gradient))


def test_a_backward_over_a_block_mask_passes_its_lists(launched):
    q, v, lse = torch.zeros(2, 50, 2, 64).bfloat16(), torch.zeros(2, 50, 2, 128).bfloat16(), torch.zeros(2, 2, 50)
    mask = patterns.causal(50)
    side = SideInputs(None, None, 50, 50, block_lists=mask.lists, block_patterns=mask.tile_masks)
    launch.backward(
        BackwardInputs(v, None, q, q, v, v, lse), side, AttentionSpec(1.0, block_shape=(1, 1, 128, 128)), Wanted()
    )
    begin, main = (launched[f"attention_{name}_kernel"].arguments for name in ("begin", "backward"))
    assert main["problem.side.block_lists"] == mask.lists.data_ptr()
    assert main["dout_desc"].address == begin["masked_dout_ptr"]
    assert begin["counter_ptr"] - begin["masked_dout_ptr"] == v.nbytes
    assert begin["lse_unit"] == -math.log(2)  # the scale is 1


def _without_slopes(call: _Call) -> _Call:
    """The call without ALiBi, which backwards with a kernel for each gradient do not serve."""
    return call._replace(side=call.side._replace(alibi_slopes=None))


def _backward_inputs(call: _Call, has_dlse: bool) -> BackwardInputs:
    q, k, v, dout, *_ = call
    lse = torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3])
    out, dlse = torch.zeros(dout.shape, dtype=dout.dtype), torch.zeros_like(lse) if has_dlse else None
    return BackwardInputs(dout, dlse, q, k, v, out, lse)


def _run_backward(call: _Call, has_dlse: bool) -> Gradients:
    return launch.backward(_backward_inputs(call, has_dlse), call.side, call.spec, Wanted())


def _check_scratch(launched: _Launched, dout: torch.Tensor) -> None:
    """What the first of such kernels is given: the parts of the buffer, in their order, each with room."""
    tiles, begin = launched
    assert begin["dout_ptr"] == dout.data_ptr() and begin["cleared_ptr"] is begin["turns_ptr"] is None
    masked_dout = begin["statistics_ptr"] + 4 * tiles * 2 * STATISTIC_ROWS
    masked_dout_bytes = dout.element_size() * dout.numel() if begin["masked_dout_ptr"] else 0
    assert begin["masked_dout_ptr"] in (None, masked_dout) and begin["counter_ptr"] >= masked_dout + masked_dout_bytes


@given(_calls((torch.float16, torch.bfloat16), wide=True), st.booleans())
def test_a_backward_of_wide_heads_passes_what_its_kernels_declare(launched, call, has_dlse):
    call = _without_slopes(call)
    if not _served("backward", call):
        return
    q, k, v, dout, side, spec = call
    gradients = _run_backward(call, has_dlse)
    begin = launched["attention_begin_kernel"].arguments
    of_dv, of_dq = (launched[f"attention_wide_{name}_kernel"].arguments for name in ("dv", "dk_dq"))
    assert of_dv["k_desc"].is_of(k)
    if of_dv["problem.shares"] == 1:  # else the kernels store parts of dk and dv
        assert of_dv["dv_desc"].is_of(gradients.v)
    # The last kernel is that of dq.
    assert of_dq["visited_scores_desc"].is_of(k) and of_dq["visited_values_desc"].is_of(v)
    assert of_dq["gradient_desc"].is_of(gradients.q)
    if spec.scale > 0:
        assert of_dv["q_desc"].is_of(q) and of_dq["own_scores_desc"].is_of(q)
    if not begin["masked_dout_ptr"]:
        assert of_dv["dout_desc"].is_of(dout) and of_dq["own_values_desc"].is_of(dout)
    _check_scratch(launched["attention_begin_kernel"], dout)
    assert of_dv["statistics_ptr"] == of_dq["statistics_ptr"] == begin["statistics_ptr"]
    sequences = None if side.cu_seqlens_q is None else side.cu_seqlens_q.data_ptr()
    assert begin["cu_seqlens_q_ptr"] == of_dv["problem.side.cu_seqlens_q"] == sequences


def _check_float32_backward(launched: dict[str, _Launched], call: _Call, has_dlse: bool) -> None:
    q, k, v, dout, side, spec = call
    inputs = BackwardInputs(dout, None, q, k, v, dout, torch.zeros(0))
    assert launch.prepare_backward(inputs, side, spec, Wanted()) is None  # TF32 may be allowed for the next call
    gradients = _run_backward(call, has_dlse)
    begin = launched["attention_begin_kernel"].arguments
    kernels = "attention_float32_wide" if is_wide_float32(q.shape[-1], v.shape[-1]) else "attention_float32"
    of_dv, of_dq = (launched[f"{kernels}_{name}_kernel"].arguments for name in ("dv", "dk_dq"))
    # The last kernel is that of dq, and the last tensor that is split dout.
    assert of_dv["q_desc"] == of_dq["own_scores_desc"] and of_dv["dout_desc"] == of_dq["own_values_desc"]
    assert of_dv["k_desc"] == of_dq["visited_scores_desc"]
    assert of_dq["gradient_ptr"] == gradients.q.data_ptr()
    split = launched["attention_convert_kernel"].arguments
    assert split["numbers_ptr"] == (begin["masked_dout_ptr"] or dout.data_ptr())
    assert split["converted_ptr"] == of_dv["dout_desc"].address
    _check_scratch(launched["attention_begin_kernel"], dout)
    assert of_dv["statistics_ptr"] == of_dq["statistics_ptr"] == begin["statistics_ptr"]


class _AllocatedError(Exception):
    """Ends a call at its outputs."""


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_copy_of_lists_lives_when_outputs_are_allocated(phase, monkeypatch):
    """Otherwise an output may lie where the kernel reads the lists: a run begins with the outputs."""
    copies = []

    def with_aligned_lists(side: SideInputs) -> SideInputs:
        side = aligned_lists(side)
        copies.append(weakref.ref(side.block_lists))
        return side

    def run(*given: Any) -> None:
        assert copies[0]() is not None and copies[0]() is not lists
        raise _AllocatedError

    aligned_lists = launch.with_aligned_lists
    plan = SimpleNamespace(kernel=SimpleNamespace(programs=1), runner=lambda *_: run)
    monkeypatch.setattr(launch, "with_aligned_lists", with_aligned_lists)
    monkeypatch.setattr(launch, f"plan_{phase}", lambda *_: plan)
    lists = torch.zeros(9, dtype=torch.int32)[1:]
    assert lists.data_ptr() % 16
    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    side = SideInputs(max_seqlen_q=128, max_seqlen_k=128, block_lists=lists)
    spec = AttentionSpec(1.0, block_shape=(1, 1, 128, 128))
    lse = torch.zeros(1, 2, 128)
    inputs = BackwardInputs(q, None, q, q, q, q, lse)
    call = (q, q, q, side, spec) if phase == "forward" else (inputs, side, spec, Wanted())
    with pytest.raises(_AllocatedError):
        getattr(launch, phase)(*call)


@pytest.mark.parametrize("rows", ["dense", "cached"])
def test_counters_live_when_outputs_are_allocated(rows, monkeypatch):
    """In a CUDA graph each launch has counters of its own. An output in their memory would change them."""
    counters: list[weakref.ref] = []

    def tile_counter(device: torch.device) -> Tensor:
        made = torch.zeros(2, dtype=torch.int32)
        counters.append(weakref.ref(made))
        return made

    def run(*given: Any) -> None:
        assert counters[0]() is not None and counters[0]().data_ptr() in given  # type: ignore[union-attr]
        raise _AllocatedError

    module = launch if rows == "dense" else cache_launch
    monkeypatch.setattr(module, "tile_counter", tile_counter)
    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    pipeline: Any = SimpleNamespace(run=run, plans={"forward": SimpleNamespace(device=q.device)})
    call = {
        "dense": lambda: launch.ForwardPlan(pipeline, results=2, dynamic=True).runner()(q, q, q, ()),
        "cached": lambda: cache_launch.CacheForward(pipeline, lambda: [q, q], True).run((q, q, q), None, (None,), 0),
    }
    with pytest.raises(_AllocatedError):
        call[rows]()


def test_a_number_for_a_kernel_is_a_field_of_its_struct(monkeypatch):
    """docs/adding_a_feature.md: the struct alone is changed; the launch and the compiled form have the number."""
    as_it_is = forward.Problem
    more: Any = namedtuple("more", (*as_it_is._fields, "extra"))
    more.from_call = lambda call, *rest: more(*as_it_is.from_call(call, *rest), backend_launch.int32(7))
    monkeypatch.setattr(forward, "Problem", more)
    q = torch.empty(1, 256, 4, 64, dtype=torch.bfloat16)
    call = hopper_call("forward", q, q, q, SideInputs(), AttentionSpec(0.125))
    kernel = forward.forward_kernel(call, forward_config(call), 4, 2, 4, dynamic=False)
    found = backend_launch.specialise(kernel.function, kernel.described, kernel.constants, kernel.num_warps)
    assert found.run_time["problem.extra"] == backend_launch.int32(7)
