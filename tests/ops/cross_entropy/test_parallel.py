"""The vocabulary spread over processes: what they get together is what one process gets."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flashtile
from flashtile.testing import assert_same
from support.companions.cross_entropy_parallel import check, check_linear, run_process
from support.distributed.processes import forking


def _two_processes(folder: Path, backend: str, device: str) -> None:
    forking()
    mp.start_processes(run_process, (2, str(folder / "store"), backend, device), nprocs=2, start_method="forkserver")


def test_two_processes(tmp_path):
    _two_processes(tmp_path, "cpu", "cpu")


@pytest.mark.interpreter
def test_two_processes_interpreted(tmp_path):
    _two_processes(tmp_path, "triton", "cpu")


@pytest.mark.multi_gpu
def test_two_gpus(tmp_path):
    _two_processes(tmp_path, "triton", "cuda")


def test_a_group_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        check(0, 1, {"label_smoothing": 0.1}, "cpu", "cpu")
        check(0, 1, {"label_smoothing": 0.1}, "reference", "cpu")
        check_linear(0, 1, {"label_smoothing": 0.1}, "reference", "cpu")
        logits, labels = torch.randn(3, 5, requires_grad=True), torch.tensor([0, 1, 4])

        def function(logits: torch.Tensor) -> torch.Tensor:
            return flashtile.cross_entropy(logits, labels, process_group=dist.group.WORLD)

        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_same(compiled(logits), function(logits))
        grads = (torch.autograd.grad(call(logits), logits) for call in (compiled, function))
        assert_same(*grads)
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
