"""Measuring: what is verified gets a speed, what is wrong or fails gets a reason."""

import itertools
import json
import math
import time
from dataclasses import replace
from itertools import product

import pytest
import torch

import flashtile
from flashtile.bench import implementations, oracle, runner, timing
from flashtile.bench.base import Implementation
from flashtile.bench.cases import Case, make_inputs, packed_case
from flashtile.bench.commands import command_line, measure
from flashtile.bench.implementations import IMPLEMENTATIONS, build_flashtile, hopper_limits, torch_varlen_options
from flashtile.bench.oracle import AttentionProblem, HostProblem, Oracle
from flashtile.bench.record import commit, make_record, write_record
from flashtile.bench.registry import BENCHMARKS
from flashtile.bench.timing import CpuTimer, HostTimer, typical
from flashtile.testing import assert_same
from support.running.each_case import each_case

CPU = torch.device("cpu")

# sdpa tells in warnings why it refuses a case.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SMALL = Case(2, 48, 4, 2, 16, 8, causal=True, dtype="fp32")
PACKED = packed_case([48, 1, 17], heads=2, head_dim=16, causal=True, dtype="fp32")
VARIANTS = [
    SMALL,
    Case(2, 48, 2, 2, 16, 16, dtype="bf16"),
    Case(1, 48, 2, 2, 16, 16, causal=True, window=(5, 0), dtype="fp32"),
    Case(1, 48, 2, 2, 16, 16, window=(5, 3), dtype="fp32"),
    Case(2, 48, 4, 2, 16, 16, causal=True, dropout_p=0.3, dtype="fp32"),
    PACKED,
    Case(2, 96, 4, 2, 16, 8, dtype="fp32", mask="tiles16:0.3"),
    Case(2, 96, 2, 2, 16, 16, causal=True, dtype="fp32", mask="documents20"),
    Case(1, 96, 2, 2, 16, 16, dtype="bf16", mask="documents20"),
    Case(2, 48, 2, 2, 16, 16, causal=True, dtype="fp32", softcap=2.0),
    Case(3, 48, 4, 2, 16, 16, dtype="fp32", bias="1HSS"),
    Case(2, 48, 2, 2, 16, 16, causal=True, dtype="fp32", softcap=2.0, bias="BHSS"),
    Case(3, 40, 4, 2, 16, 16, dtype="fp32", mask="padding"),
    Case(2, 40, 2, 2, 16, 8, dtype="bf16", mask="random0.5"),
    Case(1, 48, 2, 2, 16, 16, window=(5, 0), dtype="fp32"),
    Case(2, 40, 4, 2, 16, 16, dtype="fp32", Sk=7),
    Case(2, 40, 2, 2, 16, 16, dtype="fp32", mask="padding", Sk=7),
]
SCORED = [case for case in VARIANTS if case.changes_scores]


@pytest.fixture(autouse=True)
def short_measuring(monkeypatch):
    monkeypatch.setitem(runner._SECONDS, "cpu", 0.01)
    monkeypatch.setattr(HostTimer, "CALLS", 2)


def reference(name="flashtile-reference", change=lambda out: out, **options):
    """The eager reference as an implementation under test, its output changed."""

    def build(case, inputs):
        attend = build_flashtile("reference")(case, inputs)
        return lambda *tensors: change(attend(*tensors))

    return Implementation(name, ("cpu",), build, **options)


def run_case(case, chosen, device):
    return runner.run_case(case, chosen, device, AttentionProblem)


def peer(name):
    return next(implementation for implementation in IMPLEMENTATIONS if implementation.name == name)


def with_wrong_gradient(tensor):
    return tensor.detach() + 1.01 * (tensor - tensor.detach())


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_right_results_get_a_speed_and_peers_agree_or_say_why(case):
    rows = run_case(case, [reference(), *map(peer, ("flashtile-cpu", "sdpa-flash", "sdpa-math"))], CPU)
    assert [row["phase"] for row in rows] == ["fwd", "bwd"] * 4
    for row in rows:
        assert row["case"] == case.record()
        if row["ms"] is None:
            assert not row["impl"].startswith("flashtile") and not row["why"].startswith("wrong result"), row
            continue
        assert row["ms"] > 0 and "why" not in row and row["error"] < 0.1
        assert row["tflops"] == pytest.approx(case.flops(row["phase"]) / row["ms"] / 1e9)
        assert row["gbps"] == pytest.approx(case.bytes(row["phase"]) / row["ms"] / 1e6)


