"""megatron-core's GPTModel from its local layer spec, on a CPU, in a gloo world of one.

Three of its parts require a CUDA device and are replaced by the nearest equivalent: core attention
by torch's fused one (which its Transformer Engine layers have too), the `.cuda()` of the shared
embedding by nothing, and its optimizer by torch's fused AdamW over fp32 main weights, with bf16
weights and gradients in the model as in its own bf16 optimizer. Its norms have a bias.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from workload import WORKLOAD, Workload, make_parser, run


class FusedAttention(nn.Module):
    """Core attention for a layer spec: [seq, batch, heads, width] to [seq, batch, hidden]."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.permute(2, 0, 1, 3).flatten(2)


class SequenceParallelNorm(nn.LayerNorm):
    """LayerNorm of the local spec, with weights that are marked if it runs on a part of the
    sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        for weight in self.parameters():
            setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


def start_world_of_one() -> None:
    """Create process groups of size one over gloo, without opening a port to other machines."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def build(
    shape: Workload,
    dtype: torch.dtype,
    *,
    tied: bool = True,
    first: bool = True,
    last: bool = True,
    **options: Any,
) -> nn.Module:
    """Return the GPT of the workload with weights in `dtype`; in a pipeline, a stage that may be
    the `first` or the `last` one. more: additional fields of its config."""
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
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **options,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = FusedAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SequenceParallelNorm
    setattr(transformer_block, "LayerNormImpl", SequenceParallelNorm)  # noqa: B010 - the one after the last layer
    setattr(Tensor, "cuda", lambda self: self)  # noqa: B010 - the shared embedding asks for it
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.seq,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute",
    )
    return model.to(dtype)  # including norms and positions, like its Float16Module


def replace_cuda() -> None:
    """Create on the CPU whatever would be created on a CUDA device, and make waiting for such a
    device, or using its random numbers, do nothing. A model without dropout draws none."""

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make_on_cpu(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return make_on_cpu

    for name in ("zeros", "empty", "tensor"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    setattr(torch.cuda, "current_device", lambda: "cpu")  # noqa: B010
    setattr(torch.cuda, "synchronize", lambda *_: None)  # noqa: B010
    setattr(CudaRNGStatesTracker, "fork", lambda *_: nullcontext())  # noqa: B010


class MainWeights:
    """AdamW over fp32 main weights. If the model's weights are fp32, they are the main weights."""

    def __init__(self, model: nn.Module, shape: Workload) -> None:
        self.clip = shape.clip
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.main = [
            p if p.dtype is torch.float32 else p.detach().float().requires_grad_()
            for p in self.weights
        ]
        groups = [
            {"params": [p for p in self.main if p.dim() >= 2], "weight_decay": shape.weight_decay},
            {"params": [p for p in self.main if p.dim() < 2], "weight_decay": 0.0},
        ]
        betas = (shape.beta1, shape.beta2)
        self.adamw = torch.optim.AdamW(groups, lr=shape.learning_rate, betas=betas, fused=True)

    def step(self) -> None:
        """Clip, update the main weights, copy them to the model and drop the gradients."""
        for weight, main in zip(self.weights, self.main, strict=True):
            if main is not weight:
                assert weight.grad is not None  # a dense model: every weight takes part
                main.grad, weight.grad = weight.grad.float(), None
        self.clip_gradients()
        self.adamw.step()
        with torch.no_grad():
            for weight, main in zip(self.weights, self.main, strict=True):
                if main is not weight:
                    weight.copy_(main)
        self.adamw.zero_grad(set_to_none=True)

    def clip_gradients(self) -> None:
        """Clip the gradients of the main weights by their norm."""
        nn.utils.clip_grad_norm_(self.main, self.clip)


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    warnings.filterwarnings("ignore", module="megatron")
    shape = WORKLOAD
    torch.manual_seed(shape.seed)
    start_world_of_one()
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    model = build(shape, dtype)
    optimizer = MainWeights(model, shape)
    positions = torch.arange(shape.seq).expand(shape.batch, -1)

    def step() -> float:
        ids = torch.randint(shape.vocab, (shape.batch, shape.seq + 1))
        tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        loss = model(tokens, positions, None, labels=targets).float().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    versions = {"torch": torch.__version__, "megatron-core": version("megatron-core")}
    run(step, arguments.steps, versions)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
