"""Small folders of Hugging Face models, made without transformers: configs and random weights."""

import json

import torch
from safetensors.torch import save_file

from megaframe.checkpoint.convert.huggingface.families import get_family
from megaframe.checkpoint.convert.huggingface.tensor_names import map_tensors
from megaframe.config import RunConfig
from megaframe.model.model_chunk import list_model_specs

_SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1},
    **{"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
}
CONFIGS = {
    "gpt2": {
        **{"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 20},
        **{"vocab_size": 300, "n_inner": None, "layer_norm_epsilon": 1e-5, "dtype": "float32"},
        **{"initializer_range": 0.02, "activation_function": "gelu_new"},
    },
    "llama": {**_SHAPE, "model_type": "llama", "attention_bias": False, "mlp_bias": False},
    "qwen3": {
        **{**_SHAPE, "model_type": "qwen3", "num_hidden_layers": 3, "sliding_window": 3},
        **{"use_sliding_window": True, "max_window_layers": 1},
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "mixtral": {
        **{**_SHAPE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        "sliding_window": None,
    },
    "deepseek_v3": {
        **{**_SHAPE, "model_type": "deepseek_v3", "num_experts_per_tok": 2, "q_lora_rank": 6},
        **{"moe_intermediate_size": 8, "n_routed_experts": 8, "n_shared_experts": 1},
        **{"first_k_dense_replace": 1, "kv_lora_rank": 10, "qk_rope_head_dim": 4},
        **{
            "qk_nope_head_dim": 6,
            "v_head_dim": 5,
            "n_group": 4,
            "topk_group": 2,
            "num_key_value_heads": 4,
        },
        **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_parameters": _YARN},
    },
}


def make_weights(config, dtype=torch.float32):
    """Return random weights of a model with this config, by their names in a folder."""
    family = get_family(config["model_type"])
    run = RunConfig(model=family.read_model(config))
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(dtype)
        for spec in map_tensors(family, run.model, list_model_specs(run.model, run.train))
    }


def write_folder(path, config, tensors):
    """Write a folder with one file of weights."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def write_small_folder(path, family="llama", **keys):
    """Write a valid folder of a family."""
    config = {**CONFIGS[family], **keys}
    return write_folder(path, config, make_weights(config))
