"""`use_flashtile_sdpa`: whose attention runs inside and outside, and that all comes back as it was."""

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flashtile.integrations import use_flashtile_sdpa
from flashtile.testing import assert_close, assert_same
from support.running.each_case import each_case

PYTORCHS = functional.scaled_dot_product_attention


class Watch(TorchDispatchMode):
    """Which operators ran: the names of those that are an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(function):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))

    @property
    def ours(self) -> bool:
        assert self.seen
        return all(name.startswith("flashtile.") for name in self.seen)


@pytest.fixture(autouse=True)
def pytorchs_own_afterwards():
    yield
    assert functional.scaled_dot_product_attention is PYTORCHS
    assert torch.backends.mha.get_fastpath_enabled()


def attend(query: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def ran_ours(function: Any, *arguments: Any) -> bool:
    with Watch() as watch:
        function(*arguments)
    return watch.ours


def test_a_context_without_a_call_says_so():
    """As where the name was imported before, which no other function can take from there."""
    query = torch.randn(1, 2, 5, 8)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
        for call in (lambda: attend(query), lambda: compiled(query), lambda: compiled(query)):
            with use_flashtile_sdpa(), use_flashtile_sdpa():
                call()
        with use_flashtile_sdpa():
            torch.export.export(Attends(), (query,), strict=True)
    with pytest.raises(RuntimeError), use_flashtile_sdpa():
        raise RuntimeError
    with pytest.warns(UserWarning, match="imported before") as found, use_flashtile_sdpa(), use_flashtile_sdpa():
        PYTORCHS(query, query, query)
    assert [warning.filename for warning in found] == [__file__]


class Attends(nn.Module):
    def forward(self, query: Tensor) -> Tensor:
        return attend(query)


def test_holds_inside_and_not_outside():
    query = torch.randn(1, 2, 5, 8)
    assert not ran_ours(attend, query)
    with use_flashtile_sdpa():
        assert ran_ours(attend, query)
    assert not ran_ours(attend, query)


def test_nests_and_the_innermost_counts():
    query = torch.randn(1, 2, 5, 8)
    with use_flashtile_sdpa(backend="reference"):
        with use_flashtile_sdpa(backend="hopper"), pytest.raises(ValueError, match="backend: 'hopper' cannot serve"):
            attend(query)
        assert ran_ours(attend, query)


def test_is_undone_after_an_error():
    with pytest.raises(TypeError, match="query: expected dtype"), use_flashtile_sdpa():
        attend(torch.ones(1, 2, 5, 8, dtype=torch.int64))


def test_contexts_of_threads_may_overlap_in_any_order():
    query = torch.randn(1, 2, 5, 8)
    opened, closed = threading.Event(), threading.Event()

    def other() -> None:
        with use_flashtile_sdpa():
            opened.set()
            closed.wait(10)

    thread = threading.Thread(target=other)
    with use_flashtile_sdpa():
        thread.start()
        assert opened.wait(10)
    # This thread's is closed, the other's, opened later, is not.
    assert ran_ours(attend, query)
    closed.set()
    thread.join(10)
    assert not ran_ours(attend, query)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@each_case("training", [False, True])
@each_case("name", ["attention", "encoder", "decoder"])
def test_reaches_pytorchs_modules_and_gives_their_results(name, training):
    torch.manual_seed(0)
    options = {"batch_first": True, "dropout": 0.0}
    module: nn.Module
    if name == "attention":
        module = nn.MultiheadAttention(16, 2, **options)
    elif name == "encoder":
        module = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, **options), 2)
    else:
        module = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, **options), 2)
    module.train(training)
    tokens = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def run(dtype: torch.dtype) -> Tensor:
        model, x = module.to(dtype), tokens.to(dtype)
        with torch.set_grad_enabled(training):
            if name == "attention":
                out, _ = model(x, x, x, key_padding_mask=padding, need_weights=False)
                return out
            if name == "encoder":
                return model(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
            return model(x, x, memory_key_padding_mask=padding)

    with use_flashtile_sdpa(), Watch() as watch:
        actual = run(torch.float32)
    assert watch.ours
    with sdpa_kernel(SDPBackend.MATH):
        eager, oracle = run(torch.float32), run(torch.float64)
    assert_close("out", actual, oracle, eager)


@each_case("library", ["timm", "torchvision"])
def test_reaches_models_of_other_libraries_and_their_gradients(library):
    module = pytest.importorskip(library)
    torch.manual_seed(0)
    if library == "timm":
        model = module.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5)
    else:
        sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64, "num_classes": 5}
        model = module.models.VisionTransformer(image_size=32, patch_size=16, **sizes)
        nn.init.normal_(model.heads.head.weight)
    images = torch.randn(2, 3, 32, 32)

    def run(dtype: torch.dtype) -> list[Tensor]:
        out = model.to(dtype)(images.to(dtype))
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    with use_flashtile_sdpa(), Watch() as watch:
        found = run(torch.float32)
    assert watch.ours
    with sdpa_kernel(SDPBackend.MATH):
        eager, oracle = run(torch.float32), run(torch.float64)
    for actual, expected, same in zip(found, oracle, eager, strict=True):
        assert_close("out and gradients", actual, expected, same)


def test_checkpointed_layers_recompute_with_the_same_attention():
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    with use_flashtile_sdpa():
        attend(query).sum().backward()
        expected, query.grad = query.grad, None
        with Watch() as watch:
            checkpoint(attend, query, use_reentrant=False).sum().backward()
    assert watch.ours
    assert_same(query.grad, expected)


def test_compiled_functions_follow():
    graphs = []

    def remember(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append("flashtile" in str(graph.graph))
        return graph.forward

    compiled = torch.compile(attend, backend=remember, fullgraph=True)
    query = torch.randn(1, 2, 5, 8)
    eager = attend(query)
    with use_flashtile_sdpa():
        inside = compiled(query)
        assert_same(inside, attend(query))
    assert_same(compiled(query), eager)
    with use_flashtile_sdpa():
        compiled(query)
    assert graphs == [True, False]  # and nothing compiled again


def test_a_backend_that_is_none_raises_before_the_context_is_entered():
    wrong = use_flashtile_sdpa(backend="foo")
    with pytest.raises(ValueError, match=r"backend: expected one of 'auto', .*, got 'foo'"), wrong:
        pytest.fail("entered")
    assert functional.scaled_dot_product_attention is PYTORCHS
