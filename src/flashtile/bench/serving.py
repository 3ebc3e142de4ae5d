"""The benchmark of serving: single tokens, chunks of prompts and mixtures of both attend to caches of keys and values.

All read the same cache, peers that have no pages rows gathered before. Yardsticks: `copy` moves the cache's bytes, half
read and half written; `dense` is `flashtile.attention` without a cache. Some queries of some heads are checked.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from flashtile.bench import base
from flashtile.bench.base import Implementation, Verdict, Way, judge, spread
from flashtile.bench.cases import cumulative
from flashtile.bench.implementations import FA4, TORCH_VARLEN, sdpa, torch_varlen_options
from flashtile.bench.serving_cases import PHASE, ServingCase

#: Pairs of a sequence and a key/value head that are checked, and queries of each.
_PAIRS, _QUERIES = 8, 6
#: Heads that `flashtile.attention` and `varlen_attn` take.
_WIDEST_DENSE, _WIDEST_VARLEN = 512, 256

#: Returns out, `[B, Sq, H, Dv]`, or `[total_q, H, Dv]` of packed queries.
Step = Callable[[], Tensor]


@dataclass
class Inputs:
    """Tensors of a case, which all implementations share: none changes what another reads."""

    q: Tensor  # `[B, Sq, H, D]`, or packed `[total_q, H, D]`
    k_cache: Tensor  # `[B, S, Hkv, D]`, or `[pages, page, Hkv, D]`
    v_cache: Tensor
    k: Tensor | None  # `[B, Sq, Hkv, D]`, what is appended
    v: Tensor | None
    lengths: Tensor  # `[B]` int32, rows before anything is appended
    options: dict[str, Any]  # further arguments of `flashtile.attention_with_kv_cache`

    @property
    def block_table(self) -> Tensor | None:
        return self.options.get("block_table")


def make_inputs(case: ServingCase, device: torch.device) -> Inputs:
    """Random tensors; pages lie in no order."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=case.torch_dtype)

    outer = case.B, case.S
    if case.page is not None:
        options["block_table"], pages = _block_table(case, generator, device)
        outer = pages, case.page
    k_cache, factors_k = _cache(case, normal(*outer, case.Hkv, case.D))
    if case.latent:
        v_cache, factors_v = k_cache[..., : case.Dv], factors_k
    else:
        v_cache, factors_v = _cache(case, normal(*outer, case.Hkv, case.Dv))
    if factors_k is not None:
        options |= {"descale_k": factors_k, "descale_v": factors_v}
    k = v = None
    if case.append:
        k, v = normal(case.B, case.Sq, case.Hkv, case.D), normal(case.B, case.Sq, case.Hkv, case.Dv)
        options["rotary_cos"], options["rotary_sin"] = flashtile.rotary_tables(case.S, case.D, device=device)
    queries: tuple[int, ...] = (case.B, case.Sq)
    if case.queries is not None:
        queries = (sum(case.queries),)
        options |= {"cu_seqlens_q": cumulative(case.queries, device), "max_seqlen_q": case.Sq}
    if case.tree:
        parents = (torch.arange(case.Sq, device=device) - 1) // 2  # each token has two children
        options["tree_mask"] = flashtile.tree_mask(parents)
    if case.shared_rows:
        options["shared_rows"] = case.shared_rows
    before = torch.tensor(case.rows, dtype=torch.int32, device=device) - (case.Sq if case.append else 0)
    return Inputs(normal(*queries, case.H, case.D), k_cache, v_cache, k, v, before, options)


