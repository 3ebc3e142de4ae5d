"""The model of the standard computation against that computation, watched as it runs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from flashtile import io_model
from flashtile.bench.breakdown import causal_mask, standard_attention
from flashtile.testing import assert_same

#: What changes no memory.
VIEWS = {"transpose", "detach", "alias", "expand", "view", "t", "new_empty", "empty"}
#: Kernels that an operation runs on a GPU, where not one. Either of these two reads two matrices and writes one.
KERNELS = {"_softmax_backward_data": 2}


class CountBytes(TorchDispatchMode):
    """Bytes of the tensors that each operation's kernels read and write; one written in place counts twice."""

    def __init__(self):
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.__name__.partition(".")[0]
        if name not in VIEWS:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if name == "baddbmm" and (kwargs or {}).get("beta") == 0:
                given = given[1:]
            times = KERNELS.get(name, 1)
            self.read += times * sum(t.nbytes for t in given)
            self.written += times * sum(t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("causal", [False, True])
def test_flops_and_bytes_are_those_of_the_operations(causal, dropout_p):
    batch, heads, seq, head_dim = 2, 3, 48, 16
    shape = io_model.Shape(batch, heads, seq, head_dim, dtype=torch.float32, causal=causal, dropout_p=dropout_p)
    q, k, v, dout = (torch.randn(batch * heads, seq, head_dim, requires_grad=i < 3) for i in range(4))
    mask = causal_mask(seq, torch.float32, q.device) if causal else None
    with CountBytes() as count, FlopCounterMode(display=False) as flops:
        out = standard_attention(q, k, v, mask, dropout_p)
        torch.autograd.grad(out, (q, k, v), dout)
    model = io_model.standard(shape)
    assert model.flops == flops.get_total_flops()
    assert (model.bytes_read, model.bytes_written) == (count.read, count.written)


def test_the_computation_is_attention():
    q, k, v = (torch.randn(3, 20, 8, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = standard_attention(q, k, v, causal_mask(20, torch.float64, q.device))
    assert_same(out, expected)


def test_the_backward_of_softmax_multiplies_in_a_kernel_of_its_own():
    """As PyTorch's CUDA function does: the second kernel reads what the first writes, and the weights again."""
    products, softmax = (
        work
        for work in io_model.standard(io_model.Shape(1, 2, 64, 16, dropout_p=0.1)).kernels
        if work.name in ("products = dweights ∘ weights", "softmax, backward")
    )
    assert [t.tensor for t in products.transfers] == ["dweights", "weights", "products"]
    assert [t.tensor for t in softmax.transfers] == ["products", "weights", "dscores"]
    assert products.bytes == softmax.bytes == 3 * 2 * 64 * 64 * 2


def test_grouped_heads_are_repeated_and_their_gradients_summed():
    alone = io_model.standard(io_model.Shape(1, 4, 32, 16))
    grouped = io_model.standard(io_model.Shape(1, 4, 32, 16, heads_kv=1))
    whole, part = (io_model.Shape(1, heads, 32, 16).sizes["k"] for heads in (4, 1))
    assert grouped.bytes - alone.bytes == 4 * (whole + part)
    assert grouped.flops == alone.flops


def test_a_mask_costs_traffic_and_saves_no_flops():
    full, causal = (io_model.standard(io_model.Shape(1, 1, 64, 16, causal=c)) for c in (False, True))
    assert causal.flops == full.flops and causal.bytes == full.bytes + 3 * 64 * 64 * 2


def test_a_forward_alone():
    shape = io_model.Shape(1, 2, 64, 16)
    assert io_model.standard(shape, backward=False) == io_model.Computation(
        "standard", io_model.standard(shape).phase("fwd").kernels
    )
