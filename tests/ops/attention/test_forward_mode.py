"""Forward-mode derivatives: against those that PyTorch makes of the eager reference in float64, alone and beneath other
transforms."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import flashtile
from flashtile.ops.attention import derivatives, reference
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, Wanted
from flashtile.testing import AttentionCase, Inputs, assert_close, assert_same, make_inputs
from support.attention.attention_cases import COMBINED, EDGES, PAIRS, parameters
from support.attention.memory import LargestTensor

LEARNED = ("bias", "alibi_slopes", "sinks")

# PyTorch's own forward mode still uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture
def few_rows(monkeypatch):
    """So few rows at a time that short sequences have many parts."""
    monkeypatch.setattr(derivatives, "_SCORES_AT_ONCE", 0)
    monkeypatch.setattr(derivatives, "_FEWEST_ROWS", 16)


def leaves_of(case: AttentionCase, inputs: Inputs, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All that learns in a call, and a direction for each."""
    leaves = {name: getattr(inputs, name) for name in "qkv"}
    leaves |= {name: inputs.tensors[name] for name in LEARNED if name in inputs.tensors}
    generator = torch.Generator().manual_seed(5)
    directions = {
        name: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for name, t in leaves.items()
    }
    wide = dtype is torch.float64
    return tuple({name: t.double() if wide else t for name, t in given.items()} for given in (leaves, directions))


