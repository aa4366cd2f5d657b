"""Maps each tensor of a Hugging Face model ("theirs") to boxes of megaframe's tensors ("ours").

A tensor of theirs is a matrix that stacks some of our boxes, each flattened to outputs x inputs.
There are two exceptions: GPT-2's matrices are transposed, and DeepSeek interleaves the rows of
rotary pairs, i next to i + D/2, while ours keep the two halves apart. Export and import both use
this mapping.

Shape legend: O rows, I columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.architecture.moe import has_experts
from megaframe.architecture.spec import Box, ParamSpec
from megaframe.checkpoint.convert.huggingface.families import find_family
from megaframe.checkpoint.convert.huggingface.same_model import simplify_model
from megaframe.config import ModelConfig


@dataclass(frozen=True)
class TensorPart:
    """A box of one of our tensors, as a matrix of `rows` rows.

    Attributes:
        pairs: Whether theirs interleaves its rows in rotary pairs.
    """

    spec: ParamSpec
    box: Box
    pairs: bool = False

    @property
    def rows(self) -> int:
        """Number of rows of the matrix. A vector has one element per row."""
        outputs = self.box.shape[: len(self.box.shape) - self._inputs]
        return torch.Size(outputs).numel()

    @property
    def is_vector(self) -> bool:
        """Whether theirs has one dim."""
        return not self._inputs

    @property
    def _inputs(self) -> int:
        return self.spec.inputs if self.spec.role in ("matrix", "embedding", "head") else 0

    def to_hugging_face(self, tensor: Tensor) -> Tensor:
        """Convert the contents of the box to their layout: [O, I], or [O] for a vector."""
        flat = tensor.reshape(self.rows, -1) if self._inputs else tensor.reshape(-1)
        if self.pairs:
            flat = flat.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        return flat

    def from_hugging_face(self, tensor: Tensor) -> Tensor:
        """Convert rows in their layout to the contents of the box."""
        if self.pairs:
            tensor = tensor.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        return tensor.reshape(self.box.shape)


@dataclass(frozen=True)
class HuggingFaceTensor:
    """A tensor of a Hugging Face model: the parts that are stacked in it.

    Attributes:
        zeros: Shape of a tensor of zeros, which has no parts: it is written, and what a folder has
            under this name is not read.
    """

    name: str
    parts: tuple[TensorPart, ...]
    transposed: bool = False
    zeros: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of their tensor."""
        if self.zeros is not None:
            return self.zeros
        rows = sum(part.rows for part in self.parts)
        if self.parts[0].is_vector:
            return (rows,)
        columns = sum(part.box.size for part in self.parts) // rows
        return (columns, rows) if self.transposed else (rows, columns)

    def join(self, boxes: Sequence[Tensor]) -> Tensor:
        """Build their tensor from the contents of our boxes, in the order of the parts."""
        if self.zeros is not None:
            return torch.zeros(self.zeros)
        rows = [part.to_hugging_face(box) for part, box in zip(self.parts, boxes, strict=True)]
        tensor = torch.cat(rows) if len(rows) > 1 else rows[0]
        return (tensor.t() if self.transposed else tensor).contiguous()

    def split(self, tensor: Tensor) -> Iterator[tuple[TensorPart, Tensor]]:
        """Split their tensor into the contents of our boxes. Its number of rows must match the
        parts; otherwise torch raises RuntimeError."""
        rows = tensor.t() if self.transposed else tensor
        row_blocks = rows.split([part.rows for part in self.parts])
        for part, rows_of_part in zip(self.parts, row_blocks, strict=True):
            yield part, part.from_hugging_face(rows_of_part)


def map_tensors(model: ModelConfig, specs: Iterable[ParamSpec]) -> Iterator[HuggingFaceTensor]:
    """Yield all tensors of the Hugging Face model that corresponds to `model`.

    Predictors of further tokens are left out, because Hugging Face's code does not run them.

    Args:
        model: The `model` section of the run's config.
        specs: Specs of our parameters.
    """
    names = _PartBuilder({spec.name: spec for spec in specs})
    model = simplify_model(model)
    gpt2 = find_family(model) == "gpt2"
    yield from _map_gpt2_ends(names) if gpt2 else _map_ends(names)
    for layer in range(model.layers):
        yield from _map_gpt2_block(names, layer) if gpt2 else _map_block(names, model, layer)


