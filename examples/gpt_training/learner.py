"""The model, its optimizer and schedule, in one process or spread over several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile.distributed import (
    context_parallel,
    mean_over_shards,
    row_orders,
    shard_sequence,
    tensor_parallel_plan,
    vocabulary_loss,
)
from flashtile.models import GPT, GPTConfig
from flashtile.modules import MHA
from gpt_training.data import derived_seed
from gpt_training.options import OptionError, Options
from gpt_training.processes import Processes

Strategy = Literal["ring", "all_to_all", "all_gather"]
_LLAMA: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rms",
    "activation": "swiglu",
    "attention_bias": False,
    "mlp_bias": False,
    "tied": False,
}
MODELS = {
    "gpt2-small": GPTConfig(context=1024, layers=12, heads=12, width=768),
    "gpt2-medium": GPTConfig(context=1024, layers=24, heads=16, width=1024),
    "llama-small": GPTConfig(context=2048, layers=12, heads=12, heads_kv=4, width=768, hidden=2048, **_LLAMA),
    "tiny": GPTConfig(context=64, layers=2, heads=4, heads_kv=2, width=64, hidden=176, **_LLAMA),
}
_SIZES = ("context", "layers", "heads", "heads_kv", "width", "hidden")
_DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")


def model_config(options: Options, vocabulary: int) -> GPTConfig:
    """The named model, with the sizes that the options give instead.

    Raises:
        OptionError: no model has such sizes.
    """
    given = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    dropout: dict[str, Any] = dict.fromkeys(_DROPOUTS, options.dropout)
    try:
        config = replace(
            MODELS[options.model], vocabulary=vocabulary, fused_loss=options.fused_loss, **dropout, **given
        )
        GPT(config, device="meta")  # whose parts check the sizes that concern them
    except ValueError as error:
        raise OptionError(f"model: {error}") from None
    return config


def learning_rate(step: int, options: Options) -> float:
    """The rate of a step, counted from 0: a line up, then half a cosine down to the lowest at the last step."""
    highest, lowest, rising = options.learning_rate, options.lowest_learning_rate, options.warm_up_steps
    if step < rising:
        return highest * (step + 1) / rising
    falling = options.steps - 1 - rising
    progress = (step - rising) / falling if falling > 0 else 1.0
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * progress)) / 2


class Learner:
    """A model that learns.

    The weights are float32. With bf16, products are computed in bfloat16 by autocast: weights in bfloat16 would not
    take the updates of AdamW that are less than a 256th of them. They are drawn on a CPU, so that a seed has the same
    ones on every device, over any number of processes.

    Args:
        config: of the model.
        options: of the training.
        processes: over which it is spread.
    """

    def __init__(self, config: GPTConfig, options: Options, processes: Processes) -> None:
        self.config, self._options, self._processes = config, options, processes
        self.precision = _precision(options, processes.device)
        if options.parallel == "fsdp" and not processes.launched:
            raise OptionError(
                "--parallel: expected ddp in a process alone, got fsdp; start with torchrun --nproc-per-node N"
            )
        torch.manual_seed(derived_seed(options.seed, "weights"))
        divisor = 2 * processes.context * processes.tensor
        if processes.context * processes.tensor > 1 and config.context % divisor:
            raise OptionError(
                f"--context: expected a multiple of {divisor} with --cp {processes.context} and --tp "
                f"{processes.tensor}, got {config.context}; each process has runs of as many tokens"
            )
        make = _sharded if options.parallel == "fsdp" else _copied
        self._model, self._loss = make(config, options, processes)
        self._orders = row_orders(self._model)
        self._optimizer = _optimizer(self._model, options)

    @property
    def parameters(self) -> int:
        """How many numbers it learns."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def step(self, step: int, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """One step of the optimizer; nothing waits for the GPU.

        Args:
            step: its number, from 0.
            batches: int64 `[batch, context + 1]` each, on the CPU.

        Returns:
            The mean loss of this process's batches, and the norm of all processes' mean gradient before it is clipped.
        """
        # Dropout is a function of seed, step and rank too: a checkpoint needs no state of a generator.
        place = self._processes.rank // self._processes.tensor
        torch.manual_seed(derived_seed(self._options.seed, "dropout", step, place))
        self._loss.train()
        losses = []
        for index, tokens in enumerate(batches):
            with self._synchronised(index == len(batches) - 1):
                loss = self._training_loss(tokens)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        norm = clip_gradients(self._model, self._options.clip or math.inf)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(step, self._options)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean(), norm

    @torch.no_grad()
    def validate(self, tokens: Tensor) -> Tensor:
        """The loss of a batch without dropout."""
        self._loss.eval()
        return self._training_loss(tokens)

    def state(self) -> dict[str, Any]:
        """The contents of a checkpoint: this process's part of the weights and of the optimizer's moments."""
        model, optimizer = get_state_dict(self._model, self._optimizer, options=_as_stored(self._processes.tensor > 1))
        return _with_rows({"model": model, "optimizer": optimizer}, self._orders, stored=False)

    def load(self, state: dict[str, Any]) -> None:
        options = _as_stored(self._processes.tensor > 1, reading=True)
        state = _with_rows(state, self._orders, stored=True)
        optimizer = state["optimizer"]
        if self._processes.tensor > 1:
            optimizer = _nested(optimizer)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=optimizer,
            options=options,
        )

    def copy_on_first(self) -> GPT | None:
        """On rank 0 the whole model, without what training needs; all processes must call. None on the others."""
        state = get_model_state_dict(self._model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if not self._processes.first:
            return None
        model = GPT(self.config).eval()
        model.load_state_dict(_with_rows({"model": state}, self._orders, stored=False)["model"])
        return model.to(self._processes.device, torch.bfloat16 if self.precision == "bf16" else torch.float32)

    def _training_loss(self, tokens: Tensor) -> Tensor:
        device = self._processes.device
        if device.type == "cuda":
            tokens = tokens.pin_memory()
        with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self._loss(tokens.to(device, non_blocking=True))

    def _synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients of several batches add up in each process; the last one's backward brings them together."""
        if isinstance(self._loss, FSDPModule):
            self._loss.set_requires_gradient_sync(last)
        elif isinstance(self._loss, DistributedDataParallel) and not last:
            return self._loss.no_sync()
        return nullcontext()


