"""The Trainer of Hugging Face transformers on given masked batches.

It shuffles samples and has no way to leave them as they are, so its sampler is replaced. Its models
shift labels themselves: each sample has one token more than ours, and the first has no label.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler


class Samples(Dataset[dict[str, Tensor]]):
    """Samples [N, S] of tokens and of their next tokens, which are -100 where they do not count."""

    def __init__(self, tokens_NS: Tensor, labels_NS: Tensor) -> None:
        self.tokens, self.labels = tokens_NS, labels_NS

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, labels = self.tokens[index], self.labels[index]
        last, none = labels[-1:].clamp(min=0), labels.new_full((1,), -100)
        return {"input_ids": torch.cat((tokens, last)), "labels": torch.cat((none, labels))}


class InOrder(transformers.Trainer):
    """Takes samples in their order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> torch.utils.data.Sampler[int]:
        return SequentialSampler(self.train_dataset)


class Losses(transformers.TrainerCallback):
    """The losses that were logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            self.losses.append(logs["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder of transformers")
    parser.add_argument("--batches", required=True, help="tokens and labels [steps, batch, seq]")
    parser.add_argument("--settings", required=True, help="JSON of the optimizer")
    arguments = parser.parse_args()
    batches, settings = load_file(arguments.batches), json.loads(arguments.settings)
    steps, batch, _ = batches["tokens"].shape
    record = Losses()
    training_arguments = transformers.TrainingArguments(
        use_cpu=True,
        per_device_train_batch_size=batch // settings["microbatches"],
        gradient_accumulation_steps=settings["microbatches"],
        max_steps=steps,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        weight_decay=settings["weight_decay"],
        adam_beta1=settings["beta1"],
        adam_beta2=settings["beta2"],
        adam_epsilon=settings["eps"],
        max_grad_norm=settings["clip"],
        optim="adamw_torch",
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )
    InOrder(
        transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        training_arguments,
        train_dataset=Samples(batches["tokens"].flatten(0, 1), batches["labels"].flatten(0, 1)),
        callbacks=[record],
    ).train()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"losses": record.losses, "versions": versions}))


if __name__ == "__main__":
    main()