def test_each_step_is_told_before_it_begins_and_again_where_it_takes_long(monkeypatch):
    monkeypatch.setattr(runner, "_SLOW", 0.01)
    told = []

    def wait(out):
        time.sleep(0.02)
        return out

    runner.run_case(SMALL, [reference(change=wait)], CPU, AttentionProblem, 0, told.append)
    steps = [step for step in told if not step.startswith("still")]
    name = "flashtile-reference"
    assert steps == [
        "making tensors",
        f"checking {name}",
        *(f"timing {name} {phase}" for phase in ("fwd", "bwd")),
        "taking samples",
    ]
    assert any(step.startswith(f"still checking {name} after 0 s, in ") and " (line " in step for step in told)


def test_wrong_results_get_no_speed_and_a_valid_record(tmp_path):
    """A wrong gradient costs the backward only."""
    changes = {"scaled": lambda out: out * 1.01, "nan": lambda out: out * math.nan, "gradient": with_wrong_gradient}
    rows = run_case(SMALL, [reference(name, change) for name, change in changes.items()], CPU)
    write_record(make_record(CPU, "", rows), tmp_path / "record.json")
    assert json.loads((tmp_path / "record.json").read_text())["rows"] == rows
    scaled, nan, (forward, backward) = rows[:2], rows[2:4], rows[4:]
    assert all(row["ms"] is row["tflops"] is None for row in (*scaled, *nan, backward)) and forward["ms"] > 0
    assert all(row["why"].startswith("wrong result: out: largest error") for row in scaled)
    assert all(row["error"] is None for row in nan)
    assert backward["why"].startswith("wrong result: dq: largest error")


def test_wrong_gradient_of_a_bias_is_found():
    def build(case, inputs):
        attend = build_flashtile("reference")(case, inputs)
        return lambda q, k, v, bias: attend(q, k, v, with_wrong_gradient(bias))

    case = Case(3, 32, 4, 2, 8, 8, dtype="fp32", bias="1HSS")
    forward, backward = run_case(case, [Implementation("doubled", ("cpu",), build)], CPU)
    assert forward["ms"] > 0 and backward["ms"] is None
    assert backward["why"].startswith("wrong result: dbias: largest error")


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_oracle_is_the_same_in_blocks_of_queries(case, monkeypatch):
    inputs = make_inputs(case, CPU)
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout, "bias": inputs.bias}
    tensors = {name: tensor.double() for name, tensor in named.items() if tensor is not None}
    if case.lengths is not None:
        tensors = {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}
    whole = oracle._reference(case, tensors, inputs.dropout_seed, inputs.mask)
    monkeypatch.setitem(oracle._SCORES, "cpu", case.B * case.H * case.keys * 20)
    blocks = oracle._reference(case, tensors, inputs.dropout_seed, inputs.mask)
    for name, expected in whole.items():
        assert_same(blocks[name], expected, name)


def assert_a_wrong_element_is_found(case, place):
    judging = Oracle(case, inputs := make_inputs(case, CPU))
    tensors = (inputs.q, inputs.k, inputs.v, *(() if inputs.bias is None else (inputs.bias,)))
    out = build_flashtile("reference")(case, inputs)(*tensors)
    assert judging.judge({"out": out}).why is None
    out[place] += 1
    assert judging.judge({"out": out}).why is not None


