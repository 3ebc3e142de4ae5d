"""torchtitan's Llama debug model on flashtile: packed documents, context parallelism and FSDP over two processes.

pip install torchtitan
torchrun --nproc-per-node 2 examples/trainers/torchtitan_llama.py

torchtitan's masks, parallelization and sharding of inputs are its own. One class takes the place of its inner
attention, `FlexAttention`, whose masks flashtile reads. It runs on a CPU here, where torchtitan's trainer does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torchtitan.tools import utils

import flashtile

utils.device_type, utils.device_module = "cpu", torch.cpu  # before the modules that import them

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.context_parallel import prepare_context_parallel_input  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

BATCH, SEQ, STEPS = 2, 512, 5


class FlashtileAttention(FlexAttention):
    """torchtitan's inner attention, with its masks of packed documents, on flashtile.

    Attributes:
        own: run torchtitan's attention instead, for comparison. On a CPU it has no backward.
    """

    own = False

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
        **_: Any,
    ) -> Tensor:
        """Attention of `[batch, seq, heads, head_dim]`."""
        if self.own:
            return super().forward(q, k, v, attention_masks=attention_masks, scale=scale, enable_gqa=enable_gqa)
        out, aux = flashtile.flex_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), score_mod, attention_masks, scale, enable_gqa,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        out = out.transpose(1, 2)
        return out if out_transform is None else out_transform(out, aux.lse.transpose(1, 2))


def make_model(dims: ParallelDims, parallelism: ParallelismConfig, attention: Any) -> Any:
    """The debug model with an inner attention, divided by torchtitan."""
    spec = model_registry("debugmodel", attn_backend="flex")
    config = spec.model
    for layer in config.layers:
        layer.attention = replace(layer.attention, inner_attention=attention)
    with torch.device("meta"):
        model = config.build()
    training = TrainingConfig(mixed_precision_param="float32")
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=training, parallelism=parallelism, compile_config=CompileConfig(),
        ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply as it sums
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def make_batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions of packed documents, in which a token follows from the one before."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(2048, (BATCH, SEQ + 1), generator=generator)
    positions = torch.arange(SEQ + 1) % torch.tensor([[100], [37]])
    first = (positions == 0).long() * torch.arange(SEQ + 1)
    tokens = (starts.gather(1, first.cummax(dim=1).values) + 7 * positions) % 2048
    return tokens[:, :-1], tokens[:, 1:], positions[:, :-1]


def train(attention: type[FlexAttention] = FlashtileAttention) -> tuple[list[float], list[float]]:
    """The loss of each step, and that of the same weights with torchtitan's own attention."""
    world = dist.get_world_size()
    parallelism = ParallelismConfig(context_parallel_degree=world, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    model = make_model(dims, parallelism, attention.Config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    losses: tuple[list[float], list[float]] = ([], [])

    def compute_loss(step: int) -> Tensor:
        """This rank's part of the mean over the tokens of all ranks."""
        tokens, labels, positions = make_batch(step)
        given = {"attention_masks": model.get_attention_masks(positions), "positions": positions}
        tokens, labels, given = prepare_context_parallel_input(
            tokens, labels, given, dims.get_mesh("cp"), torch.device("cpu"), load_balancer_type="headtail"
        )
        logits = model(tokens, **given)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * SEQ)

    # torchtitan compiles its masks and its attention, which on a CPU needs a C++ compiler.
    with torch.compiler.set_stance("force_eager"):
        for step in range(STEPS):
            FlashtileAttention.own = True
            with torch.no_grad():
                own = compute_loss(step)
            FlashtileAttention.own = False
            loss = compute_loss(step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for kept, value in zip(losses, (loss.detach(), own), strict=True):
                dist.all_reduce(value)
                kept.append(value.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    losses = train()
    if dist.get_rank() == 0:
        for name, each in zip(("flashtile", "torchtitan"), losses, strict=True):
            print(f"{name:10}", " ".join(f"{loss:.4f}" for loss in each))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
