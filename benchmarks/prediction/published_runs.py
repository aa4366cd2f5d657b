"""Rows of small published tables as runs: what was trained, on what, by which software, and the
seconds of a step.

If a paper does not give a size (microbatch, chunks), a row has an alternative for each likely one.
The fastest one is predicted, because whoever tuned the run would have chosen it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from published_configs import (
    count_full_attention_flops,
    divide_evenly,
    list_interleavings,
    make_gpt_config,
    make_llama_config,
)

from megaframe.config import RunConfig
from megaframe.planner.constants import Software
from megaframe.planner.trainers import (
    MEGASCALE,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2023,
    MEGATRON_2024,
    MEGATRON_SP,
    TITAN,
    ZERO_BUBBLE,
)


@dataclass(frozen=True)
class PublishedRun:
    """One measured step.

    Attributes:
        configs: Alternatives, only one if everything is published.
        rivals: Rows with the same text are layouts of one model on the same ranks.
    """

    table: str
    label: str
    world: int
    cluster: str
    software: Software
    configs: tuple[RunConfig, ...]
    seconds: float
    rivals: str = ""


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
        config = make_gpt_config(
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
            **divide_evenly(layers, pipeline, chunks),
        )
        seconds = count_full_attention_flops(config, 96) / gpus / tflops / 1e12
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
        config = make_gpt_config(
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
            **divide_evenly(layers, pipeline, 1),
        )
        seconds = count_full_attention_flops(config, 96) / gpus / tflops / 1e12
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
        config = make_gpt_config(
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
            **divide_evenly(layers, pipeline, chunks),
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
            make_gpt_config(
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
                **divide_evenly(layers, pipeline, chunks),
            )
            for microbatch, chunks in list_interleavings(layers, pipeline, batch, 48)
        )
        seconds = count_full_attention_flops(configs[0], 72) / gpus / tflops / 1e12
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
            config = make_gpt_config(
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
                **divide_evenly(96, 8, 6),
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
                config = make_gpt_config(
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


_TITAN_8B: tuple[tuple[int, str, float], ...] = (
    # GPUs, type, tokens/s a GPU
    (8, "bf16", 6667),
    (8, "fp8", 8532),
    (128, "bf16", 6514),
    (128, "fp8", 8380),
)


def read_torchtitan() -> Iterator[PublishedRun]:
    for gpus, kind, speed in _TITAN_8B:
        config = make_llama_config(32, 4096, 32, 14336, 2 * gpus, 2, "selective", data=gpus, zero=3)
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
        config = make_llama_config(80, 8192, 64, 28672, 512, 16, "full", tensor=8, data=32, zero=3)
        software = replace(TITAN, products="fp8" if kind == "fp8" else None, overlap_tensor=overlap)
        software = replace(software, parts=8 if overlap else None)
        label = f"70B {kind}{', async tensor' * overlap} on 256"
        seconds = 16 * 8192 * 32 / (speed * 256)
        yield PublishedRun("torchtitan", label, 256, "h100-500w-ib", software, (config,), seconds)
