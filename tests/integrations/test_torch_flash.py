"""flashtile as PyTorch's flash attention: its operators under autograd, compiled, packed, in pages."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile.integrations import use_flashtile_as_flash_attention
from flashtile.integrations.torch_flash import _Active, _Operators
from flashtile.testing import assert_close, assert_same
from support.distributed.processes import start
from support.distributed.torch_flash import JOBS
from support.running.each_case import each_case

ATEN = torch.ops.aten
HAS_PAGES = "block_table" in str(ATEN._flash_attention_forward.default._schema)
HAS_REGISTRY = hasattr(torch.nn.attention, "register_flash_attention_impl")


@pytest.fixture
def on_a_cpu():
    """The operators in PyTorch's tables for CPUs, where it has none of its own."""
    active = _Active(_Operators({"backend": "auto", "deterministic": False}), "CPU")
    yield
    active.remove()


@pytest.fixture
def on_a_gpu():
    use_flashtile_as_flash_attention()
    yield
    torch.nn.attention.restore_flash_attention_impl()


def _inputs(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, kv_heads: int | None = None):
    generator = torch.Generator().manual_seed(0)
    kv = shape if kv_heads is None else (*shape[:-2], kv_heads, shape[-1])
    draw = (torch.randn(size, generator=generator) for size in (shape, kv, kv, shape))
    return [x.to(device, dtype).requires_grad_() for x in draw]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = False, **options: Any) -> Tensor:
    return ATEN._scaled_dot_product_flash_attention(q, k, v, dropout_p, causal, **options)[0]


