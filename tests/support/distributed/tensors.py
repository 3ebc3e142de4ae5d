"""What processes do in tests of DTensors and FSDP2: each gets a mesh of all of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import flashtile
from flashtile.distributed import context_parallel_attention, row_orders, tensor_parallel_plan, vocabulary_loss
from flashtile.models import GPT, BertConfig, BertForPreTraining
from flashtile.modules import (
    MHA,
    Block,
    CrossEntropyLoss,
    FusedDense,
    FusedMlp,
    GatedMlp,
    LayerNorm,
    ParallelBlock,
    RMSNorm,
)
from flashtile.ops.common.backends import BackendChoice, Backends
from support.distributed.models import CONFIGS, tokens
from support.distributed.models import model as of_seed
from support.distributed.processes import refusal
from support.running.public_calls import CALLS

#: A function, and each of its tensors with the dimension along which each dimension of the mesh shards it: None for
#: none, "sum" for a part of a sum.
Case = tuple[Callable[..., Any], list[tuple[Tensor, tuple[int | str | None, int | str | None]]]]

B, S, H, G, D, V = 4, 6, 8, 4, 8, 12
N = None


def widest() -> torch.dtype:
    """Of the default device; a GPU's kernels have no float64."""
    return torch.float32 if torch.get_default_device().type == "cuda" else torch.float64


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=widest())


def cases(device: str) -> list[tuple[str, Case]]:
    """Calls with shards of every dimension that can be one, and of some that cannot; on a line, the first counts."""
    with torch.device(device):
        return [*attention_cases(), *row_cases(), *loss_cases(), *layer_cases()]


def attention_cases() -> Iterator[tuple[str, Case]]:
    q, k, v = drawn(B, S, H, D), drawn(B, S, G, D), drawn(B, S, G, D)
    attend = partial(flashtile.attention, causal=True, return_lse=True)
    in_both = [(q, (0, 2)), (k, (0, 2)), (v, (0, 2))]
    yield "batch and heads", (attend, in_both)
    yield "redistributed", (attend, [(q, (2, 0)), (k, (2, N)), (v, (N, "sum"))])
    yield "sequence", (attend, [(q, (1, 2)), (k, (1, "sum")), (v, (1, N))])
    yield "odd batch", (attend, [(t[:3], (0, N)) for t in (q, k, v)])
    yield "one key head", (attend, [(q, (2, 2)), (k[:, :, :1], (N, N)), (v[:, :, :1], (N, N))])
    learned = [(drawn(1, H, S, S), (N, N)), (drawn(H), (0, N))]
    yield "bias, sinks", (lambda q, k, v, bias, sinks: attend(q, k, v, bias=bias, sinks=sinks), [*in_both, *learned])
    yield "attention dropout", (partial(attend, dropout_p=0.5, dropout_seed=torch.tensor([3, 7])), in_both)
    yield (
        "score function",
        (
            lambda q, k, v, table: attend(q, k, v, score_mod=lambda s, b, h, i, j: s * table[b, h] + i - j),
            [(q, (2, 0)), (k, (0, 2)), (v, (0, 2)), (drawn(B, H), (N, N))],
        ),
    )
    packed = [(t.flatten(0, 1)[:20], (1, N)) for t in (q, k, v)]
    offsets = torch.tensor([0, 5, 5, 13, 20])
    yield "packed", (partial(flashtile.attention_varlen, cu_seqlens_q=offsets, causal=True, return_lse=True), packed)
    transposed = [(t.transpose(1, 2), (1, 0)) for t in (q, k, v)]
    yield "sdpa", (partial(flashtile.scaled_dot_product_attention, is_causal=True, enable_gqa=True), transposed)
    cos, sin = drawn(S, 2).float(), drawn(S, 2).float()
    yield "rotary, heads", (lambda x: flashtile.apply_rotary(x, cos, sin), [(q, (2, 0))])
    yield "rotary, sequence", (lambda x: flashtile.apply_rotary(x, cos, sin), [(q, (1, 0))])
    places = torch.arange(S).flip(0)[None]
    yield "positions", (lambda x: flashtile.apply_rotary(x, cos, sin, position_ids=places), [(q, (1, 0))])
    yield "rotary qkv", (lambda x: flashtile.apply_rotary_qkv(x, cos, sin), [(drawn(B, S, 3, H, D), (3, 0))])
    offset = torch.zeros(B, dtype=torch.int32)
    yield (
        "rotary in place",
        (
            lambda x: flashtile.apply_rotary_kv(x * 1, cos, sin, inplace=True, seqlen_offsets=offset),
            [(drawn(B, S, 2, H, D), (3, 0))],
        ),
    )
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    scores = drawn(B, G, S, S)
    yield "masked softmax", (lambda x: flashtile.scaled_masked_softmax(x, hidden, 0.5), [(scores, (2, 1))])
    yield "causal softmax", (lambda x: flashtile.scaled_causal_softmax(x, 0.5), [(scores, (1, 2))])


