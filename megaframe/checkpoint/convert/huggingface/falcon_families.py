"""Falcon (TII 2023): two forms of a block, whose halves are parallel, or not in the older one; and
two of positions, of which Falcon-RW has ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.dense_families import (
    BIASES,
    LLAMA,
    MLP_BIASES,
    NO_BIASES,
)
from megaframe.checkpoint.convert.huggingface.gpt_families import ACTIVATIONS, NEOX_BLOCK
from megaframe.checkpoint.convert.huggingface.key_pairs import Key, Keys, Pair, choose
from megaframe.checkpoint.convert.huggingface.key_types import Flag, Size
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.errors import UserError


@dataclass(frozen=True)
class FalconForm(Key):
    """How many heads of keys and values there are, and whether halves are parallel: two forms, of
    which the newer one has any number of heads, and one norm or two."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The form, and the keys that each of them reads."""
        return {
            **{"new_decoder_architecture": Flag, "multi_query": Flag, "num_kv_heads": Size},
            **{"parallel_attn": bool, "num_ln_in_parallel_attn": Size},
        }

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set heads and norms."""
        heads, kv_heads = facts.get("mixer.heads"), config.get("num_kv_heads")
        norms, is_parallel = (
            config.get("num_ln_in_parallel_attn"),
            config.get("parallel_attn", True),
        )
        if config.get("new_decoder_architecture"):
            if not is_parallel:
                raise UserError("parallel_attn=False is not what new_decoder_architecture computes")
            if norms not in (None, 1, 2):
                raise UserError(f"num_ln_in_parallel_attn={norms} is not supported, only 1 and 2")
            facts.set("mixer.kv_heads", kv_heads or heads)
            facts.set("parallel", "one_norm" if norms == 1 else "two_norms")
            return
        is_shared = config.get("multi_query", True)
        if not is_shared and kv_heads not in (None, heads):
            raise UserError(
                f"num_kv_heads={kv_heads} is not supported with multi_query=False, only "
                f"num_attention_heads={heads}"
            )
        if is_parallel and norms == 2:
            raise UserError(
                "num_ln_in_parallel_attn=2 is not supported without new_decoder_architecture"
            )
        facts.set("mixer.kv_heads", 1 if is_shared else heads)
        facts.set("parallel", "one_norm" if is_parallel else "none")

    def write(self, facts: Facts) -> Keys:
        """Return the older form where it has what the model has."""
        kv_heads, heads = facts.get("mixer.kv_heads"), facts.get("mixer.heads")
        parallel = facts.get("parallel")
        is_new = parallel == "two_norms" or kv_heads not in (1, heads)
        return {
            **{"new_decoder_architecture": is_new, "multi_query": not is_new and kv_heads == 1},
            **{"num_kv_heads": kv_heads, "parallel_attn": parallel != "none"},
            "num_ln_in_parallel_attn": (2 if parallel == "two_norms" else 1) if is_new else None,
        }


@dataclass(frozen=True)
class FalconPositions(Key):
    """Whether positions are those of ALiBi, whose biases its code rounds to bfloat16 whatever
    computes the rest."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {"alibi": bool}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set what stands in the place of rotation."""
        if not config.get("alibi"):
            return
        heads, kv_heads = facts.get("mixer.heads"), facts.get("mixer.kv_heads")
        if kv_heads != heads:
            raise UserError(
                f"alibi=True with {kv_heads} key heads for num_attention_heads={heads} is not "
                "supported, only with as many"
            )
        for name, value in (("rotary", False), ("alibi", 8.0), ("alibi_form", "falcon")):
            facts.set(f"mixer.{name}", value)

    def write(self, facts: Facts) -> Keys:
        """Return the key."""
        return {"alibi": facts.get("mixer.alibi") is not None}


FALCON = LLAMA.derive(
    "falcon",
    "FalconForCausalLM",
    Pair("ffn_hidden_size", "feed_forward.ffn"),
    Pair("layer_norm_epsilon", "norm_eps", default=1e-5),
    Pair("bias", (*BIASES, *MLP_BIASES), default=False),
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    choose("activation", "feed_forward.activation", ACTIVATIONS, default="gelu"),
    FalconForm(),
    FalconPositions(),
    without=("rms_norm_eps", "intermediate_size", "num_key_value_heads", "head_dim"),
    own={"norm": "layernorm", "norm_bias": True},
    fixed={
        **{**NO_BIASES, "apply_residual_connection_post_layernorm": False},
    },
    training=("hidden_dropout",),
    ends={
        **dict.fromkeys(LLAMA.ends),
        "transformer.word_embeddings": "embedding.tokens",
        "transformer.ln_f": "head.norm",
        "lm_head": "head",
    },
    block={
        **dict.fromkeys(LLAMA.block),
        **{name.replace("attention.", "self_attention."): own for name, own in NEOX_BLOCK.items()},
        "post_attention_layernorm": "mlp_norm",
    },
    two_norms={
        **{"input_layernorm": "", "post_attention_layernorm": ""},
        **{"ln_attn": "attention_norm", "ln_mlp": "mlp_norm"},
    },
    layer="transformer.h.{}.",
    code={
        "AutoConfig": "configuration_falcon.FalconConfig",
        "AutoModel": "modeling_falcon.FalconModel",
        "AutoModelForSequenceClassification": "modeling_falcon.FalconForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_falcon.FalconForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_falcon.FalconForQuestionAnswering",
        "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
    },
)
FALCON_FAMILIES = (FALCON,)
