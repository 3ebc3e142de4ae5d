"""The poison that the other tests here rely on (tests/conftest.py)."""

import pytest
import torch

from support.running.each_case import each_case


@each_case("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uninitialised_floats_are_nan(dtype):
    like = torch.zeros(5, 7, dtype=dtype)
    for tensor in (torch.empty(1000, dtype=dtype), torch.empty_like(like), like.new_empty(3, 4)):
        assert tensor.isnan().all()
    assert torch.empty_strided((3, 4), (4, 1), dtype=dtype).isnan().all()


def test_uninitialised_integers_are_their_largest_value():
    assert (torch.empty(10, dtype=torch.int32) == 2**31 - 1).all()


@pytest.mark.unpoisoned
def test_the_mark_leaves_memory_alone():
    assert not torch.are_deterministic_algorithms_enabled()
