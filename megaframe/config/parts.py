"""Parts that extensions bring: the bases of their config sections, and what a part can be.

An extension is a Python file or package that `run.extensions` names. Its function `register` gives
each part to the registry (`megaframe/config/registry.py`). A part is a config section, so its keys
are typed, documented and checked like our own, with methods that describe it or make its torch
code. Nothing here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from megaframe.config.section import Section
from megaframe.schedule.named import SCHEDULE_NAMES
from megaframe.schedule.named_schedule import NamedSchedule

Activation = Literal[
    "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu", "geglu", "swiglu_clamped"
]
"""Our own activations."""


class Part(Section, ABC):
    """Base of all sections of extensions. Each has a key `kind: Literal["NAME"] = "NAME"`, whose
    docstring says what the part is."""

    @classmethod
    def get_name(cls) -> str:
        """Return the name by which a config asks for the part; empty if it has none."""
        kind = cls.model_fields.get("kind")
        name = None if kind is None else kind.default
        return name if isinstance(name, str) else ""

    @property
    def name(self) -> str:
        """The name by which a config asks for the part."""
        return self.get_name()


class OptimizerPart(Part):
    """An optimizer that changes each element on its own, from its gradient and its moments; so it
    is the same under every layout and ZeRO stage.

    Attributes:
        scales_like: What an update grows with, as `model.parametrisation=mup` must know: not at all
            with the gradient (`adamw`), or in proportion to it (`sgd`). None if that is not known.
    """

    scales_like: ClassVar[Literal["adamw", "sgd"] | None] = None

    @abstractmethod
    def count_moments(self) -> int:
        """Return how many numbers are remembered for each element. The plan counts them."""

    @abstractmethod
    def make_transforms(self, optim: Any, rates: Any, storage: Any) -> list[Any]:
        """Return what updates a group of parameters: `UpdateTransform`s of
        `megaframe.optim.elementwise`.

        Args:
            optim: The section `optim`.
            rates: Rates of the parameter group (`GroupRates`).
            storage: How moments are stored (`MomentStorage`): `signed` and `square` are the codecs
                for moments of either sign, and for those that are not negative.
        """


class SchedulePart(Part):
    """A learning-rate schedule after the warm-up."""

    @abstractmethod
    def compute_share(self, update: int, warmup: int, steps: int) -> float:
        """Return where the rate is between `optim.min_lr` (0) and `optim.lr` (1).

        Args:
            update: Number of the update, from 0; at least `warmup`.
            warmup: Updates of the warm-up.
            steps: Updates of the whole run.
        """


class MixerPart(Part):
    """What mixes the tokens of a sample: the key `mixer` of a block in `model.blocks`."""

    @abstractmethod
    def describe(self, model: Any, output_std: float) -> Any:
        """Return what the layer is made of: a `MixerDescription`.

        Args:
            model: The section `model`.
            output_std: Standard deviation of the initial values of a matrix whose results are added
                to the stream.
        """


class FeedForwardPart(Part):
    """What treats every token alone: the key `feed_forward` of a block in `model.blocks`."""

    @abstractmethod
    def describe(self, model: Any, output_std: float) -> Any:
        """Return what the layer is made of: a `FeedForwardDescription`. The arguments are those of
        `MixerPart.describe`."""


class LossPart(Part):
    """The loss of a token in training: the key `train.loss`. It is summed over the tokens that have
    a label and divided by their number, like ours; evaluations stay cross-entropy."""

    @abstractmethod
    def compute_losses(self, logits: Any, labels: Any, vocabulary: Any) -> Any:
        """Return the loss of each token, [T], as torch code that autograd can differentiate.

        It is the same on all ranks, except that each has its own part of the logits: whatever is
        computed from all words goes through `vocabulary`.

        Args:
            logits: Those of this rank's part of the vocabulary, after `model.logit_softcap`: fp32,
                or fp64 in fp64 runs, [T, V].
            labels: A word for each token, int64 [T]. What is returned for a token without a label
                is left out.
            vocabulary: Picks and sums logits over the parts of all ranks (`Vocabulary` of
                `megaframe.model.vocabulary`).
        """

    def count_logit_tensors(self) -> int:
        """Return how many tensors as large as the logits exist at once while they are turned into
        their gradient, besides the logits. The plan counts them, for a small part of a chunk."""
        return 6


class DataTransformPart(Part):
    """Changes samples after they are read: an item of the list `data.transforms`."""

    @abstractmethod
    def transform(self, sample: Any, random: Any) -> Any:
        """Return a sample with other tokens and labels, as many as before.

        Args:
            sample: A `Sample` of `megaframe.data.transforms`.
            random: A numpy `Generator`, the only source of randomness. It follows from `run.seed`,
                the number of the sample in the training order and the place in the list, so the
                result is the same under any layout and after a resume.
        """

    def includes_validation(self) -> bool:
        """Return whether samples of the validation split are changed too, each time in the same
        way, whatever `run.seed` is."""
        return False


class PipelineSchedulePart(Part, NamedSchedule):
    """A pipeline schedule: the key `parallel.schedule`. It says what our own say of themselves; its
    closed forms are given numpy arrays by a search of layouts, and are compared with what it builds
    before a run or a plan begins."""


class CallbackPart(Part):
    """What is called between the steps of a run: an item of the list `run.callbacks`."""

    @abstractmethod
    def make_callback(self, config: Any) -> Any:
        """Return the object whose methods are called: a `Callback` of `megaframe.extensions`. It is
        made on the first rank only, and made again when the run goes back to a checkpoint.

        Args:
            config: The whole config.
        """


class SinkPart(Part):
    """What takes the metrics of each step: an item of the list `metrics.sinks`."""

    @abstractmethod
    def make_sink(self, config: Any, folder: Path, start_step: int) -> Any:
        """Return the object that takes the lines: a `Sink` of `megaframe.extensions`. It is made on
        the first rank only, at each start of the run.

        Args:
            config: The whole config.
            folder: That of the run.
            start_step: Steps that the run has already done; the next line is that of the step
                after.
        """


class NormPart(Part):
    """A norm of the residual stream: the key `model.norm`."""

    @abstractmethod
    def describe(self, model: Any) -> Any:
        """Return what the norm is made of: a `NormDescription`.

        Args:
            model: The section `model`; the norm is of rows of `model.hidden` elements.
        """


class ActivationPart(Part):
    """An activation of MLPs and experts: the key `model.activation`, or `activation` of an MLP in
    `model.blocks`."""

    gated: ClassVar[bool] = False
    """Whether it has two inputs, gate and up. The first product is then twice as wide."""

    @abstractmethod
    def count_saved(self) -> int:
        """Return how many elements autograd keeps for each element of the result, besides this and
        the input."""

    @abstractmethod
    def compute(self, *inputs: Any) -> Any:
        """Return the result, a tensor like each input, element by element.

        Args:
            inputs: The outputs of the first product; if gated, gate and up.
        """


@dataclass(frozen=True)
class Role:
    """What a part can be.

    Attributes:
        base: The class that its section is derived from.
        key: Where a config names it.
        ours: The names that are taken.
    """

    base: type[Part]
    key: str
    ours: tuple[str, ...] = ()


ROLES: dict[str, Role] = {
    "mixer": Role(
        MixerPart,
        "model.blocks: mixer",
        (
            *("attention", "latent", "compressed_attention", "gated_delta_net"),
            *("gated_short_convolution", "mamba2", "none"),
        ),
    ),
    "feed_forward": Role(FeedForwardPart, "model.blocks: feed_forward", ("mlp", "moe", "none")),
    "norm": Role(NormPart, "model.norm", ("layernorm", "rmsnorm")),
    "activation": Role(ActivationPart, "model.activation", tuple(get_args(Activation))),
    "optimizer": Role(OptimizerPart, "optim.name", ("adamw", "muon", "lion", "sgd")),
    "schedule": Role(
        SchedulePart, "optim.schedule", ("constant", "cosine", "linear", "wsd", "inverse_sqrt")
    ),
    "pipeline_schedule": Role(PipelineSchedulePart, "parallel.schedule", SCHEDULE_NAMES),
    "loss": Role(LossPart, "train.loss", ("cross_entropy",)),
    "data_transform": Role(DataTransformPart, "data.transforms"),
    "sink": Role(SinkPart, "metrics.sinks"),
    "callback": Role(CallbackPart, "run.callbacks"),
}
"""By name."""
