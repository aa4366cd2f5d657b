"""Rows of published tables as configs: what was trained, on what, by which software, and how long a
step took.

Small tables are written here as figures with their citation. Long ones (vTrain, llm-foundry) are
read from `../shared/anchors` beside the repository, and left out if that is missing
(`PublishedTable.missing_file`). If a paper does not give a size (microbatch, chunks), a row has an
alternative for each likely one. The fastest one is predicted, because whoever tuned the run would
have chosen it.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from megaframe.config import RunConfig
from megaframe.planner.constants import Software

ANCHORS = Path(__file__).resolve().parents[3] / "shared" / "anchors"
"""Folder of the tables that are too long to stand here."""


@dataclass(frozen=True)
class PublishedRun:
    """One measured step. configs: alternatives, only one if everything is published. rivals: rows
    with the same text are layouts of one model on the same ranks."""

    table: str
    label: str
    world: int
    cluster: str
    software: Software
    configs: tuple[RunConfig, ...]
    seconds: float
    rivals: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """A published table of measured steps.

    Attributes:
        name: its name in tests and on the command line.
        source: its name on the page.
        citation: where it is published.
        rows: makes its rows.
        mean, most: goals for the mean and the largest relative error of a step; None without one.
        file: name of its file in `ANCHORS`, if it does not stand in this module.
    """

    name: str
    source: str
    citation: str
    rows: Callable[[], Iterator[PublishedRun]]
    mean: float | None = None
    most: float | None = None
    file: str | None = None

    @property
    def missing_file(self) -> str | None:
        """The file with its rows, relative to the repository, if that is not here."""
        here = self.file is None or (ANCHORS / self.file).exists()
        return None if here else f"../shared/anchors/{self.file}"


# What the trainers do, according to their papers and sources.
MEGATRON_2021 = Software(
    name="Megatron-LM of 2021: masked softmax in one kernel, nothing overlaps",
    fused_attention=False,
    causal_skip=False,
    sequence_parallel=False,
    stream_passes=13.0,  # norms read their rows twice
    inner_passes=3.5,
    gradient_bytes=2,
    overlap_data=False,
    overlap_tensor=False,
    overlap_pipeline=False,
    scatter_pipeline=True,
    selective="attention",
    kernels=36.0,
    backward_kernels=1.0,
    step_kernels=250.0,
    head_backward=True,
    state_bytes=30.0,
    accumulate_bytes=6.0,
    logit_bytes=30.0,
)
MEGATRON_2022 = replace(
    MEGATRON_2021,
    name="Megatron-LM of 2022: weight gradients are added by their products, norms in one pass",
    stream_passes=11.0,
    accumulate_bytes=0.0,
    gradient_bytes=4,
)
MEGATRON_SP = replace(
    MEGATRON_2022,
    name="Megatron-LM of 2022 with sequence parallelism",
    sequence_parallel=True,
)
MEGATRON_2023 = replace(
    MEGATRON_SP,
    name="Megatron-LM of 2023, as MegaScale compares with",
)
MEGASCALE = replace(
    MEGATRON_SP,
    name="MegaScale: parallel blocks, fused kernels, all axes overlap",
    fused_attention=True,
    stream_passes=5.0,  # one norm, one residual
    inner_passes=2.0,
    overlap_data=True,
    overlap_tensor=True,
    overlap_pipeline=True,
    parallel_block=True,
    gradients_of="chunk",  # its section 3.2
    parts=8,
)
MEGATRON_2024 = replace(
    MEGATRON_SP,
    name="Megatron-LM of 2024: fused attention, all axes overlap",
    fused_attention=True,
    causal_skip=True,
    stream_passes=9.0,
    inner_passes=2.0,
    overlap_data=True,
    overlap_tensor=True,
    overlap_pipeline=True,
    gradients_of="chunk",
    parts=8,
    copy_engines=True,
)
ZERO_BUBBLE = replace(
    MEGATRON_2022,
    name="Zero Bubble: transfers beside compute, the update checked afterwards",
    overlap_pipeline=True,
    steps_meet=True,
)
FOUNDRY = Software(
    name="llm-foundry: FSDP of PyTorch, Triton's fused attention",
    fused_attention=True,
    stream_passes=16.0,
    inner_passes=2.0,
    gradient_bytes=2,
    attention_speed=0.6,  # Triton's relative to FlashAttention-2: Dao 2023, figure 4
    selective="attention",
    kernels=30.0,
    head_backward=True,
    logit_bytes=30.0,
)
TITAN = Software(
    name="torchtitan: FSDP2 and torch.compile",
    fused_attention=True,
    stream_passes=10.0,
    inner_passes=2.0,
    gradient_bytes=4,
    selective="attention",
    kernels=20.0,
    head_backward=True,
    overlap_tensor=False,
    logit_bytes=24.0,
)


def gpt(
    layers: int,
    hidden: int,
    heads: int,
    seq: int,
    vocab: int,
    batch: int,
    microbatch: int = 1,
    recompute: str = "none",
    tied: bool = True,
    **parallel: Any,
) -> RunConfig:
    """Return the config of a classic GPT. Data ranks shard nothing unless `zero` is given, as in
    the runs of that time. tied: whether embedding and head share one table."""
    return RunConfig.model_validate(
        {
            "model": {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "vocab": vocab,
                "position": "learned",
                "bias": True,
                "tie_embeddings": tied,
            },
            "parallel": {"zero": 0, **parallel},
            "train": {
                "seq": seq,
                "global_batch": batch,
                "microbatch": microbatch,
                "recompute": recompute,
            },
        }
    )


def _even(layers: int, pipeline: int, chunks: int) -> dict[str, Any]:
    """Return the parallel keys of a pipeline with equal stages."""
    stages = pipeline * chunks
    return {
        "pipeline": pipeline,
        "chunks": chunks,
        "layers_per_stage": (layers // stages,) * stages,
    }


def _interleavings(layers: int, pipeline: int, batch: int, data: int) -> Iterator[tuple[int, int]]:
    """Yield the (microbatch, chunks) that a run may have had: at most 4 samples in a pass, and
    chunks of one layer, as in all of NVIDIA's recipes of that month that have chunks
    (NeMo-Megatron-Launcher on 2 July 2024, gpt3 of 40 and 175 billion parameters and mlperf)."""
    chunks = layers // pipeline if pipeline > 1 else 1
    for microbatch in (1, 2, 4):
        many, rest = divmod(batch, data * microbatch)
        if rest == 0 and many % pipeline == 0:
            yield microbatch, chunks


def full_attention_flops(c: RunConfig, factor: float) -> float:
    """Return the operations of a step as in equation 3 of Narayanan et al.: `factor` B s l h^2 (1 +
    s/6h + V/16lh), with factor 96 with recompute and 72 without (for which the head counts
    V/12lh)."""
    m, s = c.model, c.train.seq
    head = (m.vocab or 0) / ((16 if factor == 96 else 12) * m.layers * m.hidden)
    size = c.train.global_batch * s * m.layers * m.hidden**2
    return factor * size * (1 + s / (6 * m.hidden) + head)


_SC21 = (
    # heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s a GPU with recompute; microbatch
    # and chunks as in examples/sc21/run_table_1.sh of Megatron-LM
    (24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    (32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
    (32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
    (48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
    (64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
    (80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    (96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    (128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    (128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    (160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
)


def read_sc21_table_1() -> Iterator[PublishedRun]:
    for heads, hidden, layers, tensor, pipeline, gpus, batch, tflops, micro, chunks in _SC21:
        data = gpus // (tensor * pipeline)
        config = gpt(
            layers,
            hidden,
            heads,
            2048,
            51200,
            batch,
            micro,
            "full",
            tensor=tensor,
            data=data,
            **_even(layers, pipeline, chunks),
        )
        seconds = full_attention_flops(config, 96) / gpus / tflops / 1e12
        label = f"{12 * layers * hidden**2 / 1e9:.0f}B on {gpus}"
        # Without a pipeline these runs had PyTorch's DDP, which reduces beside backward.
        software = replace(MEGATRON_2021, overlap_data=pipeline == 1)
        yield PublishedRun("sc21_1", label, gpus, "a100-ib", software, (config,), seconds)


_SC21_TWO = (
    # layers, hidden, heads, pipeline, batch, GPUs, microbatch, TFLOP/s a GPU: the rows of PTD-P
    (96, 12288, 96, 12, 1536, 384, 1, 153),
    (96, 12288, 96, 12, 1536, 768, 1, 149),
    (96, 12288, 96, 12, 1536, 1536, 1, 141),
    (105, 20480, 128, 35, 2240, 560, 1, 171),
    (105, 20480, 128, 35, 2240, 1120, 1, 167),
    (105, 20480, 128, 35, 2240, 2240, 1, 159),
)


def read_sc21_table_2() -> Iterator[PublishedRun]:
    for layers, hidden, heads, pipeline, batch, gpus, microbatch, tflops in _SC21_TWO:
        data = gpus // (8 * pipeline)
        config = gpt(
            layers,
            hidden,
            heads,
            2048,
            51200,
            batch,
            microbatch,
            "full",
            tensor=8,
            data=data,
            **_even(layers, pipeline, 1),
        )
        seconds = full_attention_flops(config, 96) / gpus / tflops / 1e12
        label = f"{12 * layers * hidden**2 / 1e9:.0f}B on {gpus}"
        yield PublishedRun("sc21_2", label, gpus, "a100-ib", MEGATRON_2021, (config,), seconds)


_KORTHIKANTI = (
    # name, heads, hidden, layers, pipeline, chunks, GPUs, batch, microbatch, full s, selective s
    ("22B", 64, 6144, 48, 1, 1, 8, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 3, 64, 64, 1, 18.13, 13.75),
    ("530B", 128, 20480, 105, 35, 3, 280, 280, 1, 49.05, 37.83),
    ("1T", 160, 25600, 128, 64, 1, 512, 512, 1, 94.42, 71.49),
)


def read_korthikanti() -> Iterator[PublishedRun]:
    stacks = (("full", MEGATRON_2022), ("selective", MEGATRON_SP))
    # Column by column, so that every other row is every other model of both.
    for (column, (recompute, software)), model in product(enumerate(stacks), _KORTHIKANTI):
        name, heads, hidden, layers, pipeline, chunks, gpus, batch, micro, *times = model
        config = gpt(
            layers,
            hidden,
            heads,
            2048,
            51200,
            batch,
            micro,
            recompute,
            tensor=8,
            data=1,
            **_even(layers, pipeline, chunks),
        )
        label = f"{name}, {recompute} recompute"
        seconds = times[column]
        yield PublishedRun(
            "korthikanti", label, gpus, "a100-ib", software, (config,), seconds, name
        )


_README = (
    # heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s a GPU
    (16, 2048, 24, 1, 1, 48, 192, 408.8),
    (32, 4096, 30, 2, 1, 96, 192, 465.9),
    (48, 6144, 32, 4, 1, 192, 192, 489.1),
    (56, 7168, 48, 8, 1, 384, 192, 459.6),
    (64, 8192, 84, 8, 2, 768, 384, 419.7),
    (80, 10240, 92, 8, 4, 1536, 768, 420.5),
    (96, 12288, 96, 8, 6, 2304, 1152, 432.8),
    (128, 16384, 96, 8, 8, 3072, 1536, 474.4),
    (144, 18432, 112, 8, 16, 6144, 3072, 459.9),
)


def read_megatron_readme() -> Iterator[PublishedRun]:
    for heads, hidden, layers, tensor, pipeline, gpus, batch, tflops in _README:
        configs = tuple(
            gpt(
                layers,
                hidden,
                heads,
                4096,
                131072,
                batch,
                microbatch,
                "none",
                tied=False,  # 1.7 to 462 billion parameters, as published, are with two tables
                tensor=tensor,
                data=48,
                zero=1,
                **_even(layers, pipeline, chunks),
            )
            for microbatch, chunks in _interleavings(layers, pipeline, batch, 48)
        )
        seconds = full_attention_flops(configs[0], 72) / gpus / tflops / 1e12
        label = f"{12 * layers * hidden**2 / 1e9:.0f}B on {gpus}"
        yield PublishedRun("readme", label, gpus, "h100-ib", MEGATRON_2024, configs, seconds)


_MEGASCALE = (
    # batch, software, seconds by GPUs: in the order of the paper
    (768, MEGATRON_2023, {256: 40.0, 512: 21.2, 768: 15.2, 1024: 11.9}),
    (768, MEGASCALE, {256: 32.0, 512: 16.5, 768: 11.5, 1024: 8.9}),
    (6144, MEGATRON_2023, {3072: 29.02, 6144: 14.78, 8192: 12.24, 12288: 8.57}),
    (6144, MEGASCALE, {3072: 23.66, 6144: 12.21, 8192: 9.56, 12288: 6.34}),
)


def read_megascale() -> Iterator[PublishedRun]:
    for batch, software, times in _MEGASCALE:
        for gpus, seconds in times.items():
            config = gpt(
                96,
                12288,
                128,
                2048,
                64000,
                batch,
                1,
                "selective",
                tensor=8,
                data=gpus // 64,
                zero=1,
                **_even(96, 8, 6),
            )
            name = "MegaScale" if software is MEGASCALE else "Megatron-LM"
            label = f"{name}, {batch} on {gpus}"
            yield PublishedRun("megascale", label, gpus, "a100-ib", software, (config,), seconds)


_ZERO_BUBBLE_VOCAB = 32000
"""Not published. With 27 to 35 thousand, counted once, layers and widths add up to 14.6 and 28.3
billion parameters."""
_ZERO_BUBBLE = {
    # layers, heads, hidden, pipeline, microbatch, chunks when interleaved
    "1.5B": (22, 24, 2304, 8, 6, 3),
    "6.2B": (30, 32, 4096, 8, 3, 4),
    "14.6B": (46, 40, 5120, 16, 1, 3),
    "28.3B": (62, 48, 6144, 32, 1, 2),
}
_ZERO_BUBBLE_SAMPLES = {
    # samples a second and GPU with 3, 4 and 8 microbatches for each rank: 1F1B, interleaved, ZB-1p
    # (H1), ZB-2p (H2)
    "1.5B": ((11.8, 12.5, 13.6), (13.1, 13.4, 13.9), (12.9, 13.4, 14.2), (14.5, 14.8, 14.9)),
    "6.2B": ((3.5, 3.7, 4.03), (4.01, 4.08, 4.19), (3.88, 4.0, 4.2), (4.32, 4.35, 4.39)),
    "14.6B": ((1.4, 1.49, 1.64), (1.54, 1.59, 1.66), (1.61, 1.67, 1.76), (1.81, 1.83, 1.85)),
    "28.3B": ((0.76, 0.8, 0.88), (0.82, 0.85, 0.9), (0.87, 0.9, 0.96), (0.99, 1.0, 1.0)),
}


def read_zero_bubble() -> Iterator[PublishedRun]:
    for name, (layers, heads, hidden, ranks, microbatch, chunks) in _ZERO_BUBBLE.items():
        schedules = ("1f1b", "interleaved", "zb-h1", "zb-h2")
        for schedule, speeds in zip(schedules, _ZERO_BUBBLE_SAMPLES[name], strict=True):
            for each, speed in zip((3, 4, 8), speeds, strict=True):
                many = each * ranks
                parts = chunks if schedule == "interleaved" else 1
                stages = ranks * parts
                counts = [(layers + 2) // stages] * stages
                counts[0] -= 1  # embedding and head stand for a layer each
                counts[-1] -= 1
                config = gpt(
                    layers,
                    hidden,
                    heads,
                    1024,
                    _ZERO_BUBBLE_VOCAB,
                    many * microbatch,
                    microbatch,
                    "none",
                    pipeline=ranks,
                    data=1,
                    chunks=parts,
                    schedule=schedule,
                    layers_per_stage=tuple(counts),
                )
                seconds = many * microbatch / (speed * ranks)
                rivals = f"{name}, {many} microbatches"
                yield PublishedRun(
                    "zero_bubble",
                    f"{rivals}, {schedule}",
                    ranks,
                    "a100-ib",
                    ZERO_BUBBLE if schedule.startswith("zb") else MEGATRON_2022,
                    (config,),
                    seconds,
                    rivals,
                )


def _read(name: str) -> list[dict[str, str]]:
    path = ANCHORS / name
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _vtrain(name: str, recompute: str, cluster: str, table: str) -> Iterator[PublishedRun]:
    for one in _read(name):
        number = {key: float(value) for key, value in one.items()}
        gpus, batch, micro, hidden, heads, layers, seq, tensor, data, pipeline = (
            int(number[key])
            for key in (
                "# GPUs",
                "global batch",
                "micro batch",
                "hidden size",
                "attention heads",
                "# layers",
                "sequence length",
                "tensor parallelism",
                "data parallelism",
                "pipeline parallelism",
            )
        )
        config = gpt(
            layers,
            hidden,
            heads,
            seq,
            51200,
            batch,
            micro,
            recompute,
            tensor=tensor,
            data=data,
            **_even(layers, pipeline, 1),
        )
        # Measured with Megatron-DeepSpeed (data/README.md of VIA-Research/vTrain), whose layers
        # were those of Megatron-LM of 2021 until July 2023.
        rivals = f"{layers} layers of {hidden}, {batch} on {gpus}"
        label = f"{rivals}, {micro} a pass, t{tensor} d{data} p{pipeline}"
        seconds = number["iteration time (ms)"] / 1e3
        yield PublishedRun(table, label, gpus, cluster, MEGATRON_2021, (config,), seconds, rivals)


def read_vtrain_single() -> Iterator[PublishedRun]:
    return _vtrain("vtrain_single_a100.csv", "none", "a100-ethernet", "vtrain_single")


def read_vtrain_multi() -> Iterator[PublishedRun]:
    return _vtrain("vtrain_multi_a100.csv", "full", "a100-half-ib", "vtrain_multi")


_FOUNDRY_SHAPES = {
    # layers, hidden, heads
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def read_llm_foundry() -> Iterator[PublishedRun]:
    for one in _read("llm_foundry_h100_a100.csv"):
        layers, hidden, heads = _FOUNDRY_SHAPES[one["model"]]
        gpus, seq, batch = int(one["gpus"]), int(one["seq"]), int(one["gbs"])
        h100 = one["gpu"].startswith("h100")
        fp8 = one["precision"] == "amp_fp8"
        software = replace(
            FOUNDRY,
            products="fp8" if fp8 else None,
            gradient_bytes=2 if one["mp_mode"] == "PURE" else 4,
        )
        recompute = "full" if one["act_ckpt"] == "True" else "none"
        config = gpt(
            layers,
            hidden,
            heads,
            seq,
            50368,
            batch,
            int(one["mbs"]),
            recompute,
            data=gpus,
            zero=3 if one["sharding"] == "FULL_SHARD" else 2,
        )
        seconds = batch * seq / float(one["tok_s"])
        label = f"{one['model']} of {seq} on {gpus} {one['gpu'][:4]}{' fp8' * fp8}"
        cluster = "h100-ib" if h100 else "a100-40gb-roce" if "40gb" in one["gpu"] else "a100-ib"
        yield PublishedRun("llm_foundry", label, gpus, cluster, software, (config,), seconds)


_TITAN_8B: tuple[tuple[int, str, float], ...] = (
    # GPUs, type, tokens/s a GPU
    (8, "bf16", 6667),
    (8, "fp8", 8532),
    (128, "bf16", 6514),
    (128, "fp8", 8380),
)


def read_torchtitan() -> Iterator[PublishedRun]:
    for gpus, kind, speed in _TITAN_8B:
        config = _llama(32, 4096, 32, 14336, 2 * gpus, 2, "selective", data=gpus, zero=3)
        software = replace(TITAN, products="fp8") if kind == "fp8" else TITAN
        yield PublishedRun(
            "torchtitan",
            f"8B {kind} on {gpus}",
            gpus,
            "h100-500w-ib",
            software,
            (config,),
            2 * 8192 / speed,
        )
    for kind, overlap, speed in (
        ("bf16", False, 597.3),
        ("bf16", True, 652.4),
        ("fp8", False, 829),
        ("fp8", True, 876),
    ):
        config = _llama(80, 8192, 64, 28672, 512, 16, "full", tensor=8, data=32, zero=3)
        software = replace(TITAN, products="fp8" if kind == "fp8" else None, overlap_tensor=overlap)
        software = replace(software, parts=8 if overlap else None)
        label = f"70B {kind}{', async tensor' * overlap} on 256"
        seconds = 16 * 8192 * 32 / (speed * 256)
        yield PublishedRun("torchtitan", label, 256, "h100-500w-ib", software, (config,), seconds)


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    batch: int,
    micro: int,
    recompute: str,
    **parallel: Any,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "kv_heads": 8,
                "ffn": ffn,
                "vocab": 128256,
                "norm": "rmsnorm",
                "activation": "swiglu",
            },
            "parallel": parallel,
            "train": {
                "seq": 8192,
                "global_batch": batch,
                "microbatch": micro,
                "recompute": recompute,
            },
        }
    )


_NARAYANAN = (
    "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using "
    "Megatron-LM, SC21, arXiv:2104.04473"
)
_BANG = (
    "Bang et al., vTrain: A Simulation Framework for Evaluating Cost-Effective and Compute-Optimal "
    "Large Language Model Training, MICRO 2024, arXiv:2312.12391; github.com/VIA-Research/vTrain"
)
TABLES: Mapping[str, PublishedTable] = {
    table.name: table
    for table in (
        PublishedTable(
            "sc21_1",
            "Narayanan et al. 2021, table 1",
            _NARAYANAN,
            read_sc21_table_1,
            mean=0.025,
            most=0.06,
        ),
        PublishedTable(
            "sc21_2",
            "Narayanan et al. 2021, table 2, rows of PTD-P",
            _NARAYANAN,
            read_sc21_table_2,
        ),
        PublishedTable(
            "korthikanti",
            "Korthikanti et al. 2022, table 5",
            "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, "
            "MLSys 2023, arXiv:2205.05198",
            read_korthikanti,
            mean=0.03,
            most=0.06,
        ),
        PublishedTable(
            "readme",
            "Megatron-LM, README of July 2024",
            "github.com/NVIDIA/Megatron-LM, README.md",
            read_megatron_readme,
            mean=0.025,
            most=0.06,
        ),
        PublishedTable(
            "megascale",
            "Jiang et al. 2024, table 2",
            "Jiang et al., MegaScale: Scaling Large Language Model Training to More Than 10,000 "
            "GPUs, NSDI 2024, arXiv:2402.15627",
            read_megascale,
            mean=0.05,
            most=0.10,
        ),
        PublishedTable(
            "zero_bubble",
            "Qi et al. 2023, table 4",
            "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241",
            read_zero_bubble,
        ),
        PublishedTable(
            "torchtitan",
            "Liang et al. 2024, tables 1-2; torchtitan, June 2025",
            "Liang et al., TorchTitan: One-stop PyTorch Native Solution for Production Ready LLM "
            "Pre-training, ICLR 2025, arXiv:2410.06511; github.com/pytorch/torchtitan",
            read_torchtitan,
        ),
        PublishedTable(
            "llm_foundry",
            "llm-foundry, scripts/train/benchmarking",
            "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md",
            read_llm_foundry,
            mean=0.05,
            file="llm_foundry_h100_a100.csv",
        ),
        PublishedTable(
            "vtrain_single",
            "Bang et al. 2024, validation on one node",
            _BANG,
            read_vtrain_single,
            mean=0.08,
            file="vtrain_single_a100.csv",
        ),
        PublishedTable(
            "vtrain_multi",
            "Bang et al. 2024, validation on 64 nodes",
            _BANG,
            read_vtrain_multi,
            mean=0.06,
            file="vtrain_multi_a100.csv",
        ),
    )
}
