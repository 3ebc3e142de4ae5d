"""Checkpoints: written whole or not at all, found again, and checked before they are read.

A checkpoint is a folder `step-<number>` with the tensors, as `torch.distributed.checkpoint` writes them, and
`run.json`. It does not depend on how many processes wrote it, or whether each had a part of the model or all of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from gpt_training.learner import Learner
from gpt_training.options import OptionError, Options, flag
from gpt_training.processes import Processes

_NAME = re.compile(r"step-(\d+)")
_FACTS = "run.json"
#: Options that decide what is learned from what, and the names of their values where a default depends on others.
_DECISIVE = dict.fromkeys(
    ("validation_share", "steps", "learning_rate", "weight_decay", "beta1", "beta2", "clip", "seed"), ""
) | {"minimum_learning_rate": "lowest_learning_rate", "warm_up": "warm_up_steps"}


def identity_of(options: Options, learner: Learner, processes: Processes, fingerprint: str) -> dict[str, Any]:
    """The settings that must be the same for a training to go on as if it had not been interrupted."""
    return {
        "model": asdict(learner.config),
        "data": fingerprint,
        "sequences in a step": options.batch * options.accumulate * processes.replicas,
        "--precision": learner.precision,
        **{flag(name): getattr(options, value or name) for name, value in _DECISIVE.items()},
    }


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: of the training.
        keep: how many stay, the newest.
        identity: of the training, from `identity_of`.
        processes: which all write and read.
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], processes: Processes) -> None:
        self._folder, self._keep, self._processes = folder, keep, processes
        self._identity = json.loads(json.dumps(identity))  # as it comes out of a file

    def start(self, learner: Learner, resume: bool) -> int:
        """How many steps are done: those of the newest checkpoint, which is loaded, or 0 where there is none.

        Raises:
            OptionError: the checkpoint is of another training, or there is one and the training is not to be resumed.
        """
        step = self._processes.from_first(lambda: self._newest(resume))
        if step:
            state = learner.state()
            dcp.load(state, checkpoint_id=self._path(step))
            learner.load(state)
        return step

    def save(self, learner: Learner, step: int) -> None:
        """Writes a checkpoint beside its place, moves it there in one go, and removes old ones."""
        path = self._path(step)
        partial = path.with_name(path.name + ".partial")
        self._processes.from_first(lambda: shutil.rmtree(partial, ignore_errors=True))  # of an earlier, killed process
        dcp.save(learner.state(), checkpoint_id=partial)
        if self._processes.first:
            with (partial / _FACTS).open("w", encoding="utf-8") as stream:
                json.dump({"step": step, "training": self._identity}, stream, indent=2)
                stream.flush()
                os.fsync(stream.fileno())
            partial.rename(path)
            for old in self._steps()[: -self._keep]:
                shutil.rmtree(self._path(old))
            for abandoned in self._folder.glob("step-*.partial"):
                shutil.rmtree(abandoned)

    def _newest(self, resume: bool) -> int:
        steps = self._steps()
        if not steps:
            return 0
        path = self._path(steps[-1])
        if not resume:
            raise OptionError(
                f"--output: expected a folder without checkpoints, got {self._folder} with {path.name}; go on from it "
                "with --resume, or take another folder"
            )
        written = json.loads((path / _FACTS).read_text("utf-8"))["training"]
        for name, expected in written.items():
            if self._identity.get(name) != expected:
                raise OptionError(_difference(path, name, expected, self._identity.get(name)))
        return steps[-1]

    def _steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        found = (_NAME.fullmatch(path.name) for path in self._folder.glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"


def _difference(path: Path, name: str, expected: Any, found: Any) -> str:
    if name == "data":
        return f"--data: expected the text that {path} was trained on, got another (or another --tokenizer)"
    if name == "model":
        keys = [key for key in expected if found.get(key) != expected[key]]
        expected, found = ({key: config.get(key) for key in keys} for config in (expected, found))
        return f"--resume: expected the model of {path}, with {expected}, got {found}; take another --output for it"
    remedy = "--batch × --accumulate × processes" if name.startswith("sequences") else name
    return f"{name}: expected {expected} as in {path}, got {found}; set {remedy} as it was, or take another --output"
