"""Megatron-LM: converts the settings of training, layout, data and files."""

from __future__ import annotations

import math
import re

from megaframe.config.batch_ramp import count_samples, count_steps
from megaframe.config.schema import BatchRampConfig, TrainConfig
from megaframe.migration.conversion import DECIDE, DIFFERS, WITHOUT, Conversion, parse_scalar

_STYLES = {"WSD": "wsd", "inverse-square-root": "inverse_sqrt"}
_OPTIMIZERS = {"adam": "adamw", "dist_muon": "muon"}
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_CONTEXT_KINDS = {"p2p": "ring", "a2a": "all_to_all", "a2a+p2p": "nested"}
_DISPATCH = {"alltoall": "all_to_all", "allgather": "all_gather", "flex": "deduplicated"}
_TOKENIZERS = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "hf",
    "TikTokenizer": "tiktoken",
}
_GPT2_WORDS = 50257
_MOST_RISES = 100_000


def convert_training(c: Conversion) -> None:
    """Convert everything but the model, and then what the table of names has."""
    _convert_parallel(c)
    _convert_batch(c)
    _convert_precision(c)
    _convert_rates(c)
    _convert_optimizer(c)
    _convert_data(c)
    _convert_files(c)
    c.convert_rest()


def _convert_parallel(c: Conversion) -> None:
    tensor = c.read_integer("tensor_model_parallel_size") or 1
    pipeline = c.read_integer("pipeline_model_parallel_size") or 1
    c.put("parallel.tensor", tensor, "tensor_model_parallel_size")
    c.put("parallel.pipeline", pipeline, "pipeline_model_parallel_size")
    chunks = c.read_integer("num_virtual_stages_per_pipeline_rank")
    c.put("parallel.chunks", chunks, "num_virtual_stages_per_pipeline_rank")
    layers, of_stage = c.read_integer("num_layers"), c.read_integer(
        "num_layers_per_virtual_pipeline_stage"
    )  # fmt: skip
    if layers and of_stage:
        c.put("parallel.chunks", max(1, layers // (pipeline * of_stage)),
              "num_layers_per_virtual_pipeline_stage")  # fmt: skip
    if c.get_value("model.moe.experts"):
        of_experts = c.read_integer("expert_tensor_parallel_size") or tensor
        is_default = not c.has("expert_tensor_parallel_size") and of_experts > 1
        why = "its default, the tensor ranks" if is_default else ""
        c.put("parallel.expert_tensor", of_experts, "expert_tensor_parallel_size", why=why)
    else:
        c.drop("expert_tensor_parallel_size", "moe_token_dispatcher_type")
    dispatch = c.read_text("moe_token_dispatcher_type")
    c.put("parallel.dispatch", _DISPATCH.get(dispatch or "", dispatch), "moe_token_dispatcher_type")
    kinds = c.read_values("cp_comm_type")
    if kinds:
        c.put("parallel.context_kind", _CONTEXT_KINDS.get(kinds[0], kinds[0]), "cp_comm_type")
    sizes = c.read_values("hierarchical_context_parallel_sizes")
    if sizes:
        c.put(
            "parallel.context_heads", parse_scalar(sizes[0]), "hierarchical_context_parallel_sizes"
        )
    minutes = c.read_number("distributed_timeout_minutes")
    c.put("parallel.timeout", minutes and minutes * 60, "distributed_timeout_minutes")
    if c.read_switch("tp_comm_overlap"):
        c.put("parallel.tensor_chunks", 2, "tp_comm_overlap")
    _convert_sharding(c)


def _convert_sharding(c: Conversion) -> None:
    optimizer = c.read_switch("use_distributed_optimizer")
    strategy = c.read_text("data_parallel_sharding_strategy") or "optim_grads_params"
    if c.read_switch("use_torch_fsdp2"):
        c.put("parallel.zero", 3, "use_torch_fsdp2")
    elif c.read_switch("use_megatron_fsdp"):
        c.put("parallel.zero", _SHARDING.get(strategy, strategy), "use_megatron_fsdp",
              "data_parallel_sharding_strategy")  # fmt: skip
    elif not optimizer:
        c.put("parallel.zero", 0, why="without --use-distributed-optimizer")


def _convert_batch(c: Conversion) -> None:
    micro = c.read_integer("micro_batch_size") or 1
    c.put("train.microbatch", micro, "micro_batch_size")
    batch = c.read_integer("global_batch_size")
    schedule = re.findall(r":(\d{1,12})(?:\s|$)", c.read_text("step_batch_size_schedule") or "")
    sizes = [c.get_value(f"parallel.{axis}") or 1 for axis in ("tensor", "pipeline")]
    sizes.append(c.read_integer("context_parallel_size") or 1)
    c.put("parallel.context", sizes[-1], "context_parallel_size")
    if batch:
        c.put("train.global_batch", batch, "global_batch_size")
    elif schedule:
        c.put("train.global_batch", int(schedule[-1]), "step_batch_size_schedule")
    elif "global_batch_size" not in c.settings and c.world and c.world % math.prod(sizes) == 0:
        ranks = c.world // math.prod(sizes)
        c.put(
            "train.global_batch", micro * ranks, why=f"a microbatch of each of {ranks} data ranks"
        )
    elif "global_batch_size" not in c.settings:
        c.put("train.global_batch", micro, why="a microbatch")
        c.note(DECIDE, "train.global_batch: without --global-batch-size it is a microbatch of each "
               "data rank, and how many there are is not in the file")  # fmt: skip
    if schedule:
        c.note(DECIDE, f"{c.settings['step_batch_size_schedule'].written}: train.batch_ramp rises "
               "in equal steps over a number of samples")  # fmt: skip
    ramp = c.read_values("rampup_batch_size")
    if ramp and len(ramp) == 3:
        for key, text in zip(("start", "increment", "samples"), ramp, strict=True):
            c.put(f"train.batch_ramp.{key}", parse_scalar(text), "rampup_batch_size")
    samples, steps = c.read_integer("train_samples"), c.read_integer("train_iters")
    if steps:
        c.put("train.steps", steps, "train_iters")
        c.drop("train_samples")
    elif samples:
        c.put("train.steps", max(1, _count_steps(c, samples)), "train_samples", why="samples")
    if not {"train_iters", "train_samples"} & {*c.settings}:
        c.note(DECIDE, "neither --train-iters nor --train-samples is given; train.steps")


def _count_steps(c: Conversion, samples: float) -> int:
    """Return how many whole steps some samples are, with the batch's ramp."""
    batch = c.get_value("train.global_batch") or 1
    ramp = [c.get_value(f"train.batch_ramp.{key}") for key in ("start", "increment", "samples")]
    train = TrainConfig.model_construct(global_batch=batch, batch_ramp=None)
    # Nothing is checked yet: a ramp that no run could have is as none, and is refused elsewhere.
    if all(isinstance(number, int) and number > 0 for number in ramp):
        start, increment, length = ramp
        if (batch - start) // increment <= _MOST_RISES:
            rise = BatchRampConfig.model_construct(start=start, increment=increment, samples=length)
            train = TrainConfig.model_construct(global_batch=batch, batch_ramp=rise)
    steps = count_steps(train, math.ceil(samples))
    return steps - (count_samples(train, steps) > samples)


def _convert_precision(c: Conversion) -> None:
    if not (c.read_switch("bf16") or c.read_switch("fp16")):
        c.put("train.precision", "fp32", why="fp32, without --bf16 or --fp16")
    elif c.read_switch("bf16"):
        c.put("train.precision", "bf16", "bf16")
    else:
        c.put("train.precision", "fp16", "fp16")
    kind, recipe = c.read_text("fp8_format"), c.read_text("fp8_recipe") or "delayed"
    scaling = {"blockwise": "block", "tensorwise": "tensor", "delayed": "tensor"}.get(recipe)
    if kind and scaling:
        c.put("train.fp8", scaling, "fp8_format", "fp8_recipe")
    elif kind:
        c.note(DECIDE, f"--fp8-recipe {recipe}: train.fp8 is tensor, row or block")
    if kind and recipe == "delayed":
        c.note(DIFFERS, f"{c.settings['fp8_format'].written}: scales are those of each tensor "
               "itself, not of its history")  # fmt: skip
    scale = c.read_number("loss_scale")
    if scale:
        c.note(WITHOUT, f"--loss-scale {scale:g}: the loss scale of fp16 is dynamic")
    _convert_recomputation(c)


def _convert_recomputation(c: Conversion) -> None:
    kind = c.read_text("recompute_granularity")
    method, layers = c.read_text("recompute_method"), c.read_integer("recompute_num_layers")
    if kind == "full" and method == "block":
        c.put("train.recompute_blocks", layers, "recompute_granularity", "recompute_method",
              "recompute_num_layers")  # fmt: skip
    elif kind is not None:
        c.put("train.recompute", kind, "recompute_granularity", "recompute_method")
        if layers and layers > 1:
            c.note(DIFFERS, f"--recompute-num-layers {layers}: each block is recomputed by itself")
    elif c.read_switch("recompute_activations"):
        c.put("train.recompute", "selective", "recompute_activations")
    c.drop("recompute_method", "recompute_num_layers")
    if c.get_value("train.recompute") == "selective":
        c.note(DIFFERS, "selective recomputation: here of norms and activation functions, since "
               "attention stores no scores")  # fmt: skip
        c.drop("recompute_modules")


def _convert_rates(c: Conversion) -> None:
    steps = c.get_value("train.steps")
    style = c.read_text("lr_decay_style") or "linear"
    c.put("optim.schedule", _STYLES.get(style, style), "lr_decay_style")
    length, length_name = steps, ""
    for name in ("lr_decay_iters", "lr_decay_samples"):
        number = c.read_integer(name)
        if number:
            length = number if name == "lr_decay_iters" else _count_steps(c, number)
            length_name = name
    warmup = c.read_number("lr_warmup_iters")
    c.put("optim.warmup", warmup, "lr_warmup_iters")
    samples = c.read_number("lr_warmup_samples")
    if samples:
        c.put("optim.warmup", _count_steps(c, samples), "lr_warmup_samples", why="in steps")
    share = c.read_number("lr_warmup_fraction")
    if share is not None and length:
        c.put("optim.warmup", round(share * length), "lr_warmup_fraction",
              why=f"of {length} steps")  # fmt: skip
    if style == "WSD":
        decay = c.read_integer("lr_wsd_decay_iters")
        c.put("optim.decay", decay, "lr_wsd_decay_iters")
        end = c.read_integer("lr_wsd_decay_samples")
        c.put("optim.decay", end and _count_steps(c, end), "lr_wsd_decay_samples")
        shape = c.read_text("lr_wsd_decay_style") or "exponential"
        if shape != "linear":
            c.note(DIFFERS, f"--lr-wsd-decay-style {shape}: optim.schedule=wsd falls linearly")
    elif style not in ("linear", "cosine"):
        c.drop("lr_decay_iters", "lr_decay_samples")
    elif length_name:
        c.put("optim.decay", length, length_name,
              why="in steps" if length_name == "lr_decay_samples" else "")  # fmt: skip
    rate, of_ends = c.read_number("lr"), c.read_number("decoupled_lr")
    c.put("optim.lr", rate, "lr")
    if rate and of_ends:
        for group in ("embedding", "head"):
            c.put(f"optim.groups.{group}.lr", float(f"{of_ends / rate:.6g}"), "decoupled_lr",
                  why="as a factor on optim.lr")  # fmt: skip


def _convert_optimizer(c: Conversion) -> None:
    name = c.read_text("optimizer") or "adam"
    c.put("optim.name", _OPTIMIZERS.get(name, name), "optimizer")
    unused = {"lion_beta1", "lion_beta2", "sgd_momentum", "muon_momentum", "muon_nesterov"}
    if name == "lion":
        c.put("optim.beta1", c.read_number("lion_beta1") or 0.95, "lion_beta1", why="lion")
        c.put("optim.beta2", c.read_number("lion_beta2") or 0.98, "lion_beta2", why="lion")
        c.drop("adam_beta1", "adam_beta2", "adam_eps")
    if name == "sgd" or "muon" in name:
        kind = "sgd" if name == "sgd" else "muon"
        momentum = c.read_number(f"{kind}_momentum")
        c.put("optim.momentum", 0.9 if momentum is None else momentum, f"{kind}_momentum", why=kind)
        if kind == "muon":
            c.put("optim.nesterov", c.read_switch("muon_nesterov"), "muon_nesterov", why=kind)
    c.drop(*unused)
    kinds = {c.read_text(option) for option in ("exp_avg_dtype", "exp_avg_sq_dtype")} - {
        None,
        "fp32",
    }
    if kinds == {"bf16"}:
        c.put("optim.state", "bf16", "exp_avg_dtype", "exp_avg_sq_dtype")
    elif kinds:
        c.note(DECIDE, f"optimizer state in {', '.join(map(str, kinds))}: optim.state is master, "
               "bf16 or int8")  # fmt: skip
    if c.read_switch("grad_reduce_in_bf16"):
        c.put("parallel.reduce_precision", "bf16", "grad_reduce_in_bf16")


def _convert_data(c: Conversion) -> None:
    sources = _read_sources(c, "data_path", None)
    for number, name in enumerate(("train_data_path", "valid_data_path", "test_data_path")):
        sources += _read_sources(c, name, [float(number == part) for part in range(3)])
    names = [name for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path")
             if name in c.settings]  # fmt: skip
    c.put("data.sources", sources or None, *names)
    if not sources and not names:
        c.note(DECIDE, "data.sources: name token files (PATH.bin and PATH.idx, read as they are): "
               "data.sources=[{path: PATH}]")  # fmt: skip
    split = c.read_text("split") or "969,30,1"
    shares = [float(text) for text in re.findall(r"\d{1,9}\.?\d{0,9}|\.\d{1,9}", split)[:3]]
    shares += [0.0] * (3 - len(shares))
    if sum(shares):
        parts = [round(share / sum(shares), 9) for share in shares]
        c.put("data.split", parts, "split", why="" if c.has("split") else "its default, 969,30,1")
    _convert_tokenizer(c)


def _read_sources(c: Conversion, name: str, split: list[float] | None) -> list[dict[str, object]]:
    """Return the sources that a data path lists: PATH ..., or WEIGHT PATH ..."""
    words = c.read_values(name) or ()
    weights = [parse_scalar(word) for word in words[::2]]
    weighted = len(words) % 2 == 0 and all(isinstance(weight, int | float) for weight in weights)
    if len(words) > 1 and not weighted:
        c.note(DIFFERS, f"--{name.replace('_', '-')} without weights: sources have equal weights "
               "here, whatever their sizes")  # fmt: skip
    paths = words[1::2] if weighted else words
    return [
        {"path": path, **({"weight": float(weight)} if weighted and len(words) > 2 else {}),
         **({"split": split} if split else {})}
        for path, weight in zip(paths, weights if weighted else [1.0] * len(paths), strict=True)
        if isinstance(weight, int | float)
    ]  # fmt: skip


def _convert_tokenizer(c: Conversion) -> None:
    kind, model = c.read_text("tokenizer_type"), c.read_text("tokenizer_model")
    words = c.read_integer("vocab_size")
    if kind == "NullTokenizer" and words:
        c.put("model.vocab", words + 1, "vocab_size", why="and the token that ends documents")
    elif words:
        c.put("model.vocab", words, "vocab_size")
    elif kind == "GPT2BPETokenizer" or (kind is None and c.has("merge_file")):
        c.put("model.vocab", _GPT2_WORDS, "tokenizer_type", why="GPT-2's")
    if kind in _TOKENIZERS and model:
        is_hub_name = kind == "HuggingFaceTokenizer" and re.fullmatch(r"[\w.-]+/[\w.-]+", model)
        if kind == "HuggingFaceTokenizer" and not model.endswith(".json"):
            model = f"{model.rstrip('/')}/tokenizer.json"
        c.put("data.tokenizer", f"{_TOKENIZERS[kind]}:{model}", "tokenizer_type", "tokenizer_model")
        if is_hub_name:
            c.note(DECIDE, f"data.tokenizer: {model} is a file here; nothing is downloaded")
    elif kind in _TOKENIZERS:
        c.said.add("tokenizer_type")
    elif kind not in (None, "NullTokenizer", *_TOKENIZERS):
        c.note(DECIDE, f"--tokenizer-type {kind}: data.tokenizer is sentencepiece:, hf: or "
               "tiktoken: and a path")  # fmt: skip
    if c.get_value("model.vocab") is None and c.get_value("data.tokenizer") is None:
        c.note(DECIDE, "model.vocab: its size is that of the tokenizer; give it, or data.tokenizer")


def _convert_files(c: Conversion) -> None:
    batch = c.get_value("train.global_batch") or 1
    every, count = c.read_integer("eval_interval"), c.read_integer("eval_iters")
    if every and count:
        c.put("train.eval_every", every, "eval_interval")
        c.put("train.eval_samples", count * batch, "eval_iters", why=f"of {batch} samples")
    c.put("checkpoint.folder", c.read_text("save"), "save")
    interval = c.read_integer("save_interval")
    if interval:
        c.put("checkpoint.every", interval, "save_interval")
    elif c.has("save"):
        c.put("checkpoint.every", c.get_value("train.steps"), "save", why="at the end")
    else:
        c.put("checkpoint.every", 0, why="without --save nothing is saved")
    _convert_load(c)
    c.drop("finetune")
    if c.has("tensorboard_dir"):
        c.put("metrics.tensorboard", True, "tensorboard_dir", why="in the run folder")
    if c.read_switch("profile"):
        first, last = c.read_integer("profile_step_start") or 10, c.read_integer("profile_step_end")
        c.put("metrics.profile", [*range(first, min(max(last or 12, first + 1), first + 20))],
              "profile", "profile_step_start", "profile_step_end")  # fmt: skip
    c.drop("profile_step_start", "profile_step_end")
    graphs = c.read_text("cuda_graph_impl")
    if c.read_switch("enable_cuda_graph") or graphs in ("local", "transformer_engine"):
        c.put("train.cuda_graph", True, "enable_cuda_graph", "cuda_graph_impl")


def _convert_load(c: Conversion) -> None:
    """Convert where a run continues: where it saves, which starts afresh at first; or elsewhere."""
    if not c.has("load"):
        return
    load, save = c.settings["load"], c.settings.get("save")
    if save and save.values == load.values and not c.read_switch("finetune"):
        c.put("checkpoint.resume", "latest", "load", why="where it saves")
        c.used.add("load")
    elif c.read_text("load"):
        c.note(DECIDE, f"{load.written}: a checkpoint of Megatron-LM is not read; weights come "
               "by Hugging Face's format, as checkpoint.weights")  # fmt: skip