def row_cases() -> Iterator[tuple[str, Case]]:
    x, more, weight, bias, factors = drawn(B, S, 8), drawn(B, S, 8), drawn(8), drawn(8), drawn(B, S)
    yield "layer norm", (flashtile.layer_norm, [(x, (1, 0)), (weight, (N, N)), (bias, (0, N))])
    yield "last dimension", (flashtile.rms_norm, [(x, (2, 0)), (weight, (N, N))])
    yield (
        "add norm",
        (
            lambda x, more, weight, layerscale: flashtile.dropout_add_layer_norm(
                x, more, weight, None, rowscale=factors, layerscale=layerscale, prenorm=True
            ),
            [(x, ("sum", 0)), (more, (1, 0)), (weight, (N, N)), (bias, (N, N))],
        ),
    )
    dropping = {"dropout_p": 0.5, "dropout_seed": torch.tensor([3, 7]), "prenorm": True, "return_dropout_mask": True}
    yield (
        "dropout norm",
        (
            lambda x, more, weight: flashtile.dropout_add_rms_norm(x, more, weight, **dropping),
            [(x, (1, N)), (more, (0, N)), (weight, (N, N))],
        ),
    )


def loss_cases() -> Iterator[tuple[str, Case]]:
    x, logits, weight, bias, classes = drawn(B, S, 8), drawn(B, S, V), drawn(V, 8), drawn(V), drawn(V).abs()
    labels = torch.randint(V, (B, S))
    labels[0, :4] = labels[2, 0] = -100
    for reduction in ("mean", "sum", "none"):
        plain = {"reduction": reduction}
        weighted = {"class_weights": classes, **plain}
        smooth = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "return_z_loss": True, **weighted}

        def linear(x: Tensor, weight: Tensor, bias: Tensor, options: dict[str, Any]) -> Any:
            return flashtile.linear_cross_entropy(x, weight, labels, bias, **options)

        yield (
            f"loss of rows, {reduction}",
            (partial(flashtile.cross_entropy, labels=labels, **plain), [(logits, (1, 0))]),
        )
        yield f"loss of classes, {reduction}", (
            partial(flashtile.cross_entropy, labels=labels, **smooth), [(logits, (2, 0))],
        )  # fmt: skip
        yield f"linear loss of rows, {reduction}", (
            partial(linear, options=plain), [(x, (1, 0)), (weight, (0, N)), (bias, (N, N))],
        )  # fmt: skip
        yield f"linear loss of classes, {reduction}", (
            partial(linear, options=weighted), [(x, (N, 1)), (weight, (0, N)), (bias, (0, N))],
        )  # fmt: skip


