"""Machine code of kernels for GPUs that are not there: what a call would launch, compiled and inspected.

For attention, `Call` describes a call from outside. `plan` takes it the way that a real one takes, up to the launch;
`binary_of` compiles it. Sizes and instructions come from the tools that Triton's own wheel carries.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

import flashtile
from flashtile._backends.allocate import contiguous_strides
from flashtile._backends.devices import KNOWN_DEVICES, DeviceFacts
from flashtile._backends.launch import KernelSource, Plan, compile_kernel
from flashtile._backends.pipeline import Kernel
from flashtile.ops.attention import call as description
from flashtile.ops.attention.call import AuxFacts, Phase, TensorFacts
from flashtile.ops.attention.gpu.plan import PortableKernel, plan_kernel
from flashtile.ops.attention.gpu.tile_configs import KernelName, kernel_tiles
from flashtile.ops.attention.hopper import launch as hopper_launch
from flashtile.ops.attention.hopper.configs import HopperConfig
from flashtile.ops.attention.hopper.tuned_rows import forward_config
from flashtile.ops.attention.spec import NOTHING_WANTED, AttentionSpec, Origin, Wanted, out_dtype
from flashtile.ops.attention.triton import launch as triton_launch
from flashtile.testing.cases import AttentionCase, RelativeScore, make_inputs
from support.compilation.control_flow import wrong_code
from support.running.selection import full_name

#: NVIDIA's compiler and tools, of Triton's own wheel.
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

Case = TypeVar("Case")

#: Full names of the kernels that this process has compiled.
COMPILED: set[str] = set()


class WrongCodeError(AssertionError):
    """A kernel's machine code is wrong, or its PTX is such that some compilers would make it wrong."""


def compile_source(source: KernelSource, device: DeviceFacts) -> CompiledKernel:
    """Compiles a kernel as a launch does, and searches its code for faults (`control_flow`).

    Every test that compiles a kernel calls this function. So does every launch of a test on a GPU (`conftest`).

    Raises:
        WrongCodeError: something was found.
    """
    compiled = compile_kernel(source, device)
    COMPILED.add(full_name(source.function))
    search_code(compiled, device)
    return compiled


def search_code(compiled: CompiledKernel, device: DeviceFacts) -> None:
    """Searches a kernel's code for faults of ptxas."""
    if device.is_cuda:
        found = wrong_code(instructions(compiled.asm), compiled.asm["ptx"])
        if found:
            raise WrongCodeError(f"{compiled.metadata.name} for {device.arch}: {'; '.join(found)}")


def compiler_input(source: KernelSource, device: DeviceFacts) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    """What `compile_kernel` gives to Triton, which compiles nothing here: what is compiled, for what, and how."""
    with mock.patch.object(triton, "compile", lambda ast, target, options, **_: (ast, target, options)):
        return compile_kernel(source, device)


class Call(NamedTuple):
    """A call as the launch sees it: what is not named is contiguous, aligned and absent.

    Attributes:
        sequences: number of sequences of a packed call (`seq_q`, `seq_k` are then totals), None for a dense one.
        longest: queries and keys of the longest of them; None: as many as there are.
        row_stride: distance of the rows of q, where it is not contiguous.
        misalignment: the addresses of all inputs modulo 16.
        hides_rows: queries and keys of a packed call have lengths of their own.
        descales: with factors of 8-bit inputs.
        score_mod: a score function; all that it captures and that learns gets its gradient.
        deterministic: sums are added up in a fixed order.
        multiprocessors: of a GPU of sm_90: few, so that no call has too few tiles for it.
    """

    head_dim: int = 64
    head_dim_v: int = 64
    dtype: torch.dtype = torch.bfloat16
    seq_q: int = 4096
    seq_k: int = 4096
    batch: int = 2
    heads: int = 4
    heads_kv: int = 4
    window_left: int | None = None
    window_right: int | None = None
    top_left: bool = False
    dropout_p: float = 0.0
    sequences: int | None = None
    longest: int | None = None
    index_dtypes: tuple[torch.dtype, torch.dtype] = (torch.int32, torch.int32)
    key_lengths_dtype: torch.dtype | None = None
    has_dlse: bool = False
    row_stride: int | None = None
    misalignment: int = 0
    allow_tf32: bool = False
    softcap: float = 0.0
    bias: TensorFacts | None = None
    mask: TensorFacts | None = None
    alibi: int = 0
    sinks: bool = False
    sums_slopes: bool = False
    hides_rows: bool = False
    block_tile: tuple[int, int] | None = None
    patterns: bool = True
    origin: Origin | None = None
    max_scores: bool = False
    descales: bool = False
    score_mod: flashtile.ScoreFunction | None = None
    deterministic: bool = False
    multiprocessors: int = 1


