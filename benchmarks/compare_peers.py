"""Runs every comparison with peers on CPUs, and writes their results as one page.

    python benchmarks/compare_peers.py --megatron-python .venv-megatron/bin/python --rounds 2

Each comparison is a script of its own that runs its contenders interleaved. Its measurements are a
file in `results/`, with commit, versions and config. The page and its plot are made from these
files alone (`--page` makes them again).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import ROOT, describe_machine, describe_processor, make_machine_file_name

RESULTS = ROOT / "benchmarks/results"
PAGE, PICTURE = ROOT / "docs/reference/peers.md", ROOT / "docs/images/peers.svg"
OURS = "megaframe"


@dataclass(frozen=True)
class Comparison:
    """A script with the options that select its cases.

    Attributes:
        guide: Page with more about it.
        result: Name of its file. None for what depends on the processor more than on anything
            else, so that each processor has a file of its own.
        peers: Names of the options for the interpreters and checkouts of peers.
        hosts: Whether it emulates hosts, which requires root.
    """

    title: str
    script: str
    guide: str
    result: str | None = None
    peers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    hosts: bool = False

    def make_command(self, arguments: argparse.Namespace) -> list[str]:
        """Return the command line, with the peers that were given."""
        peers = {peer: getattr(arguments, peer) for peer in self.peers}
        places = [f"--{peer.replace('_', '-')}={path}" for peer, path in peers.items() if path]
        counts = [f"--rounds={arguments.rounds}", f"--steps={arguments.steps}"]
        script = str(ROOT / "benchmarks" / self.script)
        return [sys.executable, script, *self.options, *places, *counts, "--write", str(self.file)]

    @property
    def file(self) -> Path:
        """File of its measurements, on this processor if each has its own."""
        if self.result is not None:
            return RESULTS / self.result
        machine = make_machine_file_name(describe_machine())
        return RESULTS / f"{Path(self.script).stem}_{machine}.json"


MEGATRON, DEEPSPEED = "megatron_python", "deepspeed_python"
NANOGPT, HUGGINGFACE = "nanogpt", "huggingface_python"
COMPARISONS = (
    Comparison(
        "One process, two threads",
        "cpu/train_cpu.py",
        "../../benchmarks/README.md",
        peers=(NANOGPT, MEGATRON, HUGGINGFACE),
    ),
    *(
        Comparison(
            f"Data parallelism on {ranks} ranks (the number after a name is the ZeRO stage)",
            "cpu/data_cpu.py",
            "../guides/data.md",
            f"data_cpu_{ranks}_ranks.json",
            (MEGATRON, DEEPSPEED),
            ("--cases", f"{ranks}xfp32", f"{ranks}xbf16"),
        )
        for ranks in (2, 4)
    ),
    Comparison(
        "Data parallelism on 2 hosts of 2 ranks, with links of 800 Mbit/s",
        "network/netlab_peers.py",
        "../guides/data.md",
        "netlab_peers.json",
        (MEGATRON, DEEPSPEED),
        hosts=True,
    ),
    *(
        Comparison(
            f"Tensor parallelism on {ranks} ranks (`seq.`: with sequence parallelism, which "
            "megaframe always uses)",
            "cpu/tensor_cpu.py",
            "../guides/tensor.md",
            f"tensor_cpu_{ranks}_ranks.json",
            (MEGATRON,),
            ("--cases", f"{ranks}xfp32", f"{ranks}xbf16"),
        )
        for ranks in (2, 4)
    ),
    *(
        Comparison(
            f"Pipeline parallelism on {stages} ranks, by vocabulary size",
            "cpu/pipeline_cpu.py",
            "../guides/pipeline.md",
            f"pipeline_cpu_{stages}_stages.json",
            (MEGATRON,),
            ("--cases", f"{stages}x50304", f"{stages}x2048"),
        )
        for stages in (2, 4)
    ),
    Comparison(
        "Context parallelism on 2 and 4 ranks (attention only), by sample length",
        "cpu/context_cpu.py",
        "../guides/tensor.md",
        "context_cpu.json",
    ),
    Comparison(
        "One layer of experts",
        "cpu/experts_cpu.py",
        "../guides/experts.md",
        peers=(HUGGINGFACE,),
    ),
)


def list_measured() -> list[Comparison]:
    """Return the comparisons that have been measured, each on every processor on which it was."""
    measured: list[Comparison] = []
    for comparison in COMPARISONS:
        pattern = comparison.result or f"{Path(comparison.script).stem}_*.json"
        names = sorted(path.name for path in RESULTS.glob(pattern))
        measured.extend(replace(comparison, result=name) for name in names)
    return measured


def read_tables(comparison: Comparison) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the cases of a comparison, each with its contenders in order."""
    for case, part in json.loads(comparison.file.read_text(encoding="utf-8"))["results"].items():
        yield case, part["summary"]


