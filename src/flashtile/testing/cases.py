"""Attention cases: what a call is, random inputs for it, and its check against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.testing.tolerance import Size, assert_close, size, size_in_finer_band


def _listed(lengths: tuple[int, ...]) -> str:
    """The lengths, of many the first ones and how many there are."""
    return str([*lengths]) if len(lengths) <= 9 else f"{[*lengths[:4]]}...{len(lengths)}"


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention: dense with `batch`, `seq_q`, `seq_k`; packed with `lengths_q`, `lengths_k`.

    `arguments` are keyword arguments of `flashtile.attention` that are not tensors. `key_lengths` is a tuple; a
    number above that of the keys stands for all keys. `bias`, `mask` and `alibi_slopes` are shapes, in which a letter
    stands for a size: "b" batch, "h" heads, "q", "k". The gradients of bias, slopes and sinks are compared too, except
    for the names in `constant`. `block_mask` is the tile of a block mask with empty, full and partial tiles, different
    for each head, and in packed calls for each sequence. `score_mod`: the call has a score function, `RelativeScore`.
    """

    seq_q: int = 64
    seq_k: int = 64
    batch: int = 2
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    dtype: torch.dtype = torch.float32
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    mask: str | None = None
    alibi_slopes: str | None = None
    sinks: bool = False
    block_mask: tuple[int, int] | None = None
    score_mod: bool = False
    constant: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = f"b{self.batch}q{self.seq_q}k{self.seq_k}"
        if self.lengths_q is not None:
            sizes = f"varlen{_listed(self.lengths_q)}x{_listed(self.lengths_k or self.lengths_q)}"
        flags = "".join(f"-{key}{value}" for key, value in self.arguments.items())
        lengths = f"-keys{list(self.key_lengths)}" if self.key_lengths is not None else ""
        lengths += "".join(f"-{name}[{shape}]" for name in _SHAPED if (shape := getattr(self, name)))
        lengths += "-sinks" if self.sinks else ""
        lengths += f"-blocks{list(self.block_mask)}" if self.block_mask else ""
        lengths += "-score_mod" if self.score_mod else ""
        heads = f"h{self.heads}:{self.heads_kv}-d{self.head_dim}:{self.head_dim_v}"
        return f"{sizes}-{heads}-{str(self.dtype)[6:]}{flags}{lengths}"

    @property
    def learned(self) -> tuple[str, ...]:
        """Tensors other than q, k and v whose gradient is compared."""
        return tuple(name for name in LEARNED if getattr(self, name) and name not in self.constant)

    @property
    def packed(self) -> bool:
        return self.lengths_q is not None

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the call that are not tensors."""
        if not (self.packed and (self.bias or self.mask or self.block_mask)):
            return self.arguments
        longest_q, longest_k = self.shape_of("qk")
        return {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k, **self.arguments}

    def shape_of(self, names: str) -> tuple[int, ...]:
        """A shape from its letters: "1hqk" is `[1, heads, seq_q, seq_k]`, in packed calls with the longest lengths."""
        longest_q = self.seq_q if self.lengths_q is None else max(self.lengths_q, default=0)
        longest_k = self.seq_k if self.lengths_q is None else max(self.lengths_k or self.lengths_q, default=0)
        batch = self.batch if self.lengths_q is None else len(self.lengths_q)
        sizes = {"1": 1, "b": batch, "h": self.heads, "q": longest_q, "k": longest_k}
        return tuple(sizes[name] for name in names)


_SHAPED = ("bias", "mask", "alibi_slopes")
#: Arguments beside q, k and v that have a gradient: tensors, and the score function, whose table has it.
LEARNED = ("bias", "alibi_slopes", "sinks", "score_mod")


@dataclass(frozen=True)
class RelativeScore:
    """A score function with a derivative in the score and in a captured table, which hides some keys. `table`: `[heads,
    33]`, by the distance of query and key."""

    table: Tensor

    def __call__(self, score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        distance = torch.clamp(q_index - k_index, -16, 16) + 16
        changed = score + self.table[head, distance] * torch.sin(0.5 * score)
        return torch.where((7 * q_index + 3 * k_index + batch) % 11 == 0, -float("inf"), changed)


def learned_tensor(given: Any) -> Tensor:
    """The tensor that has the gradient of an entry of `Inputs.tensors`."""
    return given.table if isinstance(given, RelativeScore) else given


@dataclass
class Inputs:
    """Tensors of one case: q, k, v, the upstream gradients, and by name the other tensors and the BlockMask."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    tensors: dict[str, Any]