@pytest.mark.parametrize(
    "case, heads, place",
    [
        (Case(2, 32, 8, 4, 8, 8, dtype="fp32"), [0, 3], (-1, -1, -1, -1)),
        (Case(3, 32, 8, 4, 8, 8, dtype="fp32", bias="1HSS"), [0, 3], (1, -1, -1, -1)),
        (Case(2, 32, 8, 4, 8, 8, dropout_p=0.3, dtype="fp32"), [0, 1], (0, -1, 0, -1)),
    ],
    ids=["plain", "bias", "dropout"],
)
def test_oracle_looks_at_fewer_heads_when_they_are_large(case, heads, place, monkeypatch):
    """In every batch entry; with dropout at the first ones of the first: others' bits depend on the number of heads."""
    monkeypatch.setitem(oracle._SCORES, "cpu", 1)
    assert oracle._choose_heads(case, CPU).tolist() == heads
    assert_a_wrong_element_is_found(case, place)


def test_oracle_finds_one_wrong_sequence_of_a_packed_batch():
    assert_a_wrong_element_is_found(PACKED, (48, 1, 3))  # in the only row of the second sequence


def test_oracle_counts_the_work_of_documents_and_packed_sequences_one_by_one(monkeypatch):
    documents = Case(2, 96, 8, 4, 8, 8, mask="documents20")
    packed = packed_case([48, 16], heads=8, head_dim=16, causal=False)
    for case, entries, chosen in ((documents, 2 * 2, [0, 2, 3]), (packed, 1, [0, 4, 7])):
        monkeypatch.setitem(oracle._SCORES, "cpu", 3 * entries * sum(seq**2 for seq in case.segments))
        assert oracle._choose_heads(case, CPU).tolist() == chosen


def test_a_large_plain_computation_is_refused_before_it_starts():
    case = Case(64, 65536, 64, 64, 64, 64, dtype="fp32")
    assert "S×S matrices would take" in peer("sdpa-math").unsupported(case, CPU)


_DROPPED = Case(2, 48, 2, 2, 16, 16, causal=True, dropout_p=0.3, dtype="fp32")
_PLAIN, _TILES, _DOCUMENTS, _CAPPED, _BIASED = Case(1, 512, 2, 2, 64, 64), SCORED[0], SCORED[1], SCORED[3], SCORED[4]
_PADDING, _RANDOM = (case for case in SCORED if case.has_mask_tensor and case.Sk is None)
#: Peers and cases, and why these peers have no speed in them, or None where they have.
REASONS: list[tuple[str, list[Case], str | None]] = [
    ("sdpa-flash sdpa-cudnn sdpa-math flex", [PACKED], "takes no packed batch"),
    ("torch-varlen", [SMALL], "takes packed batches only"),
    ("torch-varlen", [PACKED], None),
    ("sdpa-flash sdpa-cudnn", [VARIANTS[2]], "sdpa has no argument for a window"),
    (
        "sdpa-flash sdpa-cudnn", [_TILES, _DOCUMENTS],
        "sdpa has no argument for a mask, so a mask of this kernel cannot be reached through it",
    ),
    ("sdpa-flash sdpa-cudnn sdpa-math", [_CAPPED], "sdpa has no argument for a soft cap"),
    ("sdpa-flash sdpa-cudnn", [_BIASED], "has no gradient of a bias"),
    ("sdpa-math", [_TILES, _DOCUMENTS, _BIASED], None),
    (
        "sdpa-efficient", [_TILES, _DOCUMENTS, _CAPPED, _PLAIN],
        "measured with a bias, a tensor as mask or dropout, in float32, with heads over 256, with at most 256 keys, or "
        "on GPUs before sm_80 only",
    ),
    (
        "sdpa-efficient",
        [_BIASED, replace(_PLAIN, dtype="fp32"), replace(_PLAIN, D=512, Dv=512), replace(_PLAIN, Sk=77),
         replace(_PLAIN, S=49)],
        None,
    ),
    ("sdpa-cudnn sdpa-efficient", [_PADDING, _RANDOM], None),
    ("fa4", [_TILES, _DOCUMENTS, _BIASED], "measured without masks and biases, which it takes as functions"),
    ("fa4", [_CAPPED], None),
    ("flex fa4", [replace(_DROPPED, S=2048)], "has no dropout"),
    ("flex", [SMALL], "compiles for each shape, so measured at S = 2048, 8192, 16384 only"),
    ("flex", [*(case for case in SCORED if not case.has_mask_tensor), replace(SMALL, S=8192)], None),
    ("flex", [_PADDING], "measured without masks that are tensors"),
]  # fmt: skip


