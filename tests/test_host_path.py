"""`tools/host_path.py` measures what it names: the code for GPUs, on tensors of the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashtile._backends import devices

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(bool(devices.triton_missing()) or devices.interpreting(), reason="plans launches of Triton kernels")
def test_every_operation_is_measured() -> None:
    command = [sys.executable, "tools/host_path.py", "--rounds", "1", "--json"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    times = json.loads(printed)
    operations = {name.split()[0] for name in times}
    assert operations == {"attention", "layer_norm", "rotary", "cross_entropy", "softmax", "kv_cache"}
    assert all(0 < time < 1e5 for time in times.values())
