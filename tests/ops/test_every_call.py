"""What PyTorch asks of every public function (tests/support/running/public_calls.py): the contract of operators, any
strides, derivatives to the second order, and `torch.func`."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile.testing import assert_same, size
from support.running.each_case import each_case
from support.running.public_calls import CALLS, ROWS, PublicCall, labels

# PyTorch's own forward mode still uses it, and has no batching rule for our operators.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

#: Other names of a call that is here.
_AGAIN = ("scaled_dot_product_attention", "flex_attention", "trace_score_mod", "batch_invariant_mode")
#: It takes one backward, and logits of a certain layout alone.
ONCE = PublicCall(lambda x: flashtile.cross_entropy(x * 1, labels(x), inplace_backward=True), ((-1, 7),))
NAMES = [
    name for name, call in CALLS.items() if call.shapes and not call.of_values and name.partition(":")[0] not in _AGAIN
]


def leaves_of(call: PublicCall, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [leaf.to(dtype).requires_grad_() for leaf in call.leaves(ROWS)]


def results_and_gradients(
    call: PublicCall, leaves: list[Tensor], layout: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and gradients of the leaves that have one, where inputs and upstream gradients lie in one way; and the
    tensors that were given."""
    inputs = [layout(leaf) for leaf in leaves]
    results = call.results(*inputs)
    recorded = [result for result in results if result.requires_grad]
    upstream = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in recorded]
    upstream = [layout(t) if t.dim() else t for t in upstream]
    gradients = torch.autograd.grad(recorded, leaves, upstream, allow_unused=True) if recorded else []
    return [*(t.detach() for t in results), *(t for t in gradients if t is not None)], [*inputs, *upstream]


# --- the contract of operators --------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """The arguments of the first call of each of our operators, as they were before it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "flashtile":
            self.calls.setdefault(function, pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), args))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*(name for name in NAMES if "fp8" not in name), ""])
def test_operators_keep_their_contract(name):
    """Schemas, fakes, and what the compiler makes of them; of the reference the shapes and strides of its results.

    The compiler is asked once for each function, for attention with all that has a gradient, and for a cache's new
    rows, which are written in place.
    """
    asked = ":" not in name or name.endswith(("all that learns", "append"))
    of_compiler = ("test_aot_dispatch_dynamic",) if asked else ()
    call = CALLS.get(name, ONCE)
    leaves = leaves_of(call)
    with Recorder() as seen:
        recorded = [result for result in call.results(*leaves) if result.requires_grad]
        if recorded:
            torch.autograd.grad(recorded, leaves, [torch.ones_like(t) for t in recorded], allow_unused=True)
    for function, arguments in seen.calls.items():
        contract = "test_schema", "test_autograd_registration", "test_faketensor", *of_compiler
        torch.library.opcheck(function, arguments, test_utils=contract)
        torch.library.opcheck(function, (*arguments[:-1], "reference"), test_utils=("test_schema", "test_faketensor"))


# --- where tensors lie ----------------------------------------------------------------------------------------------


def reversed_dimensions(t: Tensor) -> Tensor:
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed dimensions": reversed_dimensions,
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "slice of columns": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "offset": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
    "expanded batch": lambda t: t[:1].expand_as(t) if t.dim() == 4 else t,
}
#: Functions that write to their tensors or read them where they are, and so want columns side by side.
_IN_PLACE = ("attention_with_kv_cache", "merge_attention_")


@pytest.mark.parametrize("layout", LAYOUTS)
@each_case("name", NAMES)
def test_strides_do_not_matter(name, layout):
    if name.startswith(_IN_PLACE) and layout in ("reversed dimensions", "every second column"):
        return
    call, arranged = CALLS[name], LAYOUTS[layout]
    found, _ = results_and_gradients(call, leaves_of(call), arranged)
    expected, _ = results_and_gradients(call, leaves_of(call), lambda t: arranged(t).contiguous())
    assert_same(found, expected)


@each_case("name", NAMES)
def test_inputs_are_not_changed(name):
    """Nor are upstream gradients, in calls that do not write in place."""
    call, copies = CALLS[name], []

    def noted(t: Tensor) -> Tensor:
        copies.append(t.detach().clone())
        return t + 0

    _, given = results_and_gradients(call, leaves_of(call), noted)
    assert all(map(torch.equal, given, copies))


