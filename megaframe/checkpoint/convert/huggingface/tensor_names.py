"""Which boxes of megaframe's tensors ("ours") each tensor of a Hugging Face model ("theirs") has,
by the names of its family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from megaframe.architecture.spec import ParamSpec
from megaframe.checkpoint.convert.huggingface.family import Family
from megaframe.checkpoint.convert.huggingface.model_facts import MAMBA2_INPUTS, describe_model
from megaframe.checkpoint.convert.huggingface.tensors import (
    ALL,
    HuggingFaceTensor,
    TensorPart,
    make_part,
)
from megaframe.config import ModelConfig


def map_tensors(
    family: Family,
    model: ModelConfig,
    specs: Iterable[ParamSpec],
    scales: Mapping[str, float] | None = None,
) -> Iterator[HuggingFaceTensor]:
    """Yield all tensors of the Hugging Face model that corresponds to `model`.

    Predictors of further tokens are left out, because Hugging Face's code does not run them.

    Args:
        family: Has the names.
        model: The `model` section of the run's config.
        specs: Specs of our parameters.
        scales: Factors of their config that are no part of `model`, by the module of ours whose
            weights are multiplied by them.
    """
    facts, specs_by_name = describe_model(model), {spec.name: spec for spec in specs}
    shared = facts.shared
    ends = _Names(family, shared, {}, specs_by_name, scales or {}, "", "")
    yield from ends.map_all(family.ends)
    for number, layer in enumerate(facts.layers):
        prefix, foreign = f"blocks.{number}.", family.layer.format(number)
        names = _Names(family, shared, layer, specs_by_name, scales or {}, prefix, foreign)
        yield from names.map_all(family.list_names(layer))


_SLICES: dict[str, tuple[str, tuple[slice, ...]]] = {
    **{f"{mlp}.gate": (f"{mlp}.up", (slice(0, 1),)) for mlp in ("mlp", "moe.shared")},
    **{f"{mlp}.up": (f"{mlp}.up", (slice(-1, None),)) for mlp in ("mlp", "moe.shared")},
    "moe.experts.gate": ("moe.experts.up", (slice(0, 1),)),
    "moe.experts.up": ("moe.experts.up", (slice(-1, None),)),
    "moe.experts.gate_up": ("moe.experts.up", (ALL,)),
}
"""Modules of theirs that are a part of one of ours, and which; of experts, of one of them."""


_OF_GROUP = {"attention.query": 0, "attention.key": 1, "attention.value": 2}
"""Parts of a group of heads in the product of queries, keys and values."""
_APART = {
    **{"qkv": (0, 1, 2), "query": (0,), "key": (1,), "value": (2,)},
    **{"gate": (3,), "strength": (4,), "decay": (5,)},
}
"""Products of a delta net's input that are apart, and the widths of a key head that each makes."""
_OF_DELTA_NET = {
    **{f"delta_net.{name}": "delta_net.input" for name in ("small", *_APART)},
    **{f"delta_net.{name}_down": "delta_net.down" for name in ("decay", "gate")},
}
"""Modules of theirs that are parts of a product of a delta net."""
_WHOLE_OF_DELTA_NET = {f"delta_net.{name}" for name in ("norm", "output", "decay_up", "gate_up")}
_QUARTERS = 4
"""Blocks of heads that CodeGen's queries, values and keys lie in, one for each of four devices."""
_HEAD_NORMS, _PER_HEAD = ("attention.query_norm", "attention.key_norm"), "layernorm_per_head"
_MATRICES = ("head_streams.matrix",)
"""Of the names below, those of gains that are matrices."""
_STREAM_PARTS = {"matrix": "weights.weight", "base": "weights.bias", "scale": "scale.gain"}
_WHOLE_NAMES = {
    "attention.sinks": "attention.sinks.logits",
    "compressed.sinks": "compressed_attention.sinks.logits",
    **{
        f"{half}_streams.{part}": f"{half}_streams.{own}"
        for half in ("attention", "mlp")
        for part, own in _STREAM_PARTS.items()
    },
    "head_streams.matrix": "head.streams.gain",
    "head_streams.base": "head.streams.bias",
    "head_streams.scale": "head.streams.scale.gain",
    "layer_scalar": "layer_scalar.gain",
    "streams.scale": "streams.scale.gain",
    "moe.router_norm": "moe.router_norm.gain",
    "moe.expert_gain": "moe.router.gain",
    **{f"mlp.activation.{side}": f"mlp.activation.{side}" for side in ("positive", "negative")},
    **dict.fromkeys(("delta_net.rate", "delta_net.rate_of_4_dims"), "delta_net.decay.rate"),
    "delta_net.step": "delta_net.decay.step",
    "mamba2.rate": "mamba2.decay.rate",
    "mamba2.step": "mamba2.decay.step",
    "mamba2.skip": "mamba2.skip.gain",
}
"""Vectors whose names are not followed by `weight`, and their names here."""