def split_options(case: AttentionCase, dtype: torch.dtype, **others: Any) -> Call:
    """The call of a case, whose tensors are allocated one by one, so that their addresses are aligned. `others`: fields
    of `Call` that a case does not have."""
    inputs = make_inputs(replace(case, dtype=dtype))
    known = {"softcap", "dropout_p", "causal", "window", "align", "scale"}
    assert case.arguments.keys() <= known, f"expected arguments among {known}, got {case.arguments}"
    tables = {
        name: TensorFacts(given.dtype, tuple(given.shape), given.stride())
        for name, given in inputs.tensors.items()
        if name in ("bias", "mask")
    }
    left, right = case.arguments.get("window", (None, 0 if case.arguments.get("causal") else None))
    function = None
    if case.score_mod:
        table = inputs.tensors["score_mod"].table.requires_grad_("score_mod" in case.learned)
        function = flashtile.trace_score_mod(RelativeScore(table))
    call = Call(
        case.head_dim,
        case.head_dim_v,
        dtype,
        len(inputs.q.flatten(0, -3)),
        len(inputs.k.flatten(0, -3)),
        heads=case.heads,
        heads_kv=case.heads_kv,
        window_left=left,
        window_right=right,
        top_left=case.arguments.get("align") == "top_left",
        dropout_p=case.arguments.get("dropout_p", 0.0),
        has_dlse=True,
        softcap=case.arguments.get("softcap", 0.0),
        alibi=len(case.alibi_slopes or ""),
        sums_slopes="alibi_slopes" in case.learned,
        sinks=case.sinks,
        block_tile=case.block_mask,
        key_lengths_dtype=torch.int32 if case.key_lengths else None,
        score_mod=function,
        **tables,
        **others,
    )
    if case.packed:
        return call._replace(sequences=len(case.lengths_q or ()))
    return call._replace(batch=case.batch, seq_q=case.seq_q, seq_k=case.seq_k)


def portable_calls(cases: Mapping[str, AttentionCase], arch: str) -> dict[str, tuple[KernelName, Call]]:
    """Kernels and calls of cases in float32 and bfloat16, with sums in any order and in a fixed one: those that differ
    in machine code, by names."""
    calls = {
        f"{name} {str(dtype).removeprefix('torch.')}{' in order' if ordered else ''}": split_options(
            case, dtype, deterministic=ordered
        )
        for name, case in cases.items()
        for dtype in (torch.float32, torch.bfloat16)
        for ordered in (False, True)
    }
    kernels: tuple[KernelName, ...] = ("forward", "dq", "dkdv")
    found: dict[str, tuple[KernelName, Call]] = {}
    for kernel in kernels:
        sources = {name: plan(kernel, KNOWN_DEVICES[arch], call).kernel.source for name, call in calls.items()}
        found |= {f"{kernel} {name}": (kernel, calls[name]) for name in differing(sources)}
    return found


def call_on(arch: str, call: Any) -> Any:
    """A call as an architecture can have it: with float16 in place of bfloat16, which sm_75 does not know."""
    if arch != "sm_75":
        return call
    wide = {name for name, value in call._asdict().items() if value is torch.bfloat16}
    return call._replace(**dict.fromkeys(wide, torch.float16))


def described(source: KernelSource) -> dict[str, Any]:
    """What decides a kernel's machine code, by its parameters' names: the value of a constant, None of what is not
    there, and else the type and a power of two that divides it, such as "i64" or "*bf16 % 16"."""
    run_time = {
        name: of if multiple == 1 else f"{of} % {multiple}"
        for name, of, multiple in zip(source.names, source.types, source.multiples, strict=True)
        if of != "constexpr"
    }
    return {**source.constants, **run_time}


