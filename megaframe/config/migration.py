"""Names of settings in other programs, and the keys that they are here.

A key that is unknown here may be well known elsewhere. Messages about unknown keys and options look
here before they guess by likeness. A name that is the last part of ours, such as weight_decay, is
left out, because likeness finds it. docs/guides/migrating.md has the same names with more words,
and a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BATCH = "train.global_batch, the samples of a step over all ranks"
_STEPS = "train.steps, a number of steps"
_ALWAYS = "always on"
SETTINGS_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "Megatron-LM": {
        "num_layers": "model.layers",
        "hidden_size": "model.hidden",
        "num_attention_heads": "model.heads",
        "num_query_groups": "model.kv_heads",
        "group_query_attention": "model.kv_heads",
        "kv_channels": "model.head_dim",
        "ffn_hidden_size": "model.ffn",
        "seq_length": "train.seq",
        "max_position_embeddings": "model.positions, for learned positions only",
        "position_embedding_type": "model.position",
        "rotary_percent": "model.rotary_fraction",
        "normalization": "model.norm",
        "norm_epsilon": "model.norm_eps",
        "swiglu": "model.activation=swiglu",
        "squared_relu": "model.activation=relu2",
        "disable_bias_linear": "model.bias=false, the default",
        "add_qkv_bias": "model.qkv_bias",
        "qk_layernorm": "model.qk_norm",
        "untie_embeddings_and_output_weights": "model.tie_embeddings=false, the default",
        "init_method_std": "model.init_std",
        "hidden_dropout": "model.dropout",
        "window_size": "model.window",
        "num_experts": "model.moe.experts",
        "moe_router_topk": "model.moe.top_k",
        "moe_ffn_hidden_size": "model.moe.ffn",
        "moe_router_score_function": "model.moe.score",
        "moe_router_load_balancing_type": "model.moe.balance",
        "moe_aux_loss_coeff": "model.moe.balance_loss",
        "moe_z_loss_coeff": "model.moe.z_loss",
        "moe_expert_capacity_factor": "model.moe.capacity",
        "moe_token_dispatcher_type": "parallel.dispatch",
        "q_lora_rank": "model.latent.query_rank",
        "kv_lora_rank": "model.latent.kv_rank",
        "mtp_num_layers": "model.mtp_depth",
        "mtp_loss_scaling_factor": "train.mtp_weight",
        "tensor_model_parallel_size": "parallel.tensor",
        "pipeline_model_parallel_size": "parallel.pipeline",
        "context_parallel_size": "parallel.context",
        "expert_model_parallel_size": "parallel.expert",
        "expert_tensor_parallel_size": "parallel.expert_tensor",
        "sequence_parallel": _ALWAYS,
        "cp_comm_type": "parallel.context_kind",
        "num_virtual_stages_per_pipeline_rank": "parallel.chunks",
        "num_layers_per_virtual_pipeline_stage": (
            "parallel.chunks: layers / (pipeline ranks * that number)"
        ),
        "use_distributed_optimizer": "parallel.zero=1, the default",
        "num_distributed_optimizer_instances": "parallel.data_replicate",
        "overlap_grad_reduce": _ALWAYS,
        "overlap_param_gather": _ALWAYS,
        "tp_comm_overlap": "parallel.tensor_chunks",
        "grad_reduce_in_bf16": "parallel.reduce_precision=bf16",
        "ddp_bucket_size": "parallel.bucket_size",
        "distributed_timeout_minutes": "parallel.timeout, in seconds",
        "micro_batch_size": "train.microbatch",
        "global_batch_size": "train.global_batch",
        "rampup_batch_size": "train.batch_ramp",
        "train_iters": "train.steps",
        "train_samples": f"{_STEPS}: divide samples by the batch size",
        "bf16": "train.precision=bf16, the default",
        "fp16": "train.precision=fp16",
        "recompute_granularity": "train.recompute",
        "recompute_activations": "train.recompute=selective",
        "recompute_num_layers": "train.recompute_blocks",
        "lr_decay_style": "optim.schedule",
        "lr_decay_iters": "optim.decay",
        "lr_warmup_iters": "optim.warmup",
        "adam_beta1": "optim.beta1",
        "adam_beta2": "optim.beta2",
        "adam_eps": "optim.eps",
        "clip_grad": "optim.clip",
        "optimizer_cpu_offload": "optim.offload=true",
        "exp_avg_dtype": "optim.state",
        "initial_loss_scale": "optim.loss_scale",
        "data_path": "data.sources",
        "tokenizer_type": "data.tokenizer, as KIND:PATH",
        "tokenizer_model": "data.tokenizer, as KIND:PATH",
        "reset_position_ids": "data.reset_positions",
        "reset_attention_mask": "data.reset_attention",
        "eod_mask_loss": "data.mask_eod",
        "eval_interval": "train.eval_every",
        "eval_iters": "train.eval_samples, in samples instead of batches",
        "save": "checkpoint.folder",
        "save_interval": "checkpoint.every",
        "load": "checkpoint.resume",
        "finetune": "checkpoint.weights",
        "log_interval": "meter.every",
        "tensorboard_dir": "meter.tensorboard=true",
        "wandb_project": "meter.wandb",
        "deterministic_mode": "run.deterministic=true",
        "enable_cuda_graph": "train.cuda_graph",
    },
    "Hugging Face": {
        "num_hidden_layers": "model.layers",
        "hidden_size": "model.hidden",
        "num_attention_heads": "model.heads",
        "num_key_value_heads": "model.kv_heads",
        "intermediate_size": "model.ffn",
        "vocab_size": "model.vocab",
        "max_position_embeddings": "model.positions, for learned positions only",
        "rope_theta": "model.rotary_base",
        "rms_norm_eps": "model.norm_eps",
        "hidden_act": "model.activation",
        "attention_bias": "model.qkv_bias",
        "tie_word_embeddings": "model.tie_embeddings",
        "initializer_range": "model.init_std",
        "sliding_window": "model.window",
        "num_local_experts": "model.moe.experts",
        "num_experts_per_tok": "model.moe.top_k",
        "moe_intermediate_size": "model.moe.ffn",
        "max_steps": "train.steps",
        "num_train_epochs": f"{_STEPS}: there are no epochs",
        "per_device_train_batch_size": "train.microbatch",
        "gradient_accumulation_steps": _BATCH,
        "learning_rate": "optim.lr",
        "lr_scheduler_type": "optim.schedule",
        "warmup_steps": "optim.warmup",
        "adam_beta1": "optim.beta1",
        "adam_beta2": "optim.beta2",
        "adam_epsilon": "optim.eps",
        "max_grad_norm": "optim.clip",
        "label_smoothing_factor": "train.label_smoothing",
        "bf16": "train.precision=bf16, the default",
        "fp16": "train.precision=fp16",
        "gradient_checkpointing": "train.recompute=full",
        "torch_compile": "train.compile=inductor",
        "output_dir": "run.dir",
        "logging_steps": "meter.every",
        "report_to": "meter.wandb or meter.tensorboard",
        "eval_steps": "train.eval_every",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep",
        "resume_from_checkpoint": "checkpoint.resume",
    },
    "DeepSpeed": {
        "train_batch_size": "train.global_batch",
        "train_micro_batch_size_per_gpu": "train.microbatch",
        "gradient_accumulation_steps": _BATCH,
        "gradient_clipping": "optim.clip",
        "zero_optimization": "parallel.zero",
        "zero_optimization.stage": "parallel.zero",
        "zero_optimization.offload_optimizer": "optim.offload=true",
        "bf16.enabled": "train.precision=bf16, the default",
        "fp16.enabled": "train.precision=fp16",
        "warmup_num_steps": "optim.warmup",
        "communication_data_type": "parallel.reduce_precision",
        "zero_optimization.reduce_bucket_size": "parallel.bucket_size",
        "activation_checkpointing": "train.recompute",
        "autotp_size": "parallel.tensor",
        "sequence_parallel_size": "parallel.context",
        "steps_per_print": "meter.every",
        "elasticity": "faults.elastic=true",
        "autotuning": "parallel.auto=true",
    },
    "torchtitan": {
        "local_batch_size": "train.microbatch",
        "global_batch_size": "train.global_batch",
        "seq_len": "train.seq",
        "max_norm": "optim.clip",
        "mixed_precision_param": "train.precision",
        "mixed_precision_reduce": "parallel.reduce_precision",
        "dataset": "data.sources, which are token files",
        "data_parallel_shard_degree": "parallel.data with parallel.zero=3",
        "data_parallel_replicate_degree": "parallel.data_replicate",
        "tensor_parallel_degree": "parallel.tensor",
        "context_parallel_degree": "parallel.context",
        "pipeline_parallel_degree": "parallel.pipeline",
        "pipeline_parallel_schedule": "parallel.schedule",
        "expert_parallel_degree": "parallel.expert",
        "expert_tensor_parallel_degree": "parallel.expert_tensor",
        "lr_scheduler.warmup_steps": "optim.warmup",
        "decay_type": "optim.schedule",
        "min_lr_factor": "optim.min_lr, a rate instead of a factor",
        "activation_checkpoint.mode": "train.recompute",
        "compile.enable": "train.compile=inductor",
        "checkpoint.interval": "checkpoint.every",
        "keep_latest_k": "checkpoint.keep",
        "initial_load_path": "checkpoint.weights",
        "log_freq": "meter.every",
        "enable_tensorboard": "meter.tensorboard=true",
        "enable_wandb": "meter.wandb",
        "train_timeout_seconds": "parallel.timeout",
        "validation.freq": "train.eval_every",
    },
    "nanoGPT": {
        "n_layer": "model.layers",
        "n_head": "model.heads",
        "n_embd": "model.hidden",
        "block_size": "train.seq",
        "batch_size": "train.microbatch",
        "gradient_accumulation_steps": _BATCH,
        "learning_rate": "optim.lr",
        "max_iters": "train.steps",
        "warmup_iters": "optim.warmup",
        "lr_decay_iters": "optim.decay",
        "decay_lr": "optim.schedule",
        "grad_clip": "optim.clip",
        "eval_interval": "train.eval_every",
        "eval_iters": "train.eval_samples, in samples instead of batches",
        "log_interval": "meter.every",
        "dataset": "data.sources, which are token files",
        "out_dir": "run.dir",
        "init_from": "checkpoint.resume or checkpoint.weights",
        "dtype": "train.precision",
        "wandb_log": "meter.wandb",
        "wandb_project": "meter.wandb",
    },
}
"""By program and name of a setting: the key that it is here, with a value where only that value is
the same, and what else there is to say. Names are written with underscores; those with a dot are
known only after that section."""

RENAMED_KEYS: Mapping[str, str] = {
    "compress_share": "parallel.compress_keep",
    "compress_rank": "parallel.compress_keep",
    "schedule_group": "parallel.schedule_microbatches",
    "schedule_memory": "parallel.schedule_microbatches",
}
"""By the name of a key of earlier versions, in the section of its successor: the key that has
replaced it. Of each two, a run could use only one."""


def upgrade_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in a checkpoint, as plain values, with the keys of this version: what the
    former ones said that had an effect, under the keys that have replaced them."""
    section = config.get("parallel")
    if not isinstance(section, dict):
        return {**config}
    # These had defaults of their own; only that of the compression in use meant anything.
    unused = {"compress_rank": "topk", "compress_share": "powersgd"}
    parallel = {name: value for name, value in section.items() if name not in RENAMED_KEYS}
    for name in RENAMED_KEYS:
        kind = section.get("compress")
        if section.get(name) is None or (name in unused and kind in ("none", "int8", unused[name])):
            continue
        parallel[RENAMED_KEYS[name].partition(".")[2]] = section[name]
    return {**config, "parallel": parallel}


def translate_setting(name: str) -> str | None:
    """Say what a name of another program is here: `Megatron-LM's num_layers is model.layers`; or
    that of a former key.

    Args:
        name: As it was given, with or without a section and leading dashes; `num-layers` is
            `num_layers`.

    Returns:
        A clause for each thing that it is in some program; None if nobody has the name.
    """
    parts = name.strip().lstrip("-").lower().replace("-", "_").split(".")
    for start in range(len(parts)):
        foreign_name = ".".join(parts[start:])
        owners: dict[str, list[str]] = {}
        for program, names in SETTINGS_ELSEWHERE.items():
            if foreign_name in names:
                owners.setdefault(names[foreign_name], []).append(f"{program}'s")
        if foreign_name in RENAMED_KEYS:
            return f"{RENAMED_KEYS[foreign_name]} has replaced {foreign_name}"
        if owners:
            clauses = (
                f"{' and '.join(programs)} {foreign_name} is {key}"
                for key, programs in owners.items()
            )
            return "; ".join(clauses)
    return None