def layer_cases() -> Iterator[tuple[str, Case]]:
    x, weight, bias = drawn(B, S, 8), drawn(V, 8), drawn(V)
    yield "linear, rows", (flashtile.fused_dense, [(x, (1, 0)), (weight, (N, N)), (bias, (N, N))])
    yield "linear, columns", (flashtile.fused_dense, [(x, (N, 0)), (weight, (0, N)), (bias, (0, N))])
    with_x = partial(flashtile.fused_dense, return_residual=True)
    yield "linear, sums", (with_x, [(x, (2, 0)), (weight, (1, N)), (bias, (N, N))])
    layers = [(drawn(16, 8), (0, N)), (drawn(16), (0, N)), (drawn(8, 16), (1, N)), (drawn(8), (N, N))]
    yield "perceptron", (partial(flashtile.fused_mlp, checkpoint_level=1), [(x, (N, 1)), *layers])
    layers[0], layers[1] = (drawn(32, 8), (0, N)), (drawn(32), (0, N))
    yield "gated", (partial(flashtile.fused_mlp, gated=True, activation="silu"), [(x, (N, 1)), *layers])
    yield (
        "weight gradient",
        (lambda x, y: flashtile.linear_bias_wgrad(x.detach(), y.detach()), [(x, (1, 2)), (x, (1, 0))]),
    )


def as_dtensor(tensor: Tensor, mesh: DeviceMesh, along: Sequence[int | str | None]) -> Tensor:
    dims = along[: mesh.ndim]
    placements: list[Any] = [Shard(dim) if isinstance(dim, int) else Replicate() for dim in dims]
    sharded = distribute_tensor(tensor.clone(), mesh, placements)
    if "sum" in dims:
        parts = [Partial() if dim == "sum" else placement for dim, placement in zip(dims, placements)]
        sharded = DTensor.from_local(sharded.to_local() / mesh.size(dims.index("sum")), mesh, parts, run_check=False)
    return sharded.requires_grad_()


