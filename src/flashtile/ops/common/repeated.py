"""Calls like an earlier one, for which nothing is checked, chosen or planned again.

A `CallTable` keeps what was decided about a call by its scalars, and by a guard on its tensors: their types, dtypes,
devices, sizes, strides, whether they want gradients, and how PyTorch's dispatcher treats them. Addresses may differ,
but all are multiples of 16 bytes. Nothing is kept of calls that a compiler, a mode, a transform or a profiler sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flashtile._backends import forgetters, picker
from flashtile.ops.common import dispatch

#: The tensors of a call, None for one that it does not have. The first is never None.
Tensors = Sequence[Tensor | None]
#: From the tensors that a call has to what it returns.
Run = Callable[[Sequence[Tensor]], Any]
#: The same of an operator: to the results that the call has.
Launch = Callable[[Sequence[Tensor]], list[Tensor]]

#: Calls are few in a program; a memory of ever new ones starts anew from time to time.
_MOST_CALLS = 4096
#: Calls of one key, whose tensors differ in what only the guard sees.
_MOST_ALIKE = 8

_TABLES: list[CallTable] = []
Kept = TypeVar("Kept")
#: Things kept of calls of one key, each with a guard on their tensors.
Alike = list[tuple[Callable[..., bool], Kept]]


def keep_alike(alike: Alike[Kept], tensors: Sequence[Tensor], kept: Kept) -> None:
    """Keeps something for tensors that the guard takes for these."""
    if len(alike) >= _MOST_ALIKE:
        alike.clear()
    alike.append((dispatch.recogniser(*tensors), kept))


class Memory(Generic[Kept]):
    """Things kept of calls, by a key of their arguments and a guard on their tensors. `find`: the `Alike` of a key, and
    its second argument where there is none."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, Alike[Kept]] = {}
        self.find = self._calls.get

    def __len__(self) -> int:
        return len(self._calls)

    def keep(self, key: Hashable, tensors: Sequence[Tensor], kept: Kept) -> None:
        """Keeps something for such a key and such tensors."""
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        keep_alike(self._calls.setdefault(key, []), tensors, kept)

    def forget(self) -> None:
        """Forgets all calls."""
        self._calls.clear()


class CallTable(Memory[Run]):
    """Functions that run the calls of one public function, from the tensors that these have."""

    def run(self, tensors: Tensors, scalars: tuple[Any, ...]) -> Any:
        """Runs a call like an earlier one, and returns its results; None for a new one. `scalars` are all its other
        arguments."""
        if not dispatch.undisturbed():
            return None
        first: Any = tensors[0]
        if type(first) not in dispatch.PLAIN:
            return None
        try:
            # Scalars of other types may be equal: True, 1 and 1.0.
            alike = self.find((first.shape, scalars, (*map(type, scalars),), (*map(type, tensors),)))
        except (RuntimeError, TypeError):  # a nested tensor has no shape; a list is no key
            return None
        if alike is not None:
            present: Any = [tensor for tensor in tensors if tensor is not None]
            for recognises, run in alike:
                if recognises(*present):
                    return run(present) if aligned(present) else None
        return None

    def keep_call(self, tensors: Tensors, scalars: tuple[Any, ...], run: Run) -> list[Tensor] | None:
        """Keeps what runs calls like this one, and returns the tensors that it takes; None where it does not, because
        these are not plain, or something sees the call. Activation checkpointing compares what a call and its
        repetition keep for a backward, so a differentiable call that is kept is run by `run` too."""
        present = [tensor for tensor in tensors if tensor is not None]
        if (
            not (dispatch.undisturbed() and dispatch.plain(*present))
            or dispatch.batched(*present)
            or not aligned(present)
        ):
            return None
        assert tensors[0] is not None
        self.keep((tensors[0].shape, scalars, (*map(type, scalars),), (*map(type, tensors),)), present, run)
        return present


def call_table() -> CallTable:
    """A table that `forget_calls` empties."""
    table = CallTable()
    _TABLES.append(table)
    return table


def forget_calls() -> None:
    """Forgets the calls of all functions, for tests and tools that change what decides about them."""
    for table in _TABLES:
        table.forget()


forgetters.append(forget_calls)


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all addresses are multiples of 16 bytes."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return not bits & 15


