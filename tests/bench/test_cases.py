"""The benchmark's cases: their names, their work, their tensors and their records."""

import json

import torch

from flashtile.bench.cases import Case, make_inputs, packed_case
from flashtile.bench.registry import BENCHMARKS, case_name, find_case
from support.running.each_case import each_case

CPU = torch.device("cpu")
PACKED = packed_case([5, 16, 1], heads=2, head_dim=8, causal=True, dtype="fp32")


def test_flops_follow_the_convention():
    full = Case(2, 512, 4, 4, 64, 64)
    causal = Case(2, 512, 4, 4, 64, 64, causal=True)
    assert full.flops("fwd") == 4 * 2 * 4 * 512**2 * 64
    assert causal.flops("fwd") == full.flops("fwd") / 2
    assert full.flops("bwd") == 2.5 * full.flops("fwd")
    assert Case(2, 512, 4, 4, 192, 128).flops("fwd") == 2 * 2 * 4 * 512**2 * (192 + 128)


@each_case("window", [(3, 0), (2, 5), (None, 1), (4, None)])
@each_case("causal", [False, True])
def test_window_work_counts_visible_pairs(window, causal):
    case = Case(1, 16, 1, 1, 8, 8, causal=causal, window=window)
    left, right = window
    seen = sum(
        (left is None or j >= i - left) and (right is None or j <= i + right) and not (causal and j > i)
        for i in range(16)
        for j in range(16)
    )
    assert case.visible_pairs() == seen


def test_bytes_count_each_tensor_once():
    case = Case(2, 16, 4, 2, 8, 4, dtype="bf16")
    q, k, v, out = 2 * 16 * 4 * 8, 2 * 16 * 2 * 8, 2 * 16 * 2 * 4, 2 * 16 * 4 * 4
    assert case.bytes("fwd") == 2 * (q + k + v + out)
    assert case.bytes("bwd") == 2 * case.bytes("fwd")


def test_masked_work_counts_visible_pairs():
    tiles = Case(3, 64, 2, 1, 8, 4, mask="tiles16:0.5")
    assert tiles.visible_pairs() == 3 * 8 * 16 * 16  # half of 4 · 4 tiles
    assert tiles.flops("fwd") == 2 * 2 * 3 * 8 * 256 * (8 + 4) and tiles.flops("bwd") == 2.5 * tiles.flops("fwd")
    assert tiles.bytes("fwd") == Case(3, 64, 2, 1, 8, 4).bytes("fwd")
    documents = Case(2, 96, 2, 2, 8, 8, causal=True, mask="documents20")
    packed = packed_case(documents.segments, heads=2, head_dim=8, causal=True)
    assert documents.segments == packed.lengths and len(packed.lengths) > 2
    assert documents.flops("bwd") == 2 * packed.flops("bwd") and documents.bytes("bwd") == 2 * packed.bytes("bwd")


@each_case("bias, entries", [("1HSS", 1), ("BHSS", 3)])
def test_bias_is_read_and_its_gradient_written(bias, entries):
    plain, biased = Case(3, 16, 2, 1, 8, 8), Case(3, 16, 2, 1, 8, 8, bias=bias, softcap=5.0)
    assert biased.bytes("fwd") - plain.bytes("fwd") == entries * 2 * 16 * 16 * 2
    assert biased.bytes("bwd") - plain.bytes("bwd") == 2 * entries * 2 * 16 * 16 * 2
    assert biased.flops("fwd") == plain.flops("fwd") and biased.flops("bwd") == plain.flops("bwd")


def test_keys_of_another_number_count_as_many():
    cross = Case(3, 16, 2, 1, 8, 4, Sk=5)
    assert cross.visible_pairs() == 3 * 16 * 5 and cross.keys == 5 and Case(1, 16, 2, 1, 8, 4).keys == 16
    assert cross.bytes("fwd") == 2 * 3 * (16 * 2 + 5) * (8 + 4) and cross.bytes("bwd") == 2 * cross.bytes("fwd")
    inputs = make_inputs(cross, CPU)
    assert inputs.q.shape == (3, 16, 2, 8) and inputs.k.shape == (3, 5, 1, 8) and inputs.v.shape == (3, 5, 1, 4)


def test_a_mask_that_is_a_tensor_shows_what_counts_as_work():
    padding = Case(4, 16, 2, 2, 8, 8, mask="padding")
    mask = make_inputs(padding, CPU).mask
    assert mask.shape == (4, 1, 1, 16) and mask.sum((1, 2, 3)).tolist() == [16, 14, 12, 10]
    assert padding.visible_pairs() == 16 * (16 + 14 + 12 + 10) and make_inputs(padding, CPU).block_mask is None
    random = Case(2, 256, 2, 2, 8, 8, mask="random0.25")
    shown = make_inputs(random, CPU).mask
    assert shown.shape == (1, 1, 256, 256) and shown[..., 0].all() and abs(shown.float().mean() - 0.25) < 0.02
    assert random.visible_pairs() == 2 * 256 * 64