def test_peers_say_why_they_have_no_speed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(implementations, "device_memory", lambda device: None)
    for names, cases, reason in REASONS:
        for name, case in product(names.split(), cases):
            found = peer(name).unsupported(case, torch.device("cuda"))
            assert (found is None) if reason is None else (found or "").startswith(reason), (name, case.name, found)


def test_a_peer_with_dropout_bits_of_its_own_is_judged_without_dropout_and_timed_with_it():
    rows = run_case(_DROPPED, [peer("flashtile-cpu"), peer("sdpa-math")], CPU)
    assert len(rows) == 4 and all(row["ms"] for row in rows)
    bound = AttentionProblem(_DROPPED, CPU).bind(peer("sdpa-math"))
    (first,), (second,) = bound.forward(), bound.forward()
    assert not torch.equal(first, second), "other weights are dropped each time"


def test_a_peer_that_drops_nothing_or_is_wrong_without_dropout_gets_no_speed():
    def attend(case, inputs):
        return lambda q, k, v: flashtile.attention(q, k, v, causal=True)

    def wrong(case, inputs):
        return lambda q, k, v: flashtile.attention(q, k, v, causal=True, dropout_p=case.dropout_p) + 1e-3

    def why(build):
        row = run_case(_DROPPED, [Implementation("sdpa-own", ("cpu",), build, own_dropout=True)], CPU)[0]
        return row["why"]

    assert why(attend) == "wrong result: nothing is dropped"
    assert why(wrong).startswith("wrong result: out")


def test_torch_varlen_is_told_of_causal_as_its_version_has_it():
    full, grouped = replace(PACKED, causal=False), replace(PACKED, Hkv=1)
    first, later = ("max_k", "is_causal", "return_aux"), ("max_k", "window_size", "enable_gqa")
    assert torch_varlen_options(PACKED, first) == {"is_causal": True}
    assert torch_varlen_options(PACKED, later) == {"window_size": (-1, 0)}
    assert torch_varlen_options(full, first) == torch_varlen_options(full, later) == {}
    assert torch_varlen_options(grouped, later) == {"enable_gqa": True, "window_size": (-1, 0)}