def _block_table(case: ServingCase, generator: torch.Generator, device: torch.device) -> tuple[Tensor, int]:
    """`[B, pages of a sequence]` int32, 0 past its length, and the number of pages."""
    assert case.page is not None
    common = (case.shared_rows or 0) // case.page
    own = [-(-rows // case.page) - common for rows in case.rows]
    numbers = torch.randperm(common + sum(own), generator=generator, device=device).int()
    table = torch.zeros(case.B, common + max(own), dtype=torch.int32, device=device)
    table[:, :common] = numbers[:common]
    for sequence, (count, end) in enumerate(zip(own, itertools.accumulate(own, initial=common))):
        table[sequence, common : common + count] = numbers[end : end + count]
    return table, len(numbers)


def _cache(case: ServingCase, values: Tensor) -> tuple[Tensor, Tensor | None]:
    """A cache of some values, and its factors where it has 8 bits."""
    if case.factors is None:
        return values, None
    largest = torch.finfo(torch.float8_e4m3fn).max
    dims = (0, 1, 3) if case.factors == "head" else (1, 3)
    factors = values.abs().amax(dims).float() / largest
    return (values / _beside(factors)).clamp(-largest, largest).to(torch.float8_e4m3fn), factors


def _beside(factors: Tensor) -> Tensor:
    """Factors of each head, or of each page and head, beside the elements of a cache."""
    return (factors if factors.dim() == 1 else factors[:, None])[..., None]


def gather_rows(
    case: ServingCase, inputs: Inputs, sequence: int, heads: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence, `[rows, heads, D]`, gathered from its pages, the new rows among them."""
    found, count = [], case.rows[sequence]
    for side, cache, new in (("k", inputs.k_cache, inputs.k), ("v", inputs.v_cache, inputs.v)):
        factors = inputs.options.get(f"descale_{side}")
        if inputs.block_table is None:
            place: Any = slice(sequence, sequence + 1)
        else:
            place = inputs.block_table[sequence, : -(-count // (case.page or 1))].long()
        if factors is not None:
            factors = factors[heads] if factors.dim() == 1 else factors[place][:, heads]
        rows = cache[place][:, :, heads]
        rows = (rows if factors is None else rows.float() * _beside(factors)).to(dtype).flatten(0, 1)[:count]
        if new is not None:
            new = _rotated(inputs, new, side == "k")[sequence, :, heads].to(dtype)
            rows = torch.cat([rows[: count - case.Sq], new])
        found.append(rows)
    return found[0], found[1]


def _rotated(inputs: Inputs, x: Tensor, rotates: bool) -> Tensor:
    """New rows or queries as the call rotates them, if it does."""
    if not rotates or "rotary_cos" not in inputs.options:
        return x
    cos, sin = inputs.options["rotary_cos"], inputs.options["rotary_sin"]
    return flashtile.apply_rotary(x, cos, sin, seqlen_offsets=inputs.lengths, backend="reference")


def _dense(case: ServingCase, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, and the keys and values of all sequences in one piece each: packed where the queries are."""
    parts = [gather_rows(case, inputs, sequence, slice(None), case.torch_dtype) for sequence in range(case.B)]
    join: Callable[..., Tensor] = torch.stack if case.queries is None else torch.cat
    k, v = (join(of_side) for of_side in zip(*parts))
    return inputs.q, k, v


def _flashtile(backend: str, unused: str | None = None) -> Callable[[ServingCase, Inputs], Step]:
    def build(case: ServingCase, inputs: Inputs) -> Step:
        positional = inputs.q, inputs.k_cache, inputs.v_cache, inputs.k, inputs.v
        options = {**inputs.options, "cache_lengths": inputs.lengths, "backend": backend}
        if unused is not None:
            options.pop(unused, None)
        return lambda: flashtile.attention_with_kv_cache(*positional, **options)

    return build


def _attention(case: ServingCase, inputs: Inputs) -> Step:
    """`flashtile.attention` on the same work in one piece."""
    q, k, v = _dense(case, inputs)
    if case.queries is None:
        return lambda: flashtile.attention(q, k, v, causal=True)
    starts = inputs.options["cu_seqlens_q"], cumulative(case.rows, q.device)
    options: dict[str, Any] = {"max_seqlen_q": case.Sq, "max_seqlen_k": case.S, "causal": True}
    return lambda: flashtile.attention_varlen(q, k, v, *starts, **options)


def _varlen(case: ServingCase, inputs: Inputs) -> Step:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t.flatten(0, -3) for t in _dense(case, inputs))
    lengths = (*(cumulative(counts, q.device) for counts in (case.counts, case.rows)), case.Sq, case.S)
    attend: Callable[..., Any] = varlen_attn
    options = torch_varlen_options(case, inspect.signature(attend).parameters)
    return lambda: attend(q, k, v, *lengths, **options).view(*inputs.q.shape[:-1], case.Dv)


def _sdpa(case: ServingCase, inputs: Inputs) -> Step:
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k_cache, inputs.v_cache))
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=case.H != case.Hkv).transpose(1, 2)