def find_fastest(rows: Sequence[dict[str, Any]], *, ours: bool) -> dict[str, Any]:
    """Return the fastest row of ours, or of the others."""
    chosen = [row for row in rows if row["name"].startswith(OURS) == ours]
    return max(chosen, key=lambda row: float(row["speed"]["median"]))


def format_page() -> str:
    """Return the page as Markdown."""
    parts = [
        "# Compared with other trainers",
        "All contenders train the same model on the same data and machine, interleaved in one run. "
        "Numbers are medians with the range of the rounds; memory is the peak of the largest rank. "
        "`python benchmarks/compare_peers.py` makes this page from the measurements in "
        "`benchmarks/results/`; [benchmarks/README.md](../../benchmarks/README.md) describes what "
        "each script compares, and how. torchtitan is missing, because its trainer (0.3.0) runs on "
        "accelerators only; FSDP2 and torch.compile, which it is built on, are included. The last "
        "column is the speed of the nearest megaframe row above, divided by that of the peer.",
        "![megaframe's fastest variant and the fastest peer](../images/peers.svg)",
    ]
    for comparison in list_measured():
        document = json.loads(comparison.file.read_text(encoding="utf-8"))
        cores = f"{document['machine']['cores']} of {describe_processor(document)}"
        parts.append(
            f"## {comparison.title}\n\nCommit {document['commit'][:8]}, {document['date'][:10]}, "
            f"rounds: {document['config']['rounds']}, threads per process: {document['threads']}, "
            f"cores: {cores}, {list_versions(document)}. [More]({comparison.guide})"
        )
        parts.extend(format_table(case, rows) for case, rows in read_tables(comparison))
    return "\n\n".join(parts) + "\n"


def list_versions(document: dict[str, Any]) -> str:
    """Return the versions of everything that took part."""
    versions: dict[str, str] = {}
    for part in document["results"].values():
        for runs in part["rounds"].values():
            for run in runs:
                versions |= run["versions"]
    return ", ".join(f"{name} {version[:12]}" for name, version in sorted(versions.items()))


def format_table(case: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of one case. The last column of a peer is the speed of the row of ours above
    it over the peer's."""
    reference_speed = float(find_fastest(rows, ours=True)["speed"]["median"])
    lines = [
        f"| {case} | tokens/s | range | peak GB | megaframe / peer |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        speed, is_ours = row["speed"], row["name"].startswith(OURS)
        name = f"**{row['name']}**" if is_ours else row["name"]
        reference_speed = speed["median"] if is_ours else reference_speed
        times = "" if is_ours else f"{reference_speed / speed['median']:.2f}"
        lines.append(
            f"| {name} | {speed['median']:,.0f} | {speed['low']:,.0f}-{speed['high']:,.0f} | "
            f"{row['peak_rss_bytes'] / 1e9:.2f} | {times} |"
        )
    return "\n".join(lines)


def draw(out: Path) -> None:
    """Plot our fastest over the fastest peer, one bar per case."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = OURS  # the same numbers give the same file
    bars = []
    for comparison in list_measured():
        for case, rows in read_tables(comparison):
            ours, peer = (find_fastest(rows, ours=is_ours) for is_ours in (True, False))
            ratio = ours["speed"]["median"] / peer["speed"]["median"]
            title = comparison.title.partition(" (")[0].partition(",")[0]
            bars.append((f"{title}: {case} (peer: {peer['name']})", ratio))
    figure, axis = pyplot.subplots(figsize=(8, 0.27 * len(bars) + 0.6))
    names, ratios = zip(*bars, strict=True)
    colors = ["#0b6e4f" if ratio >= 1 else "#b3541e" for ratio in ratios]
    drawn = axis.barh(names, ratios, color=colors)
    axis.bar_label(drawn, fmt="%.2f", padding=2, fontsize=7)
    axis.axvline(1, color="#666", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_title("megaframe's tokens per second, relative to the fastest peer", fontsize=9)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None}, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each contender")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each run")
    scripts = sorted({entry.script for entry in COMPARISONS})
    parser.add_argument("--only", nargs="+", choices=scripts, default=scripts)
    parser.add_argument("--page", action="store_true", help="only rewrite the page")
    parser.add_argument("--megatron-python", type=Path, help="an interpreter with megatron-core")
    parser.add_argument("--deepspeed-python", type=Path, help="an interpreter with DeepSpeed")
    parser.add_argument("--huggingface-python", type=Path, help="one with transformers, accelerate")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    arguments = parser.parse_args()
    for comparison in () if arguments.page else COMPARISONS:
        if comparison.script in arguments.only:
            print(f"\n{comparison.title}", flush=True)
            if comparison.hosts and os.geteuid():
                print("skipped: emulated hosts need root")
                continue
            subprocess.run(comparison.make_command(arguments), cwd=ROOT, check=True)
    PAGE.write_text(format_page(), encoding="utf-8")
    draw(PICTURE)
    print(f"wrote {PAGE} and {PICTURE}")


if __name__ == "__main__":
    main()
