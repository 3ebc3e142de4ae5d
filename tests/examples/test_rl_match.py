"""The sampler and the trainer of `examples/rl_match.py`."""

import argparse

import rl_match


def test_sampler_and_trainer_agree_in_every_bit_in_the_mode():
    arguments = argparse.Namespace(device="cpu", dtype="float32", backend="auto", sequences=3, tokens=8)
    assert not rl_match.differences(arguments, invariant=True).any()
    assert rl_match.differences(arguments, invariant=False).any()
