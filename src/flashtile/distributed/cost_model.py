"""The cost of context parallelism, on paper: time of each strategy from rates of compute and of links.

Letters: `N` ranks, `s` tokens of a shard, `H` and `Hkv` query and key/value heads, `D` head_dim. The schedules are
those of `schedule`; what is derived from the formulas is in docs/distributed.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashtile.distributed.schedule import head_runs

#: FLOPs of a backward over those of its forward: five products where there were two.
BACKWARD = 2.5


@dataclass(frozen=True)
class Machine:
    """A cluster, by what counts here. Rates are what is reached, not what is promised.

    Attributes:
        forward: FLOP/s of the forward on one GPU, of the pairs that are computed.
        backward: likewise of the backward.
        near: bytes per second that a GPU receives from those of its node, while it sends as many.
        far: likewise from other nodes.
        node: GPUs of a node.
        memory: bytes per second of a GPU's own memory.
        latency: seconds until a transfer has begun, launches included.
    """

    forward: float
    backward: float
    near: float
    far: float
    node: int = 8
    memory: float = 4.0e12
    latency: float = 20e-6


#: H200s in nodes of 8. Compute is what this project measured on one (benchmarks/results/h200-attention.json, 128
#: columns, 16,384 tokens, causal), and `near` what NCCL reached when four of them exchanged heads (0.61 ms for 151 MB;
#: NVLink 4 has 450 GB/s each way). `far` is 80 % of one 400 Gb/s port for each GPU, memory 80 % of 4.8 TB/s; these
#: shares and the latency are assumptions, to be exchanged for measurements.
H200 = Machine(forward=790e12, backward=669e12, near=240e9, far=40e9, memory=3.8e12)


@dataclass(frozen=True)
class Load:
    """An attention call over all ranks. `length`: tokens of the whole sequence, queries and keys. `heads`, `heads_kv`,
    `head_dim`: of the call. `causal`: half of the pairs are visible; zigzag shares them out evenly. `batch`: sequences.
    `itemsize`: bytes of an element."""

    length: int
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    causal: bool = True
    batch: int = 1
    itemsize: int = 2

    @property
    def flops(self) -> float:
        """Operations of a forward."""
        full = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return full / 2 if self.causal else full

    def tensor_bytes(self, tokens: float, heads: float) -> float:
        """Bytes of one tensor with so many tokens and heads."""
        return self.batch * tokens * heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Cost:
    """Seconds of one rank. `compute`: of the kernels, were nothing in their way. `exposed`: in which they wait for
    transfers. `merging`: of partial results."""

    compute: float
    exposed: float
    merging: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.merging

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.compute + other.compute, self.exposed + other.exposed, self.merging + other.merging)


Phase = Literal["fwd", "fwd+bwd"]


def cost(strategy: str, load: Load, ranks: int, machine: Machine, phase: Phase = "fwd+bwd", inner: int = 1) -> Cost:
    """The time of a call on `ranks` GPUs.

    Args:
        strategy: as of `context_parallel_attention`.
        load: the call.
        ranks: how many GPUs.
        machine: of what kind.
        phase: forward, or forward and backward.
        inner: of "ring_all_to_all", ranks that exchange heads; they are in one node where they fit.

    Raises:
        ValueError: no such strategy, or one that cannot serve the load.
    """
    if strategy in ("all_to_all", "ring_all_to_all") and load.heads % (ranks if strategy == "all_to_all" else inner):
        raise ValueError(f"strategy: expected heads that the ranks divide, got {load.heads} heads for {strategy!r}")
    of = {"ring": _ring, "all_gather": _all_gather, "all_to_all": _all_to_all}
    if strategy == "ring_all_to_all":
        forward, backward = (_both(load, ranks, inner, machine, back) for back in (False, True))
    elif strategy in of:
        forward, backward = (of[strategy](load, ranks, machine, back) for back in (False, True))
    else:
        raise ValueError(f"strategy: expected one of {', '.join(of)}, ring_all_to_all, got {strategy!r}")
    return forward if phase == "fwd" else forward + backward


def efficiency(found: Cost, load: Load, ranks: int, machine: Machine, phase: Phase = "fwd+bwd") -> float:
    """The time of one GPU for all of the work, over `ranks` times the time of the ranks."""
    one = load.flops / machine.forward
    if phase != "fwd":
        one += BACKWARD * load.flops / machine.backward
    return one / (ranks * found.total)


def overlap_length(load: Load, machine: Machine, bandwidth: float) -> float:
    """Tokens of a shard from which a ring's forward hides its transfers: a step's products, `4 s² H D` FLOPs (half of
    it if causal), take as long as the largest block, `2 s Hkv D` elements."""
    work = (2 if load.causal else 4) * load.heads / machine.forward
    return 2 * load.heads_kv * load.itemsize / (bandwidth * work)


def _compute(load: Load, ranks: int, machine: Machine, back: bool) -> float:
    return load.flops / ranks * (BACKWARD / machine.backward if back else 1 / machine.forward)


def _bandwidth(group: int, machine: Machine, stride: int = 1) -> float:
    """Bandwidth of a group's slowest rank, neighbours `stride` GPUs apart: between nodes if it leaves one."""
    return machine.near if group * stride <= machine.node else machine.far