class _PartBuilder:
    """Our specs by name. Builds parts of them."""

    def __init__(self, specs: Mapping[str, ParamSpec]) -> None:
        self._specs = specs

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def make_part(self, name: str, *index: int | slice, pairs: bool = False) -> TensorPart:
        """Return the part of a tensor that an index of ints and plain slices selects, dim by
        dim."""
        spec = self._specs[name]
        offset, shape = [0] * len(spec.shape), list(spec.shape)
        for dim, where in enumerate(index):
            span = slice(where, where + 1) if isinstance(where, int) else where
            start, stop, _ = span.indices(spec.shape[dim])
            offset[dim], shape[dim] = start, stop - start
        return TensorPart(spec, Box(tuple(offset), tuple(shape)), pairs)

    def map_one(
        self, foreign_name: str, name: str, *, transposed: bool = False
    ) -> HuggingFaceTensor:
        """Return a tensor of theirs that equals one of ours, except for transposition."""
        return HuggingFaceTensor(foreign_name, (self.make_part(name),), transposed)


_ALL = slice(None)


def _map_ends(names: _PartBuilder) -> Iterator[HuggingFaceTensor]:
    yield names.map_one("model.embed_tokens.weight", "embedding.tokens.weight")
    yield names.map_one("model.norm.weight", "head.norm.gain")
    if "head.weight" in names:
        yield names.map_one("lm_head.weight", "head.weight")


def _map_gpt2_ends(names: _PartBuilder) -> Iterator[HuggingFaceTensor]:
    yield names.map_one("transformer.wte.weight", "embedding.tokens.weight")
    yield names.map_one("transformer.wpe.weight", "embedding.positions.weight")
    for name, foreign_name in (("gain", "weight"), ("bias", "bias")):
        yield names.map_one(f"transformer.ln_f.{foreign_name}", f"head.norm.{name}")
    if "head.weight" in names:
        yield names.map_one("lm_head.weight", "head.weight")