# --- derivatives ----------------------------------------------------------------------------------------------------

#: Functions whose numbers are no function of the leaves alone, or that are for one dtype.
_NO_NUMBERS = ("half", "score_mod", "fp8")
#: Functions without a derivative.
_CONSTANT = (
    "attention_with_kv_cache", "attention_part", "attention_backward", "attention_column_sums", "quantize_fp8",
    "merge_attention_", "linear_bias_wgrad",
)  # fmt: skip


def total(results: Sequence[Tensor]) -> Tensor:
    """A number that depends on each result in another way."""
    sums = [(t.sin() * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in results if t.requires_grad]
    return torch.stack(sums).sum()


def differentiable(call: PublicCall) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """A function of those float64 leaves that its results depend on, and these. Of rows that see nothing, it has 0 in
    the place of -inf."""
    leaves = leaves_of(call, torch.float64)

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        results = call.results(*given)
        return tuple(torch.where(t.isneginf(), 0, t) for t in results if t.is_floating_point())

    results = function(*leaves)
    gradients = torch.autograd.grad(total(results), leaves, allow_unused=True)
    used = [place for place, gradient in enumerate(gradients) if gradient is not None]

    def of_used(*given: Tensor) -> tuple[Tensor, ...]:
        chosen = dict(zip(used, given))
        return function(*(chosen.get(place, leaf.detach()) for place, leaf in enumerate(leaves)))

    return of_used, [leaves[place] for place in used]


DIFFERENTIABLE = [name for name in NAMES if not name.startswith(_CONSTANT) and not name.endswith(_NO_NUMBERS)]


@pytest.mark.parametrize("order", [1, 2], ids=["first", "second"])
@each_case("name", DIFFERENTIABLE)
def test_derivatives(name, order):
    function, leaves = differentiable(CALLS[name])
    assert (gradcheck if order == 1 else gradgradcheck)(function, leaves, fast_mode=True)


@each_case("name", DIFFERENTIABLE)
def test_gradients_of_one_input_alone(name):
    function, leaves = differentiable(CALLS[name])
    together = torch.autograd.grad(total(function(*leaves)), leaves)
    for place, leaf in enumerate(leaves):
        given = [each if each is leaf else each.detach() for each in leaves]
        (alone,) = torch.autograd.grad(total(function(*given)), leaf)
        assert_same(alone, together[place])


@each_case("name", DIFFERENTIABLE)
def test_forward_and_reverse_mode_are_adjoint(name):
    function, leaves = differentiable(CALLS[name])
    leaves = [leaf.detach() for leaf in leaves]
    tangents = [leaf.cos() for leaf in leaves]
    results, moved = torch.func.jvp(function, tuple(leaves), tuple(tangents))
    _, pullback = torch.func.vjp(function, *leaves)
    upstream = tuple(result.sin() for result in results)
    forwards, backwards = (
        torch.cat([(one * other).flatten() for one, other in zip(ones, others, strict=True)])
        for ones, others in ((moved, upstream), (pullback(upstream), tangents))
    )
    # To the precision of float32: each term has the rounding errors of its own way.
    assert_same(forwards.sum().float(), backwards.sum().float(), cancelled=size(forwards.float()))


#: Calls of attention with what no batching rule is for; the others have one.
_UNMAPPED = (
    "dropout", "bias", "mask", "slopes", "slopes of batch", "sinks", "all that learns", "block_mask", "score_mod",
    "fp8",
)  # fmt: skip


@each_case("name", [name for name in NAMES if "varlen" not in name and not name.startswith(_CONSTANT)])
def test_vmap_equals_a_loop(name):
    call = CALLS[name]
    stacked = [torch.stack((leaf, -leaf.flip(0))) for leaf in call.leaves(ROWS)]
    if name.partition(": ")[2] in _UNMAPPED and name.startswith("attention"):
        with pytest.raises(NotImplementedError, match=r"under torch\.func"):
            torch.func.vmap(lambda *leaves: tuple(call.results(*leaves)))(*stacked)
        return
    found = torch.func.vmap(lambda *leaves: tuple(call.results(*leaves)), randomness="same")(*stacked)
    alone = [call.results(*leaves) for leaves in zip(*stacked)]
    assert_same(list(found), [torch.stack(each) for each in zip(*alone)])
