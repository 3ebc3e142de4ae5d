"""The kernels that a call would run, without running it: the choices that a call makes, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashtile._backends import devices
from flashtile.ops.attention.call import Call, KernelChoice, Machine, describe_call, seen_call
from flashtile.ops.attention.options import (
    DENSE_LAYOUT,
    PACKED_LAYOUT,
    ExplainOptions,
    checked_qkv,
    option_names,
    resolve_call,
    take,
    with_options,
)
from flashtile.ops.attention.partial import AttentionPart, placed
from flashtile.ops.attention.select import BACKENDS
from flashtile.ops.attention.spec import FP8, wanted_gradients
from flashtile.ops.common.checks import raise_not_bool, resolve_dropout

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAMES = option_names(ExplainOptions)


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
    given = take(explain, options, _NAMES)
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
    name, device_type, facts, multiprocessors = _resolve_device(q.device if device is None else device)
    interpreting = device_type == "cpu" and devices.interpreting()
    machine = Machine(device_type, facts, multiprocessors, devices.triton_missing(), interpreting)
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


def _resolve_device(device: torch.device | str) -> tuple[str, str, devices.DeviceFacts, int]:
    """Name, device type, facts and multiprocessors of a device or of an architecture."""
    if isinstance(device, str) and (arch := devices.architecture_named(device)) is not None:
        facts = devices.KNOWN_DEVICES[arch]
        return arch, "cuda", facts, devices.typical_multiprocessors(facts)
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type == "cuda" and torch.cuda.is_available():
        index = found.index if found.index is not None else torch.cuda.current_device()
        here = torch.device("cuda", index)
        facts = devices.device_facts(here)
        return f"{torch.cuda.get_device_name(index)} ({facts.arch})", "cuda", facts, devices.multiprocessors(here)
    if found.type == "cpu":
        return "the CPU", "cpu", devices.INTERPRETER, 1
    raise ValueError(
        f"device: expected 'cpu', a GPU that is present, the name of one that is not, such as 'h100', or one of "
        f"{', '.join(devices.KNOWN_DEVICES)}, got {device}; name the architecture of a GPU whose name is not known"
    )
