"""The tiled computation: what each kernel of flashtile reads, writes and computes.

A kernel holds some rows on chip and walks over the others: the forward and dq hold queries, dk/dv and the backward for
Hopper hold keys. Held tensors are read once. Moving ones are asked for by every program, mostly from the cache:

- Programs that read the same keys (or queries) run next to each other. If what the programs that run at once read fits
  in the cache together, it crosses device memory once.
- If it does not, those that run at once still walk over it side by side, and each such wave of programs reads it once.

`Transfer.requests` says how often the programs ask for a tensor, which is how often it would cross device memory
without a cache: the block size decides it, as in the analysis of the paper.

Reference: Dao et al., "FlashAttention" (2022), section 3.2, theorem 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

import flashtile
from flashtile.io_model.devices import Device
from flashtile.io_model.shape import Shape
from flashtile.io_model.work import Computation, Transfer, Work

#: Rows and keys of a tile of the CPU backend.
_CPU_BLOCK = 256
#: Warps of a multiprocessor whose threads have the 128 registers that kernels of matrix products take at least.
_WARPS = 16


@dataclass(frozen=True)
class Cut:
    """A kernel and its tiles.

    Attributes:
        name: "forward", "dq", "dkdv", or "backward" if one kernel computes all gradients.
        backend: backend of the kernel: "split", "triton", "hopper" or "cpu".
        block_q: queries of a tile; for "split" times the query heads that share a key/value head.
        block_k: keys of a tile.
        warps: warps of a thread block; None if a thread block has a multiprocessor for itself.
        shared_memory: bytes of shared memory of a thread block.
        statistics: bytes of lse and delta for each query between the kernels of a backward.

    Raises:
        ValueError: an unknown name or backend, or a tile without rows.
    """

    name: str
    backend: str
    block_q: int
    block_k: int
    warps: int | None = None
    shared_memory: int = 0
    statistics: int = 8

    def __post_init__(self) -> None:
        both = "forward", "backward"
        known = {"split": ("forward",), "triton": ("forward", "dq", "dkdv"), "hopper": both, "cpu": both}
        if self.name not in known.get(self.backend, ()):
            raise ValueError(f"cut: expected one of {known} as backend and name, got {self.backend!r}, {self.name!r}")
        if self.block_q < 1 or self.block_k < 1:
            raise ValueError(f"cut: expected tiles of at least 1 × 1, got {self.block_q} × {self.block_k}")

    def at_once(self, device: Device) -> int:
        """Number of thread blocks that a device runs at the same time."""
        if self.backend == "cpu":
            return 1  # one Python thread walks over the tiles
        if self.warps is None:
            return device.multiprocessors
        fitting = [_WARPS // self.warps]
        if self.shared_memory:
            fitting.append(device.shared_memory // self.shared_memory)
        return device.multiprocessors * max(1, min(fitting))


def kernels_of(shape: Shape, arch: str, backend: str = "auto") -> tuple[Cut, ...]:
    """The kernels of a call, forward and backward, with the tiles that flashtile chooses.

    Args:
        shape: the call.
        arch: an architecture of `flashtile.explain`, or "cpu".
        backend: as in `flashtile.attention`; the reference has no tiles.

    Raises:
        ValueError: no backend with tiles of queries and keys serves the call there.
    """

    def meta(heads: int, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(shape.batch, rows, heads, columns, dtype=shape.dtype, device="meta")

    q = meta(shape.heads, shape.seq_q, shape.head_dim)
    k, v = (meta(shape.kv_heads, shape.keys, columns) for columns in (shape.head_dim, shape.dim_v))
    options = {"causal": shape.causal, "align": shape.align, "window": shape.window, "dropout_p": shape.dropout_p}
    answer = flashtile.explain(q, k, v, **options, backend=backend, device=arch)  # type: ignore[arg-type]
    if answer.backend is None:
        raise ValueError(f"shape: no kernels for it on {arch}: {answer.reason}")
    if answer.backend == "reference":
        raise ValueError("backend: expected one with tiles, got 'reference'; `standard` models that computation")
    if answer.backend == "cpu":
        return tuple(Cut(name, "cpu", _CPU_BLOCK, _CPU_BLOCK) for name in ("forward", "backward"))
    if not all(hasattr(kernel.tiles, "block_m") for kernel in answer.kernels):
        raise ValueError(
            f"shape: no figures of {shape.dtype} with heads of {shape.head_dim} on {arch}, because its kernels divide "
            "the columns of a head; backend='triton' has figures"
        )
    found = []
    for kernel in answer.kernels:
        assert kernel.tiles is not None
        warps = getattr(kernel.tiles, "num_warps", None)
        group = shape.heads // shape.kv_heads if kernel.backend == "split" else 1
        block_q = max(1, kernel.tiles.block_m // group)
        statistics = getattr(kernel.tiles, "statistics_bytes", Cut.statistics)
        found.append(
            Cut(kernel.name, kernel.backend, block_q, kernel.tiles.block_n, warps, kernel.shared_memory, statistics)
        )
    return tuple(found)


def tiled(
    shape: Shape, device: Device, cuts: Sequence[Cut] | None = None, *, backward: bool = True, backend: str = "auto"
) -> Computation:
    """The kernels of a call on a device.

    Args:
        shape: the call.
        device: the device, for its caches and for the tiles that flashtile chooses there.
        cuts: kernels with other tiles, instead of those of `kernels_of`.
        backward: include the gradients of q, k and v.
        backend: backend of the kernels, as in `flashtile.attention`; not with `cuts`.

    Raises:
        ValueError: no kernels serve the call on the device.
    """
    chosen = kernels_of(shape, device.arch, backend) if cuts is None else tuple(cuts)
    works: list[Work] = []
    for cut in chosen:
        if backward or cut.name == "forward":
            works += _KERNELS[cut.backend, cut.name](_Walk(shape, device, cut))
    return Computation("tiled", tuple(works))


class _Walk:
    """A kernel's walk: how often what moves is asked for, and how often it crosses device memory."""

    def __init__(self, shape: Shape, device: Device, cut: Cut) -> None:
        self.shape, self.device, self.cut = shape, device, cut
        self.sizes = shape.sizes
        visited = shape.visited_tiles(cut.block_q, cut.block_k)  # of one matrix of scores
        self._area = visited * cut.block_q * cut.block_k  # rows past the end are computed, too
        # In how many tiles a key is on average, and a query; none is read past the end.
        self._asked_keys = visited * min(cut.block_k, shape.keys) / shape.keys
        self._asked_queries = visited * min(cut.block_q, shape.seq_q) / shape.seq_q

    @property
    def pairs(self) -> float:
        """Pairs that are computed, hidden ones in visited tiles included."""
        return float(self.shape.score_matrices * self._area)

    def keys(self, *tensors: str, sums: Sequence[str] = ()) -> list[Transfer]:
        """Reads of tensors as long as the keys, once for each tile of queries that sees them, and sums of gradients as
        long, to which each of those tiles adds. With "split", the heads of a group are in one tile."""
        group = 1 if self.cut.backend == "split" else self.shape.heads // self.shape.kv_heads
        return self._moving(tensors, sums, self._asked_keys * group, -(-self.shape.seq_q // self.cut.block_q) * group)

    def queries(self, *tensors: str, sums: Sequence[str] = ()) -> list[Transfer]:
        """The same of tensors as long as the queries, for each tile of keys that they see."""
        return self._moving(tensors, sums, self._asked_queries, -(-self.shape.keys // self.cut.block_k))

    def size(self, tensor: str) -> int:
        """Bytes of a tensor, or of the gradient of one."""
        lse = self.sizes["lse"]
        others = {
            "dout": self.sizes["out"],
            "statistics of 16 bytes": 4 * lse,
            "statistics": self.cut.statistics // 4 * lse,
        }
        return others.get(tensor) or self.sizes[tensor if tensor in self.sizes else tensor.removeprefix("d")]

    def held(self, reads: str = "", writes: str = "") -> list[Transfer]:
        """Transfers that cross device memory once."""
        found = [Transfer(name, self.size(name)) for name in reads.split(", ") if name]
        return found + [Transfer(name, self.size(name), writes=True) for name in writes.split(", ") if name]

    def _moving(self, tensors: Sequence[str], sums: Sequence[str], asked: float, programs: int) -> list[Transfer]:
        """`asked`: how often the programs that share a key/value head, so many of them, ask for what moves."""
        lines = self.shape.batch * self.shape.kv_heads
        sizes = {name: self.size(name) for name in tensors}
        summed = {f"sums of {name}": self.size(name) * 4 // self.shape.dtype.itemsize for name in sums}  # float32
        at_once = self.cut.at_once(self.device)
        lines_at_once = min(lines, -(-at_once // programs))
        fits = (sum(sizes.values()) + sum(summed.values())) * lines_at_once / lines <= self.device.held
        passes = min(asked, 1.0 if fits else max(1.0, asked / at_once))
        found = [Transfer(name, size, passes, asked) for name, size in sizes.items()]
        for name, size in summed.items():
            # The programs send what is to be added; the cache reads and writes.
            found += [Transfer(name, size, passes, 0.0), Transfer(name, size, passes, asked, writes=True)]
        return found

    def work(self, name: str, transfers: list[Transfer], products: str) -> Work:
        """A kernel with so many products over "q" (head_dim) and "v" (head_dim_v)."""
        width = sum(self.shape.head_dim if of == "q" else self.shape.dim_v for of in products)
        return Work(
            f"{name} ({self.cut.backend}, {self.cut.block_q} × {self.cut.block_k})",
            "fwd" if name == "forward" else "bwd",
            self.shape.dtype,
            tuple(transfers),
            flops=2.0 * self.pairs * width,
            exponentials=self.pairs,
            words=self.pairs if self.shape.dropout_p else 0.0,
        )


def _forward(walk: _Walk) -> list[Work]:
    """q kᵀ and p v."""
    return [walk.work("forward", [*walk.held("q", "out, lse"), *walk.keys("k", "v")], "qv")]


def _dq(walk: _Walk) -> list[Work]:
    """q kᵀ, dout vᵀ and ds k; and the statistics that dk/dv reads."""
    held = walk.held("q, dout, out, lse", "dq, statistics of 16 bytes")
    return [walk.work("dq", [*held, *walk.keys("k", "v")], "qvq")]


def _dkdv(walk: _Walk) -> list[Work]:
    """q kᵀ, dout vᵀ, pᵀ dout and dsᵀ q."""
    moving = walk.queries("q", "dout", "statistics of 16 bytes")
    return [walk.work("dkdv", [*walk.held("k, v", "dk, dv"), *moving], "qvvq")]


def _hopper_backward(walk: _Walk) -> list[Work]:
    """Three launches: statistics and zeros, all five products, and sums of dq to dq."""
    sums = Transfer("sums of dq", walk.size("q") * 4 // walk.shape.dtype.itemsize, writes=True)
    begin = [*walk.held("out, dout, lse", "statistics"), sums]
    main = [*walk.held("k, v", "dk, dv"), *walk.queries("q", "dout", "statistics", sums=["dq"])]
    end = [Transfer(sums.tensor, sums.size), *walk.held("", "dq")]
    dtype = walk.shape.dtype
    return [
        Work("statistics (hopper)", "bwd", dtype, tuple(begin)),
        walk.work("backward", main, "qvvqq"),
        Work("dq from its sums (hopper)", "bwd", dtype, tuple(end)),
    ]


def _cpu_backward(walk: _Walk) -> list[Work]:
    """All five products; dk and dv are added up while tiles of queries walk over the keys."""
    moving = walk.keys("k", "v", sums=["dk", "dv"])
    return [walk.work("backward", [*walk.held("q, out, dout, lse", "dq"), *moving], "qvvqq")]


_KERNELS = {
    # The parts of the results, which a second launch puts together, are few beside the keys, and left out.
    ("split", "forward"): _forward,
    ("triton", "forward"): _forward,
    ("hopper", "forward"): _forward,
    ("cpu", "forward"): _forward,
    ("triton", "dq"): _dq,
    ("triton", "dkdv"): _dkdv,
    ("hopper", "backward"): _hopper_backward,
    ("cpu", "backward"): _cpu_backward,
}


#: Tiles of keys and of values that are on chip at once.
_STAGES = 2


@dataclass(frozen=True)
class SweepPoint:
    """The forward with one tile size.

    Attributes:
        block_q: queries of a tile.
        block_k: keys of a tile.
        bytes: bytes through device memory.
        requested: bytes between cache and multiprocessors, which would cross device memory if there were no cache.
        shared_memory: bytes of a thread block: the tile of queries, and two tiles each of keys and values.
        fits: whether a multiprocessor has this much.
        seconds: least time.
        bound: the part that takes this time.
    """

    block_q: int
    block_k: int
    bytes: float
    requested: float
    shared_memory: int
    fits: bool
    seconds: float
    bound: str


def sweep(
    shape: Shape, device: Device, block_q: Iterable[int] = (16, 32, 64, 128, 256), block_k: Iterable[int] = (64,)
) -> list[SweepPoint]:
    """A point for each pair of sizes, for the portable forward kernel.

    Raises:
        ValueError: a size below 1.
    """
    keys = list(block_k)
    return [_point(shape, device, rows, columns) for rows in block_q for columns in keys]


def _point(shape: Shape, device: Device, block_q: int, block_k: int) -> SweepPoint:
    columns = block_q * shape.head_dim + _STAGES * block_k * (shape.head_dim + shape.dim_v)
    shared = shape.dtype.itemsize * columns
    cut = Cut("forward", "triton", block_q, block_k, 4 if block_q <= 64 else 8, shared)
    (work,) = tiled(shape, device, [cut]).kernels
    fits = shared <= device.shared_memory
    return SweepPoint(
        block_q, block_k, work.bytes, work.requested, shared_memory=shared, fits=fits,
        seconds=work.seconds(device), bound=work.bound(device),
    )  # fmt: skip