def passed_by(plan: Plan | Kernel) -> dict[str, Any]:
    """What every launch of a kernel passes, by the names of the parameters."""
    plan = plan.plan(torch.device("cuda", 0)) if isinstance(plan, Kernel) else plan
    return dict(zip(plan.source.names[-len(plan.scalars) :], plan.scalars))


def shares_of(plan: Any) -> int:
    """In how many parts the kernels of a plan store dk and dv."""
    total = (plan.pipeline.plans if hasattr(plan, "pipeline") else plan.following).get("shares")
    return 1 if total is None else passed_by(total)["shares"]


def differing(sources: Mapping[Case, Any]) -> list[Case]:
    """The cases whose source none before them has: each binary is compiled and looked at once."""
    found: list[tuple[Case, Any]] = []
    for case, source in sources.items():
        if all(source != earlier for _, earlier in found):
            found.append((case, source))
    return [case for case, _ in found]


#: Architectures whose compilers have the same instructions as another's.
_FAMILIES = {"sm_86": "sm_80", "sm_89": "sm_80", "sm_120": "sm_80", "gfx950": "gfx942"}


#: For kernels that multiply no matrices, which take turns: sm_90, and another NVIDIA and an AMD architecture.
TURNS = (("sm_90", "sm_75", "gfx942"), ("sm_90", "sm_80", "gfx1100"))


def family(arch: str) -> str:
    """The architecture that stands for all that have the same instructions."""
    return _FAMILIES.get(arch, arch)


def once_for_each_family(sources: Mapping[Case, tuple[str, str, KernelSource]]) -> dict[Case, int]:
    """The cases that tests compile (`with_news`), each kernel for each family at least once, with the least on-chip
    memory of an architecture that shares the source. `sources`: the family, the architecture, and what is compiled."""
    memory: dict[Case, int] = {}
    firsts: list[tuple[str, KernelSource, Case]] = []
    for case, (of, arch, source) in sources.items():
        mine = KNOWN_DEVICES[arch].shared_memory
        first = next((first for other, earlier, first in firsts if other == of and earlier == source), None)
        if first is None:
            firsts.append((of, source, case))
            memory[case] = mine
        else:
            memory[first] = min(memory[first], mine)
    compiled = set()
    for function in {source.function: None for _, source, _ in firsts}:
        mine_of = {case: (of, source) for of, source, case in firsts if source.function is function}
        sources_of = {case: source for case, (_, source) in mine_of.items()}
        compiled |= {*with_news(sources_of, {case: of for case, (of, _) in mine_of.items()})}
    return {case: least for case, least in memory.items() if case in compiled}


def once_in_families(cases: Iterable[tuple[str, ...]], source_of: Callable[..., KernelSource]) -> dict[Any, int]:
    """`once_for_each_family` of cases that begin with an architecture; `source_of(*case)` is what is compiled."""
    return once_for_each_family({case: (family(case[0]), case[0], source_of(*case)) for case in cases})


def with_news(sources: Mapping[Case, KernelSource], rows: Mapping[Case, Any] | None = None) -> list[Case]:
    """The cases that tests compile: together, they have each type and value of each parameter (`described`), and each
    row of the table (`rows`), of which the first case stays. `tools/compile_versions.py` compiles the others too."""
    mine = {case: facts(source) | ({("row", repr(rows[case]))} if rows else set()) for case, source in sources.items()}
    known: set[tuple[str, str]] = set()
    found: list[Case] = []
    for case in sources:
        if not mine[case] <= known:
            found.append(case)
            known |= mine[case]
    first_of_row: dict[str, Case] = {}
    for case in found:
        first_of_row.setdefault(repr(rows[case]) if rows else "", case)
    # Later cases may have all that an earlier one brought.
    count = Counter(fact for case in found for fact in mine[case])
    for case in [*reversed(found)]:
        if case not in first_of_row.values() and all(count[fact] > 1 for fact in mine[case]):
            found.remove(case)
            count.subtract(mine[case])
    return found


