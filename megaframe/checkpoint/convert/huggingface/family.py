"""A family of Hugging Face models: a `model_type` with its keys, and the names of its tensors.

A family is a row of data that serves both directions. Every key of its `config.json` is in one of
its lists: those that are read, those that have only one supported value, and those that change no
logit. Any other key is refused, because a key that is not read here may well change what
transformers computes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from megaframe.checkpoint.convert.huggingface.build_model import build_model
from megaframe.checkpoint.convert.huggingface.key_pairs import Key, Keys
from megaframe.checkpoint.convert.huggingface.key_types import (
    LAYERS,
    Count,
    Shape,
    Size,
    Text,
    check_sizes,
    check_types,
    restore_floats,
)
from megaframe.checkpoint.convert.huggingface.model_facts import (
    Facts,
    describe_model,
    find_differences,
    start_facts,
)
from megaframe.checkpoint.convert.huggingface.mxfp4 import MXFP4
from megaframe.config import ModelConfig
from megaframe.config.registry import list_parts
from megaframe.errors import UserError, join_or
from megaframe.io.untrusted import make_printable

_MAX_NAMED_KEYS = 5
"""Number of keys that an error names."""
_DROPOUTS = ("_dropout", "_pdrop")
"""What the names of rates end with that some classes do not take for 0 if they are missing."""
_QUANTISATION_KEYS = {"quant_method", "modules_to_not_convert", "dequantize"}
"""What a quantised model's section may say; which modules are not is seen from the tensors."""
_COMMON_READ: dict[str, Any] = {"model_type": str, "dtype": Text, "torch_dtype": Text}
_COMMON_FIXED: dict[str, Any] = {
    **{"is_causal": True, "is_encoder_decoder": False, "add_cross_attention": False},
    **{"cross_attention_hidden_size": None, "pruned_heads": {}, "per_layer_config": None},
    **{"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0},
}
_NEUTRAL = frozenset(
    {
        # Where the folder comes from, and what other programs make of it.
        *("architectures", "transformers_version", "_name_or_path", "name_or_path"),
        *("tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
        *("decoder_start_token_id", "unk_token_id", "_attn_implementation_autoset"),
        *("attn_implementation", "experts_implementation", "unsloth_version", "unsloth_fixed"),
        # What else a call returns, and heads for other tasks.
        *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("return_dict", "torchscript", "chunk_size_feed_forward", "tie_last_hidden_states"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "is_decoder"),
        *("tie_encoder_decoder", "use_bfloat16", "tf_legacy_loss", "pretraining_tp"),
        # Settings of generation, which older versions kept here.
        *("task_specific_params", "prefix", "max_length", "max_new_tokens", "min_length"),
        *("do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "output_scores", "return_dict_in_generate", "suppress_tokens"),
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "begin_suppress_tokens"),
    }
)
"""Keys without influence on the logits of any family, whatever their values."""


@dataclass(frozen=True)
class Family:
    """A row of the table of families.

    Attributes:
        name: The `model_type`.
        architecture: The class that `config.json` names.
        keys: The keys that are read and written.
        own: Facts that all its models have, or functions of the other facts.
        fixed: Keys that have the only supported value if they are there. An export writes them.
        training: Keys that act in training alone, so that a value other than 0 is worth a note.
        neutral: Keys that change no logit.
        aliases: Other names of keys.
        positions: The key of the longest text.
        ends: Modules of their embedding and head, and those of ours that are stacked in each.
        block: The same for a layer: `attention.query`, `attention.qkv` for all of a group of heads
            after another, `attention.quarters` for queries, values and keys of each quarter of the
            heads, `mlp.gate`, `moe.experts.up` of one expert, `moe.all_experts.up` of all
            in one tensor with this whole name (and `_bias` after it), `moe.all_experts.gate_up` of
            those whose rows of gate and up alternate, `constant 0.5` of a number that theirs keeps
            and that has no other value, `mlp_norm or attention_post_norm` of that which a layer
            has. Names with `{expert}` or `{head}` are of each
            expert, or of each head.
        other_names: What changes in this row (`ends`, `block`, `layer`) for the names of other
            folders, as transformers saves them otherwise than they are published.
        two_norms: What of it differs in layers whose halves start from the same stream, with a norm
            each; empty for a module that these do not have.
        layer: Beginning of the names of a layer's modules.
        transposed: Whether the matrices of layers are.
        transposed_experts: Whether those of all experts in one tensor are.
        interleaved: Whether the rows of rotary pairs are neighbours.
        interleaved_indexer: The same of an indexer.
        norm_offset: What their norms add to a gain.
        unread_positions: Rows before the others of their table of positions, which no text reads.
        scales: Modules of ours whose weights have a factor that is a key of theirs, each with the
            path of the fact that has it.
        constant: Modules of ours that have no weights there, and must have their initial ones.
        has_empty_shared: Whether code has shared experts of no width where there are none.
        other_models: What the names of tensors begin with that predict further tokens, if they are
            not of layers after the last one.
        skipped: Parts of the names of tensors that no logit of a text needs.
        numbers: Keys of ids that may be missing, and may not be null.
        predictors: The key of the number of layers after the last one, which predict tokens.
        also: Other names of the same code.
        code: `auto_map` of folders whose code transformers has since taken over.
        packed: Whether folders may have matrices of experts in MXFP4.
        layer_lists: Keys that list the layers, the first of which says how many there are; empty if
            a number does.
    """

    name: str
    architecture: str
    keys: tuple[Key, ...]
    own: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    training: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    positions: str = "max_position_embeddings"
    ends: Mapping[str, str] = field(default_factory=dict)
    block: Mapping[str, str] = field(default_factory=dict)
    other_names: tuple[Mapping[str, Any], ...] = ()
    two_norms: Mapping[str, str] = field(default_factory=dict)
    layer: str = "model.layers.{}."
    transposed: bool = False
    transposed_experts: bool = False
    interleaved: bool = False
    interleaved_indexer: bool = False
    norm_offset: float = 0.0
    unread_positions: int = 0
    scales: Mapping[str, str] = field(default_factory=dict)
    constant: tuple[str, ...] = ()
    has_empty_shared: bool = False
    skipped: tuple[str, ...] = ()
    other_models: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    predictors: str = ""
    also: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    packed: bool = False
    layer_lists: tuple[str, ...] = ()

    def derive(
        self,
        name: str,
        architecture: str,
        *keys: Key,
        without: Collection[str] = (),
        **changes: Any,
    ) -> Family:
        """Return a row for a family that differs in a few things.

        Args:
            name: Of the new family.
            architecture: Its class.
            keys: Keys in place of those with the same names, or new ones.
            without: Keys that it does not have.
            changes: Fields. Mappings are added to those of this family, where None removes an item;
                lists of keys are added; other fields are replaced.
        """
        added = {foreign for key in keys for foreign in key.types}
        added |= {*changes.get("fixed", ()), *without}
        kept = tuple(key for key in self.keys if not added & {*key.types})
        merged: dict[str, Any] = {"name": name, "architecture": architecture, "also": ()}
        for attribute, value in changes.items():
            before = getattr(self, attribute)
            if isinstance(before, Mapping):
                items = {**before, **value}.items()
                merged[attribute] = {
                    k: v for k, v in items if v is not None or attribute == "fixed"
                }
            elif attribute in ("training", "neutral"):
                merged[attribute] = (*before, *value)
            else:
                merged[attribute] = value
        fixed = merged.get("fixed", self.fixed)
        read = {foreign for key in keys for foreign in key.types}
        merged["fixed"] = {key: value for key, value in fixed.items() if key not in read}
        return replace(self, keys=(*kept, *keys), **merged)

    @property
    def types(self) -> dict[str, Any]:
        """All keys that are read, with their types."""
        types = {name: kind for key in self.keys for name, kind in key.types.items()}
        more = {self.predictors: Count} if self.predictors else {}
        return {**_COMMON_READ, self.positions: Size, **types, **more}

    @property
    def all_fixed(self) -> Mapping[str, Any]:
        """Keys that have one supported value, those of all families included."""
        read = self.types
        return {k: v for k, v in _COMMON_FIXED.items() if k not in read} | {**self.fixed}

    @property
    def without_influence(self) -> frozenset[str]:
        """Keys that change no logit, those of all families included."""
        return _NEUTRAL | {*self.training, *self.neutral}

    def check_keys(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the names under which its keys are read.

        Raises:
            UserError: For keys that are missing, that have a value which is not supported, or that
                are not known; with their values.
        """
        self._refuse_foreign_code(config)
        self._refuse_quantised(config)
        renamed = _rename_aliases(config, self.aliases)
        required = [name for key in self.keys for name in key.required]
        missing = [name for name in required if renamed.get(name) is None]
        present = [name for key in self.keys for name in key.present]
        if missing := [*missing, *(name for name in present if name not in renamed)]:
            raise UserError(f"{missing[0]} is missing")
        for key, value in self.all_fixed.items():
            if renamed.get(key, value) != value:
                text = make_printable(reprlib.repr(renamed[key]))
                raise UserError(f"{key}={text} is not supported, only {value!r}")
        known = {*self.types, *self.all_fixed, *self.without_influence, "auto_map"}
        known.add("quantization_config")
        if unknown := [key for key in renamed if key not in known]:
            named = ", ".join(
                f"{make_printable(key)}={make_printable(reprlib.repr(renamed[key]))}"
                for key in unknown[:_MAX_NAMED_KEYS]
            )
            more = f" and {len(unknown) - _MAX_NAMED_KEYS} more" * (len(unknown) > _MAX_NAMED_KEYS)
            raise UserError(
                f"{named}{more}: not known here, so the model may compute something else; "
                "remove from config.json what changes nothing in it"
            )
        return renamed

    def list_names(self, layer: Mapping[str, Any]) -> dict[str, str]:
        """Return the modules of a layer with these facts, and those of ours in each."""
        names = {**self.block, **(self.two_norms if layer.get("parallel") == "two_norms" else {})}
        return {name: own for name, own in names.items() if own}

    def list_namings(self) -> Iterator[Family]:
        """Yield this family, and itself with each of the other names that folders may have."""
        yield self
        for names in self.other_names:
            yield self.derive(self.name, self.architecture, also=self.also, **names)

    def has_constant(self, name: str) -> bool:
        """Return whether a parameter of ours has its initial values always, and no tensor there."""
        module = name.rpartition(".")[0]
        return any(module == path or module.endswith(f".{path}") for path in self.constant)

    def count_predictors(self, config: Mapping[str, Any]) -> int:
        """Return the number of layers after the last one that a checked config has."""
        names = [key for key, name in self.aliases.items() if name == self.predictors]
        values = [config.get(key) for key in (self.predictors, *names)]
        return next((value for value in values if value is not None), 0)

    def _refuse_foreign_code(self, config: Mapping[str, Any]) -> None:
        """Raise `UserError` if the config asks for code of the folder that may compute something
        else."""
        code = config.get("auto_map")
        if code is None or (isinstance(code, dict) and code.items() <= self.code.items()):
            return
        raise UserError(
            f"auto_map={make_printable(reprlib.repr(code))} asks for code of the folder, which is "
            f"never run; remove it from config.json if {self.name} of transformers computes the "
            "same"
        )

    def _refuse_quantised(self, config: Mapping[str, Any]) -> None:
        """Raise `UserError` if the weights are in another format than what is read."""
        quantised = config.get("quantization_config")
        if quantised is None:
            return
        is_known = isinstance(quantised, dict) and quantised.keys() <= _QUANTISATION_KEYS
        if self.packed and is_known and quantised.get("quant_method") == MXFP4:
            return
        value = make_printable(reprlib.repr(quantised))
        raise UserError(
            f"quantization_config={value}: the weights are quantised, and only "
            f"floating-point weights{' and MXFP4' * self.packed} are read; save the model "
            "dequantised, without this key"
        )

    def list_training_keys(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each key of a checked config that acts in training alone and has a value
        other than 0."""
        for key in self.training:
            if config.get(key):
                text = make_printable(reprlib.repr(config[key]))
                yield f"{key}={text} acts in training alone, and is not taken over"

    def read_facts(
        self, config: Mapping[str, Any], shapes: Collection[Shape] | None = None
    ) -> Facts:
        """Return the facts that a config states.

        Args:
            config: The content of `config.json`.
            shapes: Those of the model's tensors. No size may be more than they can hold.

        Raises:
            UserError: For anything that is not supported, or of a wrong type.
        """
        try:
            checked = self.check_keys(config)
            check_types(checked, self.types)
            if shapes is not None:
                check_sizes(checked, self.types, shapes)
            facts = start_facts(self._count_layers(checked))
            for path, value in self.own.items():
                if not callable(value):
                    facts.set(path, value)
            for key in self.keys:
                key.read(checked, facts)
            for path, value in self.own.items():
                if callable(value):
                    facts.set(path, value(facts))
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None
        return facts

    def _count_layers(self, config: Mapping[str, Any]) -> int:
        for name in self.layer_lists:
            if config.get(name) is not None:
                if not config[name]:
                    raise UserError(f"{name} lists no layer")
                return len(config[name])
        if self.layer_lists:
            raise UserError(f"{self.layer_lists[-1]} is missing")
        count: int = next(config[name] for name in LAYERS if name in self.types)
        return count

    def read_model(
        self, config: Mapping[str, Any], shapes: Collection[Shape] | None = None
    ) -> ModelConfig:
        """Return the `model` section for a config. The arguments, and what is refused, are those of
        `read_facts`."""
        facts = self.read_facts(config, shapes)
        for path in self.scales.values():
            facts.shared.pop(path, None)
        try:
            return ModelConfig(**build_model(facts), family=self.name)
        except ValidationError as errors:
            error = errors.errors()[0]
            where = ".".join(("model", *map(str, error["loc"])))
            value = reprlib.repr(error["input"])
            raise UserError(f"{self.name}: {where}={value}: {error['msg']}") from None

    def read_scales(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Return the factors of a checked config that our weights get, by module."""
        facts = self.read_facts(config)
        return {module: facts.shared[path] for module, path in self.scales.items()}

    def write_config(self, model: ModelConfig, positions: int) -> Keys:
        """Return the config of the model of this family that computes the same.

        Args:
            model: The `model` section of the config.
            positions: How many tokens of a text the model can see, or was trained to see.

        Raises:
            UserError: If there is none; the message names what differs.
        """
        refuse_parts(model)
        facts = describe_model(model)
        config: Keys = {
            "architectures": [self.architecture],
            "model_type": self.name,
            self.positions: positions,
            **{key: 0.0 for key in self.training if key.endswith(_DROPOUTS)},
            **({self.predictors: 0} if self.predictors else {}),
            **self.fixed,
        }
        for key in self.keys:
            config |= key.write(facts)
        if facts.get("mixer.rotary_scaling.kind") == "dynamic":  # which begins after these
            positions = facts.get("mixer.rotary_scaling.original_length")
        config[self.positions] = positions
        try:
            differing = find_differences(facts, describe_model(self.read_model(config)))
        except UserError as error:
            differing = [str(error)]
        if differing:
            raise UserError(
                f"no {self.name} of Hugging Face matches this config:\n  " + "\n  ".join(differing)
            )
        return config


def refuse_parts(model: ModelConfig) -> None:
    """Raise `UserError` if a model has parts that come from extensions."""
    if parts := [part.name for part in list_parts(model)]:
        raise UserError(
            f"no Hugging Face model has {join_or(dict.fromkeys(parts))}, which come from extensions"
        )


def _rename_aliases(config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in config.items():
        name = aliases.get(key, key)
        if name in config and name != key and config[name] != value:
            text, other = reprlib.repr(value), reprlib.repr(config[name])
            raise UserError(f"{key}={text} and {name}={other} name the same; remove one of them")
        renamed[name] = restore_floats(value)
    return renamed