def _map_gpt2_block(names: _PartBuilder, layer: int) -> Iterator[HuggingFaceTensor]:
    prefix, foreign_prefix = f"blocks.{layer}", f"transformer.h.{layer}"
    for kind, norm in (("attention", "ln_1"), ("mlp", "ln_2")):
        for name, foreign_name in (("gain", "weight"), ("bias", "bias")):
            yield names.map_one(
                f"{foreign_prefix}.{norm}.{foreign_name}", f"{prefix}.{kind}_norm.{name}"
            )
    for kind in ("weight", "bias"):
        matrix = kind == "weight"
        qkv = f"{prefix}.attention.qkv.{kind}"
        parts = tuple(names.make_part(qkv, _ALL, number) for number in range(3))
        yield HuggingFaceTensor(f"{foreign_prefix}.attn.c_attn.{kind}", parts, matrix)
        for name, foreign_name in (
            ("attention.output", "attn.c_proj"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        ):
            yield names.map_one(
                f"{foreign_prefix}.{foreign_name}.{kind}",
                f"{prefix}.{name}.{kind}",
                transposed=matrix,
            )


def _map_block(names: _PartBuilder, model: ModelConfig, layer: int) -> Iterator[HuggingFaceTensor]:
    prefix, foreign_prefix = f"blocks.{layer}", f"model.layers.{layer}"
    yield names.map_one(f"{foreign_prefix}.input_layernorm.weight", f"{prefix}.attention_norm.gain")
    yield names.map_one(
        f"{foreign_prefix}.post_attention_layernorm.weight", f"{prefix}.mlp_norm.gain"
    )
    attention = _map_attention if model.latent is None else _map_latent_attention
    yield from attention(names, model, f"{prefix}.attention", f"{foreign_prefix}.self_attn")
    if model.moe is not None and has_experts(model.moe, layer):
        yield from _map_experts(names, model, f"{prefix}.moe", foreign_prefix)
    else:
        yield from _map_mlp(names, f"{prefix}.mlp", f"{foreign_prefix}.mlp")


def _map_attention(
    names: _PartBuilder, model: ModelConfig, prefix: str, foreign_prefix: str
) -> Iterator[HuggingFaceTensor]:
    groups = model.heads // model.kv_heads
    for kind in ("weight", "bias"):
        qkv = f"{prefix}.qkv.{kind}"
        if qkv not in names:
            continue
        for letter, heads in (("q", slice(0, groups)), ("k", groups), ("v", groups + 1)):
            yield HuggingFaceTensor(
                f"{foreign_prefix}.{letter}_proj.{kind}", (names.make_part(qkv, _ALL, heads),)
            )
    yield names.map_one(f"{foreign_prefix}.o_proj.weight", f"{prefix}.output.weight")
    for name, foreign_name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        if f"{prefix}.{name}.gain" in names:
            yield names.map_one(f"{foreign_prefix}.{foreign_name}.weight", f"{prefix}.{name}.gain")


def _map_latent_attention(
    names: _PartBuilder, model: ModelConfig, prefix: str, foreign_prefix: str
) -> Iterator[HuggingFaceTensor]:
    """Map latent attention. In their layout, the rotated part of a head follows the rest of the
    head, with its pairs interleaved."""
    latent = model.latent
    assert latent is not None
    rank, down = latent.query_rank or 0, f"{prefix}.down.weight"
    rotated = rank + latent.kv_rank
    if rank:
        yield HuggingFaceTensor(
            f"{foreign_prefix}.q_a_proj.weight", (names.make_part(down, slice(0, rank)),)
        )
        yield names.map_one(f"{foreign_prefix}.q_a_layernorm.weight", f"{prefix}.query_norm.gain")
    yield HuggingFaceTensor(
        f"{foreign_prefix}.kv_a_proj_with_mqa.weight",
        (
            names.make_part(down, slice(rank, rotated)),
            names.make_part(down, slice(rotated, None), pairs=True),
        ),
    )
    yield names.map_one(f"{foreign_prefix}.kv_a_layernorm.weight", f"{prefix}.kv_norm.gain")
    parts: list[TensorPart] = []
    for head in range(model.heads):
        query, turn = f"{prefix}.query.weight", latent.rotary_dim
        parts.append(names.make_part(query, head, slice(turn, None)))
        parts.append(names.make_part(query, head, slice(0, turn), pairs=True))
    yield HuggingFaceTensor(
        f"{foreign_prefix}.{'q_b_proj' if rank else 'q_proj'}.weight", tuple(parts)
    )
    yield names.map_one(f"{foreign_prefix}.kv_b_proj.weight", f"{prefix}.kv.weight")
    yield names.map_one(f"{foreign_prefix}.o_proj.weight", f"{prefix}.output.weight")


def _map_mlp(names: _PartBuilder, prefix: str, foreign_prefix: str) -> Iterator[HuggingFaceTensor]:
    for number, name in enumerate(("gate_proj", "up_proj")):
        yield HuggingFaceTensor(
            f"{foreign_prefix}.{name}.weight", (names.make_part(f"{prefix}.up.weight", number),)
        )
    yield names.map_one(f"{foreign_prefix}.down_proj.weight", f"{prefix}.down.weight")


def _map_experts(
    names: _PartBuilder, model: ModelConfig, prefix: str, foreign_prefix: str
) -> Iterator[HuggingFaceTensor]:
    assert model.moe is not None
    mixtral = find_family(model) == "mixtral"
    foreign_prefix += ".block_sparse_moe" if mixtral else ".mlp"
    yield names.map_one(f"{foreign_prefix}.gate.weight", f"{prefix}.router.weight")
    if find_family(model) == "deepseek_v3":
        name = f"{foreign_prefix}.gate.e_score_correction_bias"
        if model.moe.balance == "bias":
            yield names.map_one(name, f"{prefix}.router.balance")
        else:
            yield HuggingFaceTensor(name, (), zeros=(model.moe.experts,))
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for expert in range(model.moe.experts):
        name = f"{foreign_prefix}.experts.{expert}"
        for number, other in enumerate((gate, up)):
            part = names.make_part(f"{prefix}.experts.up.weight", expert, number)
            yield HuggingFaceTensor(f"{name}.{other}.weight", (part,))
        yield HuggingFaceTensor(
            f"{name}.{down}.weight", (names.make_part(f"{prefix}.experts.down.weight", expert),)
        )
    if model.moe.shared:
        yield from _map_mlp(names, f"{prefix}.shared", f"{foreign_prefix}.shared_experts")
    elif model.latent is not None:  # DeepSeek's code then has shared experts without width
        names_and_shapes = {"gate": (0, model.hidden), "up": (0, model.hidden)}
        for name, shape in {**names_and_shapes, "down": (model.hidden, 0)}.items():
            foreign_name = f"{foreign_prefix}.shared_experts.{name}_proj.weight"
            yield HuggingFaceTensor(foreign_name, (), zeros=shape)