def tangents(case: AttentionCase, inputs: Inputs, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tangents of out and lse. Those of "reference" are made by PyTorch, not by the formula."""
    leaves, directions = leaves_of(case, inputs, dtype or case.dtype)
    rest = {name: t for name, t in inputs.tensors.items() if name not in leaves}
    function = flashtile.attention_varlen if case.packed else flashtile.attention

    def call(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return function(**leaves, **rest, **case.keywords(), return_lse=True, backend=backend)

    if backend == "reference":
        # The operator would use the formula: its inputs are caught, and the function behind it is differentiated.
        seen: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flashtile.ops.attention.repeated.call_key", lambda *_, **options: None)
            patch.setattr("flashtile.ops.attention.api.run_attention", lambda *given: (seen.append(given), (0, 0))[1])
            call(leaves)
        *_, side, spec, _ = seen[0]
        shaped = {name: getattr(side, name) for name in leaves if name in LEARNED}
        moved = {**directions, **{name: directions[name].view(t.shape) for name, t in shaped.items()}}

        def eager(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            wanted = Wanted(*(name in shaped for name in LEARNED))
            learned = reference.with_learned(side, wanted, [given[name] for name in LEARNED if name in shaped])
            return reference.forward(given["q"], given["k"], given["v"], learned, spec)

        _, (dout, dlse) = torch.func.jvp(eager, ({**leaves, **shaped},), (moved,))
    else:
        _, (dout, dlse) = torch.func.jvp(call, (leaves,), (directions,))
    return {"dout": dout, "dlse": dlse}


def check(case: AttentionCase, backend: str = "cpu", device: str = "cpu") -> None:
    inputs = make_inputs(case, device)
    oracle, eager = tangents(case, inputs, "reference", torch.float64), tangents(case, inputs, "reference")
    for name, value in tangents(case, inputs, backend).items():
        assert_close(f"{case}: {name}", value, oracle[name], eager[name])


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("case", parameters(COMBINED | EDGES))
def test_agrees_with_the_oracle(case):
    check(case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["plain", "everything", "packed+band causal", "softcap+sinks"])
def test_other_dtypes(name, dtype):
    check(replace(PAIRS[name], dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["plain", "everything", "packed+band causal", "softcap+sinks"])
def test_on_a_gpu(name, dtype):
    check(replace(PAIRS[name], dtype=dtype, head_dim=64, head_dim_v=64), "auto", "cuda")


CHECKED = {
    "plain": PAIRS["plain"],
    "softcap_sinks": PAIRS["softcap+sinks"],
    "causal_bias_dropout": replace(PAIRS["band causal+dropout"], bias="1hqk"),
    "alibi_lengths": replace(PAIRS["key_lengths+alibi"], key_lengths=(3, 0)),
    "packed_window": replace(PAIRS["packed+band window"], lengths_q=(2, 0, 3), lengths_k=(3, 2, 1)),
}


def problem(name: str) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
    """A small float64 call as a function of all that learns, and its inputs."""
    sizes = {"seq_q": 4, "seq_k": 3, "heads": 2, "heads_kv": 1, "head_dim": 3, "head_dim_v": 2}
    case = replace(CHECKED[name], **sizes, dtype=torch.float64)
    inputs = make_inputs(case)
    leaves, _ = leaves_of(case, inputs, torch.float64)
    leaves = {key: t.masked_fill(t.isinf(), -1).clone().requires_grad_() for key, t in leaves.items()}
    rest = {key: t for key, t in inputs.tensors.items() if key not in leaves}
    function = flashtile.attention_varlen if case.packed else flashtile.attention

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = function(**dict(zip(leaves, given)), **rest, **case.keywords(), return_lse=True, backend="cpu")
        return out, lse.masked_fill(lse.isinf(), 0)  # finite differences of -inf are NaN

    return call, list(leaves.values())


@pytest.mark.parametrize("name", CHECKED)
def test_both_modes_over_reverse(name):
    assert gradgradcheck(*problem(name), check_fwd_over_rev=True, check_undefined_grad=False, fast_mode=True)


def loss(q: Tensor, **options: Any) -> Tensor:
    out, lse = flashtile.attention(q, 0.5 * q, 2 * q, causal=True, return_lse=True, **options)
    return out.sin().sum() + lse.cos().sum()


def example() -> Tensor:
    return torch.randn(1, 4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "window": (2, 1)}], ids=["plain", "softcap"])
def test_jacobians_and_hessians(options, backend):
    q = example()
    attend = lambda q: flashtile.attention(q, q, q, backend=backend, **options)  # noqa: E731
    assert_same(torch.func.jacfwd(attend)(q), torch.func.jacrev(attend)(q))
    of_loss = lambda q: loss(q, backend=backend, softcap=options.get("softcap"))  # noqa: E731
    expected = torch.func.jacrev(torch.func.jacrev(of_loss))(q)
    assert_same(torch.func.hessian(of_loss)(q), expected)
    assert_same(torch.func.jacrev(torch.func.jacfwd(of_loss))(q), expected)


def test_jacobian_with_everything_beside_q():
    # Reverse mode cannot: it maps the backward, and vmap is refused with these.
    sinks, seed = torch.randn(2, dtype=torch.float64), torch.tensor([3, 4])
    options = {"sinks": sinks, "mask": torch.ones(4, 4).tril() > 0, "dropout_p": 0.3, "dropout_seed": seed}
    attend = lambda q: flashtile.attention(q, q, q, **options)  # noqa: E731
    q = example()
    assert_same(torch.func.jacfwd(attend)(q), torch.autograd.functional.jacobian(attend, q))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sinks"])
def test_several_tangents_at_once(name):
    """As `torch.autograd.functional.jacobian` maps over them, which knows fewer operations than `torch.func`."""
    k, v = torch.randn(2, 1, 6, 2, 3, dtype=torch.float64)
    tensors = {"q": torch.randn(1, 5, 4, 3, dtype=torch.float64), "k": k, "v": v}
    tensors |= {"bias": torch.randn(1, 1, 5, 6, dtype=torch.float64)}
    tensors |= {learned: torch.rand(4, dtype=torch.float64) for learned in ("alibi_slopes", "sinks")}

    def call(moved: Tensor) -> Tensor:
        return flashtile.attention(**{**tensors, name: moved}, causal=True, softcap=2.0)

    forwards = torch.autograd.functional.jacobian(call, tensors[name], vectorize=True, strategy="forward-mode")
    assert_same(forwards, torch.autograd.functional.jacobian(call, tensors[name]))


@pytest.mark.usefixtures("few_rows")
def test_rows_whose_window_lies_behind_the_last_key():
    q, k = torch.randn(1, 200, 1, 4), torch.randn(1, 2, 1, 4)
    _, tangent = torch.func.jvp(
        lambda q: flashtile.attention(q, k, k, window=(3, 0), align="top_left"), (q,), (torch.ones_like(q),)
    )
    assert not tangent[:, 5:].any() and tangent.isfinite().all()


def test_dual_tensors_through_a_backward():
    # Without create_graph, so nothing else would ask for a backward that can be differentiated.
    q, direction = example().requires_grad_(), example().cos()
    with forward_ad.dual_level():
        (grad,) = torch.autograd.grad(loss(forward_ad.make_dual(q, direction)), q)
        tangent = forward_ad.unpack_dual(grad).tangent
    hessian = torch.func.jacrev(torch.func.jacrev(loss))(q.detach())
    assert_same(tangent, torch.einsum("abcdefgh,efgh->abcd", hessian, direction))


def test_forward_mode_in_forward_mode_is_refused_instead_of_a_zero_tangent():
    with pytest.raises(NotImplementedError, match="use reverse mode for one of the two"):
        torch.func.jacfwd(torch.func.jacfwd(loss))(example())
    with pytest.raises(NotImplementedError, match="use reverse mode for one of the two"):
        torch.func.jacfwd(torch.func.jacfwd(torch.func.grad(loss)))(example())


def test_part_of_a_larger_call():
    q, k, slopes = torch.randn(2, 3, 2, 4), torch.randn(2, 5, 2, 4), torch.rand(2)
    part = flashtile.AttentionPart(row=4, column=3, seq_q=9, seq_k=11, head=1, heads=4, sequence=2)
    options = {"window": (4, 1), "dropout_p": 0.4, "dropout_seed": torch.tensor([5, 6])}

    def call(q: Tensor, k: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flashtile.attention_part(q, k, k, part, alibi_slopes=slopes, **options)
        return out, lse.masked_fill(lse.isinf(), 0)

    given = [t.double().requires_grad_() for t in (q, k, slopes)]
    assert gradcheck(call, given, check_forward_ad=True, fast_mode=True)


def test_padded_keys_may_be_nan():
    q, k = torch.randn(2, 3, 2, 8), torch.randn(2, 5, 2, 8)
    k[1, 2:] = float("nan")
    call = lambda q, k: flashtile.attention(q, k, k, key_lengths=torch.tensor([5, 2]), return_lse=True)  # noqa: E731
    _, moved = torch.func.jvp(call, (q, k), (q.cos(), k))
    assert all(tangent.isfinite().all() for tangent in moved)


def test_autocast_does_not_reach_the_arithmetic_inside():
    q, k = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)

    def call(q: Tensor, k: Tensor) -> Tensor:
        return flashtile.attention(q, k, k)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, narrow = torch.func.jvp(call, (q, k), (q.cos(), k.sin()))
    given = tuple(t.bfloat16() for t in (q, k)), tuple(t.bfloat16() for t in (q.cos(), k.sin()))
    assert torch.equal(narrow, torch.func.jvp(call, *given)[1])


def test_nothing_as_large_as_the_scores_is_made(monkeypatch):
    monkeypatch.setattr(derivatives, "_SCORES_AT_ONCE", 2**16)
    q, spec = torch.randn(1, 2048, 2, 8), AttentionSpec(0.3, window_right=0)
    moving = derivatives.Tangents(q, q, q, SideInputs())
    with LargestTensor() as seen:
        derivatives.forward_derivative(q, q, q, SideInputs(None, None, 2048, 2048), spec, moving)
    assert 0 < seen.elements <= 64 * 2 * 2048 < 2048 * 2048 / 10


def test_the_value_is_that_of_the_backend(monkeypatch):
    q = torch.randn(2, 9, 2, 8)
    value, _ = torch.func.jvp(lambda q: flashtile.attention(q, q, q, backend="cpu"), (q,), (q,))
    assert torch.equal(value, flashtile.attention(q, q, q, backend="cpu"))
