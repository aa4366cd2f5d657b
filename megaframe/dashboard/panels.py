"""The panels of the page: what each shows, and which metrics it is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """A panel of the page.

    Attributes:
        kind: Lines, bars, waterfall, heat, or outcome: the runs over a key in which they differ.
        keys: Metrics drawn as lines; a key that ends with a slash stands for all metrics with this
            prefix.
        scale: Factor on values.
    """

    id: str
    title: str
    kind: str
    keys: tuple[str, ...] = ()
    unit: str = ""
    scale: float = 1.0
    help: str = ""
    log: bool = False

    def shows(self, name: str) -> bool:
        """Return whether this is the name of a metric that the panel draws."""
        return any(name.startswith(k) if k.endswith("/") else name == k for k in self.keys)


PANELS = (
    Panel(
        "waterfall", "Where the peak went", "waterfall", unit="% of peak",
        help="From 100% of the devices' peak down to the MFU: each bar is what one cause costs.",
    ),
    Panel("outcome", "Runs by a key in which they differ", "outcome"),
    Panel("loss", "Loss", "lines", ("loss", "mtp_loss"), "nats per token"),
    Panel("evaluation", "Evaluation", "lines", ("eval_loss",), "nats per token"),
    Panel("bits", "Evaluation in bits", "lines", ("eval_bits_per_byte",), "bits per byte"),
    Panel(
        "evaluation_sources", "Evaluation by source", "lines", ("eval_losses/",), "nats per token",
    ),
    Panel(
        "evaluation_source_bits", "Evaluation by source in bits", "lines",
        ("eval_bits_per_byte_of/",), "bits per byte",
    ),
    Panel("tasks", "Scores of tasks", "lines", ("eval_tasks/",)),
    Panel("lr", "Learning rate", "lines", ("lr",)),
    Panel("grad_norm", "Gradient norm", "lines", ("grad_norm",), log=True),
    Panel(
        "gradient_noise", "Critical batch", "lines", ("gradient_noise/critical_batch",), "tokens",
        help="Batch from which more tokens a step bring little: the measured noise scale of the "
        "gradients, averaged over the measurements so far.",
    ),
    Panel("tokens", "Tokens per second", "lines", ("tokens_per_second",), "tokens/s"),
    Panel("tflops", "TFLOP/s per device", "lines", ("tflops_per_second",), "TFLOP/s"),
    Panel(
        "mfu", "MFU and HFU", "lines", ("mfu", "hfu", "mfu_full_attention"), "% of peak", 100.0,
        "HFU counts what recompute does again; full attention counts the half that causal "
        "attention leaves out.",
    ),
    Panel(
        "time", "Time of a step", "lines", ("time/",), "ms", 1000.0,
        "The parts of a step sum to it; communication is only what nothing overlapped.",
    ),
    Panel(
        "stragglers", "Ranks: work beyond the median", "heat", unit="%",
        help="How much longer than the median of its step each rank worked, waits not counted.",
    ),
    Panel("stages", "Work and bubble by pipeline rank", "bars", unit="ms a step"),
    Panel("memory", "Peak memory", "lines", ("memory_bytes",), "GiB", 2.0**-30),
    Panel(
        "allocator", "Memory of a GPU's allocator", "lines", ("allocator/",), "GiB", 2.0**-30,
        "Reserved is what it took from the GPU; fragmented is what of it lay in pieces that it "
        "could neither use nor return. Both are peak values.",
    ),
    Panel("memory_ranks", "Memory by kind and rank", "bars", unit="GiB"),
    Panel("bytes", "Sent by a rank in a step", "lines", ("bytes/",), "MiB", 2.0**-20),
    Panel("bandwidth", "Bandwidth where something waited", "lines", ("bandwidth/",), "GB/s", 1e-9),
    Panel(
        "experts", "Load of experts", "heat", unit="of the mean",
        help="Tokens of each expert over the mean of its layer, at the last step that has them.",
    ),
    Panel("expert_load", "Most loaded expert by layer", "heat", unit="of the mean"),
    Panel("sources", "Data sources", "bars", unit="samples"),
)  # fmt: skip