def _matmul(case: ServingCase, inputs: Inputs) -> Step:
    """The plain computation with the heads of a group as rows, which repeats no keys."""
    q = inputs.q.view(case.B, case.Hkv, case.H // case.Hkv, case.D)
    k, v = inputs.k_cache.permute(0, 2, 3, 1), inputs.v_cache.transpose(1, 2)
    scale = case.D**-0.5
    return lambda: (q @ k).mul_(scale).softmax(-1).matmul(v).view(case.B, case.Sq, case.H, -1)


def _gathered(case: ServingCase, inputs: Inputs) -> Step:
    """sdpa on the rows of all pages, side by side, which each call gathers."""
    assert inputs.block_table is not None
    pages, caches = inputs.block_table.flatten(), (inputs.k_cache, inputs.v_cache)

    def step() -> Tensor:
        k, v = (cache.index_select(0, pages).unflatten(0, (case.B, -1)).flatten(1, 2) for cache in caches)
        return _sdpa(case, replace(inputs, k_cache=k, v_cache=v))()

    return step


def _fa4(case: ServingCase, inputs: Inputs) -> Step:
    from flash_attn.cute import flash_attn_varlen_func

    attend: Callable[..., Any] = flash_attn_varlen_func
    options: dict[str, Any] = {"causal": True, "seqused_k": inputs.lengths}
    if inputs.block_table is not None:
        options["page_table"] = inputs.block_table
    if case.queries is not None:
        options |= {"cu_seqlens_q": inputs.options["cu_seqlens_q"], "max_seqlen_q": case.Sq}
    tensors = inputs.q, inputs.k_cache, inputs.v_cache
    splits = {"num_splits": 0} if "num_splits" in inspect.signature(attend).parameters else {}  # 0: it chooses
    try:
        attend(*tensors, **options, **splits)
    except Exception:  # it has kernels for splits on some architectures only
        splits = {}
    return lambda: attend(*tensors, **options, **splits)[0]


def _copy(case: ServingCase, inputs: Inputs) -> Step:
    """Moves as many bytes as must be read at least: half of them are read, half written."""
    count = case.bytes(PHASE) // 2
    source = torch.empty(count, dtype=torch.uint8, device=inputs.q.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _special(case: ServingCase) -> str | None:
    """The feature of a case that the peers lack; None if there is none."""
    has = {"append": case.append, "tree": case.tree, "shared rows": case.shared_rows, "latent rows": case.latent}
    return next((f"measured without {what}" for what, there in has.items() if there), None)


def _one_query(case: ServingCase, device: torch.device) -> str | None:
    if case.page is not None or case.append or case.queries is not None or case.factors:
        return "measured on a cache in one piece, to which nothing is appended"
    return "measured with one query, which sees the whole cache" if case.Sq > 1 else _special(case)


def _pages_only(case: ServingCase, device: torch.device) -> str | None:
    if case.page is None or case.append:
        return "measured on pages, to which nothing is appended"
    return _one_query(replace(case, page=None), device)


def _dense_limits(widest: int) -> Callable[[ServingCase, torch.device], str | None]:
    return lambda case, device: f"heads are at most {widest}" if case.D > widest else _special(case)


def _fa4_limits(case: ServingCase, device: torch.device) -> str | None:
    if case.page is not None and case.page < 64:
        return "measured on pages of 64 rows and more"
    return "its caches have the dtype of the queries" if case.factors else _special(case)


_SHARED = "measured beside calls that share rows"
IMPLEMENTATIONS = (
    Implementation("flashtile-auto", ("cuda",), _flashtile("auto")),
    Implementation("flashtile-triton", ("cuda",), _flashtile("triton"), default=False),
    Implementation("flashtile-cpu", ("cpu",), _flashtile("cpu")),
    Implementation(
        "flashtile-unshared", build=_flashtile("auto", unused="shared_rows"),
        unsupported=lambda case, device: None if case.shared_rows else _SHARED,
    ),
    Implementation("copy", build=_copy, compiles=False, judged=False),
    Implementation("dense", build=_attention, unsupported=_dense_limits(_WIDEST_DENSE)),
    Implementation("torch-varlen", ("cuda",), _varlen, _dense_limits(_WIDEST_VARLEN), TORCH_VARLEN, compiles=False),
    sdpa("flash", ("cuda", "cpu"), _sdpa, unsupported=_one_query),
    sdpa("cudnn", ("cuda",), _sdpa, unsupported=_one_query),
    Implementation("matmul", ("cpu",), _matmul, _one_query),
    Implementation("sdpa-gathered", ("cpu",), _gathered, _pages_only),
    Implementation("fa4", ("cuda",), _fa4, _fa4_limits, FA4),
)  # fmt: skip


class ServingProblem(base.Problem):
    """A case on a device."""

    phases = (PHASE,)

    @functools.cached_property
    def _inputs(self) -> Inputs:
        return make_inputs(self.case, self.device)

    def measured_phases(self, implementation: Implementation) -> tuple[str, ...]:
        """None where an implementation has a reason; most are for few kinds of cases."""
        return self.phases if implementation.unsupported(self.case, self.device) is None else ()

    def bind(self, implementation: Implementation) -> base.Bound:
        step = Way(implementation.build(self.case, self._inputs))
        return base.Bound(step, base.Inputs({}, {}, []), ("out",), peak="")

    def judge(self, bound: base.Bound, phase: str, results: dict[str, Tensor]) -> Verdict:
        out = self._packed(results["out"])
        return judge(("out", out[place], exact, eager) for place, exact, eager in self._expected)

    def _packed(self, x: Tensor) -> Tensor:
        """`[queries, Hkv, group, D]` of all sequences."""
        return x.flatten(0, -3).unflatten(1, (self.case.Hkv, -1))

    @functools.cached_property
    def _expected(self) -> list[tuple[tuple[Tensor, int], Tensor, Tensor]]:
        """Queries of some pairs of a sequence and a key/value head, and what float64 and the case's own dtype give."""
        case, found = self.case, []
        starts, cpu = [0, *itertools.accumulate(case.counts)], torch.device("cpu")
        packed = self._packed(_rotated(self._inputs, self._inputs.q, True))
        for number in spread(_PAIRS, case.B * case.Hkv, cpu).unique().tolist():
            sequence, head = divmod(number, case.Hkv)
            queries = spread(_QUERIES, case.counts[sequence], cpu).unique().to(self.device)
            place = starts[sequence] + queries, head
            exact, eager = (
                self._plain(sequence, head, queries, packed[place].to(dtype))
                for dtype in (torch.float64, case.torch_dtype)
            )
            found.append((place, exact, eager))
        return found

    @torch.no_grad()
    def _plain(self, sequence: int, head: int, queries: Tensor, q: Tensor) -> Tensor:
        """Attention of some queries of a sequence with one key/value head, all scores at once, in the dtype of q."""
        case = self.case
        k, v = (t[:, 0] for t in gather_rows(case, self._inputs, sequence, slice(head, head + 1), q.dtype))
        count, rows = case.counts[sequence], len(k)
        column = torch.arange(rows, device=q.device) - (rows - count)  # the first query's own row is 0
        visible = column <= queries[:, None]
        if case.tree:
            mask = self._inputs.options["tree_mask"][queries]
            visible = (column < 0) | mask[:, column.clamp(min=0)]
        scores = q @ k.mT * case.D**-0.5
        return scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1) @ v
