"""Checks of what kernels compute on this machine, over the ways in which tiles can lie in shared memory.

A compiler has been wrong for some of these ways and right for all others (decisions/compilers.md), so a
kernel that is right for one head size says little about the next. The list has every combination of tile widths and
alignments that selects another layout, and each input on its own in rows of odd strides and at odd addresses.
`flashtile doctor --check-kernels` runs it on a user's GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.testing.cases import AttentionCase, check, make_inputs
from flashtile.testing.norms import NormCase, check_norm, make_norm_inputs
from flashtile.testing.tolerance import Size, assert_close


@dataclass(frozen=True)
class Layout:
    """The elements in front of a tensor's first one, and behind each row of its last dimension. An odd number leaves
    16-bit rows that cannot be copied asynchronously, so their tiles lie in shared memory in another way."""

    before: int = 0
    behind_rows: int = 0

    def __str__(self) -> str:
        return f"{self.before} before, {self.behind_rows} behind each row"

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor with this layout. Elements outside its rows are NaN, or True, to show who reads them."""
        *outer, columns = tensor.shape
        width = columns + self.behind_rows
        poison = float("nan") if tensor.dtype.is_floating_point else True
        storage = tensor.new_full((self.before + math.prod(outer) * width,), poison)
        placed = storage[self.before :].view(*outer, width)[..., :columns]
        return placed.copy_(tensor)


#: Rows at every place modulo 16 bytes, and whole tensors that begin between two places that are multiples of 4 bytes.
ODD_STRIDE = Layout(behind_rows=1)
ODD_ADDRESS = Layout(before=1)
#: Rows in a wider tensor, and an address in its middle, that are multiples of 16 bytes, as TMA needs them.
IN_WIDER_ROWS = Layout(before=8, behind_rows=8)