class _Loss(nn.Module):
    """The loss as a module's forward: where DDP and FSDP do their work.

    Args:
        model: whose loss it is.
        mesh: of all processes, as `Processes.mesh` has it.
        strategy: how they share sequences.
    """

    def __init__(self, model: GPT, mesh: DeviceMesh, strategy: Strategy = "ring") -> None:
        super().__init__()
        self.model, self._context, self._tensor = model, mesh["context"], mesh["tensor"]
        if self._context.size() > 1:
            context_parallel(model, self._context, strategy=strategy)

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self._context.size()
        if parts == self._tensor.size() == 1:
            return self.model.loss(tokens)
        before, labels = tokens[:, :-1], tokens[:, 1:]
        if parts == 1:
            return self._total(self.model.hidden(before), labels) / labels.numel()
        before, labels = (shard_sequence(part, self._context) for part in (before, labels))
        mean = mean_over_shards(self._total(self.model.hidden(before), labels), labels.numel(), self._context)
        # The value of the whole sequence's loss; but of its gradient each process has a part, and DDP and FSDP take
        # the mean of them where the sum is due.
        return mean + (parts - 1) * (mean - mean.detach())

    def _total(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of a shard."""
        if self._tensor.size() > 1:
            return vocabulary_loss(self.model, hidden, labels, self._tensor, reduction="sum")
        weight = self.model.output_weight
        if self.model.config.fused_loss:
            return cast(Tensor, flashtile.linear_cross_entropy(hidden, weight, labels, reduction="sum"))
        return cast(Tensor, flashtile.cross_entropy(F.linear(hidden, weight), labels, reduction="sum"))


def _training_loss(model: GPT, options: Options, mesh: DeviceMesh) -> _Loss:
    """The loss of a model, its blocks and sequences divided as the options say."""
    for mixer in model.modules():
        if isinstance(mixer, MHA):
            # A resumed training repeats the bits of an uninterrupted one.
            mixer.inner_attn.deterministic = True
    if options.checkpoint_activations:
        for block in model.blocks:
            # In its forward, so that FSDP gathers the block around it, and its parameters keep their names.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return _Loss(model, mesh, options.cp_strategy)


def _copied(config: GPTConfig, options: Options, processes: Processes) -> tuple[GPT, nn.Module]:
    """Each process has the whole model; those of torchrun bring their gradients together."""
    model = GPT(config).to(processes.device)
    loss: nn.Module = _training_loss(model, options, processes.mesh())
    if options.compile:
        loss.compile()
    if processes.launched:
        devices = [processes.device] if processes.device.type == "cuda" else None
        loss = DistributedDataParallel(loss, device_ids=devices, gradient_as_bucket_view=True)
    return model, loss


def _sharded(config: GPTConfig, options: Options, processes: Processes) -> tuple[GPT, nn.Module]:
    """Each process has a part of every weight; only rank 0 ever has all, in the host's memory."""
    # The warning is about blocks whose output is a view: an addition in place would be lost. The next norm adds out of
    # place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view")
    weights = GPT(config).state_dict() if processes.first else {}
    model = GPT(config, device="meta")
    mesh = processes.mesh()
    if processes.tensor > 1:
        parallelize_module(model, mesh["tensor"], tensor_parallel_plan(model, sequence_parallel=True))
        weights = _with_rows({"model": weights}, row_orders(model), stored=True)["model"]
    loss = _training_loss(model, options, mesh)
    shards = mesh["data", "context"]._flatten("shards")
    for block in model.blocks:
        if options.compile:
            block.compile()
        fully_shard(block, mesh=shards)
    fully_shard(loss, mesh=shards)
    loss.to_empty(device=processes.device)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model, loss


def _as_stored(whole: bool, reading: bool = False) -> StateDictOptions:
    """How states are asked for: this process's part, or all of it on each."""
    # By names of parameters, whatever groups they are in; but whole states are not read so.
    return StateDictOptions(full_state_dict=whole, flatten_optimizer_state_dict=not (whole and reading))


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by parameters, each in a group of its own, from one with flat names."""
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        part, name = key.split(".", 1)
        parameter, field = name.rsplit(".", 1)
        (state if part == "state" else groups).setdefault(parameter, {})[field] = value
    return {"state": state, "param_groups": [{**group, "params": [name]} for name, group in groups.items()]}


def _with_rows(state: dict[str, Any], orders: dict[str, Tensor], stored: bool) -> dict[str, Any]:
    """A state with the rows of whole layers in the order in which processes share them, or in their own again."""
    moved = {}
    for part, tensors in state.items():
        moved[part] = dict(tensors)
        for name, order in orders.items():
            for key in (name, f"state.{name}.exp_avg", f"state.{name}.exp_avg_sq"):
                if key in tensors:
                    rows = order if stored else order.argsort()
                    moved[part][key] = tensors[key][rows.to(tensors[key].device)]
    return moved


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Together what lies alike on the same processes: no operation takes DTensors of several meshes."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Makes the norm of all gradients at most `limit`. Returns what it was."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if len(_by_mesh(grads)) <= 1:
        return nn.utils.clip_grad_norm_(model.parameters(), limit)
    norms = [norm_tensor(nn.utils.get_total_norm(group)) for group in _by_mesh(grads)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(factor)
    return norm


def norm_tensor(norm: Tensor) -> Tensor:
    """A norm of all processes, on each."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """AdamW in one kernel for all parameters that lie alike; matrices decay."""
    groups = []
    for decay, chosen in ((options.weight_decay, lambda p: p.dim() >= 2), (0.0, lambda p: p.dim() < 2)):
        alike = _by_mesh(filter(chosen, model.parameters()))
        groups += [{"params": parameters, "weight_decay": decay} for parameters in alike]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(options.beta1, options.beta2), fused=True)


def _precision(options: Options, device: torch.device) -> str:
    supported = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if options.precision == "bf16" and not supported:
        raise OptionError("--precision: expected fp32 on this GPU, which has no bfloat16 products, got bf16")
    if options.precision is not None:
        return options.precision
    return "bf16" if device.type == "cuda" and supported else "fp32"


def norm_of(norm: Tensor) -> float:
    """As a number; waits for the GPU, and with FSDP all processes must call."""
    return float(norm_tensor(norm))
