"""The Trainer of Hugging Face transformers with their GPT-2, configured like the workload.

Their GPT-2 has biases, which cannot be turned off: 0.2% more parameters and no more products. A
step is timed from the end of the previous step to its own end, including batch and logged loss.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from workload import WARMUP_STEPS, WORKLOAD, Workload, emit, make_parser, read_peak_rss_bytes


class Tokens(Dataset[dict[str, Tensor]]):
    """Random samples, each of which is its own target, because the model itself shifts targets."""

    def __init__(self, shape: Workload, samples: int) -> None:
        self.shape, self.samples = shape, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(self.shape.vocab, (self.shape.seq,))
        return {"input_ids": ids, "labels": ids}


class StepClock(transformers.TrainerCallback):
    """Times at which steps ended, and the losses that were logged."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            self.losses.append(logs["loss"])


def make_model(shape: Workload) -> torch.nn.Module:
    """Return their GPT-2 in the workload's shape, with the attention that torch chooses."""
    config = transformers.GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.seq,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.ffn,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=shape.init_std,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    shape, steps = WORKLOAD, WARMUP_STEPS + arguments.steps
    torch.manual_seed(shape.seed)
    clock = StepClock()
    training_arguments = transformers.TrainingArguments(
        use_cpu=True,
        bf16=arguments.precision == "bf16",
        per_device_train_batch_size=shape.batch,
        max_steps=steps,
        learning_rate=shape.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=shape.weight_decay,
        adam_beta1=shape.beta1,
        adam_beta2=shape.beta2,
        max_grad_norm=shape.clip,
        optim="adamw_torch_fused",
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        seed=shape.seed,
    )
    transformers.Trainer(
        make_model(shape),
        training_arguments,
        train_dataset=Tokens(shape, steps * shape.batch),
        callbacks=[clock],
    ).train()
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
    seconds = seconds[WARMUP_STEPS - 1 :]
    assert len(seconds) == arguments.steps and math.isfinite(clock.losses[0])
    emit(
        tokens_per_second=shape.tokens_per_step / statistics.median(seconds),
        best_tokens_per_second=shape.tokens_per_step / min(seconds),
        peak_rss_bytes=read_peak_rss_bytes(resource.RUSAGE_SELF),
        loss=clock.losses[0],
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


if __name__ == "__main__":
    main()
