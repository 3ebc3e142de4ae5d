"""The record of a GPU: calls for GPUs of any size, what does not fit, and nothing about the user."""

import json
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashtile.bench import base, implementations, record, runner
from flashtile.bench.base import Implementation
from flashtile.bench.card import card_cases, file_name, public, without_names
from flashtile.bench.cases import Case
from flashtile.bench.html import make_verdict
from flashtile.bench.html.charts import Named, record_part
from flashtile.bench.implementations import IMPLEMENTATIONS, build_flashtile
from flashtile.bench.oracle import AttentionProblem
from flashtile.bench.record import make_row
from flashtile.bench.report import verdict, verdict_table
from flashtile.bench.tables import card_cases as attention_cases
from flashtile.bench.tables import find_table, tables

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Case(1, 32, 2, 2, 8, 8, causal=True, dtype="fp32")
#: All that a record may tell, level by level. A key that is new here has been thought about.
TOLD = {
    "record": {"machine", "versions", "commit", "command", "tuned", "checks", "rows"},
    "machine": {
        "device", "gpu", "gpu_capability", "gpu_multiprocessors", "gpu_memory_gib", "driver", "cpu", "cpu_cores",
        "torch_threads", "cpu_memory_gib", "system",
    },
    "versions": {
        "python", "flashtile", "torch", "cuda", "rocm", "cudnn", "triton", "flash-attn-4", "liger-kernel",
        "quack-kernels",
    },
    "tuned": {"choice", "key", "cut", "ms", "shipped_ms"},
    "check": {"backend", "operation", "calls", "wrong"},
    "row": {"op", "phase", "impl", "case", "ms", "tflops", "gbps", "error", "timer", "peak_mib", "why"},
}  # fmt: skip


def test_the_table_has_every_kind_of_call_and_is_small():
    cases = attention_cases("bf16")
    assert {case.D for case in cases} == {64, 128, 256} and {case.S for case in cases} >= {1024, 4096, 16384}
    for kind in ("window", "lengths", "bias", "mask", "dropout_p"):
        assert any(getattr(case, kind) for case in cases), kind
    assert any(case.H != case.Hkv for case in cases) and {case.causal for case in cases} == {False, True}
    assert {case.dtype for case in cases} == {"bf16", "fp32"}
    assert sum(case.flops("fwd") for case in cases) < 1e12 and max(case.bytes("bwd") for case in cases) < 2**28
    others = {case for name, table in tables(CUDA).items() if name != "card" for case in table}
    assert not others & {*cases}, "means are taken over a table"


def test_a_gpu_without_bfloat16_is_measured_in_float16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert {case.dtype for case in card_cases(CUDA)["attention"]} == {"fp16", "fp32"}
    assert {case.dtype for part in ("serving", "companions") for case in card_cases(CUDA)[part]} == {"fp16"}
    assert {find_table(case) for dtype in ("fp16", "bf16") for case in attention_cases(dtype)} == {"card"}


def test_checks_hold_less_at_once_on_a_small_gpu(monkeypatch):
    monkeypatch.setattr(base, "device_memory", lambda device: 80 * 2**30)
    assert base.check_elements(2**27, CUDA) == 2**27
    monkeypatch.setattr(base, "device_memory", lambda device: 8 * 2**30)
    assert base.check_elements(2**27, CUDA) == 2**25


