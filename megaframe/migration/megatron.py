"""Megatron-LM: reads the arguments of a training script, and converts those of the model.

Whatever a script leaves out has Megatron-LM's default, which is written out where ours is another.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from megaframe.config.megatron_settings import ALWAYS
from megaframe.config.settings_elsewhere import SETTINGS_ELSEWHERE
from megaframe.migration.conversion import (
    ALWAYS_SO,
    DECIDE,
    DIFFERS,
    Conversion,
    Setting,
    add_defaults,
)
from megaframe.migration.literals import UnknownValueError, compute, parse_python
from megaframe.migration.megatron_training import convert_training
from megaframe.migration.shell_reader import find_invocation, read_script
from megaframe.migration.shell_script import MARK

PROGRAM = "Megatron-LM"
_DEFAULTS = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "hidden_dropout": "0.1",
    "attention_dropout": "0.1",
    "lr_decay_style": "linear",
    "adam_beta2": "0.999",
    "weight_decay": "0.01",
    "eval_iters": "100",
    "log_interval": "100",
    "optimizer": "adam",
}
"""Those whose values are others than ours, or are needed to convert other settings."""
_REQUIRED = {
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "seq_length": "train.seq",
    "micro_batch_size": "train.microbatch",
    "lr": "optim.lr",
}
_BALANCE = {
    "aux_loss": "global",
    "global_aux_loss": "global",
    "seq_aux_loss": "sequence",
    "none": "none",
}
_LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def migrate_megatron(text: str, given: Mapping[str, str], world: int | None = None) -> Conversion:
    """Convert a shell script that starts Megatron-LM.

    Args:
        text: The script.
        given: Values of variables that the script takes from elsewhere.
        world: Number of ranks that train, if the script does not say.

    Raises:
        UserError: If it is no such script.
    """
    script = read_script(text, given)
    invocation = find_invocation(script)
    settings, loose = parse_arguments(invocation.arguments)
    defaults = {
        name: Setting(name, (value,), f"--{name.replace('_', '-')} {value}", True)
        for name, value in _DEFAULTS.items()
    }
    conversion = Conversion(
        PROGRAM, add_defaults(settings, defaults), world or count_ranks(invocation.launcher)
    )
    for line, note in script.notes:
        conversion.note(DECIDE, f"line {line}: {note}")
    for word in loose:
        conversion.note(DECIDE, f"{word}: belongs to no option, or is not known")
    for name, key in _REQUIRED.items():
        if name not in conversion.settings:
            conversion.note(DECIDE, f"--{name.replace('_', '-')} is not given; {key}")
    convert_model(conversion)
    convert_training(conversion)
    return conversion


def parse_arguments(words: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """Return the settings in arguments of a command, and the words that belong to none."""
    settings: list[Setting] = []
    loose: list[str] = []
    known = SETTINGS_ELSEWHERE[PROGRAM]
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            option, equals, value = word.partition("=")
            name = option[2:].replace("-", "_")
            settings.append(Setting(name, (value,) if equals else (), word))
        elif settings and not _is_full(settings[-1], known, word):
            last = settings[-1]
            settings[-1] = Setting(last.name, (*last.values, word), f"{last.written} {word}")
        else:
            loose.append(word)
    return settings, loose


def _is_full(setting: Setting, known: Mapping[str, str], word: str) -> bool:
    """Return whether a word after a setting is not its value: it is unknown, and the setting is a
    switch or has a value."""
    text = known.get(setting.name, "")
    is_switch = ("=" in text and not setting.name.endswith("_dir")) or text == ALWAYS
    if setting.name in _LISTS or MARK not in word or word.strip(MARK) != word[1:-1]:
        return False
    return is_switch or bool(setting.values)


def count_ranks(launcher: Sequence[str]) -> int | None:
    """Return how many ranks torchrun starts with these words; None if they do not say."""
    text = " ".join(launcher).replace("=", " ").replace("_", "-")
    counts = {
        name: re.search(rf"--{name} (\d{{1,6}})(?:\s|$)", text)
        for name in ("nproc-per-node", "nnodes")
    }
    per_node, nodes = counts["nproc-per-node"], counts["nnodes"]
    if per_node is None or (nodes is None and "--nnodes" in text):
        return None
    return int(per_node[1]) * (int(nodes[1]) if nodes else 1) or None


def convert_model(c: Conversion) -> None:
    """Convert the settings of the model that are not just names of keys."""
    _convert_mlp(c)
    _convert_positions(c)
    _convert_attention(c)
    _convert_experts(c)
    norm = c.read_text("normalization")
    c.put("model.norm", norm and norm.lower(), "normalization")
    if c.read_switch("disable_bias_linear"):
        if norm == "LayerNorm":
            c.note(DIFFERS, "--disable-bias-linear: norms have no biases either")
    else:
        c.put("model.bias", True, why="biases, without --disable-bias-linear")
    if not c.read_switch("untie_embeddings_and_output_weights"):
        c.put(
            "model.tie_embeddings", True, why="tied, without --untie-embeddings-and-output-weights"
        )
    dropout = c.read_number("attention_dropout")
    if dropout == 0:
        c.note(ALWAYS_SO, c.settings["attention_dropout"].written)
    elif dropout:
        c.note(DIFFERS, f"{c.settings['attention_dropout'].written}: attention has no dropout")


def _convert_mlp(c: Conversion) -> None:
    is_gated = c.read_switch("swiglu")
    fused = not (c.read_switch("no_bias_gelu_fusion") or c.has("disable_bias_linear"))
    if is_gated:
        c.put("model.activation", "swiglu", "swiglu")
    elif c.read_switch("squared_relu"):
        c.put("model.activation", "relu2", "squared_relu")
    elif c.read_switch("openai_gelu") or fused:
        c.put("model.activation", "gelu_tanh", "openai_gelu")
    else:
        c.put("model.activation", "gelu", why="without biases its gelu is the exact one")
    hidden = c.read_integer("hidden_size")
    c.put("model.hidden", hidden, "hidden_size")
    if hidden and is_gated and "ffn_hidden_size" not in c.settings:
        width = max(64, int(4 * hidden * 2 / 3) // 64 * 64)
        c.put("model.ffn", width, why="its default with --swiglu: 8/3 of the width, in 64s")


def _convert_positions(c: Conversion) -> None:
    kind = c.read_text("position_embedding_type")
    rotates = c.read_switch("use_rotary_position_embeddings") or kind in ("rope", "yarn")
    if kind not in (None, "rope", "yarn", "learned_absolute", "none"):
        c.note(DECIDE, f"{c.settings['position_embedding_type'].written}: model.position is "
               "learned, rotary or none")  # fmt: skip
    elif rotates:
        c.put("model.position", "rotary", "position_embedding_type")
    elif kind is not None:
        position = "none" if kind == "none" else "learned"
        c.put("model.position", position, "position_embedding_type")
    positions = c.read_integer("max_position_embeddings")
    if not rotates and kind == "learned_absolute":
        c.put("model.positions", positions, "max_position_embeddings")
    else:
        c.drop("max_position_embeddings")
    if c.read_switch("use_rope_scaling"):
        c.put("model.rotary_scaling.kind", "llama3", "use_rope_scaling")
        c.put("model.rotary_scaling.factor", 8.0, why="its default")
        c.put("model.rotary_scaling.factor", c.read_number("rope_scaling_factor"),
              "rope_scaling_factor")  # fmt: skip
    factor = c.read_number("rotary_scaling_factor")
    if factor is not None and factor > 1:
        c.put("model.rotary_scaling.kind", "yarn", "rotary_scaling_factor")
        c.put("model.rotary_scaling.factor", factor, "rotary_scaling_factor")
        c.put("model.rotary_scaling.original_length", 4096, why="its default for yarn")
        c.put("model.rotary_scaling.high_frequency", 32.0, why="its default for yarn")
    else:
        c.drop("mscale", "mscale_all_dim")


def _convert_attention(c: Conversion) -> None:
    groups = c.read_integer("num_query_groups")
    if c.read_switch("group_query_attention"):
        c.put("model.kv_heads", groups, "group_query_attention", "num_query_groups")
    elif groups is not None:
        c.drop("num_query_groups")
    window = [number for number in _read_numbers(c, "window_size") if number >= 0]
    if window:
        width = window[0] + 1  # tokens before, and the token itself
        pattern = _read_pattern(c, "window_attn_skip_freq", lambda n, i: int((i + 1) % n != 0))
        widths = [width if windowed else None for windowed in pattern]
        c.put("model.window", widths if None in widths else width, "window_size",
              "window_attn_skip_freq", why="tokens before, and the token itself")  # fmt: skip
    if not c.read_switch("multi_latent_attention"):
        return
    c.drop("qk_layernorm", "kv_channels")
    ranks = {"query_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "head_dim": "qk_head_dim"}
    ranks |= {"rotary_dim": "qk_pos_emb_head_dim", "value_dim": "v_head_dim"}
    for key, default in {
        "kv_rank": 32,
        "head_dim": 128,
        "rotary_dim": 64,
        "value_dim": 128,
    }.items():
        c.put(f"model.latent.{key}", default, why="its default")
    for key, name in ranks.items():
        c.put(f"model.latent.{key}", c.read_integer(name), name)
    c.said.add("multi_latent_attention")
    if not c.has("qk_layernorm"):
        c.note(DIFFERS, "--multi-latent-attention without --qk-layernorm: latents have norms here")


def _convert_experts(c: Conversion) -> None:
    experts = c.read_integer("num_experts")
    if experts is None:
        return
    c.put("model.moe.experts", experts, "num_experts")
    top_k = c.read_integer("moe_router_topk") or 2
    c.put("model.moe.top_k", top_k, "moe_router_topk")
    score = c.read_text("moe_router_score_function") or "softmax"
    given = c.has("moe_router_score_function")
    c.put("model.moe.score", score, "moe_router_score_function", why="" if given else "its default")
    before = c.read_switch("moe_router_pre_softmax")
    if score == "softmax":
        c.put("model.moe.normalise", not before, "moe_router_pre_softmax",
              why="" if before else "softmax over the chosen experts")  # fmt: skip
    else:
        c.drop("moe_router_pre_softmax")
    _convert_balance(c)
    ffn = c.read_integer("moe_ffn_hidden_size")
    c.put("model.moe.ffn", ffn, "moe_ffn_hidden_size")
    shared = c.read_integer("moe_shared_expert_intermediate_size")
    width = ffn or c.get_value("model.ffn") or c.read_integer("ffn_hidden_size")
    if shared and width and shared % width == 0:
        c.put("model.moe.shared", shared // width, "moe_shared_expert_intermediate_size")
    elif shared:
        c.note(DECIDE, f"--moe-shared-expert-intermediate-size {shared}: model.moe.shared is a "
               f"number of experts of model.moe.ffn={width}")  # fmt: skip
    top_groups = c.read_integer("moe_router_group_topk")
    c.put("model.moe.top_groups", top_groups, "moe_router_group_topk")
    if top_groups:
        c.put("model.moe.group_best", max(1, top_k // top_groups), why="top-k of a chosen group")
    _convert_expert_layers(c)


def _convert_balance(c: Conversion) -> None:
    kinds = c.read_values("moe_router_load_balancing_type") or ("aux_loss",)
    losses = _read_numbers(c, "moe_aux_loss_coeff")
    name = "moe_router_load_balancing_type"
    if c.read_switch("moe_router_enable_expert_bias"):
        c.put("model.moe.balance", "bias", "moe_router_enable_expert_bias", name)
        c.put("model.moe.balance_loss", losses[0] if losses else 0, "moe_aux_loss_coeff",
              why="" if losses else "no loss by default")  # fmt: skip
        return
    balance = _BALANCE.get(kinds[0])
    if len(kinds) > 1 or balance is None:
        c.note(DECIDE, f"{c.settings[name].written}: model.moe.balance is bias, sequence, global "
               "or none")  # fmt: skip
    if balance in ("global", "sequence") and not (losses and losses[0]):
        c.put("model.moe.balance", "none", why="--moe-aux-loss-coeff is 0")
    elif balance is not None:
        c.put(
            "model.moe.balance", balance, name, why="" if c.has(name) else "its default, aux_loss"
        )
        if balance != "none":
            c.put("model.moe.balance_loss", losses[0], "moe_aux_loss_coeff")
        if kinds[0] == "aux_loss":
            c.note(DIFFERS, "aux_loss: model.moe.balance=global takes the load of the step before, "
                   "not that of a microbatch")  # fmt: skip


def _convert_expert_layers(c: Conversion) -> None:
    layers = c.read_integer("num_layers") or 12
    pattern = _read_pattern(c, "moe_layer_freq", lambda n, i: int(i % n == 0), layers)
    if all(pattern):
        return
    written = "moe_layer_freq"
    for every in range(1, len(pattern)):
        for first in range(len(pattern)):
            if pattern == [
                int(i >= first and (i - first) % every == every - 1) for i in range(len(pattern))
            ]:
                c.put("model.moe.first", first, written)
                c.put("model.moe.every", every, written)
                return
    mixer = {"mixer": "latent"} if c.get_value("model.latent.kv_rank") else {}
    period = next(
        n for n in range(1, len(pattern) + 1)
        if all(pattern[i] == pattern[i % n] for i in range(len(pattern)))
    )  # fmt: skip
    blocks = [
        {"repeat": len([*same]), **mixer, "feed_forward": "moe" if experts else "mlp"}
        for experts, same in groupby(pattern[:period])
    ]
    c.put("model.blocks", blocks, written)


def _read_numbers(c: Conversion, name: str) -> list[float]:
    """Return the numbers in the values of a setting, such as those of `(1024, 0)`."""
    return [
        float(text) if "." in text or "e" in text else int(text)
        for value in c.read_values(name) or ()
        for text in re.findall(r"-?(?:\d+\.?\d*|\.\d+)(?:e-?\d{1,3})?", value[:1000])
    ]


def _read_pattern(c: Conversion, name: str, rule: object, layers: int = 0) -> list[int]:
    """Return the pattern of layers in a setting: a list as Python writes it, or a number N, which
    is a list of N (or of all layers) by a rule."""
    text = c.read_text(name)
    if text is None:
        return [1]
    try:
        tree = parse_python(text[:1000])
        value = compute(tree.body if isinstance(tree, ast.Expression) else tree, _refuse_name)
    except (ValueError, UnknownValueError):
        value = None
    if isinstance(value, int) and 0 < value <= 10_000 and callable(rule):
        return [rule(value, number) for number in range(layers or value)]
    if isinstance(value, list) and value and {*value} <= {0, 1}:
        return value
    c.note(DECIDE, f"{c.settings[name].written}: is no list of 0 and 1, and no number of layers")
    return [1]


def _refuse_name(name: str) -> None:
    raise UnknownValueError
