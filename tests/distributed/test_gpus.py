"""Context parallel attention over GPUs and NCCL: each strategy, on the backends that GPUs have."""

from dataclasses import replace

import pytest
import torch

from flashtile.testing import AttentionCase
from support.distributed.compilation import compile_ahead
from support.distributed.processes import Parallel, check_pairs, check_ranks, start
from support.distributed.tensors import GPU_JOBS
from support.running.covering import turns

# With `pytest -n 8 --dist loadgroup` one worker runs them, beside other tests.
pytestmark = [pytest.mark.multi_gpu, pytest.mark.xdist_group("context parallel")]

#: Several tiles in each shard, in a form that the Hopper kernels serve.
_PLAIN = AttentionCase(
    seq_q=1024, seq_k=1024, batch=2, heads=8, heads_kv=2, head_dim=64, head_dim_v=64, dtype=torch.bfloat16
)
_PACKED = replace(_PLAIN, lengths_q=(100, 0, 400, 37, 387, 100), batch=1)
_FEATURES = {
    "plain": Parallel(_PLAIN),
    "causal": Parallel(replace(_PLAIN, arguments={"causal": True})),
    "deterministic": Parallel(replace(_PLAIN, arguments={"causal": True, "deterministic": True})),
    "window": Parallel(replace(_PLAIN, arguments={"window": (150, 20)})),
    "narrow": Parallel(replace(_PLAIN, arguments={"window": (90, 0)}), layout="contiguous"),
    "more-keys": Parallel(replace(_PLAIN, seq_q=512, arguments={"causal": True})),
    "sinks": Parallel(replace(_PLAIN, sinks=True, arguments={"causal": True})),
    "dropout": Parallel(replace(_PLAIN, alibi_slopes="h", arguments={"dropout_p": 0.2, "causal": True})),
    "bias": Parallel(replace(_PLAIN, bias="1hqk", arguments={"softcap": 4.0})),
    "key-lengths": Parallel(replace(_PLAIN, key_lengths=(1000, 300), arguments={"causal": True})),
    "packed": Parallel(replace(_PACKED, arguments={"causal": True})),
    "packed-much": Parallel(replace(_PACKED, alibi_slopes="bh", arguments={"dropout_p": 0.2, "window": (100, 30)})),
    "runs": Parallel(replace(_PLAIN, heads=16, heads_kv=8, arguments={"causal": True}), in_runs=True),
    "float32": Parallel(replace(_PLAIN, dtype=torch.float32, arguments={"causal": True})),
}


def _jobs(ranks: int) -> dict[str, Parallel]:
    """Four ranks have each feature with two strategies, two ranks with one."""
    strategies = ["ring", "all_to_all", "all_gather", "ring_all_to_all"][: ranks // 2 + 2]
    pairs = turns(_FEATURES, strategies, ranks // 2)
    return {f"{strategy}-{name}": replace(_FEATURES[name], strategy=strategy) for name, strategy in pairs}


_ALL = [(ranks, name) for ranks in (2, 4) for name in _jobs(ranks)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = {}

    def of(ranks):
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs")
        if ranks not in found:
            compile_ahead(_jobs(ranks), ranks, "cuda")
            found[ranks] = start(_jobs(ranks), ranks, tmp_path_factory.mktemp("ranks"), "cuda")
        return found[ranks]

    return of


@pytest.mark.parametrize(("ranks", "name"), _ALL, ids=[f"{ranks}-{name}" for ranks, name in _ALL])
def test_gpus_get_what_one_gets(ranks, name, results):
    """A CPU takes half a minute for each case, so one GPU computes what is expected."""
    check_ranks(_jobs(ranks)[name], name, results(ranks), "cuda")


@pytest.fixture(scope="module")
def dtensors(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    return start(GPU_JOBS, 2, tmp_path_factory.mktemp("dtensors"), "cuda")


@pytest.mark.parametrize("job", GPU_JOBS)
def test_dtensors_and_fsdp2_over_gpus_are_one_gpu(job, dtensors):
    check_pairs(job, dtensors)
