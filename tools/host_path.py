"""The host's own time for a small call of each operation, up to the driver, on a machine without a GPU.

    python tools/host_path.py                     # all cases
    python tools/host_path.py attention --rounds 50
    python tools/host_path.py --tree ../other     # the sources of another tree, in turns with this one

Tensors are on the CPU, and the code that runs is that of a GPU: the public function, autograd, checks, the choice of
the backend, the look-up of the plan, allocation and the launch; the driver's function does nothing. The figures compare
two states of the sources; on a GPU (`flashtile bench host-time`) there is the driver's part as well.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_CALLS = 200


def pretend_gpu() -> None:
    """Makes the code for GPUs serve tensors on the CPU, as one H200 would, and lets nothing be compiled or launched."""
    import triton

    from flashtile._backends import devices, launch, launcher, pipeline, tma

    cuda: Any = torch._C
    cuda._cuda_getDevice = lambda: None  # the index of a CPU
    cuda._cuda_getCurrentRawStream = lambda index: 0
    cuda._cuda_isCurrentStreamCapturing = lambda: False
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[misc,assignment]
    triton.compile = lambda *_, **__: SimpleNamespace(src=SimpleNamespace())
    launch.load = lambda *_: launcher.LoadedFunction(0, 128, 0)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_device=lambda: 0))
    nothing = ctypes.CDLL(None).pthread_mutexattr_destroy  # does nothing with whatever it is given, and returns 0
    launch.driver = pipeline.driver = lambda: SimpleNamespace(cuLaunchKernelEx=nothing)
    devices.device_facts = lambda device: devices.KNOWN_DEVICES["sm_90"]  # type: ignore[assignment]
    devices.multiprocessors = lambda device: 132  # type: ignore[assignment]
    tma._encoded = lambda *given: (launcher.Descriptor(array("Q"), None),)

    from flashtile.ops.attention import call as description
    from flashtile.ops.attention import repeated
    from flashtile.ops.common import backends, philox
    from flashtile.ops.layer_norm import api as norms

    repeated.readable = lambda tensor: False  # no values are read, as on a GPU
    seeds, cpu = philox.SeedBlocks(), torch.device("cpu")
    nothing_drawn = {"initial_seed": lambda: 0, "get_offset": lambda: 0, "set_offset": lambda offset: None}
    generator: Any = SimpleNamespace(**nothing_drawn)  # of a GPU, which draws the same numbers again and again
    for module in (repeated, norms):
        module.next_dropout_seed = lambda tensor: seeds.draw(generator, cpu, 0)  # type: ignore[assignment,attr-defined]
    for _ in range(100):  # the first draws come from launches
        seeds.draw(generator, cpu, 0)
    machine = description.Machine("cuda", devices.KNOWN_DEVICES["sm_90"], 132)
    description.current_machine = lambda device: machine
    call = backends.StandardCall
    backends.StandardCall = lambda operation, requested, device_type, *facts: call(operation, requested, "cuda", *facts)


def cases() -> dict[str, Callable[[], Any]]:
    """The timed calls, by name."""
    import flashtile

    def tensor(*shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=grad)

    found: dict[str, Callable[[], Any]] = {}
    plain = [tensor(1, 128, 2, 64) for _ in range(3)]
    learned = [tensor(1, 128, 2, 64, grad=True) for _ in range(3)]
    packed, packed_learned = ([each.detach()[0].requires_grad_(grad) for each in plain] for grad in (False, True))
    offsets = torch.tensor([0, 64, 128], dtype=torch.int32)

    def modes(
        name: str, function: Callable[..., Any], of_plain: Sequence, of_learned: Sequence, **options: Any
    ) -> None:
        """A call without gradients, recorded, and with its backward."""
        wanted = [each for each in (*of_learned, *options.values()) if _learns(each)]
        upstream = torch.zeros_like(function(*of_learned, **options))

        def both() -> None:
            torch.autograd.grad(function(*of_learned, **options), wanted, upstream)

        found[f"{name} forward, no grad"] = lambda: function(*of_plain, **options)
        found[f"{name} forward"] = lambda: function(*of_learned, **options)
        found[f"{name} forward + backward"] = both

    def attention(name: str, **options: Any) -> None:
        modes(f"attention {name}", flashtile.attention, plain, learned, **options)

    attention("hopper", backend="hopper")
    attention("triton", backend="triton")
    mask = torch.ones(128, 128, dtype=torch.bool).tril()
    table = torch.zeros(2, 256)
    features: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "dropout": {"dropout_p": 0.1},
        "sinks": {"sinks": torch.zeros(2, requires_grad=True)},
        "alibi": {"alibi_slopes": torch.ones(2), "causal": True},
        "key_lengths": {"key_lengths": torch.tensor([100], dtype=torch.int32)},
        "mask": {"mask": mask[None, None]},
        "bias": {"bias": tensor(1, 2, 128, 128)},
        "block_mask": {"block_mask": flashtile.BlockMask.from_dense(mask, (128, 128))},
        "score_mod": {"score_mod": lambda score, batch, head, row, column: score + table[head, row - column + 128]},
    }
    for name, options in features.items():
        attention(f"hopper {name}", backend="hopper", **options)
    modes(
        "attention hopper packed", flashtile.attention_varlen, packed, packed_learned, cu_seqlens_q=offsets,
        max_seqlen_q=64, max_seqlen_k=64, backend="hopper",
    )  # fmt: skip

    def companion(name: str, function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> None:
        of_learned = [each.clone().requires_grad_(each.is_floating_point()) for each in tensors]
        modes(name, function, tensors, of_learned, backend="triton", **options)

    x, residual, weight, bias = tensor(64, 1024), tensor(64, 1024), tensor(1024), tensor(1024)
    companion("layer_norm", flashtile.layer_norm, x, weight, bias)
    companion("rms_norm", flashtile.rms_norm, x, weight)
    companion("dropout_add_rms_norm", flashtile.dropout_add_rms_norm, x, residual, weight)
    companion("rotary", flashtile.apply_rotary, plain[0], cos=tensor(128, 32), sin=tensor(128, 32))
    logits, labels = tensor(64, 1000), torch.zeros(64, dtype=torch.int64)
    companion("cross_entropy", flashtile.cross_entropy, logits, labels)
    companion("softmax", flashtile.scaled_causal_softmax, tensor(2, 4, 64, 64))
    companion("layer_norm of sequences", flashtile.layer_norm, tensor(2, 32, 1024), weight, bias)
    # Products are computed, so they are small.
    small, square, vector = tensor(2, 8, 16), tensor(16, 16), tensor(16)
    companion("dense", flashtile.fused_dense, small, square, vector)
    companion("mlp", flashtile.fused_mlp, small, square, vector, square, vector)
    caches, lengths = tensor(2, 2, 512, 2, 64), torch.tensor([9, 7], dtype=torch.int32)
    query, new, angles = tensor(2, 1, 4, 64), tensor(2, 1, 2, 64), tensor(512, 32)
    appended = {"k": new, "v": new.clone(), "rotary_cos": angles, "rotary_sin": angles.clone()}
    pages = {"block_table": torch.arange(64, dtype=torch.int32).view(2, 32)}
    starts = {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32), "max_seqlen_q": 1}
    of_calls: dict[str, dict[str, Any]] = {
        "": {}, " pages": pages, " append": {"k": new, "v": new.clone()}, " append rotary pages": {**pages, **appended},
        " packed append rotary pages": {
            **pages, **starts, **appended, "k": new[:, 0].contiguous(), "v": new[:, 0].clone(),
        },
    }  # fmt: skip
    for name, options in of_calls.items():
        of_options = caches.view(2, 64, 16, 2, 64) if "pages" in name else caches
        given = query[:, 0] if "packed" in name else query
        found[f"kv_cache{name} forward"] = functools.partial(
            flashtile.attention_with_kv_cache, given, *of_options, cache_lengths=lengths, backend="triton", **options
        )
    return found


def _learns(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def measure(words: list[str], rounds: int) -> dict[str, float]:
    """Microseconds of a call, the least of rounds, by case: other programs on the machine only add to it."""
    pretend_gpu()
    times = {}
    for name, call in cases().items():
        if all(word in name for word in words):
            for _ in range(_CALLS):
                call()
            times[name] = min(_round(call) for _ in range(rounds))
    return times


def _round(call: Callable[[], Any]) -> float:
    start = time.process_time()
    for _ in range(_CALLS):
        call()
    return (time.process_time() - start) / _CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only cases whose name has these words")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tree", type=Path, help="another tree, measured in turns with this one")
    parser.add_argument("--turns", type=int, default=3, help="processes of each tree, with --tree")
    parser.add_argument("--json", action="store_true", help="print the times as JSON")
    options = parser.parse_args()
    if options.tree is None:
        times = measure(options.words, options.rounds)
        print(
            json.dumps(times) if options.json else "\n".join(f"{time:8.1f} µs  {name}" for name, time in times.items())
        )
        return
    trees = options.tree.resolve(), Path(__file__).resolve().parent.parent
    runs: list[list[dict[str, float]]] = [[], []]
    for _ in range(options.turns):
        for tree, tree_keys in zip(trees, runs):
            tool = str(tree / "tools" / "host_path.py")  # what it replaces is of its tree
            command = [sys.executable, tool, *options.words, "--rounds", str(options.rounds), "--json"]
            environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
            text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            tree_keys.append(json.loads(text))
    print(f"{'before':>8} {'after':>8}  µs: least of {options.turns} processes; before: {trees[0]}")
    for name in runs[1][0]:
        before, after = (min(run[name] for run in tree_keys) for tree_keys in runs)
        print(f"{before:8.1f} {after:8.1f}  {name}")


if __name__ == "__main__":
    main()
