"""The training script on two GPUs: what one computes, with every kind of parallelism, and resumed bit for bit."""

import pytest

from support.models.training_runs import Run, arguments_of, assert_close, assert_same_bits, launch

# With `pytest -n 8 --dist loadgroup` one worker starts the processes, which make all runs one after another.
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.xdist_group("training"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

_COMPILED = {"eager": [], "compiled": ["--compile"]}
_LLAMA = ["--model=llama-small", "--layers=2", "--context=256", "--peak-tflops=100"]
_SHARED = {"sequences": "--cp=2", "weights": "--tp=2"}


def _arguments(text, folder, name, *options, device="cuda"):
    return arguments_of(text, folder, name, "--precision=fp32", *options, device=device)


def _oracle(text, folder, *options):
    return Run(1, _arguments(text, folder, "oracle", *options, device="cpu"), double=True)


@pytest.fixture(scope="module", params=_COMPILED)
def runs(request, text, tmp_path_factory):
    """(folder, what went wrong by the folder of a run): of one process, and of two with either data parallelism."""
    folder, options = tmp_path_factory.mktemp(request.param), _COMPILED[request.param]
    made = {"oracle": _oracle(text, folder, "--batch=8")}
    made["one"] = Run(1, _arguments(text, folder, "one", "--batch=8", *options))
    for parallel in ("ddp", "fsdp"):
        two = [*options, "--batch=2", "--accumulate=2", f"--parallel={parallel}", "--sample=5"]
        whole, parts = f"whole-{parallel}", f"parts-{parallel}"
        made[whole] = Run(2, _arguments(text, folder, whole, *two))
        made[parts] = Run(2, _arguments(text, folder, parts, *two, "--resume"), (folder / whole, folder / parts))
    return folder, dict(zip(made, launch(list(made.values()), folder)))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_gpus_are_one_with_twice_the_batch(parallel, runs):
    folder, wrong = runs
    whole, parts = f"whole-{parallel}", f"parts-{parallel}"
    assert not wrong["oracle"] + wrong["one"] + wrong[whole] + wrong[parts]
    assert_close(folder / "one", folder / whole, folder / "oracle")
    assert_same_bits(folder / whole, folder / parts)


@pytest.fixture(scope="module")
def shared(text, tmp_path_factory):
    """The same, of a Llama in one process, and in two that share its sequences or its weights."""
    folder = tmp_path_factory.mktemp("shared")
    made = {"oracle": _oracle(text, folder, *_LLAMA)}
    made["llama"] = Run(1, _arguments(text, folder, "llama", *_LLAMA))
    for name, option in _SHARED.items():
        made[name] = Run(2, _arguments(text, folder, name, *_LLAMA, option, "--parallel=fsdp"))
    return folder, dict(zip(made, launch(list(made.values()), folder)))


@pytest.mark.parametrize("what", _SHARED)
def test_two_gpus_that_share_sequences_or_weights_are_one(what, shared):
    folder, wrong = shared
    assert not wrong["oracle"] + wrong["llama"] + wrong[what]
    assert_close(folder / "llama", folder / what, folder / "oracle")
