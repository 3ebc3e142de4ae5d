"""The checks of `flashtile doctor --check-kernels`: layouts that are what they say, and kernels that pass them."""

from typing import Any

import pytest
import torch

import flashtile
from flashtile.testing.cases import make_inputs
from flashtile.testing.kernel_checks import ODD_ADDRESS, ODD_STRIDE, KernelCheck, Layout, kernel_checks
from support.running.each_case import each_case

_FP16, _BF16 = torch.float16, torch.bfloat16
#: The function of each operation.
_FUNCTIONS = {
    "attention": "attention",
    "cache": "attention_with_kv_cache",
    "norm": "dropout_add_layer_norm",
    "rotary": "apply_rotary",
    "softmax": "scaled_masked_softmax",
    "cross-entropy": "cross_entropy",
    "dense": "fused_mlp",
}


def _parameters(checks: list[KernelCheck]) -> list:
    return [pytest.param(check, id=f"{check.operation}: {check.name}") for check in checks]


def _first_of_each(checks: list[KernelCheck]) -> list[KernelCheck]:
    return list({check.operation: check for check in reversed(checks)}.values())


@each_case("layout", [ODD_STRIDE, ODD_ADDRESS, Layout(3, 5), Layout()])
@each_case("dtype", [_BF16, torch.bool])
def test_a_layout_keeps_values_and_poisons_the_rest(layout, dtype):
    tensor = (torch.randn(2, 3, 4) > 0).to(dtype)
    placed = layout.place(tensor)
    assert torch.equal(placed, tensor)
    assert placed.storage_offset() == layout.before
    assert placed.stride() == (3 * (4 + layout.behind_rows), 4 + layout.behind_rows, 1)
    storage = torch.as_strided(placed, (placed.untyped_storage().size() // placed.element_size(),), (1,), 0)
    outside = torch.ones_like(storage, dtype=torch.bool)
    torch.as_strided(outside, placed.shape, placed.stride(), layout.before).fill_(False)
    assert outside.sum() == layout.before + 6 * layout.behind_rows
    assert (storage[outside] if dtype is torch.bool else storage[outside].isnan()).all()


@pytest.mark.parametrize("operation", _FUNCTIONS)
def test_cpu(operation):
    for check in kernel_checks("cpu"):
        if check.operation == operation:
            check.run(torch.device("cpu"))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "check", _parameters([*_first_of_each(kernel_checks("triton", _FP16)), kernel_checks("split", _FP16)[-1]])
)
def test_interpreted(check):
    check.run(torch.device("cpu"))


@pytest.mark.parametrize("check", _parameters(_first_of_each(kernel_checks("cpu"))))
def test_one_wrong_element_is_seen(check, monkeypatch):
    name = _FUNCTIONS[check.operation]
    function = getattr(flashtile, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        results = function(*arguments, **options)
        if options["backend"] == "reference":
            return results
        out, *others = results if isinstance(results, tuple) else (results,)
        error = torch.zeros_like(out)
        error.view(-1)[-1] = 1
        return (out + error, *others) if others else out + error

    monkeypatch.setattr(flashtile, name, wrong)
    with pytest.raises(AssertionError, match="largest error"):
        check.run(torch.device("cpu"))


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "gfx942"])
def test_a_backend_serves_what_it_is_checked_with(arch, monkeypatch):
    """On a GPU `doctor` checks each backend that has kernels for it, "split" too."""
    pytest.importorskip("rich")
    from flashtile.cli import doctor

    monkeypatch.setattr(doctor, "default_device", lambda: arch)
    backends = doctor.backends_to_check()
    assert set(backends) == {"split", "triton"} | ({"hopper"} if arch == "sm_90" else set())
    for backend, check in [(name, check) for name in backends for check in kernel_checks(name)]:
        if check.operation != "attention":
            assert backend == "triton"
            continue
        case = check.run.args[0]
        inputs = make_inputs(case, "meta")
        arguments = {**inputs.tensors, **case.keywords(), "backend": backend, "device": arch}
        assert flashtile.explain(inputs.q, inputs.k, inputs.v, **arguments).backend == backend, check.name


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(kernel_checks("split")) // 8 + 1))
def test_gpu_split(number):
    for check in kernel_checks("split")[8 * number : 8 * number + 8]:
        check.run(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [_BF16, _FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("number", range(len(kernel_checks("triton")) // 8 + 1))
def test_gpu(number, dtype):
    for check in kernel_checks("triton", dtype)[8 * number : 8 * number + 8]:
        check.run(torch.device("cuda"))


@each_case("dtype, other", [(_BF16, "float16"), (_FP16, "bfloat16")])
def test_hopper_checks_of_the_other_dtype(dtype, other):
    """Heads of 192 in float16 once had wrong gradients where they are added in order, or stored, and nowhere else."""
    names = [check.name for check in kernel_checks("hopper", dtype) if f"d192:128-{other}-" in check.name]
    assert sorted(name.partition(f"{other}-")[2] for name in names) == ["causalTrue", "causalTrue-deterministicTrue"]


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [_BF16, _FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("number", range(len(kernel_checks("hopper")) // 8 + 1))
def test_hopper(number, dtype):
    for check in kernel_checks("hopper", dtype)[8 * number : 8 * number + 8]:
        check.run(torch.device("cuda"))