def _results(function: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    out = function(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _agree(found: list[Tensor], same: list[Tensor], oracle: list[Tensor]) -> None:
    for name, *values in zip(("out", "dq", "dk", "dv"), found, oracle, same):
        assert_close(name, *values)


@each_case("causal", [False, True])
@each_case("heads_first", [False, True])
def test_sdpa_and_its_gradients(on_a_cpu, causal, heads_first):
    q, k, v, dout = _inputs(2, 3, 50, 32) if heads_first else (x.transpose(1, 2) for x in _inputs(2, 50, 3, 32))
    found = _results(lambda *x: _sdpa(*x, causal=causal, scale=0.3), q, k, v, dout)

    def eager(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=causal, scale=0.3)

    _agree(found, _results(eager, q, k, v, dout), _results(eager, q.double(), k.double(), v.double(), dout.double()))
    for result, like in zip(found, (q, q, k, v)):
        assert result.stride() == like.stride()


def test_dropout_of_the_backward_is_that_of_the_forward(on_a_cpu):
    q, k, v, dout = _inputs(1, 2, 40, 32)
    torch.manual_seed(7)
    found = _results(lambda *x: _sdpa(*x, dropout_p=0.4), q, k, v, dout)
    torch.manual_seed(7)
    same = _results(lambda *x: flashtile.scaled_dot_product_attention(*x, dropout_p=0.4), q, k, v, dout)
    for one, other in zip(found, same):
        assert torch.equal(one, other)


def test_results_lie_as_the_compiler_expects(on_a_cpu):
    q, k, v, dout = _inputs(1, 2, 40, 32)
    compiled = torch.compile(_sdpa, fullgraph=True, backend="aot_eager")
    found, same = (_results(f, q, k, v, dout) for f in (compiled, _sdpa))
    for one, other in zip(found, same):
        assert torch.equal(one, other)


def _packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *of_keys: Any, max_k: int = 30, **options: Any) -> Tensor:
    rest = *(of_keys or (offsets,)), 30, max_k, 0.0, True, False
    return ATEN._flash_attention_forward(q, k, v, offsets, *rest, **options)[0]


def test_packed_sequences_with_windows_and_grouped_heads(on_a_cpu):
    q, k, v, dout = _inputs(50, 4, 32, kv_heads=2)
    dout = torch.randn_like(q)
    offsets = torch.tensor([0, 20, 50], dtype=torch.int32)
    found = _results(lambda *x: _packed(*x, offsets, window_size_left=5, window_size_right=-1), q, k, v, dout)

    def ours(*tensors: Tensor) -> Tensor:
        return flashtile.attention_varlen(*tensors, offsets, causal=True, window=(5, None))

    for one, other in zip(found, _results(ours, q, k, v, dout)):
        assert torch.equal(one, other)


@pytest.mark.skipif(not HAS_PAGES, reason="this PyTorch's operator has no block_table")
def test_pages_and_their_lengths(on_a_cpu):
    """The diagonal ends at the last key that is there, and an in-place form writes the same."""
    generator = torch.Generator().manual_seed(3)
    pages_k, pages_v = (torch.randn(6, 16, 2, 32, generator=generator) for _ in range(2))
    table = torch.tensor([[5, 1], [2, 4]], dtype=torch.int32)
    lengths = torch.tensor([27, 19], dtype=torch.int32)
    q = torch.randn(7, 2, 32, generator=generator)
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    with torch.no_grad():
        found = _packed(q, pages_k, pages_v, offsets, None, max_k=32, seqused_k=lengths, block_table=table)
    for sequence in range(2):
        rows = slice(int(offsets[sequence]), int(offsets[sequence + 1]))
        k, v = (t[table[sequence].long()].flatten(0, 1)[None, : lengths[sequence]] for t in (pages_k, pages_v))
        alone, oracle = (
            flashtile.attention(q[None, rows].to(d), k.to(d), v.to(d), causal=True, backend="reference")[0]
            for d in (torch.float32, torch.float64)
        )
        assert_close("out", found[rows], oracle, alone)
    out = torch.empty_like(q)
    ATEN._flash_attention_forward_no_dropout_inplace(
        out, q, pages_k, pages_v, offsets, None, 4, 32, 0.0, True, False, seqused_k=lengths, block_table=table
    )
    assert torch.equal(out, found)


_VARLEN: Any = importlib.import_module("torch.nn.attention.varlen") if HAS_PAGES else None
_needs_pages = pytest.mark.skipif(not HAS_PAGES, reason="this PyTorch's varlen_attn has no block_table")


@_needs_pages
@each_case("window", [(-1, -1), (-1, 0), (4, 0), (-1, 4), (0, 0), (0, -1), (8, 2), (99, 99)])
def test_varlen_attn_with_windows(on_a_cpu, window):
    """As PyTorch's own tests of it ask for it: grouped heads, gradients and lse."""
    q, k, v, dout = _inputs(50, 4, 16, kv_heads=2)
    offsets, found_lse = torch.tensor([0, 20, 50], dtype=torch.int32), []

    def pytorchs(*tensors: Tensor) -> Tensor:
        options = {"window_size": window, "enable_gqa": True, "return_aux": _VARLEN.AuxRequest(lse=True)}
        out, lse = _VARLEN.varlen_attn(*tensors, offsets, offsets, 30, 30, **options)
        found_lse.append(lse.detach())
        return out

    def sequences(*tensors: Tensor) -> Tensor:
        rows = torch.arange(30)
        below, above = (side if side >= 0 else 30 for side in window)
        seen = (rows >= rows[:, None] - below) & (rows <= rows[:, None] + above)
        outs = []
        for first, end in ((0, 20), (20, 50)):
            own = (t[None, first:end].transpose(1, 2) for t in tensors)
            mask = seen[: end - first, : end - first]
            outs.append(F.scaled_dot_product_attention(*own, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(outs)

    dout = torch.randn_like(q)
    oracle = _results(sequences, q.double(), k.double(), v.double(), dout.double())
    _agree(_results(pytorchs, q, k, v, dout), _results(sequences, q, k, v, dout), oracle)
    assert found_lse[0].shape == (4, 50) and found_lse[0].isfinite().all()


@_needs_pages
@pytest.mark.parametrize("lengths", [(32, 64, 96, 48), (1, 1, 1, 1), (1, 128, 127, 17)], ids=str)
@torch.no_grad()
def test_varlen_attn_over_caches(on_a_cpu, lengths):
    """One query each, on rows of which the first ones count, in one piece and in pages; the others hold NaN."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(4, 2, 16, generator=generator)
    rows = [torch.randn(n, 2, 2, 16, generator=generator) for n in lengths]  # [keys, key or value, heads, columns]
    offsets, used = torch.arange(5).int(), torch.tensor(lengths).int()
    ends = F.pad(used.cumsum(0), (1, 0)).int()
    whole = torch.cat(rows).unbind(1)
    expected = _VARLEN.varlen_attn(q, *whole, offsets, ends, 1, max(lengths))
    cache = torch.full((4, 128, 2, 2, 16), float("nan"))
    for slot, own in zip(cache, rows):
        slot[: len(own)] = own
    flat = cache.flatten(0, 1).unbind(1)
    slots = torch.arange(0, 5 * 128, 128).int()
    order = torch.randperm(16, generator=generator)
    pages = torch.empty(16, 32, 2, 2, 16)
    pages[order] = cache.view(16, 32, 2, 2, 16)
    table = order.view(4, 4).int()
    attend = torch.compile(_VARLEN.varlen_attn, fullgraph=True, backend="aot_eager")
    for call, keys, of_keys, more in (
        (_VARLEN.varlen_attn, flat, slots, {}),
        (_VARLEN.varlen_attn, flat, slots, {"window_size": (-1, 0)}),
        (_VARLEN.varlen_attn, pages.unbind(2), None, {"block_table": table}),
        (attend, pages.unbind(2), slots, {"block_table": table}),
    ):
        arguments = q, *keys, offsets, of_keys, 1, 128
        found = call(*arguments, seqused_k=used, num_splits=2, **more)
        assert_same(found, expected)
        out = torch.empty_like(q)
        assert _VARLEN.varlen_attn_out(out, *arguments, seqused_k=used, **more) is out
        assert torch.equal(out, found)


@_needs_pages
@each_case("mode", [False, True])
def test_one_split_is_batch_invariance(on_a_cpu, mode):
    """As PyTorch's own test asks for it: a sequence has the bits that it has alone, in the mode its gradients too."""
    q, k, v, _ = _inputs(150, 2, 16)
    ends, alone = torch.tensor([0, 50, 150]).int(), torch.tensor([0, 50]).int()
    options = {"window_size": (-1, 0), "num_splits": None if mode else 1}
    with flashtile.batch_invariant_mode(mode):
        found = _VARLEN.varlen_attn(q, k, v, ends, ends, 100, 100, **options)
        grads = torch.autograd.grad(found[:50].square().sum(), (q, k, v))
        own = [x[:50].detach().clone().requires_grad_() for x in (q, k, v)]
        expected = _VARLEN.varlen_attn(*own, alone, alone, 50, 50, **options)
        grads_alone = torch.autograd.grad(expected.square().sum(), own)
    assert torch.equal(found[:50], expected)
    if mode:
        assert all(torch.equal(grad[:50], one) for grad, one in zip(grads, grads_alone))


@each_case("packed", [False, True])
def test_8_bit_inputs_with_factors_of_heads(on_a_cpu, packed):
    q, k, v, _ = (x.detach().transpose(1, 2) for x in _inputs(2, 50, 4, 16, kv_heads=2))
    factors = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    expected = flashtile.attention(
        *(t.transpose(1, 2) for t in (q, k, v)), causal=True, descale_q=factors[0], descale_k=factors[1],
        descale_v=factors[2],
    )  # fmt: skip
    if not packed:
        found = ATEN._scaled_dot_product_flash_attention.quantized(q, k, v, *factors, 0.0, True)[0]
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.transpose(1, 2), expected)
        return
    rows = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    offsets = torch.tensor([0, 50, 100]).int()
    found = ATEN._flash_attention_forward.quantized(*rows, offsets, offsets, 50, 50, 0.0, True, False, *factors)[0]
    assert_same(found.view(2, 50, 4, 16), expected)


def test_a_causal_bias_at_the_lower_right(on_a_cpu):
    q, k, v, _ = (x.detach() for x in _inputs(2, 3, 20, 16))
    found = _sdpa(q[:, :, :7], k, v, causal=True)  # how PyTorch's causal_lower_right calls it
    seen = torch.ones(7, 20, dtype=torch.bool).tril(13)
    assert_same(found, F.scaled_dot_product_attention(q[:, :, :7], k, v, attn_mask=seen))


def test_the_debug_mask_says_what_dropout_dropped(on_a_cpu):
    """PyTorch's tests of dropout read it: weights, negative where one was dropped."""
    q, k, v, _ = (x.detach() for x in _inputs(2, 3, 40, 16))
    out, *_, mask = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.3, True, True)
    weights = mask.clamp(min=0) / 0.7
    assert (mask < 0).any()
    assert_same(out, weights @ v)
    assert_same(mask.abs().sum(-1), torch.ones(2, 3, 40))


@pytest.mark.filterwarnings("error")
def test_deterministic_algorithms_need_no_warning(on_a_cpu):
    q, k, v, dout = _inputs(1, 2, 40, 32)
    torch.use_deterministic_algorithms(True)
    try:
        found = _results(_sdpa, q, k, v, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, _results(_sdpa, q, k, v, dout)):
        assert torch.equal(one, other)


def test_what_it_refuses(on_a_cpu):
    q, k, v, _ = _inputs(1, 2, 8, 16)
    rest = None, None, 2, 2, 0.0, False, False
    offsets = torch.tensor([0, 2]).int()
    with pytest.raises(NotImplementedError, match="return_debug_mask: expected False"):
        ATEN._flash_attention_forward(q[0], k[0], v[0], offsets, offsets, 2, 2, 0.1, False, True)
    with pytest.raises(NotImplementedError, match="seqused_k, block_table: expected packed queries"):
        ATEN._flash_attention_forward(*(t.detach() for t in (q, k, v)), *rest, seqused_k=torch.tensor([2]).int())
    for argument in ("seqused_k", "alibi_slopes"):  # PyTorch's backward would compute another gradient
        with pytest.raises(NotImplementedError, match=f"{argument}: expected None where a gradient is wanted"):
            ATEN._flash_attention_forward(q, k, v, *rest, **{argument: torch.tensor([2])})
    with pytest.raises(TypeError, match="name: expected a string"):
        use_flashtile_as_flash_attention(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend"):
        use_flashtile_as_flash_attention(backend="fast")


@pytest.mark.skipif(not HAS_REGISTRY, reason="needs PyTorch's registry")
@pytest.mark.skipif(torch.cuda.is_available(), reason="its own kernels are tested below")
def test_registered_under_several_names(monkeypatch):
    """Also under PyTorch's own, which torchtitan activates again."""
    implementations = torch.nn.attention._registry._FLASH_ATTENTION_IMPLS  # type: ignore[attr-defined]
    monkeypatch.setitem(implementations, "FA3", implementations["FA3"])
    use_flashtile_as_flash_attention("FA3")
    torch.nn.attention.activate_flash_attention_impl("FA3")
    assert isinstance(torch.nn.attention._registry._FLASH_ATTENTION_ACTIVE[1], _Active)  # type: ignore[attr-defined]
    for name in ("flashtile", "tiles"):
        use_flashtile_as_flash_attention(name)
        assert torch.nn.attention.current_flash_attention_impl() == name
    torch.nn.attention.activate_flash_attention_impl("flashtile")
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_pytorchs_function_on_a_gpu(on_a_gpu, causal, compiled, monkeypatch):
    q, k, v, dout = _inputs(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)

    def attend(*tensors: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*tensors, is_causal=causal)

    def eager(*tensors: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(*tensors, is_causal=causal)

    served = []
    ours = flashtile.attention_backward
    monkeypatch.setattr(flashtile, "attention_backward", lambda *a, **o: (served.append(1), ours(*a, **o))[1])
    found = _results(torch.compile(attend) if compiled else attend, q, k, v, dout)
    assert served
    oracle = _results(eager, q.double(), k.double(), v.double(), dout.double())
    _agree(found, _results(eager, q, k, v, dout), oracle)


@pytest.mark.gpu
def test_varlen_attn_on_a_gpu(on_a_gpu, monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v, dout = _inputs(700, 4, 64, device="cuda", dtype=torch.float16)
    offsets = torch.tensor([0, 200, 700], dtype=torch.int32, device="cuda")
    served = []
    ours = flashtile.attention_varlen
    monkeypatch.setattr(flashtile, "attention_varlen", lambda *a, **o: (served.append(1), ours(*a, **o))[1])
    found = _results(lambda *x: varlen.varlen_attn(*x, offsets, offsets, 500, 500), q, k, v, dout)
    assert served

    def eager(*tensors: Tensor) -> Tensor:
        return ours(*tensors, offsets, max_seqlen_q=500, backend="reference")

    oracle = _results(eager, q.double(), k.double(), v.double(), dout.double())
    _agree(found, _results(eager, q, k, v, dout), oracle)


@pytest.mark.gpu
@pytest.mark.parametrize("in_a_graph", [False, True])
def test_dropout_on_a_gpu_is_that_of_the_debug_mask(on_a_gpu, in_a_graph):
    """As PyTorch's own tests look at it: what the mask says was dropped, its eager function drops too."""
    q, k, v, dout = _inputs(2, 4, 256, 64, device="cuda", dtype=torch.float16)

    def run() -> tuple[list[Tensor], Tensor]:
        out, *_, weights = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.3, True, True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)], weights

    found, weights = run()
    if in_a_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found, weights = run()
        graph.replay()
        before = weights.clone()
        graph.replay()
        assert not torch.equal(before, weights)
    kept = weights >= 0

    def eager(*tensors: Tensor) -> Tensor:
        return ATEN._scaled_dot_product_attention_math(*tensors, None, 0.3, True, kept)[0]

    oracle = _results(eager, q.double(), k.double(), v.double(), dout.double())
    _agree(found, _results(eager, q, k, v, dout), oracle)


@pytest.mark.gpu
def test_nested_tensors_on_a_gpu(on_a_gpu):
    q, k, v, dout = _inputs(300, 4, 64, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, 100, 300], device="cuda")

    def nested(*tensors: Tensor) -> Tensor:
        jagged = (torch.nested.nested_tensor_from_jagged(t, offsets).transpose(1, 2) for t in tensors)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*jagged).transpose(1, 2).values()

    def alone(*tensors: Tensor) -> Tensor:
        return flashtile.attention_varlen(*tensors, offsets, max_seqlen_q=200, backend="reference")

    oracle = _results(alone, q.double(), k.double(), v.double(), dout.double())
    _agree(_results(nested, q, k, v, dout), _results(alone, q, k, v, dout), oracle)


def _check_ranks(folder: Any, device: str) -> None:
    for of_rank in start(JOBS, 2, folder, device):
        for job in JOBS:
            for found, same, oracle in of_rank[job].values():
                _agree(found, same, oracle)


def test_dtensors_and_context_parallelism_of_pytorch(tmp_path):
    _check_ranks(tmp_path, "cpu")


@pytest.mark.multi_gpu
def test_dtensors_and_context_parallelism_of_pytorch_on_gpus(tmp_path):
    _check_ranks(tmp_path, "cuda")