@each_case("case", [SMALL, PACKED, *SCORED])
def test_hopper_is_asked_about_the_call(case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    asked, explain = [], flashtile.explain

    def on_sm_90(*tensors, device, **options):
        asked.append(([tensor.shape for tensor in tensors], options["causal"], options.get("max_seqlen_q")))
        return explain(*tensors, device="sm_90", **options)

    monkeypatch.setattr(flashtile, "explain", on_sm_90)
    assert hopper_limits(replace(case, dtype="bf16"), CPU) is None
    assert "float32" in (hopper_limits(replace(case, dtype="fp32"), CPU) or "")
    inputs, causal = make_inputs(case, CPU), case.causal and case.mask is None
    shapes = [tensor.shape for tensor in (inputs.q, inputs.k, inputs.v)]
    assert asked == [(shapes, causal, case.S if case is PACKED else None)] * 2


def test_hopper_is_not_asked_elsewhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert hopper_limits(SMALL, torch.device("cuda")) == "its kernels are for sm_90"


def test_implementations_take_turns_to_and_fro(monkeypatch):
    monkeypatch.setattr(runner, "_ROUNDS", 2)
    order = []

    class Recorder:
        kind = "recorder"

        def __init__(self, label):
            self.label = label

        def sample(self, seconds):
            order.append((self.label, seconds))
            return [1.0]

    found = [
        runner.Measurement(reference(name), phase, None, timer=Recorder(name + phase))
        for name in "ab"
        for phase in AttentionProblem.phases
    ]
    runner._sample_in_turns(found, 4.0)
    labels = ["afwd", "bfwd", "abwd", "bbwd", "bfwd", "afwd", "bbwd", "abwd"]
    assert order == [(label, 2.0) for label in labels]


def test_long_calls_stop_when_their_time_is_used_up():
    calls = []
    timed = runner.Measurement(reference(), "fwd", None, timer=CpuTimer(lambda: calls.append(1)))
    failed = runner.Measurement(reference(), "bwd", "it failed")
    for one in (timed, failed) * runner._ROUNDS:
        one.sample(0.0)
    assert len(calls) == len(timed.samples) == runner._LEAST_SAMPLES < runner._ROUNDS
    assert not failed.samples


def test_record_has_the_documented_form(tmp_path, monkeypatch):
    small = replace(BENCHMARKS["attention"], choose=lambda given, device: VARIANTS[:2])
    monkeypatch.setitem(BENCHMARKS, "attention", small)
    output = tmp_path / "results" / "record.json"
    seen = []
    record = measure(
        "attention",
        {"cases": [VARIANTS[1].name], "impl": ["sdpa-flash"], "quick": True},
        output,
        lambda index, total, case, rows: seen.append((index, total, case.name, rows and len(rows))),
    )
    assert seen == [(0, 1, VARIANTS[1].name, None), (0, 1, VARIANTS[1].name, 2)]
    assert json.loads(output.read_text()) == record
    assert set(record) == {"machine", "versions", "commit", "command", "rows"}
    assert record["machine"]["device"] == "cpu" and record["versions"]["torch"] == torch.__version__
    for row in record["rows"]:
        assert set(row) == {"op", "phase", "impl", "case", "ms", "tflops", "gbps", "error", "timer"}
        assert row["op"] == "attention"


def test_host_time_has_three_phases_and_reports_failures():
    def fail(out):
        raise RuntimeError("no")

    rows = runner.run_case(SMALL, [reference(), reference("failing", change=fail)], CPU, HostProblem)
    assert [row["phase"] for row in rows] == ["fwd-nograd", "fwd", "fwd+bwd"] * 2
    assert all(row["ms"] > 0 and row["tflops"] is None and "timer" not in row for row in rows[:3])
    assert all(row["ms"] is None and row["why"] == "RuntimeError: no" for row in rows[3:])
    assert {row["op"] for row in rows} == {"attention-host"}


def test_host_time_is_that_of_one_call(monkeypatch):
    clock = itertools.count(0, 1e-3)  # a millisecond for each call, and one for the clock
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert HostTimer(lambda: next(clock), CPU).sample(0.0) == [pytest.approx(1.5)]


def test_command_line_leaves_the_output_out(monkeypatch):
    arguments = ["bench", "attention", "--output", "x/y.json", "--quick", "--output=z.json"]
    monkeypatch.setattr("sys.argv", ["somewhere/bin/flashtile", *arguments])
    assert command_line() == "flashtile bench attention --quick"
    monkeypatch.setattr("sys.argv", ["somewhere/flashtile/__main__.py", "bench", "attention", "--cases", "*s64*"])
    assert command_line() == "flashtile bench attention --cases '*s64*'"
    found = command_line("python -m benchmarks.lra", ["--steps", "3", "--output", "a b.json", "--task=x y"])
    assert found == "python -m benchmarks.lra --steps 3 '--task=x y'"


def test_commit_can_be_given(monkeypatch):
    monkeypatch.setenv("FLASHTILE_COMMIT", "abc")
    assert commit() == "abc"


@pytest.mark.parametrize("threads, kind", [(1, "thread-time"), (2, "perf-counter")])
def test_one_thread_is_timed_by_its_own_clock(threads, kind, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    timer = CpuTimer(lambda: time.sleep(0.02))
    assert timer.kind == kind
    (sample,) = timer.sample(0.0)
    assert (sample >= 20) is (threads == 2)  # asleep, a thread does not run


def test_typical_sample_of_a_device():
    samples = [9.0, 1.0, 2.0, 3.0, 100.0]
    assert typical(samples, "cuda-events") == 3.0
    assert [typical(samples, kind) for kind in (*CpuTimer.KINDS, *HostTimer.KINDS)] == [2.0] * 4
