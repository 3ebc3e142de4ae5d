"""Attention over some keys joined to that over others, in place."""

import pytest
import torch

import flashtile
from flashtile._backends import devices
from flashtile.testing import assert_close, assert_same
from support.running.each_case import each_case
from support.running.places import places

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _parts(dtype: torch.dtype, width: int, device: str = "cpu", parts: int = 4):
    """Results of disjoint keys; some rows see nothing in some, or in all."""
    generator = torch.Generator().manual_seed(width)
    shape = (2, 37, 3, width)
    found = []
    for part in range(parts):
        out = torch.randn(shape, generator=generator, dtype=torch.float64)
        lse = torch.randn(2, 3, 37, generator=generator, dtype=torch.float64) * 4
        for row in (5, 6 + part):
            out[:, row], lse[..., row] = 0, float("-inf")
        found.append((out.to(dtype).to(device), lse.float().to(device)))
    return found


def _merged(parts, backend: str, dtype: torch.dtype | None = None):
    """The parts one after another into slices of something larger, whose other rows stay as they are. In float64
    the first part joins nothing; else it is the start."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    out, lse = parts[0]
    batch, rows, heads, width = out.shape
    acc = torch.full((batch, rows + 3, heads, width), 7.0, dtype=wide, device=out.device)
    row_max = torch.full((batch, heads, rows + 3), 7.0, dtype=wide, device=out.device)
    row_sum = row_max.clone()
    own = slice(2, rows + 2)
    if dtype is torch.float64:
        acc[:, own], row_max[..., own], row_sum[..., own] = 0, float("-inf"), 0
    state = acc[:, own], row_max[..., own], row_sum[..., own]
    for number, (out, lse) in enumerate(parts):
        given, first = out if dtype is None else out.to(dtype), number == 0 and dtype is not torch.float64
        flashtile.merge_attention_(*state, given, lse.to(wide), first=first, backend=backend)
    assert (acc[:, :2] == 7).all() and (acc[:, -1] == 7).all() and (row_max[..., :2] == 7).all()
    return flashtile.finish_attention(*state, dtype or parts[0][0].dtype, backend=backend)


def _check(dtype: torch.dtype, width: int, backend: str, device: str = "cpu") -> None:
    parts = _parts(dtype, width, device)
    oracle = _merged([(out.double(), lse.double()) for out, lse in parts], "reference", torch.float64)
    eager = _merged(parts, "reference")
    expected = flashtile.logsumexp_merge([out.double() for out, _ in parts], [lse.double() for _, lse in parts])
    assert_same(oracle[0], expected[0])
    assert_same(oracle[1], expected[1])
    for name, found, exact, plain in zip(("out", "lse"), _merged(parts, backend), oracle, eager):
        assert_close(name, found, exact, plain)


@each_case("width", [1, 16, 40])
@each_case("dtype", _DTYPES)
def test_on_the_cpu(dtype, width):
    _check(_DTYPES[dtype], width, "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("width", [1, 40, 128])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_in_the_interpreter(dtype, width):
    _check(_DTYPES[dtype], width, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 40, 64, 128, 192, 512])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_on_a_gpu(dtype, width):
    _check(_DTYPES[dtype], width, "triton", "cuda")


def test_an_infinite_score_is_an_infinite_sum():
    """As of torch.logsumexp, and a row that saw nothing has 0 and -inf."""
    acc, inf = torch.zeros(1, 2, 1, 3), float("inf")
    row_max, row_sum = torch.tensor([[[inf, -inf]]]), torch.tensor([[[1.0, 0.0]]])
    out, lse = flashtile.finish_attention(acc, row_max, row_sum, torch.bfloat16)
    assert out.dtype is torch.bfloat16 and not out.any()
    assert lse.flatten().tolist() == [inf, -inf]


def test_what_stays_the_largest_is_not_rounded():
    acc = torch.full((1, 1, 1, 2), 0.1)
    row_max, row_sum = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    nothing = torch.zeros(1, 1, 1, 2)
    for _ in range(1000):
        flashtile.merge_attention_(acc, row_max, row_sum, nothing, torch.full((1, 1, 1), -200.0))
    assert torch.equal(acc, torch.full((1, 1, 1, 2), 0.1))


@each_case(
    "changes, message",
    [
        ({"acc": torch.zeros(1, 4, 2, 8, dtype=torch.float16)}, "acc: expected torch.float32"),
        ({"out": torch.zeros(1, 4, 2, 4)}, r"out: expected the shape of acc, \(1, 4, 2, 8\)"),
        ({"lse": torch.zeros(1, 4, 2)}, r"lse: expected torch.float32 \(1, 2, 4\)"),
        ({"row_sum": torch.zeros(1, 4, 8)[:, :2, :4]}, "row_sum: expected the strides of row_max"),
        ({"backend": "triton"}, "backend: 'triton' cannot serve this call"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    if devices.interpreting():
        pytest.skip("the interpreter serves it")
    given = {
        "acc": torch.zeros(1, 4, 2, 8), "row_max": torch.zeros(1, 2, 4), "row_sum": torch.zeros(1, 2, 4),
        "out": torch.zeros(1, 4, 2, 8), "lse": torch.zeros(1, 2, 4),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        flashtile.merge_attention_(**given | changes)


@places("reference", "cpu", "interpreted", "gpu")
def test_lazily_negated_tensors(backend: str, device: str) -> None:
    """What is read may be lazily negated, but not what is written."""
    (out, lse), *_ = _parts(torch.float32, 16, device)
    running = torch.zeros_like(out), torch.full_like(lse, -torch.inf), torch.zeros_like(lse)
    results = []
    for view in (torch.clone, lambda t: torch._neg_view(-t)):
        state = [t.clone() for t in running]
        flashtile.merge_attention_(*state, view(out), view(lse), backend=backend)
        results.append((*state, *flashtile.finish_attention(*map(view, state), torch.float32, backend=backend)))
    assert_same(results[1], results[0])
    for place, name in enumerate(("acc", "row_max", "row_sum")):
        state = [torch._neg_view(t.clone()) if number == place else t.clone() for number, t in enumerate(running)]
        with pytest.raises(ValueError, match=f"{name}: expected a tensor that holds its own numbers"):
            flashtile.merge_attention_(*state, out, lse, backend=backend)


def test_a_running_result_that_shares_memory_is_refused():
    (out, lse), *_ = _parts(torch.float32, 16)
    acc, row_max = torch.zeros_like(out), torch.zeros_like(lse)
    with pytest.raises(ValueError, match="row_max, row_sum: expected memory of its own for each of them"):
        flashtile.merge_attention_(acc, row_max, row_max, out, lse)
    with pytest.raises(ValueError, match="acc: expected memory of its own for each element"):
        flashtile.merge_attention_(acc[:1].expand_as(acc), row_max, row_max.clone(), out, lse)


def test_one_graph():
    """Slices of a larger running result are merged, and nothing else of it is written."""

    def merged(state: list[torch.Tensor], *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        running = state[0][:, 2:39], state[1][..., 2:39], state[2][..., 2:39]
        for place in range(0, len(parts), 2):
            flashtile.merge_attention_(*running, parts[place], parts[place + 1], first=place == 0)
        return flashtile.finish_attention(*running, torch.float16)

    parts = [tensor for part in _parts(torch.float32, 16) for tensor in part]
    states = [[torch.full(shape, 7.0) for shape in ((2, 40, 3, 16), (2, 3, 40), (2, 3, 40))] for _ in range(2)]
    compiled = torch.compile(merged, fullgraph=True, backend="aot_eager")
    assert_same(compiled(states[0], *parts), merged(states[1], *parts))
    assert_same(states[0], states[1])
