"""Operators of PyTorch, made from what a call is: NamedTuples of tensors and of scalars.

An operation writes its formulas: for each backend `forward(tensors, spec)` and `backward(tensors, spec)`, and what they
return, without contents. `operator` makes the rest that PyTorch asks for: schema, fake, implementations for CPU and
CUDA, the short way past the dispatcher, FLOPs, and the entry in `flashtile.decompositions`. `Differentiable` joins a
forward and a backward operator under an `autograd.Function`, with `torch.func` transforms and derivatives of the
backward through the reference. docs/adding_an_operation.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from flashtile.ops.common import dispatch
from flashtile.ops.common.checks import may_be_readable
from flashtile.ops.common.flops import register_flops
from flashtile.ops.common.repeated import Launch, RepeatedCall, call_table, expander, in_shape, is_view
from flashtile.ops.common.rows import contiguous
from flashtile.ops.common.watch import watching

#: The type of a NamedTuple's field in a schema. Sizes may be symbolic.
_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    int | None: "int?",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
}

_LIBRARY = torch.library.Library("flashtile", "FRAGMENT")


class Operator(NamedTuple):
    """An operator `flashtile::<name>`.

    Attributes:
        call: calls it with `(tensors, *scalars, backend)`.
        tensors: NamedTuple of its tensors.
        scalars: NamedTuples of its scalars.
        results: `Tensor`; a NamedTuple of tensors, some of them None; or None: what it writes to is returned.
        present: of `(tensors, *scalars)`, which fields of `results` there are; None = all.
        prepare: of `(tensors, *scalars, backend)`, a function that runs it for tensors that lie like these; None where
            each call is decided about.
        overload: PyTorch's object for it.
        decomposition: of `(tensors, *scalars)`, the same in PyTorch's operations.
    """

    call: Callable[..., Any]
    tensors: type
    scalars: tuple[type, ...]
    results: type | None
    present: Callable[..., Sequence[bool]] | None
    prepare: Callable[..., Launch | None]
    overload: torch._ops.OpOverload
    decomposition: Callable[..., Any] | None

    def nested(self, flat: Sequence[Any]) -> list[Any]:
        """The NamedTuples of tensors and scalars, from the flat arguments of the operator."""
        return _nested((self.tensors, *self.scalars), flat)

    def unpacked(self, flat: Sequence[Tensor], *arguments: Any) -> Any:
        """The NamedTuple of results, from the tensors that are present, or the first of them."""
        assert self.results is not None
        rest, fields = iter(flat), self.results._fields  # type: ignore[attr-defined]
        present = [True] * len(fields) if self.present is None else self.present(*arguments)
        return self.results(*[next(rest, None) if there else None for there in present])


#: All operators that were made here, by name.
OPERATORS: dict[str, Operator] = {}


def operator(
    name: str,
    tensors: type,
    scalars: tuple[type, ...],
    results: type | None,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    present: Callable[..., Sequence[bool]] | None = None,
    writes: str = "",
    decomposition: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Operator:
    """Defines the operator `flashtile::<name>`. Its schema has the fields of the NamedTuples, and `backend`.

    Args:
        name: of the operator.
        tensors: NamedTuple of its tensors; the first is never None, and all lie on one device.
        scalars: NamedTuples of bool, int, float, str and torch.dtype.
        results: see `Operator`.
        run: computes it, from `(tensors, *scalars, backend)`. Autograd records nothing of it.
        fake: of `(tensors, *scalars)`, empty tensors like the results; None: there are no results.
        present: see `Operator`; `fake` may make tensors that are not present.
        writes: the tensors that it writes to, with spaces between. If results is None, the first is returned.
        decomposition: see `Operator`.
        flops: of `(tensors, *scalars)`, the number of floating-point operations of its matrix products.
    """
    kinds, written = (tensors, *scalars), writes.split()
    # A list where it depends on the call which results there are.
    returned = "()" if results is None else "Tensor" if results is Tensor else "Tensor[]"
    if returned == "Tensor[]" and present is None:
        returned = ", ".join(f"Tensor {field}" for field in results._fields)  # type: ignore[union-attr]
        returned = f"({returned})"
    _LIBRARY.define(f"{name}({', '.join(_fields(kinds, written))}, str backend) -> {returned}")
    overload = getattr(torch.ops.flashtile, name).default
    prepare: Callable[..., Launch | None] = getattr(run, "prepare", _decide) if results else _decide
    launches = call_table()

    def call(given: Any, *rest: Any) -> Any:
        found = launches.run(given, rest)
        if found is None:
            if not dispatch.unobserved(*given):
                return observed(given, *rest)
            launch = prepare(given, *rest)
            if launch is None:
                found = run(given, *rest)
                return getattr(given, written[0]) if results is None else found
            launches.keep_call(given, rest, launch)
            found = launch([tensor for tensor in given if tensor is not None])
        return found[0] if results is Tensor else made.unpacked(found, given, *rest[:-1])

    def observed(given: Any, *rest: Any) -> Any:
        flat = overload(*given, *[each for group in rest[:-1] for each in group], rest[-1])
        if results is Tensor:
            return flat
        return getattr(given, written[0]) if results is None else made.unpacked(flat, given, *rest[:-1])

    def implementation(*flat: Any) -> Any:
        with torch.no_grad():
            found = run(*_nested(kinds, flat), flat[-1])
        return None if results is None else packed(found, present is None)

    def traced(*flat: Any) -> Any:
        if fake is None:
            return None
        arguments = _nested(kinds, flat)
        found = fake(*arguments)
        there = None if present is None else present(*arguments)
        found = found if there is None else [t for t, wanted in zip(found, there, strict=True) if wanted]
        return packed(found, present is None)

    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, device)
    # Autograd is recorded above the operators, and never inside.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    dispatch.register_fake(f"flashtile::{name}", traced, _LIBRARY)
    if flops is not None:
        register_flops(name, lambda *flat, **_: flops(*_nested(kinds, flat)))
    made = OPERATORS[name] = Operator(
        call, tensors, scalars, results, present=present, prepare=prepare, overload=overload,
        decomposition=decomposition,
    )  # fmt: skip
    return made


def _decide(*call: Any) -> None:
    """`Operator.prepare` where each call is decided about."""


class OnBackend:
    """`run` of an operator that a function `(tensors, *scalars)` of each backend computes.

    One that `pipeline.launched` made has the `Pipeline` that launches the kernels for tensors that lie like these.
    """

    def __init__(
        self,
        backends: Any,
        function: str,
        *,
        dtype: Callable[..., torch.dtype] | None = None,
        arrange: Callable[[Any], Any] = contiguous,
        check: Callable[..., None] | None = None,
        checked: Callable[[Any], Sequence[Tensor | None]] | None = None,
        written: str = "",
    ) -> None:
        """
        Args:
            backends: those of the operation.
            function: its name.
            dtype: of `(tensors, *scalars)`, by which the backend is chosen; without it, that of the first tensor.
            arrange: the tensors as the backends take them.
            check: of `(tensors, *scalars)`, checks values.
            checked: the tensors whose values `check` reads, where it may.
            written: the tensor in whose memory the function leaves its result. It is called with `inplace=True`.
        """
        self._backends, self._function, self._dtype = backends, function, dtype
        self._arrange, self._check, self._checked, self._written = arrange, check, checked, written

    def __call__(self, given: Any, *rest: Any) -> Any:
        if self._check is not None:
            self._check(given, *rest[:-1])
        function, arranged = getattr(self.module(given, *rest), self._function), self._arrange(given)
        if not self._written:
            return function(arranged, *rest[:-1])
        function(arranged, *rest[:-1], True)
        written, found = (getattr(tensors, self._written) for tensors in (given, arranged))
        if not written.is_inference():
            # Kernels write past PyTorch's back: an earlier operation that keeps the tensor for its gradient must learn
            # of it.
            torch.autograd.graph.increment_version(written)
        if found is not written:  # a copy, because of its strides
            written.copy_(found)
        return None

    def prepare(self, given: Any, *rest: Any) -> Launch | None:
        """See `Operator.prepare`."""
        tensors = () if self._checked is None else self._checked(given)
        if watching() or any(tensor is not None and may_be_readable(tensor) for tensor in tensors):
            return None
        if self._arrange(given) is not given:
            return None
        function, kind, scalars = getattr(self.module(given, *rest), self._function), type(given), rest[:-1]
        pipeline = getattr(function, "pipeline", None)
        if pipeline is not None:
            return pipeline(given, *scalars).on
        expand = expander([tensor is not None for tensor in given])
        shapes = [tensor.shape for tensor in given if tensor is not None]

        def launch(tensors: Sequence[Tensor]) -> list[Tensor]:
            flat = [t if t.shape == shape else in_shape(t, shape) for t, shape in zip(tensors, shapes)]
            found = function(kind(*expand((None, *flat))), *scalars)
            return [found] if isinstance(found, Tensor) else packed(found)

        return launch

    def module(self, given: Any, *rest: Any) -> Any:
        """The backend's module that serves a call."""
        dtype = given[0].dtype if self._dtype is None else self._dtype(given, *rest[:-1])
        return self._backends.implementation(rest[-1], given[0].device, dtype)