def calls(
    line: DeviceMesh, names: Collection[str] = (), dtype: torch.dtype | None = None
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Results and gradients with DTensors, put together, and those of one process; of all cases, or of some in another
    dtype."""
    device = line.device_type
    mesh = line if line.size() == 2 else init_device_mesh(device, (2, line.size() // 2))
    torch.manual_seed(1)
    found = {}
    for name, (function, tensors) in cases(device):
        if names and name not in names:
            continue
        tensors = [(tensor.to(dtype), along) for tensor, along in tensors]
        upstream: list[Tensor] = []
        expected = derived(function, [tensor.clone().requires_grad_() for tensor, _ in tensors], upstream)
        shards = [as_dtensor(tensor, mesh, along) for tensor, along in tensors]
        given = [distribute_tensor(grad, mesh, [Replicate()] * mesh.ndim) for grad in upstream]
        results = derived(function, shards, given)
        assert all(isinstance(result, DTensor) for result in results), name
        found[name] = [result.full_tensor().cpu() for result in results], [result.cpu() for result in expected]
    return found


def derived(function: Callable[..., Any], tensors: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """What a function returns, and the gradients for gradients from above, which are drawn if there are none."""
    found = function(*tensors)
    results = list(found) if isinstance(found, tuple) else [found]
    learned = [result for result in results if result.requires_grad]
    upstream += [torch.randn_like(result) for result in learned][len(upstream) :]
    grads = torch.autograd.grad(learned, tensors, upstream) if learned else ()
    return [*(result.detach() for result in results), *grads]


def plans(mesh: DeviceMesh) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Modules of flashtile in plans of PyTorch's styles."""
    torch.manual_seed(2)
    where: dict[str, Any] = {"dtype": widest()}
    pair = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    logits = {"1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    made = {
        "perceptron": (FusedMlp(8, 16, **where), {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}),
        "linear": (nn.Sequential(FusedDense(8, 16, **where), FusedDense(16, 8, **where)), pair),
        "norms": (nn.Sequential(LayerNorm(8, **where), RMSNorm(8, **where)), dict.fromkeys("01", SequenceParallel())),
        "loss": (nn.Sequential(LayerNorm(8, **where), nn.Linear(8, V, **where)), logits),
    }
    x, labels = drawn(2, S, 8), torch.randint(V, (2, S))
    found = {}
    for name, (whole, plan) in made.items():
        model = parallelize_module(copy.deepcopy(whole), mesh, plan)
        grads = []
        for module in (model, whole):
            given = distribute_tensor(x, mesh, [Shard(1)]) if name == "norms" and module is model else x
            out = module(given)
            out = CrossEntropyLoss()(out, as_plain_or_same(labels, out)) if name == "loss" else out.square().sum()
            out.backward()
            grads.append([full(out.detach()), *(full(p.grad) for p in module.parameters())])
        found[name] = grads[0], grads[1]
    return found


def public_calls(mesh: DeviceMesh) -> dict[str, Any]:
    """Every public function of tensors, with shards of their first dimension: what it returns, or None if it raises."""
    found = {}
    for name, call in CALLS.items():
        if not call.shapes:
            continue
        leaves = call.leaves(2)
        torch.manual_seed(6)
        expected = call.results(*(leaf.clone() for leaf in leaves))
        placements = [Shard(0) if shape[0] == -1 else Replicate() for shape in call.shapes]
        shards = [distribute_tensor(leaf.clone(), mesh, [placed]) for leaf, placed in zip(leaves, placements)]
        torch.manual_seed(6)
        try:
            results = call.results(*shards)
        except (NotImplementedError, RuntimeError, TypeError):
            found[name] = None
            continue
        assert all(isinstance(result, DTensor) for result in results), name
        found[name] = [result.full_tensor() for result in results], expected
    return found


def compiled(mesh: DeviceMesh) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Calls in one graph, and each by itself: activations are DTensors, or only a parameter is."""
    torch.manual_seed(7)
    labels = torch.randint(V, (2, S))
    head = distribute_tensor(drawn(V, 8), mesh, [Shard(0)])
    found = {}
    for name, x in (("shards", distribute_tensor(drawn(2, S, 8), mesh, [Replicate()])), ("own", drawn(2, S, 8))):
        results, function = [], flashtile.linear_cross_entropy
        for call in (torch.compile(function, backend="eager", fullgraph=True), function):
            leaves = [tensor.detach().requires_grad_() for tensor in (x, head)]
            loss = call(*leaves, labels)
            results.append([full(each) for each in (loss.detach(), *torch.autograd.grad(loss, leaves))])
        found[name] = results[0], results[1]
    return found


def replicated_modules(mesh: DeviceMesh) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Modules with parameters on all ranks, and activations that are shards of the batch."""
    torch.manual_seed(4)
    rotated = partial(MHA, num_heads=4, num_heads_kv=2, causal=True, rotary_emb_dim=4)
    made = {
        "block": Block(16, rotated, partial(FusedMlp, gated=True, activation="silu"), norm_cls=RMSNorm),
        "parallel block": ParallelBlock(16, partial(MHA, num_heads=2, use_alibi=True), FusedMlp, tied_norm=True),
    }
    found = {}
    for name, whole in made.items():
        whole = whole.to(widest())
        model, x = distribute_module(copy.deepcopy(whole), mesh), drawn(2, S, 16)
        grads = []
        for module, given in ((model, distribute_tensor(x, mesh, [Shard(0)])), (whole, x)):
            outs = [out for out in module(given) if out is not None]
            sum(out.square().sum() for out in outs).backward()
            grads.append([full(out.detach()) for out in outs] + [full(p.grad) for p in module.parameters()])
        found[name] = grads[0], grads[1]
    return found


def as_plain_or_same(labels: Tensor, logits: Tensor) -> Tensor:
    return labels if not isinstance(logits, DTensor) else distribute_tensor(labels, logits.device_mesh, [Replicate()])


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Head(nn.Module):
    """The weight of a layer that is wrapped alone, read and not called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, V)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return flashtile.linear_cross_entropy(self.body(x), self.head.weight, labels, self.head.bias)


class Layers(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mlp, self.mixer = FusedMlp(8, 16, **options), MHA(8, 2, causal=True)
        self.inner = nn.Module()
        self.inner.weight, self.inner.sinks = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.mixer(self.mlp(x[None])).unflatten(-1, (2, 4))
        x = flashtile.attention(x, x, x, sinks=self.inner.sinks).flatten(-2)
        return flashtile.rms_norm(x, self.inner.weight).square().mean() + flashtile.cross_entropy(x[0], labels % 8)


class OfTokens(nn.Module):
    def __init__(self, model: GPT | BertForPreTraining) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        batch = (tokens(CONFIGS["gpt2"])[:, :9] + labels[0]) % self.model.config.vocabulary
        return self.model.loss(batch) if isinstance(self.model, GPT) else self.model.loss(batch, batch, labels[:2] % 2)


def leaves(model: nn.Module) -> list[nn.Module]:
    """The modules with parameters of their own, inner ones first."""
    return [module for module in [*model.modules()][::-1] if next(module.parameters(recurse=False), None) is not None]


def fully_sharded(mesh: DeviceMesh) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Gradients under FSDP2 around parts, each rank with its own data, and their mean in one process."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    small = BertConfig(layers=1, heads=2, width=8, hidden=16, vocabulary=20, context=16, dropout=0, attention_dropout=0)
    made: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], list[nn.Module]]]] = {
        "head": (Head, lambda model: [model.head]),
        "fc1": (Layers, lambda model: [model.mlp.fc1]),
        "leaves": (partial(Layers, gated=True, activation="silu"), leaves),
        "bert": (lambda: OfTokens(BertForPreTraining(small)), leaves),
    }
    for name, fused in (("gpt2", False), ("gpt2", True), ("neox", True)):
        made[f"{name} {fused}"] = (
            partial(lambda of: OfTokens(GPT(of)), replace(CONFIGS[name], fused_loss=fused)),
            leaves,
        )
    batches = [(drawn(S, 8), torch.randint(V, (S,))) for _ in range(mesh.size())]
    found = {}
    for name, (make, parts) in made.items():
        torch.manual_seed(3)
        model = make().to(widest())
        whole = copy.deepcopy(model)
        for batch in batches:
            (whole(*batch) / mesh.size()).backward()
        for part in (*parts(model), model):
            fully_shard(part, mesh=mesh)
        model(*batches[mesh.get_local_rank()]).backward()
        found[name] = [full(p.grad) for p in model.parameters()], [p.grad for p in whole.parameters()]
    return found


def parts_of_divided(line: DeviceMesh) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """The same of a head alone, over replicas of shards, and with tensor parallelism inside."""
    mesh = init_device_mesh("cpu", (2, line.size() // 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh["data"], mesh["tensor"]
    torch.manual_seed(5)
    batches = [(drawn(S, 8), torch.randint(V, (S,))) for _ in range(2)]
    x, labels = batches[data.get_local_rank()]
    found = {}
    for name, around in (("replicas", mesh), ("tensor parallel", data)):
        model = Head().double()
        whole = copy.deepcopy(model)
        for batch in batches:
            (whole(*batch) / 2).backward()
        if around is data:
            parallelize_module(model, tensor, {"head": ColwiseParallel(), "body": SequenceParallel()})
            x = distribute_tensor(x, tensor, [Replicate()])
        for part in (model.head, model):
            fully_shard(part, mesh=around)
        model(x, labels).backward()
        found[name] = [full(p.grad) for p in model.parameters()], [p.grad for p in whole.parameters()]
    return found


class OfPlan(nn.Module):
    """The loss of a model that `tensor_parallel_plan` divides."""

    def __init__(self, model: GPT, mesh: DeviceMesh) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh

    def forward(self, batch: Tensor) -> Tensor:
        return vocabulary_loss(self.model, self.model.hidden(batch[:, :-1]), batch[:, 1:], self.mesh)


def plan_in_parts(line: DeviceMesh) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """The same of a model whose layers `tensor_parallel_plan` divides, each wrapped alone."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    mesh = init_device_mesh("cpu", (2, line.size() // 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh["data"], mesh["tensor"]
    found = {}
    for name, fused, shards in (("gpt2", False, True), ("llama", True, True), ("neox", True, False)):
        config = replace(CONFIGS[name], fused_loss=fused)
        whole, model = of_seed(config), of_seed(config)
        batches = [(tokens(config)[:, :9] + step) % config.vocabulary for step in range(2)]
        for batch in batches:
            (whole.loss(batch) / 2).backward()
        parallelize_module(model, tensor, tensor_parallel_plan(model, sequence_parallel=shards))
        divided = OfPlan(model, tensor)
        for part in (*leaves(divided), divided):
            fully_shard(part, mesh=data)
        divided(batches[data.get_local_rank()]).backward()
        orders = row_orders(model)
        grads = {key: full(p.grad) for key, p in model.named_parameters()}
        ordered = [grad[orders[key].argsort()] if key in orders else grad for key, grad in grads.items()]
        found[name] = ordered, [p.grad for p in whole.parameters()]
    return found


def refused(mesh: DeviceMesh) -> list[str]:
    x = distribute_tensor(drawn(2, 4, 8), mesh, [Replicate()])
    other = distribute_tensor(drawn(8), init_device_mesh("cpu", (1, mesh.size())), [Replicate(), Replicate()])
    labels = torch.zeros(2, 4, dtype=torch.int64)
    lse = distribute_tensor(drawn(2, 8, 4), mesh, [Replicate()])
    q = x.unflatten(-1, (8, 1))
    gated = parallelize_module(GatedMlp(8, 128), mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    actions: tuple[Callable[[], Any], ...] = (
        lambda: flashtile.layer_norm(x, drawn(8).requires_grad_()),
        lambda: flashtile.layer_norm(x, other),
        lambda: flashtile.cross_entropy(x, labels, process_group=mesh.get_group()),
        lambda: flashtile.fused_dense(x, x[0].detach().requires_grad_(), main_grad=torch.zeros(4, 8).double()),
        lambda: flashtile.finish_attention(q, lse, lse, torch.float64),
        lambda: flashtile.attention_with_kv_cache(q, q, q),
        lambda: flashtile.attention_backward(q, q, q, q, q, lse),
        lambda: context_parallel_attention(q, q, q, mesh=mesh),
        lambda: gated(torch.zeros(2, 8)),
    )
    return [refusal(action) for action in actions]


def drawn_seeds(mesh: DeviceMesh) -> list[tuple[Tensor, Tensor]]:
    """A call that draws its own dropout seed: this rank's replica, and that of the first rank."""
    torch.manual_seed(dist.get_rank())
    q = distribute_tensor(drawn(2, 4, 8, 4), mesh, [Replicate()])
    outs = (
        flashtile.attention(q, q, q, dropout_p=0.5),
        flashtile.dropout_add_layer_norm(q, None, None, None, dropout_p=0.5),
    )
    found = []
    for out in outs:
        first = out.to_local().clone()
        dist.broadcast(first, 0)
        found.append((out.to_local(), first))
    return found


def on_gpu(job: Callable[[DeviceMesh], dict[str, Any]], mesh: DeviceMesh) -> dict[str, tuple[list[Tensor], ...]]:
    """A job whose tensors are made on this rank's GPU, by the reference of each operation: kernels of all cases would
    take minutes to compile."""

    def of_reference(backends: Backends, call: Any) -> BackendChoice:
        return choose(backends, call._replace(requested="reference") if call.requested == "auto" else call)

    choose = Backends.choose
    with mock.patch.object(Backends, "choose", of_reference), torch.device(mesh.device_type):
        found = job(mesh)
    return {name: tuple([tensor.cpu() for tensor in tensors] for tensors in both) for name, both in found.items()}


#: What four ranks do, and two.
FOUR = {"calls": calls, "parts": parts_of_divided, "plan": plan_in_parts}
JOBS = {
    "calls": calls, "public": public_calls, "plans": plans, "modules": replicated_modules,
    "compiled": compiled, "fully sharded": fully_sharded, "refused": refused, "seeds": drawn_seeds,
}  # fmt: skip
#: Some kernels, and all rules of sharding in another dtype: which backend serves a dtype is remembered. Attention's
#: kernels meet DTensors in `tests/integrations/test_torch_flash.py`.
_KERNELS = partial(calls, names=("rotary, heads", "layer norm", "loss of classes, mean"), dtype=torch.bfloat16)
GPU_JOBS = {"kernels": _KERNELS} | {
    name: partial(on_gpu, JOBS[name]) for name in ("calls", "plans", "modules", "compiled", "fully sharded")
}
