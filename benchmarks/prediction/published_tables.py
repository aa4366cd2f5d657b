"""Published tables of measured steps, with their citations and goals.

The rows of small tables are figures in `published_runs.py`. Long ones (vTrain, llm-foundry) are
read from `../shared/anchors` beside the repository, and left out if that is missing
(`PublishedTable.missing_file`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published_configs import divide_evenly, make_gpt_config
from published_runs import (
    PublishedRun,
    read_korthikanti,
    read_megascale,
    read_megatron_readme,
    read_sc21_table_1,
    read_sc21_table_2,
    read_torchtitan,
    read_zero_bubble,
)

from megaframe.config import RunConfig
from megaframe.planner.trainers import FOUNDRY, MEGATRON_2021, NEMO_2025

ANCHORS = Path(__file__).resolve().parents[3] / "shared" / "anchors"
"""Folder of the tables that are too long to stand here."""


@dataclass(frozen=True)
class PublishedTable:
    """A published table of measured steps.

    Attributes:
        name: Its name in tests and on the command line.
        source: Its name on the page.
        citation: Where it is published.
        rows: Makes its rows.
        mean, most: Goals for the mean and the largest relative error of a step; None without one.
        file: Name of its file in `ANCHORS`, if it does not stand in this module.
        measured: Whether its rows were measured; to others nothing is fitted.
    """

    name: str
    source: str
    citation: str
    rows: Callable[[], Iterator[PublishedRun]]
    mean: float | None = None
    most: float | None = None
    file: str | None = None
    measured: bool = True

    @property
    def missing_file(self) -> str | None:
        """The file with its rows, relative to the repository, if that is not here."""
        is_present = self.file is None or (ANCHORS / self.file).exists()
        return None if is_present else f"../shared/anchors/{self.file}"


def _read_csv(name: str, comments: int = 0) -> list[dict[str, str]]:
    path = ANCHORS / name
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as stream:
        for _ in range(comments):
            next(stream)
        return list(csv.DictReader(stream))


def _read_vtrain(name: str, recompute: str, cluster: str, table: str) -> Iterator[PublishedRun]:
    for row in _read_csv(name):
        number = {key: float(value) for key, value in row.items()}
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
        config = make_gpt_config(
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
            **divide_evenly(layers, pipeline, 1),
        )
        # Measured with Megatron-DeepSpeed (data/README.md of VIA-Research/vTrain), whose layers
        # were those of Megatron-LM of 2021 until July 2023.
        rivals = f"{layers} layers of {hidden}, {batch} on {gpus}"
        label = f"{rivals}, {micro} a pass, t{tensor} d{data} p{pipeline}"
        seconds = number["iteration time (ms)"] / 1e3
        yield PublishedRun(table, label, gpus, cluster, MEGATRON_2021, (config,), seconds, rivals)


def read_vtrain_single() -> Iterator[PublishedRun]:
    return _read_vtrain("vtrain_single_a100.csv", "none", "a100-ethernet", "vtrain_single")


def read_vtrain_multi() -> Iterator[PublishedRun]:
    return _read_vtrain("vtrain_multi_a100.csv", "full", "a100-half-ib", "vtrain_multi")


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
    for row in _read_csv("llm_foundry_h100_a100.csv"):
        layers, hidden, heads = _FOUNDRY_SHAPES[row["model"]]
        gpus, seq, batch = int(row["gpus"]), int(row["seq"]), int(row["gbs"])
        h100 = row["gpu"].startswith("h100")
        fp8 = row["precision"] == "amp_fp8"
        software = replace(
            FOUNDRY,
            products="fp8" if fp8 else None,
            gradient_bytes=2 if row["mp_mode"] == "PURE" else 4,
        )
        recompute = "full" if row["act_ckpt"] == "True" else "none"
        config = make_gpt_config(
            layers,
            hidden,
            heads,
            seq,
            50368,
            batch,
            int(row["mbs"]),
            recompute,
            data=gpus,
            zero=3 if row["sharding"] == "FULL_SHARD" else 2,
        )
        seconds = batch * seq / float(row["tok_s"])
        label = f"{row['model']} of {seq} on {gpus} {row['gpu'][:4]}{' fp8' * fp8}"
        cluster = "h100-ib" if h100 else "a100-40gb-roce" if "40gb" in row["gpu"] else "a100-ib"
        yield PublishedRun("llm_foundry", label, gpus, cluster, software, (config,), seconds)


_NEMO_2024 = replace(
    NEMO_2025,
    name="NeMo 24.12, as in nemo_megatron/gpt3_175b_hydra.yaml",
    deferred_heads=0.0,
    logit_bytes=52.0,  # cross_entropy_loss_fusion is off
    scatter_units=21.0,  # proj_fprop 24 and fc2_fprop 20, by their work
)
"""Software of the rows of GPT-3; those of Llama 3.1 are NeMo 25.02 (llama3.1/launch.sh, v25.04)."""


def read_dgxc() -> Iterator[PublishedRun]:
    for row in _read_csv("dgxc_h100_sxm.csv", comments=1):
        number = {key: int(value) for key, value in row.items() if key not in ("model", "seconds")}
        tensor, pipeline, context = number["tensor"], number["pipeline"], number["context"]
        kinds: dict[str, Any] = {"position": "learned", "bias": True, "tie_embeddings": True}
        software = _NEMO_2024
        if row["model"].startswith("llama"):
            kinds = {"norm": "rmsnorm", "activation": "swiglu"}
            software = NEMO_2025
        sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
        gpus = number["gpus"]
        parallel = {
            "tensor": tensor,
            "context": context,
            "data": gpus // (tensor * pipeline * context),
            "zero": 1,
            **divide_evenly(number["layers"], pipeline, number["chunks"]),
        }
        config = RunConfig.model_validate(
            {
                "model": {**kinds, **{key: number[key] for key in sizes}},
                "parallel": parallel,
                "train": {key: number[key] for key in ("seq", "global_batch", "microbatch")},
            }
        )
        label, seconds = f"{row['model']} on {gpus}", float(row["seconds"])
        yield PublishedRun("dgxc", label, gpus, "h100-ib", software, (config,), seconds)


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
            "dgxc",
            "NVIDIA DGX Cloud Benchmarking, tags v25.02 to v25.05",
            "github.com/NVIDIA/dgxc-benchmarking",
            read_dgxc,
            mean=0.05,
            most=0.10,
            file="dgxc_h100_sxm.csv",
        ),
        PublishedTable(
            "vtrain_single",
            "Bang et al. 2024, validation on one node",
            _BANG,
            read_vtrain_single,
            mean=0.08,
            file="vtrain_single_a100.csv",
            measured=False,  # computed by its authors' simulator, as the page shows
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
