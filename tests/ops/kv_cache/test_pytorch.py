"""The operators under PyTorch's machinery: schemas, fake tensors, torch.compile, versions of what was written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode

import flashtile
from support.attention.kv_cache_cases import PAIRS, make_inputs
from support.running.each_case import each_case

_APPEND = replace(PAIRS["rotary halves"], heads=4, dtype=torch.float32)


@each_case("dtype", [torch.float16, torch.float64])
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(dtype: torch.dtype) -> None:
    case = replace(PAIRS["rotary halves+head_dims"], dtype=dtype, heads=4)
    inputs = make_inputs(case)
    real = inputs.cast(dtype).call(return_lse=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = inputs.cast(dtype)
        for name in ("q", "k_cache", "v_cache", "k", "v"):
            setattr(fake, name, mode.from_tensor(getattr(inputs, name)))
        made = fake.call(return_lse=True)
    for one, other in zip(real, made, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_compiled_once_for_all_lengths() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    k_cache, v_cache = torch.zeros(2, 1, 64, 2, 8)

    def step(q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        return flashtile.attention_with_kv_cache(q, k_cache, v_cache, k, k, cache_lengths=lengths)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for length in range(5):
        compiled(torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8), torch.tensor([length]))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_packed_trees_behind_a_common_prefix_compile_to_one_graph() -> None:
    table = torch.tensor([[0, 1, 2, 3], [0, 4, 5, 6]])

    def step(parents: Tensor, q: Tensor, cache: Tensor, starts: Tensor) -> Tensor:
        tree = flashtile.tree_mask(parents, starts, 3)
        return flashtile.attention_with_kv_cache(
            q, cache, cache + 1, q[:, :2], q[:, 2:], cache_lengths=starts[1:] + 4, cu_seqlens_q=starts, max_seqlen_q=3,
            block_table=table, tree_mask=tree, shared_rows=4,
        )  # fmt: skip

    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=True)
    parents, q, cache, starts = torch.tensor([-1, 0, -1, 0, 1]), *torch.randn(2, 8, 4, 4, 16), torch.tensor([0, 2, 5])
    inputs = parents, q[:5, 0], cache[:, :, :2]
    assert torch.equal(compiled(*inputs, starts), step(*inputs, starts))


def test_caches_written_to_have_a_new_version() -> None:
    inputs = make_inputs(_APPEND)
    before = inputs.k_cache._version, inputs.v_cache._version
    inputs.call()
    assert inputs.k_cache._version > before[0] and inputs.v_cache._version > before[1]
    reading = make_inputs(PAIRS["plain"])
    before = reading.k_cache._version, reading.v_cache._version
    reading.call()
    assert (reading.k_cache._version, reading.v_cache._version) == before


def test_transforms_are_refused() -> None:
    q, cache = torch.randn(3, 2, 1, 2, 8), torch.randn(2, 9, 2, 8)
    with pytest.raises(NotImplementedError, match=r"no torch.func transforms.*use flashtile.attention"):
        torch.func.vmap(lambda q: flashtile.attention_with_kv_cache(q, cache, cache))(q)