def test_the_memory_efficient_kernel_is_the_peer_where_flash_is_not(monkeypatch):
    (efficient,) = (each for each in IMPLEMENTATIONS if each.name == "sdpa-efficient")
    plain = attention_cases("fp16")[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 0), (7, 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert (efficient.unsupported(plain, CUDA) is None) == (capability == (7, 5))
    assert implementations._before_flash(CPU) is False


@pytest.mark.parametrize("where", ["tensors", "call", "check", "timer", "samples"])
def test_what_does_not_fit_is_left_out_and_told(where, monkeypatch):
    def full(*given, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    attend = build_flashtile("reference")
    chosen = Implementation("flashtile-reference", ("cpu",), (lambda *given: full) if where == "call" else attend)
    place = {
        "tensors": ("flashtile.bench.oracle.make_inputs", full),
        "check": (AttentionProblem, "judge", full),
        "timer": (AttentionProblem, "timer", full),
        "samples": (AttentionProblem, "timer", lambda *given: SimpleNamespace(kind="", sample=full)),
    }
    if where in place:
        monkeypatch.setattr(*place[where])
    rows = runner.run_case(SMALL, [chosen], CPU, AttentionProblem, 0.0)
    assert [row["phase"] for row in rows] == ["fwd", "bwd"]
    for row in rows:
        assert row["ms"] is None and row["why"] == "left out: it does not fit the memory that is free on this GPU"


@pytest.fixture
def somebody(monkeypatch):
    """Names of a user and of a machine."""
    monkeypatch.setenv("HOME", "/homes/ada lovelace")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr(platform, "node", lambda: "analytical.engine.example")
    return "ada", "lovelace", "analytical", "10.1.2.3", "secret", "homes"


MESSAGES = {
    "FileNotFoundError: '/homes/ada lovelace/.triton/cache/x.json'": "FileNotFoundError: '…'",
    "no route from analytical to 10.1.2.3 for ada": "no route from … to … for …",
    "ninja: /opt/secret/gcc failed (in /tmp/secret/y), see https://secret.example/a/b": "ninja: … failed (in …), see …",
    "OutOfResources: shared memory, Required: 131072, Hardware limit: 101376": None,
    "out: largest error 3 at [1, 2], 5.2 GB/s, 'v': [B/2, 3]": None,
}


def test_messages_lose_names_and_keep_the_rest(somebody):
    for message, expected in MESSAGES.items():
        assert without_names(message) == (expected or message)


def test_a_record_to_hand_in_tells_what_is_listed_and_nothing_else(somebody, monkeypatch):
    machine = dict.fromkeys(TOLD["machine"], "x")
    versions = dict.fromkeys(TOLD["versions"], "1")
    message = next(iter(MESSAGES))
    row = make_row("attention", "fwd", "peer", SMALL.record(), why=message, timer="t", peak_mib=1.0)
    made = {
        "machine": {**machine, "host": "analytical", "user": "ada"},
        "versions": {**versions, "environment": "secret"},
        "commit": "secret",
        "command": "flashtile bench card --output=/homes/ada lovelace/secret.json",
        "rows": [{**row, "path": "/homes/secret"}],
        "environment": {"HOME": "/homes/ada lovelace"},
    }
    check = {"backend": "triton", "operation": "norm", "calls": 3, "wrong": [message]}
    tuned = {**dict.fromkeys(TOLD["tuned"], 1), "path": "/homes/secret"}
    found = public(made, [check], [tuned])
    assert set(found) == TOLD["record"] and set(found["machine"]) == TOLD["machine"]
    assert set(found["versions"]) == TOLD["versions"] and set(found["checks"][0]) == TOLD["check"]
    assert set(found["tuned"][0]) == TOLD["tuned"]
    assert set(found["rows"][0]) == TOLD["row"] and found["rows"][0]["case"] == SMALL.record()
    assert found["commit"] is None and public({**made, "commit": "0123456789ab-dirty"}, [], [])["commit"]
    text = json.dumps(found, ensure_ascii=False)
    assert not [name for name in somebody if name in text], text


def test_a_record_is_named_after_the_gpu():
    names = {
        "NVIDIA GeForce RTX 4090": "card-rtx-4090.json",
        "AMD Radeon RX 7900 XTX": "card-rx-7900-xtx.json",
        "Tesla T4": "card-t4.json",
        "NVIDIA A100-SXM4-80GB": "card-a100-sxm4-80gb.json",
    }
    assert {gpu: file_name({"machine": {"gpu": gpu}}) for gpu in names} == names
    assert file_name({"machine": {}}) == "card-cpu.json"


def test_a_record_names_architecture_and_driver_of_either_maker(monkeypatch):
    properties = SimpleNamespace(major=8, minor=9, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(record, "_output", lambda command: "575.57\n575.57")
    for hip, arch, driver in ((None, "sm_89", "575.57"), ("7.0", "gfx942", None)):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(Path, "exists", lambda path: False)
        assert (record._architecture(properties), record._driver()) == (arch, driver)


def row(impl, ms, case=SMALL, phase="fwd"):
    return make_row("attention", phase, impl, case.record(), **({"why": "no"} if ms is None else {"ms": ms}))


def test_the_verdict_is_our_fastest_beside_the_fastest_peer():
    other = replace(SMALL, S=64)
    rows = [
        *(row("flashtile-triton", 4.0), row("flashtile-hopper", 2.0), row("copy", 0.1), row("a", 3.0), row("b", 1.0)),
        *(row("flashtile-triton", 1.0, other), row("a", 2.0, other), row("a", 2.0, other, "bwd")),
        *(row("flashtile-triton", None, SMALL, "bwd"), row("a", 5.0, SMALL, "bwd")),
    ]
    table = verdict_table(rows)
    assert [line[1:] for line in table.lines] == [
        ["fwd", "2", "1", "b", "0.50"],
        ["fwd", "1", "2", "a", "2.00"],
        ["bwd", "–", "5", "a", "–"],
    ]
    assert verdict(table).startswith("flashtile is faster than the fastest peer in 1 of 2 measurements, 1.00 times")
    assert verdict(verdict_table(rows[:3])) == "No call has both a speed of ours and one of a peer."


def test_a_record_of_every_case_becomes_a_page():
    rows = [
        make_row(case.op, phase, impl, case.record(), ms=ms, tflops=2.0, gbps=3.0)
        for part in card_cases(CUDA).values()
        for case in part
        for phase in ("fwd", "bwd")
        for impl, ms in (("flashtile-hopper", 1.0), ("flashtile-triton", 2.0), ("sdpa-flash", 3.0))
    ]
    made = {"machine": {"gpu": "NVIDIA GeForce RTX 4090"}, "versions": {}, "commit": "c" * 12, "rows": rows}
    named = Named(public(made, [], []), Path("card.json"))
    assert len(record_part(named).tables) > 3
    assert make_verdict([named]).sentences[0].startswith("On NVIDIA GeForce RTX 4090 flashtile is faster")