#: Constants that are sizes and strides: widths of heads and rows, chunks, tiles, numbers from a row to the next.
_SIZES = re.compile(r"HEAD_DIM|WIDTH|HALF|APART|ROW|row|TILE_|TILES|CHUNKS|BLOCK_REST|PAGE_SIZE|_strides|^[DE]$")
#: How many tiles are on chip, which follows from the widths.
_PLACES = re.compile(r"PLACES|STAYING")


def facts(source: KernelSource) -> set[tuple[str, str]]:
    """The mechanisms of a kernel: what `described` says of each parameter. Sizes count by their class (`_size_class`),
    and fp16 and bf16, of which one stands for the other, once for a kernel and not for each tensor."""
    found = set()
    for name, value in described(source).items():
        if _PLACES.search(name):
            continue
        text = _size_class(value) if type(value) is int and _SIZES.search(name) else repr(value)
        if isinstance(value, str) and (moves := value.startswith("tensordesc")) | value.startswith("*"):
            found |= {("half", half) for half in re.findall("bf16|fp16", text)}
            text = re.sub("bf16|fp16", "half", text)
            if moves:
                found.add(("moved", text))  # by whichever tensor
                text = "moved"
        found.add((name, text))
    return found


def _size_class(size: int) -> str:
    """How many bits a size above 32 has, and which power of two up to 16 divides it: what tiles and addresses depend
    on."""
    return f"{max(size.bit_length(), 6)} bits, % {math.gcd(size, 16)}"


def described_call(phase: Phase, call: Call, device: DeviceFacts, multiprocessors: int = 132) -> description.Call:
    """The description of a call on `device`, which need not be here."""
    q_shape, k_shape, v_shape = _shapes(call)
    tensors = (
        _tensor(call.dtype, q_shape, call.row_stride), _tensor(call.dtype, k_shape), _tensor(call.dtype, v_shape)
    )  # fmt: skip
    q, k, v = (tensor._replace(misalignment=call.misalignment) for tensor in tensors)
    backward = phase == "backward"
    return description.Call(
        "auto",
        phase,
        _spec(call),
        q,
        k,
        v,
        aux_of(call),
        description.Machine("cuda", device, multiprocessors),
        torch.device("cuda", 0),
        tf32=call.allow_tf32,
        same_lengths=not call.hides_rows,
        dout=_tensor(out_dtype(call.dtype), (*q_shape[:-1], call.head_dim_v)) if backward else None,
        has_dlse=backward and call.has_dlse,
        wanted=Wanted(alibi_slopes=call.sums_slopes, captured=_learned(call)) if backward else NOTHING_WANTED,
    )


def plan(kernel: KernelName, device: DeviceFacts, call: Call) -> PortableKernel:
    """A portable kernel of a call on `device`."""
    phase: Phase = "backward" if kernel in ("dq", "dkdv", "dbias") else kernel  # type: ignore[assignment]
    described = described_call(phase, call, device)
    name, tiles = kernel_tiles(kernel, described)
    return plan_kernel(triton_launch.KERNELS[name], name, tiles, described)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], row_stride: int | None = None) -> TensorFacts:
    return TensorFacts(dtype, tuple(shape), _strides(shape, row_stride))


def aux_of(call: Call) -> AuxFacts:
    """The description of a call's side inputs. Of a block mask's lists nothing is looked up."""

    def contiguous(dtype: torch.dtype, *shape: int) -> TensorFacts:
        return TensorFacts(dtype, shape, contiguous_strides(shape))

    packed, tile = call.sequences is not None, call.block_tile
    lengths = [contiguous(dtype, (call.sequences or 0) + 1) if packed else None for dtype in call.index_dtypes]
    factor = TensorFacts(torch.float32, (2, call.heads), (0, 0)) if call.descales else None
    return AuxFacts(
        *lengths,
        call.longest or call.seq_q,
        call.longest or call.seq_k,
        key_lengths=None if call.key_lengths_dtype is None else contiguous(call.key_lengths_dtype, 2),
        dropout_seed=contiguous(torch.int64, 2) if call.dropout_p > 0 else None,
        bias=call.bias,
        mask=call.mask,
        alibi_slopes=contiguous(torch.float32, *(2, call.heads)[2 - call.alibi :]) if call.alibi else None,
        sinks=contiguous(torch.float32, call.heads) if call.sinks else None,
        block_lists=None if tile is None else contiguous(torch.int32, 10**6),
        block_patterns=None if tile is None else contiguous(torch.uint8, int(call.patterns), *tile),
        descale_q=factor,
        descale_k=factor,
        descale_v=factor,
        captured=tuple(contiguous(tensor.dtype, *tensor.shape) for tensor in _captured(call)),
    )


