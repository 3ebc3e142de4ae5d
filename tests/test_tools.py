"""Scripts in `tools/` that run without a GPU do what they say."""

from __future__ import annotations

import json
import re
import sys

import pytest

from flashtile._backends import devices
from support.running.python import ROOT, run_python

pytestmark = pytest.mark.skipif(
    bool(devices.triton_missing()) or devices.interpreting(), reason="plans launches of Triton kernels"
)


@pytest.mark.slow
def test_the_host_time_of_every_operation_is_measured():
    times = json.loads(run_python("tools/host_path.py", "--rounds", "1", "--json"))
    operations = {name.split()[0] for name in times}
    norms = {"layer_norm", "rms_norm", "dropout_add_rms_norm"}
    assert operations == {"attention", *norms, "rotary", "cross_entropy", "softmax", "dense", "mlp", "kv_cache"}
    assert all(0 < time < 1e5 for time in times.values())


@pytest.mark.slow
def test_random_calls_run_on_the_emulated_kernels():
    printed = run_python(
        "tools/soak_attention.py", "--features", "--emulated", "--processes", "1", "--count", "3", "--seed", "3"
    )
    (served,) = re.findall(r"3 random calls, (\d) of them served, 0 wrong", printed)
    assert int(served) > 0


@pytest.mark.parametrize("may_spill", [0, -1])
def test_a_survey_fails_where_a_kernel_spills_more_than_is_stated(may_spill, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import compile_survey

    command = f"survey --arch sm_86 --operation dense --kernel column_sum --json {tmp_path / 'records'}"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(compile_survey, "companion_spills", lambda *form: may_spill)
    assert compile_survey.main() == (may_spill < 0)
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    bad = sum(record["spilled"] > may_spill for record in records)
    *lines, total = capsys.readouterr().out.splitlines()
    assert len(lines) == len(records) > 2
    assert total == f"sm_86: {len(records)} forms, 0 spill, {bad} past what is stated"


def test_the_age_of_a_record_counts_functions_by_their_instructions():
    from tools.record_age import BEGIN, END, RESULTS, functions

    kernel = (
        "@gluon.jit\ndef {name}(x):\n    '''{prose}'''\n    return {called}(x) + {number}\n\ndef host(x):\n    return x"
    )
    first, renamed, other = (
        [*functions(kernel.format(name=name, prose=name, called=called, number=number), jitted=True)]
        for name, called, number in (("load", "f", 1), ("fetch", "g", 1), ("load", "f", 2))
    )
    assert first == renamed != other and len(first) == 1
    written = (RESULTS / "README.md").read_text("utf-8").split(BEGIN)[1].split(END)[0]
    records = {path.name for path in RESULTS.glob("*.json")}
    assert set(re.findall(r"`([\w-]+\.json)`", written)) == records, "run python tools/record_age.py --write"
