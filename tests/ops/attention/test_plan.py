"""The plan of a launch: how many programs, which arguments, and what decides that a kernel is compiled anew."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile._backends import allocate, clear_plans, devices
from flashtile._backends.alignment import power_of_two_factor

if devices.triton_missing():
    pytest.skip(devices.triton_missing(), allow_module_level=True)

from flashtile._backends import launch as backend_launch
from flashtile.ops.attention import call as description
from flashtile.ops.attention.gpu.plan import PortableKernel
from flashtile.ops.attention.gpu.tile_configs import choose_parts, choose_shares, longest_walk
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, Gradients, SideInputs, Wanted
from flashtile.ops.attention.triton import launch
from support.compilation.machine_code import Call, described, passed_by, plan, shares_of

_HOPPER = devices.KNOWN_DEVICES["sm_90"]
_KERNELS = ("forward", "dq", "dkdv")


@pytest.mark.parametrize(
    "change",
    [{"seq_q": 8192, "seq_k": 8192}, {"seq_q": 2048, "seq_k": 6144}, {"batch": 7}, {"window_right": 5}],
    ids=str,
)
@pytest.mark.parametrize("kernel", _KERNELS)
def test_other_sizes_need_no_other_binary(kernel, change):
    call = Call(window_right=0)
    assert plan(kernel, _HOPPER, call._replace(**change)).kernel.source == plan(kernel, _HOPPER, call).kernel.source


@pytest.mark.parametrize("change", [{"seq_q": 5001, "seq_k": 777}, {"batch": 1}, {"sequences": 5}], ids=str)
@pytest.mark.parametrize("kernel", _KERNELS)
def test_other_sizes_of_a_packed_call_need_no_other_binary(kernel, change):
    call = Call(sequences=2, seq_q=999, seq_k=1000)
    assert _but_for_tiles(kernel, call._replace(**change)) == _but_for_tiles(kernel, call)


def _but_for_tiles(kernel: str, call: Call) -> dict[str, Any]:
    found = described(plan(kernel, _HOPPER, call).kernel.source)
    return {
        name: value for name, value in found.items() if name not in ("shape.BLOCK_M", "shape.BLOCK_N", "shape.CHUNK")
    }


@pytest.mark.parametrize(
    "kernel, change, whole, all_visible",
    [
        ("forward", {}, True, True),
        ("forward", {"seq_q": 4001}, True, True),  # the queries do not move
        ("forward", {"seq_k": 4001}, False, False),
        ("dq", {"seq_k": 4001}, False, False),
        ("dkdv", {"seq_k": 4001}, True, True),
        ("dkdv", {"seq_q": 4001}, False, False),
        ("forward", {"window_right": 0}, True, False),
        ("forward", {"window_left": 9}, True, False),
        ("forward", {"sequences": 2}, False, False),
        ("forward", {"key_lengths_dtype": torch.int32}, False, False),
        ("forward", {"head_dim": 256}, True, False),  # the branch costs less than what is gained there
        ("dkdv", {"head_dim": 256}, False, False),
        ("forward", {"dropout_p": 0.5}, True, True),
    ],
)
def test_which_checks_are_left_out(kernel, change, whole, all_visible):
    constants = plan(kernel, _HOPPER, Call()._replace(**change)).kernel.source.constants
    assert (constants["WHOLE"], constants["ALL_VISIBLE"]) == (whole, all_visible)


@pytest.mark.parametrize("lengths", [(1000,), (0, 1000, 0), (1,) * 1000, (500, 500), (127, 129, 744)], ids=len)
@pytest.mark.parametrize("kernel", _KERNELS)
def test_programs_of_a_packed_call_suffice_for_any_lengths(kernel, lengths):
    result = plan(kernel, _HOPPER, Call(sequences=len(lengths), seq_q=1000, seq_k=1000, heads=3, heads_kv=3))
    block = result.kernel.source.constants["shape.BLOCK_N" if kernel == "dkdv" else "shape.BLOCK_M"]
    assert result.kernel.programs == (1000 // block + len(lengths) + 1) * 3
    assert result.kernel.programs >= sum(-(-length // block) for length in lengths) * 3


@pytest.mark.parametrize(
    "kernel, change, runs",
    [
        ("forward", {"seq_q": 0}, False),
        ("dq", {"batch": 0}, False),
        ("dkdv", {"seq_k": 0}, False),
        ("forward", {"seq_k": 0}, True),  # writes out = 0 and lse = -inf
        ("dkdv", {"seq_q": 0}, True),  # writes zero gradients
    ],
)
def test_a_call_without_outputs_launches_nothing(kernel, change, runs):
    assert (plan(kernel, _HOPPER, Call()._replace(**change)).kernel.programs > 0) is runs


def _stored(found: PortableKernel) -> list[allocate.Layout]:
    """What the kernel itself writes."""
    summed = ("dk", "dv") if "shares" in found.following else ()
    return [layout for name, layout in found.outputs.items() if name not in summed]


@pytest.mark.parametrize(
    "change, one_kernel",
    [
        ({}, True), ({"seq_q": 65}, False), ({"seq_k": 65}, False), ({"dtype": torch.float32}, False),
        ({"sequences": 3}, False), ({"block_tile": (64, 64)}, False), ({"seq_q": 0}, False), ({"seq_k": 0}, False),
        ({"head_dim": 128, "head_dim_v": 80}, True), ({"head_dim_v": 129}, False),
    ],
    ids=str,
)  # fmt: skip
def test_one_kernel_computes_all_gradients_where_one_tile_holds_a_sequence(change, one_kernel):
    result = plan("dq", _HOPPER, Call(seq_q=49, seq_k=64, heads=6, heads_kv=3)._replace(**change))
    assert (result.name == "short_backward") is one_kernel
    assert shares_of(result) == (2 if one_kernel else 1)


def test_strides_of_a_dense_call():
    result = plan("forward", _HOPPER, Call(head_dim=64, head_dim_v=32, heads=4, heads_kv=2, row_stride=1000))
    assert _row_strides(result) == (1000, 128, 64, 128)
    given = passed_by(result.kernel)
    of_each = [(given[f"{of}_strides.batch"], given[f"{of}_strides.head"]) for of in ("q", "k", "v", "out")]
    assert of_each == [(4096 * 1000, 64), (4096 * 128, 64), (4096 * 64, 32), (4096 * 128, 32)]
    assert _stride_types(result) == {"i64 % 8"}


def _row_strides(found: PortableKernel) -> tuple[int, ...]:
    constants = found.kernel.source.constants
    return tuple(value for name, value in constants.items() if name.endswith("_strides.ROW"))


def _stride_types(found: PortableKernel) -> set[str]:
    """Types of the batch and head strides of q, k and v, which every call has."""
    parameters = described(found.kernel.source)
    return {parameters[f"{of}_strides.{dimension}"] for of in "qkv" for dimension in ("batch", "head")}


def test_strides_of_a_packed_call():
    result = plan("dkdv", _HOPPER, Call(sequences=2, heads=4))
    assert _row_strides(result) == (256,) * 6
    given = passed_by(result.kernel)
    of_each = {
        (given[f"{of}_strides.batch"], given[f"{of}_strides.head"]) for of in ("q", "k", "v", "dout", "dk", "dv")
    }
    assert of_each == {(0, 64)}


@pytest.mark.parametrize("kernel", _KERNELS)
def test_strides_of_dimensions_of_one_do_not_count(kernel):
    """They may be odd. Those that 16 divides stay as they are, so that the binaries of longer sequences serve."""
    call = Call(batch=1, seq_q=1, seq_k=33, heads=1, heads_kv=1)
    odd = plan(kernel, _HOPPER, call._replace(row_stride=77))
    assert _stride_types(odd) == _stride_types(plan(kernel, _HOPPER, call)) == {"i64 % 16"}
    assert _row_strides(odd)[0] == passed_by(odd.kernel)["q_strides.batch"] == 0
    assert _row_strides(plan(kernel, _HOPPER, call))[0] == 64


@pytest.mark.parametrize("kernel", _KERNELS)
def test_sizes_and_windows_are_run_time_arguments(kernel):
    call = Call(batch=300, heads=6, heads_kv=2, seq_q=100, seq_k=200, window_left=2**40, window_right=7)
    given = passed_by(plan(kernel, _HOPPER, call).kernel)
    names = ("batch", "heads", "group", "rows_q", "rows_k", "window.left", "window.right")
    assert [given[name] for name in names] == [300, 6, 3, 100, 200, 2**29, 7]
    assert given.get("shares") == (1 if kernel == "dkdv" else None)


@pytest.mark.parametrize(
    "batch, seq, heads, heads_kv, window_right, shares",
    [(1, 4096, 8, 1, 0, 4), (1, 4096, 8, 1, None, 2), (4, 4096, 64, 8, 0, 1), (1, 128, 2, 1, 0, 2)],
)
def test_heads_that_share_keys_are_divided_where_there_are_few_key_tiles(
    batch, seq, heads, heads_kv, window_right, shares
):
    call = Call(
        batch=batch, heads=heads, heads_kv=heads_kv, seq_q=seq, seq_k=seq, head_dim=64, head_dim_v=64,
        window_right=window_right,
    )  # fmt: skip
    found = plan("dkdv", _HOPPER, call)
    assert shares_of(found) == shares
    given = [passed_by(found.kernel)[name] for name in ("batch", "heads", "group", "shares")]
    assert given == [batch, heads, heads // heads_kv // shares, shares]
    assert {output.shape for output in _stored(found)} == {(batch, seq, heads_kv * shares, 64)}
    assert found.kernel.programs == plan("dkdv", _HOPPER, call._replace(heads=heads_kv)).kernel.programs * shares
    assert shares_of(plan("dq", _HOPPER, call)) == 1


@pytest.mark.parametrize(
    "group, walks, query_tiles, uneven, shares",
    [
        (8, 64, 100, False, 2),  # half of 132 multiprocessors; with four shares as much is left over
        (8, 140, 100, False, 8),  # two rounds of which the second is all but empty
        (8, 140, 2, False, 1),  # adding up takes longer than the second round
        (8, 256, 100, True, 1),
        (8, 128, 100, True, 2),  # the longest walk takes as long as all the others together
        (6, 64, 100, True, 6),
        (8, 8, 1, True, 8),  # each has a multiprocessor for itself
        (2, 8, 2, True, 1),  # too short
    ],
)
def test_into_how_many_shares_heads_are_divided(group, walks, query_tiles, uneven, shares):
    assert choose_shares(group, walks, query_tiles, uneven, 132) == shares


def test_heads_are_divided_for_the_last_line():
    """Of three lines of 144 walks, the longest of the last one begins when two thirds of all work are done, and takes
    longer than the last third. Half as long it does not."""
    assert choose_shares(4, 3 * 144, 144, True, 132) == 1
    assert choose_shares(4, 3 * 144, 144, True, 132, lambda shares: 144 * {1: 2, 2: 4, 4: 10}[shares]) == 2


@pytest.mark.parametrize(
    "walks, query_tiles, group, parts",
    [
        (40, 32, 1, 3),
        (10, 32, 1, 11),
        (64, 4, 1, 1),  # adding up takes as long as half of the walk
        (64, 16, 1, 2),
        (200, 128, 1, 3),  # two rounds, of which the second is half empty
        (400, 60, 1, 1),  # three rounds and a little, which two parts shorten by 1 %
    ],
)
def test_into_how_many_parts_walks_are_divided(walks, query_tiles, group, parts):
    assert choose_parts(walks, query_tiles, group, 132) == parts


def test_the_longest_walk_of_a_window():
    window = AttentionSpec(1.0, 99, 0)
    assert longest_walk(128, window, 64, 128) == 5 and longest_walk(3, window, 64, 128) == 3
    assert longest_walk(128, AttentionSpec(1.0, None, 0), 64, 128) == 128


@pytest.mark.parametrize(
    "arch, dtype, allow_tf32, precision",
    [
        ("sm_80", torch.float32, False, "bf16x6"), ("sm_90", torch.float32, False, "bf16x6"),
        ("sm_86", torch.float32, False, "ieee"), ("sm_100", torch.float32, False, "ieee"),
        ("sm_90", torch.float32, True, "tf32"), ("sm_90", torch.float16, True, "ieee"),
        ("gfx942", torch.float32, True, "ieee"),
    ],
)  # fmt: skip
def test_precision_of_products(arch, dtype, allow_tf32, precision):
    call = Call(dtype=dtype, allow_tf32=allow_tf32)
    assert plan("forward", devices.KNOWN_DEVICES[arch], call).kernel.source.constants["PRECISION"] == precision


@pytest.mark.parametrize(
    "numbers, factor", [((0,), 16), ((64, 48), 16), ((64, 8), 8), ((64, 6), 2), ((1000, 7), 1), ((), 16)]
)
def test_power_of_two_factor(numbers, factor):
    assert power_of_two_factor(*numbers) == factor


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "meta"])
def test_memory_elsewhere_is_allocated_without_asking_for_a_gpu(device, monkeypatch):
    """PyTorch built for CUDA raises without a driver; the interpreter needs none."""

    def no_driver(*_: object) -> int:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(allocate, "_empty_strided_cuda", no_driver)
    monkeypatch.setattr(allocate, "_cuda_getDevice", no_driver, raising=False)
    assert allocate.allocator([allocate.contiguous((2, 3), torch.float32)], torch.device(device))()[0].shape == (2, 3)


def test_an_out_that_lies_worse_than_the_others_is_copied(monkeypatch):
    """`attention_backward` takes any out; the dq kernel is compiled for where q, k, v and dout lie."""
    read: list[int] = []

    def run(dout: Tensor, dlse: Tensor | None, saved: Sequence[Tensor]) -> Gradients:
        read.append(saved[3].data_ptr())
        return Gradients(*saved[:3])

    monkeypatch.setattr(launch, "plan_backward", lambda call: SimpleNamespace(runner=lambda *_: run))
    x = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)
    worse = torch.zeros(33, dtype=torch.bfloat16)[1:].view(1, 4, 1, 8)
    assert x.data_ptr() % 16 == 0 != worse.data_ptr() % 16
    for out, as_given in ((x, True), (worse, False)):
        lse, side = torch.zeros(1, 1, 4), SideInputs(None, None, 4, 4)
        launch.backward(BackwardInputs(x, None, x, x, x, out, lse), side, AttentionSpec(1.0), Wanted())
        assert read[-1] % 16 == 0 and (read[-1] == out.data_ptr()) is as_given


@pytest.mark.skipif(devices.interpreting(), reason="launches take addresses: needs TRITON_INTERPRET unset")
@pytest.mark.parametrize("has_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("spec", [AttentionSpec(0.1), AttentionSpec(0.1, None, 0, softcap=5.0)], ids=["full", "causal"])
def test_prepared_launches_pass_what_others_pass(spec, has_dlse, monkeypatch):
    launched: list[tuple] = []
    monkeypatch.setattr(
        backend_launch, "make_launch",
        lambda source, programs, scalars, _: lambda *given: launched.append((source, programs, given, scalars)),
    )  # fmt: skip
    machine = description.Machine("cuda", devices.KNOWN_DEVICES["sm_80"], 108)
    monkeypatch.setattr(description, "current_machine", lambda device: machine)
    clear_plans()
    q, out, dout = (torch.zeros(2, 70, 4, 64, dtype=torch.float16) for _ in range(3))
    k, v = (torch.zeros(2, 90, 2, 64, dtype=torch.float16) for _ in range(2))
    lse, side = torch.zeros(2, 4, 70), SideInputs(None, None, 70, 90)
    dlse = torch.zeros_like(lse) if has_dlse else None
    made = launch.forward(q, k, v, side, spec)
    gradients = launch.backward(BackwardInputs(dout, dlse, q, k, v, out, lse), side, spec, Wanted())
    inputs = BackwardInputs(dout, dlse, q, k, v, out, lse)
    prepared = launch.prepare_forward(q, k, v, side, spec)
    prepared_backward = launch.prepare_backward(inputs, side, spec, Wanted())
    assert prepared is not None and prepared_backward is not None
    made_again, gradients_again = prepared(q, k, v, ()), prepared_backward(dout, dlse, (q, k, v, out, lse))
    renamed = {new.data_ptr(): old.data_ptr() for new, old in zip(made_again, made)}
    renamed |= {new.data_ptr(): old.data_ptr() for new, old in zip(gradients_again[:3], gradients[:3])}
    statistics = 6 + has_dlse
    renamed[launched[4][2][statistics]] = launched[1][2][statistics]
    for earlier, (source, programs, given, scalars) in zip(launched[:3], launched[3:], strict=True):
        assert earlier == (source, programs, tuple(renamed.get(each, each) for each in given), scalars)
    clear_plans()


@pytest.mark.skipif(devices.interpreting(), reason="launches take addresses: needs TRITON_INTERPRET unset")
def test_launches_that_depend_on_more_than_the_layout_are_not_prepared():
    x = torch.zeros(1, 4, 1, 8)
    side = SideInputs(None, None, 4, 4)
    assert launch.prepare_forward(x, x, x, side, AttentionSpec(1.0)) is None  # TF32 may come or go
    half = x.half()
    negative = AttentionSpec(-1.0)
    assert launch.prepare_forward(half, half, half, side, negative) is None
    inputs = BackwardInputs(half, None, half, half, half, half, torch.zeros(1, 1, 4))
    assert launch.prepare_backward(inputs, side, negative, Wanted()) is None
