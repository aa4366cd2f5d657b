"""What a measured critical batch says about `train.global_batch`, `train.batch_ramp` and
`optim.lr`.

With noise scale C, a run with batch B needs 1 + B/C times the fewest tokens and 1 + C/B times the
fewest steps (McCandlish et al. 2018, An Empirical Model of Large-Batch Training, section 2.3). A
learning rate grows with the batch under SGD and with its root under optimizers that divide by the
size of gradients (Malladi et al. 2022, On the SDEs and Scaling Rules for Adaptive Gradient
Algorithms), up to about the critical batch.
"""

from __future__ import annotations

from dataclasses import dataclass

_FAR = 2.0
"""Factor between batch and critical batch from which another batch is worth a try."""


@dataclass(frozen=True)
class BatchSettings:
    """What a run has chosen.

    Attributes:
        samples: `train.global_batch`.
        seq: Tokens of a sample.
        optimizer: Its name.
        lr: `optim.lr`.
    """

    samples: int
    seq: int
    optimizer: str
    lr: float

    def scale_learning_rate(self, samples: int) -> tuple[str, float]:
        """Return how the learning rate follows the batch, in words, and that for a batch of so many
        samples."""
        factor = samples / self.samples
        if self.optimizer == "sgd":
            return "as the batch", self.lr * factor
        return "as the root of the batch", self.lr * factor**0.5


def advise_batch(settings: BatchSettings, critical: float | None) -> str:
    """Return a sentence about the batch of a run.

    Args:
        settings: Those of the run.
        critical: The measured critical batch in tokens; None if it is not known.
    """
    if critical is None:
        return (
            "not known: the measured steps do not average out the noise of their gradients; "
            "measure more of them, and expect it to be larger than the batch"
        )
    batch = settings.samples * settings.seq
    ratio = critical / batch
    text = (
        f"{critical:,.0f} tokens; with train.global_batch={settings.samples} ({batch:,} tokens) a "
        f"loss takes {1 + 1 / ratio:.3g} times the fewest tokens and {1 + ratio:.3g} times the "
        "fewest steps"
    )
    if ratio > _FAR:
        return f"{text}; {_advise_larger(settings, ratio)}"
    if ratio < 1 / _FAR:
        return f"{text}; {_advise_smaller(settings, critical)}"
    return f"{text}, a fair exchange"


def _advise_larger(settings: BatchSettings, ratio: float) -> str:
    samples = settings.samples << (int(ratio).bit_length() - 1)
    words, lr = settings.scale_learning_rate(samples)
    return (
        f"more ranks can share a step: train.global_batch={samples} with optim.lr={lr:.3g}, which "
        f"grows {words}"
    )


def _advise_smaller(settings: BatchSettings, critical: float) -> str:
    samples = max(1, round(critical / settings.seq))
    words, lr = settings.scale_learning_rate(samples)
    return (
        f"tokens can be saved: train.global_batch={samples} with optim.lr={lr:.3g}, which falls "
        f"{words}, or a train.batch_ramp from there, as the critical batch grows while the loss "
        "falls"
    )