@dataclass(frozen=True)
class _Names:
    """What the names of a family mean at the ends of a model, or in one of its layers.

    Attributes:
        family: Has the names.
        shared: The facts of the model.
        layer: Those of the layer.
        specs: Ours, by name.
        scales: As `map_tensors` has them.
        prefix: Of our names.
        foreign_prefix: Of theirs.
    """

    family: Family
    shared: Mapping[str, Any]
    layer: Mapping[str, Any]
    specs: Mapping[str, ParamSpec]
    scales: Mapping[str, float]
    prefix: str
    foreign_prefix: str

    def map_all(self, names: Mapping[str, str]) -> Iterator[HuggingFaceTensor]:
        """Yield the tensors of those modules of theirs that the model has.

        Args:
            names: Modules of theirs, and the modules of ours that are stacked in each.
        """
        experts = range(self.shared.get("moe.experts", 0))
        for foreign, modules in names.items():
            name, own = f"{self.foreign_prefix}{foreign}", self._choose(modules).split()
            if own[0] in ("moe.balance", "moe.balance_row"):
                yield from self._map_balance(name, own[0] == "moe.balance_row")
            elif own[0] == "moe.table":
                table = self.specs.get(f"{self.prefix}moe.router.table")
                if table is not None:
                    number = self.shared["moe.experts"]
                    yield HuggingFaceTensor(name, (make_part(table),), experts=number)
            elif own[0].endswith(".places"):
                yield from self._map_places(name, own[0])
            elif own[0].startswith("moe.all_experts."):
                own = [module.replace("all_experts", "experts") for module in own]
                yield from self._map_module(name, own, experts, len(experts))
            elif own[0] == "constant":
                yield HuggingFaceTensor(name, (), zeros=(), constant=float(own[1]))
            elif ".convolution" in own[0]:
                yield from self._map_convolution(name, own[0])
            elif own[0] in _HEAD_NORMS and self.layer.get("mixer.qk_norm") == _PER_HEAD:
                yield from self._map_head_norms(name, own[0])
            elif own[0] in _WHOLE_NAMES:
                spec = self.specs.get(f"{self.prefix}{_WHOLE_NAMES[own[0]]}")
                if spec is not None:
                    inner = spec.shape[1:] if own[0] in _MATRICES else ()
                    inner = (1, spec.size, 1) if own[0].endswith("_of_4_dims") else inner
                    yield HuggingFaceTensor(name, (make_part(spec),), inner=inner)
            elif "{stream}" in name or own[0].startswith("streams."):
                yield from self._map_streams(name, own[0])
            elif "{expert}" in name:
                for expert in experts:
                    yield from self._map_module(name.format(expert=expert), own, [expert])
            else:
                yield from self._map_module(name, own, [0])

    def _choose(self, modules: str) -> str:
        """Return the one of several modules of ours that there is, the first if there is none."""
        first, *others = modules.split(" or ")
        has = (m for m in others if self._find_parts(m.split()[0], "weight", 0))
        return next(has, first)

    def _map_balance(self, name: str, is_row: bool) -> Iterator[HuggingFaceTensor]:
        spec = self.specs.get(f"{self.prefix}moe.router.balance")
        if spec is not None and self.shared["moe.balance"] == "bias":
            yield HuggingFaceTensor(name, (make_part(spec),), matrices=int(is_row))
        elif spec is not None:
            row = (1,) if is_row else ()
            yield HuggingFaceTensor(name, (), zeros=(*row, self.shared["moe.experts"]))

    def _map_convolution(self, name: str, module: str) -> Iterator[HuggingFaceTensor]:
        """Yield the factors and the biases of channels: of a delta net those of the queries of all
        heads, of the keys, and of the values, or of one of these; of Mamba-2 those of the inputs of
        all groups, of the keys, and of the queries."""
        module, _, part_name = module.partition(".convolution")
        own = f"{self.prefix}{module}.convolution"
        gain, bias = (self.specs.get(f"{own}.{part}") for part in ("gain", "bias"))
        if gain is not None:
            channels: tuple[slice, ...] = (ALL,)
            if module == "delta_net":
                width = self.layer["mixer.key_dim"]
                own_rows = slice(0, width), slice(width, 2 * width), slice(2 * width, None)
                channels = tuple(own_rows[n] for n in _APART[part_name.removeprefix(".") or "qkv"])
            elif module == "mamba2":
                gate, *rows_of_group = [*self._find_mamba2_rows().values()][:4]
                channels = tuple(
                    slice(rows.start - gate.stop, rows.stop - gate.stop) for rows in rows_of_group
                )
            dims = (ALL,) * (len(gain.shape) - 2)
            parts = tuple(make_part(gain, (*dims, part)) for part in channels)
            yield HuggingFaceTensor(f"{name}.weight", parts, inner=(1, gain.shape[-1]))
            if bias is not None:
                parts = tuple(make_part(bias, (*dims, part)) for part in channels)
                yield HuggingFaceTensor(f"{name}.bias", parts)

    def _map_places(self, name: str, module: str) -> Iterator[HuggingFaceTensor]:
        """Yield the biases of places in windows, which have no name of their own."""
        parts = tuple(self._find_compressed_parts(module, "bias"))
        if parts:
            yield HuggingFaceTensor(name, parts, inner=parts[0].box.shape[1:])

    def _map_streams(self, name: str, module: str) -> Iterator[HuggingFaceTensor]:
        """Yield a gain that is a matrix, or several ones if the name has a place for a number."""
        spec = self.specs.get(f"{self.prefix}{module}.gain")
        if spec is None:
            return
        inner = spec.shape[-1:] if len(spec.shape) > 1 else ()
        places = range(spec.shape[0]) if "{stream}" in name else (None,)
        for stream in places:
            slices = () if stream is None else (slice(stream, stream + 1),)
            full_name = f"{name.format(stream=stream)}.weight"
            yield HuggingFaceTensor(full_name, (make_part(spec, slices),), inner=inner)

    def _map_head_norms(self, name: str, module: str) -> Iterator[HuggingFaceTensor]:
        """Yield the gains of all heads as one tensor, or as one for each if the name has a place
        for its number."""
        spec = self.specs[f"{self.prefix}{module}.gain"]
        heads, width = spec.shape
        if "{head}" in name:
            for head in range(heads):
                part = make_part(spec, (slice(head, head + 1),))
                yield HuggingFaceTensor(f"{name.format(head=head)}.weight", (part,))
        else:
            part = self._interleave(make_part(spec), width)
            yield HuggingFaceTensor(f"{name}.weight", (part,), inner=(width,))

    def _interleave(self, part: TensorPart, head: int) -> TensorPart:
        """Return a part whose heads of this width have interleaved pairs, if theirs do."""
        if not self.family.interleaved:
            return part
        share = self.layer.get("mixer.rotary_fraction", 0.0)
        return replace(part, head=head, rotated=round(share * head))

    def _map_module(
        self, name: str, modules: Sequence[str], experts: Sequence[int], matrices: int = 0
    ) -> Iterator[HuggingFaceTensor]:
        """Yield weight and bias of a module of theirs, if all its modules of ours have one.

        Args:
            name: Of theirs; the whole name of a tensor with several matrices.
            modules: Those of ours.
            experts: Whose matrices they are, if they are of experts.
            matrices: Number of matrices, if theirs has a dim for it.
        """
        for kind in ("weight", "bias"):
            found = [self._find_parts(m, kind, expert) for expert in experts for m in modules]
            parts = tuple(part for parts_of_module in found for part in parts_of_module)
            if found and all(found):
                family = self.family
                transposed = family.transposed_experts if matrices else family.transposed
                turned = transposed and bool(self.layer) and not parts[0].is_vector
                full_name = f"{name}.{kind}"
                is_table = modules[0] == "embedding.positions"
                unread = family.unread_positions if is_table else 0
                if matrices:
                    full_name = name if kind == "weight" else f"{name}_bias"
                yield HuggingFaceTensor(full_name, parts, turned, matrices, unread=unread)
            elif kind == "weight" and modules[0].startswith("moe.shared."):
                yield from self._map_empty_shared(f"{name}.weight", modules[0])

    def _map_empty_shared(self, name: str, module: str) -> Iterator[HuggingFaceTensor]:
        """Yield a matrix without elements, which code has for shared experts without width."""
        if self.family.has_empty_shared and f"{self.prefix}moe.router.weight" in self.specs:
            hidden = self.shared["hidden"]
            shape = (hidden, 0) if module.endswith(".down") else (0, hidden)
            yield HuggingFaceTensor(name, (), zeros=shape)

    def _find_parts(self, module: str, kind: str, expert: int) -> list[TensorPart]:
        """Return the parts of ours that a module stands for; none if the model has none."""
        if module.startswith("latent."):
            return self._find_latent_parts(module, kind)
        if module.startswith("indexer."):
            return self._find_indexer_parts(module, kind)
        if module.startswith("compressed."):
            return self._find_compressed_parts(module, kind)
        if module.startswith("delta_net."):
            return self._find_delta_net_parts(module, kind)
        if module.startswith("mamba2."):
            return self._find_mamba2_parts(module, kind)
        if module == "attention.gated_query":
            return self._find_gated_query_parts(kind)
        if module == "attention.quarters":
            return self._find_quarters(kind)
        own, slices = _SLICES.get(module, (module, ()))
        own = "attention.qkv" if module in _OF_GROUP else own
        if self.layer.get("mixer.shared_keys") and module in _OF_GROUP:
            if module != "attention.query":
                return []
            own, module = module, "attention.queries"
        spec = self.specs.get(f"{self.prefix}{own}.{kind}")
        if kind == "weight" and spec is None:
            spec = self.specs.get(f"{self.prefix}{own}.gain")
        if spec is None:
            return []
        if module == "attention.value" and self.layer.get("mixer.keys_as_values"):
            return []
        if module in _OF_GROUP:
            slices = ALL, self._find_rows_of_group(_OF_GROUP[module])
        of_experts = own.startswith("moe.experts.")
        weight = self.specs[f"{self.prefix}{own}.weight"] if own.endswith(".up") else spec
        if own.endswith(".up") and int(of_experts) not in weight.fused:  # without a gate
            if module.endswith(".gate"):
                return []
            slices = ()
        if of_experts:
            slices = (slice(expert, expert + 1), *slices)
        part = make_part(spec, slices)
        if module.endswith(".gate_up"):
            part = replace(part, head=part.rows, rotated=part.rows)
        if spec.role == "gain":
            part = replace(part, offset=self.family.norm_offset)
        if module in ("attention.query", "attention.queries", "attention.key"):
            part = self._interleave(part, self.layer["mixer.head_dim"])
        return [replace(part, scale=self.scales.get(module, 1.0))]

    def _find_rows_of_group(self, part: int) -> slice:
        """Return where the queries, the key or the value of a group are: heads in a dim of their
        own, or rows if those of values have another width."""
        key, value = (self.layer[f"mixer.{name}"] for name in ("head_dim", "v_head_dim"))
        key, value = (1, 1) if key == value else (key, value)
        if self.layer.get("mixer.keys_as_values"):
            return (slice(0, -key), slice(-key, None), slice(0))[part]
        return (slice(0, -key - value), slice(-key - value, -value), slice(-value, None))[part]

    def _find_gated_query_parts(self, kind: str) -> list[TensorPart]:
        """Return each query head, followed by the gates of its output."""
        qkv = self.specs.get(f"{self.prefix}attention.qkv.{kind}")
        gate = self.specs.get(f"{self.prefix}attention.gate.{kind}")
        if qkv is None or gate is None:
            return []
        parts: list[TensorPart] = []
        for head in range(gate.shape[0]):
            group, member = divmod(head, qkv.shape[1] - 2)
            place = slice(group, group + 1), slice(member, member + 1)
            parts += make_part(qkv, place), make_part(gate, (slice(head, head + 1),))
        return parts

    def _find_quarters(self, kind: str) -> list[TensorPart]:
        """Return for each quarter of the heads their queries, their values and their keys."""
        qkv = self.specs.get(f"{self.prefix}attention.qkv.{kind}")
        if qkv is None:
            return []
        heads, width = qkv.shape[0] // _QUARTERS, qkv.shape[2]
        parts: list[TensorPart] = []
        for quarter in range(_QUARTERS):
            rows = slice(quarter * heads, (quarter + 1) * heads)
            query, key, value = (make_part(qkv, (rows, slice(n, n + 1))) for n in range(3))
            parts += self._interleave(query, width), value, self._interleave(key, width)
        return parts

    def _find_mamba2_parts(self, module: str, kind: str) -> list[TensorPart]:
        """Return the parts of a module of Mamba-2: of the gates, the inputs, the keys or the
        queries of all groups, or of the steps of all heads; or of the norm or the second product.
        """
        name = module.removeprefix("mamba2.")
        own = "input" if name in MAMBA2_INPUTS else name
        spec = self.specs.get(f"{self.prefix}mamba2.{own}.{kind}")
        if kind == "weight" and spec is None:
            spec = self.specs.get(f"{self.prefix}mamba2.{own}.gain")
        if spec is None:
            return []
        where = (ALL, self._find_mamba2_rows()[name]) if name in MAMBA2_INPUTS else ()
        return [replace(make_part(spec, where), scale=self.scales.get(module, 1.0))]

    def _find_mamba2_rows(self) -> dict[str, slice]:
        """Return where the parts of a group are in the rows of Mamba-2's first product."""
        heads, width, groups, state = (
            self.layer[f"mixer.mamba2.{name}"]
            for name in ("heads", "head_dim", "groups", "state_dim")
        )
        inner = heads // groups * width
        sizes = (inner, inner, state, state, heads // groups)
        ends = zip(MAMBA2_INPUTS, accumulate(sizes), sizes, strict=True)
        return {name: slice(end - size, end) for name, end, size in ends}

    def _find_delta_net_parts(self, module: str, kind: str) -> list[TensorPart]:
        """Return the parts of a module of a gated delta net, whose norm has no offset. Theirs has a
        product for strengths and decays, which come last in each group of our rows."""
        own = self.prefix + _OF_DELTA_NET.get(module, module)
        spec = self.specs.get(f"{own}.{kind}")
        if kind == "weight" and spec is None:
            spec = self.specs.get(f"{own}.gain")
        if spec is None or module in _WHOLE_OF_DELTA_NET:
            return [] if spec is None else [make_part(spec)]
        if own.endswith(".down"):
            rank = self.layer.get("mixer.decay_rank", 0)
            is_decay = module == "delta_net.decay_down"
            return [make_part(spec, (slice(0, rank) if is_decay else slice(rank, None),))]
        if module.removeprefix("delta_net.") in _APART:
            return self._find_apart(module, spec)
        small = 2 * self.layer["mixer.value_heads"] // self.layer["mixer.key_heads"]
        is_small = module == "delta_net.small"
        return [make_part(spec, (ALL, slice(-small, None) if is_small else slice(0, -small)))]

    def _find_apart(self, module: str, spec: ParamSpec) -> list[TensorPart]:
        """Return the parts of one of a delta net's products that are apart: of the queries of all
        key heads, their keys and the values, or the gates, the strengths or the decays of all value
        heads."""
        width = self.layer["mixer.key_dim"]
        heads = self.layer["mixer.value_heads"] // self.layer["mixer.key_heads"]
        values = heads * self.layer["mixer.value_dim"]
        gates = 0 if "mixer.gate_rank" in self.layer else values
        sizes = (width, width, values, gates, heads, heads)
        ends = [*accumulate(sizes)]
        rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        numbers = _APART[module.removeprefix("delta_net.")]
        return [make_part(spec, (ALL, rows[number])) for number in numbers]

    def _find_indexer_parts(self, module: str, kind: str) -> list[TensorPart]:
        """Return the part of a module of an indexer: its queries, its key, the norm of that, or the
        weights of its heads."""
        own = {"indexer.weights": "indexer.key"}.get(module, module)
        names = [kind, "gain"] if kind == "weight" else [kind]
        found = (self.specs.get(f"{self.prefix}attention.{own}.{name}") for name in names)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return []
        width, turn = self.shared["indexer.head_dim"], self.shared["latent.rotary_dim"]
        if module == "indexer.weights":
            return [make_part(spec, (slice(width, None),))]
        part = make_part(spec, (slice(0, width),) if module == "indexer.key" else ())
        turn = turn if self.family.interleaved_indexer and self.layer["mixer.rotary"] else 0
        return [replace(part, head=width, rotated=turn)]

    def _find_compressed_parts(self, module: str, kind: str) -> list[TensorPart]:
        """Return the part of a module of attention to compressed keys. In their layout, the rotated
        part of a head follows the rest of it, with its pairs interleaved."""
        module = module.removeprefix("compressed.")
        rank = self.layer["mixer.query_rank"]
        section, _, name = module.rpartition(".")
        rows = {"query_down": slice(0, rank), "key": slice(rank, None)}
        own, where = (module, ()) if section or module not in rows else ("down", (rows[module],))
        if section and name in ("key", "weights"):
            own, where = f"{section}.product", (slice(0, 1) if name == "key" else slice(1, 2),)
        own = {"indexer.head_weights": "indexer.weights"}.get(own, own)
        names = [kind, "gain"] if kind == "weight" else [kind]
        found = (self.specs.get(f"{self.prefix}compressed_attention.{own}.{n}") for n in names)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return []
        part = make_part(spec, where)
        if module in ("query_down", "query_norm", "output", "indexer.head_weights"):
            return [part]
        width = self.layer["mixer.head_dim"]
        turn = round(self.layer.get("mixer.rotary_fraction", 0.0) * width)
        if section == "indexer":
            width = self.layer["mixer.compression.indexer.head_dim"]
        columns = module == "groups"
        return [replace(part, head=width, rotated=turn, last=True, columns=columns)]

    def _find_latent_parts(self, module: str, kind: str) -> list[TensorPart]:
        """Return the parts of a module of latent attention. In their layout, the rotated part of a
        head follows the rest of the head, with its pairs interleaved."""
        query, down = (
            self.specs.get(f"{self.prefix}attention.{n}.{kind}") for n in ("query", "down")
        )
        if query is None or down is None:
            return []
        rank, kv_rank = self.shared["latent.query_rank"] or 0, self.shared["latent.kv_rank"]
        turn = self.shared["latent.rotary_dim"]
        pairs = {"head": turn, "rotated": turn if self.family.interleaved else 0}
        if module == "latent.query_down":
            return [make_part(down, (slice(0, rank),))] if rank else []
        if module == "latent.kv_down":
            latent, rotated = slice(rank, rank + kv_rank), slice(rank + kv_rank, None)
            return [make_part(down, (latent,)), replace(make_part(down, (rotated,)), **pairs)]
        if bool(rank) != (module == "latent.query_up"):
            return []
        parts: list[TensorPart] = []
        for number in range(query.shape[0]):
            head = slice(number, number + 1)
            parts.append(make_part(query, (head, slice(turn, None))))
            parts.append(replace(make_part(query, (head, slice(0, turn))), **pairs))
        return parts
