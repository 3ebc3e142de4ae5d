"""The benchmark of decoding: one new token of each sequence attends to a cache of keys and values.

The bytes of the cache bound the speed. All implementations read the same cache where it is; PyTorch's functions have
heads before rows, so they get a view. Some heads of each result are held to the fp64 reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile.bench import base, companions
from flashtile.bench.base import AnyCase, Implementation, Verdict, judge, spread
from flashtile.bench.companion_cases import Copy
from flashtile.bench.implementations import FA4

PHASE = "fwd"
#: Largest cache of a case, keys and values together.
_MOST_BYTES = 60 * 10**9
#: Elements of keys and values in float64 that the check may hold at once.
_ELEMENTS = {"cuda": 2**28, "cpu": 2**22}

#: Returns out `[B, Sq, H, Dv]`.
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class DecodeCase(AnyCase):
    """One step of decoding. Field names are the keys of `case` in a record.

    B sequences of S rows each, of which the last `Sq` belong to the queries; H query heads, Hkv key/value heads, D and
    Dv columns. `page` is the rows of a page, None for a cache in one piece. With `append` the new rows are rotated and
    stored first.
    """

    B: int
    S: int
    H: int = 32
    Hkv: int = 8
    D: int = 128
    Dv: int = 128
    Sq: int = 1
    page: int | None = None
    append: bool = False
    dtype: str = "bf16"

    op: ClassVar[str] = "decode"

    @property
    def name(self) -> str:
        """Such as `decode-b8-s4096-h32:8-d128-page16-bf16`."""
        parts = [self.op, f"b{self.B}", f"s{self.S}", f"h{self.H}:{self.Hkv}", f"d{self.D}"]
        parts += [f"v{self.Dv}"] * (self.Dv != self.D) + [f"q{self.Sq}"] * (self.Sq > 1)
        parts += [f"page{self.page}"] * (self.page is not None) + ["append"] * self.append
        return "-".join([*parts, self.dtype])

    def bytes(self, phase: str) -> int:
        """Bytes of the cache, each row read once. Queries, new rows and results are too few to count."""
        return self.B * self.S * self.Hkv * (self.D + self.Dv) * self.torch_dtype.itemsize


@dataclass
class DecodeInputs:
    """Tensors of a case, which all implementations share: none changes what another reads.

    Attributes:
        q: `[B, Sq, H, D]`.
        k_cache, v_cache: `[B, S, Hkv, D]`, or `[pages, page, Hkv, D]`.
        k, v: `[B, Sq, Hkv, D]`, what is appended; None where nothing is.
        lengths: `[B]` int32, rows before anything is appended.
        block_table: `[B, S / page]` int32, or None.
        cos, sin: tables of the rotation, where something is appended.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    lengths: Tensor
    block_table: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