def _spec(call: Call) -> AttentionSpec:
    return AttentionSpec(
        call.head_dim**-0.5,
        call.window_left,
        call.window_right,
        call.top_left,
        call.dropout_p,
        call.deterministic,
        softcap=call.softcap,
        block_shape=None if call.block_tile is None else (1, 1, *call.block_tile),
        origin=call.origin,
        returns_max_scores=call.max_scores,
        score_program=None if call.score_mod is None else call.score_mod.program,
    )


def _captured(call: Call) -> tuple[torch.Tensor, ...]:
    return () if call.score_mod is None else tuple(call.score_mod.captured)


def _learned(call: Call) -> tuple[bool, ...]:
    return tuple(tensor.requires_grad for tensor in _captured(call))


def _shapes(call: Call) -> tuple[tuple[int, ...], ...]:
    """Shapes of q, k and v."""
    outer = () if call.sequences is not None else (call.batch,)
    return (
        (*outer, call.seq_q, call.heads, call.head_dim),
        (*outer, call.seq_k, call.heads_kv, call.head_dim),
        (*outer, call.seq_k, call.heads_kv, call.head_dim_v),
    )


def _strides(shape: tuple[int, ...], row_stride: int | None = None) -> tuple[int, ...]:
    *outer, rows, heads, head_dim = shape
    row_stride = row_stride or heads * head_dim
    return (*(rows * row_stride for _ in outer), row_stride, head_dim, 1)


def described_on_hopper(call: Call, phase: Phase = "forward") -> description.Call:
    """The description of a call on Hopper."""
    multiprocessors = call.multiprocessors if phase == "forward" else 132
    return described_call(phase, call, KNOWN_DEVICES["sm_90"], multiprocessors)


def hopper_config(call: Call) -> HopperConfig:
    """How the forward of the Hopper kernels is cut for a call."""
    return forward_config(described_on_hopper(call))


def hopper_plan(call: Call) -> hopper_launch.ForwardPlan:
    """The plan of a forward of the Hopper kernels."""
    return hopper_launch.plan_forward(described_on_hopper(call))


def float32_forward_sources(call: Call) -> dict[str, KernelSource]:
    """The kernels of a forward of float32 on Hopper."""
    plan = hopper_plan(call)
    return {"parts": plan.pipeline.plans["parts_q"].source, "forward": plan.kernel.source}


def apart_backward_sources(call: Call) -> dict[str, KernelSource]:
    """The kernels of a backward on Hopper whose gradients have one each, by what they compute: of wide heads, or of
    float32."""
    plans = hopper_launch.plan_backward(described_on_hopper(call, "backward")).pipeline.plans
    names = {"begin": "begin", "parts": "parts_q", "dv": "dv", "dk": "dk", "dq": "dq"}
    return {name: plans[of].source for name, of in names.items() if of in plans}


class Binary(NamedTuple):
    """A compiled kernel.

    Attributes:
        shared_memory: bytes of on-chip memory of a program.
        spilled: bytes of a thread's registers that lie in device memory (NVIDIA's stack, AMD's scratch).
        asm: Triton's stages by name: "ttgir", "ptx", "cubin", "amdgcn", ...
        descriptors: what Triton notes of each tensor descriptor.
    """

    shared_memory: int
    spilled: int
    asm: dict[str, str | bytes]
    descriptors: list[dict[str, Any]] | None = None


def binary_of(source: KernelSource, device: DeviceFacts) -> Binary:
    """Compiles a kernel (`compile_source`)."""
    return read_binary(compile_source(source, device), device)


def read_binary(compiled: CompiledKernel, device: DeviceFacts) -> Binary:
    found = compiled.metadata
    spilled = spilled_bytes(compiled.asm, device)
    return Binary(found.shared, spilled, compiled.asm, getattr(found, "tensordesc_meta", None))


