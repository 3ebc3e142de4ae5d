"""Inputs of float8_e4m3fn: what they stand for, on every backend, and what they do not have."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import flashtile
from flashtile._backends import clear_plans, devices
from flashtile.ops.attention import reference
from flashtile.ops.attention.hopper import configs
from flashtile.testing import assert_close, assert_same
from support.running.covering import covering_choices, turns
from support.running.places import places

FP8 = torch.float8_e4m3fn
#: Whether the tensor cores of this machine's GPU multiply 8-bit numbers.
_HAS_PRODUCTS = torch.cuda.is_available() and devices.device_facts(torch.device("cuda", 0)).has_fp8_products


@dataclass(frozen=True)
class Case:
    """A call with 8-bit inputs, dense or packed; `sinks`, `alibi_slopes`: with random ones; `block_mask`: with a random
    one of such tiles, of which some are full and some empty."""

    seq_q: int = 33
    seq_k: int = 45
    head_dim: int = 32
    head_dim_v: int = 32
    heads: int = 4
    heads_kv: int = 2
    batch: int = 2
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    sinks: bool = False
    alibi_slopes: bool = False
    block_mask: tuple[int, int] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


class Problem:
    """Its tensors, and what they stand for."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.case = case
        self.function: Any = flashtile.attention
        self.arguments = dict(case.arguments)
        rows_q, rows_k = (case.batch, case.seq_q), (case.batch, case.seq_k)
        if case.lengths is not None:
            self.function = flashtile.attention_varlen
            cumulative = [torch.tensor([0, *accumulate(of)], dtype=torch.int32) for of in case.lengths]
            self.arguments |= {"cu_seqlens_q": cumulative[0].to(device), "cu_seqlens_k": cumulative[1].to(device)}
            # Behind the last sequence lies what belongs to none.
            rows_q, rows_k = (sum(case.lengths[0]) + 3,), (sum(case.lengths[1]) + 2,)
        q, k = normal(*rows_q, case.heads, case.head_dim), normal(*rows_k, case.heads_kv, case.head_dim)
        v = normal(*rows_k, case.heads_kv, case.head_dim_v)
        rounded = [flashtile.quantize_fp8(x, case.heads_kv) for x in (q, k, v)]
        self.qkv = [x for x, _ in rounded]
        sequences = case.batch if case.lengths is None else len(case.lengths[0])
        # Each sequence and head has a factor of its own.
        self.descales = [descale * (0.5 + normal(sequences, 1).abs()) for _, descale in rounded]
        if case.sinks:
            self.arguments["sinks"] = normal(case.heads)
        if case.alibi_slopes:
            self.arguments["alibi_slopes"] = normal(sequences, case.heads).abs() / 8
        if case.block_mask is not None:
            mask = _random_mask(case.seq_q, case.seq_k, *case.block_mask, generator).to(device)
            self.arguments["block_mask"] = flashtile.BlockMask.from_dense(mask, case.block_mask)

    def run(self, backend: str = "auto", **changes: Any) -> tuple[Tensor, Tensor]:
        names = ("descale_q", "descale_k", "descale_v")
        arguments = {**self.arguments, **dict(zip(names, self.descales)), "return_lse": True, **changes}
        return self.function(*self.qkv, **arguments, backend=backend)

    def numbers(self, dtype: torch.dtype) -> list[Tensor]:
        """What q, k and v stand for."""
        return [self._dequantized(*pair).to(dtype) for pair in zip(self.qkv, self.descales, "qkk")]

    def _dequantized(self, x: Tensor, descale: Tensor, of: str) -> Tensor:
        descale = descale.double().repeat_interleave(x.shape[-2] // descale.shape[-1], -1)
        if self.case.lengths is None:
            return x.double() * descale[:, None, :, None]
        numbers = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for sequence, (begin, end) in enumerate(pairwise(self.arguments[f"cu_seqlens_{of}"].tolist())):
            numbers[begin:end] = x[begin:end].double() * descale[sequence, :, None]
        return numbers

    def computed(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same by the reference, on numbers of another dtype."""
        wide = {
            name: value.to(dtype if dtype is torch.float64 else torch.float32)
            for name, value in self.arguments.items()
            if name in ("sinks", "alibi_slopes")
        }
        arguments = {**self.arguments, **wide, "return_lse": True}
        return self.function(*self.numbers(dtype), **arguments, backend="reference")

    def eager(self) -> tuple[Tensor, Tensor]:
        """By the reference on scores that the tensor cores added up from 8-bit products, as PyTorch has them do."""
        original = reference.products
        factors = iter(self._score_factors())

        def products(rows: Tensor, keys: Tensor, part: reference.Part) -> Tensor:
            return next(factors) * original(_product(rows, keys), torch.eye(keys.shape[-2], device=keys.device), part)

        q, k = (x.float() for x in self.qkv[:2])
        arguments = {**self.arguments, "return_lse": True, "backend": "reference"}
        with mock.patch.object(reference, "products", products):
            return self.function(q, k, self.numbers(torch.float32)[2], **arguments)

    def _score_factors(self) -> list[Tensor]:
        """The factors `[batch, heads, 1, 1]` of each call that the reference makes; in a packed call, those of the
        sequences and of the rows behind them."""
        of_q, of_k = (x.repeat_interleave(self.case.heads // x.shape[-1], -1) for x in self.descales[:2])
        factors = (of_q * of_k)[..., None, None]
        return [factors] if self.case.lengths is None else [*factors.split(1), torch.ones((), device=factors.device)]


def _random_mask(rows: int, keys: int, tile_q: int, tile_k: int, generator: torch.Generator) -> Tensor:
    """Another part of each tile is visible: a third of the tiles are full, a third are empty."""
    part = 3 * torch.rand(-(-rows // tile_q), -(-keys // tile_k), generator=generator) - 1
    part = part.repeat_interleave(tile_q, 0)[:rows].repeat_interleave(tile_k, 1)[:, :keys]
    return torch.rand(rows, keys, generator=generator) < part


def _product(q: Tensor, k: Tensor) -> Tensor:
    """`q kᵀ` of 8-bit numbers in float32, `[B, H, Sq, Sk]`, by the tensor cores."""
    rows, keys = q.shape[-2], k.shape[-2]
    padded = [pad(x, (0, -x.shape[-1] % 16, 0, -x.shape[-2] % 16)).to(FP8) for x in (q, k)]
    one = torch.ones((), device=q.device)
    product = torch.zeros(*q.shape[:2], rows, keys, device=q.device)
    for batch in range(q.shape[0] if rows and keys else 0):
        for head in range(q.shape[1]):
            left, right = padded[0][batch, head].contiguous(), padded[1][batch, head].contiguous()
            of_this = torch._scaled_mm(
                left, right.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True
            )
            product[batch, head] = of_this[:rows, :keys]
    return product


def check(case: Case, backend: str, device: str = "cpu", multiplies_8_bits: bool = False) -> None:
    """Asserts that a backend is right, also of rows that see nothing. `multiplies_8_bits`: scores are products of such
    numbers, which the tensor cores add up with about 14 bits."""
    problem = Problem(case, device)
    out, lse = problem.run(backend)
    assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32
    exact_out, exact_lse = problem.computed(torch.float64)
    near_out, near_lse = problem.eager() if multiplies_8_bits else problem.computed(torch.float32)
    assert_close("out", out, exact_out, near_out.bfloat16())
    assert_close("lse", lse, exact_lse, near_lse)


CASES = {
    "full": Case(),
    "causal": Case(arguments={"causal": True}),
    "rows-that-see-nothing": Case(seq_q=45, seq_k=20, arguments={"causal": True}),
    "window": Case(arguments={"window": (9, 3), "align": "top_left"}),
    "one-query": Case(seq_q=1, seq_k=5, head_dim=48, head_dim_v=16),
    "softcap": Case(arguments={"softcap": 2.0}),
    "sinks-and-slopes": Case(sinks=True, alibi_slopes=True, arguments={"causal": True}),
    "negative-scale": Case(arguments={"scale": -0.3}),
    "packed": Case(lengths=((5, 0, 30, 1), (5, 7, 40, 0)), arguments={"causal": True}),
    "block-mask": Case(seq_q=150, seq_k=300, block_mask=(128, 128)),
    "packed-slopes": Case(lengths=((5, 30), (17, 3)), alibi_slopes=True),
}
cases = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@places("reference", "cpu", "interpreted", "gpu", "hopper")
@cases
def test_every_number_stands_for_itself_times_its_factor(case, backend, device):
    check(case, backend, device, multiplies_8_bits=device == "cuda" and _HAS_PRODUCTS)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["causal", "packed"])
def test_gpus_without_products_of_8_bits_multiply_in_float16(name, monkeypatch):
    monkeypatch.setattr(devices.DeviceFacts, "has_fp8_products", False)
    clear_plans()
    check(CASES[name], "triton")
    clear_plans()


@cases
def test_eager_products_of_8_bits_are_those_of_the_numbers(case):
    problem = Problem(case)
    for name, found, exact, near in zip(
        ("out", "lse"), problem.eager(), problem.computed(torch.float64), problem.computed(torch.float32)
    ):
        assert_close(name, found, exact, near)


_LARGE = {"seq_q": 517, "seq_k": 643}
_HEADS = [(16, 16), (64, 64), (80, 48), (96, 96), (128, 128), (192, 128), (256, 128), (128, 192), (256, 256)]
_MASKS = [{}, {"causal": True}, {"window": (200, 30)}, {"window": (90, None), "align": "top_left"}]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_portable_kernel_over_many_tiles(head_dim):
    case = Case(**_LARGE, head_dim=head_dim, head_dim_v=head_dim, arguments={"causal": True})
    check(case, "triton", "cuda", multiplies_8_bits=_HAS_PRODUCTS)


_LENGTHS = ((129, 0, 700, 1, 64, 191), (129, 33, 300, 1, 0, 800))
_BANDS = ({}, {"causal": True}, {"causal": True, "softcap": 5.0})
_ON_HOPPER = [
    *(Case(**_LARGE, head_dim=d, head_dim_v=e, arguments=mask) for (d, e), mask in turns(_HEADS, _MASKS, 2)),
    *(Case(lengths=_LENGTHS, head_dim=d, head_dim_v=d, arguments=mask) for d in (64, 128) for mask in _MASKS),
    *(
        Case(**_LARGE, head_dim=d, head_dim_v=e, block_mask=tile, arguments=mask)
        for tile in ((128, 128), (256, 128), (128, 384))
        for d, e in ((64, 64), (128, 128), (192, 128))
        for mask in _MASKS[:3]
    ),
    # With a band, calls so long that three consumers take turns; without one also shorter calls have three.
    *(
        Case(**sizes, head_dim=64, head_dim_v=e, arguments=mask)
        for e, sizes in (
            (64, {"batch": 1, "seq_q": 2300, "seq_k": 2200}),
            (48, {"batch": 1, "seq_q": 2200, "seq_k": 2500}),
            (64, {"lengths": ((2200, 0, 1, 200), (2300, 33, 1, 0))}),
        )
        for mask in _BANDS[1:]
    ),
]
#: Sequences that are cut as long ones are.
_LONG = [
    Case(**sizes, head_dim=d, head_dim_v=e, arguments=mask)
    for (d, e), sizes, mask in covering_choices(
        ((80, 48), (96, 96), (128, 128)),
        [
            _LARGE,
            {"seq_q": 1300, "seq_k": 2100, "sinks": True},
            {"seq_q": 2500, "seq_k": 2200, "alibi_slopes": True},
            {"lengths": _LENGTHS},
            {"lengths": ((1200, 0, 1, 200), (2300, 33, 1, 0)), "sinks": True, "alibi_slopes": True},
        ],
        _BANDS,
    )
]


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("case", _ON_HOPPER)
def test_hopper_kernel(case):
    check(case, "hopper", "cuda", multiplies_8_bits=True)


@pytest.fixture
def long_from_the_first_query(monkeypatch):
    """All sequences are cut as long ones are."""
    for name in ("LONG_8", "LONG_8_CAUSAL"):
        monkeypatch.setattr(configs, name, 1)
    clear_plans()
    yield
    clear_plans()


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.usefixtures("long_from_the_first_query")
@pytest.mark.parametrize("case", _LONG)
def test_hopper_kernel_for_long_sequences(case):
    check(case, "hopper", "cuda", multiplies_8_bits=True)


def _check_bits(seq: int, head_dim: int) -> None:
    """With more tiles than multiprocessors."""
    for arguments in _BANDS[:2]:
        case = Case(seq, seq, head_dim, head_dim, heads=8, heads_kv=8, batch=6, arguments=arguments)
        check(case, "hopper", "cuda", multiplies_8_bits=True)
        problem = Problem(case, "cuda")
        first = problem.run("hopper")[0]
        assert all(torch.equal(problem.run("hopper")[0], first) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.usefixtures("long_from_the_first_query")
def test_long_sequences_give_the_same_bits():
    _check_bits(2100, 128)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_kernel_with_more_tiles_than_multiprocessors_gives_the_same_bits(head_dim):
    _check_bits(1300, head_dim)


@pytest.mark.gpu
@pytest.mark.hopper
def test_many_keys_do_not_add_up_to_an_error():
    """64k keys that all say the same: what each adds is small beside the sum."""
    case = Case(batch=1, heads=2, heads_kv=2, seq_q=64, seq_k=65536, head_dim=128, head_dim_v=128)
    problem = Problem(case, "cuda")
    problem.qkv[2] = torch.ones_like(problem.qkv[2].float()).to(FP8)
    out, _ = problem.run("hopper")
    expected = problem.descales[2][:, None, :, None].expand(out.shape)
    assert (out.float() / expected - 1).abs().max() < 6e-3


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(
    "laid_out",
    [
        lambda v: v.transpose(1, 2).contiguous().transpose(1, 2),
        lambda v: pad(v.view(torch.uint8), (0, 32)).view(FP8)[..., : v.shape[-1]],
        lambda v: v[:, :, :1].expand_as(v),
    ],
    ids=["heads-first", "padded", "expanded"],
)
def test_values_may_have_any_strides(laid_out):
    problem = Problem(Case(**_LARGE, head_dim=96, head_dim_v=96), "cuda")
    given = laid_out(problem.qkv[2])
    results = []
    for problem.qkv[2] in (given, given.contiguous()):
        results.append(problem.run("hopper")[0])
    assert torch.equal(*results)


@places("cpu", "interpreted")
def test_all_that_e4m3_can_hold(backend, device):
    """NaN among them; one key a row, so that out is v."""
    v = torch.arange(256, dtype=torch.uint8).view(FP8).view(8, 1, 1, 32)
    q = torch.zeros(8, 1, 1, 16).to(FP8)
    out = flashtile.attention(q, q, v, backend=backend)
    assert torch.equal(out.float().nan_to_num(500.0), v.float().nan_to_num(500.0))


# What goes with it


def test_what_else_a_call_has_is_served():
    problem = Problem(Case())
    seed = flashtile.draw_dropout_seed()
    options = {
        "dropout_p": 0.3,
        "dropout_seed": seed,
        "key_lengths": torch.tensor([20, 45]),
        "bias": torch.randn(4, 33, 45),
        "mask": torch.rand(33, 45) < 0.8,
    }
    out, lse = problem.run(**options)
    oracle, eager = (
        flashtile.attention(
            *problem.numbers(dtype), **{**options, "bias": options["bias"].to(dtype)}, return_lse=True,
            backend="reference",
        )
        for dtype in (torch.float64, torch.float32)
    )  # fmt: skip
    assert_close("out", out, oracle[0], eager[0].bfloat16())
    assert_close("lse", lse, oracle[1], eager[1])


def test_factors_broadcast_and_may_be_left_out():
    problem = Problem(Case())
    plain = problem.run(descale_q=None, descale_k=None, descale_v=None)
    one = torch.ones(())
    for factors in (one, torch.ones(2), torch.ones(2, 1), torch.ones(1, 2).expand(2, 2)):
        out, lse = problem.run(descale_q=factors, descale_k=factors, descale_v=2 * factors)
        assert_same(out, 2 * plain[0])
        assert_same(lse, plain[1])


@places("cpu", "interpreted")
def test_factors_whose_product_is_0(backend, device):
    """Factors whose product is 0 in float32 make scores of 0, and hidden keys stay hidden."""
    problem = Problem(Case())
    tiny = torch.full((2, 2), 2.0**-80)
    for arguments in ({"causal": True}, {"key_lengths": torch.tensor([20, 45])}):
        out, lse = problem.run(backend, descale_q=tiny, descale_k=tiny, **arguments)
        q, k, v = problem.numbers(torch.float64)
        oracle, oracle_lse = flashtile.attention(0 * q, k, v, return_lse=True, backend="reference", **arguments)
        assert_close("out", out, oracle, oracle.bfloat16())
        assert_close("lse", lse, oracle_lse, oracle_lse.float())


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_sinks_and_slopes_are_of_the_dtype_of_out_or_of_lse(name):
    problem = Problem(Case())
    numbers = torch.tensor([0.5, 0.25, 1.0, 2.0])
    expected = problem.run(**{name: numbers})
    assert torch.equal(problem.run(**{name: numbers.bfloat16()})[0], expected[0])
    for wrong in (torch.float16, FP8):
        with pytest.raises(TypeError, match=f"{name}: expected dtype torch.float32, or that of out, torch.bfloat16"):
            problem.run(**{name: numbers.to(wrong)})


def test_autocast_leaves_them_as_they_are():
    problem = Problem(Case())
    out, _ = problem.run()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(problem.run()[0], out)


def test_the_operator_keeps_its_promises():
    problem = Problem(Case(seq_q=5, seq_k=7))
    out, lse = torch.compile(problem.run, backend="aot_eager", fullgraph=True)()
    wanted = problem.run()
    assert_same((out, lse), wanted)
    q, k, v = (x.to("meta") for x in problem.qkv)
    assert flashtile.attention(q, k, v).dtype is torch.bfloat16


def _refuses(error: type[Exception], message: str, **changes: Any) -> None:
    with pytest.raises(error, match=message):
        Problem(Case()).run(**changes)


def test_bad_factors():
    _refuses(
        TypeError, "descale_q: expected dtype float32, got torch.float64; cast", descale_q=torch.ones(2, 2).double()
    )
    _refuses(TypeError, "descale_k: expected a torch.Tensor, got float", descale_k=2.0)
    _refuses(
        ValueError,
        r"descale_v: .*broadcasts to \[batch, heads_kv\] = \[2, 2\], got \[2, 4\]",
        descale_v=torch.ones(2, 4),
    )
    _refuses(ValueError, "descale_v: expected positive finite factors", descale_v=-torch.ones(2, 2))
    _refuses(ValueError, "descale_v: expected the device of q", descale_v=torch.ones(2, 2, device="meta"))
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"descale_k: expected None beside inputs of torch.float32"):
        flashtile.attention(q, q, q, descale_k=torch.ones(1, 2))


def test_there_are_no_gradients():
    problem = Problem(Case(sinks=True))
    problem.descales[0].requires_grad_()
    with pytest.raises(ValueError, match=r"no backward.*torch.no_grad"):
        problem.run()
    with torch.no_grad():
        problem.run()
    problem = Problem(Case())
    problem.qkv[1].requires_grad_()
    with pytest.raises(ValueError, match="no backward"):
        problem.run()
    q, k, v = Problem(Case()).qkv
    with pytest.raises(NotImplementedError, match="no batching rule"):
        torch.func.vmap(flashtile.attention)(q[None], k[None], v[None])


@pytest.mark.parametrize("function", [flashtile.attention_probs, flashtile.attention_column_sums])
def test_others_do_not_take_them(function):
    q = torch.zeros(1, 4, 2, 8).to(FP8)
    with pytest.raises(TypeError, match=r"expected dtype float16.*got torch.float8_e4m3fn"):
        function(q, q, *([torch.zeros(1, 2, 4)] if function is flashtile.attention_column_sums else []))


def test_other_types_of_8_bits_are_refused():
    q = torch.zeros(1, 4, 2, 8).to(torch.float8_e5m2)
    with pytest.raises(TypeError, match=r"or float8_e4m3fn.*got torch.float8_e5m2"):
        flashtile.attention(q, q, q)


# Making them


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_quantize(dtype):
    x = torch.randn(2, 50, 4, 24, dtype=torch.float32)
    x[0, :, 1] *= 1e-3
    x[1, :, 2] = 0
    x = x.to(dtype)
    rounded, descale = flashtile.quantize_fp8(x)
    assert (
        rounded.dtype is FP8 and rounded.shape == x.shape and descale.shape == (2, 4) and descale.dtype is torch.float32
    )
    back = rounded.float() * descale[:, None, :, None]
    largest = x.float().abs().amax((1, 3))[:, None, :, None]
    # Half a unit of 3 bits; below 2⁻⁶ of 448 units in the last place are 2⁻⁹.
    assert ((back - x.float()).abs() <= x.float().abs() / 16 + largest * 2.0**-10 / 448 * 1.01).all()
    assert descale[1, 2] == 1 and (descale > 0).all() and (rounded.float().abs().amax((1, 3))[0] == 448).all()


def test_quantize_shares_factors_and_takes_packed_sequences():
    x = torch.randn(50, 4, 24)
    rounded, descale = flashtile.quantize_fp8(x, 2)
    assert rounded.shape == x.shape and descale.shape == (1, 2)
    assert_same(descale[0] * 448, x.abs().amax((0, 2)).view(2, 2).amax(1))
    assert flashtile.quantize_fp8(x[:0])[0].shape == (0, 4, 24)
    with pytest.raises(ValueError, match="heads_kv: expected a divisor of the 4 heads"):
        flashtile.quantize_fp8(x, 3)
    with pytest.raises(ValueError, match="heads_kv: expected a divisor of the 4 heads of x, got True"):
        flashtile.quantize_fp8(x, True)
    with pytest.raises(ValueError, match="x: expected"):
        flashtile.quantize_fp8(x[0])
    with pytest.raises(TypeError, match="x: expected dtype"):
        flashtile.quantize_fp8(rounded)