def make_inputs(case: AttentionCase, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Random normal inputs, the same for a case and seed on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype).to(device)

    tensors: dict[str, Any] = {}
    rows_q: tuple[int, ...]
    rows_k: tuple[int, ...]
    lse_shape: tuple[int, ...]
    if case.lengths_q is not None:
        lengths_k = case.lengths_k if case.lengths_k is not None else case.lengths_q
        rows_q, rows_k = (sum(case.lengths_q),), (sum(lengths_k),)
        tensors["cu_seqlens_q"] = _cumulative(case.lengths_q, device)
        tensors["cu_seqlens_k"] = _cumulative(lengths_k, device)
        lse_shape = (case.heads, *rows_q)
    else:
        rows_q, rows_k = (case.batch, case.seq_q), (case.batch, case.seq_k)
        lse_shape = (case.batch, case.heads, case.seq_q)
    if case.key_lengths is not None:
        keys = [case.seq_k] * case.batch if case.lengths_q is None else lengths_k
        lengths = list(map(min, case.key_lengths, keys))
        tensors["key_lengths"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if case.arguments.get("dropout_p"):
        tensors["dropout_seed"] = torch.tensor([1234567 + seed, 89], device=device)
    tensors.update(_score_tensors(case, normal))
    if case.block_mask is not None:
        tensors["block_mask"] = _random_tiles(case, case.block_mask, generator).to(device)
    return Inputs(
        q=normal(*rows_q, case.heads, case.head_dim),
        k=normal(*rows_k, case.heads_kv, case.head_dim),
        v=normal(*rows_k, case.heads_kv, case.head_dim_v),
        dout=normal(*rows_q, case.heads, case.head_dim_v),
        dlse=normal(*lse_shape, dtype=torch.float64 if case.dtype is torch.float64 else torch.float32),
        tensors=tensors,
    )


def _score_tensors(case: AttentionCase, normal: Callable[..., Tensor]) -> dict[str, Any]:
    """Bias, mask, slopes, sinks and score function. A bias hides some keys, and so does a mask."""
    tensors: dict[str, Any] = {}
    wide = torch.float64 if case.dtype is torch.float64 else torch.float32
    if case.bias:
        bias = normal(*case.shape_of(case.bias), dtype=case.bias_dtype or case.dtype)
        tensors["bias"] = bias.masked_fill(bias > 1.5, float("-inf"))
    if case.mask:
        tensors["mask"] = normal(*case.shape_of(case.mask)) < 0.6
    if case.alibi_slopes:
        tensors["alibi_slopes"] = normal(*case.shape_of(case.alibi_slopes), dtype=wide).abs() / 8
    if case.sinks:
        tensors["sinks"] = normal(case.heads, dtype=wide)
    if case.score_mod:
        tensors["score_mod"] = RelativeScore(normal(case.heads, 33, dtype=wide))
    return tensors


def _random_tiles(case: AttentionCase, tile: tuple[int, int], generator: torch.Generator) -> flashtile.BlockMask:
    """A third of the tiles full, a third partly visible, the rest empty."""
    batch, heads, seq_q, seq_k = case.shape_of("bhqk" if case.packed else "1hqk")
    tiles_q, tiles_k = -(-seq_q // tile[0]), -(-seq_k // tile[1])
    kind = torch.rand(batch, heads, tiles_q, tiles_k, generator=generator, dtype=torch.float64, device="cpu")
    kind = kind.repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)[..., :seq_q, :seq_k]
    shown = torch.rand(kind.shape, generator=generator, dtype=torch.float64, device="cpu") < 0.8
    return flashtile.BlockMask.from_dense((kind < 0.33) | ((kind < 0.67) & shown), tile)


def run(case: AttentionCase, inputs: Inputs, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Runs forward and backward of a case. Returns out, lse, max_scores if the case asks for them, and gradients by
    name. `dtype` casts the inputs first."""
    dtype = dtype or case.dtype
    q, k, v = (t.to(dtype).detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    tensors = dict(inputs.tensors)
    for name in LEARNED:
        if name in tensors:
            given = learned_tensor(tensors[name])
            given = given.to(dtype if dtype is torch.float64 else given.dtype)
            given = given.detach().requires_grad_(name in case.learned)
            tensors[name] = RelativeScore(given) if name == "score_mod" else given
    function: Callable[..., Any] = flashtile.attention_varlen if case.packed else flashtile.attention
    leave_nan(q, k, v, inputs.dout.to(dtype), inputs.dlse)
    out, lse, *max_scores = function(q, k, v, **tensors, **case.keywords(), return_lse=True, backend=backend)
    leaves = {"q": q, "k": k, "v": v, **{name: learned_tensor(tensors[name]) for name in case.learned}}
    # A row with no visible key has lse = -inf: no gradient reaches it, whatever comes from above.
    upstream = (inputs.dout.to(dtype), inputs.dlse.to(lse.dtype))
    leave_nan(*leaves.values())
    grads = torch.autograd.grad((out, lse), list(leaves.values()), upstream)
    results = {"out": out.detach(), "lse": lse.detach(), **dict(zip(("max_scores",), max_scores))}
    return {**results, **{f"d{name}": grad for name, grad in zip(leaves, grads)}}


def check(
    case: AttentionCase, backend: str, device: torch.device | str = "cpu", seed: int = 0, inputs: Inputs | None = None
) -> dict[str, Tensor]:
    """Asserts that a backend's forward and backward of a case agree with the fp64 oracle. Returns its results."""
    inputs = inputs or make_inputs(case, device, seed)
    actual = run(case, inputs, backend)
    oracle = run(case, inputs, "reference", torch.float64)
    eager = run(case, inputs, "reference")
    cancelled = cancelled_sizes(case, inputs, oracle)
    for name, value in actual.items():
        assert_close(f"{case}: {name}", value, oracle[name], eager[name], cancelled.get(name, Size()))
    return actual


def cancelled_sizes(case: AttentionCase, inputs: Inputs, oracle: dict[str, Tensor]) -> dict[str, Size]:
    """How large the numbers are that cancel within the results. `oracle`: the results in float64.

    A backward pass without the N×N matrix takes `delta = rowsum(dout · out)` from the rounded out. The error of that
    sum goes, by the weights, into dq along the mean key and into dk along queries, and is there still when what it was
    subtracted from is gone (one key: dq = dk = 0), and into what else has a gradient by the scores, where only that of
    lse may be left. The other gradients by the scores are sums over weights that were rounded to the dtype of q, so
    they have its error though they are float32. lse is a sum of the largest score and a logarithm, each about 1.
    """
    arguments = {name: value for name, value in case.arguments.items() if name != "dropout_p"}
    tensors = {name: value for name, value in inputs.tensors.items() if name != "dropout_seed"}
    delta = (inputs.dout.double() * oracle["out"]).norm(dim=-1, keepdim=True)
    probe = replace(
        inputs, v=torch.ones_like(inputs.v[..., :1]), dout=delta, dlse=torch.zeros_like(inputs.dlse), tensors=tensors
    )
    weighted = run(replace(case, arguments=arguments), probe, "reference", torch.float64)["dv"]
    by_scores = {}
    if case.learned:
        rows = replace(probe, v=inputs.v, dout=torch.zeros_like(inputs.dout), dlse=delta.squeeze(-1).transpose(-1, -2))
        by_scores = run(replace(case, arguments=arguments), rows, "reference", torch.float64)
    scale = abs(case.arguments.get("scale", case.head_dim**-0.5))
    return {
        "lse": Size(1, 1),
        "dq": Size(*(scale * a * b for a, b in zip(size(delta), size(inputs.k)))),
        "dk": Size(*(scale * a * b for a, b in zip(size(weighted), size(inputs.q)))),
        **{f"d{name}": _rounded_as_q(case, inputs, name, by_scores, oracle) for name in case.learned},
    }


def _rounded_as_q(
    case: AttentionCase, inputs: Inputs, name: str, by_scores: dict[str, Tensor], oracle: dict[str, Tensor]
) -> Size:
    """Size of what has the error of q's dtype in a gradient, in the gradient's own units of the last place: of its part
    through out, and where its dtype is finer of all of it."""
    dtype = learned_tensor(inputs.tensors[name]).dtype
    ratio = torch.finfo(case.dtype).eps / torch.finfo(dtype).eps
    through_out, whole = size(by_scores[f"d{name}"]), Size()
    if ratio > 1:
        whole = size_in_finer_band(size(oracle[f"d{name}"]), case.dtype, dtype)
    return Size(*(ratio * part + result for part, result in zip(through_out, whole)))


def with_arguments(case: AttentionCase, **arguments: Any) -> AttentionCase:
    """The same case with more keyword arguments of the call."""
    return replace(case, arguments={**case.arguments, **arguments})


def _cumulative(lengths: tuple[int, ...], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


#: Blocks of a size: as many as a backward has results of the size of its inputs, and one for scratch.
_BLOCKS = 4


def leave_nan(*like: Tensor) -> None:
    """On a GPU: leaves NaN in free memory of these sizes, which the next results of such sizes come to lie in.

    Otherwise they would lie where those of an earlier call lay, and a tile that no thread block computes would hold
    that call's right numbers.
    """
    blocks = [torch.empty_like(tensor) for tensor in like if tensor.is_cuda for _ in range(_BLOCKS)]
    for block in blocks:
        if block.is_floating_point() and block.dtype.itemsize > 1:
            block.fill_(float("nan"))
