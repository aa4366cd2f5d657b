"""Print the families of Hugging Face models as Markdown: the content of docs/reference/families.md.

python tools/families.py > docs/reference/families.md
"""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.checkpoint.convert.huggingface.families import FAMILIES
from megaframe.checkpoint.convert.huggingface.family import Family
from megaframe.checkpoint.convert.huggingface.key_pairs import Pair
from megaframe.checkpoint.convert.huggingface.nested_models import NESTED_MODELS
from megaframe.checkpoint.convert.huggingface.rotary_keys import ScaledRotaryKeys
from megaframe.io.closed_output import allow_closed_output

_BEGIN = """\
# Families of Hugging Face models

`tools/checkpoint.py import-hf` and `export-hf` convert these, and `tools/families.py` generates \
this page from their rows. `python -m pytest tests/unit/checkpoint/convert` compares the logits of \
a tiny model of each with transformers, after an import and after an export. A config with a value \
that its row does not know is refused by name. Where code adds 1 to gains, or divides logits or \
multiplies values or the products of each layer by a number that is no power of 2, the weights \
here are those that fp32 rounds to, about 1e-7 beside theirs. BLOOM's code rounds a constant of \
its GELU to 8 digits, which moves logits by about 1e-9.
"""
_REFUSED = {
    "Mamba-1": ("jamba", "mamba"),
    "experts in a latent of the stream": ("nemotron_h (moe_latent_size)",),
}
"""Families that are not imported, by the first part that is missing."""


def format_page() -> str:
    """Return the whole page."""
    lines = [_BEGIN, "| `model_type` | class | parts | layout of weights |", "|---|---|---|---|"]
    for family in sorted(FAMILIES.values(), key=lambda row: row.name):
        names = ", ".join(f"`{name}`" for name in (family.name, *family.also))
        parts, layout = ", ".join(_list_parts(family)), ", ".join(_list_transforms(family))
        lines.append(f"| {names} | {family.architecture} | {parts} | {layout} |")
    lines += ["", "Of models with towers for images, the model for texts is imported:", ""]
    for name, nested in sorted(NESTED_MODELS.items()):
        texts = ", ".join(f"`{text}`" for text in (nested.text, *nested.also))
        lines.append(f"- `{name}` as {texts}")
    lines += ["", "## Refused", "", "| missing part | `model_type` |", "|---|---|"]
    for part, refused in _REFUSED.items():
        lines.append(f"| {part} | {', '.join(f'`{name}`' for name in refused)} |")
    return "\n".join(lines) + "\n"


def _list_parts(family: Family) -> Iterator[str]:
    own, keys = family.own, family.types
    yield {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[own["norm"]]
    if own.get("norms", "before") != "before":
        yield {"after": "norms after", "both": "norms before and after"}[own["norms"]]
    if own.get("parallel", "none") != "none" or {"use_parallel_residual", "parallel_attn"} & {
        *keys
    }:
        yield "parallel halves"
    if own.get("position") == "learned":
        yield "learned positions"
    if {"attn_config", "alibi"} & {*keys} or "mixer.alibi" in own:
        yield "ALiBi"
    if own.get("embedding_norm"):
        yield "norm of embeddings"
    if own.get("mixer.kind") == "latent":
        yield "latent attention"
        if "index_topk" in keys:
            yield "sparse attention with an indexer"
            if "indexer_types" in keys:
                yield "indexers that layers share"
    elif own.get("mixer.kind") == "compressed_attention":
        yield from ("compressed keys with an indexer", "grouped output products", "sinks")
        yield from ("hyper-connections", "routers by hashes of tokens")
    elif own.get("mixer.qk_norm") or {"use_qk_norm", "qk_layernorm"} & {*keys}:
        yield "norms of queries and keys"
    if "linear_num_key_heads" in keys:
        yield "gated delta net"
    if "conv_L_cache" in keys:
        yield "gated short convolution"
    if any(name.startswith("mamba2.") for name in family.block.values()):
        yield "Mamba-2"
    if "none" in (own.get("feed_forward.kind"), own.get("mixer.kind")) or family.layer_lists:
        yield "blocks with one half"
    if {"sliding_window", "window_size"} & {*keys}:
        yield "windows"
    if "num_kv_shared_layers" in keys:
        yield "keys that layers share"
    if "hidden_size_per_layer_input" in keys:
        yield "per-layer embeddings"
    if "altup_num_inputs" in keys:
        yield from ("AltUp", "LAuReL", "gates that are cut off")
    if "attention_chunk_size" in keys:
        yield "chunks"
    if "attn_scale" in keys or any(isinstance(key, ScaledRotaryKeys) for key in family.keys):
        yield "queries scaled by position"
    if "attention.sinks" in family.block.values():
        yield "sinks"
    if "v_head_dim" in keys and own.get("mixer.kind") != "latent":
        yield "widths of values"
    if own.get("head_bias"):
        yield "bias of the head"
    if own.get("mixer.output_gate"):
        yield "gated attention"
    score = own.get("moe.score", "sqrtsoftplus" if "scoring_func" in keys else None)
    if score is not None:
        bias = " with bias" if own.get("moe.balance") == "bias" else ""
        scaled = ", inputs scaled" if own.get("moe.scale_inputs") else ""
        yield f"experts ({score}{bias}{scaled})"
    if own.get("moe.shared_gate"):
        yield "gate of shared experts"
    if own.get("moe.expert_bias"):
        yield "biases of experts and routers"
    if own.get("feed_forward.kind") == "none":
        return
    path = "feed_forward.activation"
    key = next((k for k in family.keys if isinstance(k, Pair) and k.paths == path), None)
    yield own[path] if key is None else key.to_fact(key.default)


def _list_transforms(family: Family) -> Iterator[str]:
    if family.interleaved or family.own.get("mixer.kind") == "compressed_attention":
        yield "interleaved rotary pairs"
    if family.unread_positions:
        yield f"{family.unread_positions} more positions"
    if family.norm_offset:
        yield f"gains less {family.norm_offset:g}"
    if family.transposed:
        yield "transposed"
    modules = family.block.values()
    if "delta_net.gate" in modules:
        yield "products of a delta net apart"
    fused = {"attention.query attention.key attention.value", "attention.qkv", "attention.quarters"}
    if fused & {*modules}:
        yield "fused queries, keys and values"
    if "mlp.gate mlp.up" in modules:
        yield "fused gate and up"
    if "moe.all_experts.gate_up" in modules:
        yield "alternating gate and up"
    if any(name.startswith("moe.all_experts") for name in modules):
        yield "experts in one tensor"
    if family.packed:
        yield "MXFP4"
    if "head.norm" in family.scales:
        yield "factor of logits in the last norm"
    if "mamba2.gate" in family.scales:
        yield "factors of products in their weights"
    elif "attention.value" in family.scales:
        yield "factor of values in their product"
    if family.constant:
        yield "norms without weights"


if __name__ == "__main__":
    with allow_closed_output():
        print(format_page(), end="")