def _ring(load: Load, ranks: int, machine: Machine, back: bool, heads_share: int = 1, stride: int = 1) -> Cost:
    tokens = load.length / ranks
    compute = _compute(load, ranks * heads_share, machine, back)
    heads_kv = max(load.heads_kv / heads_share, 1)
    block = 2 * load.tensor_bytes(tokens, heads_kv)
    arriving = 2 * block if back else block  # gradients of keys and values come back as their blocks go out
    waiting = machine.latency + arriving / _bandwidth(ranks, machine, stride) - compute / ranks
    exposed = (ranks - 1) * max(0.0, waiting)
    # Under a causal mask a later step is of all rows, or of the late half.
    joined = (ranks - 1) * (0.75 if load.causal else 1.0)
    merging = _merging(load, tokens, load.heads / heads_share, joined, machine) if ranks > 1 else 0.0
    return Cost(compute, exposed, merging)


def _merging(load: Load, tokens: float, heads: float, joined: float, machine: Machine) -> float:
    """The first part begins a float32 sum of all rows, out in the forward and dq in the backward; one that joins reads
    and writes its rows of it, and reads its own; the result is made of all rows. `joined`: rows of all parts but the
    first, over those of a shard."""
    elements = load.batch * tokens * heads * load.head_dim
    return elements * (joined * (8 + load.itemsize) + 2 * (4 + load.itemsize)) / machine.memory


def _all_gather(load: Load, ranks: int, machine: Machine, back: bool) -> Cost:
    """Under a causal mask a rank computes its own keys, 1/N of its work, while the others arrive, and merges; of the
    gradients those come back that a ring would return."""
    compute, tokens = _compute(load, ranks, machine, back), load.length / ranks
    if ranks == 1:
        return Cost(compute, 0.0)
    arriving = 2 * load.tensor_bytes(load.length - tokens, load.heads_kv) / _bandwidth(ranks, machine)
    gathering, returning = machine.latency + arriving, machine.latency + (0.75 if load.causal else 1.0) * arriving
    exposed = (max(0.0, gathering - compute / ranks) if load.causal else gathering) + (returning if back else 0.0)
    # All rows see earlier keys, the late half those between the two chunks of the rank.
    merging = _merging(load, tokens, load.heads, 1.5 * (ranks - 1) / ranks, machine) if load.causal else 0.0
    return Cost(compute, exposed, merging)


def _exchange(load: Load, tokens: float, ranks: int, machine: Machine, compute: float = 0.0, runs: int = 1) -> float:
    """Seconds of exchanging q, k, v and out of `tokens` tokens, or their gradients, among `ranks`: a transfer each way.
    Before or after it everything is copied once, and what a rank keeps once more. With several runs, nothing is
    computed while the first arrives and the last leaves."""
    if ranks == 1:
        return 0.0
    moved = load.tensor_bytes(tokens, 2 * load.heads + 2 * max(load.heads_kv, ranks))
    copying = 2 * (1 + 1 / ranks) * moved / machine.memory
    travelling = 2 * machine.latency + (ranks - 1) / ranks * moved / _bandwidth(ranks, machine)
    return copying + travelling / runs + (1 - 1 / runs) * max(0.0, travelling - compute)


def _all_to_all(load: Load, ranks: int, machine: Machine, back: bool) -> Cost:
    compute, tokens = _compute(load, ranks, machine, back), load.length / ranks
    heads = load.heads // ranks, max(1, load.heads_kv // ranks)
    runs = len(head_runs(*heads, load.flops / ranks))
    return Cost(compute, _exchange(load, tokens, ranks, machine, compute, runs))


def _both(load: Load, ranks: int, inner: int, machine: Machine, back: bool) -> Cost:
    ring = _ring(load, ranks // inner, machine, back, heads_share=inner, stride=inner)
    return ring + Cost(0.0, _exchange(load, load.length / ranks, inner, machine))
