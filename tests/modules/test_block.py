"""Blocks equal the composition of plain dropout, addition and norm, forward and gradients, in every order of norms."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashtile
from flashtile.modules import MHA, Block, LayerNorm, ParallelBlock, RMSNorm, add_norm
from flashtile.testing import assert_same
from support.models.module_cases import DEVICES, check_module
from support.running.each_case import each_case

DIM = 24
NORMS = [LayerNorm, RMSNorm, partial(nn.LayerNorm, bias=False, eps=0.1), partial(nn.RMSNorm, eps=1e-3)]


class Perceptron(nn.Module):
    """An MLP that may return its input beside its output."""

    def __init__(self, dim: int, return_residual: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.return_residual = return_residual

    def forward(self, x: Tensor) -> Any:
        out = self.down(F.gelu(self.up(x)))
        return (out, x) if self.return_residual else out


class Mixer(nn.Module):
    """Something that mixes tokens and whose arithmetic is the same on both sides of the comparison."""

    def __init__(self, dim: int, return_residual: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.return_residual = return_residual

    def forward(self, x: Tensor, shift: int = 1) -> Any:
        out = self.proj(x.roll(shift, -2)).tanh()
        return (out, x) if self.return_residual else out


def plain_norm(norm: nn.Module, x: Tensor) -> Tensor:
    if isinstance(norm, (LayerNorm, nn.LayerNorm)):
        return F.layer_norm(x, (DIM,), norm.weight, norm.bias, norm.eps)
    return F.rms_norm(x, (DIM,), norm.weight, norm.eps)


def plain_block(block: Block, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
    if block.prenorm:
        residual = hidden if residual is None else hidden + residual
        hidden = block.mixer(plain_norm(block.norm1, residual))
        if isinstance(block.mlp, nn.Identity):
            return hidden, residual
        residual = hidden + residual
        return block.mlp(plain_norm(block.norm2, residual)), residual
    mixed = block.mixer(hidden)
    hidden = plain_norm(block.norm1, (mixed[0] if block.return_residual else mixed) + hidden)
    if isinstance(block.mlp, nn.Identity):
        return (hidden,)
    out = block.mlp(hidden)
    return (plain_norm(block.norm2, (out[0] if block.return_residual else out) + hidden),)


def make(cls: type = Block, mixer: Any = Mixer, mlp: Any = Perceptron, **options: Any) -> Any:
    torch.manual_seed(0)
    block = cls(DIM, mixer, mlp, **options)
    for name, parameter in block.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0)
    return block


def run_block(block: Block, *inputs: Tensor) -> tuple[Tensor, ...]:
    out = block(*inputs)
    return out if block.prenorm else (out,)


@pytest.mark.parametrize("device", DEVICES)
@each_case("dtype", [torch.float32, torch.bfloat16])
@each_case("norm", NORMS)
@each_case("prenorm", [True, False])
def test_is_the_plain_composition(prenorm, norm, dtype, device):
    block = make(prenorm=prenorm, norm_cls=norm)
    inputs = [torch.randn(2, 7, DIM) for _ in range(1 + prenorm)]
    check_module(block, run_block, plain_block, inputs, dtype, device)
    check_module(block, run_block, plain_block, inputs[:1], dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@each_case("tied", [True, False])
@each_case("norm", NORMS)
def test_parallel(norm, tied, device):
    block = make(ParallelBlock, norm_cls=norm, tied_norm=tied)

    def plain(block, *hidden):
        residual = sum(hidden)
        second = block.norm1 if tied else block.norm2
        return block.mixer(plain_norm(block.norm1, residual)), block.mlp(plain_norm(second, residual)), residual

    for count in (1, 2, 3):
        inputs = [torch.randn(2, 7, DIM) for _ in range(count)]
        check_module(block, lambda block, *given: block(*given), plain, inputs, torch.float32, device)


def test_norms_without_weights():
    bare = partial(nn.LayerNorm, elementwise_affine=False)
    hidden = [torch.randn(2, 7, DIM) for _ in range(3)]
    block = make(ParallelBlock, norm_cls=bare)
    mixed, out, residual = block(*hidden)
    normed = F.layer_norm(sum(hidden), (DIM,))
    assert_same((mixed, out, residual), (block.mixer(normed), block.mlp(normed), sum(hidden)))
    first = make(norm_cls=bare)
    assert_same(first(hidden[0]), plain_block(first, hidden[0]))


@each_case("prenorm", [True, False])
def test_a_block_without_mlp(prenorm):
    block = make(prenorm=prenorm, mlp=nn.Identity)
    assert not any(name.startswith(("norm2", "mlp")) for name in block.state_dict())
    check_module(block, run_block, plain_block, [torch.randn(2, 7, DIM)], torch.float32)


def test_dropout_is_that_of_the_function_and_only_in_training():
    block, hidden, residual = make(resid_dropout1=0.5, resid_dropout2=0.25), *torch.randn(2, 2, 7, DIM)
    torch.manual_seed(5)
    actual = block(hidden, residual)
    torch.manual_seed(5)
    dropped = []
    for p in (0.5, 0.25):
        _, kept = flashtile.dropout_add_layer_norm(hidden, None, None, None, p, return_dropout_mask=True)
        dropped.append(kept / (1 - p))
    residual1 = hidden * dropped[0] + residual
    residual2 = block.mixer(plain_norm(block.norm1, residual1)) * dropped[1] + residual1
    assert_same(actual, (block.mlp(plain_norm(block.norm2, residual2)), residual2))
    assert_same(block.eval()(hidden, residual), plain_block(block, hidden, residual))

    parallel = make(ParallelBlock, resid_dropout=0.5)
    assert not torch.equal(parallel(hidden, residual)[2], hidden + residual)
    assert_same(parallel.eval()(hidden, residual)[2], hidden + residual)


@each_case("cls", [Block, ParallelBlock])
def test_a_residual_in_fp32(cls):
    block = make(cls, residual_in_fp32=True).bfloat16()
    hidden = torch.randn(2, 7, DIM).bfloat16()
    *out, residual = block(hidden)
    assert residual.dtype is torch.float32 and all(t.dtype is torch.bfloat16 for t in out)
    # Which a PyTorch RMS norm without an eps reads as that of float32.
    assert make(cls, residual_in_fp32=True, norm_cls=nn.RMSNorm).bfloat16()(hidden)[-1].dtype is torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Block, ParallelBlock])
def test_compiles_whole(cls):
    block, x = make(cls, mixer=partial(MHA, num_heads=3, causal=True)), torch.randn(2, 7, DIM)
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True, backend="eager")
    out, expected = compiled(x), block(x)
    assert_same(out, expected)
    for result in (out, expected):
        sum(t.square().sum() for t in result).backward()
    for mine, theirs in zip(compiled.parameters(), block.parameters(), strict=True):
        assert_same(mine.grad, theirs.grad)


class Twice(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class TwiceLayer(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked(dim: int) -> nn.Module:
    norm = nn.RMSNorm(dim)
    norm.register_forward_hook(lambda module, given, out: 2 * out)
    return norm


@each_case("norm", [Twice, TwiceLayer, hooked])
@each_case("cls", [Block, ParallelBlock])
def test_a_norm_that_does_more_than_its_class_is_called(cls, norm):
    """Its parameters do not say all that it computes."""
    block, (hidden, residual) = make(cls, norm_cls=norm), torch.randn(2, 2, 7, DIM)
    if cls is Block:
        total = hidden + residual
        after = block.mixer(block.norm1(total)) + total
        assert_same(block(hidden, residual), (block.mlp(block.norm2(after)), after))
        post = make(norm_cls=norm, prenorm=False)
        middle = post.norm1(post.mixer(hidden) + hidden)
        assert_same(post(hidden), post.norm2(post.mlp(middle) + middle))
    else:
        total = hidden + hidden + residual
        expected = block.mixer(block.norm1(total)), block.mlp(block.norm2(total)), total
        assert_same(block(hidden, hidden, residual), expected)
    narrow = block.bfloat16()
    *_, kept = narrow(hidden.bfloat16(), *[hidden.bfloat16()] * (cls is ParallelBlock), residual)
    assert kept.dtype is torch.float32  # the sum of bfloat16 and a float32 residual, normed by bfloat16 weights


def test_a_norm_of_several_dimensions_is_no_norm_of_the_last():
    hidden = torch.randn(2, 3, 16)
    norm = nn.LayerNorm((3, 16), elementwise_affine=False)
    assert_same(add_norm(norm, hidden, hidden), norm(2 * hidden))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        add_norm(nn.LayerNorm(8, elementwise_affine=False), hidden, hidden)


def test_mistakes_are_explained():
    with pytest.raises(TypeError, match="norm_cls: expected a LayerNorm or an RMSNorm"):
        make(norm_cls=nn.BatchNorm1d)
    with pytest.raises(ValueError, match="residual_in_fp32: expected False with prenorm=False"):
        make(prenorm=False, residual_in_fp32=True)
    with pytest.raises(ValueError, match="return_residual: expected False with prenorm=True"):
        make(return_residual=True)
    with pytest.raises(ValueError, match="resid_dropout2: expected 0 without an MLP"):
        make(mlp=nn.Identity, resid_dropout2=0.1)
    with pytest.raises(ValueError, match="residual: expected None with prenorm=False"):
        make(prenorm=False)(torch.randn(2, 7, DIM), torch.randn(2, 7, DIM))
    with pytest.raises(TypeError, match=r"norm: expected a LayerNorm or an RMSNorm, .* got GroupNorm"):
        add_norm(nn.GroupNorm(2, DIM), torch.randn(2, 7, DIM), None)
    replaced = make(ParallelBlock)
    replaced.norm2.eps = 0.1
    with pytest.raises(ValueError, match="norm2: expected a norm of the kind and eps of norm1"):
        replaced(torch.randn(2, 7, DIM))
    replaced.norm2 = RMSNorm(DIM, eps=replaced.norm1.eps)
    with pytest.raises(ValueError, match="norm2: expected a norm of the kind and eps of norm1"):
        replaced(torch.randn(2, 7, DIM))
    replaced.norm2 = LayerNorm(DIM, eps=replaced.norm1.eps, elementwise_affine=False)
    with pytest.raises(ValueError, match="norm2: expected a norm of the kind and eps of norm1"):
        replaced(torch.randn(2, 7, DIM))