#: Heads of one column less than tiles of 32, 64 and 128 bytes of 16-bit elements, and of more than 128 bytes.
_ODD_WIDTHS = (15, 31, 63, 129)
#: Heads whose rows are copied asynchronously. The Hopper kernels take all of them, (head_dim, head_dim_v).
_EVEN_WIDTHS = (
    (16, 64),
    (32, 128),
    (40, 40),
    (64, 32),
    (64, 64),
    (80, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
)
_LAYOUTS = (ODD_STRIDE, ODD_ADDRESS)
_CAUSAL = AttentionCase(seq_q=150, seq_k=210, arguments={"causal": True})
#: The other dtype of 16 bits.
_OTHER_DTYPE = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
#: All queries and all keys of a sequence are one tile.
_ONE_TILE = replace(_CAUSAL, seq_q=36, seq_k=40, bias="1hqk")


Call = Callable[[Tensor, str], Tensor]


@dataclass(frozen=True)
class KernelCheck:
    """One call that is compared with the reference in float64, by the one tolerance policy. `operation`: the operation,
    under which a table counts the check. `name`: says which call of that operation it is. `run`: takes the device of
    the tensors. It raises AssertionError if a result is wrong."""

    operation: str
    name: str
    run: Callable[[torch.device], object]


def kernel_checks(backend: str, dtype: torch.dtype = torch.bfloat16) -> list[KernelCheck]:
    """The checks of a backend, always in the same order. `backend`: "triton", "cpu", or of attention alone "hopper" and
    "split". `dtype`: a dtype of 16 bits, of all tensors but a few. Some Hopper checks are of the other one, because
    float16 and bfloat16 are converted by other instructions."""
    plain = replace(_CAUSAL, head_dim=64, head_dim_v=64 if backend == "hopper" else 32)
    # The Hopper kernels refuse q, k and v that TMA cannot read. They copy such a dout.
    read_by_tma = product(("q", "k", "v"), (IN_WIDER_ROWS,))
    moved = [*(read_by_tma if backend == "hopper" else product("qkv", _LAYOUTS)), *product(("dout",), _LAYOUTS)]
    cases: list[tuple[AttentionCase, str | None, Layout]] = [(case, None, Layout()) for case in _cases(backend)]
    cases += [(plain, *one) for one in moved]
    if backend == "hopper":
        checks = [_attention_check(case, backend, dtype, name, layout) for case, name, layout in cases]
        others = (_attention_check(case, backend, _OTHER_DTYPE[dtype], None, Layout()) for case in _stored_cases())
        return [*checks, *others]
    if backend == "split":  # dense calls without tables
        plain_cases = (each for each in cases if each[0].lengths_q is None and each[0].bias is None)
        return [_attention_check(case, backend, dtype, name, layout) for case, name, layout in plain_cases]
    tables = replace(_CAUSAL, head_dim=31, head_dim_v=63, bias="1hqk", mask="b1qk")
    cases += [(replace(_CAUSAL, head_dim=63, head_dim_v=31, bias="1hqk"), None, Layout()), (tables, None, Layout())]
    cases += [(tables, *one) for one in product(("bias", "mask"), _LAYOUTS)]
    attention = [_attention_check(case, backend, dtype, name, layout) for case, name, layout in cases]
    return [*attention, *_cache_checks(backend, dtype), *_companion_checks(backend, dtype)]


def _cases(backend: str) -> list[AttentionCase]:
    """Mixes of the widths of heads, and kernels that only some calls have."""
    even = [replace(_CAUSAL, head_dim=d, head_dim_v=e) for d, e in _EVEN_WIDTHS]
    if backend == "hopper":
        # Kernels of their own for the gradient of a bias that scores share and of what a score function reads, and one
        # that stores that of a bias that they do not share.
        wide = replace(_CAUSAL, seq_k=208, head_dim=128, head_dim_v=128)
        return [*even, replace(wide, bias="1hqk"), replace(wide, bias="bhqk"), replace(wide, score_mod=True)]
    packed = replace(_CAUSAL, lengths_q=(70, 0, 5), lengths_k=(90, 33, 5))
    return [
        *even,
        *(replace(_ONE_TILE, head_dim=width, head_dim_v=width) for width in (64, 128, 512)),
        *(replace(_CAUSAL, head_dim=d, head_dim_v=e) for d, e in product(_ODD_WIDTHS, repeat=2)),
        *(replace(packed, head_dim=d, head_dim_v=e) for d, e in product(_ODD_WIDTHS[:3], repeat=2) if d != e),
    ]


def _stored_cases() -> list[AttentionCase]:
    """Gradients of queries that Hopper kernels add up in order, and that they store: all keys are one tile."""
    in_order = replace(_CAUSAL, arguments={"causal": True, "deterministic": True})
    stored = replace(_CAUSAL, seq_q=49, seq_k=49)
    return [replace(case, head_dim=d, head_dim_v=e) for case in (in_order, stored) for d, e in _EVEN_WIDTHS]


def _attention_check(
    case: AttentionCase, backend: str, dtype: torch.dtype, moved: str | None, layout: Layout
) -> KernelCheck:
    """One tensor, `moved`, lies as `layout` says."""
    case = replace(case, dtype=dtype)
    where = f", {moved} with {layout}" if moved else ""
    return KernelCheck("attention", f"{case}{where}", partial(_run_attention, case, backend, moved, layout))


def _run_attention(
    case: AttentionCase, backend: str, moved: str | None, layout: Layout, device: torch.device
) -> dict[str, Tensor]:
    inputs = make_inputs(case, device)
    if moved in inputs.tensors:
        inputs.tensors[moved] = layout.place(inputs.tensors[moved])
    elif moved:
        setattr(inputs, moved, layout.place(getattr(inputs, moved)))
    return check(case, backend, device, inputs=inputs)


def _cache_checks(backend: str, dtype: torch.dtype) -> list[KernelCheck]:
    """Decoding over a cache in one piece and in pages, with new keys appended and heads of odd widths."""
    return [
        KernelCheck(
            "cache",
            f"d{head_dim}:{head_dim_v}-{'pages' if paged else 'one piece'}-q{seq_q}, {layout}",
            partial(_run_cache, backend, dtype, (head_dim, head_dim_v), paged, seq_q, layout),
        )
        for (head_dim, head_dim_v), paged, (seq_q, layout) in product(
            ((15, 31), (33, 16), (64, 64), (129, 63)), (False, True), ((1, Layout()), (5, ODD_STRIDE))
        )
    ]


def _run_cache(
    backend: str,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    paged: bool,
    seq_q: int,
    layout: Layout,
    device: torch.device,
) -> None:
    (head_dim, head_dim_v), generator = head_dims, torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype).to(device)
        return layout.place(values)

    pages, page_size = 12, 32
    rows = (pages, page_size) if paged else (2, pages // 2 * page_size)
    given = {
        "q": normal(2, seq_q, 6, head_dim),
        "k_cache": normal(*rows, 2, head_dim),
        "v_cache": normal(*rows, 2, head_dim_v),
        "k": normal(2, seq_q, 2, head_dim),
        "v": normal(2, seq_q, 2, head_dim_v),
    }
    options: dict[str, Any] = {"cache_lengths": torch.tensor([150, 3], dtype=torch.int32, device=device)}
    if paged:
        order = torch.randperm(pages, generator=generator, device="cpu").view(2, -1)
        options["block_table"] = order.int().to(device)

    def results(backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        # The call writes to its caches: each run has its own.
        tensors = {name: layout.place(tensor.to(dtype)) for name, tensor in given.items()}
        function: Callable[..., Tensor] = flashtile.attention_with_kv_cache
        out = function(**tensors, **options, backend=backend)
        return {"out": out, "k_cache": tensors["k_cache"], "v_cache": tensors["v_cache"]}

    _compare("attention_with_kv_cache", results, backend, dtype)


def _companion_checks(backend: str, dtype: torch.dtype) -> list[KernelCheck]:
    """The other kernels: rows of odd widths, each tensor once more in rows of odd strides and at odd addresses."""
    norms = [NormCase(hidden=hidden, rms=rms, dtype=dtype) for hidden in (33, 1000) for rms in (False, True)]
    checks = [
        KernelCheck("norm", f"{case}, x0 with {layout}", partial(_run_norm, case, backend, layout))
        for case, layout in product(norms, (Layout(), *_LAYOUTS))
    ]
    calls: list[tuple[str, Call, tuple[int, ...]]] = [
        ("rotary", _rotary, (2, 21, 3, 33)),
        ("rotary", _rotary, (2, 21, 3, 64)),
        ("softmax", _softmax, (2, 3, 37, 101)),
        ("cross-entropy", _cross_entropy, (53, 1001)),
        ("dense", _dense, (53, 37)),
    ]
    checks += [
        KernelCheck(name, f"{list(shape)}, {layout}", partial(_run, name, call, shape, backend, dtype, layout))
        for (name, call, shape), layout in product(calls, (Layout(), *_LAYOUTS))
        # PyTorch's own bf16 product on a CPU reads what lies behind rows of an odd stride, here NaN.
        if not (name == "dense" and layout is ODD_STRIDE)
    ]
    return checks


def _run_norm(case: NormCase, backend: str, layout: Layout, device: torch.device) -> dict[str, Tensor]:
    inputs = make_norm_inputs(case, device)
    inputs.differentiable["x0"] = layout.place(inputs.differentiable["x0"])
    return check_norm(case, backend, device, inputs=inputs)


def _run(
    name: str,
    call: Call,
    shape: tuple[int, ...],
    backend: str,
    dtype: torch.dtype,
    layout: Layout,
    device: torch.device,
) -> None:
    """Compares the result of `call(x, backend)` and its gradient."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype).to(device)

    def results(backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        leaf = layout.place(x.to(dtype)).requires_grad_()
        out = call(leaf, backend)
        upstream = (
            torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device="cpu").view_as(out).to(out.dtype).to(device)
        )
        (dx,) = torch.autograd.grad(out, leaf, layout.place(upstream) if upstream.dim() else upstream)
        return {"out": out.detach(), "dx": dx}

    _compare(name, results, backend, dtype)


def _rotary(x: Tensor, backend: str) -> Tensor:
    cos, sin = flashtile.rotary_tables(x.shape[1], x.shape[-1] // 2 * 2, device=x.device, dtype=torch.float32)
    return flashtile.apply_rotary(x, cos.to(x.dtype), sin.to(x.dtype), backend=backend)


def _softmax(x: Tensor, backend: str) -> Tensor:
    return flashtile.scaled_masked_softmax(x, None, scale=0.7, backend=backend)


def _cross_entropy(x: Tensor, backend: str) -> Tensor:
    labels = torch.arange(x.shape[0], device=x.device) * 7 % x.shape[1]
    losses = flashtile.cross_entropy(x, labels, reduction="none", backend=backend)
    assert isinstance(losses, Tensor)
    return losses


def _dense(x: Tensor, backend: str) -> Tensor:
    weight = torch.linspace(-1, 1, 3 * 41 * x.shape[1], dtype=torch.float64, device=x.device).cos().div(8).to(x.dtype)
    weight1, weight2 = weight[: 41 * x.shape[1]].view(41, -1), weight[41 * x.shape[1] :][: 41 * 29].view(29, 41)
    out = flashtile.fused_mlp(x, weight1, None, weight2, None, backend=backend)
    assert isinstance(out, Tensor)
    return out


def _compare(
    name: str, results: Callable[[str, torch.dtype], dict[str, Tensor]], backend: str, dtype: torch.dtype
) -> None:
    """Holds each result of a backend to the reference's in float64, within what the reference in `dtype` errs by."""
    actual, oracle, eager = results(backend, dtype), results("reference", torch.float64), results("reference", dtype)
    for key, value in actual.items():
        assert_close(f"{name}: {key}", value, oracle[key], eager[key], Size())
