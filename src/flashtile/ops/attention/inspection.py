"""Public functions that tell about a call: the weights of chosen rows, what each key receives, the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashtile._backends import devices
from flashtile.ops.attention import checks, reference, select
from flashtile.ops.attention.call import Call, KernelChoice, Machine, current_machine, describe_call, seen_call
from flashtile.ops.attention.operator import visited_pairs
from flashtile.ops.attention.options import (
    DENSE_LAYOUT,
    PACKED_LAYOUT,
    ColumnSumsOptions,
    ExplainOptions,
    ProbsOptions,
    checked_qkv,
    option_names,
    resolve_call,
    take,
    with_options,
)
from flashtile.ops.attention.partial import AttentionPart, placed
from flashtile.ops.attention.reference import Part
from flashtile.ops.attention.select import BACKENDS, readable_side, rows_contiguous
from flashtile.ops.attention.spec import (
    FP8,
    SIDE,
    SIDE_SCHEMA,
    SPEC_SCHEMA,
    AttentionSpec,
    SideInputs,
    lse_dtype,
    lse_shape,
    side_tensors,
    unflatten,
    wanted_gradients,
)
from flashtile.ops.common import dispatch
from flashtile.ops.common.checks import (
    INDEX_DTYPES,
    check_device,
    check_tensors,
    raise_not_bool,
    readable,
    resolve_dropout,
)
from flashtile.ops.common.flops import product_flops, register_flops
from flashtile.ops.common.sizes import differ

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PROBS_NAMES, _COLUMN_SUMS_NAMES = option_names(ProbsOptions), option_names(ColumnSumsOptions)
_EXPLAIN_NAMES = option_names(ExplainOptions)
#: A choice of rows or heads: all, a slice, or their numbers.
Chosen = slice | Sequence[int] | Tensor | None


@with_options(ProbsOptions)
def attention_probs(
    q: Tensor,
    k: Tensor,
    *,
    rows: Chosen = None,
    heads: Chosen = None,
    **options: Unpack[ProbsOptions],
) -> Tensor:
    """The softmax weights of `flashtile.attention` for chosen rows and heads, as a tensor.

    `attention` never computes all weights. This function computes those that you choose, in PyTorch operations on any
    device: time and memory grow with the chosen rows times the keys. Differentiable to any order in q, k, bias,
    alibi_slopes, sinks and the tensors that score_mod reads. Arguments that are not listed here are those of
    `attention` and mean the same.

    Args:
        q: `[batch, seq_q, heads_q, head_dim]`.
        k: `[batch, seq_k, heads_kv, head_dim]`.
        rows: numbers of queries, from 0 to seq_q - 1, in any order: a slice, a list, or a tensor `[rows]` of int32 or
            int64 on q's device; None = all.
        heads: numbers of query heads, in the same forms.
        dropout_p: with `dropout_seed`, returns the weights that multiplied v: some are 0, and the others are scaled by
            1 / (1 - p).
        dropout_seed: the seed of the call that you inspect; required if dropout_p is not 0.

    Returns:
        `[batch, heads, rows, seq_k]` float32 (float64 for float64 inputs). A row sums to 1, to less if a sink takes a
        share, and to 0 if no key is visible.

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, q and k are packed, or rows or heads are out of range. Values
            in tensors are always checked on a CPU, on a GPU with the environment variable `FLASHTILE_CHECK_VALUES=1`.

    Reference:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1.
    """
    given = take(attention_probs, options, _PROBS_NAMES)
    check_tensors(q=q, k=k)
    if q.dim() == 3:
        raise ValueError(
            f"q: expected 4 dimensions [batch, seq, heads, head_dim], got a packed shape {tuple(q.shape)}; cut out one "
            "sequence: q[None, start:end]"
        )
    q, k, _ = checked_qkv(q, k, k, DENSE_LAYOUT)
    batch, seq_q, heads_q, _ = q.shape
    seq_k = k.shape[1]
    dropout_p = resolve_dropout(given.dropout_p, given.dropout_seed, q.device)
    if dropout_p and given.dropout_seed is None:
        raise ValueError(
            f"dropout_seed: expected the seed of the call beside dropout_p={dropout_p}, got None; give both calls one "
            "that flashtile.draw_dropout_seed(device) makes, or leave dropout_p out for the weights before dropout"
        )
    side, spec = resolve_call(q, k, k, given, dropout=(dropout_p, given.dropout_seed if dropout_p else None))
    checks.check_values(side, seq_q, seq_k)
    row_numbers = _chosen("rows", rows, seq_q, "seq_q", q.device)
    if row_numbers is None:
        row_numbers = torch.arange(seq_q, device=q.device)
    head_numbers = _chosen("heads", heads, heads_q, "heads_q", q.device)
    group = heads_q // k.shape[2] if head_numbers is None else 1
    part = Part(row_numbers, head_numbers, group, 0, seq_k, seq_q, seq_k)
    with dispatch.without_autocast(q):
        seen = reference.seen_keys(part, side, spec)
        operands = reference.load_rows(q, part), reference.load_keys(k, part, heads_q, seen)
        rows, keys = (tensor.to(lse_dtype(q.dtype)) for tensor in operands)
        scores, shown, _ = reference.modified_scores(reference.products(rows, keys, part), part, side, spec)
        weights = reference.softmax(scores, shown, part, side).keys
        return reference.dropped(weights, reference.kept_weights(part, batch, heads_q, side, spec), spec)


@with_options(ColumnSumsOptions)
def attention_column_sums(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **options: Unpack[ColumnSumsOptions],
) -> Tensor:
    """How much attention each key receives: the sum over all queries of the softmax weights of the key.

    The function recomputes the weights tile by tile from the `lse` that `attention(..., return_lse=True)` returned, in
    memory linear in the sequence length. It sums the weights before dropout. The sums are the same in every run, bit
    for bit, and have no gradient. Arguments that are not listed here are those of `attention`, or with `cu_seqlens_q`
    of `attention_varlen`; pass the same values as in the call that returned lse. There is no argument for sinks,
    because lse includes them.

    Args:
        q: `[batch, seq_q, heads_q, head_dim]`, packed `[total_q, heads_q, head_dim]`.
        k: `[batch, seq_k, heads_kv, head_dim]`, packed `[total_k, heads_kv, head_dim]`.
        lse: `[batch, heads_q, seq_q]`, packed `[heads_q, total_q]`, float32 (float64 with float64 q). If k is a part of
            the keys, pass the lse over all keys: the result then sums the weights among all keys.
        backend: "auto" chooses by device; "triton", "cpu" or "reference" run that backend or raise. "hopper" has no
            kernel.

    Returns:
        `[batch, heads_q, seq_k]`, packed `[heads_q, total_k]`, in the dtype of lse. Without sinks they add up to the
        number of rows that see a key. A key that no row sees has 0, and so has a packed key past `cu_seqlens_k[-1]`.

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, the named backend cannot serve the call, or a tensor requires
            a gradient; call it under `torch.no_grad()`.
        NotImplementedError: under `torch.func` transforms.

    Reference:
        The weights are recomputed as in the backward of Dao et al., "FlashAttention" (2022), algorithm 4. Zhang et al.,
        "H2O: Heavy-Hitter Oracle" (2023), section 4, choose the keys to keep by such sums.
    """
    given = take(attention_column_sums, options, _COLUMN_SUMS_NAMES)
    check_tensors(q=q, k=k, lse=lse)
    packed = cu_seqlens_q is not None
    q, k, _ = checked_qkv(q, k, k, PACKED_LAYOUT if packed else DENSE_LAYOUT)
    _check_lse(lse, q)
    side, spec = resolve_call(q, k, k, given._replace(deterministic=True), cu_seqlens_q, cu_seqlens_k)
    return run_column_sums(q, k, lse, side, spec._replace(batch_invariant=False), given.backend)


def _check_lse(lse: Tensor, q: Tensor) -> None:
    shape, dtype = lse_shape(q), lse_dtype(q.dtype)
    if differ(lse.shape, shape):
        raise ValueError(
            f"lse: expected {list(shape)}, [batch, heads_q, seq_q] or packed [heads_q, total_q], got "
            f"{list(lse.shape)}; it is what attention(..., return_lse=True) returns"
        )
    if lse.dtype is not dtype:
        raise TypeError(f"lse: expected dtype {dtype}, as attention returns it, got {lse.dtype}; do not cast it")
    check_device("lse", lse, q.device)


def _chosen(name: str, chosen: Chosen, size: int, of: str, device: torch.device) -> Tensor | None:
    """Numbers from 0 to `size - 1` as an int64 tensor `[n]`; None for all."""
    if chosen is None:
        return None
    if isinstance(chosen, slice):
        if chosen.step is None:  # nor may it take a size for a number that an exported program leaves open
            return torch.arange(size, device=device)[chosen]
        numbers = range(*chosen.indices(size))
        # Not from start to stop: of an empty slice they need not lie in the direction of the step.
        return numbers.start + numbers.step * torch.arange(len(numbers), device=device)
    if isinstance(chosen, Tensor):
        check_tensors(**{name: chosen})
        if chosen.dtype not in INDEX_DTYPES:
            remedy = "use mask.nonzero().squeeze(1)" if chosen.dtype is torch.bool else "cast it"
            raise TypeError(f"{name}: expected dtype int32 or int64, got {chosen.dtype}; {remedy}")
        if chosen.dim() != 1:
            raise ValueError(f"{name}: expected one dimension, got shape {tuple(chosen.shape)}; flatten it")
        check_device(name, chosen, device)
        if readable(chosen) and not torch.compiler.is_compiling() and chosen.numel():
            _check_range(name, int(chosen.min()), int(chosen.max()), size, of)
        return chosen.long()
    if isinstance(chosen, str) or not isinstance(chosen, Sequence):
        raise TypeError(
            f"{name}: expected a slice, a sequence of ints or an int tensor, got {chosen!r}; of one number make a list"
        )
    for number in chosen:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}: expected a sequence of ints, got {number!r} in it; use int(...)")
        _check_range(name, number, number, size, of)
    return torch.tensor(list(chosen), dtype=torch.int64, device=device)


def _check_range(name: str, lowest: int, highest: int, size: int, of: str) -> None:
    if lowest < 0 or highest >= size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{name}: expected numbers from 0 to {of} - 1 = {size - 1}, got {wrong}; count from the start")


# The operator of column sums, the attention that each key receives: schema, fake and implementation. It has no
# derivative.


_library = torch.library.Library("flashtile", "FRAGMENT")
_library.define(
    f"attention_column_sums(Tensor q, Tensor k, Tensor lse, {SIDE_SCHEMA}, {SPEC_SCHEMA}, str backend) -> Tensor"
)
_op = torch.ops.flashtile.attention_column_sums.default


def run_column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec, backend: str) -> Tensor:
    """As `attention_column_sums`, of side inputs and a spec."""
    tensors = (q, k, lse, *side_tensors(side))
    if dispatch.transformed():
        raise NotImplementedError(
            "flashtile.attention_column_sums under torch.func or in forward mode: expected none, it has no derivative "
            "and no batching rule; sum the rows of flashtile.attention_probs"
        )
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "q, k, lse, bias, alibi_slopes: expected tensors that want no gradient, as column sums have none, got some "
            "that do; call it under torch.no_grad(), or sum the rows of flashtile.attention_probs, which has a gradient"
        )
    if dispatch.unobserved(*tensors):
        return _column_sums(q, k, lse, side, spec, backend)
    return _op(q, k, lse, *side, *spec, backend)


def _column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec, backend: str) -> Tensor:
    checks.check_values(side, q.shape[0], k.shape[0])
    implementation = select.implementation("column_sums", q, k, k, side, spec, backend)
    side = side if side.plain else readable_side(side)
    return implementation.column_sums(rows_contiguous(q), rows_contiguous(k), lse.contiguous(), side, spec)


def _implementation(q, k, lse, *rest):
    with torch.no_grad():
        return _column_sums(q, k, lse, *unflatten(rest))


def _fake(q, k, lse, *rest):
    shape = (q.shape[0], q.shape[2], k.shape[1]) if q.dim() == 4 else (q.shape[1], k.shape[0])
    return q.new_empty(shape, dtype=lse_dtype(q.dtype))


def _column_sums_flops(q: Tensor, k: Tensor, lse: Tensor, *rest: Any, **_: Any) -> int:
    return product_flops(visited_pairs(q, k, SideInputs(*rest[:SIDE])), q.shape[-1], 1)


for _device in ("CPU", "CUDA"):
    _library.impl("attention_column_sums", _implementation, _device)
dispatch.register_fake("flashtile::attention_column_sums", _fake, _library)
register_flops("attention_column_sums", _column_sums_flops)


@dataclass(frozen=True)
class Explanation:
    """The answer of `flashtile.explain`.

    Attributes:
        backend: the backend of the forward; None if no backend can serve the call. `kernels` has the backend of the
            backward.
        reason: why this backend, or why none.
        kernels: the kernels that the call runs, forward and backward.
        rejected: other backend -> why not.
        device: the architecture or device that was asked about.
        backends: all backends of attention, in the order in which "auto" tries them.
    """

    backend: str | None
    reason: str
    kernels: tuple[KernelChoice, ...]
    rejected: dict[str, str] = field(default_factory=dict)
    device: str = ""
    backends: tuple[str, ...] = ()

    def __str__(self) -> str:
        # If no backend serves the call, the reasons come from the backends below.
        reason = f" ({self.reason})" if self.backend else ", no backend serves this call"
        lines = [f"backend: {self.backend or 'none'} on {self.device}{reason}"]
        lines += [f"  {kernel}" for kernel in self.kernels]
        by_reason: dict[str, list[str]] = {}
        for name, why in self.rejected.items():
            by_reason.setdefault(why, []).append(name)
        lines += [f"not {', '.join(names)}: {why}" for why, names in by_reason.items()]
        return "\n".join(lines)


@with_options(ExplainOptions)
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
    part: AttentionPart | None = None,
    **options: Unpack[ExplainOptions],
) -> Explanation:
    """Says which backend, kernels and tiles a call would use, why, and why not the others. Runs nothing.

    Args:
        q: as for `attention`, or for `attention_varlen` if `cu_seqlens_q` is given. Tensors on the meta device work,
            because only shapes, strides, dtypes and addresses are read.
        k: the same.
        v: the same.
        cu_seqlens_q: as for `attention_varlen`.
        cu_seqlens_k: the same.
        device: the device to ask about, present or not: "cpu", "cuda", a GPU such as "h100" or "mi300x", or an
            architecture such as "sm_90" or "gfx942". Default: q's device.
        part: as for `attention_part`, to ask about a call of that function; with `cu_seqlens_q` its packed sequences.

    The other arguments are those of `attention` and `attention_varlen`. `return_lse` does not change the choice, but
    `return_max_scores` does. With `deterministic`, the gradients come from kernels that sum in a fixed order. Under
    `torch.autocast` the answer is for the autocast dtype, and q, k and v are cast to it.

    Returns:
        An `Explanation`, which prints as text. If no backend can serve the call, `backend` is None and `reason` says
        why.

    Raises:
        TypeError, ValueError: as the call itself, and for an unknown device.
    """
    given = take(explain, options, _EXPLAIN_NAMES)
    raise_not_bool(return_lse=given.return_lse, return_max_scores=given.return_max_scores)
    packed = cu_seqlens_q is not None
    q, k, v = checked_qkv(q, k, v, PACKED_LAYOUT if packed else DENSE_LAYOUT, eight_bits=True)
    seed = given.dropout_seed
    dropout_p = resolve_dropout(given.dropout_p, seed, seed.device if isinstance(seed, Tensor) else q.device)
    side, spec = resolve_call(q, k, v, given, cu_seqlens_q, cu_seqlens_k, (dropout_p, seed))
    if part is not None:
        spec = placed(spec, part, q.shape[-3], k.shape[-3], q.shape[-2], packed, given)
    if seen := seen_call(q, k, v, side, spec):
        k, v, side, spec, *_ = seen
    name, machine = _resolve_device(q.device if device is None else device)
    qkv = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    call = describe_call("forward", qkv, side, spec, given.backend, wanted_gradients(side), machine)
    choice = BACKENDS.choose(call)
    kernels = _kernels(call, choice.backend)
    return Explanation(choice.backend, choice.reason, kernels, choice.rejected, name, tuple(BACKENDS.by_name))


def _kernels(call: Call, forward: str | None) -> tuple[KernelChoice, ...]:
    """The kernels of forward and backward, once where both say the same; 8-bit inputs have a forward only."""
    if forward is None:
        return ()
    kernels = BACKENDS.by_name[forward].describe(call)
    if call.dtype is FP8:
        return kernels
    call = call._replace(phase="backward", spec=call.spec._replace(returns_max_scores=False))
    backward = BACKENDS.choose(call).backend
    of_backward = () if backward is None else BACKENDS.by_name[backward].describe(call)
    return kernels if of_backward == kernels else (*kernels, *of_backward)


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The layout that kernels get: the operator makes a last dimension contiguous which is not."""
    return tensor if tensor.stride(-1) == 1 else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _resolve_device(device: torch.device | str) -> tuple[str, Machine]:
    """Name and machine of a device or of an architecture."""
    if isinstance(device, str) and (arch := devices.architecture_named(device)) is not None:
        facts = devices.KNOWN_DEVICES[arch]
        return arch, Machine("cuda", facts, devices.typical_multiprocessors(facts), devices.triton_missing())
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type == "cuda" and torch.cuda.is_available():
        index = found.index if found.index is not None else torch.cuda.current_device()
        machine = current_machine(torch.device("cuda", index))
        return f"{torch.cuda.get_device_name(index)} ({machine.facts.arch})", machine
    if found.type == "cpu":
        return "the CPU", current_machine(found)
    raise ValueError(
        f"device: expected 'cpu', a GPU that is present, the name of one that is not, such as 'h100', or one of "
        f"{', '.join(devices.KNOWN_DEVICES)}, got {device}; name the architecture of a GPU whose name is not known"
    )
