"""megatron-core's GPTModel under its own 1F1B schedule on CPUs, over gloo.

The model is that of `megatron_core.py`. What its schedule and its communication make on "the"
CUDA device is made on the CPU, and its waits for that device do nothing. Layers are divided evenly;
where they cannot be, the first and the last stage get one fewer, as it can be told to.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core import FusedAttention
from pipeline_workload import MICROBATCHES, clip, measure, parser, run, shape_of
from plain import optimizer_of
from torch import Tensor, nn
from torch.nn import functional
from workload import Workload


def replace_cuda() -> None:
    """Put on the CPU what is made on a CUDA device, and let nobody wait for one."""

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*given: Any, **named: Any) -> Tensor:
            if named.get("device") == "cuda":
                named["device"] = "cpu"
            return make(*given, **named)

        return made

    for name in ("zeros", "empty", "tensor"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    setattr(torch.cuda, "current_device", lambda: "cpu")  # noqa: B010
    setattr(torch.cuda, "synchronize", lambda *_: None)  # noqa: B010


def build(shape: Workload, stages: int) -> nn.Module:
    """This rank's stage."""
    uneven: dict[str, int] = {}
    if shape.layers % stages:
        each = -(-shape.layers // stages) - 1
        uneven = {
            "num_layers_in_first_pipeline_stage": each,
            "num_layers_in_last_pipeline_stage": each,
        }
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        ffn_hidden_size=shape.ffn,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=shape.init_std,
        activation_func=functional.gelu,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=stages,
        **uneven,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = FusedAttention
    return GPTModel(
        config,
        spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.seq,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    )


def mean_of(losses: list[float], output: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The loss of one microbatch as its schedule wants it, and a note of it."""
    loss = output.float().mean()
    losses.append(loss.item())
    return loss, {}


def train(given: argparse.Namespace) -> None:
    """The part of one rank."""
    warnings.filterwarnings("ignore", module="megatron")
    replace_cuda()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=given.stages)
    shape = shape_of(given)
    torch.manual_seed(shape.seed)
    model = build(shape, given.stages)
    optimizer = optimizer_of(model, shape)
    generator = torch.Generator().manual_seed(shape.seed)
    samples = shape.batch // MICROBATCHES
    positions = torch.arange(shape.seq).expand(samples, -1)

    def step() -> float | None:
        ids = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=generator)
        losses: list[float] = []

        def forward_step(batch: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Any]:
            ids = next(batch)
            tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            return model(tokens, positions, None, labels=targets), partial(mean_of, losses)

        forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=iter(ids.split(samples)),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=shape.seq,
            micro_batch_size=samples,
        )
        clip(model, shape.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(losses) / len(losses) if losses else None

    versions = {"torch": torch.__version__, "megatron-core": version("megatron-core")}
    measure(step, given, versions)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(train, parser(__doc__).parse_args())