class Differentiable:
    """A function `(inputs, spec, backend)` that calls a forward operator, and whose derivative is a backward operator.

    The reference computes, in PyTorch's operations, what those cannot: calls under `torch.func` transforms or in
    forward mode, the derivative of the backward, and gradients that come several at a time.
    """

    def __init__(
        self,
        forward: Operator,
        backward: Operator,
        reference: Any,
        save: Callable[..., tuple[Sequence[Tensor | None], tuple[Any, ...]]],
        *,
        outputs: int = 1,
        constants: int = 0,
        before: Callable[[Any], None] | None = None,
        complete: Callable[..., Any] | None = None,
        gradients: Callable[..., Sequence[Tensor | None]] | None = None,
    ) -> None:
        """
        Args:
            forward: with one NamedTuple of scalars, the spec.
            backward: its tensors are the gradients of the outputs, and after these what is saved.
            reference: module with `forward(inputs, spec)` and `backward(tensors, *scalars)`, both differentiable.
            save: of `(inputs, results, spec, ctx)`, the tensors that the backward reads, and its scalars. A saved
                tensor is an input or an output, or the reference makes it anew.
            outputs: how many of the results, the first ones, are differentiable.
            constants: how many after these are returned too, without a derivative; the function returns None for
                others.
            before: of ctx, is called before a backward reads what was saved.
            complete: of the backward's `(tensors, ctx, *scalars)`, the same with zeros for gradients that are None and
                must not be.
            gradients: of `(what the backward found, *scalars)`, the gradients of the first inputs; others have none.
                Without it, what the backward found is the gradient of the first.
        """
        self.forward, self.backward, self.save, self._reference = forward, backward, save, reference
        self.outputs, self.constants = outputs, constants
        self.complete, self.gradients, self._before = complete, gradients, before
        #: The forward has one result, a tensor.
        self.single = forward.results is Tensor
        name = "".join(word.capitalize() for word in forward.overload._opname.split("_")[:-1])
        self._apply = dispatch.direct_apply(_function(name, self._record, self._differentiate))
        self._recorded_again = _function(name, self._record_again, self._differentiate_again)

    def __call__(self, inputs: Any, spec: Any, backend: str) -> Any:
        if dispatch.transformed():
            dispatch.refuse_named_backend(backend)
            return self._reference.forward(inputs, spec)
        if not dispatch.recorded(inputs):
            return self.forward.call(inputs, spec, backend)
        if torch.compiler.is_compiling():
            flat = self._apply(*dispatch.distinct(inputs), *spec, backend)
        else:
            flat = self._apply(*inputs, inputs, spec, backend)
        return flat if self.single else self.forward.unpacked(flat, inputs, spec)

    def repeat(self, tensors: Sequence[Tensor | None], inputs: Any, spec: Any, backend: str) -> RepeatedCall | None:
        """What runs calls like this one; None where each is decided about. `inputs`: the tensors of the call, or views
        of them with fewer dimensions."""
        if not (dispatch.undisturbed() and all(map(is_view, inputs, tensors))):
            return None
        launch = self.forward.prepare(inputs, spec, backend)
        return None if launch is None else RepeatedCall(self, tensors, inputs, spec, backend, launch)

    def found_gradients(self, given: Any, ctx: Any, scalars: tuple[Any, ...], backend: str) -> Any:
        """The results of the backward, from its tensors and scalars."""
        if self.complete is not None:
            given = self.complete(given, ctx, *scalars)
        if dispatch.batched(*given[: self.outputs]):
            return self._reference.backward(given, *scalars)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            flat = self._recorded_again.apply(*given, given, scalars, backend)
            return flat if self.backward.results is Tensor else self.backward.unpacked(flat, given, *scalars)
        return self.backward.call(given, *scalars, backend)

    def _record(self, ctx: Any, *flat: Any) -> Any:
        inputs, spec, backend = flat[-3:]
        (spec_type,) = self.forward.scalars
        if type(spec) is not spec_type:
            tensors = len(self.forward.tensors._fields)  # type: ignore[attr-defined]
            inputs, spec = self.forward.tensors(*flat[:tensors]), spec_type(*flat[tensors:-1])
        found = self.forward.call(inputs, spec, backend)
        saved, scalars = self.save(inputs, found, spec, ctx)
        ctx.save_for_backward(*saved)
        ctx.call = scalars, backend, (None,) * (len(flat) - 1)
        if self.single:
            return found
        ctx.set_materialize_grads(False)
        outputs, returned = self.outputs, self.outputs + self.constants
        ctx.present = [t is not None for t in found[:outputs]]
        ctx.mark_non_differentiable(*(t for t in found[outputs:returned] if t is not None))
        return tuple(t for t in found[:returned] if t is not None)

    def _differentiate(self, ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if self._before is not None:
            self._before(ctx)
        scalars, backend, nothing = ctx.call
        if not self.single:
            rest = iter(upstream)
            upstream = tuple(next(rest) if there else None for there in ctx.present)
        given = self.backward.tensors(*upstream, *ctx.saved_tensors)
        found = self.found_gradients(given, ctx, scalars, backend)
        of_inputs = (found,) if self.gradients is None else self.gradients(found, *scalars)
        return *of_inputs, *nothing[len(of_inputs) - 1 :]

    def _record_again(self, ctx: Any, *flat: Any) -> Any:
        given, scalars, backend = flat[-3:]
        ctx.save_for_backward(*given)
        ctx.scalars = scalars
        return _flat(self.backward.call(given, *scalars, backend))

    def _differentiate_again(self, ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved, scalars = ctx.saved_tensors, ctx.scalars
        places = [place for place in range(len(saved)) if ctx.needs_input_grad[place]]

        def first_order(*varied: Tensor) -> Any:
            tensors = dict(zip(places, varied, strict=True))
            given = self.backward.tensors(*[tensors.get(place, tensor) for place, tensor in enumerate(saved)])
            return _flat(self._reference.backward(given, *scalars))

        pullback: Any = torch.func.vjp(first_order, *[saved[place] for place in places])[1]
        found = dict(zip(places, pullback(upstream[0] if self.backward.results is Tensor else upstream)))
        return *(found.get(place) for place in range(len(saved))), None, None, None


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """An `autograd.Function`."""
    # torch.compile takes bound methods for class methods.
    members = {
        "forward": staticmethod(lambda ctx, *flat: forward(ctx, *flat)),
        "backward": staticmethod(lambda ctx, *upstream: backward(ctx, *upstream)),
    }
    return type(name, (torch.autograd.Function,), members)


def _fields(kinds: Sequence[type], written: Sequence[str]) -> list[str]:
    """The arguments of a schema."""
    hints = [each for kind in kinds for each in get_type_hints(kind).items()]
    letters = dict(zip(written, "abcd"))
    types = {name: _SCHEMA_TYPES[hint] for name, hint in hints}
    marked = {name: types[name].replace("Tensor", f"Tensor({letter}!)") for name, letter in letters.items()}
    return [f"{each} {name}" for name, each in (types | marked).items()]


def _nested(kinds: Sequence[type], flat: Sequence[Any]) -> list[Any]:
    found, first = [], 0
    for kind in kinds:
        last = first + len(kind._fields)  # type: ignore[attr-defined]
        found.append(kind(*flat[first:last]))
        first = last
    return found


def packed(found: Any, all_there: bool = False) -> Any:
    """The return value of an operator: a tensor, a list of those that there are, or the tuple of all."""
    return found if isinstance(found, Tensor) else tuple(found) if all_there else [t for t in found if t is not None]


def _flat(found: Any) -> Any:
    """The return value of an `autograd.Function`."""
    return found if isinstance(found, Tensor) else tuple(t for t in found if t is not None)