def make_inputs(case: DecodeCase, device: torch.device, seed: int = 0) -> DecodeInputs:
    """Random tensors; pages lie in no order."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=case.torch_dtype)

    outer, table = (case.B, case.S), None
    if case.page is not None:
        pages = case.S // case.page
        outer = (case.B * pages, case.page)
        table = torch.randperm(case.B * pages, generator=generator, device=device).view(case.B, pages).int()
    k_cache, v_cache = normal(*outer, case.Hkv, case.D), normal(*outer, case.Hkv, case.Dv)
    k = v = cos = sin = None
    if case.append:
        k, v = normal(case.B, case.Sq, case.Hkv, case.D), normal(case.B, case.Sq, case.Hkv, case.Dv)
        cos, sin = flashtile.rotary_tables(case.S, case.D, device=device)
    before = case.S - (case.Sq if case.append else 0)
    lengths = torch.full((case.B,), before, dtype=torch.int32, device=device)
    return DecodeInputs(normal(case.B, case.Sq, case.H, case.D), k_cache, v_cache, k, v, lengths, table, cos, sin)


def decode_cases(device: torch.device) -> list[DecodeCase | Copy]:
    """Cases of a device, after copies from the size of the smallest case to that of the largest."""
    if device.type != "cuda":
        return _cpu_cases()
    plain = [DecodeCase(batch, rows) for rows in (4096, 32768, 131072) for batch in (1, 8, 32, 128)]
    some = (DecodeCase(8, 4096), DecodeCase(1, 131072), DecodeCase(8, 32768), DecodeCase(32, 32768))
    return [
        *(Copy("bf16", 1024 * mib) for mib in (16, 64, 256, 1024, 4096)),
        *(case for case in plain if case.bytes(PHASE) <= _MOST_BYTES),
        *(replace(case, page=page) for case in some for page in (16, 64, 256)),
        *(replace(case, append=True) for case in some),
    ]


def _cpu_cases() -> list[DecodeCase | Copy]:
    """Caches of small and large models, groups of 1 to 8 and one key/value head for all, pages and new rows."""
    sizes = (
        DecodeCase(1, 2048, 8, 8, 64, 64),
        DecodeCase(1, 4096, 8, 1, 64, 64),
        DecodeCase(1, 8192, 16, 4, 64, 64),
        DecodeCase(16, 512),
        DecodeCase(2, 2048, 32, 4),
        DecodeCase(4, 4096),
        DecodeCase(1, 32768),
        DecodeCase(4, 1024, page=16),
        DecodeCase(4, 1024, page=256),
        DecodeCase(4, 1024, append=True),
    )
    return [Copy("fp32", 1024 * 64), *(replace(case, dtype=dtype) for dtype in ("fp32", "bf16") for case in sizes)]


def quick_cases(cases: Sequence[Any]) -> list[Any]:
    """A few of them: a copy, the first, and the first with pages and with new rows."""
    first: dict[Any, Any] = {}
    for case in cases:
        first.setdefault("copy" if case.op == "copy" else (case.page is not None, case.append), case)
    return [first[kind] for kind in ("copy", (False, False), (True, False), (False, True))]


def _flashtile(backend: str) -> Callable[[DecodeCase, DecodeInputs], Step]:
    def build(case: DecodeCase, inputs: DecodeInputs) -> Step:
        positional = inputs.q, inputs.k_cache, inputs.v_cache, inputs.k, inputs.v
        options: dict[str, Any] = {
            "cache_lengths": inputs.lengths,
            "block_table": inputs.block_table,
            "rotary_cos": inputs.cos,
            "rotary_sin": inputs.sin,
            "backend": backend,
        }
        return lambda: flashtile.attention_with_kv_cache(*positional, **options)

    return build


def _sdpa(case: DecodeCase, inputs: DecodeInputs) -> Step:
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k_cache, inputs.v_cache))
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=case.H != case.Hkv).transpose(1, 2)


def _matmul(case: DecodeCase, inputs: DecodeInputs) -> Step:
    """The plain computation with the heads of a group as rows, which repeats no keys."""
    q = inputs.q.view(case.B, case.Hkv, case.H // case.Hkv, case.D)
    k, v = inputs.k_cache.permute(0, 2, 3, 1), inputs.v_cache.transpose(1, 2)
    scale = case.D**-0.5
    return lambda: (q @ k).mul_(scale).softmax(-1).matmul(v).view(case.B, case.Sq, case.H, -1)


def _gathered(case: DecodeCase, inputs: DecodeInputs) -> Step:
    """sdpa on the rows of all pages, side by side."""
    assert inputs.block_table is not None
    pages, caches = inputs.block_table.flatten(), (inputs.k_cache, inputs.v_cache)

    def step() -> Tensor:
        k, v = (cache.index_select(0, pages).unflatten(0, (case.B, -1)).flatten(1, 2) for cache in caches)
        return _sdpa(case, replace(inputs, k_cache=k, v_cache=v))()

    return step


def _fa4(case: DecodeCase, inputs: DecodeInputs) -> Step:
    from flash_attn.cute import flash_attn_func

    attend: Callable[..., Any] = flash_attn_func
    tensors = inputs.q, inputs.k_cache, inputs.v_cache
    splits = {"num_splits": 0} if "num_splits" in inspect.signature(attend).parameters else {}  # 0: it chooses
    try:
        attend(*tensors, **splits)
    except Exception:  # it has kernels for splits on some architectures only
        splits = {}
    return lambda: attend(*tensors, **splits)[0]


def _plain_only(case: DecodeCase, device: torch.device) -> str | None:
    if case.page is not None or case.append:
        return "measured on a cache in one piece, to which nothing is appended"
    return "measured with one query, which sees the whole cache" if case.Sq > 1 else None


def _pages_only(case: DecodeCase, device: torch.device) -> str | None:
    if case.page is None or case.append:
        return "measured on pages, to which nothing is appended"
    return _plain_only(replace(case, page=None), device)


def _sdpa_with(name: str, devices: tuple[str, ...], backend: SDPBackend) -> Implementation:
    return Implementation(f"sdpa-{name}", devices, _sdpa, _plain_only, context=lambda: sdpa_kernel(backend))


IMPLEMENTATIONS = (
    Implementation("flashtile-triton", ("cuda",), _flashtile("triton")),
    Implementation("flashtile-cpu", ("cpu",), _flashtile("cpu")),
    _sdpa_with("flash", ("cuda", "cpu"), SDPBackend.FLASH_ATTENTION),
    _sdpa_with("cudnn", ("cuda",), SDPBackend.CUDNN_ATTENTION),
    _sdpa_with("efficient", ("cuda",), SDPBackend.EFFICIENT_ATTENTION),
    Implementation("matmul", ("cpu",), _matmul, _plain_only),
    Implementation("sdpa-gathered", ("cpu",), _gathered, _pages_only),
    Implementation("fa4", ("cuda",), _fa4, _plain_only, FA4),
)
#: What measures the copies beside them.
COPY = next(each for each in companions.IMPLEMENTATIONS if each.name == "eager")


def problem_of(case: DecodeCase | Copy, device: torch.device) -> base.Problem:
    """A step of decoding, or a copy beside it."""
    return companions.CompanionProblem(case, device) if isinstance(case, Copy) else DecodeProblem(case, device)


class BoundStep(base.Bound):
    """The step of an implementation."""

    def __init__(self, step: Step) -> None:
        self._step = torch.no_grad()(step)

    @property
    def calls(self) -> Mapping[str, Callable[[], Any]]:
        return {PHASE: self._step}

    def results(self, phase: str) -> dict[str, Tensor]:
        return {"out": self._step()}


class DecodeProblem(base.Problem):
    """A case on a device."""

    phases = (PHASE,)

    def __init__(self, case: DecodeCase, device: torch.device) -> None:
        super().__init__(case, device)
        self._inputs = make_inputs(case, device)
        # (sequence, key/value head) of those that are checked: evenly spaced, the first and the last among them.
        affordable = _ELEMENTS[device.type] // (case.S * (case.D + case.Dv))
        chosen = spread(min(affordable, 64), case.B * case.Hkv, device).unique()
        self._pairs = chosen // case.Hkv, chosen % case.Hkv
        self._exact, self._eager = (self._reference(dtype) for dtype in (torch.float64, case.torch_dtype))

    def offers(self, implementation: Implementation) -> bool:
        return implementation is not COPY

    def bind(self, implementation: Implementation) -> BoundStep:
        return BoundStep(implementation.build(self.case, self._inputs))

    def judge(self, bound: BoundStep, phase: str, results: dict[str, Tensor]) -> Verdict:
        return judge([("out", self._of_pairs(results["out"]), self._exact, self._eager)])

    @torch.no_grad()
    def _reference(self, dtype: torch.dtype) -> Tensor:
        """out of the chosen pairs, `[pairs, Sq, group, Dv]`: each a sequence of its own with one key/value head."""
        inputs = self._inputs
        caches = (self._rows_of_pairs(cache).to(dtype) for cache in (inputs.k_cache, inputs.v_cache))
        new = (None if new is None else self._of_pairs(new).to(dtype) for new in (inputs.k, inputs.v))
        options: dict[str, Any] = {"rotary_cos": inputs.cos, "rotary_sin": inputs.sin, "backend": "reference"}
        q, lengths = self._of_pairs(inputs.q).to(dtype), inputs.lengths[self._pairs[0]]
        return flashtile.attention_with_kv_cache(q, *caches, *new, cache_lengths=lengths, **options)

    def _of_pairs(self, tensor: Tensor) -> Tensor:
        """`[B, Sq, heads, D]` to `[pairs, Sq, heads / Hkv, D]`."""
        batch, head = self._pairs
        return tensor.unflatten(2, (self.case.Hkv, -1)).transpose(1, 2)[batch, head]

    def _rows_of_pairs(self, cache: Tensor) -> Tensor:
        """`[pairs, S, 1, D]`, gathered from pages where there are any."""
        table = self._inputs.block_table
        found = []
        for sequence, head in zip(*(t.tolist() for t in self._pairs)):
            of_head = cache[:, :, head : head + 1]
            found.append(of_head[sequence] if table is None else of_head[table[sequence].long()].flatten(0, 1))
        return torch.stack(found)
