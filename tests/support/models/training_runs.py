"""Runs of the training script, alone and over several processes, and how two of them are compared."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

import flashtile
from flashtile import testing
from flashtile.models import GPT
from support.distributed.processes import forking

ROOT = Path(__file__).parents[3]
#: Keys of metrics.jsonl that a second run does not repeat.
_TIMES = {"tokens_per_second", "mfu"}


@dataclass(frozen=True)
class Run:
    """One run of the script by some processes.

    Attributes:
        processes: how many; one is alone, as without torchrun.
        arguments: its command line.
        goes_on: of another run's folder and its own, where it goes on with that run from the last but one checkpoint.
        program: the script, a module in `examples`.
        double: whether weights, losses and moments are float64: the oracle of other runs.
    """

    processes: int
    arguments: list[str]
    goes_on: tuple[Path, Path] | None = None
    program: str = "train_gpt"
    double: bool = False


def launch(runs: Sequence[Run], folder: Path) -> list[list[str]]:
    """Runs by processes that stay for all of them, with the environment that torchrun gives: starting them, importing
    and compiling are most of a short run's time. Returns for each run what went wrong in it, nothing where all went
    well. `printed` says what the first process of a run wrote."""
    forking()
    processes = max(run.processes for run in runs)
    mp.start_processes(_run_all, (runs, [_free_port() for _ in runs], folder), processes, start_method="forkserver")
    found = [torch.load(folder / f"ends{rank}.pt") for rank in range(processes)]
    return [[end for end in ends if end] for ends in zip(*found)]


def printed(folder: Path, run: int) -> str:
    """What the first process of a run wrote; `folder` and the place of the run as in `launch`."""
    return (folder / f"printed{run}.txt").read_text("utf-8")


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def _run_all(rank: int, runs: Sequence[Run], ports: Sequence[int], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    ends = []
    for number, (run, port) in enumerate(zip(runs, ports)):
        end, output = "", io.StringIO()
        if rank < run.processes:
            _take_place(rank, run.processes, port)
            if run.goes_on is not None and not rank:
                without_the_last_checkpoint(*run.goes_on)
            try:
                with redirect_stdout(output), _doubled() if run.double else nullcontext():
                    status = importlib.import_module(run.program).main(run.arguments)
                end = f"process {rank} ended with {status}" if status else ""
            except Exception:
                end = traceback.format_exc()
            torch.compiler.reset()
        if not rank:
            (folder / f"printed{number}.txt").write_text(output.getvalue(), "utf-8")
        ends.append(end)
    torch.save(ends, folder / f"ends{rank}.pt")


def _doubled() -> AbstractContextManager[Any]:
    """The script's models are made of the same random numbers, in float64."""
    return mock.patch("gpt_training.learner.GPT", lambda config, **options: GPT(config, **options).double())


def _take_place(rank: int, processes: int, port: int) -> None:
    """The environment of a process of torchrun, or of one alone."""
    place = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_USE_AGENT_STORE": False,
    }  # fmt: skip
    for name, value in place.items():
        if processes > 1:
            os.environ[name] = str(value)
        else:
            os.environ.pop(name, None)


def arguments_of(text: Path, tmp_path: Path, folder: Path | str, *options: Any, device: str = "cpu") -> list[str]:
    defaults: dict[str, Any] = {
        "data": text, "cache": tmp_path / "cache", "output": tmp_path / folder, "device": device, "model": "tiny",
        "steps": 6, "batch": 4, "log-every": 1, "save-every": 3, "validate-every": 3, "validation-batches": 1,
    }  # fmt: skip
    return [*(f"--{name}={value}" for name, value in defaults.items()), *map(str, options)]


def torchrun(processes: int, arguments: list[str]) -> None:
    """The program under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    source = str(Path(flashtile.__file__).parents[1])
    # Where there are many processes, none starts threads or compilers of its own.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": source}
    done = subprocess.run(
        [*command, str(ROOT / "examples/train_gpt.py"), *arguments],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens for training") == 1, "only rank 0 prints"


def entries(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in _TIMES} for line in lines]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whoever wrote it."""
    sizes = {
        name: facts.size
        for name, facts in dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()
        if hasattr(facts, "size")
    }
    state = {name: torch.empty(size) for name, size in sizes.items()}
    dcp.load(state, checkpoint_id=checkpoint)
    return state


def assert_same_bits(first: Path, second: Path) -> None:
    """Bit for bit: all losses and norms, and the last weights and moments."""
    assert entries(first) == entries(second)
    checkpoints = [sorted(folder.glob("step-*"))[-1] for folder in (first, second)]
    assert checkpoints[0].name == checkpoints[1].name
    states = [tensors(checkpoint) for checkpoint in checkpoints]
    assert states[0].keys() == states[1].keys()
    assert any(name.startswith("model.") for name in states[0]) and any("exp_avg_sq" in name for name in states[0])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def assert_close(first: Path, second: Path, oracle: Path | None = None) -> None:
    """All losses and norms of two runs whose sums were rounded in another order.

    Without `oracle` they agree to the rounding of one number. A later loss has that of all steps before, which AdamW
    enlarges. `oracle` is the same run in float64: the second may be as far from it as the policy lets it because of
    the first, by the relative errors of all steps.
    """
    runs = [entries(folder) for folder in (first, second, oracle or first)]
    assert len(runs[0]) > 6 and runs[0][-1]["step"] == 6
    for key in ("step", "learning_rate", "loss", "gradient_norm", "validation_loss"):
        eager, actual, exact = (torch.tensor([e[key] for e in run if key in e], dtype=torch.float64) for run in runs)
        if key in ("step", "learning_rate"):
            assert eager.equal(exact) and actual.equal(exact), key
        else:
            testing.assert_close(key, (actual / exact).float(), torch.ones_like(exact), (eager / exact).float())


def without_the_last_checkpoint(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    shutil.rmtree(target / "step-00000006")
