"""TRL's GRPO trainer with prefix trees: prompts are computed once for all their completions.

pip install trl
python examples/trainers/trl_grpo.py

The trainer samples, rewards and optimizes as always. One method is replaced: it computes the log-probabilities of the
completions, of a packed row instead of a padded batch.
"""

from __future__ import annotations

import tempfile
from typing import Any

import datasets
import tiny_llama
import torch
import trl
from torch import Tensor

from flashtile.integrations.transformers import prefix_tree_inputs
from flashtile.prefix_trees import PrefixTree


class PrefixTreeGRPOTrainer(trl.GRPOTrainer):
    """GRPO on text, of models with `attn_implementation="flashtile"`."""

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Log-probabilities and entropies of the last tokens, each `[batch, logits_to_keep]`, 0 for padding."""
        if compute_aux_loss or any(value is not None for value in images.values()):
            raise ValueError("expected text, and no auxiliary loss, with prefix trees")
        real = attention_mask.bool()
        tree = PrefixTree.from_sequences(
            [row[kept] for row, kept in zip(input_ids, real, strict=True)], device=input_ids.device
        )
        with self.accelerator.autocast():
            logits = model(**prefix_tree_inputs(self.accelerator.unwrap_model(model), tree)).logits[0]
        completed = real[:, -logits_to_keep:].sum(dim=1).tolist()
        scale = 1 / self.temperature

        def of_completions(values: Tensor, shift: int) -> Tensor:
            """`[batch, logits_to_keep]` from values of packed rows; a row predicts the token that is `shift` later."""
            parts = [
                each[len(each) - length - shift : len(each) - shift]
                for each, length in zip(tree.unpack(values), completed, strict=True)
            ]
            padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
            return torch.nn.functional.pad(padded, (0, logits_to_keep - padded.shape[1]))

        log_probs = of_completions(tree.log_probs(logits, logit_scale=scale), 0)
        entropies = None
        if compute_entropy:
            with torch.no_grad():
                entropies = of_completions(torch.distributions.Categorical(logits=logits.float() * scale).entropy(), 1)
        return log_probs, entropies, None


def vowels(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def make_trainer(kind: type[trl.GRPOTrainer], output: str, steps: int, completions: int = 8) -> trl.GRPOTrainer:
    """A trainer of a tiny model, on a CPU."""
    prompts = ["say something = ", "and then = ", "a long prompt that all completions share = ", "x = "]
    arguments = trl.GRPOConfig(
        output_dir=output, max_steps=steps, per_device_train_batch_size=completions, num_generations=completions,
        max_completion_length=12, learning_rate=3e-3, temperature=0.9, beta=0.0, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    return kind(
        model=tiny_llama.make_model(), reward_funcs=vowels, args=arguments,
        processing_class=tiny_llama.make_tokenizer(), train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip


def main(steps: int = 30) -> list[float]:
    """Trains, and returns the mean reward of each step."""
    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(PrefixTreeGRPOTrainer, output, steps)
        trainer.train()
        return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    rewards = main()
    print(f"mean reward: {sum(rewards[:5]) / 5:.2f} in the first five steps, {sum(rewards[-5:]) / 5:.2f} in the last")
