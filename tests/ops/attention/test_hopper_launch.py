"""What a launch of the Hopper kernels passes, for whatever calls they serve, without a GPU: each argument fits its
parameter, and descriptors are those of the tensors and legal by NVIDIA's rules (CUDA driver API,
cuTensorMapEncodeTiled)."""

from __future__ import annotations

import itertools
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
from flashtile._backends import alignment, clear_plans, tma
from flashtile._backends import launch as backend_launch
from flashtile._backends.launch import KernelSource
from flashtile.ops.attention.call import Phase
from flashtile.ops.attention.hopper import cache_launch, forward, launch, unsupported_reason
from flashtile.ops.attention.hopper.tuned_rows import forward_config
from flashtile.ops.attention.spec import FP8, AttentionSpec, BackwardInputs, SideInputs, Wanted
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


def _astray(arguments: dict[str, Any], described: dict[str, Tensor]) -> list[str]:
    """The names of descriptors that do not lead to their tensors."""
    return [name for name, tensor in described.items() if not arguments[f"{name}_desc"].is_of(tensor)]


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
    assert _astray(arguments, described) == []
    assert arguments["lse_ptr"] == lse.data_ptr()


@given(st.one_of(_calls((torch.float32,)), _calls((torch.float32,), wide=True)), st.booleans())
def test_a_call_of_float32_passes_what_its_kernels_declare(launched, call, has_dlse):
    """Kernels split its tensors into parts first, and are never prepared: TF32 may be allowed for the next call."""
    call = _without_slopes(call)._replace(spec=call.spec._replace(softcap=0.0))
    q, k, v, dout, side, spec = call
    if _served("forward", call):
        assert launch.prepare_forward(q, k, v, side, spec) is None
        launch.forward(q, k, v, side, spec)
        # The last tensor that is split is v.
        assert launched["attention_convert_kernel"].arguments["numbers_ptr"] == v.data_ptr()
    if _served("backward", call):
        inputs = _backward_inputs(call, has_dlse)
        assert launch.prepare_backward(inputs, side, spec, Wanted()) is None
        launch.backward(inputs, side, spec, Wanted())
        masked = launched["attention_begin_kernel"].arguments["masked_dout_ptr"]
        assert launched["attention_convert_kernel"].arguments["numbers_ptr"] == (masked or dout.data_ptr())


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
    assert _astray(main, moved_by_tma) == []
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
    begin, main = (launched[f"attention_{name}_kernel"].arguments for name in ("begin", "backward"))
    described = {"k": k, "v": v}
    if main["problem.shares"] == 1:  # else the main kernel stores parts of these
        described |= {"dk": gradients.k, "dv": gradients.v}
    if spec.scale > 0:
        described["q"] = q
    if begin["masked_dout_ptr"]:
        assert main["dout_desc"].address == begin["masked_dout_ptr"]
    else:
        described["dout"] = dout
    summed = begin["cleared_ptr"] is not None
    assert summed is (main["dq_desc"] is None) and main["sums_ptr"] == (begin["cleared_ptr"] or main["sums_ptr"])
    if summed:
        assert launched["attention_end_kernel"].arguments["dq_ptr"] == gradients.q.data_ptr()
    else:
        described["dq"] = gradients.q
    assert _astray(main, described) == []
    assert begin["dout_ptr"] == dout.data_ptr()
    if side.cu_seqlens_q is None and spec.window_left is spec.window_right is None:
        assert begin["masked_dout_ptr"] is None
    for name, gradient, of in zip("qkv", gradients, (q, k, v)):
        by_tma = name == "q" or main["problem.shares"] == 1
        assert gradient.shape == of.shape and (not by_tma or alignment.aligned(gradient))


def _without_slopes(call: _Call) -> _Call:
    """The call without ALiBi, which backwards with a kernel for each gradient do not serve."""
    return call._replace(side=call.side._replace(alibi_slopes=None))


def _backward_inputs(call: _Call, has_dlse: bool) -> BackwardInputs:
    q, k, v, dout, *_ = call
    lse = torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3])
    out, dlse = torch.zeros(dout.shape, dtype=dout.dtype), torch.zeros_like(lse) if has_dlse else None
    return BackwardInputs(dout, dlse, q, k, v, out, lse)


@given(_calls((torch.float16, torch.bfloat16), wide=True), st.booleans())
def test_a_backward_of_wide_heads_passes_what_its_kernels_declare(launched, call, has_dlse):
    call = _without_slopes(call)
    if not _served("backward", call):
        return
    q, k, v, dout, side, spec = call
    gradients = launch.backward(_backward_inputs(call, has_dlse), side, spec, Wanted())
    of_dv, of_dq = (launched[f"attention_wide_{name}_kernel"].arguments for name in ("dv", "dk_dq"))
    of_values, of_scores = {"k": k}, {"visited_scores": k, "visited_values": v, "gradient": gradients.q}  # that of dq
    if of_dv["problem.shares"] == 1:  # else the kernels store parts of dk and dv
        of_values["dv"] = gradients.v
    if spec.scale > 0:
        of_values["q"] = of_scores["own_scores"] = q
    if masked := launched["attention_begin_kernel"].arguments["masked_dout_ptr"]:
        assert of_dv["dout_desc"].address == of_dq["own_values_desc"].address == masked
    else:
        of_values["dout"] = of_scores["own_values"] = dout
    assert _astray(of_dv, of_values) == _astray(of_dq, of_scores) == []


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