def test_packed_work_is_that_of_each_sequence():
    one_by_one = [Case(1, seq, 2, 2, 8, 8, causal=True) for seq in PACKED.lengths]
    for phase in ("fwd", "bwd"):
        assert PACKED.flops(phase) == sum(case.flops(phase) for case in one_by_one)
        assert PACKED.bytes(phase) == 2 * sum(case.bytes(phase) for case in one_by_one)  # fp32, not bf16
    windowed = Case(**{**PACKED.record(), "window": (3, 0), "lengths": PACKED.lengths})
    assert windowed.visible_pairs() == (1 + 2 + 3 + 4 + 4) + (6 + 13 * 4) + 1


def test_name_tells_kinds_apart():
    assert Case(2, 512, 8, 2, 64, 64).name == "d64-full-g4-s512-bf16"
    assert Case(1, 512, 8, 8, 192, 128, causal=True).name == "d192:128-causal-s512-bf16"
    assert PACKED.name == "d8-causal-packed22-fp32"
    assert Case(1, 512, 8, 8, 64, 64, mask="tiles128:0.25").name == "d64-full-tiles128:0.25-s512-bf16"
    assert Case(1, 512, 8, 8, 64, 64, mask="random0.5", Sk=77).name == "d64-full-random0.5-s512:77-bf16"
    assert Case(1, 512, 8, 8, 64, 64, softcap=30.0, bias="1HSS").name == "d64-full-cap30-bias1HSS-s512-bf16"


@each_case("device", ["cpu", "cuda"])
@each_case("benchmark", BENCHMARKS)
def test_cases_of_every_benchmark_have_names_and_come_back_from_their_records(benchmark, device):
    for cases in BENCHMARKS[benchmark].tables(torch.device(device)).values():
        rows = [{"op": case.op, "case": json.loads(json.dumps(case.record()))} for case in cases]
        assert len(set(map(case_name, rows))) == len(cases)
        assert list(map(find_case, rows)) == list(cases)


def test_records_have_the_same_keys_for_every_kind():
    assert set(PACKED.record()) == set(Case(1, 8, 2, 2, 8, 8).record())


@each_case("keys", [("lengths", "mask", "softcap", "bias"), ("mask", "softcap", "bias")])
def test_records_from_before_a_field_are_read(keys):
    """Records without the fields of packed batches, or without those that change scores."""
    record = Case(1, 8, 2, 2, 8, 8).record()
    for key in keys:
        del record[key]
    assert Case.from_record(record) == Case(1, 8, 2, 2, 8, 8)


def test_inputs_have_the_shapes_and_are_reproducible():
    case = Case(2, 16, 4, 2, 8, 4, dropout_p=0.1, dtype="fp32")
    first, second = make_inputs(case, CPU), make_inputs(case, CPU)
    assert first.q.shape == (2, 16, 4, 8) and first.k.shape == (2, 16, 2, 8)
    assert first.v.shape == (2, 16, 2, 4) and first.dout.shape == (2, 16, 4, 4)
    assert torch.equal(first.q, second.q) and first.dropout_seed is not None


def test_packed_inputs_lie_one_after_another():
    inputs = make_inputs(PACKED, CPU)
    assert all(t.shape == (22, 2, 8) for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    assert inputs.cu_seqlens.tolist() == [0, 5, 21, 22] and inputs.cu_seqlens.dtype is torch.int32
    plain = make_inputs(Case(1, 8, 2, 2, 8, 8), CPU)
    assert plain.cu_seqlens is plain.bias is plain.block_mask is None


def test_bias_and_mask_come_with_the_inputs():
    biased = make_inputs(Case(3, 8, 2, 1, 8, 8, bias="1HSS"), CPU)
    assert biased.bias.shape == (1, 2, 8, 8) and biased.bias.dtype is torch.bfloat16
    assert torch.equal(biased.dout, make_inputs(Case(3, 8, 2, 1, 8, 8), CPU).dout)
    assert make_inputs(Case(3, 8, 2, 1, 8, 8, bias="BHSS"), CPU).bias.shape == (3, 2, 8, 8)
    assert make_inputs(Case(3, 64, 2, 1, 8, 8, mask="tiles16:0.5"), CPU).block_mask.fits(3, 2, 64, 64) is None
