"""The standard computation: each step reads and writes whole matrices of scores.

The steps are those of PyTorch's own functions, called as `benchmarks/io_counters.py` does::

    scores  = torch.baddbmm(empty, q, kᵀ, beta=0, alpha=scale)
    scores += mask                                                  causal, or with a window
    weights = softmax(scores)
    kept    = dropout(weights)                                      with dropout
    out     = kept @ v

and their gradients as autograd computes them, in the kernels that run on a GPU. A matrix is larger than any cache, so
that each kernel reads and writes device memory; the mask, which all of them share, stays in the cache.
"""

from __future__ import annotations

from flashtile.io_model.shape import Shape
from flashtile.io_model.work import Computation, Transfer, Work


def standard(shape: Shape, *, backward: bool = True) -> Computation:
    """The standard computation of a call, in the dtype of its inputs.

    Args:
        shape: the call.
        backward: include the gradients of q, k and v.
    """
    steps = _Steps(shape)
    kernels = [*steps.repeated_heads(), *steps.forward()]
    if backward:
        kernels += [*steps.backward(), *steps.summed_heads()]
    return Computation("standard", tuple(kernels))


class _Steps:
    """The kernels of each part, with what they share: sizes of tensors by name."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        sizes = shape.sizes
        group = shape.heads // shape.kv_heads
        matrix = shape.pairs * shape.dtype.itemsize
        self._given = {name: sizes[name] for name in ("k", "v")}
        self._sizes = {
            **{name: sizes[of] for name, of in (("q", "q"), ("dq", "q"), ("out", "out"), ("dout", "out"))},
            **{name: group * sizes[of] for name, of in (("k", "k"), ("dk", "k"), ("v", "v"), ("dv", "v"))},
            **dict.fromkeys(("scores", "weights", "kept", "dkept", "dweights", "products", "dscores"), matrix),
            "mask": shape.seq_q * shape.keys * shape.dtype.itemsize,
            "keeps": shape.pairs,  # a byte for each weight
        }

    def _work(self, name: str, phase: str, reads: str, writes: str, **arithmetic: float) -> Work:
        moved = [Transfer(tensor, self._sizes[tensor]) for tensor in reads.split()]
        moved += [Transfer(tensor, self._sizes[tensor], writes=True) for tensor in writes.split()]
        return Work(name, phase, self._shape.dtype, tuple(moved), **arithmetic)

    def repeated_heads(self) -> list[Work]:
        """Keys and values once for each query head that reads them."""
        if self._shape.heads == self._shape.kv_heads:
            return []
        moved = [Transfer(name, size) for name, size in self._given.items()]
        moved += [Transfer(f"{name}, repeated", self._sizes[name], writes=True) for name in self._given]
        return [Work("repeat k and v", "fwd", self._shape.dtype, tuple(moved))]

    def summed_heads(self) -> list[Work]:
        """The gradients of what was repeated."""
        if self._shape.heads == self._shape.kv_heads:
            return []
        moved = [Transfer(f"d{name}, repeated", self._sizes[name]) for name in self._given]
        moved += [Transfer(f"d{name}", size, writes=True) for name, size in self._given.items()]
        return [Work("sum dk and dv", "bwd", self._shape.dtype, tuple(moved))]

    def forward(self) -> list[Work]:
        shape = self._shape
        product, product_v = self._products()
        kept = "kept" if shape.dropout_p else "weights"
        found = [self._work("scores = scale · q kᵀ", "fwd", "q k", "scores", flops=product)]
        if shape.banded:
            found.append(self._work("scores + mask", "fwd", "scores mask", "scores"))
        found.append(self._work("softmax", "fwd", "scores", "weights", exponentials=shape.pairs))
        if shape.dropout_p:
            found.append(self._work("dropout", "fwd", "weights", "kept keeps", words=shape.pairs))
        return [*found, self._work("out = weights · v", "fwd", f"{kept} v", "out", flops=product_v)]

    def backward(self) -> list[Work]:
        product, product_v = self._products()
        dropped = self._shape.dropout_p > 0
        kept, dkept = ("kept", "dkept") if dropped else ("weights", "dweights")
        found = [
            self._work("dweights = dout · vᵀ", "bwd", "dout v", dkept, flops=product_v),
            self._work("dv = weightsᵀ · dout", "bwd", f"{kept} dout", "dv", flops=product_v),
        ]
        if dropped:
            found.append(self._work("dropout, backward", "bwd", "dkept keeps", "dweights"))
        return [
            *found,
            *self._softmax_backward(),
            self._work("dq = dscores · k", "bwd", "dscores k", "dq", flops=product),
            self._work("dk = dscoresᵀ · q", "bwd", "dscores q", "dk", flops=product),
            self._work("scale · dq and dk", "bwd", "dq dk", "dq dk"),
        ]

    def _softmax_backward(self) -> list[Work]:
        """`dscores = products - weights · sum(products)` with `products = dweights ∘ weights`, which PyTorch's CUDA
        function makes in a kernel of their own. No flops: those of matrix products alone are counted."""
        return [
            self._work("products = dweights ∘ weights", "bwd", "dweights weights", "products"),
            self._work("softmax, backward", "bwd", "products weights", "dscores"),
        ]

    def _products(self) -> tuple[float, float]:
        """FLOPs of a product over head_dim, and of one over head_dim_v."""
        return 2.0 * self._shape.pairs * self._shape.head_dim, 2.0 * self._shape.pairs * self._shape.dim_v
