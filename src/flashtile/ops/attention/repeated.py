"""Calls like an earlier one, for which nothing is decided again.

Most calls of a program look like an earlier one. A key of the arguments and a guard on the tensors tell all that
decides what such a call does, and `RepeatedCall` holds what was decided: the checks, the canonical form, the backend
and its launches. The host's time of a repeated call is that of a look-up, the outputs and the launch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile._backends import forgetters, together
from flashtile.ops.attention import checks, select
from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.call import seen_call
from flashtile.ops.attention.operator import recorded_gradients
from flashtile.ops.attention.score_tracing import resolve_score_mod
from flashtile.ops.attention.select import (
    backward_plans,
    lie_as_usual,
    owned,
    prepared_function,
    read_as_given,
    readable_side,
    serve_backward,
    serve_forward,
)
from flashtile.ops.attention.spec import (
    FP8,
    SINGLE,
    AttentionSpec,
    Aux,
    AuxForm,
    BackwardInputs,
    Gradients,
    RunBackward,
    SideInputs,
    Wanted,
    saved_side,
    side_tensors,
    wanted_gradients,
)
from flashtile.ops.common import dispatch
from flashtile.ops.common.batch_invariance import MODE
from flashtile.ops.common.checks import readable
from flashtile.ops.common.philox import next_dropout_seed
from flashtile.ops.common.repeated import Alike, Memory, keep_alike

_CALLS: Memory[RepeatedCall] = Memory()
forgetters.append(_CALLS.forget)

_TENSORS = (Tensor, torch.nn.Parameter)
#: Types of the tensors beside q, k and v.
_OPTIONAL = frozenset((*_TENSORS, type(None)))

#: Types of the sides of a window: True and 1.0 equal 1, but are refused.
_SIDES = frozenset((int, type(None)))

#: The places in `side_tensors` of the offsets of the queries and of the keys, and the dropout seed.
_CU_SEQLENS_Q, _CU_SEQLENS_K, _DROPOUT_SEED = map(SINGLE.index, ("cu_seqlens_q", "cu_seqlens_k", "dropout_seed"))
#: The places there of tensors that may learn.
_LEARNED = tuple(SINGLE.index(name) for name in Wanted._fields[:-1])
#: The places of tensors of which kernels read several elements at once: as fast as they can at multiples of 16 bytes.
_READ_IN_VECTORS = frozenset(SINGLE.index(name) for name in ("bias", "mask", "block_lists", "block_patterns"))

Results = tuple[Tensor, ...]
#: The tensors beside q, k and v as a caller gave them, in the order of `side_tensors`.
Given = tuple[Any, ...]


def call_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    align: str,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float | None,
    deterministic: bool,
    batch_invariant: bool,
    backend: str,
) -> tuple[Hashable, ...] | None:
    """The key by which `found` looks up a call without other arguments; None where PyTorch would do something first, or
    arguments equal those of another type."""
    if not dispatch.undisturbed() or not (type(q) in _TENSORS and type(k) in _TENSORS and type(v) in _TENSORS):
        return None
    if torch._C._is_any_autocast_enabled() and checks.autocast_casts(q, k, v):
        return None
    if not (
        type(causal) is type(deterministic) is type(batch_invariant) is bool
        and type(align) is type(backend) is str
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (window is None or (type(window) is tuple and _SIDES.issuperset(map(type, window))))
    ):
        return None
    modes = torch._C._get_deterministic_algorithms(), batch_invariant or MODE.enabled
    try:
        return q.shape, k.shape, causal, align, window, scale, softcap, deterministic, backend, modes
    except RuntimeError:  # a nested tensor in the strided layout has no shape, and the checks refuse it
        return None


def key_with_aux(
    key: tuple[Hashable, ...],
    q: Tensor,
    single: Given,
    descales: Given,
    block_mask: BlockMask | None,
    score_mod: Any,
    others: tuple[Any, ...],
) -> tuple[tuple[Hashable, ...] | None, Given, Sequence[Tensor]]:
    """The key of a call with other arguments, the tensors among these, and of those the ones that are not None.

    Args:
        key: from `call_key`.
        single: from cu_seqlens_q to sinks, in the order of `side_tensors`.
        descales: of q, k and v.
        others: dropout_p, return_max_scores, max_seqlen_q and max_seqlen_k.
    """
    blocks: tuple[Any, ...] = None, None
    described: tuple[Hashable, ...] = ()
    captured: Aux = ()
    if block_mask is not None:
        if type(block_mask) is not BlockMask:
            return None, (), ()
        blocks = block_mask.lists, block_mask.tile_masks
        described = *block_mask.shape, *block_mask.tile
    if score_mod is not None:
        function = resolve_score_mod(score_mod, q)
        captured = function.captured
        # A function without a derivative is refused where a gradient is wanted.
        described = *described, function.program, function.dtype, torch.is_grad_enabled()
    dropout_p, returns_max_scores, max_q, max_k = others
    of_types = type(dropout_p) is float and type(returns_max_scores) is bool
    if not (of_types and (max_q is None or type(max_q) is int) and (max_k is None or type(max_k) is int)):
        return None, (), ()
    given = *single, *blocks, *descales, *captured
    types = (*map(type, given),)
    if not _OPTIONAL.issuperset(types):
        return None, (), ()
    cu_seqlens_q, cu_seqlens_k, *_ = single
    if cu_seqlens_k is not None:
        if cu_seqlens_k is cu_seqlens_q:  # as if it were not given
            given, types = (cu_seqlens_q, None, *given[2:]), (types[0], type(None), *types[2:])
        elif cu_seqlens_k.data_ptr() == cu_seqlens_q.data_ptr():
            return None, (), ()  # the guard does not compare addresses
    return (*key, types, others, described), given, [tensor for tensor in given if tensor is not None]


def found(key: Hashable, q: Tensor, k: Tensor, v: Tensor, present: Sequence[Tensor] = ()) -> RepeatedCall | None:
    """The call that such tensors with such a key made before; None for a new one. `present`: of the given tensors
    beside q, k and v, those that are not None."""
    for recognises, call in _CALLS.find(key, ()):
        if recognises(q, k, v, *present):
            return call
    return None


def new_call(
    key: Hashable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Given,
    side: SideInputs,
    spec: AttentionSpec,
    backend: str,
) -> RepeatedCall | None:
    """The call, which `found` gives from now on; None for tensors that are not plain, or of 8 bits, and where `side`
    has more than follows from the given tensors."""
    tensors = q, k, v, *(tensor for tensor in given if tensor is not None)
    if not dispatch.plain(*tensors) or q.dtype is FP8:
        return None
    resolved = _resolutions(given, side)
    if resolved is None:
        return None
    taken_apart = given and len(given) != len(side_tensors(side))
    wanted = wanted_gradients(side if taken_apart else saved_side(given, (0, 0)))
    requires_grad = any(tensor.requires_grad for tensor in tensors)
    call = RepeatedCall(AuxForm.from_side(side), spec, backend, resolved, wanted=wanted, requires_grad=requires_grad)
    _CALLS.keep(key, tensors, call)
    return call


#: How a side input of a call follows from the given tensors that there are: the place of one of them, or a function of
#: them and of q.
Resolution = int | Callable[..., Tensor]


def _resolutions(given: Given, side: SideInputs) -> tuple[Resolution, ...] | None:
    """How the side inputs that there are follow from the given tensors; None where they do not. The tensors of a score
    function come last; of one that is taken apart some become arguments."""
    resolved = side_tensors(side) if given else ()
    if not given and not side.plain:
        return None
    arguments = len(resolved) - len(side.captured)
    captured = given[arguments:]
    start = sum(tensor is not None for tensor in given[:arguments])
    found: list[Resolution] = []
    present = -1
    for place, (tensor, result) in enumerate(zip(given[:arguments], resolved)):
        present += tensor is not None
        if tensor is None:
            if place == _DROPOUT_SEED and result is not None:
                found.append(lambda aux, q: next_dropout_seed(q))
            elif place == _CU_SEQLENS_K and result is given[_CU_SEQLENS_Q] and result is not None:
                found.append(0)
            elif result is not None:
                part = _captured_resolution(result, captured, start)
                if part is None:
                    return None
                found.append(part)
        elif result is None:
            return None
        elif result is tensor:
            found.append(present)
        elif result.dtype is not tensor.dtype:
            found.append(lambda aux, q, place=present, dtype=result.dtype: aux[place].to(dtype))
        else:
            found.append(lambda aux, q, place=present, shape=result.shape: aux[place].expand(shape))
    for tensor in side.captured:
        part = _captured_resolution(tensor, captured, start)
        if part is None:
            return None
        found.append(part)
    return tuple(found)


def _captured_resolution(result: Tensor, captured: Given, start: int) -> Resolution | None:
    """How a tensor follows from those of a score function, of which the first is at `start` of those that there are: it
    is one of them, or another view of its memory. Without such tensors it is the same for all calls: slopes, which are
    kept, unless they are computed when a CUDA graph runs."""
    if not captured:
        later = result.is_cuda and torch.cuda.is_current_stream_capturing()
        return None if later else lambda aux, q: result
    address, shape, strides = result.data_ptr(), result.shape, result.stride()
    alike = [place for place, tensor in enumerate(captured) if tensor is not None and tensor.data_ptr() == address]
    if len(alike) != 1:
        return None
    place = start + alike[0]
    return place if result is captured[alike[0]] else lambda aux, q: aux[place].as_strided(shape, strides)


def forget_calls() -> None:
    """Forgets all calls, for tests and tools that change what decides about them."""
    _CALLS.forget()


class RepeatedCall:
    """Calls whose arguments and tensors look alike: their canonical form, and what runs them. It holds no tensor, but
    slopes that a function computes from nothing.

    Attributes:
        form, backward_spec, wanted: what its backward reads of it.
        requires_grad: a tensor of the call does.
        resolutions: how the side inputs follow from the given tensors; None where they are these.
        forward: from q, k, v and the tensors beside them to (out, lse) or (out, lse, max_scores).
        recorded_forward: the same where autograd records it, so that a backward follows.
    """

    __slots__ = (
        "_backwards",
        "_learned",
        "backend",
        "backward_spec",
        "form",
        "forward",
        "recorded_forward",
        "requires_grad",
        "resolutions",
        "spec",
        "wanted",
    )

    def __init__(
        self,
        form: AuxForm,
        spec: AttentionSpec,
        backend: str,
        resolutions: tuple[Resolution, ...],
        wanted: Wanted,
        requires_grad: bool,
    ) -> None:
        self.form, self.spec, self.backend, self.wanted, self.requires_grad = form, spec, backend, wanted, requires_grad
        self.backward_spec = spec._replace(returns_max_scores=False)
        self.resolutions = None if resolutions == (*range(len(resolutions)),) else resolutions
        self._learned = [_gradient_getter(place, wanted) for place in form.places]
        self.forward: Callable[..., Results] = self._first_forward
        self.recorded_forward: Callable[..., Results] = self._first_recorded_forward
        self._backwards: tuple[Alike[Any], Alike[Any]] = [], []

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], out_only: bool, resolved: bool = False
    ) -> Tensor | Results:
        """Runs the call, recorded by autograd where a gradient is wanted. Returns out alone, or what `run_attention`
        does. `aux`: the tensors that it was given beside q, k and v, or if they are `resolved` its side inputs."""
        if not resolved and self.resolutions is not None:
            aux = self.aux(aux, q)
        if self.requires_grad and torch.is_grad_enabled():
            return (_apply_out if out_only else _apply)(q, k, v, self, *aux)
        results = self.forward(q, k, v, aux)
        return results[0] if out_only else results

    def aux(self, present: Sequence[Tensor], q: Tensor) -> Sequence[Tensor]:
        """The side inputs of a call that there are, where they are not the given tensors."""
        resolutions: tuple[Any, ...] = self.resolutions or ()
        return [present[each] if type(each) is int else each(present, q) for each in resolutions]

    def aux_gradients(self, grads: Gradients) -> list[Tensor | None]:
        """The gradients of the side inputs that there are, in their order."""
        learned = self._learned
        return [None if pick is None else pick(grads) for pick in learned] if learned else []

    def backward(self, dout: Tensor, dlse: Tensor | None, saved: Sequence[Tensor]) -> Gradients | None:
        """The gradients, from q, k, v, out, lse and the side inputs as they were saved, or what hooks of saved tensors
        made of them; None where these or the gradients are not plain."""
        given = (dout, *saved) if dlse is None else (dout, dlse, *saved)
        entries = self._backwards[dlse is None]
        for recognises, run in entries:
            if recognises(*given):
                return run(dout, dlse, saved)
        if not dispatch.plain(*given) or dispatch.batched(dout, dlse):
            return None
        run = self._general_backward
        if lie_as_usual(dout, *saved[:5]):
            run = self._backward_like(dout, dlse, saved)
            keep_alike(entries, given, run)
        return run(dout, dlse, saved)

    def _first_forward(self, q: Tensor, k: Tensor, v: Tensor, aux: Aux = ()) -> Results:
        if not lie_as_usual(q, k, v):
            return self._general_forward(q, k, v, aux)
        self.forward = self._forward_like(q, k, v, aux)
        return self.forward(q, k, v, aux)

    def _first_recorded_forward(self, q: Tensor, k: Tensor, v: Tensor, aux: Aux = ()) -> Results:
        side = readable_side(self.form.side(aux))
        arguments = q, k, v, side, self.backward_spec, self.backend, self.wanted
        with together.Soon(functools.partial(backward_plans, *arguments)):
            results = self.forward(q, k, v, aux)
        if self.forward != self._first_forward:
            self.recorded_forward = self.forward
        return results

    def _general_forward(self, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> Results:
        return serve_forward(q, k, v, self.form.side(aux), self.spec, self.backend, plain=not aux)

    def _general_backward(self, dout: Tensor, dlse: Tensor | None, saved: Sequence[Any]) -> Gradients:
        q, k, v, out, lse, *aux = saved
        given = BackwardInputs(dout, dlse, q, k, v, out, lse)
        return serve_backward(given, self.form.side(aux), self.backward_spec, self.wanted, self.backend)

    def _forward_like(self, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> Callable[..., Results]:
        """A function that runs forwards of tensors that lie like these."""
        side, spec, general = self.form.side(aux), self.spec, self._general_forward
        if seen_call(q, k, v, side, spec) or not read_as_given(spec, q, k, v):
            return general
        module = select.implementation("forward", q, k, v, side, spec, self.backend)
        prepare = prepared_function(module, "prepare_forward") if _reads_as_given(side, q) else None
        launch = None if prepare is None else prepare(q, k, v, side, spec)
        if launch is None:
            return general if q.is_cuda or aux else lambda q, k, v, aux: owned(module.forward(q, k, v, side, spec))
        in_vectors = self._vector_places()
        if in_vectors:

            def run_with_tables(q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> Results:
                bits = q.data_ptr() | k.data_ptr() | v.data_ptr()
                for place in in_vectors:
                    bits |= aux[place].data_ptr()
                return general(q, k, v, aux) if bits % 16 else launch(q, k, v, aux)

            return run_with_tables

        def run(q: Tensor, k: Tensor, v: Tensor, aux: Aux = ()) -> Results:
            return general(q, k, v, aux) if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 else launch(q, k, v, aux)

        return run

    def _backward_like(self, dout: Tensor, dlse: Tensor | None, saved: Sequence[Any]) -> RunBackward:
        """A function that runs backwards of tensors that lie like these."""
        q, k, v, out, lse, *aux = saved
        spec, wanted, general, side = self.backward_spec, self.wanted, self._general_backward, self.form.side(aux)
        if seen_call(q, k, v, side, spec) or not read_as_given(spec, dout, q, k, v):
            return general
        contiguous = out.is_contiguous() and lse.is_contiguous() and (dlse is None or dlse.is_contiguous())
        module = select.implementation("backward", q, k, v, side, spec, self.backend, wanted=wanted)
        prepare = prepared_function(module, "prepare_backward") if contiguous and _reads_as_given(side, q) else None
        launch = None if prepare is None else prepare(BackwardInputs(dout, dlse, q, k, v, out, lse), side, spec, wanted)
        if launch is None:
            return general
        in_vectors = 0, 1, 2, 3, *(5 + place for place in self._vector_places())  # all but lse

        def run(dout: Tensor, dlse: Tensor | None, saved: Sequence[Any]) -> Gradients:
            bits = dout.data_ptr()
            for place in in_vectors:
                bits |= saved[place].data_ptr()
            return general(dout, dlse, saved) if bits % 16 else launch(dout, dlse, saved)

        return run

    def _vector_places(self) -> list[int]:
        """The side inputs of which kernels read several elements at once."""
        return [number for number, place in enumerate(self.form.places) if place in _READ_IN_VECTORS]


def _gradient_getter(place: int, wanted: Wanted) -> Callable[[Gradients], Tensor | None] | None:
    """A function that picks the gradient of the tensor that `side_tensors` has at a place; None if none is wanted."""
    if place >= len(SINGLE):
        number = place - len(SINGLE)
        return (lambda grads: grads.captured[number]) if wanted.captured[number] else None
    if place in _LEARNED and wanted.flags[_LEARNED.index(place)]:
        return operator.itemgetter(3 + _LEARNED.index(place))
    return None


def _reads_as_given(side: SideInputs, q: Tensor) -> bool:
    """Whether kernels read the side inputs as they lie, and nothing reads the values first."""
    if side.plain:
        return True
    if readable(q) and not (side.cu_seqlens_q is side.key_lengths is None and side.descales == (None, None, None)):
        return False
    given = side_tensors(side)
    if any(one is not other for one, other in zip(given, side_tensors(readable_side(side)))):
        return False
    return all(tensor.data_ptr() % 16 == 0 for place in _READ_IN_VECTORS if (tensor := given[place]) is not None)


class _RepeatedAttention(torch.autograd.Function):
    """Attention of a `RepeatedCall`, recorded for the backward pass. The side inputs that there are follow it."""

    @staticmethod
    def forward(ctx, q, k, v, call, *aux):
        results = call.recorded_forward(q, k, v, aux)
        if len(results) > 2:
            ctx.mark_non_differentiable(results[2])
        ctx.save_for_backward(q, k, v, results[0], results[1], *aux)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, dout, dlse=None, *of_max_scores):
        saved, call, grads = ctx.saved_tensors, ctx.call, None
        if dout is not None and dispatch.undisturbed() and not torch.is_grad_enabled():
            grads = call.backward(dout, dlse, saved)
        if grads is None:
            given, side = (dout, dlse, *saved[:5]), call.form.side(saved[5:])
            grads = recorded_gradients(given, side, call.backward_spec, call.wanted, call.backend)
        return grads[0], grads[1], grads[2], None, *call.aux_gradients(grads)


class _RepeatedAttentionOut(_RepeatedAttention):
    """The same without lse, which is one output less for autograd to keep."""

    @staticmethod
    def forward(ctx, q, k, v, call, *aux):
        results = call.recorded_forward(q, k, v, aux)
        ctx.save_for_backward(q, k, v, results[0], results[1], *aux)
        ctx.call = call
        return results[0]


#: Without what `apply` does first for `torch.func` transforms, under which no call is repeated.
_apply = super(torch.autograd.Function, _RepeatedAttention).apply
_apply_out = super(torch.autograd.Function, _RepeatedAttentionOut).apply
