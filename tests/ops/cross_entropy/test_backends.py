"""The backends of the cross-entropy against the fp64 oracle: in Triton's interpreter, and on a GPU."""

from dataclasses import replace

import pytest
import torch

import flashtile
from support.companions.cross_entropy_cases import CrossEntropyCase, check, parameters
from support.running.places import places


@places("interpreted", "gpu")
@pytest.mark.parametrize("case", parameters())
def test_kernels_agree_with_the_oracle(case, backend, device):
    check(case, backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "padded", "offset"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [7, 1000, 4096, 32000, 50257, 50304, 128256, 256000])
def test_gpu_over_many_rows(width, dtype, layout):
    case = CrossEntropyCase((3, 71, width), dtype, layout=layout, lse_square_scale=1e-4)
    check(case, "triton", "cuda")
    check(replace(case, label_smoothing=0.1, reduction="none", label_dtype=torch.int32), "triton", "cuda")
    if layout == "contiguous":
        check(replace(case, inplace_backward=True, logit_scale=0.7), "triton", "cuda")


@pytest.mark.gpu
def test_gpu_offsets_pass_2_to_the_31():
    rows, columns = 2**31 // 50257 + 3, 50257
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    logits[-2:] = torch.randn(2, columns, device="cuda").bfloat16()
    labels = torch.full((rows,), 7, device="cuda")
    leaf = logits.requires_grad_()
    losses = flashtile.cross_entropy(leaf, labels, reduction="none", inplace_backward=True)
    lead = (rows - 2) * columns % 8  # sums of a row begin at 16 bytes, so their bits depend on where it lies
    alike = torch.empty(lead + 2 * columns, dtype=torch.bfloat16, device="cuda")[lead:].view(2, columns)
    last = alike.copy_(logits[-2:].detach()).requires_grad_()
    expected = flashtile.cross_entropy(last, labels[-2:], reduction="none")
    assert torch.equal(losses[-2:], expected)
    (dlogits,) = torch.autograd.grad(losses, leaf, torch.ones_like(losses))
    (dlast,) = torch.autograd.grad(expected, last, torch.ones_like(expected))
    assert torch.equal(dlogits[-2:], dlast)


@pytest.mark.gpu
def test_gpu_means_are_the_same_in_every_run():
    logits = torch.randn(9001, 1000, device="cuda")
    labels = torch.randint(1000, (9001,), device="cuda")
    losses = [flashtile.cross_entropy(logits, labels, label_smoothing=0.1) for _ in range(3)]
    assert all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.gpu
def test_gpu_does_not_synchronise():
    logits = torch.randn(64, 1000, device="cuda", requires_grad=True)
    labels = torch.randint(1000, (64,), device="cuda")
    flashtile.cross_entropy(logits, labels).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashtile.cross_entropy(logits, labels, return_z_loss=True)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
