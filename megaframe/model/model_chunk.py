"""ModelChunk: the layers of one pipeline stage, without what runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.spec import Growth, ParamSpec
from megaframe.architecture.stages import StagePlan
from megaframe.architecture.width_growth import measure_growths
from megaframe.config import ModelConfig, TrainConfig
from megaframe.errors import UserError
from megaframe.model.block import EmulatedBlock, TransformerBlock
from megaframe.model.embedding import Embedding
from megaframe.model.layer_inputs import LayerSetup
from megaframe.model.output_head import PostProcess
from megaframe.parameters.parameter import Module, Parameter


class ModelChunk:
    """The blocks of `plan`, plus the embedding on the first stage, and the predictors and the head
    on the last.

    Attributes:
        plan: Which part of the model this is.
        embedding: The embedding; None except on the first stage.
        blocks: The blocks, in order.
        post_process: What follows the last block; None except on the last stage.
        units: The parts whose parameters are reduced, updated and gathered together, in the order
            of the forward pass.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        plan: StagePlan,
        setup: LayerSetup,
        embedding: Embedding | None = None,
    ) -> None:
        """Make the layers. Their parameters have no memory yet.

        Args:
            model: The section `model`.
            train: The section `train`.
            plan: Which part of the model this is.
            setup: What the run fixes for the layers.
            embedding: The embedding of another stage on this rank, for the head and the predictors.
        """
        self.plan = plan
        self.embedding = Embedding(model, train.seq, setup) if plan.first else None
        emulate = model.emulate
        self.blocks: list[TransformerBlock | EmulatedBlock] = [
            TransformerBlock(describe_block(model, layer), layer, setup)
            if emulate is None
            else EmulatedBlock(emulate)
            for layer in plan.blocks
        ]
        self.post_process = (
            PostProcess(model, train, self.embedding or embedding, setup) if plan.last else None
        )
        first = [] if self.embedding is None else [self.embedding]
        last = [] if self.post_process is None else self.post_process.units
        self.units: list[Module] = [*first, *self.blocks, *last]
        if model.parametrisation == "mup":
            self._set_growths(measure_growths(model))

    def parameters(self) -> list[Parameter]:
        """Return all parameters in order, without repeating those that units share."""
        # A tied head and its embedding share a parameter; a dict keeps the order.
        return list({p: None for unit in self.units for p in unit.parameters()})

    def _set_growths(self, growths: Mapping[str, Growth]) -> None:
        for parameter in self.parameters():
            name = parameter.spec.name
            if name not in growths:
                raise UserError(
                    f"model.parametrisation=mup knows no widths of {name}, which its layer has and "
                    "its description does not declare; compare them with tools/check_layers.py"
                )
            parameter.spec = replace(parameter.spec, growth=growths[name])


def build_chunks(
    model: ModelConfig, train: TrainConfig, plans: Iterable[StagePlan], setup: LayerSetup
) -> dict[int, ModelChunk]:
    """Return the chunks of one rank by the number of their stage. If the first and the last stage
    are both on this rank, the last one uses the first one's embedding."""
    chunks: dict[int, ModelChunk] = {}
    for plan in sorted(plans, key=lambda plan: plan.stage_index):
        # In order of stages, so that the first stage exists before the last one asks for its
        # embedding.
        embedding = chunks[0].embedding if 0 in chunks else None
        chunks[plan.stage_index] = ModelChunk(model, train, plan, setup, embedding)
    return chunks


def build_whole_model_chunk(
    model: ModelConfig, train: TrainConfig, setup: LayerSetup
) -> ModelChunk:
    """Return the whole model as one chunk."""
    recomputed = model.layers if train.recompute == "full" else 0
    plan = StagePlan(0, 1, range(model.layers), recomputed)
    return ModelChunk(model, train, plan, setup)


def list_model_specs(model: ModelConfig, train: TrainConfig) -> list[ParamSpec]:
    """Return the specs of all parameters of the whole model, in order. Allocates nothing."""
    chunk = build_whole_model_chunk(model, train, LayerSetup())
    return [parameter.spec for parameter in chunk.parameters()]
