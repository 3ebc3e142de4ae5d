"""The options of a training: one field each, with its help text, its default and its limits."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any


class OptionError(Exception):
    """A mistake or a lack that the user can mend; its message is all that must be seen."""


def option(
    group: str,
    text: str,
    default: Any = MISSING,
    *,
    least: float | None = None,
    below: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A field of `Options`; numbers are at least `least` and less than `below`."""
    metadata = {"group": group, "help": text, "least": least, "below": below, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """The options of a training. The help texts of the fields are those of `--help`."""

    data: Path = option(
        "data", "text file, or folder of text files (all except hidden ones, in the order of their names)"
    )
    tokenizer: Path | None = option(
        "data", "tokenizer.json of the tokenizers package; default: each byte is a token", None
    )
    end_of_text: str | None = option(
        "data", "token of --tokenizer that ends each file; default: none, or byte 0 without --tokenizer", None
    )
    validation_share: float = option(
        "data", "share of the tokens, at the end, that is for validation", 0.1, least=1e-9, below=1
    )
    cache: Path | None = option("data", "folder for the tokens on disk; default: cache in --output", None)

    model: str = option(
        "model",
        "model whose sizes to use; the options below change them",
        "gpt2-small",
        choices=("gpt2-small", "gpt2-medium", "llama-small", "tiny"),
    )
    context: int | None = option("model", "length of the training sequences; default: the model's", None, least=1)
    layers: int | None = option("model", "number of blocks; default: the model's", None, least=1)
    heads: int | None = option("model", "attention heads; default: the model's", None, least=1)
    heads_kv: int | None = option("model", "heads of keys and values; default: the model's", None, least=1)
    width: int | None = option("model", "size of the residual stream; default: the model's", None, least=1)
    hidden: int | None = option("model", "width inside the MLP; default: the model's", None, least=1)
    dropout: float = option("model", "dropout on embeddings, attention and residual branches", 0.0, least=0, below=1)
    fused_loss: bool = option("model", "never hold all logits in memory", False)

    steps: int = option(
        "optimisation", "steps of the optimizer in total, including those before a resume", 1000, least=1
    )
    batch: int = option("optimisation", "sequences in a batch of a process", 8, least=1)
    accumulate: int = option("optimisation", "batches that each process accumulates in a step", 1, least=1)
    learning_rate: float = option("optimisation", "highest learning rate", 6e-4, least=0)
    minimum_learning_rate: float | None = option(
        "optimisation", "learning rate at the last step; default: a tenth of the highest", None, least=0
    )
    warm_up: int | None = option(
        "optimisation", "steps in which the learning rate rises; default: a tenth of all, at most 200", None, least=0
    )
    weight_decay: float = option("optimisation", "weight decay of matrices; biases and norms have none", 0.1, least=0)
    beta1: float = option("optimisation", "decay of AdamW's first moment", 0.9, least=0, below=1)
    beta2: float = option("optimisation", "decay of AdamW's second moment", 0.95, least=0, below=1)
    clip: float = option("optimisation", "largest norm of the gradients; 0 = no limit", 1.0, least=0)
    seed: int = option("optimisation", "seed of weights, order of the data, and dropout", 0)

    device: str | None = option("machine", "device; default: cuda if there is a GPU", None, choices=("cuda", "cpu"))
    precision: str | None = option(
        "machine",
        "bf16 = float32 weights, products in bfloat16 (autocast); default: bf16 on a GPU, fp32 on a CPU",
        None,
        choices=("bf16", "fp32"),
    )
    compile: bool = option("machine", "compile the loss with torch.compile; with fsdp each block", False)
    parallel: str = option(
        "machine",
        "with torchrun: ddp = each process has the whole model, fsdp = a part of it",
        "ddp",
        choices=("ddp", "fsdp"),
    )
    cp: int = option(
        "machine", "with torchrun: number of processes that share each sequence (context parallel)", 1, least=1
    )
    cp_strategy: str = option(
        "machine",
        "how the processes of --cp exchange keys and values",
        "ring",
        choices=("ring", "all_to_all", "all_gather"),
    )
    tp: int = option(
        "machine",
        "with torchrun and fsdp: number of processes that share each layer's weights (tensor parallel)",
        1,
        least=1,
    )
    checkpoint_activations: bool = option(
        "machine", "keep only the inputs of each block, and recompute the block in the backward", False
    )
    timeout: float = option("machine", "minutes that a process waits for the others", 10.0, least=0.1)
    peak_tflops: float | None = option(
        "machine", "peak of one device, for the MFU; default: by the device's name, if it is known", None, least=1e-9
    )

    output: Path = option("files", "folder for checkpoints, metrics.jsonl and loss.png", Path("gpt-output"))
    save_every: int = option("files", "steps between checkpoints; the last step always has one", 250, least=1)
    keep: int = option("files", "number of newest checkpoints that remain", 2, least=1)
    resume: bool = option("files", "continue from the newest checkpoint in --output, if there is one", False)

    log_every: int = option("report", "steps between reports, for which the host waits for the GPU", 10, least=1)
    validate_every: int = option("report", "steps between validations; the last step always has one", 250, least=1)
    validation_batches: int = option(
        "report", "length of a validation, as a multiple of the sequences of a step", 4, least=1
    )
    sample: int = option("report", "number of tokens to generate at the end; 0 = none", 0, least=0)
    prompt: str = option("report", "text that the sample continues", "The ")
    temperature: float = option("report", "temperature of the sample; 0 takes the most probable token", 0.8, least=0)
    plot: bool = option("report", "draw loss.png; needs matplotlib", False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_limits(flag(field.name), getattr(self, field.name), field.metadata)
        if not self.data.exists():
            raise OptionError(f"--data: expected a text file or a folder of them, got {self.data}, which is not there")
        for name, folder in (("--output", self.output), ("--cache", self.cache_folder)):
            if folder.resolve().is_relative_to(self.data.resolve()):
                raise OptionError(f"{name}: expected a folder outside of --data, {self.data}, got {folder}")
            there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
            if not there.is_dir():
                raise OptionError(f"{name}: expected a folder, got {folder}, as {there} is a file")
        if self.tokenizer is not None and not self.tokenizer.is_file():
            raise OptionError(f"--tokenizer: expected a tokenizer.json, got {self.tokenizer}, which is no file")
        if self.end_of_text is not None and self.tokenizer is None:
            raise OptionError("--end-of-text: expected with --tokenizer only, got it without; byte 0 ends a file then")
        if self.warm_up_steps > self.steps:
            raise OptionError(f"--warm-up: expected at most --steps, {self.steps}, got {self.warm_up}")
        if self.lowest_learning_rate > self.learning_rate:
            raise OptionError(
                f"--minimum-learning-rate: expected at most --learning-rate, {self.learning_rate:g}, "
                f"got {self.minimum_learning_rate:g}"
            )
        if self.compile and self.cp > 1:
            raise OptionError("--compile: expected without --cp, got both; transfers between processes do not compile")
        if self.tp > 1 and (self.parallel != "fsdp" or self.dropout or self.compile):
            raise OptionError(
                "--tp: expected with --parallel fsdp, without --dropout and without --compile, got another; heads of "
                "several processes would drop the same weights, and transfers between them do not compile"
            )
        if self.sample and not self.prompt:
            raise OptionError("--prompt: expected at least one character with --sample, got none")
        if self.plot:
            require("matplotlib", "--plot", "flashtile[plots]")
        if self.tokenizer is not None:
            require("tokenizers", "--tokenizer", "tokenizers")

    @property
    def warm_up_steps(self) -> int:
        return min(200, self.steps // 10) if self.warm_up is None else self.warm_up

    @property
    def lowest_learning_rate(self) -> float:
        return self.learning_rate / 10 if self.minimum_learning_rate is None else self.minimum_learning_rate

    @property
    def cache_folder(self) -> Path:
        return self.output / "cache" if self.cache is None else self.cache


def flag(name: str) -> str:
    """A field's name as it is written on the command line."""
    return "--" + name.replace("_", "-")


def require(package: str, what: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise OptionError(f'{what} needs {package}, which is not installed: pip install "{install}"')


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options of a command line; None = that of the program.

    Raises:
        OptionError: a value does not do.
        SystemExit: the command line cannot be read, or asks for help.
    """
    return Options(**vars(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py", description="Train flashtile's GPT on text files.", allow_abbrev=False
    )
    groups: dict[str, Any] = {}
    hints = typing.get_type_hints(Options)
    for field in dataclasses.fields(Options):
        name, facts = field.metadata["group"], field.metadata
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        text = facts["help"]
        if hints[field.name] is bool:
            group.add_argument(flag(field.name), action="store_true", help=text)
            continue
        if field.default not in (None, MISSING):
            text += f" (default: {field.default})"
        group.add_argument(
            flag(field.name),
            type=_plain_type(hints[field.name]),
            help=text,
            metavar=None if facts["choices"] else _plain_type(hints[field.name]).__name__.upper(),
            choices=facts["choices"],
            **({"required": True} if field.default is MISSING else {"default": field.default}),
        )
    return parser


def _plain_type(hint: Any) -> Any:
    """`int` of `int | None`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    return hint


def _check_limits(name: str, value: Any, facts: Any) -> None:
    least, below, choices = facts["least"], facts["below"], facts["choices"]
    if value is None:
        return
    if choices is not None and value not in choices:
        raise OptionError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    # Comparisons that NaN fails too.
    if least is not None and not value >= least:
        raise OptionError(f"{name}: expected at least {least:g}, got {value:g}")
    if below is not None and not value < below:
        raise OptionError(f"{name}: expected less than {below:g}, got {value:g}")
