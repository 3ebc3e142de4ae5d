"""How a call meets PyTorch's dispatcher: when it may be passed by, and autograd in the midst of an operator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion

_TensorGuards: Any
try:
    # By which torch.compile recognises tensors, in the time of reading the shape of each.
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None

PLAIN = (Tensor, torch.nn.Parameter)
# Asked on each call, and by short names.
_tracing, _modes = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
_transforms, _profiling = torch._C._are_functorch_transforms_active, torch.autograd._profiler_enabled
_compiling, _recording = torch.compiler.is_compiling, torch.is_grad_enabled
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_WRITES_GRAPHS_OUT = TorchVersion(torch.__version__) < "2.13"


def unobserved(*tensors: Tensor | None) -> bool:
    """Whether PyTorch's dispatcher would only pass a call on: nothing else intercepts, records or traces it, and no
    tensor (all on one device, the first not None) is lazily negated."""
    if _compiling():
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in PLAIN or tensor.is_neg()):
            return False
    first = tensors[0]
    assert first is not None
    if _tracing() is not None:
        _refuse_onnx("an operator of flashtile")
        return False
    return (first.is_cuda or first.is_cpu) and not (_modes() or _transforms() or _profiling())


def undisturbed() -> bool:
    """Whether PyTorch would only pass on a call of `plain` tensors, which autograd alone may record: no compiler,
    trace, mode, transform, forward-mode differentiation or profiler sees it."""
    return not (
        _compiling()
        or forward_ad._current_level >= 0
        or _tracing() is not None
        or _modes()
        or _transforms()
        or _profiling()
    )


def plain(*tensors: Tensor) -> bool:
    """Whether arguments are tensors in the memory of a CPU or a GPU, of no subclass and with their own numbers."""
    return all(
        type(tensor) in PLAIN
        and (tensor.is_cuda or tensor.is_cpu)
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        for tensor in tensors
    )


def recogniser(*tensors: Tensor) -> Callable[..., bool]:
    """A guard: whether as many arguments are to PyTorch what these tensors are, but for addresses and contents (type,
    dtype, device, sizes, strides, wanting a gradient, treatment by the dispatcher)."""
    if _TensorGuards is not None:
        # The guards recognise nothing that is passed twice.
        firsts = [next(at for at, other in enumerate(tensors) if other is tensor) for tensor in tensors]
        distinct = sorted(set(firsts))
        guards = _TensorGuards(*[tensors[at] for at in distinct], dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check
        if len(distinct) == len(tensors):
            return check
        places = (*((at, first) for at, first in enumerate(firsts) if at != first),)

        def recognises(*others: Tensor) -> bool:
            for at, first in places:
                if others[at] is not others[first]:
                    return False
            return check(*[others[at] for at in distinct])

        return recognises
    expected = [_looks(tensor) for tensor in tensors]
    return lambda *others: plain(*others) and [_looks(other) for other in others] == expected


def _looks(tensor: Tensor) -> tuple:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _refuse_onnx(name: str) -> None:
    """Raises NotImplementedError with the remedy while PyTorch exports to ONNX, which has no such operator."""
    onnx: Any = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        raise NotImplementedError(
            f"torch.onnx.export: expected a model of PyTorch's own operators, got {name}; export in two steps, "
            "program = torch.export.export(model.eval(), args) and "
            "torch.onnx.export(flashtile.integrations.export.decompose(program), dynamo=True)"
        )


def batched(*gradients: Tensor | None) -> bool:
    """Whether gradients stand for several each, as with `torch.autograd.grad(is_grads_batched=True)`: PyTorch's own
    operations, none of them in place, compute with such, and no dispatch mode or transform tells of them."""
    if _compiling():
        return False
    for gradient in gradients:  # noqa: SIM110, a generator takes longer
        if gradient is not None and _is_batched(gradient):
            return True
    return False


def recorded(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd records a call of tensors."""
    if _recording():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without what it does first for `torch.func` transforms, which must have taken another way. If
    torch.compile traces it, it is `function.apply`."""
    direct: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*arguments: Any) -> Any:
        return function.apply(*arguments) if _compiling() else direct(*arguments)

    return apply


def transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation is active."""
    return _transforms() or forward_ad._current_level >= 0


def register_fake(name: str, fake: Callable[..., Any], library: torch.library.Library) -> None:
    """Registers what an operator returns under tracing: `fake`.

    If inductor has no lowering for an operator, it makes one when it first meets it, and PyTorch before 2.13 then logs
    all that the arguments were computed from, as a tree that does not end behind some blocks of a Transformer. For the
    operators of a list it makes one without; fakes run before it looks.
    """

    def traced(*arguments: Any, **named: Any) -> Any:
        _refuse_onnx(name)
        lowering: Any = sys.modules.get("torch._inductor.lowering")
        if lowering is not None and _WRITES_GRAPHS_OUT:
            lowering.FALLBACK_ALLOW_LIST.add(name)
        return fake(*arguments, **named)

    torch.library.register_fake(name, traced, lib=library)


def refuse_nested_forward_mode(name: str) -> None:
    """To be called in the `jvp` of an autograd.Function: PyTorch switches forward mode off there, so an outer one would
    get a tangent of 0."""
    interpreters = torch._C._functorch.get_interpreter_stack() or []
    if sum(interpreter.key() == torch._C._functorch.TransformType.Jvp for interpreter in interpreters) > 1:
        raise NotImplementedError(
            f"{name} has no forward-mode derivative of its forward-mode derivative (torch.func.jvp or jacfwd in "
            "another): use reverse mode for one of the two, as torch.func.hessian does"
        )


def refuse_named_backend(backend: str) -> None:
    """Under transforms PyTorch's own operations compute a call: a backend asked for by name would not run."""
    if backend not in ("auto", "reference"):
        raise ValueError(
            f"backend: expected 'auto' or 'reference' under torch.func transforms, got {backend!r}; the transforms "
            "work on PyTorch's own operations"
        )


def distinct(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same tensors, none twice: torch.compile cannot trace an autograd.Function that gets a tensor twice."""
    found: list[Tensor | None] = []
    for tensor in tensors:
        twice = tensor is not None and any(tensor is other for other in found)
        found.append(tensor.view_as(tensor) if twice and tensor is not None else tensor)
    return found


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Leaves `torch.func`'s transforms, which wrap each tensor that is made within them."""
    if not _transforms():
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


@contextmanager
def autograd_in_operator() -> Iterator[None]:
    """Records autograd in the midst of an operator, below which PyTorch may have switched it off (dispatch modes)."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def autocast(operands: Iterable[Tensor | None]) -> list[Any]:
    """Operands as `torch.autocast` gives them to a linear layer, the first being its input; it leaves float64 alone."""
    tensors: list[Any] = list(operands)
    x = tensors[0]
    kind = x.device.type
    if not ((x.is_cuda or x.is_cpu) and torch.is_autocast_enabled(kind)):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [t.to(dtype) if _castable(t, x.device) else t for t in tensors]


def _castable(tensor: object, device: torch.device) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.device == device
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
    )


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Casts nothing: gradients keep the dtypes of the forward, wherever the backward is called."""
    if (tensor.is_cuda or tensor.is_cpu) and torch.is_autocast_enabled(tensor.device.type):
        return torch.autocast(tensor.device.type, enabled=False)
    return nullcontext()
