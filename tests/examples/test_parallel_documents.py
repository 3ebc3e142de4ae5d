"""FSDP2, tensor and context parallelism in one program: the losses of one process, also after a checkpoint."""

from dataclasses import replace

import pytest
import torch

from flashtile.testing import assert_same
from support.models.training_runs import Run, launch, printed


# A checkpoint is written here by a process that has joined no others.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_losses_over_four_and_over_two_processes_are_those_of_one(tmp_path):
    saved = [f"--checkpoint={tmp_path / 'documents'}", "--float64", "--steps=2"]
    runs = [
        (1, ["--float64", "--steps=4"]),
        (4, ["--context=2", "--tensor=2", *saved]),
        (2, ["--tensor=2", "--resume", *saved]),
    ]
    failed = launch([Run(*run, program="parallel_documents") for run in runs], tmp_path)
    assert not any(failed), failed
    alone, in_four, in_two = (printed(tmp_path, number).splitlines() for number in range(3))
    assert alone[0].startswith("step 0: loss 3.") and len(alone) == 4
    assert in_four + in_two == alone


@pytest.mark.multi_gpu
def test_two_gpus_share_documents(tmp_path):
    runs = [Run(1, ["--steps=1"]), Run(2, ["--context=2", f"--checkpoint={tmp_path / 'documents'}", "--steps=1"])]
    failed = launch([replace(run, program="parallel_documents") for run in runs], tmp_path)
    assert not any(failed), failed
    one, two = (torch.tensor(float(printed(tmp_path, number).split()[-1])) for number in range(2))
    assert_same(two, one)
