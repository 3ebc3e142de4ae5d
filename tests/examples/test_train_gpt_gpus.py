"""The training script on two GPUs: what one computes, with every kind of parallelism, and resumed bit for bit."""

from __future__ import annotations

import pytest

from training_runs import Run, arguments_of, assert_close, assert_same_bits, launch

# With `pytest -n 8 --dist loadgroup` one worker starts the processes, which make all runs one after another.
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.xdist_group("training"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

_COMPILED = {"eager": [], "compiled": ["--compile"]}
_LLAMA = ["--model=llama-small", "--layers=2", "--context=256", "--peak-tflops=100"]
_SHARED = {"sequences": "--cp=2", "weights": "--tp=2"}


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory):
    """(folder, what went wrong by the folder of a run)."""
    folder = tmp_path_factory.mktemp("runs")

    def of(name, *options):
        return arguments_of(text, folder, name, "--precision=fp32", *options, device="cuda")

    made = {}
    for kind, options in _COMPILED.items():
        made[f"one-{kind}"] = Run(1, of(f"one-{kind}", "--batch=8", *options))
        for parallel in ("ddp", "fsdp"):
            two = [*options, "--batch=2", "--accumulate=2", f"--parallel={parallel}", "--sample=5"]
            whole, parts = (f"{name}-{parallel}-{kind}" for name in ("whole", "parts"))
            made[whole] = Run(2, of(whole, *two))
            made[parts] = Run(2, of(parts, *two, "--resume"), (folder / whole, folder / parts))
    made["llama"] = Run(1, of("llama", *_LLAMA))
    for name, option in _SHARED.items():
        made[name] = Run(2, of(name, *_LLAMA, option, "--parallel=fsdp"))
    return folder, dict(zip(made, launch(list(made.values()), folder)))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", _COMPILED)
def test_two_gpus_are_one_with_twice_the_batch(parallel, kind, runs):
    folder, wrong = runs
    one, whole, parts = f"one-{kind}", f"whole-{parallel}-{kind}", f"parts-{parallel}-{kind}"
    assert not wrong[one] + wrong[whole] + wrong[parts]
    assert_close(folder / one, folder / whole)
    assert_same_bits(folder / whole, folder / parts)


@pytest.mark.parametrize("shared", _SHARED)
def test_two_gpus_that_share_sequences_or_weights_are_one(shared, runs):
    folder, wrong = runs
    assert not wrong["llama"] + wrong[shared]
    assert_close(folder / "llama", folder / shared)