#: Whether this is the Triton with which the tests' limits were measured: how many bytes a thread spills, and which
#: kernels' products ptxas serialises. Others assign registers in their own way (decisions/compilers.md).
IS_MEASURED = triton.__version__.startswith("3.6.")


def check_fit(binary: Binary, shared_memory: int, spilled: int = 0) -> None:
    """A kernel takes no more on-chip memory, and spills no more bytes."""
    assert binary.shared_memory <= shared_memory
    check_spills(binary, spilled)


def check_spills(binary: Binary, most: int) -> None:
    assert binary.spilled <= most or not IS_MEASURED


def check_products(binary: Binary, serialised: bool = False) -> None:
    """ptxas serialises a kernel's products, or it does not."""
    assert serialises_products(binary) is serialised or not IS_MEASURED


def check_barriers(binary: Binary) -> None:
    """Barriers lie side by side: no tile is laid over one, as the compiler does where nobody waits for it. There, what
    made the barrier may come after what TMA loads."""
    ptx = str(binary.asm["ptx"])
    places = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%\w+)\]", ptx)
    offsets = [int(found[1]) if (found := re.search(rf"add\.s32 \t{of}, %\w+, (\d+);", ptx)) else 0 for of in places]
    assert len(set(offsets)) == len(offsets) > 0, "two barriers in one place"
    assert max(offsets) - min(offsets) < 2048, f"a barrier apart from the others: {sorted(offsets)}"


def sharing_a_multiprocessor(source: KernelSource) -> int:
    """How many programs the registers of a multiprocessor are divided among, as far as a kernel says."""
    return 65536 // (source.max_registers * source.num_warps * 32) if source.max_registers else 1


def call_source(kernel: KernelName, arch: str, call: Call) -> KernelSource:
    """What a call launches on an architecture."""
    return plan(kernel, KNOWN_DEVICES[arch], call).kernel.source


def spilled_bytes(asm: dict[str, str | bytes], device: DeviceFacts) -> int:
    """Bytes of a thread's registers that lie in device memory."""
    return _stack(asm["cubin"]) if device.is_cuda else _scratch(asm["amdgcn"])


def instructions(asm: dict[str, str | bytes]) -> str:
    """NVIDIA's machine instructions."""
    return disassemble(asm["cubin"], jumps_by_table="brx.idx" in asm["ptx"])


@functools.lru_cache(maxsize=2)
def disassemble(cubin: bytes, jumps_by_table: bool = True) -> str:
    """A listing. The targets of jumps by a table take nvdisasm an analysis, of which a third of its time goes into; a
    listing without such jumps is the same without it."""
    return _run_tool("nvdisasm", "-c" if jumps_by_table else "-c -ndf", cubin)


def _stack(cubin: bytes) -> int:
    (stack,) = re.findall(r"STACK:(\d+)", _run_tool("cuobjdump", "-res-usage", cubin))
    return int(stack)


def registers(binary: Binary) -> int:
    """Registers of a thread (AMD: vector registers)."""
    if "amdgcn" in binary.asm:
        (found,) = re.findall(r"\.vgpr_count:\s*(\d+)", str(binary.asm["amdgcn"]))
    else:
        (found,) = re.findall(r"REG:(\d+)", _run_tool("cuobjdump", "-res-usage", bytes(binary.asm["cubin"])))
    return int(found)


def _scratch(assembly: str) -> int:
    (scratch,) = re.findall(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    return int(scratch)


def sass(binary: Binary) -> str:
    return instructions(binary.asm)


def serialises_products(binary: Binary) -> bool:
    """Whether ptxas makes matrix products wait for one another (its warnings C7510 to C7520).

    Then each of a chain of instructions is committed by itself and awaited, else only the last one: here, of more than
    half of all instructions.
    """
    products = [line for line in sass(binary).splitlines() if "GMMA." in line]
    return 2 * sum("gsb0" in line for line in products) > len(products)


def _run_tool(name: str, options: str, data: bytes) -> str:
    """What one of NVIDIA's tools says of a file of `data`, on both its outputs."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        command = [str(TOOLS / name), *options.split(), file.name]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
