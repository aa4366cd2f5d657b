"""nanoGPT or plain PyTorch on given batches, from given weights, with given learning rates.

The loop is that of nanoGPT's train.py: losses of microbatches are divided by their number,
gradients are clipped, and AdamW decays matrices and tables. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from nanogpt_checkout import import_model, read_revision
from plain import PlainGPT, make_optimizer
from safetensors.torch import load_file
from torch import Tensor, nn
from workload import WORKLOAD

NAMES = {
    "plain": {
        "embedding.tokens.weight": "tokens.weight",
        "embedding.positions.weight": "positions.weight",
        "attention_norm.gain": "attention_norm.weight",
        "attention.qkv.weight": "query_key_value.weight",
        "attention.output.weight": "attention_output.weight",
        "mlp_norm.gain": "mlp_norm.weight",
        "mlp.up.weight": "mlp_up.weight",
        "mlp.down.weight": "mlp_down.weight",
        "head.norm.gain": "norm.weight",
    },
    "nanogpt": {
        "embedding.tokens.weight": "transformer.wte.weight",
        "embedding.positions.weight": "transformer.wpe.weight",
        "attention_norm.gain": "ln_1.weight",
        "attention.qkv.weight": "attn.c_attn.weight",
        "attention.output.weight": "attn.c_proj.weight",
        "mlp_norm.gain": "ln_2.weight",
        "mlp.up.weight": "mlp.c_fc.weight",
        "mlp.down.weight": "mlp.c_proj.weight",
        "head.norm.gain": "transformer.ln_f.weight",
    },
}
"""Names of the peers' tensors by ours, within a block after `blocks.N.`"""
BLOCKS = {"plain": "blocks.", "nanogpt": "transformer.h."}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; otherwise plain")
    parser.add_argument("--weights", required=True, help="our initial weights")
    parser.add_argument("--batches", required=True, help="tokens and labels [steps, batch, seq]")
    parser.add_argument("--settings", required=True, help="JSON of model and optimizer")
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings)
    kind = "plain" if arguments.nanogpt is None else "nanogpt"
    build = build_plain if arguments.nanogpt is None else build_nanogpt
    model, optimizer, compute_loss = build(settings, arguments.nanogpt)
    load_weights(model, kind, load_file(arguments.weights))
    batches = load_file(arguments.batches)
    losses = []
    for tokens, labels, rate in zip(
        batches["tokens"], batches["labels"], settings["rates"], strict=True
    ):
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        pieces = settings["microbatches"]
        for inputs, targets in zip(tokens.chunk(pieces), labels.chunk(pieces), strict=True):
            loss = compute_loss(inputs, targets) / pieces
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    revision = {} if arguments.nanogpt is None else {"nanogpt": read_revision(arguments.nanogpt)}
    print(json.dumps({"losses": losses, "versions": {"torch": torch.__version__, **revision}}))


Built = tuple[nn.Module, torch.optim.Optimizer, Callable[[Tensor, Tensor], Tensor]]


def build_plain(settings: Mapping[str, Any], checkout: Path | None) -> Built:
    """Return the model of plain PyTorch, its optimizer, and the mean loss of [batch, seq]."""
    names = ("layers", "heads", "hidden", "ffn", "seq", "vocab", "beta1", "beta2", "weight_decay")
    shape = replace(WORKLOAD, **{name: settings[name] for name in names})
    model = PlainGPT(shape)
    return model, make_optimizer(model, shape), model


def build_nanogpt(settings: Mapping[str, Any], checkout: Path) -> Built:
    """Return nanoGPT's model, its optimizer, and the mean loss of [batch, seq]."""
    module = import_model(checkout)
    shape = module.GPTConfig(
        block_size=settings["seq"],
        vocab_size=settings["vocab"],
        n_layer=settings["layers"],
        n_head=settings["heads"],
        n_embd=settings["hidden"],
        dropout=0.0,
        bias=False,
    )
    model = module.GPT(shape)
    betas = settings["beta1"], settings["beta2"]
    optimizer = model.configure_optimizers(settings["weight_decay"], 1.0, betas, "cpu")
    return model, optimizer, lambda tokens, labels: model(tokens, labels)[1]


def load_weights(model: nn.Module, kind: str, weights: Mapping[str, Tensor]) -> None:
    """Load our initial weights. Queries, keys and values are [heads, 3, width, hidden] here and in
    plain PyTorch, and [3, heads, width, hidden] in nanoGPT."""
    renamed = {}
    for name, weight in weights.items():
        block, inner = "", name
        if name.startswith("blocks."):
            _, number, inner = name.split(".", 2)
            block = f"{BLOCKS[kind]}{number}."
        if inner == "attention.qkv.weight":
            ordered = weight if kind == "plain" else weight.transpose(0, 1)
            weight = ordered.flatten(0, 2)
        elif inner == "attention.output.weight":
            weight = weight.flatten(1)
        renamed[block + NAMES[kind][inner]] = weight.contiguous()
    missing, unknown = model.load_state_dict(renamed, strict=False)
    assert not unknown and all(name.startswith("lm_head") for name in missing), (missing, unknown)


if __name__ == "__main__":
    main()