class RepeatedCall:
    """Calls of a differentiable function whose tensors lie alike, and their backwards; it holds no tensor. Tensors of a
    call may have more dimensions than those of the operator, of which they are views."""

    def __init__(self, made: Any, tensors: Sequence[Any], inputs: Any, spec: Any, backend: str, launch: Launch) -> None:
        """
        Args:
            made: the `operators.Differentiable`.
            tensors: of the call, None for one that it does not have.
            inputs: the same as the operator takes them.
            spec: the scalars of the operator.
            backend: its backend.
            launch: runs it on tensors that lie like these.
        """
        self._made, self._backend, self._launch = made, backend, launch
        self._places = [place for place, tensor in enumerate(tensors) if tensor is not None]
        self._shapes = [tensors[place].shape for place in self._places]
        self.requires_grad = any(tensors[place].requires_grad for place in self._places)
        shapes = [(tensors[place].shape, inputs[place].shape) for place in self._places]
        self._flat = {given: flat for given, flat in shapes if given != flat and given.numel() == flat.numel()}
        self._viewed = inputs[0].shape, tensors[0].shape
        # Saved tensors are found by their sources: `save` is asked once, with stand-ins for results.
        forward = made.forward
        there = [True] if forward.results is Tensor or forward.present is None else forward.present(inputs, spec)
        stand_ins: list[Any] = [object() for each in there if each]
        results = stand_ins[0] if forward.results is Tensor else forward.unpacked(stand_ins, inputs, spec)
        self._stand_in = SimpleNamespace(needs_input_grad=[t is not None and t.requires_grad for t in tensors])
        saved, self.scalars = made.save(inputs, results, spec, self._stand_in)
        sources = [*(inputs[place] for place in self._places), *stand_ins]
        found = [[source is each for source in sources].index(True) for each in saved if each is not None]
        self._saved = picker(found)
        self._outputs = sum(map(bool, there[: made.outputs + made.constants]))
        self._constants = sum(map(bool, there[made.outputs : made.outputs + made.constants]))
        self._given = expander([*there[: made.outputs], *(each is not None for each in saved)])
        self._backwards = CallTable()

    def __call__(self, present: Sequence[Tensor]) -> Any:
        if self.requires_grad and torch.is_grad_enabled():
            return _apply(self, *present)
        found = self._run(present)
        return found[0] if self._made.single else found[: self._outputs]

    def _run(self, present: Sequence[Tensor]) -> list[Tensor]:
        found = self._launch(present)
        flat, shape = self._viewed
        if flat != shape:
            for place, result in enumerate(found[: self._outputs]):
                if result.shape == flat:
                    # Not a view, which nobody could change in place behind an autograd function.
                    found[place] = result.resize_(shape) if result.is_contiguous() else result.reshape(shape).clone()
        return found

    def record(self, ctx: Any, present: tuple[Tensor, ...]) -> Any:
        """The forward of the autograd function."""
        found = self._run(present)
        ctx.save_for_backward(*self._saved((*present, *found)))
        ctx.call = self
        if self._made.single:
            return found[0]
        ctx.set_materialize_grads(False)
        if self._constants:
            ctx.mark_non_differentiable(*found[self._outputs - self._constants : self._outputs])
        return tuple(found[: self._outputs])

    def differentiate(self, upstream: tuple[Tensor | None, ...], saved: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
        """Its backward."""
        if self._constants:
            upstream = upstream[: -self._constants]
        given = self._given((None, *upstream, *saved))
        if not torch.is_grad_enabled():
            found = self._backwards.run(given, ())
            if found is not None:
                return found
        return self._decide_backward(given)

    def _decide_backward(self, given: tuple[Any, ...]) -> Sequence[Tensor | None]:
        made = self._made
        flat = made.backward.tensors(*map(self._flattened, given))
        found = made.found_gradients(flat, self._stand_in, self.scalars, self._backend)
        of_inputs = (found,) if made.gradients is None else made.gradients(found, *self.scalars)
        gradients = [of_inputs[place] if place < len(of_inputs) else None for place in self._places]
        whole = made.complete is None or made.complete(flat, self._stand_in, *self.scalars) is flat
        tensors = [tensor for tensor in given if tensor is not None]
        # Several gradients at once have no address that could be compared.
        kept = whole and not torch.is_grad_enabled() and not dispatch.batched(*tensors)
        if kept and all(map(is_view, given, flat)):
            launch = made.backward.prepare(flat, *self.scalars, self._backend)
            results = [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]
            places = [next((at for at, r in enumerate(results) if r is each), None) for each in gradients]
            if launch is not None:
                self._backwards.keep_call(given, (), self._backward_like(launch, places))
        return [
            each if each is None or each.shape == shape else each.view(shape)
            for each, shape in zip(gradients, self._shapes)
        ]

    def _backward_like(self, launch: Launch, places: Sequence[int | None]) -> Run:
        """A function that runs backwards of tensors that lie alike. `places`: of the gradients among the results."""
        if not self._flat:
            pick = expander_at(places)
            return lambda present: pick((None, *launch(present)))
        shaped = list(zip(places, self._shapes))

        def run(present: Sequence[Tensor]) -> list[Tensor | None]:
            found = launch(present)
            return [None if place is None else found[place].view(shape) for place, shape in shaped]

        return run

    def _flattened(self, tensor: Tensor | None) -> Tensor | None:
        shape = None if tensor is None else self._flat.get(tensor.shape)
        return tensor if tensor is None or shape is None else tensor.reshape(shape)


def in_shape(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A view of a tensor in another shape."""
    return tensor.view(shape) if tensor.numel() == shape.numel() else tensor.expand(shape)


def is_view(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors with the same elements are one, or in the same memory."""
    return one is other or (one is not None and other is not None and one.data_ptr() == other.data_ptr())


class _Repeated(torch.autograd.Function):
    """A repeated call recorded for a backward."""

    @staticmethod
    def forward(ctx, call, *present):
        return call.record(ctx, present)

    @staticmethod
    def backward(ctx, *upstream):
        return None, *ctx.call.differentiate(upstream, ctx.saved_tensors)


_apply = dispatch.direct_apply(_Repeated)


def expander_at(places: Sequence[int | None]) -> Callable[[Any], tuple]:
    """A function that picks elements at some places of what follows a None, and that None for None."""
    return picker([0 if place is None else place + 1 for place in places])


def expander(there: Sequence[bool]) -> Callable[[Any], tuple]:
    """A function from (None, those elements that are there) to all, None for the others."""
    rest = itertools.count()
    return expander_at([next(rest) if each else None for each in there])
