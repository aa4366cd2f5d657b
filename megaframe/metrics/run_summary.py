"""What a run says first: how large the model is, what computes it, how much data there is, and how
the ranks divide the work. What a first-time user need not know is said later, or only in the run
log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megaframe.architecture.spec import ParamSpec, count_active_parameters, count_parameters
from megaframe.config import DataConfig, TrainConfig
from megaframe.config.batch_ramp import count_samples
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout


def summarize_model(
    train: TrainConfig,
    data: DataConfig,
    layout: Layout,
    specs: Sequence[ParamSpec],
    *,
    start_step: int = 0,
    samples_seen: int = 0,
) -> tuple[str, str, str]:
    """Return the lines that a run and a dry run have in common.

    Args:
        train: What is trained.
        data: With what.
        layout: Its layout.
        specs: Those of the whole model.
        start_step: Number of steps that the run has already done.
        samples_seen: Samples of these steps, whose batch may have been another.

    Returns:
        A line each for the number of parameters, the batch and the layout.
    """
    count, active = count_parameters(specs), count_active_parameters(specs)
    used = "" if active == count else f", {active:,} active per token"
    left = count_samples(train, max(0, train.steps - start_step), samples_seen)
    tokens, whole = (samples_seen + left) * train.seq, "the run"
    if data.phase is not None:
        tokens, whole = data.phases[data.phase.number - 1].tokens, "the phase"
    return (
        f"parameters  {count:,} in {len(specs)} tensors{used}",
        f"batch       {train.global_batch} samples, {train.global_batch * train.seq:,} tokens a "
        f"step, {tokens:,} in {whole}",
        f"layout      {layout}",
    )


def make_opening_lines(
    train: TrainConfig,
    data: DataConfig,
    mesh: Mesh,
    specs: Sequence[ParamSpec],
    sizes: Mapping[str, int],
    *,
    start_step: int,
    samples_seen: int,
) -> list[str]:
    """Return the first lines of a run.

    Args:
        train: What is trained.
        data: With what.
        mesh: That of the run.
        specs: Those of the whole model.
        sizes: The number of training samples of each source; 0 of a stream.
        start_step: Number of steps that the run has already done.
        samples_seen: Samples of these steps.
    """
    parameters, batch, layout = summarize_model(
        train, data, mesh.layout, specs, start_step=start_step, samples_seen=samples_seen
    )
    device = f"device      {_describe_device(mesh.device)}, in {train.precision}"
    tokens = f"data        {_describe_data(train, sizes)}"
    return [parameters, device, tokens, batch, layout]


def _describe_data(train: TrainConfig, sizes: Mapping[str, int]) -> str:
    """Return how much data there is. sizes: see `make_opening_lines`."""
    counts = [size for size in sizes.values() if size]
    count, sources, streams = sum(counts), len(counts), len(sizes) - len(counts)
    parts = []
    if sources:
        parts.append(
            f"{count * train.seq:,} tokens: {count:,} samples of {train.seq} "
            f"in {sources} source{'s' if sources > 1 else ''}"
        )
    if streams:
        parts.append(f"{streams} stream{'s' if streams > 1 else ''} of samples of {train.seq}")
    return ", and ".join(parts)


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)} with {memory / 2**30:.1f} GiB a rank"
    threads = torch.get_num_threads()
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"CPU ({instructions}) with {threads} thread{'s' if threads > 1 else ''} a rank"
