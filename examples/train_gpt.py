"""Trains flashtile's GPT on text files, on one device or several. The guide is docs/training.md.

python examples/train_gpt.py --data shakespeare.txt --model tiny --steps 500 --sample 200
torchrun --nproc-per-node 8 examples/train_gpt.py --data corpus --tokenizer tokenizer.json --parallel fsdp --resume
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
import torch.utils.deterministic
from torch import Tensor

from flashtile.models import GPT, GPTConfig
from gpt_training import data
from gpt_training.checkpoints import Checkpoints, identity_of
from gpt_training.learner import Learner, learning_rate, model_config, norm_of
from gpt_training.options import OptionError, Options, parse
from gpt_training.processes import Processes, join_processes
from gpt_training.report import Clock, Report, draw_losses, flops_of_token, peak_flops


class Training:
    """A training from its options to its last step.

    Args:
        options: what is asked for.
        processes: this process and the others.
    """

    def __init__(self, options: Options, processes: Processes) -> None:
        self._options, self._processes = options, processes
        codec = data.make_codec(options)
        self._config = model_config(options, codec.vocabulary)
        self._prompt = _encode_prompt(options, codec, self._config)
        self._text = data.open_text(options, codec, self._config.context, processes)
        self._learner = Learner(self._config, options, processes)
        identity = identity_of(options, self._learner, processes, self._text.fingerprint)
        self._checkpoints = Checkpoints(options.output, options.keep, identity, processes)
        self._start = self._saved = self._checkpoints.start(self._learner, options.resume)
        self._report = Report(options.output, processes.first, self._start, options.steps)

    def run(self) -> int:
        """Trains, and returns the program's exit status: 0, or as of a signal that ended it."""
        self._introduce()
        try:
            with _deterministic(), _signals() as received:
                stop = self._steps(received)
            self._finish(stop)
        finally:
            self._report.close()
        return 128 + stop if stop else 0

    def _steps(self, received: list[int]) -> int:
        """Runs until the last step, or, after a signal, until the next report; the signal, or 0."""
        options, processes = self._options, self._processes
        tokens = options.batch * options.accumulate * processes.replicas * self._config.context
        clock, stop = Clock(tokens), 0
        for step in range(self._start, options.steps):
            batches = data.training_batches(self._text, step, self._config.context, options, processes)
            loss, norm = self._learner.step(step, batches)
            clock.tick()
            done = step + 1
            self._report.advance(done)
            saves = done == options.steps or done % options.save_every == 0
            if saves or done == 1 or done % options.log_every == 0:
                self._log(step, loss, norm, clock)
                # The processes agree to stop, as each may hear of it in another step.
                stop = processes.largest(received[0] if received else 0)
            with clock.stopped():
                if done % options.validate_every == 0 or done == options.steps:
                    self._report.metrics(done, validation_loss=self._validate())
                if saves or stop:
                    self._checkpoints.save(self._learner, done)
                    self._saved = done
            if stop and done < options.steps:
                return stop
        return 0

    def _log(self, step: int, loss: Tensor, norm: Tensor, clock: Clock) -> None:
        (mean,), size = self._processes.mean([float(loss)]), norm_of(norm)
        rate, peak = clock.rate(), self._peak
        if not (math.isfinite(mean) and math.isfinite(size)):  # before a checkpoint of what came of it is written
            raise OptionError(
                f"--learning-rate: expected one at which loss and gradients stay finite, got {mean} and {size} at step "
                f"{step + 1}; lower it or take a longer --warm-up. The last checkpoint is of step {self._saved}"
            )
        self._report.metrics(
            step + 1,
            loss=mean,
            gradient_norm=size,
            learning_rate=learning_rate(step, self._options),
            tokens_per_second=rate,
            mfu=peak and rate * self._flops / peak,
        )

    def _validate(self) -> float:
        batches = data.validation_batches(self._text, self._config.context, self._options, self._processes)
        losses = torch.stack([self._learner.validate(tokens) for tokens in batches])
        return self._processes.mean([float(losses.double().mean())])[0]

    def _introduce(self) -> None:
        options, processes, text = self._options, self._processes, self._text
        peak = peak_flops(processes.device, self._learner.precision, options.peak_tflops)
        self._peak = peak and peak * processes.size
        self._flops = flops_of_token(GPT(self._config, device="meta"))
        where = torch.cuda.get_device_name() if processes.device.type == "cuda" else "CPU"
        spread = f"{processes.size} × {where}" + (f", {options.parallel}" if processes.launched else "")
        spread += f", {options.tp} of them for each layer's weights" if options.tp > 1 else ""
        spread += f", {options.cp} of them for each sequence ({options.cp_strategy})" if options.cp > 1 else ""
        self._report.line(f"{self._learner.parameters:,} parameters, {self._learner.precision}, {spread}")
        self._report.line(f"{len(text.training):,} tokens for training, {len(text.validation):,} for validation")
        if self._start:
            self._report.line(f"resumed after step {self._start}")
        elif options.resume:
            self._report.line(f"no checkpoint in {options.output}: starting at the first step")

    def _finish(self, stop: int) -> None:
        if stop:
            name = signal.Signals(stop).name
            self._report.line(f"stopped by {name} after step {self._saved}; --resume goes on")
            return
        if self._prompt:
            model = self._learner.copy_on_first()
            if model is not None:
                self._report.line(self._sample(model))
        if self._options.plot and self._processes.first:
            draw_losses(self._report.entries(), self._options.output / "loss.png")

    def _sample(self, model: GPT) -> str:
        options, device = self._options, self._processes.device
        generator = torch.Generator(device).manual_seed(data.derived_seed(options.seed, "sample"))
        prompt = torch.tensor([self._prompt], device=device)
        tokens = model.generate(
            prompt, options.sample, options.temperature, generator=generator if options.temperature else None
        )
        return self._text.codec.decode(tokens[0].tolist())


def _encode_prompt(options: Options, codec: data.Codec, config: GPTConfig) -> list[int]:
    """Tokens of the prompt; none where no sample is asked for."""
    if not options.sample:
        return []
    prompt = codec.encode(options.prompt)
    if not prompt:
        raise OptionError(
            f"--prompt: expected text that the tokenizer knows, got {options.prompt!r}, which has no tokens"
        )
    if len(prompt) + options.sample > config.context:
        raise OptionError(
            f"--sample: expected at most {config.context - len(prompt)} tokens after the prompt's {len(prompt)} (the "
            f"context is {config.context}), got {options.sample}"
        )
    return prompt


@contextmanager
def _deterministic() -> Iterator[None]:
    """Sums in the same order in each run. Without it, a compiled model adds up the gradient of its embedding in any."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which cuBLAS promises nothing
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # would only cost time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list to which SIGTERM and SIGINT come instead of ending the program."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; its exit status is 2 after a mistake in the options."""
    try:
        options = parse(arguments)
        with join_processes(options.device, options.timeout, options.cp, options.tp) as processes:
            return Training(options, processes).run()
    except OptionError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
